"""Which rank a sequence may begin on: the one with the fewest rows first, then the one with most blocks to be had.

An instance may have hundreds of ranks. Those with a slot to give stand in groups, by how many of their slots are taken,
so that nobody looks at all of them for each sequence: the first of the first group is mostly the one. Only the order is
kept here; whether a sequence fits on a rank is for others to say.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tripool.control.blocks import BlockAllocator


class Openings:
    """Ranks of one instance that have a slot to give."""

    def __init__(self, num_slots: int) -> None:
        self.num_ranks = 0
        self._groups: list[dict[int, BlockAllocator]] = [{} for _ in range(num_slots)]       # by taken slots

    def __iter__(self) -> Iterator[int]:
        """Ranks in the order in which they are to be tried. Whoever takes a slot looks no further."""
        for group in self._groups:
            if group:
                choices = [(-blocks.num_available, rank) for rank, blocks in group.items()]
                heapq.heapify(choices)             # the first is mostly taken
                while choices:
                    yield heapq.heappop(choices)[1]

    def put(self, rank: int, blocks: BlockAllocator, num_taken: int) -> None:
        """A rank has so many slots taken. One that has no other has no opening."""
        if num_taken < len(self._groups):
            self._groups[num_taken][rank] = blocks
            self.num_ranks += 1

    def remove(self, rank: int, num_taken: int) -> None:
        """It had; what it has now is said by `put`."""
        if num_taken < len(self._groups):
            del self._groups[num_taken][rank]
            self.num_ranks -= 1

    def check(self, taken: dict[int, int]) -> None:
        """`taken`: the slots that each living rank has given; raises AssertionError where they are not so listed."""
        for num_taken, group in enumerate(self._groups):
            for rank in group:
                assert taken.get(rank) == num_taken, f"rank {rank} is listed with {num_taken} slots taken"
        num_open = sum(count < len(self._groups) for count in taken.values())
        listed = sum(len(group) for group in self._groups)
        assert self.num_ranks == listed == num_open, f"{num_open} ranks have a slot to give, {listed} are listed"
