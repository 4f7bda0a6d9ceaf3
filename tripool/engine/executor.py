"""Runs sections of plans: keeps a row for each slot, computes, samples, and says what came of it.

Rows are columns of one table (tokens, positions, block tables, limits), so that a decode step costs a few array
operations however many rows it has. Decode rows come first in the batch. A row ends here, by a stop token or by
length, because only here its tokens are known in time; everything else about a request is decided elsewhere. The
executor does not know what a block's owner or a request's deadline is, and waits for nothing but the other ranks.

With drafting a step begins with guesses at the tokens to come (`speculate`), and its one forward pass computes them
behind each row's last token. Then the sampler chooses at each position as it would without them, and goes on as long as
what it chose is what was guessed; so drafts decide how many tokens a step brings, never which. What was computed of
wrong guesses is computed again before anybody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tripool.core.machine import Address
from tripool.core.plan import (
    BlockId,
    Chunk,
    Emitted,
    Join,
    Left,
    RankResult,
    Section,
    Slot,
    TokenColumns,
    TokenLogprobs,
)
from tripool.engine.batch import Batch, rows_and_positions
from tripool.engine.cache import BlockCache
from tripool.engine.loads import ExpertLoads
from tripool.engine.model.deepseek import DeepseekModel
from tripool.engine.model.moe import ONE_CALL_ROWS
from tripool.engine.ops import native
from tripool.engine.ops.choose import Bools, RowTable, choose
from tripool.engine.ops.logprobs import logprobs
from tripool.engine.ops.sample import Ints
from tripool.engine.ops.step import AT_LIMIT, GOES_ON, HANDED, STOPPED, DecodeStep, SlotTable, Taken
from tripool.engine.sampler import Sampler
from tripool.engine.speculate import Drafter

PROMPT_LOGPROB_ROWS = 64      # positions whose logits are held at once
NO_TOKEN = -1                 # fills up the lists of stop tokens


@dataclass(frozen=True, slots=True)
class Work:
    """The rows that take part in one step, decode rows first."""

    slots_R: Ints
    first_R: Ints
    count_R: Ints
    num_decode_rows: int      # rows that decode
    num_single_rows: int      # these, and chunks of one token
    num_chunk_tokens: int
    num_drafts_R: Ints        # the last so many tokens of each row are guesses

    @property
    def num_decode_tokens(self) -> int:
        """Guesses included."""
        return int(self.count_R[:self.num_decode_rows].sum())


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tokens that rows get in one step."""

    slots_N: Ints
    start_N: Ints             # output number of a row's first
    count_N: Ints             # how many it gets
    token_NJ: Ints

    @staticmethod
    def nothing() -> Chosen:
        none = np.zeros(0, np.int64)
        return Chosen(none, none, none, none.reshape(0, 1))


@dataclass(frozen=True, slots=True)
class Brought:
    """What came of a step, as `RankResult` names it."""

    emitted: tuple[Emitted, ...]
    ended: list[Left]
    need: tuple[Slot, ...]
    want: tuple[Slot, ...]
    num_chunk_tokens: int
    num_decode_tokens: int
    num_drafted: tuple[int, ...]
    num_accepted: tuple[int, ...]


