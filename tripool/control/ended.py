"""Which attempts are over on an instance, so that a message that comes late or twice does not begin them anew."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tripool.core.request import RequestId

MAX_REMEMBERED = 4096
"""Requests that are remembered: those of the last while, which is as long as a message can be late."""


@dataclass(slots=True)
class Ended:
    """What is known of a request's last attempt here."""

    attempt: int
    refused_turn: int = 0              # the last turn that was refused, and its grant given back
    over: bool = False                 # no later turn of this attempt can begin either


class EndedAttempts:
    """The last attempt of each request that was refused or ended here."""

    def __init__(self) -> None:
        self._last: OrderedDict[RequestId, Ended] = OrderedDict()

    def end(self, request_id: RequestId, attempt: int) -> None:
        """The attempt is over here, whatever was begun of it."""
        known = self._recall(request_id, attempt)
        known.over = known.over or known.attempt == attempt

    def refuse(self, request_id: RequestId, attempt: int, turn: int) -> None:
        """The grant of this turn went back."""
        known = self._recall(request_id, attempt)
        if known.attempt == attempt:
            known.refused_turn = max(known.refused_turn, turn)

    def has(self, request_id: RequestId, attempt: int, turn: int) -> bool:
        """Whether this turn of this attempt, or a later attempt, was refused or is over."""
        known = self._last.get(request_id)
        return known is not None and (known.attempt, known.over or known.refused_turn >= turn) >= (attempt, True)

    def gave_back(self, request_id: RequestId, attempt: int, turn: int) -> bool:
        """Whether the grant of this turn went back: it may be somebody else's now."""
        known = self._last.get(request_id)
        return known is not None and known.attempt == attempt and known.refused_turn >= turn

    def _recall(self, request_id: RequestId, attempt: int) -> Ended:
        """The record of the request's last attempt, as the newest of all."""
        known = self._last.pop(request_id, None)
        if known is None or known.attempt < attempt:
            known = Ended(attempt)
        self._last[request_id] = known
        if len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)
        return known
