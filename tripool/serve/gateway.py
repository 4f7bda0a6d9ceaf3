"""The gateway process's inner side: its machines, the links to all members, and the front door.

`api` (one floor up) speaks HTTP and opens requests here as streams of `Output`; it knows nothing of
machines or links. Instances dial in; the gateway tells those that decode, or may come to, who has blocks
for them, and `health` whose stream has ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripool.control.gateway import Gateway
from tripool.control.health import Health
from tripool.control.router import Router
from tripool.control.scaling import Scaling
from tripool.core import messages as m
from tripool.core.machine import Address
from tripool.core.messages import ROLES
from tripool.core.request import Request, RequestId
from tripool.pool.sdk import PoolClient
from tripool.serve.host import Host
from tripool.serve.links import Link, Listener, host_id
from tripool.serve.metrics import GAUGES, split_name
from tripool.serve.process import ProcessSpec, new_boot_id
from tripool.serve.recording import Recorder, Setup
from tripool.serve.wire import FROM_INSTANCE, PROTOCOL_VERSION, ExpertReport, Opening, PeerUp, Report

log = logging.getLogger(__name__)

GATEWAY = "gateway"
ROUTER = "gateway/router"
HEALTH = "gateway/health"
SCALING = "gateway/scaling"
API = "gateway/api"
CACHE_STATS_S = 1.0
LOCAL = (GATEWAY, ROUTER, HEALTH)


class OutputStream:
    """One request's outputs, in order. Ends after the one with `finish` or `error`."""

    def __init__(self, front: GatewayHost, request_id: RequestId) -> None:
        self.request_id = request_id
        self._front = front
        self._ready: deque[m.Output] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._opened = time.monotonic()
        self._placed: float | None = None

    @property
    def queued_s(self) -> float:
        """Seconds until a member was found, or so far."""
        return (self._placed or time.monotonic()) - self._opened

    def placed(self) -> None:
        self._placed = self._placed or time.monotonic()

    def __aiter__(self) -> AsyncIterator[m.Output]:
        return self

    async def __anext__(self) -> m.Output:
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._ready.popleft()

    def close(self) -> None:
        """Nobody reads on; an unfinished request is cancelled. May be called again."""
        self._front.forget(self.request_id)
        self._ended = True
        self._wake()

    def put(self, output: m.Output) -> None:
        self._ready.append(output)
        if output.finish or output.error:
            self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(frozen=True, slots=True)
class MemberLink:
    link: Link
    opening: Opening


