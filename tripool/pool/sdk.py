"""The pool as an instance sees it: put blocks, fetch a cached prefix, over any number of servers.

Calls are synchronous and meant for worker threads. Each has one deadline, and a server that is down,
slow or gone is a miss: no call raises for it and none waits beyond its time. Every copied block is
proved before it counts, by its header in shared memory and the checksum of the copy.

The SDK holds bytes. It does not know what a token is.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from tripool.core.errors import PoolError, StaleBlockError
from tripool.pool.arena import checksum_of
from tripool.pool.link import BlockView, Link, ReplyT
from tripool.pool.ring import Ring
from tripool.pool.wire import (
    MAX_KEYS,
    Existing,
    Exists,
    Flush,
    Flushed,
    GetStats,
    Lease,
    Leased,
    Request,
    Reserve,
    Reserved,
    Seal,
    Sealed,
    Stats,
    Status,
)

log = logging.getLogger(__name__)
_clients: weakref.WeakSet[PoolClient] = weakref.WeakSet()

PutStatus = Status
PutItem = tuple[bytes, memoryview, int | None]
"""Key, data, and the data's xxh3_64 if it is known."""

RECONNECT_S = 0.05
MAX_RECONNECT_S = 1.0
HANDSHAKE_S = 2.0


@dataclass(frozen=True, slots=True)
class Members:
    """The servers at one time."""

    ring: Ring
    links: dict[str, Link]

    def by_server(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        """Positions in `keys` by the server that keeps them."""
        places: dict[str, list[int]] = {}
        for i, key in enumerate(keys):
            name = self.ring.server(key)
            if name is not None:
                places.setdefault(name, []).append(i)
        return places


class PoolClient:
    """A client of K servers. Safe to use from several threads. Close it, or use it as a context.

    `timeout_s` bounds each call that names no time of its own. Of the views that `lease` hands out, every
    `verify_every`-th is proved by checksum first (1: all); copies are always proved.
    """

    def __init__(self, servers: Mapping[str, Path], *, timeout_s: float, writes: bool = True,
                 verify_every: int = 1) -> None:
        self._timeout_s = timeout_s
        self._writes = writes
        self._verify_every = verify_every
        self._num_views = 0
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._closing = False
        self._wake = threading.Event()
        self._members = Members(Ring(()), {})
        self.set_servers(servers)
        for link in self._members.links.values():
            self._try_to_connect(link)
        self._reconnector = threading.Thread(target=self._keep_connected, name="pool-reconnect", daemon=True)
        self._reconnector.start()
        _clients.add(self)

    # ------------------------------------------------------------------------------------------ members

    def set_servers(self, servers: Mapping[str, Path]) -> None:
        """Change the members. Keys move as the ring says; what a former server kept is a miss."""
        links = dict(self._members.links)
        gone = [links.pop(name) for name in list(links) if name not in servers]
        for name, path in servers.items():
            if name not in links:
                links[name] = Link(name, path, writes=self._writes, on_down=self._wake.set)
        self._members = Members(Ring(links), links)
        for link in gone:
            link.close()
        self._wake.set()

    def close(self) -> None:
        """Give back what was taken. Views that are still open stay readable; their leases end when they are closed."""
        self._closing = True
        self._wake.set()
        self._reconnector.join()
        for link in self._members.links.values():
            link.close()

    def __enter__(self) -> PoolClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def forget_after_fork(self) -> None:
        """In a forked child, which has neither the connections nor the memory: every call is a miss."""
        self._closing = True
        self._counts_lock = threading.Lock()      # another thread of the parent may have held it
        self._wake = threading.Event()

    def _keep_connected(self) -> None:
        delay_s = RECONNECT_S
        while not self._closing:
            down = [link for link in self._members.links.values() if not link.is_up]
            if not down:
                delay_s = RECONNECT_S
            self._wake.wait(delay_s if down else None)
            self._wake.clear()
            if down and not self._closing:
                for link in down:
                    self._try_to_connect(link)
                delay_s = min(2 * delay_s, MAX_RECONNECT_S)

    def _try_to_connect(self, link: Link) -> None:
        try:
            link.connect(min(HANDSHAKE_S, self._timeout_s))
        except PoolError as error:
            log.debug("%s", error)                # tried again soon; meanwhile its keys are misses

    # ------------------------------------------------------------------------------------------ put

    def put(self, items: Sequence[PutItem], *, timeout_s: float | None = None) -> list[PutStatus]:
        """Store blocks; what became of each, in order. A batch of a chain is given from its beginning."""
        deadline = self._deadline(timeout_s)
        statuses: list[PutStatus] = []
        for at in range(0, len(items), MAX_KEYS):
            statuses += self._put_batch(items[at:at + MAX_KEYS], deadline)
        for status in statuses:
            self._count(f"put_{status.name.lower()}")
        return statuses

    def _put_batch(self, items: Sequence[PutItem], deadline: float) -> list[PutStatus]:
        statuses = [Status.LOST] * len(items)
        members = self._members
        places = members.by_server([key for key, _, _ in items])

        def reserve(name: str) -> Callable[[int], Request]:
            keys = [items[i][0] for i in places[name]]
            sizes = [items[i][1].nbytes for i in places[name]]
            return lambda call: Reserve(call, Link.first_hold(call), keys, sizes)

        reserved = self._ask(members, Reserved, {name: reserve(name) for name in places}, deadline)
        holds: dict[str, dict[int, int]] = {}     # server -> hold -> position, of what is to be sealed or given back
        for name, reply in reserved.items():
            first = Link.first_hold(reply.call)
            holds[name] = {first + n: i for n, i in enumerate(places[name]) if reply.slots[n] is not None}
            for i, status in zip(places[name], reply.statuses, strict=True):
                statuses[i] = Status.LOST if status is Status.OK else status    # until it is sealed
            if reply.cause:
                log.warning("%s has no space: %s", name, reply.cause)
        try:
            self._write_and_seal(members, items, reserved, holds, statuses, deadline)
        finally:
            for name, unsealed in holds.items():
                if unsealed:
                    members.links[name].give_back(*unsealed)
        return statuses

    def _write_and_seal(self, members: Members, items: Sequence[PutItem], reserved: dict[str, Reserved],
                        holds: dict[str, dict[int, int]], statuses: list[PutStatus], deadline: float) -> None:
        """Takes out of `holds` what was sealed, and notes its status."""
        written: dict[str, dict[int, int]] = {}   # server -> hold -> checksum
        for name, reply in reserved.items():
            link, first = members.links[name], Link.first_hold(reply.call)
            for hold, i in holds[name].items():
                slot = reply.slots[hold - first]
                room = link.room(reply.boot_id, slot) if slot is not None else None
                if room is not None and time.monotonic() < deadline:
                    written.setdefault(name, {})[hold] = _write(items[i], room)
        sealed = self._ask(members, Sealed, {
            name: _seal(list(checksums), list(checksums.values())) for name, checksums in written.items()}, deadline)
        for name, answer in sealed.items():
            for hold, status in zip(written[name], answer.statuses, strict=True):
                statuses[holds[name].pop(hold)] = status

    # ------------------------------------------------------------------------------------------ get

    def fetch_prefix(self, keys: Sequence[bytes], into: Sequence[memoryview], *,
                     timeout_s: float | None = None) -> list[int]:
        """Copy the longest run of leading blocks that the pool has; their checksums, one per block that arrived whole.

        The rest of `into` is as good as unwritten. A block whose size is not that of its place counts as a miss.
        """
        deadline = self._deadline(timeout_s)
        checksums: list[int] = []
        for at in range(0, min(len(keys), len(into)), MAX_KEYS):
            batch = keys[at:at + MAX_KEYS]
            arrived = self._fetch_batch(batch, into[at:at + MAX_KEYS], deadline)
            checksums += arrived
            if len(arrived) < len(batch):
                break
        self._count("fetched_blocks", len(checksums))
        self._count("fetches_whole" if len(checksums) == len(keys) else
                    "fetches_partial" if checksums else "fetches_missed")
        return checksums

    def _fetch_batch(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float) -> list[int]:
        members = self._members
        now = time.monotonic()
        asked_until = now + (deadline - now) / 2  # the other half is for the copies of what faster servers have
        views = self._lease_batch(members, keys, prefix=True, deadline=asked_until)
        checksums: list[int] = []
        try:
            for view, place in zip(views, into, strict=False):
                if view is None or time.monotonic() >= deadline:
                    break
                if not self._copy(view, place):
                    break
                checksums.append(view.checksum)
        finally:
            self._end_views(views)
        return checksums

    def _copy(self, view: BlockView, place: memoryview) -> bool:
        """Copy a block and prove the copy."""
        if place.nbytes != view.num_bytes:
            self._count("wrong_size")
            return False
        copy_block(view.data, place)
        if not view.is_current():
            self._report(view, "lease_lost")
            return False
        if checksum_of(place) != view.checksum:
            self._report(view, "damaged")
            return False
        return True

    def lease(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[BlockView | None]:
        """Views of blocks where they lie, None for each miss. Close every one."""
        deadline = self._deadline(timeout_s)
        members = self._members
        views: list[BlockView | None] = []
        for at in range(0, len(keys), MAX_KEYS):
            views += self._lease_batch(members, keys[at:at + MAX_KEYS], prefix=False, deadline=deadline)
        for i, view in enumerate(views):
            self._num_views += view is not None
            if view is not None and self._num_views % self._verify_every == 0:
                try:
                    view.verify()
                except StaleBlockError:
                    self._report(view, "damaged" if view.is_current() else "lease_lost")
                    view.close()
                    views[i] = None
        return views

    def _lease_batch(self, members: Members, keys: Sequence[bytes], *, prefix: bool,
                     deadline: float) -> list[BlockView | None]:
        views: list[BlockView | None] = [None] * len(keys)
        places = members.by_server(keys)

        def lease(name: str) -> Callable[[int], Request]:
            wanted = [keys[i] for i in places[name]]
            return lambda call: Lease(call, Link.first_hold(call), wanted, prefix)

        for name, reply in self._ask(members, Leased, {name: lease(name) for name in places}, deadline).items():
            link = members.links[name]
            for i, view in zip(places[name], link.views(reply, [keys[i] for i in places[name]]), strict=True):
                views[i] = view
        return views

    def _end_views(self, views: Iterable[BlockView | None]) -> None:
        """Close many views with one message per server, the last first: a chain loses its end before its beginning."""
        holds: dict[Link, list[int]] = {}
        for view in reversed(list(views)):
            if view is not None:
                holds.setdefault(view.link, []).append(view.detach())
        for link, ended in holds.items():
            link.give_back(*ended)

    # ------------------------------------------------------------------------------------------ the rest

    def exists(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[bool]:
        """Which blocks could be fetched now. Holds nothing: a block may be gone a moment later."""
        deadline = self._deadline(timeout_s)
        members = self._members
        found = [False] * len(keys)
        for at in range(0, len(keys), MAX_KEYS):
            places = members.by_server(keys[at:at + MAX_KEYS])

            def exists(name: str, at: int = at, places: dict[str, list[int]] = places) -> Callable[[int], Request]:
                wanted = [keys[at + i] for i in places[name]]
                return lambda call: Exists(call, wanted)

            for name, reply in self._ask(members, Existing, {name: exists(name) for name in places}, deadline).items():
                for i, there in zip(places[name], reply.found, strict=True):
                    found[at + i] = there
        return found

    def flush(self, *, timeout_s: float | None = None) -> int:
        """Forget every block on every server that can be reached; how many there were."""
        members = self._members
        replies = self._ask(members, Flushed, dict.fromkeys(members.links, Flush), self._deadline(timeout_s))
        return sum(reply.num_blocks for reply in replies.values())

    def stats(self, *, timeout_s: float | None = None) -> dict[str, dict[str, int | float | str]]:
        """Figures of every server; of one that cannot be reached only that it is not up."""
        members = self._members
        replies = self._ask(members, Stats, dict.fromkeys(members.links, GetStats), self._deadline(timeout_s))
        return {name: {"up": 1, "boot_id": replies[name].boot_id, **replies[name].values} if name in replies
                else {"up": 0} for name in members.links}

    def metrics(self) -> dict[str, int]:
        """What this client saw, for an exporter."""
        links = self._members.links.values()
        with self._counts_lock:
            return {**self._counts, "servers": len(links), "servers_up": sum(link.is_up for link in links)}

    # ------------------------------------------------------------------------------------------ asking

    def _ask(self, members: Members, kind: type[ReplyT], builders: Mapping[str, Callable[[int], Request]],
             deadline: float) -> dict[str, ReplyT]:
        """One request per server, all under way at once. Who does not answer in time is not in the result.

        Links are taken in the order of their names, so that two threads never wait for each other.
        """
        replies: dict[str, ReplyT] = {}
        asked: list[str] = []
        try:
            for name in sorted(builders):
                try:
                    members.links[name].begin(builders[name], deadline)
                    asked.append(name)
                except PoolError as error:
                    self._missed(error)
            while asked:
                name = asked.pop(0)
                try:
                    replies[name] = members.links[name].finish(kind, deadline)
                except PoolError as error:
                    self._missed(error)
        finally:
            for name in asked:                    # only when something else went wrong
                members.links[name].give_up()
        return replies

    def _missed(self, error: PoolError) -> None:
        self._count("unanswered")
        log.debug("%s", error)

    def _report(self, view: BlockView, cause: str) -> None:
        self._count(cause)
        log.warning("block %s of the pool did not prove itself: %s", view.key.hex()[:16], cause)
        view.link.report(view.key, lost=cause == "lease_lost")

    def _count(self, name: str, number: int = 1) -> None:
        with self._counts_lock:
            self._counts[name] += number

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)


def _write(item: PutItem, room: memoryview) -> int:
    """Copy a block into its reservation; its checksum."""
    _, data, checksum = item
    copy_block(data, room)
    return checksum_of(data) if checksum is None else checksum


def _seal(holds: list[int], checksums: list[int]) -> Callable[[int], Request]:
    return lambda call: Seal(call, holds, checksums)


def copy_block(source: memoryview, target: memoryview) -> None:
    """Copy bytes without holding the interpreter's lock."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _forget_clients_after_fork() -> None:
    for client in list(_clients):
        client.forget_after_fork()


os.register_at_fork(after_in_child=_forget_clients_after_fork)
