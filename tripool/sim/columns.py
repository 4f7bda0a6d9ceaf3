"""Rows of an instance that decode, as columns: one place in each for every slot of every rank.

A step changes all rows with a few operations on whole columns, so that tens of thousands of rows cost little more than
one. How many tokens a row will emit is known here, from the workload, and to nobody who decides. Whether a draft is
right is drawn from the request and the token's number alone, so that it does not depend on who else is in the step.

R ranks · N places, `rank * num_slots + slot`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tripool.sim.costs.state import Ints

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

FOREVER = np.int64(1 << 40)


@dataclass(slots=True)
class Taken:
    """What one step with drafts did to the columns."""

    emitted_N: Ints                    # tokens of each row
    drafted: tuple[int, ...]           # drafts that were verified, by position
    accepted: tuple[int, ...]


class Columns:
    """All rows of one instance that decode. Of what a step changes only one column is kept: tokens emitted so far."""

    def __init__(self, num_ranks: int, num_slots: int, num_drafts: int, acceptance: Sequence[float],
                 seed: int) -> None:
        num_places = num_ranks * num_slots
        self.num_ranks, self.num_slots, self.num_drafts = num_ranks, num_slots, num_drafts
        self.num_live = 0
        self.live_N: Flags = np.zeros(num_places, np.bool_)
        self.number_N: Ints = np.zeros(num_places, np.int64)        # tokens emitted so far, by all attempts
        self.end_N: Ints = np.zeros(num_places, np.int64)           # number at which it ends
        self.limit_N: Ints = np.zeros(num_places, np.int64)         # number at which it would, for all that is known
        self.full_N: Ints = np.zeros(num_places, np.int64)          # number at which it lacks a block
        self.stop_N: Ints = np.zeros(num_places, np.int64)          # whichever of the two comes first
        self.ahead_N: Ints = np.zeros(num_places, np.int64)         # positions in the cache, less the number
        self.told_N: Ints = np.zeros(num_places, np.int64)          # number up to which a gateway was told
        self.last_s_N: Floats = np.zeros(num_places)                # when the row last emitted
        self.key_N: Words = np.zeros(num_places, np.uint64)         # of the draws of its drafts
        self._acceptance = tuple(acceptance)
        self._seed = np.uint64(seed & (1 << 63) - 1)

    def put(self, place: int, request_id: int, *, number: int, end: int, limit: int, computed: int, room: int,
            last_s: float) -> None:
        """A row begins to decode. It emitted `number` tokens before, all of them told."""
        self.num_live += not self.live_N[place]
        self.live_N[place] = True
        self.number_N[place] = self.told_N[place] = number
        self.end_N[place], self.limit_N[place] = end, limit
        full = room - computed + number
        self.ahead_N[place], self.full_N[place], self.stop_N[place] = computed - number, full, min(end, full)
        self.last_s_N[place] = last_s
        if self.num_drafts:
            self.key_N[place] = _mixed(np.array([request_id], np.uint64) ^ self._seed)[0]

    def computed(self, place: int) -> int:
        """Positions of a row in the cache."""
        return int(self.number_N[place] + self.ahead_N[place])

    def grow(self, places: list[int], num_positions: list[int]) -> None:
        """Rows have got blocks."""
        full_P = self.full_N[places] + num_positions
        self.full_N[places] = full_P
        self.stop_N[places] = np.minimum(self.end_N[places], full_P)

    def take_off(self, place: int) -> None:
        self.num_live -= bool(self.live_N[place])
        self.live_N[place] = False

    def clear(self) -> None:
        self.num_live = 0
        self.live_N[:] = False

    def by_rank(self, values_N: npt.NDArray[np.generic]) -> Ints:
        """Sums of each rank."""
        sums: Ints = np.add.reduce(values_N.reshape(self.num_ranks, self.num_slots), 1, np.int64)
        return sums

    def running_N(self) -> Flags:
        """Rows that have a block to write to."""
        if not self.num_live:
            return self.live_N.copy()
        running: Flags = self.live_N & (self.number_N < self.full_N)
        return running

    def context(self, runs_N: Flags) -> int:
        """Tokens in the cache that these rows read, all together."""
        return int(np.add.reduce((self.number_N + self.ahead_N)[runs_N]))

    def contexts_N(self, runs_N: Flags) -> Ints:
        """The same of each row."""
        contexts: Ints = (self.number_N + self.ahead_N) * runs_N
        return contexts

    def drafts_N(self, runs_N: Flags) -> Ints:
        """Drafts that each of these rows verifies in the next step."""
        most_N = np.minimum(self.full_N, self.limit_N) - self.number_N - 1
        drafts: Ints = np.clip(most_N, 0, self.num_drafts) * runs_N
        return drafts

    def num_plain_steps(self, runs_N: Flags) -> int:
        """How many steps these rows take, without drafts, until one of them ends or lacks a block."""
        return int(np.minimum.reduce((self.stop_N - self.number_N)[runs_N]))

    def step(self, runs_N: Flags) -> Taken:
        """Rows emit their next token, and one more for each right draft before the first wrong one."""
        drafts_N = self.drafts_N(runs_N)
        right_N = np.zeros_like(drafts_N)
        going_N = runs_N.copy()
        drafted, accepted = [], []
        for position in range(self.num_drafts):
            going_N &= drafts_N > position
            drafted.append(int(np.count_nonzero(drafts_N > position)))
            draws_N = _mixed(self.key_N + (self.number_N + position).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
            going_N &= (draws_N >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self._acceptance[position]
            right_N += going_N
            accepted.append(int(np.count_nonzero(going_N)))
        emitted_N: Ints = np.minimum(1 + right_N, self.end_N - self.number_N) * runs_N
        self.number_N += emitted_N
        return Taken(emitted_N, tuple(drafted), tuple(accepted))

    def happens(self, runs_N: Flags) -> bool:
        """Whether one of these rows has ended, lacks a block, or would draft more with one."""
        return bool(self.stopped_N(runs_N).any() or self.wants_N().any())

    def stopped_N(self, runs_N: Flags) -> Flags:
        """Those of these rows that have ended or lack a block."""
        stopped: Flags = runs_N & (self.number_N >= self.stop_N)
        return stopped

    def wants_N(self) -> Flags:
        """Rows that would draft more if they had another block."""
        most_N = np.minimum(self.num_drafts, self.limit_N - self.number_N - 1)
        wants: Flags = self.live_N & (np.minimum(self.full_N - self.number_N - 1, self.num_drafts) < most_N)
        return wants


def _mixed(words_N: Words) -> Words:
    """Well mixed bits of each word (the finaliser of SplitMix64)."""
    words_N = (words_N ^ (words_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words_N = (words_N ^ (words_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words_N ^ (words_N >> np.uint64(31))
    return mixed
