"""Whoever sends the requests of a workload and notes when what came back: each at its time, or so many at once.

A request's prompt is made when it is sent. Times are those of the client: of sending, of the first token, of the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tripool.core.machine import Address, Message, Send
from tripool.core.messages import Output, Submit, Tick
from tripool.core.request import TOKEN_BYTES, RequestId
from tripool.sim.requests import Workload, make_request


@dataclass(slots=True)
class Journey:
    """What became of one request. Times are seconds of the simulation; negative: it did not come to that."""

    sent_s: float
    num_prompt: int
    num_output: int                    # that it should get
    first_s: float = -1.0
    ended_s: float = -1.0
    num_tokens: int = 0                # that came
    num_cached: int = 0
    finish: str = ""
    error: str = ""
    status: int = 200

    @property
    def is_served(self) -> bool:
        return self.finish in ("stop", "length")

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens, after the first; None of an answer of one token."""
        return (self.ended_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class Users:
    """All clients together."""

    def __init__(self, workload: Workload, begin_s: float, max_tokens: int, outputs: dict[RequestId, int],
                 post: Callable[[Address, Message, float], object], concurrency: int = 0,
                 address: Address = "gateway/api", *, api_s: float = 0.0) -> None:
        """With a `concurrency`, so many requests are always on their way, and their own times are not used. A request
        reaches the gateway `api_s` after it was sent."""
        self.address = address
        self.journeys: list[Journey] = []
        self.num_ended = 0
        self._workload = workload
        self._begin_s = begin_s
        self._max_tokens = max_tokens
        self._api_s = api_s
        self._outputs = outputs
        self._post = post
        self._concurrency = concurrency
        self._num_called = 0               # requests whose time to be sent is set

    @property
    def num_open(self) -> int:
        """Requests that are on their way."""
        return len(self.journeys) - self.num_ended

    @property
    def is_done(self) -> bool:
        return self.num_ended == len(self._workload.requests)

    def start(self) -> None:
        for _ in range(self._concurrency or 1):
            self._call_next(self._begin_s)

    def handle(self, message: Message, now: float) -> list[Send]:
        match message:
            case Output():
                self._receive(message, now)
            case Tick("send", number):
                work = self._workload.requests[number]
                self.journeys.append(Journey(now, work.num_prompt, work.num_output))
                self._outputs[number + 1] = work.num_output
                if not self._concurrency:
                    self._call_next(now)
                return [Send("gateway", Submit(make_request(number + 1, work, self._max_tokens or work.num_output)),
                             self._api_s)]
        return []

    def _call_next(self, now: float) -> None:
        """Set the time of the next request: now, where so many are always on their way, or its own."""
        number = self._num_called
        if number < len(self._workload.requests):
            self._num_called += 1
            at_s = now if self._concurrency else self._begin_s + self._workload.requests[number].at_s
            self._post(self.address, Tick("send", number), at_s)

    def _receive(self, output: Output, now: float) -> None:
        journey = self.journeys[output.request_id - 1]
        if output.tokens:
            if journey.first_s < 0:
                journey.first_s = now
            journey.num_tokens += len(output.tokens) // TOKEN_BYTES
        if output.num_cached_tokens is not None:
            journey.num_cached = output.num_cached_tokens
        if output.finish is not None or output.error is not None:
            assert journey.ended_s < 0, f"request {output.request_id} ended twice"
            journey.ended_s = now
            journey.finish, journey.error, journey.status = output.finish or "", output.error or "", output.status
            self.num_ended += 1
            if self._concurrency:
                self._call_next(now)
