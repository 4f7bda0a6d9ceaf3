"""The owner of one node's share of the pool: one process, one arena, one loop.

Clients of the same host are told where blocks lie and read and write the shared memory themselves, so
this loop moves no bytes. It waits for nobody: sockets never block, a client that does not read its
answers is not listened to either, and everybody else is served meanwhile.

What a client holds belongs to its process. The kernel names the process of each connection and reports
its exit through a pidfd; then its leases and half puts end. The end of a connection alone proves nothing:
a forked child keeps a dead client's socket open, and a client may lose its socket while it reads. Such
holds wait, quarantined, until the process is gone or comes back by its session.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tripool.core.errors import ConfigError, WireError
from tripool.pool.arena import Mapping, create_arena, read_only
from tripool.pool.index import BUSY_S, MAX_HELD_FRACTION, Block, BlockIndex, Holder
from tripool.pool.wire import (
    Existing,
    Exists,
    Flush,
    Flushed,
    FrameBuffer,
    GetStats,
    Hello,
    Lease,
    Leased,
    Refused,
    Release,
    Reply,
    Reserve,
    Reserved,
    Seal,
    Sealed,
    Slot,
    Stats,
    Status,
    Welcome,
    frame,
    read_request,
)

log = logging.getLogger(__name__)

MAX_CLIENTS = 256
RECEIVE_BYTES = 1 << 18
_CREDENTIALS = struct.Struct("3i")       # pid, uid, gid, as SO_PEERCRED has them


class Process:
    """A process that has or had connections here, and what its sessions hold."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.sessions: dict[bytes, Session] = {}
        self.num_connections = 0


class Session(Holder):
    """A client of a process. It may lose its connection and come back with another."""

    def __init__(self, session_id: bytes, process: Process) -> None:
        super().__init__(f"pid {process.pid}")
        self.session_id = session_id
        self.process = process
        self.connection: Connection | None = None


class Connection:
    """One stream: what came and is not a whole frame yet, and what is not sent yet."""

    def __init__(self, sock: socket.socket, process: Process) -> None:
        self.sock = sock
        self.process = process
        self.session: Session | None = None
        self.incoming = FrameBuffer()
        self.outgoing = bytearray()
        self.closed = False


