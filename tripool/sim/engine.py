"""The engine of one rank, without a model: rows that read their blocks, write them and emit toy tokens.

A row looks at all its blocks in every step; where one does not hold what it should, the token comes out wrong, and
`wrongs` says why. Where it drafts, guesses are right by a toy rule, and a step brings a token more for each right one;
of wrong guesses nothing is written.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tripool.core.machine import Address
from tripool.core.messages import FinishReason
from tripool.core.plan import (
    BlockId,
    BlockRef,
    Emitted,
    Join,
    Left,
    RankResult,
    Section,
    Slot,
    TokenLogprobs,
    token_columns,
)
from tripool.core.request import TOKEN_BYTES, RequestId, TokenBytes
from tripool.sim.memory import Content, SimArena
from tripool.sim.toy import VOCAB, guesses_right, next_token, toy_logprob


@dataclass(slots=True)
class Row:
    """A request in a slot of the engine."""

    join: Join
    tokens: bytearray
    num_computed: int
    blocks: list[BlockId]
    expected: list[Content]            # of its blocks, as far as they are filled

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_to_compute(self) -> int:
        return self.num_tokens - self.num_computed

    def left(self, reason: FinishReason | None, stop_token: int | None = None) -> Left:
        return Left(self.join.slot, reason, bytes(self.tokens), self.num_computed, stop_token)


@dataclass(slots=True)
class StepOutput:
    """What the rows of one rank bring in a step, in the making."""

    rows: dict[Address, list[tuple[RequestId, int, int, bytes]]] = field(default_factory=dict)
    logprobs: dict[Address, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[Address, list[TokenLogprobs]] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    need: list[Slot] = field(default_factory=list)
    want: list[Slot] = field(default_factory=list)
    drafts: list[tuple[int, int]] = field(default_factory=list)     # of each row: how many, and how many were right
    num_chunk_tokens: int = 0
    num_decode_tokens: int = 0

    def drafts_by_position(self, num_drafts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many rows had a first draft, a second, ...; and of how many it was right."""
        drafted, right = (tuple(sum(counts[which] > position for counts in self.drafts)
                                for position in range(num_drafts)) for which in (0, 1))
        return drafted, right

    def emitted(self) -> tuple[Emitted, ...]:
        readers = dict.fromkeys([*self.rows, *self.prompt_logprobs])
        return tuple(Emitted(reader, token_columns(self.rows.get(reader, [])), tuple(self.logprobs.get(reader, ())),
                             tuple(self.prompt_logprobs.get(reader, ()))) for reader in readers)


