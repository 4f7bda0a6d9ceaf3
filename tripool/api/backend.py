"""What the HTTP side asks of whatever generates tokens.

In production that is the gateway process of `serve`; in tests it is a script. The API hands over a
`core.request.Request` for each choice and reads `core.messages.Output`s back; it knows nothing of
instances, attempts or links, and whoever implements this knows nothing of text or HTTP. The
implementation need not import this file: the protocols are structural.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tripool.api.schema import MemberExperts
from tripool.core.messages import Facts, MemberChanged, Output
from tripool.core.request import Request, RequestId


class OutputStream(Protocol):
    """What comes of one request, in order, each token once, whatever the number of attempts behind it.

    Iteration yields `Output`s. The last one has `finish` or `error`, and exactly one such comes; after it
    iteration ends. It belongs to the event loop on which it was opened.
    """

    @property
    def queued_s(self) -> float:
        """Seconds between `open` and the first placement, as far as they have passed; for metrics."""
        ...

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def __anext__(self) -> Output: ...

    def close(self) -> None:
        """Nobody reads any more: cancel the request if it is unfinished and end the iteration, a waiting one too.

        May be called several times, and after the end.
        """
        ...


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """How things stand. Asked for with every request, so it has to be cheap.

    `ready` means that a request sent now would be served: something healthy can prefill and something
    healthy can decode. `facts` are those of the served model, once any member has loaded it; they stay when
    members go down. While they are None, or while draining, the API answers 503 without asking further.
    """

    ready: bool
    draining: bool = False
    cause: str = ""                            # why not ready, for people: "prefill-0 is loading"
    load_fraction: float = 1.0                 # of the weights, the slowest member's
    facts: Facts | None = None
    members: tuple[MemberChanged, ...] = ()
    num_waiting: int = 0                       # requests in the router's queue
    num_running: int = 0  # requests that the gateway holds a record of, without those
    settings: Mapping[str, object] = field(default_factory=dict)  # roles, placement version, ...: shown by /server_info


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure for /metrics beyond those the API measures itself. `name` goes without the `tripool:` prefix.

    A counter's name ends in `_total`.
    """

    name: str
    help: str
    kind: Literal["gauge", "counter"]
    value: float
    labels: tuple[tuple[str, str], ...] = ()   # the same label names for every sample of a name


class Backend(Protocol):
    """Something that generates tokens."""

    def new_request_id(self) -> RequestId:
        """An id that no other request of this deployment has, nor will have."""
        ...

    def open(self, request: Request) -> OutputStream:
        """Begin a request. Returns at once; a refusal arrives as an `Output` with `error` and `status`."""
        ...

    def status(self) -> BackendStatus:
        """How things stand now."""
        ...

    def samples(self) -> Iterable[Sample]:
        """Figures for /metrics. Called from the event loop."""
        ...

    async def flush_cache(self) -> int:
        """Forget all cached context that no running request uses. Returns the number of blocks forgotten."""
        ...

    async def experts(self, members: Sequence[str]) -> list[MemberExperts]:
        """How experts are used on these instances, of those that have told so."""
        ...

    def rebalance(self, members: Sequence[str]) -> list[str]:
        """Have these instances spread their experts anew; returns those that have any."""
        ...
