"""Who may wait, who may begin, and who steps back, where rows grow as they decode.

The line in front of a decode instance is bounded: while a request waits there its prefill instance keeps its blocks,
and no other decode instance can have it. Nobody's worst case is reserved: most requests end long before their limit. A
sequence begins when its tokens fit now and a few blocks stay in hand for each row that may still grow. When the blocks
run out all the same, the youngest steps back and resumes later, first among those who wait; the oldest never does, so
that somebody always gets on. It knows counts and ages, not which blocks they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from tripool.control.sequence import Phase, Sequence

LOOK_AHEAD_BLOCKS = 2
"""Blocks kept in hand for each row that may still grow by as many: with more, fewer rows run and fewer step back."""

LINE_ROUNDS = 4
"""A line is full when it would fill all slots, or all blocks, so many times over: a longer one serves nobody sooner."""


def line_room(num_waiting: int, num_wanted_blocks: int, num_slots: int, num_blocks: int) -> int:
    """How many more requests the line may take that are, on average, like those that wait; 0 if it is full."""
    by_slots = LINE_ROUNDS * num_slots - num_waiting
    if not num_wanted_blocks:
        return by_slots
    by_blocks = -((num_wanted_blocks - LINE_ROUNDS * num_blocks) * num_waiting // num_wanted_blocks)
    return max(0, min(by_slots, by_blocks))


def look_ahead_blocks(sequence: Sequence, block_tokens: int) -> int:
    """Blocks to keep in hand for a sequence: never more than it could still ask for."""
    return min(LOOK_AHEAD_BLOCKS, sequence.num_blocks_to_come(block_tokens))


def has_room(num_spare: int, num_ahead: int, alone: bool) -> bool:
    """Whether a sequence may begin that would leave `num_spare` blocks to give out.

    `num_ahead` is what all rows together want kept in hand; one that has the rank to itself needs none of it.
    """
    return num_spare >= (0 if alone else num_ahead)


def choose_to_step_back(started: Iterable[Sequence]) -> Sequence | None:
    """The youngest of the least urgent that can give up its blocks now, unless it is the first of all holders."""
    living = [sequence for sequence in started if not sequence.ended]
    movable = [sequence for sequence in living
               if sequence.phase in (Phase.READY, Phase.COMPUTING, Phase.DECODING) and not sequence.leaving]
    if not movable:
        return None
    youngest = max(movable, key=lambda sequence: sequence.order)
    oldest = min(living, key=lambda sequence: sequence.order)
    return None if youngest is oldest else youngest