class GatewayHost:
    """Everything in the gateway process but HTTP."""

    def __init__(self, spec: ProcessSpec, loop: asyncio.AbstractEventLoop) -> None:
        self.spec = spec
        self.deployment = spec.deployment
        self.boot_id = new_boot_id()
        self.draining = False
        self.reports: dict[str, dict[str, float]] = {}
        self.experts: dict[str, ExpertReport] = {}
        self.cache_stats: dict[str, dict[str, float]] = {}
        setup = Setup(spec.member, "gateway", self.boot_id, spec.deployment)
        self._recorder = Recorder(Path(f"{spec.record}.{self.boot_id}"), setup) if spec.record else None
        self.host = Host(spec.member, loop, self._recorder)
        self.gateway = Gateway(self.deployment.gateway)
        self.router = Router(self.deployment.gateway)
        self.health = Health(self.deployment)
        self.scaling = Scaling(self.deployment)
        for address, machine in ((GATEWAY, self.gateway), (ROUTER, self.router), (HEALTH, self.health),
                                 (SCALING, self.scaling)):
            self.host.add_machine(address, machine)
        self.host.add_port(API, self._give)
        self.host.send_out = self._send
        self.host.flush_out = self._flush
        self.pool: PoolClient | None = None
        if spec.caches:
            self.pool = PoolClient({name: Path(path) for name, path in spec.caches.items()}, timeout_s=2.0)
        self._streams: dict[RequestId, OutputStream] = {}
        self._members: dict[str, MemberLink] = {}
        self._announced: dict[str, PeerUp] = {}
        self._roles: dict[str, m.Role] = {}                  # as members last said, for the log
        self._told_change = 0                                # the number of the last change of role in the log
        self._dirty: list[Link] = []
        self._watching: asyncio.Task[None] | None = None
        self._next_id = (secrets.randbits(22) << 40) | 1
        me = Opening(PROTOCOL_VERSION, spec.member, "gateway", self.boot_id, host_id(), (spec.socket_address,), b"")
        self.listeners = [Listener(spec.socket_address, me, spec.key, self._accept)]
        if self.deployment.gateway.join:
            self.listeners.append(Listener(self.deployment.gateway.join, me, spec.key, self._accept))

    def start(self) -> None:
        """Take callers."""
        for listener in self.listeners:
            listener.start()
        if self.pool is not None:
            self._watching = self.host.loop.create_task(self.watch_caches())

    async def stop(self) -> None:
        for listener in self.listeners:
            await listener.stop()
        if self._watching is not None:
            self._watching.cancel()
        for each in list(self._members.values()):
            each.link.close("the gateway ends")
        if self._recorder is not None:
            self._recorder.close()

    # ------------------------------------------------------------ front door

    def new_request_id(self) -> RequestId:
        self._next_id += 1
        return self._next_id

    def open(self, request: Request) -> OutputStream:
        """Begin a request; its outputs come by the stream."""
        stream = OutputStream(self, request.request_id)
        self._streams[request.request_id] = stream
        self.host.post(GATEWAY, m.Submit(request))
        return stream

    def forget(self, request_id: RequestId) -> None:
        if self._streams.pop(request_id, None) is not None:
            self.host.post(GATEWAY, m.Cancel(request_id))

    @property
    def num_open(self) -> int:
        """Streams whose end has not been given yet."""
        return len(self._streams)

    async def flush_cache(self) -> int:
        """Forget cached prefixes everywhere; returns how many pool blocks went."""
        for name in self._members:
            self.host.post(name, m.Flush())
        return await asyncio.to_thread(self.pool.flush) if self.pool is not None else 0

    def rebalance(self, members: Iterable[str]) -> list[str]:
        """Have instances spread their experts as the loads they have seen ask for; returns those that have any."""
        told = [name for name in members if name in self.experts]
        for name in told:
            self.host.post(name, m.Rebalance())
        return told

    def counters(self) -> Iterator[tuple[str, float, tuple[tuple[str, str], ...]]]:
        """(name, value, labels) of what is counted here or was reported. The HTTP side counts how requests end."""
        stats = self.gateway.stats
        for cause, count in stats.retried.items():
            yield "request_retried_total", count, (("cause", cause),)
        yield "request_placed_elsewhere_total", stats.placed_elsewhere, ()
        yield "request_handed_on_total", stats.handed_on, ()
        for kind, count in self.router.stats.rejected.items():
            yield "request_rejected_total", count, (("cause", kind),)
        if self.deployment.scaling.enabled:
            for role, load in self.scaling.stats.loads.items():
                yield "role_load", load, (("role", role),)
            for role, count in self.scaling.stats.changes.items():
                yield "role_changes_total", count, (("to", role),)
            yield "role_changes_withdrawn_total", self.scaling.stats.withdrawn, ()
        for member, values in (*self.reports.items(), *self.cache_stats.items()):
            for name, value in values.items():
                name, more = split_name(name)
                shown = f"member_{name}" if name in GAUGES else f"member_{name}_total"
                yield shown, value, (("member", member), *(more or (("cause", ""),)))

    async def watch_caches(self) -> None:
        """Ask the cache servers how they are, now and then."""
        while self.pool is not None:
            stats = await asyncio.to_thread(self.pool.stats)
            self.cache_stats = {server: {name: float(value) for name, value in values.items()
                                         if not isinstance(value, str)} for server, values in stats.items()}
            await asyncio.sleep(CACHE_STATS_S)

    def _give(self, message: Any) -> None:
        if isinstance(message, m.Output):
            stream = self._streams.get(message.request_id)
            if stream is not None:
                if message.finish or message.error:
                    del self._streams[message.request_id]
                stream.put(message)

    # ------------------------------------------------------------ links

    def _accept(self, opening: Opening) -> str | Link:
        taken = self._members.get(opening.member)
        if taken is not None and taken.link.is_open:
            return f"the name {opening.member} is taken by a member that is connected; choose another name"
        if opening.role not in ROLES:
            return f"role {opening.role!r} cannot join; roles are prefill, decode and hybrid"
        if "/" in opening.member or opening.member == GATEWAY:
            return f"{opening.member!r} is not a name for a member"
        link = Link(opening, FROM_INSTANCE, self._deliver, self._closed)
        self._members[opening.member] = MemberLink(link, opening)
        return link

    def _deliver(self, link: Link, to: Address, message: Any) -> None:
        if speaker(message) != link.member or to not in (*LOCAL, API):
            link.close(f"{link.member} sent a {type(message).__name__} in the name of another, or to {to!r}")
            return
        if isinstance(message, Report):
            self.reports[message.member] = message.values
            return
        if isinstance(message, ExpertReport):
            self.experts[message.member] = message
            return
        self.host.post(to, message)
        if isinstance(message, m.Hello):
            self._introduce_peers(link.member)
        elif isinstance(message, m.Heartbeat) and message.state == "up":
            self._announce(self._members[link.member])
            self._note_role(message)

    def _note_role(self, beat: m.Heartbeat) -> None:
        """For the log: an instance that serves in another role than the last time."""
        known = self._roles.get(beat.member)
        if beat.role is not None and beat.role != known:
            self._roles[beat.member] = beat.role
            if known is not None:
                log.info("%s serves as %s now", beat.member, beat.role)

    def _announce(self, source: MemberLink) -> None:
        """Tell those that decode of an instance that has come up, if others can reach its blocks."""
        opening = source.opening
        if not opening.listen:
            return
        peer = PeerUp(opening.member, opening.boot_id, opening.host_id, opening.listen)
        if self._announced.get(opening.member) != peer:
            self._announced[opening.member] = peer
            for name in self._members:
                self._introduce(name, peer)

    def _introduce_peers(self, member: str) -> None:
        for peer in self._announced.values():
            self._introduce(member, peer)

    def _introduce(self, member: str, peer: PeerUp) -> None:
        """To whoever decodes, now or ever."""
        if member != peer.member and self.deployment.may_serve(self._members[member].opening.role, "decode"):
            self.host.post(f"{member}/data", peer)

    def _closed(self, link: Link, cause: str) -> None:
        current = self._members.get(link.member)
        if current is None or current.link is not link:
            return
        del self._members[link.member]
        self._announced.pop(link.member, None)
        self.reports.pop(link.member, None)
        self.experts.pop(link.member, None)
        was_up = any(each.member == link.member and each.state == "up" for each in self.health.snapshot().members)
        log.log(logging.WARNING if was_up and not self.draining else logging.INFO, "%s is gone: %s", link.member, cause)
        self.host.post(HEALTH, m.Lost(link.member, current.opening.boot_id))

    def _send(self, to: Address, message: Any) -> None:
        if isinstance(message, m.Prefill):
            stream = self._streams.get(message.request.request_id)
            if stream is not None:
                stream.placed()
        elif isinstance(message, m.ChangeRole) and message.number > self._told_change:
            self._told_change = message.number
            log.info("%s is to serve as %s: %s", to, message.role, message.cause)
        each = self._members.get(to.partition("/")[0])
        if each is not None:
            each.link.send(to, message)
            self._dirty.append(each.link)

    def _flush(self) -> None:
        if self._dirty:
            dirty, self._dirty = self._dirty, []
            for link in dict.fromkeys(dirty):
                link.flush()


def speaker(message: Any) -> str:
    """The member in whose name a message is."""
    match message:
        case m.Prefilled():
            return message.grant.source
        case m.Tokens() | m.AttemptFailed() | m.HandOn():
            return message.source
        case _:
            return str(message.member)


async def wait_until_idle(front: GatewayHost, budget_s: float) -> bool:
    """Wait for the open streams to end, within a budget; says whether they did."""
    end = time.monotonic() + budget_s
    while front.num_open and time.monotonic() < end:
        await asyncio.sleep(0.05)
    return not front.num_open
