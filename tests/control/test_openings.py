"""Ranks are tried from the emptiest to the fullest, however many there are."""

import random

import pytest

from tripool.control.blocks import BlockAllocator
from tripool.control.openings import Openings

NUM_SLOTS = 3


def openings(*ranks):
    """Of ranks with (slots taken, blocks to be had)."""
    made = Openings(NUM_SLOTS)
    for rank, (num_taken, num_available) in enumerate(ranks):
        made.put(rank, BlockAllocator(num_available), num_taken)
    return made


def test_the_rank_with_fewest_rows_comes_first_then_the_one_with_most_blocks_then_the_lowest():
    assert list(openings((2, 9), (0, 5), (1, 9), (0, 7), (0, 7))) == [3, 4, 1, 2, 0]


def test_a_full_rank_is_not_tried():
    made = openings((3, 9), (2, 9))

    assert (list(made), made.num_ranks) == ([1], 1)


def test_blocks_count_as_they_are_when_somebody_looks():
    made, blocks = Openings(NUM_SLOTS), BlockAllocator(9)
    made.put(0, blocks, 0)
    made.put(1, BlockAllocator(5), 0)
    blocks.allocate(5)

    assert list(made) == [1, 0]


def test_a_rank_that_left_is_found_missing():
    made = openings((1, 9), (0, 9))
    made.remove(1, 0)

    assert list(made) == [0]
    with pytest.raises(AssertionError, match="2 ranks have a slot to give, 1 are listed"):
        made.check({0: 1, 1: 0})


def test_the_order_is_that_of_a_full_sort_whatever_happened_before():
    generator = random.Random(5)
    taken = [0] * 6
    ranks = [BlockAllocator(9) for _ in taken]
    made = Openings(NUM_SLOTS)
    for rank, blocks in enumerate(ranks):
        made.put(rank, blocks, 0)
    for _ in range(200):
        rank = generator.randrange(len(taken))
        made.remove(rank, taken[rank])
        taken[rank] = generator.randrange(NUM_SLOTS + 1)
        made.put(rank, ranks[rank], taken[rank])
        if ranks[rank].num_available:
            ranks[rank].allocate(1)
        open_ranks = [each for each in range(len(taken)) if taken[each] < NUM_SLOTS]

        assert list(made) == sorted(open_ranks, key=lambda each: (taken[each], -ranks[each].num_available, each))
        made.check(dict(enumerate(taken)))
