"""Who may begin, and who steps back, where rows grow as they decode.

Nobody's worst case is reserved: most requests end long before their limit. A sequence begins when its tokens fit now
and a few blocks stay in hand for each row that may still grow. When the blocks run out all the same, the youngest
steps back and resumes later, first among those who wait; the oldest never does, so that somebody always gets on.
It knows counts and ages, not which blocks they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from tripool.control.sequence import Phase, Sequence

LOOK_AHEAD_BLOCKS = 2
"""Blocks kept in hand for each row that may still grow by as many: with more, fewer rows run and fewer step back."""


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
