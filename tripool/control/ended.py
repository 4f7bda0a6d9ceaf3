"""Which attempts are over on an instance, so that a message that comes late or twice does not begin them anew."""

from __future__ import annotations

from collections import OrderedDict

from tripool.core.request import RequestId

MAX_REMEMBERED = 4096
"""Requests that are remembered: those of the last while, which is as long as a message can be late."""


class EndedAttempts:
    """The last attempt of each request that ended here, and whether it was refused and its grant given back."""

    def __init__(self) -> None:
        self._last: OrderedDict[RequestId, tuple[int, bool]] = OrderedDict()

    def add(self, request_id: RequestId, attempt: int, *, gave_back: bool = False) -> None:
        known = self._last.pop(request_id, (-1, False))
        self._last[request_id] = max(known, (attempt, gave_back))
        if len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)

    def has(self, request_id: RequestId, attempt: int) -> bool:
        """Whether this attempt, or a later one, is over."""
        return self._last.get(request_id, (-1, False))[0] >= attempt

    def gave_back(self, request_id: RequestId, attempt: int) -> bool:
        """Whether the grant of just this attempt went back: it is somebody else's now."""
        return self._last.get(request_id) == (attempt, True)
