"""The allocator of extents: never overlapping, never losing a byte, whole again when everything is free."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tripool.pool.extents import ExtentAllocator

GRANULE = 16
CAPACITY = 64 * GRANULE


class ExtentsAgainstAMap(RuleBasedStateMachine):
    """Compares with a plain map of granules, one letter each."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = ExtentAllocator(CAPACITY + 5, GRANULE)      # what is left of a granule is not used
        self.granules = [False] * 64
        self.used: dict[int, int] = {}

    def longest_run(self, free: list[bool]) -> int:
        longest = run = 0
        for each in free:
            run = run + 1 if each else 0
            longest = max(longest, run)
        return longest

    @rule(num_bytes=st.integers(1, CAPACITY + GRANULE))
    def allocate(self, num_bytes: int) -> None:
        count = -(-num_bytes // GRANULE)
        fits = self.longest_run([not used for used in self.granules]) >= count
        start = self.extents.allocate(num_bytes)
        assert (start is not None) == fits
        if start is not None:
            first = start // GRANULE
            assert start % GRANULE == 0 and not any(self.granules[first:first + count])
            assert first + count <= 64
            self.granules[first:first + count] = [True] * count
            self.used[start] = count

    @rule(choice=st.randoms(use_true_random=False))
    def free(self, choice) -> None:
        if self.used:
            start = choice.choice(sorted(self.used))
            self.extents.free(start)
            first, count = start // GRANULE, self.used.pop(start)
            self.granules[first:first + count] = [False] * count

    @rule(num_bytes=st.integers(1, CAPACITY), choice=st.randoms(use_true_random=False))
    def could_fit(self, num_bytes: int, choice) -> None:
        loose = [start for start in sorted(self.used) if choice.random() < 0.5]
        free = [not used for used in self.granules]
        for start in loose:
            first = start // GRANULE
            free[first:first + self.used[start]] = [True] * self.used[start]
        expected = self.longest_run(free) * GRANULE >= self.extents.rounded(num_bytes)
        assert self.extents.could_fit(num_bytes, loose) == expected

    @invariant()
    def bytes_are_conserved(self) -> None:
        assert self.extents.used_bytes == sum(self.granules) * GRANULE
        assert self.extents.free_bytes + self.extents.used_bytes == CAPACITY
        assert self.extents.largest_free_bytes == self.longest_run([not used for used in self.granules]) * GRANULE


TestExtents = ExtentsAgainstAMap.TestCase
TestExtents.settings = settings(max_examples=30)


def test_neighbours_join_whatever_the_order_they_are_freed_in():
    extents = ExtentAllocator(4 * GRANULE, GRANULE)
    starts = [extents.allocate(GRANULE) for _ in range(4)]
    for i in (2, 0, 3, 1):
        extents.free(starts[i])
    assert extents.allocate(4 * GRANULE) == 0


def test_the_smallest_hole_that_fits_is_used():
    extents = ExtentAllocator(10 * GRANULE, GRANULE)
    large, _, small, _ = (extents.allocate(count * GRANULE) for count in (4, 1, 2, 3))
    extents.free(large)
    extents.free(small)
    assert extents.allocate(2 * GRANULE) == small


def test_freeing_twice_is_our_own_mistake():
    extents = ExtentAllocator(4 * GRANULE, GRANULE)
    start = extents.allocate(1)
    extents.free(start)
    with pytest.raises(AssertionError, match="not in use"):
        extents.free(start)
