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

    def __init__(self, block_tokens: int) -> None:
        self.num_waiting = 0
        self.num_wanted_blocks = 0                 # that all of them need to begin
        self._block_tokens = block_tokens
        self._line: list[Sequence] = []

    def __len__(self) -> int:
        return self.num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._line, sequence, key=lambda each: each.order)
        self.num_waiting += 1
        self.num_wanted_blocks += sequence.num_blocks_to_start(self._block_tokens)

    def remove(self, sequence: Sequence) -> None:
        self._line.remove(sequence)
        self.num_waiting -= 1
        self.num_wanted_blocks -= sequence.num_blocks_to_start(self._block_tokens)

    def begin(self, try_begin: Callable[[Sequence], bool]) -> None:
        """Let those begin for whom `try_begin` finds room and says True."""
        blocked: list[Sequence] = []
        while len(blocked) < min(self.num_waiting, MAX_TRIED):
            sequence = self._line[len(blocked)]
            if blocked and sequence.request.priority != blocked[0].request.priority:
                return
            if try_begin(sequence):
                self.remove(sequence)
                for each in blocked:
                    each.num_passed += 1
                    if each.num_passed >= MAX_PASSED:
                        return
            elif sequence.stepped_back or sequence.num_passed >= MAX_PASSED:
                return
            else:
                blocked.append(sequence)

    def check(self) -> None:
        """Count again; raises AssertionError where a sum is wrong."""
        assert self.num_waiting == len(self._line), f"{len(self._line)} wait, not {self.num_waiting}"
        num_wanted = sum(sequence.num_blocks_to_start(self._block_tokens) for sequence in self._line)
        assert self.num_wanted_blocks == num_wanted, f"{num_wanted} blocks are waited for, not {self.num_wanted_blocks}"
