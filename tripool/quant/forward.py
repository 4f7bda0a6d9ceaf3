"""Runs the engine's model over texts, as it is or in INT8 arithmetic by its definition.

For INT8 the model's own forward pass runs in float32, with weights that are whole multiples of their scales and every
row quantised just before a product that would be INT8. Products of such numbers are exact in float32 but for the last
bits of long sums, so what comes out is what INT8 kernels compute. It is slow, and meant for measuring accuracy.

T tokens · D model width
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tripool.engine.batch import Batch
from tripool.engine.cache import BlockCache
from tripool.engine.checkpoint import Checkpoint
from tripool.engine.model.deepseek import DeepseekModel
from tripool.engine.model.layout import weight_plan
from tripool.engine.model.moe import Experts
from tripool.engine.model.stored import as_stored
from tripool.engine.parallel.exchange import LocalExchange
from tripool.engine.weights import load_weights
from tripool.quant.scales import per_token

BLOCK_TOKENS = 16
BATCH_TOKENS = 2048


class Model:
    """A whole model in float32; tensors that are INT8 in its folder are multiplied as INT8, with rows quantised.

    But latent expansions, whose rows stay floats.
    """

    def __init__(self, checkpoint: Checkpoint, *, threads: int = 2) -> None:
        plan = weight_plan(checkpoint.shape)
        weights = load_weights(checkpoint, plan, torch.float32, threads=threads).tensors
        storages = set()
        for spec in as_stored(plan, checkpoint):
            if spec.dtype == "int8" and not spec.is_expansion:
                # Laid out as the engine packs them, so that it keeps this storage, by which a product is known.
                weights[spec.name] = weights[spec.name].mT.clone(memory_format=torch.contiguous_format).mT
                storages.add(weights[spec.name].untyped_storage().data_ptr())
        self.engine = DeepseekModel(checkpoint.shape, weights, LocalExchange(), plain=True)
        for block in self.engine.moe_blocks:
            if block is not None and isinstance(block.experts, Experts):
                block.experts.small = False        # one expert after another: each product sees one expert's rows
        self.storages = frozenset(storages)

    def hidden(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Final hidden states of all tokens, text after text."""
        batch, num_blocks = _batch(texts)
        cache = BlockCache(self.engine.shape, num_blocks, BLOCK_TOKENS, self.engine.dtype)
        with Int8Products(self.storages) if self.storages else nullcontext():
            return self.engine.forward(batch, cache)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        with Int8Products(self.storages) if self.storages else nullcontext():
            return self.engine.logits(hidden_ND)

    def answers_exactly(self, asked: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[bool]:
        """For each prompt and answer: whether greedy decoding gives the answer, every token of it the likeliest."""
        right: list[bool] = []
        answers = [answer for _, answer in asked]
        for part in in_batches([[*prompt, *answer] for prompt, answer in asked]):
            likeliest_T = self.logits(self.hidden(part)).argmax(-1)
            for text, likeliest in zip(part, likeliest_T.split([len(text) for text in part]), strict=True):
                answer = answers[len(right)]
                right.append(likeliest[len(text) - len(answer) - 1:-1].tolist() == list(answer))
        return right

    def perplexity(self, texts: Sequence[Sequence[int]]) -> float:
        """Of all tokens but the first of each text."""
        total, count = 0.0, 0
        for part in in_batches(texts):
            logit_TV = self.logits(self.hidden(part))
            start = 0
            for text in part:
                target = torch.tensor(text[1:])
                total += float(F.cross_entropy(logit_TV[start:start + len(text) - 1], target, reduction="sum"))
                count += len(text) - 1
                start += len(text)
        return math.exp(total / max(1, count))


class Int8Products(TorchFunctionMode):
    """Within it, what is multiplied by certain weights is quantised first."""

    def __init__(self, storages: frozenset[int]) -> None:
        super().__init__()
        self.storages = storages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[1].untyped_storage().data_ptr() in self.storages:
            args = (per_token(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def in_batches(texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Texts together, up to a number of tokens."""
    part: list[Sequence[int]] = []
    for text in texts:
        if part and sum(map(len, part)) + len(text) > BATCH_TOKENS:
            yield part
            part = []
        part.append(text)
    if part:
        yield part


@contextmanager
def runs_seen(owner: Any, see: Any) -> Iterator[None]:
    """While it lasts, `see(stage, inputs, result)` is told of every stage that a part of the model runs."""
    run = owner.run

    def seen(stage: Any, *inputs: Any) -> Any:
        result = run(stage, *inputs)
        see(stage, inputs, result)
        return result

    owner.run = seen
    try:
        yield
    finally:
        owner.run = run


def _batch(texts: Sequence[Sequence[int]]) -> tuple[Batch, int]:
    counts = [len(text) for text in texts]
    blocks = [-(-count // BLOCK_TOKENS) for count in counts]
    table_RB = torch.zeros(len(texts), max(blocks), dtype=torch.int64)
    first = 0
    for row, num in enumerate(blocks):
        table_RB[row, :num] = torch.arange(first, first + num)
        first += num
    return Batch(
        token_T=torch.tensor([token for text in texts for token in text]),
        first_R=[0] * len(texts), count_R=counts, num_decode_rows=0, block_table_RB=table_RB), first
