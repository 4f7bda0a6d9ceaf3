"""Stop strings in a stream of text: nothing that may belong to one is let out, nothing else is held back.

Each stop string is followed by an automaton that knows how much of it the text ends with, so the work per
character is constant and the result does not depend on how the text was cut into pieces. The string that is
complete first wins; of those that end together, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back the shortest end of the text that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)     # how much of each stop string the text ends with
        self._include_stop = include_stop
        self._held = ""
        self.stop: str | None = None               # the one that was met

    def feed(self, text: str) -> str:
        """More text; returns what may be shown. Once `stop` is set nothing more comes."""
        if self.stop is not None:
            return ""
        for at, char in enumerate(text):
            for number, stop in enumerate(self._stops):
                matched, fallback = self._matched[number], self._fallbacks[number]
                while matched and stop[matched] != char:
                    matched = fallback[matched - 1]
                if stop[matched] == char:
                    matched += 1
                if matched == len(stop):
                    self.stop = stop
                    seen = self._held + text[:at + 1]
                    self._held = ""
                    return seen if self._include_stop else seen[:len(seen) - len(stop)]
                self._matched[number] = matched
        seen = self._held + text
        certain = len(seen) - max(self._matched)
        self._held = seen[certain:]
        return seen[:certain]

    def flush(self) -> str:
        """The text has ended: what was held is no stop string."""
        held, self._held = self._held, ""
        return held


def _fallbacks(stop: str) -> list[int]:
    """For each beginning of `stop`, the length of its longest proper end that is also a beginning."""
    lengths, matched = [0] * len(stop), 0
    for at in range(1, len(stop)):
        while matched and stop[matched] != stop[at]:
            matched = lengths[matched - 1]
        if stop[matched] == stop[at]:
            matched += 1
        lengths[at] = matched
    return lengths