class PoolServer:
    """Serves one arena at one Unix socket.

    Raises:
        ConfigError: the memory is not there, or the socket's path is taken or cannot be used.
    """

    def __init__(self, path: Path, num_bytes: int, *, name: str = "cache", busy_s: float = BUSY_S,
                 max_held_fraction: float = MAX_HELD_FRACTION, max_clients: int = MAX_CLIENTS) -> None:
        self.path = path
        self.name = name
        self.boot_id = os.urandom(8).hex()
        self._max_clients = max_clients
        self._started_at = time.monotonic()
        self._stopping = False
        self._processes: dict[int, Process] = {}
        self._connections: list[Connection] = []
        self._listener = _listen(path)
        self._socket_inode = path.stat().st_ino
        try:
            num_bytes = -(-num_bytes // os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PAGE_SIZE")
            self._arena_fd = create_arena(name, num_bytes)
        except BaseException:
            self._unlisten()
            raise
        self._read_only_fd = read_only(self._arena_fd)
        arena = Mapping(self._arena_fd, num_bytes, writable=True)
        self.num_bytes = num_bytes
        self._index = BlockIndex(arena, busy_s=busy_s, max_held_fraction=max_held_fraction)
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._watch(self._listener, self._accept)
        self._watch(self._stop_fd, self._note_stop)

    # ------------------------------------------------------------------------------------------ life

    def serve_forever(self) -> None:
        """Serve until `stop`, then close."""
        try:
            while not self._stopping:
                for key, _ in self._selector.select():
                    key.data()
        finally:
            self.close()

    def stop(self) -> None:
        """End `serve_forever`; from any thread or signal handler."""
        os.eventfd_write(self._stop_fd, 1)

    def _note_stop(self) -> None:
        # Only the loop sets it: were it set by `stop`, a busy loop could close the descriptor before it is written to.
        self._stopping = True

    def close(self) -> None:
        """Give everything back. Clients keep what they have mapped."""
        for connection in list(self._connections):
            self._disconnect(connection)
        for process in list(self._processes.values()):
            self._forget(process)
        self._selector.close()
        self._unlisten()
        for fd in (self._stop_fd, self._arena_fd, self._read_only_fd):
            os.close(fd)

    def _unlisten(self) -> None:
        self._listener.close()
        try:
            if self.path.stat().st_ino == self._socket_inode:
                self.path.unlink()
        except FileNotFoundError:
            pass                                  # somebody tidied up already

    # ------------------------------------------------------------------------------------------ figures

    def metrics(self) -> dict[str, int | float]:
        """Figures for an exporter, safe to read from any thread. Names ending in `_bytes` and `_s` say their unit."""
        quarantined = [session for process in list(self._processes.values())
                       for session in list(process.sessions.values()) if session.connection is None]
        return {
            **self._index.figures(),
            "clients": len(self._connections),
            "quarantined_bytes": sum(session.held_bytes for session in quarantined),
            "uptime_s": time.monotonic() - self._started_at,
        }

    def check(self) -> None:
        """Assert that nothing leaked; for tests, on a server at rest."""
        self._index.check([session for process in self._processes.values() for session in process.sessions.values()])

    def _holders(self) -> str:
        """Who holds the memory, in a sentence for whoever got none."""
        largest = sorted(
            (session for process in self._processes.values() for session in process.sessions.values()
             if session.held_bytes), key=lambda session: -session.held_bytes)
        names = [f"{session.name} holds {session.held_bytes} bytes"
                 + ("" if session.connection else " and has no connection (quarantined)") for session in largest[:8]]
        return f"of {self.num_bytes} bytes: " + ("; ".join(names) or "nobody holds any")

    # ------------------------------------------------------------------------------------------ connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:                  # the peer is gone already, or we have no descriptor left
            log.warning("%s: cannot accept a client: %s", self.name, error)
            return
        sock.setblocking(False)
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        cause = self._objection(pid, uid)
        process = None if cause else self._process(pid)
        if process is None:
            self._turn_away(sock, cause or f"process {pid} cannot be watched")
            return
        process.num_connections += 1
        connection = Connection(sock, process)
        self._connections.append(connection)
        self._watch(sock, lambda: self._on_ready(connection))

    def _objection(self, pid: int, uid: int) -> str | None:
        if uid != os.geteuid():
            return f"user {uid} is not the user of this server"
        if pid == 0:
            return "the client's process cannot be seen from here (another pid namespace), so its end could not either"
        if len(self._connections) >= self._max_clients:
            return f"{self._max_clients} clients are connected already"
        return None

    def _turn_away(self, sock: socket.socket, cause: str) -> None:
        log.warning("%s: a client is refused: %s", self.name, cause)
        try:
            sock.send(frame(Refused(0, self.boot_id, cause)))
        except OSError:
            pass                                  # it does not listen
        sock.close()

    def _process(self, pid: int) -> Process | None:
        """The record of a living process; None when it cannot be watched."""
        known = self._processes.get(pid)
        if known is not None:
            return known
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:                           # it is gone, or we have no descriptor left
            return None
        process = self._processes[pid] = Process(pid, pidfd)
        self._watch(pidfd, lambda: self._on_exit(process))
        return process

    def _on_exit(self, process: Process) -> None:
        """A client's process is gone: what it held is free. Its connections may live on in a forked child; they end."""
        for connection in [each for each in self._connections if each.process is process]:
            self._disconnect(connection)
        for session in process.sessions.values():
            self._index.release_all(session)
        process.sessions.clear()
        self._forget(process)

    def _on_ready(self, connection: Connection) -> None:
        if connection.closed:
            return                                # by an earlier event of the same round
        try:
            if connection.outgoing:
                self._flush_outgoing(connection)
            else:
                received = connection.sock.recv(RECEIVE_BYTES)
                if not received:
                    self._disconnect(connection)
                    return
                connection.incoming.feed(received)
            self._handle_frames(connection)
        except BlockingIOError:
            pass
        except OSError:                           # the peer is gone: an ordinary event
            self._disconnect(connection)
        except WireError as error:
            log.warning("%s: %s sent a wrong message: %s", self.name, f"pid {connection.process.pid}", error)
            self._refuse(connection, str(error))
        except Exception:                         # our own mistake; it costs one client its connection, not all of them
            log.exception("%s: a message of pid %d failed", self.name, connection.process.pid)
            self._refuse(connection, "the server failed on this message")

    def _handle_frames(self, connection: Connection) -> None:
        """Answer every whole frame, but none while an earlier answer waits to be sent."""
        while not connection.closed and not connection.outgoing:
            body = connection.incoming.next()
            if body is None:
                return
            self._handle(connection, body)

    def _refuse(self, connection: Connection, cause: str) -> None:
        try:
            connection.sock.send(frame(Refused(0, self.boot_id, cause[:1000])))
        except OSError:
            pass                                  # it does not listen
        self._disconnect(connection)

    def _disconnect(self, connection: Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        self._connections.remove(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        process, session = connection.process, connection.session
        process.num_connections -= 1
        if session is not None and session.connection is connection:
            session.connection = None             # its holds are quarantined
            if not session.blocks:
                del process.sessions[session.session_id]
        if not process.sessions and not process.num_connections:
            self._forget(process)

    def _forget(self, process: Process) -> None:
        if self._processes.pop(process.pid, None) is not None:
            self._selector.unregister(process.pidfd)
            os.close(process.pidfd)

    def _watch(self, file: socket.socket | int, react: Callable[[], None], events: int = selectors.EVENT_READ) -> None:
        self._selector.register(file, events, react)

    # ------------------------------------------------------------------------------------------ messages

    def _handle(self, connection: Connection, body: bytes) -> None:
        request = read_request(body)
        session = connection.session
        if isinstance(request, Hello):
            self._welcome(connection, request)
            return
        if session is None:
            raise WireError(f"a {type(request).__name__} came before Hello")
        match request:
            case Release():
                self._release(session, request)
            case Reserve():
                self._send(connection, self._reserve(session, request))
            case Seal():
                self._send(connection, self._seal(session, request))
            case Lease():
                self._send(connection, self._lease(session, request))
            case Exists():
                found = [self._index.exists(key) for key in request.keys]
                self._send(connection, Existing(request.call, self.boot_id, found))
            case Flush():
                self._send(connection, Flushed(request.call, self.boot_id, self._index.flush()))
            case GetStats():
                values = {**self.metrics(), "holders": self._holders()}
                self._send(connection, Stats(request.call, self.boot_id, values))

    def _welcome(self, connection: Connection, hello: Hello) -> None:
        if connection.session is not None:
            raise WireError("a second Hello on one connection")
        sessions = connection.process.sessions
        session = sessions.get(hello.session)
        if session is not None and session.connection is not None:
            self._disconnect(session.connection)  # what it still had to say is void: its client has moved on
        session = sessions.setdefault(hello.session, session or Session(hello.session, connection.process))
        session.connection, connection.session = connection, session
        reply = frame(Welcome(0, self.boot_id, self.name, self.num_bytes))
        fd = self._arena_fd if hello.writes else self._read_only_fd
        if socket.send_fds(connection.sock, [reply], [fd]) != len(reply):
            self._disconnect(connection)          # a new socket takes a hundred bytes, unless its peer is at an end

    def _reserve(self, session: Session, request: Reserve) -> Reserved:
        _check_new_holds(session, request.first_hold, len(request.keys))
        now = time.monotonic()
        statuses: list[Status] = []
        slots: list[Slot | None] = []
        for i, (key, num_bytes) in enumerate(zip(request.keys, request.sizes, strict=True)):
            outcome = self._index.reserve(session, request.first_hold + i, key, num_bytes, now)
            statuses.append(Status.OK if isinstance(outcome, Block) else outcome)
            slots.append(_slot(outcome) if isinstance(outcome, Block) else None)
        cause = self._holders() if Status.NO_SPACE in statuses else ""
        return Reserved(request.call, self.boot_id, statuses, slots, cause)

    def _seal(self, session: Session, request: Seal) -> Sealed:
        """The last of a batch is sealed first: it counts as older, and a chain loses its end before its beginning."""
        statuses = [self._index.seal(session, hold, checksum)
                    for hold, checksum in zip(reversed(request.holds), reversed(request.checksums), strict=True)]
        return Sealed(request.call, self.boot_id, statuses[::-1])

    def _lease(self, session: Session, request: Lease) -> Leased:
        _check_new_holds(session, request.first_hold, len(request.keys))
        slots: list[Slot | None] = []
        for i, key in enumerate(request.keys):
            block = self._index.lease(session, request.first_hold + i, key)
            slots.append(_slot(block) if block else None)
            if block is None and request.prefix:
                self._index.counters.partial += i > 0
                break
        return Leased(request.call, self.boot_id, slots + [None] * (len(request.keys) - len(slots)))

    def _release(self, session: Session, request: Release) -> None:
        for hold in request.holds:
            self._index.release(session, hold)
        self._index.counters.lease_lost += request.num_lost
        for key in request.suspects:
            self._index.suspect(key)

    def _send(self, connection: Connection, reply: Reply) -> None:
        connection.outgoing += frame(reply)
        self._flush_outgoing(connection)

    def _flush_outgoing(self, connection: Connection) -> None:
        try:
            sent = connection.sock.send(connection.outgoing)
            del connection.outgoing[:sent]
        except BlockingIOError:
            pass                                  # it does not read; it is asked again when it does
        events = selectors.EVENT_WRITE if connection.outgoing else selectors.EVENT_READ
        key = self._selector.get_key(connection.sock)
        if key.events != events:
            self._selector.modify(connection.sock, events, key.data)


def _slot(block: Block) -> Slot:
    return Slot(block.offset, block.num_bytes, block.generation, block.checksum)


def _check_new_holds(session: Session, first: int, count: int) -> None:
    for hold in range(first, first + count):
        if hold in session.blocks:
            raise WireError(f"hold {hold} is in use")


def _listen(path: Path) -> socket.socket:
    """A listening socket at `path`. What a dead server left there is replaced; a living one is not."""
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigError(f"{path} is there and is not a socket; choose another path")
        if _answers(path):
            raise ConfigError(f"a server is running at {path} already")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(MAX_CLIENTS)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {path}: {error}") from error
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True                           # somebody listens, and has a queue
        except OSError:
            return False
        return True


def run_server(name: str, socket_path: Path, num_bytes: int, ready: Callable[[PoolServer], None] | None = None) -> None:
    """Be a pool server until SIGTERM or SIGINT: the whole life of its process.

    `ready` is called once clients can connect, with the server, so that its metrics can be exported.
    """
    server = PoolServer(socket_path, num_bytes, name=name)

    def stop(signal_number: int, _: FrameType | None) -> None:
        log.info("%s: stops on %s", name, signal.Signals(signal_number).name)
        server.stop()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
    log.info("%s: %d bytes at %s, boot %s", name, server.num_bytes, socket_path, server.boot_id)
    if ready is not None:
        ready(server)
    server.serve_forever()
