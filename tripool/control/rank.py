"""One rank of an instance: its blocks, its slots, and which rows want what in the next step.

All of it changes when sequences join, grow or leave; nothing here is touched for each running row in each step.
It keeps the books; what to do is the scheduler's and the policies' to say.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from tripool.control.blocks import BlockAllocator
from tripool.control.openings import Openings
from tripool.control.sequence import Phase, Sequence
from tripool.core.plan import BlockId, Slot


class Rank:
    """Books of one rank."""

    def __init__(self, index: int, num_blocks: int, num_slots: int, openings: Openings, planned: dict[int, None],
                 tokens_per_row: int = 1) -> None:
        """`planned` lists all ranks of the instance that have plans, and perhaps some that had."""
        self.index = index
        self.tokens_per_row = tokens_per_row          # that a row computes in a step while it decodes
        self.is_lost = False                          # its process is gone: nothing begins or runs here
        self.num_slots = num_slots
        self.blocks = BlockAllocator(num_blocks)
        self.slots: dict[Slot, Sequence] = {}         # everybody with a slot, ended ones included until the last answer
        self.prefilling: dict[Slot, Sequence] = {}    # those with tokens to compute, in the engine or about to join
        self.decoding: dict[Slot, Sequence] = {}
        self.needy: dict[Slot, None] = {}             # decoding rows that lack a block, longest first
        self.wanting: dict[Slot, None] = {}           # decoding rows that would draft more if they had another block
        self.leaving: dict[Slot, Sequence] = {}       # to be named in the next plan
        self.num_storing = 0                          # blocks that unanswered `Store`s name
        self.look_ahead = 0                           # blocks that all rows together want kept in hand
        self._free_slots = list(range(num_slots))
        self._openings = openings
        self._planned = planned
        openings.put(index, self.blocks, 0)

    @property
    def has_plans(self) -> bool:
        """Whether the next step will do more here than let the rows that decode go on."""
        return bool(self.prefilling or self.leaving or self.needy or self.wanting)

    @property
    def num_active(self) -> int:
        """Rows that will decode in the next step."""
        return len(self.decoding) - len(self.needy)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that they will compute, at most."""
        return self.num_active * self.tokens_per_row

    @property
    def num_running(self) -> int:
        """Rows in the engine that compute or decode."""
        num_decoding = len(self.decoding)
        if not self.prefilling:
            return num_decoding
        return num_decoding + sum([sequence.in_engine for sequence in self.prefilling.values()])

    def set_lost(self, is_lost: bool) -> None:
        """Its process is gone, or there is a new one."""
        self._close()
        self.is_lost = is_lost
        self._open()

    def take_slot(self, sequence: Sequence) -> None:
        """Give the lowest free slot."""
        self._close()
        sequence.rank, sequence.slot = self.index, heapq.heappop(self._free_slots)
        self.slots[sequence.slot] = sequence
        self._open()

    def free_slot(self, sequence: Sequence) -> None:
        """Take the slot back, and with it every claim to the next step."""
        self.set_look_ahead(sequence, 0)
        self.rest(sequence)
        self.leaving.pop(sequence.slot, None)
        self._close()
        del self.slots[sequence.slot]
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot, sequence.leaving = -1, False
        self._open()

    def set_look_ahead(self, sequence: Sequence, num_blocks: int) -> None:
        self.look_ahead += num_blocks - sequence.look_ahead
        sequence.look_ahead = num_blocks

    def compute(self, sequence: Sequence) -> None:
        """The sequence has tokens to compute from the next step on."""
        self.prefilling[sequence.slot] = sequence
        self._planned[self.index] = None

    def decode(self, sequence: Sequence) -> None:
        """The row emits tokens in every step from now on."""
        self.rest(sequence)
        sequence.phase = Phase.DECODING
        self.decoding[sequence.slot] = sequence

    def note_need(self, needy: Iterable[Slot], wanting: Iterable[Slot]) -> None:
        """Rows lack a block, or would draft more if they had another, unless they are gone meanwhile."""
        for slot in needy:
            if slot in self.decoding:
                self.needy[slot] = None
        for slot in wanting:
            if slot in self.decoding and slot not in self.needy:
                self.wanting[slot] = None
        self._planned[self.index] = None

    def rest(self, sequence: Sequence) -> None:
        """The row takes no further part in steps."""
        self.prefilling.pop(sequence.slot, None)
        self.decoding.pop(sequence.slot, None)
        self.needy.pop(sequence.slot, None)
        self.wanting.pop(sequence.slot, None)

    def ask_to_leave(self, sequence: Sequence) -> None:
        """The next plan asks the row to leave the engine."""
        self.rest(sequence)
        if not sequence.leaving:
            sequence.leaving = True
            self.leaving[sequence.slot] = sequence
            self._planned[self.index] = None

    def release_blocks(self, sequence: Sequence) -> None:
        """Give back what a sequence holds; the last blocks first, because they are the first to be evicted."""
        self.blocks.release(*reversed(sequence.blocks))
        self._drop_blocks(sequence)

    def quarantine_blocks(self, sequence: Sequence) -> None:
        """The sequence is over, but an unanswered verb names its blocks."""
        self.blocks.quarantine(*sequence.blocks)

    def unpin_blocks(self, sequence: Sequence) -> None:
        """The last verb that named the blocks of an ended sequence was answered."""
        self.blocks.unpin(*reversed(sequence.blocks))
        self._drop_blocks(sequence)

    def _close(self) -> None:
        """Its slots are about to change."""
        if not self.is_lost:
            self._openings.remove(self.index, len(self.slots))

    def _open(self) -> None:
        """They have."""
        if not self.is_lost:
            self._openings.put(self.index, self.blocks, len(self.slots))

    def _drop_blocks(self, sequence: Sequence) -> None:
        sequence.blocks = []
        sequence.num_computed = sequence.num_registered = sequence.num_published = sequence.num_sealed = 0

    # ------------------------------------------------------------ checking

    def check(self, without_slot: Iterable[Sequence], stored: Iterable[BlockId]) -> None:
        """Every slot and block is accounted for; raises AssertionError with a sentence.

        `without_slot` are sequences that hold blocks of this rank and no slot, `stored` the blocks that each unanswered
        `Store` names.
        """
        self._check_slots()
        self.blocks.check()
        self._check_blocks([*self.slots.values(), *without_slot], stored)

    def _check_slots(self) -> None:
        assert not self.has_plans or self.index in self._planned, f"rank {self.index} has plans and is not listed"
        free = sorted(self._free_slots)
        assert free == sorted(set(free)), "a slot is free twice"
        assert sorted([*free, *self.slots]) == list(range(self.num_slots)), "a slot is lost or used twice"
        for slot, sequence in self.slots.items():
            assert (sequence.rank, sequence.slot) == (self.index, slot), f"slot {slot} names a row of another slot"
        for slot, sequence in [*self.prefilling.items(), *self.decoding.items(), *self.leaving.items()]:
            assert self.slots.get(slot) is sequence, f"slot {slot} is in a list of its rank, but has no row"
            assert not sequence.ended or slot in self.leaving, f"slot {slot} ended but still takes part in steps"
        for slot, sequence in self.decoding.items():
            assert sequence.phase is Phase.DECODING, f"slot {slot} is {sequence.phase.value}, not decoding"
            assert slot not in self.prefilling, f"slot {slot} both computes and decodes"
        assert all(slot in self.decoding for slot in self.needy), "a row that does not decode lacks a block"
        assert self.look_ahead == sum(each.look_ahead for each in self.slots.values()), "the look-ahead is miscounted"

    def _check_blocks(self, holders: list[Sequence], stored: Iterable[BlockId]) -> None:
        refs: dict[BlockId, int] = {}
        pins: dict[BlockId, int] = {}
        for sequence in holders:
            assert len(dict.fromkeys(sequence.blocks)) == len(sequence.blocks), "a sequence names a block twice"
            for block in sequence.blocks:
                counts = pins if sequence.ended else refs
                counts[block] = counts.get(block, 0) + 1
        for block, count in refs.items():
            shared = count + pins.get(block, 0) > 1
            assert not shared or self.blocks.key(block) is not None, f"rows share block {block}, which has no key"
        for block in stored:
            pins[block] = pins.get(block, 0) + 1
        for block in range(self.blocks.num_blocks):
            counted = self.blocks.num_refs(block), self.blocks.num_pins(block)
            named = refs.get(block, 0), pins.get(block, 0)
            assert counted == named, f"block {block} of rank {self.index} is counted {counted}, but named by {named}"