def middle(count_R: Ints) -> int:
    """Where to cut rows in two, so that both parts have about equally many tokens."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(count_R)])
    return int(np.abs(2 * before - before[-1]).argmin())


class Executor:
    """One rank's rows, model, cache and sampler.

    S slots · L positions · B blocks of a row · R rows of a step · T their tokens · N rows that get a token
    J tokens that a row may get in one step, one more than there are drafts
    """

    def __init__(self, model: DeepseekModel, cache: BlockCache, *, max_num_seqs: int, max_model_len: int,
                 num_drafts: int = 0) -> None:
        """`num_drafts`: guesses at a row's tokens to come in each step; the same on all ranks of an instance."""
        self.model = model
        self.cache = cache
        self.max_model_len = max_model_len
        self.device = cache.data.device
        self.sampler = Sampler(max_num_seqs, model.shape.vocab_size, self.device)
        self._token_SL = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._block_SB = np.zeros((max_num_seqs, max_model_len // cache.block_tokens + 1), np.int64)
        self._stop_SK = np.full((max_num_seqs, 1), NO_TOKEN, np.int64)
        self._join: list[Join | None] = [None] * max_num_seqs
        self._reply: list[Address] = []                        # by number, as in `_reply_to`
        counts = np.zeros((9, max_num_seqs), np.int64)
        self._num_tokens, self._num_prompt, self._num_computed, self._num_blocks, self._limit = counts[:5]
        self._min_tokens, self._request_id, self._attempt, self._reply_to = counts[5:]
        self._decodes = np.zeros(max_num_seqs, bool)           # goes on after its next token
        self._drafts = np.zeros(max_num_seqs, bool)            # wishes to be drafted for
        self._decoding = np.zeros(max_num_seqs, bool)          # all tokens but the last are computed
        self._num_logprobs = np.full(max_num_seqs, -1, np.int64)
        self._leaving: list[Left] = []                         # as the section asked that is being run
        self._loads = ExpertLoads(model.moe_blocks)
        self.num_drafts = num_drafts
        self._drafter = Drafter(model, cache, self.sampler, num_drafts) if num_drafts else None
        self._describe_columns()

    @torch.inference_mode()
    def run(self, section: Section, *, num_microbatches: int = 1, reports_experts: bool = False) -> RankResult:
        """Take one step. With nothing to do the model runs on no tokens, since other ranks meet this one in it.

        Raises:
            ExchangeError: the ranks did not come together; `abandon` is what has to follow.
        """
        self._prepare(section)
        self._loads.forget()
        brought = None if section.chunks or num_microbatches > 1 else self._decode_at_once()
        if brought is None:
            brought = self._step(section.chunks, num_microbatches)
        leaving, self._leaving = self._leaving, []
        return RankResult(
            emitted=brought.emitted,
            left=(*leaving, *brought.ended),
            need=brought.need,
            sums=tuple((block, self.cache.seal_block(block)) for block in section.seals),
            num_chunk_tokens=brought.num_chunk_tokens,
            num_decode_tokens=brought.num_decode_tokens,
            expert_counts=self._loads.take() if reports_experts else b"",
            want=brought.want,
            num_drafted=brought.num_drafted,
            num_accepted=brought.num_accepted,
        )

    def _decode_at_once(self) -> Brought | None:
        """The step of rows that decode, in one call; None, and nothing done, if that cannot be."""
        if self._at_once is None or self.model.plain_call is None:
            return None
        taken = self._at_once(self._loads.count_LE)
        if taken is None:
            return None
        chosen = Chosen(taken.slots_N, taken.start_N, taken.count_N, taken.token_NJ)
        ended_N = taken.ended_N
        return Brought(
            emitted=self._emitted(chosen, {}, []),
            ended=self._ended(chosen, ended_N) if ended_N.any() else [],
            need=taken.need,
            want=taken.want,
            num_chunk_tokens=0,
            num_decode_tokens=int(taken.count_N.sum()),
            num_drafted=tuple(taken.drafted_J.tolist()),
            num_accepted=tuple(taken.right_J.tolist()),
        )

    def _step(self, chunks: Sequence[Chunk], num_microbatches: int) -> Brought:
        """Any step, one thing after the other."""
        work = self._work(chunks)
        if self._drafter is not None:
            self._draft(self._drafter, work)
        hidden_TD = self._forward(work, num_microbatches)
        self._loads.count(len(hidden_TD))
        self._num_computed[work.slots_R] += work.count_R - work.num_drafts_R
        chunked = work.slots_R[work.num_decode_rows:]
        self._decoding[chunked] = self._num_computed[chunked] == self._num_tokens[chunked] - 1
        prompt_logprobs = self._prompt_logprobs(work, hidden_TD)
        emitted, ended, num_right_R = self._sample(work, hidden_TD, prompt_logprobs)
        return Brought(
            emitted=emitted,
            ended=ended,
            need=self._need(),
            want=self._want(),
            num_chunk_tokens=work.num_chunk_tokens,
            num_decode_tokens=work.num_decode_rows + int(num_right_R.sum()),
            num_drafted=tuple(int((work.num_drafts_R > draft).sum()) for draft in range(self.num_drafts)),
            num_accepted=tuple(int((num_right_R > draft).sum()) for draft in range(self.num_drafts)),
        )

    def abandon(self, section: Section | None = None) -> RankResult:
        """Give up the step whose forward pass failed, or with a section, one that was never run here.

        Every row leaves as it was before the forward pass, those that came with the section or were to go with it
        included. Whoever joins again from what its `Left` says goes on as if nothing had been.
        """
        if section is not None:
            self._prepare(section)
        leaving, self._leaving = self._leaving, []
        rest = [self._leave(slot, None) for slot, join in enumerate(self._join) if join is not None]
        return RankResult(left=(*leaving, *rest), aborted=True)

    def reset(self) -> None:
        """Drop all rows."""
        self._join = [None] * len(self._join)
        self._decoding[:] = False
        self._leaving = []

    def _prepare(self, section: Section) -> None:
        """All of a section that comes before the forward pass."""
        self._leaving = [self._leave(slot, None) for slot in section.leaves]
        for fresh in section.fresh:
            self.cache.publish(fresh)
        for join in section.joins:
            self._take(join)
        for grow in section.grows:
            self._add_blocks(grow.slot, grow.blocks)

    # --- rows ------------------------------------------------------------------------------------------------------

    def _take(self, join: Join) -> None:
        slot = join.slot
        assert self._join[slot] is None, f"slot {slot} is taken"
        tokens = np.frombuffer(join.tokens, "<i4")
        assert join.num_computed < len(tokens) <= self.max_model_len, f"slot {slot} has no token left to compute"
        self._join[slot] = join
        self._token_SL[slot, :len(tokens)] = tokens
        self._num_tokens[slot] = len(tokens)
        self._num_prompt[slot] = join.num_prompt
        self._num_computed[slot] = join.num_computed
        self._limit[slot] = min(join.num_prompt + join.limits.max_tokens, self.max_model_len)
        self._min_tokens[slot] = join.limits.min_tokens
        self._request_id[slot] = join.request_id
        self._attempt[slot] = join.attempt
        if join.reply_to not in self._reply:
            self._reply.append(join.reply_to)
        self._reply_to[slot] = self._reply.index(join.reply_to)
        self._decodes[slot] = join.decodes
        self._drafts[slot] = join.decodes and join.sampling.drafts
        self._decoding[slot] = join.num_computed == len(tokens) - 1
        self._num_logprobs[slot] = join.sampling.num_logprobs
        self._set_stops(slot, join.limits.stop_token_ids)
        self._num_blocks[slot] = 0
        self._add_blocks(slot, join.blocks)
        self.sampler.admit(slot, join.sampling, join.limits, tokens, join.num_prompt)

    def _set_stops(self, slot: Slot, stops: Sequence[int]) -> None:
        missing = len(stops) - self._stop_SK.shape[1]
        if missing > 0:
            self._stop_SK = np.pad(self._stop_SK, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
            self._describe_columns()
        self._stop_SK[slot] = NO_TOKEN
        self._stop_SK[slot, :len(stops)] = stops

    def _describe_columns(self) -> None:
        """Write down where columns are, for compiled functions."""
        self._table = RowTable(self._token_SL, self._stop_SK, self._num_tokens, self._num_prompt, self._num_computed,
                               self._min_tokens)
        self._at_once: Callable[[NDArray[np.int64]], Taken | None] | None = None
        if self.model.one_call is not None:
            table = SlotTable(self._table, self._block_SB, self._num_blocks, self._limit, self._num_logprobs,
                              *self.sampler.plain_columns, self._decodes, self._drafts, self._decoding)
            self._at_once = DecodeStep(self.model.one_call, self.cache, table, num_drafts=self.num_drafts,
                                       most_tokens=ONE_CALL_ROWS)

    def _add_blocks(self, slot: Slot, blocks: Sequence[BlockId]) -> None:
        assert self._join[slot] is not None, f"slot {slot} is empty, it cannot grow"
        first = self._num_blocks[slot]
        missing = first + len(blocks) - self._block_SB.shape[1]
        if missing > 0:
            self._block_SB = np.pad(self._block_SB, ((0, 0), (0, missing)))
            self._describe_columns()
        self._block_SB[slot, first:first + len(blocks)] = blocks
        self._num_blocks[slot] += len(blocks)

    def _leave(self, slot: Slot, reason: str | None, stop_token: int | None = None) -> Left:
        assert self._join[slot] is not None, f"slot {slot} is empty, nobody can leave it"
        self._join[slot] = None
        self._decoding[slot] = False
        tokens = self._token_SL[slot, :self._num_tokens[slot]].tobytes()
        return Left(slot, reason, tokens, int(self._num_computed[slot]), stop_token)

    def _need(self) -> tuple[Slot, ...]:
        """Decode rows that have no block for the position of the next step."""
        return tuple((self._decoding & (self._num_computed >= self._capacity)).nonzero()[0].tolist())

    def _want(self) -> tuple[Slot, ...]:
        """Decode rows that have no block for all the drafts of the next step."""
        if not self.num_drafts:
            return ()
        slots = self._decoding.nonzero()[0]
        return tuple(slots[self._drafts_of(slots) < self._most_drafts_of(slots)].tolist())

    def _most_drafts_of(self, slots: Ints) -> Ints:
        """How many drafts a row may have: one token more is emitted with them."""
        left = np.where(self._drafts[slots], self._limit[slots] - self._num_tokens[slots] - 1, 0)
        return np.minimum(np.maximum(left, 0), self.num_drafts)        # clip takes five times as long

    def _drafts_of(self, slots: Ints) -> Ints:
        """The same, as far as there are blocks."""
        room = self._num_blocks[slots] * self.cache.block_tokens - self._num_computed[slots] - 1
        return np.minimum(np.maximum(room, 0), self._most_drafts_of(slots))

    @property
    def _capacity(self) -> Ints:
        """Positions for which each row has blocks."""
        return self._num_blocks * self.cache.block_tokens

    # --- the forward pass ------------------------------------------------------------------------------------------

    def _work(self, chunks: Sequence[Chunk]) -> Work:
        decoding = self._decoding & (self._num_computed < self._capacity)
        sizes = {chunk.slot: self._chunk_size(chunk) for chunk in chunks}
        if sizes:
            decoding[list(sizes)] = False
        decode_slots = decoding.nonzero()[0]
        num_drafts = self._drafts_of(decode_slots) if self.num_drafts else np.zeros_like(decode_slots)
        if num_drafts.any():                              # those of one length together, the longest first
            order = np.argsort(-num_drafts, kind="stable")
            decode_slots, num_drafts = decode_slots[order], num_drafts[order]
        if not sizes:
            first_R, num_rows = self._num_computed[decode_slots], len(decode_slots)
            return Work(decode_slots, first_R, num_drafts + 1, num_rows, num_rows, 0, num_drafts)
        single = [slot for slot, size in sizes.items() if size == 1]
        longer = [slot for slot, size in sizes.items() if size > 1]
        slots_R = np.concatenate([decode_slots, np.array(single + longer, np.int64)])
        count_R = np.ones(len(slots_R), np.int64)
        count_R[len(decode_slots) + len(single):] = [sizes[slot] for slot in longer]
        num_drafts_R = np.zeros(len(slots_R), np.int64)
        num_drafts_R[:len(decode_slots)] = num_drafts
        return Work(slots_R, self._num_computed[slots_R], count_R + num_drafts_R, len(decode_slots),
                    len(decode_slots) + len(single), sum(sizes.values()), num_drafts_R)

    def _chunk_size(self, chunk: Chunk) -> int:
        slot = chunk.slot
        assert self._join[slot] is not None, f"slot {slot} is empty, it has no chunk"
        size = min(chunk.num_tokens, int(self._num_tokens[slot] - self._num_computed[slot]))
        end = self._num_computed[slot] + size
        assert end <= self._capacity[slot], f"slot {slot} has no block for position {end - 1}"
        return size

    def _draft(self, drafter: Drafter, work: Work) -> None:
        """Write guesses behind the tokens of the rows. They count for nothing until they are chosen."""
        rows = slice(work.num_decode_rows)
        slots_R, first_R, num_drafts_R = work.slots_R[rows], work.first_R[rows], work.num_drafts_R[rows]
        draft_RJ = drafter.guess(slots_R, first_R, num_drafts_R, self._token_SL[slots_R, first_R].astype(np.int64),
                                 self._block_SB[slots_R])
        for draft in range(self.num_drafts):
            drafting = num_drafts_R > draft
            self._token_SL[slots_R[drafting], first_R[drafting] + 1 + draft] = draft_RJ[drafting, draft]

    def _forward(self, work: Work, num_microbatches: int) -> Tensor:
        if num_microbatches == 1:
            return self.model.forward(self._batch(work), self.cache)
        assert num_microbatches == 2, f"a step has one microbatch or two, not {num_microbatches}"
        cut = middle(work.count_R)
        halves = [self._batch(work, slice(cut)), self._batch(work, slice(cut, None))]
        return torch.cat(self.model.forward_together(halves, self.cache))

    def _batch(self, work: Work, rows: slice = slice(None)) -> Batch:
        """All rows of a step, or some that follow one another."""
        slots_R, first_R, count_R = work.slots_R[rows], work.first_R[rows], work.count_R[rows]
        row_T, position_T = rows_and_positions(first_R, count_R)
        token_T = self._token_SL[slots_R[row_T], position_T].astype(np.int64)
        num_blocks = int((first_R + count_R - 1).max()) // self.cache.block_tokens + 1 if len(slots_R) else 0
        return Batch(
            token_T=self._to_device(token_T),
            first_R=first_R.tolist(),
            count_R=count_R.tolist(),
            num_decode_rows=min(max(work.num_single_rows - (rows.start or 0), 0), len(slots_R)),
            block_table_RB=self._to_device(self._block_SB[slots_R, :num_blocks]),
        )

    def _to_device(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    # --- what came of it -------------------------------------------------------------------------------------------

    def _sample(self, work: Work, hidden_TD: Tensor, prompt_logprobs: list[tuple[Address, TokenLogprobs]],
                ) -> tuple[tuple[Emitted, ...], list[Left], Ints]:
        """A token for each row that has computed all it knew, and more for those whose guesses were right: how many."""
        num_right_R = np.zeros_like(work.slots_R)
        done_R = self._num_computed[work.slots_R] == self._num_tokens[work.slots_R]
        slots_N, num_drafts_N = work.slots_R[done_R], work.num_drafts_R[done_R]
        if not slots_N.size:
            return self._emitted(Chosen.nothing(), {}, prompt_logprobs), [], num_right_R
        last_N = (np.cumsum(work.count_R) - 1 - work.num_drafts_R)[done_R]       # of the tokens that were known
        logit_N = np.cumsum(num_drafts_N + 1) - num_drafts_N - 1                 # where a row's logits begin
        num_logits = slots_N.size + int(num_drafts_N.sum())
        states_TD = hidden_TD
        if num_logits != len(hidden_TD):
            place = np.arange(num_logits) + np.repeat(last_N - logit_N, num_drafts_N + 1)
            states_TD = hidden_TD.index_select(0, self._to_device(place))
        logits_XV = self.model.logits(states_TD)
        chosen, stopped_N = self._choose(logits_XV, logit_N, slots_N, num_drafts_N)
        num_right_R[done_R] = chosen.count_N - 1
        wrong = np.flatnonzero(chosen.count_N <= num_drafts_N)
        if wrong.size:
            self._keep_hidden(slots_N[wrong], hidden_TD, (last_N + chosen.count_N - 1)[wrong])
        self._decoding[slots_N] = True
        logprobs = self._logprobs(chosen, logits_XV, logit_N)
        ended_N = np.where(self._decodes[slots_N], GOES_ON, HANDED)
        ended_N[self._num_tokens[slots_N] >= self._limit[slots_N]] = AT_LIMIT
        ended_N[stopped_N] = STOPPED
        return self._emitted(chosen, logprobs, prompt_logprobs), self._ended(chosen, ended_N), num_right_R

    def _choose(self, logits_XV: Tensor, logit_N: Ints, slots_N: Ints, num_drafts_N: Ints) -> tuple[Chosen, Bools]:
        """As if each token had a step of its own, and which rows chose a stop token."""
        start_N = self._num_tokens[slots_N] - self._num_prompt[slots_N]
        draw_N = self.sampler.plain_draws(slots_N, self._num_tokens[slots_N])
        if draw_N is not None and native.level_for(logits_XV) >= 0:
            count_N, token_NJ, stopped_N = choose(logits_XV, self._table, slots_N, num_drafts_N, draw_N)
            return Chosen(slots_N, start_N, count_N, token_NJ), stopped_N
        count_N = np.zeros(slots_N.size, np.int64)
        token_NJ = np.zeros((slots_N.size, int(num_drafts_N.max()) + 1), np.int64)
        stopped_N = np.zeros(slots_N.size, bool)
        going = np.arange(slots_N.size)
        while going.size:
            slots, number = slots_N[going], count_N[going]
            logits = logits_XV if going.size == len(logits_XV) else logits_XV[self._to_device(logit_N[going] + number)]
            position = self._num_tokens[slots]
            token = self.sampler.choose(logits, slots, position)
            right = (number < num_drafts_N[going]) & (self._token_SL[slots, position] == token)
            self._token_SL[slots, position] = token_NJ[going, number] = token
            self._num_tokens[slots] += 1
            count_N[going] += 1
            early = start_N[going] + number < self._min_tokens[slots]
            stopped = (self._stop_SK[slots] == token[:, None]).any(-1) & ~early
            stopped_N[going] = stopped
            going = going[right & ~stopped]              # a row has no more drafts than its limit allows
        self._num_computed[slots_N] += count_N - 1
        return Chosen(slots_N, start_N, count_N, token_NJ), stopped_N

    def _keep_hidden(self, slots_N: Ints, hidden_TD: Tensor, last_N: Ints) -> None:
        """A block keeps the state of its last token: not of a wrong guess."""
        block_N = self._block_SB[slots_N, (self._num_computed[slots_N] - 1) // self.cache.block_tokens]
        self.cache.hidden.index_copy_(0, self._to_device(block_N),
                                      hidden_TD.index_select(0, self._to_device(last_N)))

    def _ended(self, chosen: Chosen, ended_N: Ints) -> list[Left]:
        left = []
        for row in ended_N.nonzero()[0].tolist():
            slot, token = int(chosen.slots_N[row]), int(chosen.token_NJ[row, chosen.count_N[row] - 1])
            left.append(self._leave(slot, "stop", token) if ended_N[row] == STOPPED else
                        self._leave(slot, "length" if ended_N[row] == AT_LIMIT else None))
        return left

    def _emitted(self, chosen: Chosen, logprobs: dict[Slot, TokenLogprobs],
                 prompt_logprobs: list[tuple[Address, TokenLogprobs]]) -> tuple[Emitted, ...]:
        """Columns for each gateway, in the order in which the gateways became known."""
        reply_N = self._reply_to[chosen.slots_N]
        emitted = []
        for number, address in enumerate(self._reply):
            rows = reply_N == number
            prompts = tuple(entry for to, entry in prompt_logprobs if to == address)
            if not rows.any() and not prompts:
                continue
            slots, count, tokens = chosen.slots_N[rows], chosen.count_N[rows], chosen.token_NJ[rows]
            columns = TokenColumns(
                request_ids=self._request_id[slots].tobytes(),
                attempts=self._attempt[slots].astype(np.int32).tobytes(),
                starts=chosen.start_N[rows].astype(np.int32).tobytes(),
                counts=count.astype(np.int32).tobytes(),
                tokens=tokens[np.arange(tokens.shape[1]) < count[:, None]].astype(np.int32).tobytes(),
            )
            ours = tuple(logprobs[slot] for slot in slots.tolist() if slot in logprobs) if logprobs else ()
            emitted.append(Emitted(address, columns, ours, prompts))
        return tuple(emitted)

    def _logprobs(self, chosen: Chosen, logits_XV: Tensor, logit_N: Ints) -> dict[Slot, TokenLogprobs]:
        asked = np.flatnonzero(self._num_logprobs[chosen.slots_N] >= 0)
        if not asked.size:
            return {}
        places = np.concatenate([logit_N[row] + np.arange(chosen.count_N[row]) for row in asked])
        tokens = np.concatenate([chosen.token_NJ[row, :chosen.count_N[row]] for row in asked])
        most = int(self._num_logprobs[chosen.slots_N[asked]].max())
        values, top_ids, top_values = (each.tolist() for each in logprobs(logits_XV, places, tokens, most))
        found, at = {}, 0
        for row in asked.tolist():
            slot, end = int(chosen.slots_N[row]), at + int(chosen.count_N[row])
            top = int(self._num_logprobs[slot])
            found[slot] = TokenLogprobs(
                int(self._request_id[slot]), int(self._attempt[slot]), int(chosen.start_N[row]),
                tuple(values[at:end]), tuple(tuple(each[:top]) for each in top_ids[at:end]),
                tuple(tuple(each[:top]) for each in top_values[at:end]))
            at = end
        return found

    def _prompt_logprobs(self, work: Work, hidden_TD: Tensor) -> list[tuple[Address, TokenLogprobs]]:
        """Of each prompt token given those before it: a chunk tells about the tokens one further on."""
        found = []
        start = work.num_decode_tokens                # a row that decodes has no later token that it knows
        for row in range(work.num_decode_rows, len(work.slots_R)):
            slot, first, count = int(work.slots_R[row]), int(work.first_R[row]), int(work.count_R[row])
            join = self._join[slot]
            assert join is not None, f"slot {slot} computed without a request"
            told = min(first + count, join.num_prompt - 1) - first
            if join.sampling.num_prompt_logprobs >= 0 and told > 0:
                entry = self._logprobs_of_known(slot, join, first + 1, hidden_TD[start:start + told])
                found.append((join.reply_to, entry))
            start += count
        return found

    def _logprobs_of_known(self, slot: Slot, join: Join, first: int, hidden_CD: Tensor) -> TokenLogprobs:
        """`hidden_CD` are the states just before positions `first` and on."""
        top = join.sampling.num_prompt_logprobs
        chosen: list[float] = []
        ids: list[tuple[int, ...]] = []
        values: list[tuple[float, ...]] = []
        for at in range(0, len(hidden_CD), PROMPT_LOGPROB_ROWS):
            part_CD = hidden_CD[at:at + PROMPT_LOGPROB_ROWS]
            known = self._token_SL[slot, first + at:first + at + len(part_CD)].astype(np.int64)
            part = logprobs(self.model.logits(part_CD), np.arange(len(part_CD)), known, top)
            chosen += part[0].tolist()
            ids += map(tuple, part[1].tolist())
            values += map(tuple, part[2].tolist())
        return TokenLogprobs(join.request_id, join.attempt, first, tuple(chosen), tuple(ids), tuple(values))
