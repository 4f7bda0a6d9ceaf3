"""A tiny scheduler around an executor: hands out blocks and slots, so that tests only say what they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tripool.core.errors import ExchangeError
from tripool.core.plan import BlockRef, Chunk, Grow, Join, Left, RankResult, Section
from tripool.core.request import Limits, Sampling, pack_tokens, unpack_tokens
from tripool.engine.cache import BlockCache
from tripool.engine.executor import Executor
from tripool.engine.model.deepseek import DeepseekModel

BLOCK_TOKENS = 8
GREEDY = Sampling(temperature=0.0)


class Driver:
    """One executor, its free blocks, and what each request has emitted."""

    def __init__(self, model: DeepseekModel, *, num_blocks: int = 64, max_num_seqs: int = 8, max_model_len: int = 256,
                 block_tokens: int = BLOCK_TOKENS, num_microbatches: int = 1, num_drafts: int = 0) -> None:
        self.num_microbatches = num_microbatches
        self.cache = BlockCache(model.shape, num_blocks, block_tokens, model.dtype, device=model.embed_VD.device)
        self.cache.data.fill_(torch.nan)             # blocks have had other contents before
        self.executor = Executor(model, self.cache, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
                                 num_drafts=num_drafts)
        self.free = [(5 * i + 2) % num_blocks for i in range(num_blocks)] if num_blocks % 5 else list(range(num_blocks))
        self.joins: dict[int, Join] = {}             # by slot
        self.blocks: dict[int, list[int]] = {}       # by slot
        self.output: dict[int, list[int]] = {}       # by request, what it has emitted
        self.left: dict[int, Left] = {}              # by request
        self.last = RankResult()
        self._waiting: list[Join] = []

    def join(self, slot: int, prompt: Sequence[int], *, request_id: int | None = None, output: Sequence[int] = (),
             blocks: Sequence[int] = (), num_computed: int = 0, sampling: Sampling = GREEDY, max_tokens: int = 1000,
             min_tokens: int = 0, stops: Sequence[int] = (), decodes: bool = True, reply_to: str = "gateway",
             attempt: int = 1, room_to_decode: bool = True) -> int:
        """A request is to take a slot in the next step, with blocks for all its tokens; its id is returned."""
        request_id = 100 + slot if request_id is None else request_id
        tokens = [*prompt, *output]
        width = self.cache.block_tokens
        num_blocks = -(-(len(tokens) + (1 if room_to_decode else 0)) // width)
        own = [self.free.pop(0) for _ in range(num_blocks - len(blocks))]
        self.blocks[slot] = [*blocks, *own]
        self.joins[slot] = Join(
            slot, request_id, attempt, reply_to, pack_tokens(tokens), len(prompt), num_computed,
            tuple(self.blocks[slot]), sampling, Limits(max_tokens, min_tokens, tuple(stops)), decodes)
        self._waiting.append(self.joins[slot])
        self.output[request_id] = list(output)
        return request_id

    def run(self, chunks: Mapping[int, int] | None = None, *, leaves: Sequence[int] = (), seals: Sequence[int] = (),
            grows: Sequence[Grow] = (), fresh: Sequence[BlockRef] = (), reports_experts: bool = False) -> RankResult:
        """One step; what rows emit is appended to `output` after checking that it follows on."""
        joins, self._waiting = self._waiting, []
        section = Section(tuple(leaves), tuple(fresh), tuple(joins), tuple(grows),
                          tuple(Chunk(slot, size) for slot, size in (chunks or {}).items()), tuple(seals))
        try:
            self.last = result = self.executor.run(section, num_microbatches=self.num_microbatches,
                                                   reports_experts=reports_experts)
        except ExchangeError:
            self.last = result = self.executor.abandon()
            self.join_again(result)
        for emitted in result.emitted:
            for request_id, _attempt, start, tokens in emitted.columns.rows():
                assert start == len(self.output[request_id]), "a gap in what was emitted"
                self.output[request_id] += unpack_tokens(tokens)
        for left in result.left:
            self.left[self.joins[left.slot].request_id] = left
        return result

    def join_again(self, result: RankResult) -> None:
        """All rows of a step that was given up are to take slots in the next, as they left, with their blocks."""
        for left in result.left:
            join = self.joins[left.slot]
            self._waiting.append(replace(join, tokens=left.tokens, num_computed=left.num_computed,
                                         blocks=tuple(self.blocks[left.slot]), attempt=join.attempt + 1))

    def grow(self, result: RankResult) -> list[Grow]:
        """A block for every row that needs one."""
        grows = []
        for slot in (*result.need, *(slot for slot in result.want if slot not in result.need)):
            block = self.free.pop(0)
            self.blocks[slot].append(block)
            grows.append(Grow(slot, (block,)))
        return grows

    def decode(self, steps: int) -> RankResult:
        """Steps in which rows grow as they need."""
        for _ in range(steps):
            self.run(grows=self.grow(self.last))
        return self.last

    def prefill(self, slot: int, sizes: Sequence[int] = (1000,)) -> RankResult:
        """Chunk after chunk of one row."""
        for size in sizes:
            self.run({slot: size})
        return self.last
