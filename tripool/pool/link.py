"""A client's end of one pool server: the connection, the mapped arena, and the holds that came of it.

One request is under way at a time, under a lock; every wait ends at the caller's deadline. When
anything goes wrong the connection is closed and the caller gets a `PoolError`; it may already have
taken holds whose numbers were never confirmed, so they are noted and given back over the next
connection. Views stay readable whatever happens to the server: the mapping keeps the memory.

It knows one server. Which server keeps which key is the ring's business.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tripool.core.errors import PoolError, StaleBlockError, WireError
from tripool.pool.arena import HEADER_BYTES, Mapping, block_header, checksum_of
from tripool.pool.wire import (
    MAX_KEYS,
    SESSION_BYTES,
    AnyReply,
    FrameBuffer,
    Hello,
    Lease,
    Leased,
    Refused,
    Release,
    Request,
    Reserve,
    Slot,
    Welcome,
    frame,
    read_reply,
)

log = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")       # pid, uid, gid, as SO_PEERCRED has them
_links: weakref.WeakSet[Link] = weakref.WeakSet()

NOTHING = memoryview(b"")
GRACE_S = 0.001
"""After a deadline, for an answer that has already come."""

ReplyT = TypeVar("ReplyT", bound=AnyReply)


class BlockView:
    """A block of the pool where it lies, read-only, under lease until it is closed.

    What was made from `data` (a slice, an array) may outlive `close`, and the lease then lasts as long as it does.
    """

    def __init__(self, link: Link, mapping: Mapping, key: bytes, hold: int, slot: Slot) -> None:
        self.link = link
        self.key = key
        self.checksum = slot.checksum
        self.num_bytes = slot.num_bytes
        self._hold = hold
        self._mapping = mapping
        self._offset = slot.offset
        self._header = block_header(key, slot.generation, slot.num_bytes, slot.checksum)
        bytes_N = mapping.data(slot.offset, slot.num_bytes)
        self.data: memoryview = bytes_N.data
        self._at_end = weakref.finalize(bytes_N, link.give_back, hold)
        self._at_end.atexit = False                # with the process its leases end anyway

    def is_current(self) -> bool:
        """Whether the bytes are still the leased block. False after a copy: what was copied is not it."""
        return self._mapping.header(self._offset) == self._header

    def verify(self) -> None:
        """Prove the bytes where they lie.

        Raises:
            StaleBlockError: they are not those that were sealed.
        """
        if checksum_of(self.data) != self.checksum or not self.is_current():
            raise StaleBlockError(f"block {self.key.hex()[:16]} of the pool is not what was sealed")

    def close(self) -> None:
        """Give the lease back, now or when nothing refers to the bytes any more. Idempotent."""
        self.data = NOTHING

    def detach(self) -> int:
        """Close, but leave it to the caller to give back the hold that is returned."""
        self._at_end.detach()
        self.data = NOTHING
        return self._hold

    def __enter__(self) -> BlockView:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a server: its boot id and the arena it had."""

    boot_id: str
    reading: Mapping
    writing: Mapping | None