class SimEngine:
    """The rows of one rank, on its arena."""

    def __init__(self, member: Address, arena: SimArena, block_tokens: int, wrongs: list[str],
                 renew: Callable[[Sequence[BlockRef]], None], count: Callable[[TokenBytes], None],
                 num_drafts: int = 0) -> None:
        self.rows: dict[Slot, Row] = {}
        self.in_rows: dict[BlockId, int] = {}          # how many rows have the block
        self._member = member
        self._arena = arena
        self._block_tokens = block_tokens
        self._wrongs = wrongs
        self._renew = renew
        self._count = count                            # is told of all tokens that are computed
        self._num_drafts = num_drafts                  # guesses at a row's tokens to come, in each step
        self._asked_to_leave: list[Left] = []

    def begin(self, section: Section, step: int) -> None:
        """Let rows go and come, and renew the blocks that they will write."""
        rows = self.rows
        for slot in section.leaves:
            row = rows.pop(slot, None)
            if row is None:
                self._wrongs.append(f"{self._member} step {step} asks slot {slot} to leave, which is empty")
                continue
            self._count_blocks(row.blocks, -1)
            self._asked_to_leave.append(row.left(None))
        self._renew(section.fresh)
        for join in section.joins:
            if join.slot in rows:
                self._wrongs.append(f"{self._member} step {step} puts two requests into slot {join.slot}")
            rows[join.slot] = self._join(join)
            self._count_blocks(join.blocks, 1)
        for grow in section.grows:
            rows[grow.slot].blocks += grow.blocks
            self._count_blocks(grow.blocks, 1)

    def end(self, section: Section) -> RankResult:
        """Every row's part in the step, and what came of it."""
        rows = self.rows
        output = StepOutput()
        asked_to_leave, self._asked_to_leave = self._asked_to_leave, []
        chunks = {chunk.slot: chunk.num_tokens for chunk in section.chunks}
        for slot in sorted(rows):
            self._advance(rows[slot], chunks.pop(slot, 0), output)
        for slot in chunks:
            self._wrongs.append(f"{self._member} has no row in slot {slot} to compute a chunk of")
        for left in output.left:
            self._count_blocks(rows.pop(left.slot).blocks, -1)
        contents = self._arena.contents
        sums = tuple((block, contents[block].checksum) for block in section.seals)
        num_drafted, num_accepted = output.drafts_by_position(self._num_drafts)
        return RankResult(output.emitted(), (*asked_to_leave, *output.left), tuple(output.need), sums,
                          output.num_chunk_tokens, output.num_decode_tokens, want=tuple(output.want),
                          num_drafted=num_drafted, num_accepted=num_accepted)

    def give_up(self) -> RankResult:
        """A step that began will not end: every row leaves as it was before."""
        left = (*self._asked_to_leave, *(self.rows[slot].left(None) for slot in sorted(self.rows)))
        self.drop_rows()
        return RankResult(left=left, aborted=True)

    def _join(self, join: Join) -> Row:
        row = Row(join, bytearray(join.tokens), join.num_computed, list(join.blocks), [])
        if row.num_to_compute < 1:
            self._wrongs.append(f"request {join.request_id} joined with no token left to compute")
        digest, width = 0, self._block_tokens
        for first in range(0, join.num_computed, width):
            last = min(first + width, join.num_computed)
            digest = zlib.crc32(row.tokens[first * TOKEN_BYTES:last * TOKEN_BYTES], digest)
            row.expected.append(Content(digest, last - first))
        return row

    def _advance(self, row: Row, num_asked: int, output: StepOutput) -> None:
        """One row's part in a step: compute its chunk or its last token, and sample when nothing is left."""
        is_decode = row.num_to_compute == 1
        num_tokens = 1 if is_decode else min(num_asked, row.num_to_compute)
        if num_asked > row.num_to_compute:
            self._wrongs.append(f"request {row.join.request_id} has {row.num_to_compute} tokens to compute, "
                                f"not {num_asked}")
        has_room = (row.num_computed + num_tokens) <= len(row.blocks) * self._block_tokens
        if not has_room and not is_decode:
            self._wrongs.append(f"request {row.join.request_id} has no block for its chunk")
        if not num_tokens or not has_room:
            self._note_need(row, output)
            return
        self._score_prompt(row, num_tokens, output)
        num_drafts = self._drafts_of(row) if is_decode and not num_asked else 0
        self._write(row, num_tokens)
        output.num_chunk_tokens += 0 if is_decode else num_tokens
        if not row.num_to_compute:
            num_right, goes_on = self._sample(row, num_drafts, output)
            output.num_decode_tokens += is_decode + num_right
            output.drafts.append((num_drafts, num_right))
            if not goes_on:
                return
        self._note_need(row, output)

    def _note_need(self, row: Row, output: StepOutput) -> None:
        """Whether the row will lack a block to write to in the next step."""
        is_decode = row.num_to_compute == 1
        if is_decode and row.num_computed + 1 > len(row.blocks) * self._block_tokens:
            output.need.append(row.join.slot)
        if is_decode and self._drafts_of(row) < self._most_drafts_of(row):
            output.want.append(row.join.slot)

    def _most_drafts_of(self, row: Row) -> int:
        """How many drafts a row may have: one token more is emitted with them."""
        if not (row.join.decodes and row.join.sampling.drafts):
            return 0
        left = row.join.num_prompt + row.join.limits.max_tokens - row.num_tokens - 1
        return max(0, min(left, self._num_drafts))

    def _drafts_of(self, row: Row) -> int:
        """The same, as far as there are blocks."""
        room = len(row.blocks) * self._block_tokens - row.num_computed - 1
        return max(0, min(room, self._most_drafts_of(row)))

    def _write(self, row: Row, num_tokens: int) -> None:
        contents, width = self._arena.contents, self._block_tokens
        end = row.num_computed + num_tokens
        self._count(bytes(row.tokens[row.num_computed * TOKEN_BYTES:end * TOKEN_BYTES]))
        while row.num_computed < end:
            index, place = divmod(row.num_computed, width)
            last = min(end, (index + 1) * width)
            block = row.blocks[index]
            if contents[block].num_filled != place:
                self._wrongs.append(f"{self._member} block {block} has {contents[block].num_filled} places filled, "
                                    f"where request {row.join.request_id} writes place {place}")
            before = row.expected[index - (place == 0)].digest if row.expected else 0
            digest = zlib.crc32(row.tokens[row.num_computed * TOKEN_BYTES:last * TOKEN_BYTES], before)
            contents[block] = Content(digest, last - index * width)
            row.expected[index:] = [contents[block]]
            row.num_computed = last

    def _sample(self, row: Row, num_drafts: int, output: StepOutput) -> tuple[int, bool]:
        """A token, and one more for each right guess before the first wrong one: how many were right, and whether the
        row stays."""
        join = row.join
        first, num_right = row.num_tokens - join.num_prompt, 0
        while True:
            number = first + num_right
            token = next_token(join.sampling.seed, number, join.limits)
            contents = self._arena.contents
            if [contents[block] for block in row.blocks[:len(row.expected)]] != row.expected:
                self._wrongs.append(f"request {join.request_id} on {self._member} read a block that is not its own")
                token = (token + 1) % VOCAB
            row.tokens += token.to_bytes(TOKEN_BYTES, "little")
            stopped = token in join.limits.stop_token_ids
            if stopped or num_right == num_drafts or not guesses_right(join.sampling.seed, number):
                break
            num_right += 1
            self._write(row, 1)
        count = num_right + 1
        emitted = (join.request_id, join.attempt, first, bytes(row.tokens[-count * TOKEN_BYTES:]))
        output.rows.setdefault(join.reply_to, []).append(emitted)
        if join.sampling.num_logprobs >= 0:
            values = tuple(toy_logprob(first + each) for each in range(count))
            part = TokenLogprobs(join.request_id, join.attempt, first, values)
            output.logprobs.setdefault(join.reply_to, []).append(part)
        if stopped:
            output.left.append(row.left("stop", token))
        elif number + 1 >= join.limits.max_tokens:
            output.left.append(row.left("length"))
        elif not join.decodes:
            output.left.append(row.left(None))
        else:
            return num_right, True
        return num_right, False

    @staticmethod
    def _score_prompt(row: Row, num_tokens: int, output: StepOutput) -> None:
        join = row.join
        if join.sampling.num_prompt_logprobs < 0:
            return
        first, last = max(1, row.num_computed), min(row.num_computed + num_tokens, join.num_prompt)
        if first < last:
            values = tuple(toy_logprob(position) for position in range(first, last))
            part = TokenLogprobs(join.request_id, join.attempt, first, values)
            output.prompt_logprobs.setdefault(join.reply_to, []).append(part)

    def _count_blocks(self, blocks: Sequence[BlockId], sign: int) -> None:
        for block in blocks:
            self.in_rows[block] = self.in_rows.get(block, 0) + sign

    def drop_rows(self) -> None:
        """After a failed step, or when the rank is lost, the engine is empty."""
        self.rows.clear()
        self.in_rows.clear()
        self._asked_to_leave.clear()
