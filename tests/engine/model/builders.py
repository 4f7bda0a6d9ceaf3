"""Models with random weights, and ways to cut a prompt into batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import random_tensors
from tripool.core.placement import Placement, even_geometry, initial_placement
from tripool.core.shape import ModelShape, model_shape
from tripool.engine.batch import Batch
from tripool.engine.cache import BlockCache
from tripool.engine.model.deepseek import DeepseekModel
from tripool.engine.model.layout import moe_layers, weight_plan
from tripool.engine.parallel.exchange import Exchange, LocalExchange

BLOCK_TOKENS = 16


def even_placement(shape: ModelShape, num_ranks: int) -> Placement:
    return initial_placement(even_geometry(num_ranks, shape.num_routed_experts), len(moe_layers(shape)))


def fused_weights(shape: ModelShape, tensors: Mapping[str, Tensor], rank: int = 0, num_ranks: int = 1,
                  dtype: torch.dtype = torch.float32, placement: Placement | None = None) -> dict[str, Tensor]:
    """The plan of a rank, filled by copying."""
    weights = {}
    for spec in weight_plan(shape, placement or even_placement(shape, num_ranks), rank):
        weight = torch.zeros(spec.shape, dtype=torch.float32 if spec.dtype == "float32" else dtype)
        for source in spec.sources:
            assert weight[source.into].shape == source.shape, source
            assert weight[source.into].is_contiguous(), source
            weight[source.into] = tensors[source.tensor].to(weight.dtype)
        weights[spec.name] = weight
    return weights


def build_model(config: Mapping[str, Any], *, tensors: Mapping[str, Tensor] | None = None, deterministic: bool = False,
                exchange: Exchange | None = None, rank: int = 0, num_ranks: int = 1,
                dtype: torch.dtype = torch.float32, drafts: bool = False) -> DeepseekModel:
    shape = model_shape(config)
    weights = fused_weights(shape, tensors or random_tensors(dict(config)), rank, num_ranks, dtype)
    return DeepseekModel(shape, weights, exchange or LocalExchange(), deterministic=deterministic, drafts=drafts)


def random_tokens(count: int, *, vocab: int = 320, seed: int = 0) -> list[int]:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def new_cache(model: DeepseekModel, num_blocks: int = 64, *, garbage: bool = True) -> BlockCache:
    """A cache whose blocks have been used before: whatever is read of them before it is written is not a number."""
    cache = BlockCache(model.shape, num_blocks, BLOCK_TOKENS, model.dtype)
    if garbage:
        cache.data.fill_(torch.nan)
    return cache


class Row:
    """A request in a test: its tokens, the blocks it owns and how far it is computed."""

    def __init__(self, tokens: Sequence[int], blocks: Sequence[int], num_computed: int = 0) -> None:
        self.tokens = list(tokens)
        self.blocks = list(blocks)
        self.num_computed = num_computed

    def take(self, count: int) -> tuple[list[int], int, list[int]]:
        first = self.num_computed
        self.num_computed = min(first + count, len(self.tokens))
        needed = -(-self.num_computed // BLOCK_TOKENS)
        return self.tokens[first:self.num_computed], first, self.blocks[:max(needed, 1)]


def scattered_blocks(count: int, start: int = 0) -> list[int]:
    """Block ids that neither follow one another nor grow."""
    return [start + (7 * i + 3) % count for i in range(count)] if count % 7 else list(range(start, start + count))[::-1]


def new_row(tokens: Sequence[int], start_block: int = 0) -> Row:
    count = -(-len(tokens) // BLOCK_TOKENS)
    return Row(tokens, scattered_blocks(count, start_block))


def pack_batch(rows: Sequence[tuple[list[int], int, list[int]]], num_decode_rows: int = 0) -> Batch:
    """A batch from `(tokens, first position, block ids)` of each row; decode rows first."""
    longest = max((len(blocks) for _, _, blocks in rows), default=0)
    tables = [blocks + [blocks[-1]] * (longest - len(blocks)) for _, _, blocks in rows]
    index = torch.int64
    return Batch(
        token_T=torch.tensor([t for tokens, _, _ in rows for t in tokens], dtype=index),
        first_R=[first for _, first, _ in rows],
        count_R=[len(tokens) for tokens, _, _ in rows],
        num_decode_rows=num_decode_rows,
        block_table_RB=torch.tensor(tables, dtype=index).reshape(len(rows), longest),
    )


def step(rows: Sequence[Row], counts: Sequence[int], num_decode_rows: int = 0) -> Batch:
    """A batch in which each row computes its next tokens."""
    return pack_batch([row.take(count) for row, count in zip(rows, counts, strict=True)], num_decode_rows)


def hidden_in_chunks(model: DeepseekModel, cache: BlockCache, row: Row, chunks: Sequence[int],
                     num_decoded: int = 0) -> Tensor:
    """Hidden states of a row computed alone: chunk after chunk, then token by token."""
    parts = [model.forward(step([row], [count]), cache) for count in chunks]
    parts += [model.forward(step([row], [1], num_decode_rows=1), cache) for _ in range(num_decoded)]
    return torch.cat(parts)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, in parts of the largest value."""
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} is not {tuple(theirs.shape)}"
    return float((ours - theirs).abs().max() / theirs.abs().max())
