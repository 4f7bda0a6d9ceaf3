"""Two computations take turns, so that one computes while what the other has sent is on its way.

A computation that sends something is written as a generator that pauses after each sending (section 4.2.3 of the
paper: two microbatches). Alone it runs straight through its pauses. Of several each runs to its next pause in turn;
every rank of an instance does so in the same order, hence their exchanges meet.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from torch import Tensor

Turns = Generator[None, None, Tensor]
"""Something that pauses and in the end has a result."""


def to_the_end(turns: Turns) -> Tensor:
    """Run one straight through."""
    try:
        while True:
            next(turns)
    except StopIteration as end:
        return end.value


def all_to_the_end(together: Sequence[Turns]) -> list[Tensor]:
    """Run several, each to its next pause in turn; their results."""
    results: dict[int, Tensor] = {}
    while len(results) < len(together):
        for index, turns in enumerate(together):
            if index in results:
                continue
            try:
                next(turns)
            except StopIteration as end:
                results[index] = end.value
    return [results[index] for index in range(len(together))]