class Link:
    """The connection to one server. Safe to use from several threads; they take turns."""

    def __init__(self, name: str, path: Path, *, writes: bool = True,
                 on_down: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self._path = path
        self._writes = writes
        self._on_down = on_down
        self._session = os.urandom(SESSION_BYTES)
        self._lock = threading.Lock()
        self._calls = itertools.count(1)
        self._socket: socket.socket | None = None
        self._incoming = FrameBuffer()
        self._asked: Request | None = None
        self._life: Life | None = None
        self._viewed: set[int] = set()
        self._ended: deque[int] = deque()         # holds to give back with the next message
        self._suspects: deque[bytes] = deque()
        self._num_lost = 0
        self._closed = False
        _links.add(self)

    @property
    def is_up(self) -> bool:
        return self._socket is not None

    # ------------------------------------------------------------------------------------------ connecting

    def connect(self, timeout_s: float) -> None:
        """Connect, or come back after the connection was lost; holds of a server that lives on stay valid.

        Raises:
            PoolError: nobody there, refused, or too slow.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            life = self._shake_hands(sock, time.monotonic() + timeout_s)
        except (OSError, WireError, PoolError) as error:
            sock.close()
            raise PoolError(f"cannot reach {self.name}: {error}") from error
        with self._lock:
            if self._closed or self._socket is not None:
                sock.close()
                return
            if life is not self._life:
                self._ended.clear()               # holds of a life that is over
            self._life = life
            self._incoming = FrameBuffer()
            self._socket = sock
        log.info("%s is connected, boot %s", self.name, life.boot_id)
        self._send_releases()

    def _shake_hands(self, sock: socket.socket, deadline: float) -> Life:
        sock.settimeout(_remaining(deadline))
        sock.connect(str(self._path))
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.geteuid():
            raise PoolError(f"its owner is user {uid}")
        sock.sendall(frame(Hello(self._session, self._writes)))
        incoming, fds = FrameBuffer(), list[int]()
        try:
            while (body := incoming.next()) is None:
                sock.settimeout(_remaining(deadline))
                received, new_fds, _, _ = socket.recv_fds(sock, RECEIVE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
                fds += new_fds
                if not received:
                    raise PoolError("it closed the connection")
                incoming.feed(received)
            welcome = read_reply(body)
            if isinstance(welcome, Refused):
                raise PoolError(f"it refused: {welcome.cause}")
            if not isinstance(welcome, Welcome) or len(fds) != 1:
                raise WireError(f"a {type(welcome).__name__} with {len(fds)} descriptors answered Hello")
            if self._life is not None and self._life.boot_id == welcome.boot_id:
                return self._life
            reading = Mapping(fds[0], welcome.num_bytes, writable=False)
            writing = Mapping(fds[0], welcome.num_bytes, writable=True) if self._writes else None
            return Life(welcome.boot_id, reading, writing)
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Say what has ended and hang up; with views still open, when the last of them is closed."""
        self._closed = True
        self._send_releases()
        with self._lock:
            self._hang_up_when_done()

    def _hang_up_when_done(self) -> None:
        if self._closed and not self._viewed:
            self._life = None
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def forget_after_fork(self) -> None:
        """In a forked child: the connection and the memory are the parent's."""
        self._lock = threading.Lock()             # another thread of the parent may have held it
        self._closed = True
        self._life = None
        self._ended.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # ------------------------------------------------------------------------------------------ asking

    def ask(self, kind: type[ReplyT], build: Callable[[int], Request], deadline: float) -> ReplyT:
        """Send a request and wait for its answer.

        Raises:
            PoolError: the server is gone, too slow, or answered something else.
        """
        self.begin(build, deadline)
        return self.finish(kind, deadline)

    def begin(self, build: Callable[[int], Request], deadline: float) -> None:
        """Send the request that `build` makes with a call number; `finish` or `give_up` must follow."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PoolError(f"{self.name} is busy with other requests until the deadline")
        try:
            if self._socket is None or self._closed:
                raise PoolError(f"{self.name} is not connected")
            timeout_s = deadline - time.monotonic()
            if timeout_s <= 0:
                raise PoolError(f"{self.name} was not asked: the deadline has passed")
            request = build(next(self._calls))
            message = frame(request)
            self._asked = request
            self._socket.settimeout(timeout_s)
            self._socket.sendall(message)
        except OSError as error:
            self._lose(f"cannot send: {error}")
            self._lock.release()
            raise PoolError(f"{self.name} is gone or too slow: {error}") from error
        except BaseException:
            self._asked = None
            self._lock.release()
            raise

    def finish(self, kind: type[ReplyT], deadline: float) -> ReplyT:
        """Wait for the answer to what `begin` sent."""
        try:
            reply = self._receive(deadline)
            if not isinstance(reply, kind) or reply.call != getattr(self._asked, "call", 0):
                raise WireError(reply.cause if isinstance(reply, Refused) else f"a {type(reply).__name__} is no answer")
            self._asked = None
            return reply
        except (OSError, WireError) as error:
            raise PoolError(f"{self.name} is gone or too slow: {error}") from error
        finally:
            if self._asked is not None:
                self._lose("no answer in time, or a wrong one")
            self._lock.release()
            self._send_releases()

    def give_up(self) -> None:
        """Instead of `finish`: the answer is not wanted any more."""
        self._lose("its answer is not waited for")
        self._lock.release()

    def _receive(self, deadline: float) -> AnyReply:
        assert self._socket is not None, "a connection is closed only under its lock"
        while (body := self._incoming.next()) is None:
            self._socket.settimeout(max(deadline - time.monotonic(), GRACE_S))
            received = self._socket.recv(RECEIVE_BYTES)
            if not received:
                raise ConnectionResetError("it closed the connection")
            self._incoming.feed(received)
        return read_reply(body)

    def _lose(self, cause: str) -> None:
        """Close a connection that cannot go on. Holds that the unanswered request may have taken go back later."""
        if isinstance(self._asked, (Lease, Reserve)):
            self._ended.extend(range(self._asked.first_hold, self._asked.first_hold + len(self._asked.keys)))
        self._asked = None
        if self._socket is not None:
            log.warning("%s is lost: %s", self.name, cause)
            self._socket.close()
            self._socket = None
            self._on_down()

    # ------------------------------------------------------------------------------------------ holds

    @staticmethod
    def first_hold(call: int) -> int:
        """The number of a call's first hold; every call has its own range."""
        return call * MAX_KEYS

    def views(self, reply: Leased, keys: Sequence[bytes]) -> list[BlockView | None]:
        """The leased blocks of a reply, where they lie."""
        life, first = self._life, self.first_hold(reply.call)
        views: list[BlockView | None] = []
        for i, (key, slot) in enumerate(zip(keys, reply.slots, strict=True)):
            if slot is None or life is None or life.boot_id != reply.boot_id or not _lies_within(life.reading, slot):
                views.append(None)
            else:
                self._viewed.add(first + i)
                views.append(BlockView(self, life.reading, key, first + i, slot))
        return views

    def room(self, boot_id: str, slot: Slot) -> memoryview | None:
        """The writable bytes of a reservation; None when the server that made it is gone."""
        life = self._life
        if life is None or life.boot_id != boot_id or life.writing is None or not _lies_within(life.writing, slot):
            return None
        return life.writing.data(slot.offset, slot.num_bytes).data

    def give_back(self, *holds: int) -> None:
        """End holds. They are told to the server now if the connection is free, else right after what occupies it."""
        self._viewed.difference_update(holds)
        self._ended.extend(holds)
        self._send_releases()

    def report(self, key: bytes, *, lost: bool) -> None:
        """A block did not prove itself after a copy; goes with the next `give_back`."""
        self._num_lost += lost
        self._suspects.append(key)

    def _send_releases(self) -> None:
        # Whoever notes a hold while another thread has the lock leaves it to that thread, which looks again after it.
        while (self._ended or self._suspects or self._closed) and self._lock.acquire(blocking=False):
            try:
                if self._socket is None:
                    return                        # they go over the next connection, if there is one
                self._send_release(self._socket)
                if not self._ended:
                    self._hang_up_when_done()
                    if self._closed:
                        return
            except OSError as error:
                self._lose(f"cannot send: {error}")
                return
            finally:
                self._lock.release()

    def _send_release(self, sock: socket.socket) -> None:
        holds = [self._ended[i] for i in range(min(len(self._ended), MAX_KEYS))]
        suspects = [self._suspects[i] for i in range(min(len(self._suspects), MAX_KEYS))]
        num_lost = self._num_lost
        if not holds and not suspects:
            return
        message = frame(Release(holds, num_lost, suspects))
        sock.setblocking(False)
        if sock.send(message) != len(message):    # a server that reads has room for this
            raise BlockingIOError("the server does not read")
        self._num_lost -= num_lost
        for _ in holds:
            self._ended.popleft()
        for _ in suspects:
            self._suspects.popleft()


def _lies_within(mapping: Mapping, slot: Slot) -> bool:
    return 0 <= slot.offset <= slot.offset + HEADER_BYTES + slot.num_bytes <= mapping.num_bytes


def _remaining(deadline: float) -> float:
    """Seconds until `deadline`; raises TimeoutError when it has passed."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("the deadline has passed")
    return remaining_s


def _forget_links_after_fork() -> None:
    for link in list(_links):
        link.forget_after_fork()


os.register_at_fork(after_in_child=_forget_links_after_fork)
