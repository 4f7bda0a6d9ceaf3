"""The line of sequences that wait to begin on an instance.

The more urgent stand before the less urgent, then the older before the younger. One that lacks room may be passed by
others of its priority that do not, but only so often: neither do small ones starve behind a large one, nor a large one
behind a stream of small ones. One that stepped back is never passed: it holds the oldest promise.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from tripool.control.sequence import Sequence

MAX_PASSED = 16
"""How often one that lacks room may be passed."""

MAX_TRIED = 8
"""How far behind the first of the line one looks for somebody who fits."""


class WaitingLine:
    """Sequences in the order in which they may begin."""

    def __init__(self) -> None:
        self._line: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def num_wanted_blocks(self, block_tokens: int) -> int:
        """Blocks that all of them need to begin."""
        return sum(sequence.num_blocks_to_start(block_tokens) for sequence in self._line)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._line, sequence, key=lambda each: each.order)

    def remove(self, sequence: Sequence) -> None:
        self._line.remove(sequence)

    def begin(self, try_begin: Callable[[Sequence], bool]) -> None:
        """Let those begin for whom `try_begin` finds room and says True."""
        blocked: list[Sequence] = []
        while len(blocked) < min(len(self._line), MAX_TRIED):
            sequence = self._line[len(blocked)]
            if blocked and sequence.request.priority != blocked[0].request.priority:
                return
            if try_begin(sequence):
                self._line.remove(sequence)
                for each in blocked:
                    each.num_passed += 1
                    if each.num_passed >= MAX_PASSED:
                        return
            elif sequence.stepped_back or sequence.num_passed >= MAX_PASSED:
                return
            else:
                blocked.append(sequence)
