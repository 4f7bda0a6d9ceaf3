"""Long-lived streams between the processes of a deployment, and who may open one.

A link is one Unix-socket or TCP connection that carries frames both ways. It begins with a greeting: each
side proves that it knows the cluster key by answering the other's nonce, so the key itself never travels
and an old recording is worthless. On one host the sockets lie in a directory of the owner alone, and the
peer's user id is checked besides; over TCP a key is required. A listener may hand file descriptors to a
caller on the same host right after the greeting. The end of a stream is an event of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from tripool.core.errors import ConfigError, WireError
from tripool.core.machine import Address
from tripool.serve.wire import (
    GREETINGS,
    HEAD,
    MAX_GREETING_BYTES,
    PROTOCOL_VERSION,
    FrameReader,
    Opening,
    Proof,
    Refused,
    Welcome,
    encode,
)

log = logging.getLogger(__name__)

GREETING_DEADLINE_S = 5.0
MAX_UNSENT_BYTES = 64 << 20      # a peer that reads no more (stopped, say) must not fill our memory
NONCE_BYTES = 32
MAX_FDS = 64
HAVE_FDS = b"\x01"
NO_FDS = b"\x00"


def host_id() -> str:
    """Names this kernel and its process namespace: processes with equal ids share memory and see each other's pids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def parse_address(text: str) -> tuple[str, str, int]:
    """(`unix`, path, 0) or (`tcp`, host, port) of `unix:/path` or `tcp://host:port`.

    Raises:
        ConfigError: it is neither.
    """
    if text.startswith("unix:"):
        return "unix", text[5:], 0
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if text.startswith("tcp://") and host and port.isdigit() and int(port) < 65536:
        return "tcp", host.strip("[]"), int(port)
    raise ConfigError(f"{text!r} is not an address; give unix:/path or tcp://host:port")


def own_address_towards(address: str) -> str:
    """This host's address on the network that leads to a TCP address. Sends nothing."""
    _, host, port = parse_address(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def prove(key: bytes, nonce: bytes, *words: str) -> bytes:
    """The answer to a nonce that only a holder of the key can give, bound to who says it."""
    digest = hmac.new(key, nonce, hashlib.sha256)
    for word in words:
        digest.update(len(word).to_bytes(4, "little") + word.encode())
    return digest.digest()


class Link(asyncio.Protocol):
    """One open stream after its greeting."""

    def __init__(self, peer: Opening | Welcome, allowed: tuple[type, ...],
                 deliver: Callable[[Link, Address, Any], None], closed: Callable[[Link, str], None]) -> None:
        self.peer = peer
        self.is_open = False
        self._reader = FrameReader(allowed)
        self._deliver = deliver
        self._closed = closed
        self._unsent: list[bytes] = []
        self._cause = "the peer closed the connection"
        self._transport: asyncio.Transport | None = None

    @property
    def member(self) -> str:
        return self.peer.member

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)     # uvloop's has another base
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            for to, message in self._reader.feed(data):
                self._deliver(self, to, message)
        except WireError as error:
            log.error("link to %s closed: %s", self.member, error)
            self.close(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._closed(self, str(error) if error else self._cause)

    def send(self, to: Address, message: Any) -> None:
        """Queue a message; `flush` sends it."""
        if self.is_open:
            self._unsent.append(encode(to, message))

    def flush(self) -> None:
        if self._unsent and self._transport is not None:
            self._transport.write(self._unsent[0] if len(self._unsent) == 1 else b"".join(self._unsent))
            self._unsent.clear()
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self.close(f"{self.member} does not read; over {MAX_UNSENT_BYTES} bytes wait for it")

    def close(self, cause: str) -> None:
        self._cause = cause
        if self._transport is not None:
            self._transport.abort()


class Listener:
    """Takes callers at one address."""

    def __init__(self, address: str, me: Opening, key: bytes, accept: Callable[[Opening], str | Link],
                 fds: Callable[[], Sequence[int]] = tuple) -> None:
        """`accept` returns the link for a proven caller, or the reason why it is refused."""
        self.address = address
        self._me = me
        self._key = key
        self._accept = accept
        self._fds = fds
        self._kind, self._where, self._port = parse_address(address)
        if self._kind == "tcp" and not key:
            raise ConfigError(f"joining over {address} needs a cluster key; give --cluster-key-file")
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Bind and begin to accept.

        Raises:
            ConfigError: the address is taken or not ours.
        """
        family = socket.AF_UNIX if self._kind == "unix" else (socket.AF_INET6 if ":" in self._where else socket.AF_INET)
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            if self._kind == "unix":
                Path(self._where).unlink(missing_ok=True)
                listening.bind(self._where)
                os.chmod(self._where, 0o600)
            else:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind((self._where, self._port))
                self._port = listening.getsockname()[1]
                self.address = f"tcp://{self._where}:{self._port}"
        except OSError as error:
            listening.close()
            raise ConfigError(f"cannot listen at {self.address}: {error.strerror}; choose another address") from error
        listening.listen(128)
        listening.setblocking(False)
        self._socket = listening
        self._listening = asyncio.get_running_loop().create_task(self._serve(listening))

    async def stop(self) -> None:
        for task in (self._listening, *self._tasks):
            if task is not None:
                task.cancel()
        if self._socket is not None:
            self._socket.close()
        if self._kind == "unix":
            Path(self._where).unlink(missing_ok=True)

    async def _serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            caller, _ = await loop.sock_accept(listening)
            task = loop.create_task(self._greet(caller))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _greet(self, caller: socket.socket) -> None:
        caller.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(GREETING_DEADLINE_S):
                link = await self._greeting(loop, caller)
            if link is None:
                caller.close()
            elif self._kind == "unix":
                await loop.create_unix_connection(lambda: link, sock=caller)
            else:
                await loop.create_connection(lambda: link, sock=caller)
        except (OSError, WireError, TimeoutError) as error:
            log.warning("a caller at %s was turned away: %s", self.address, error or "no greeting in time")
            caller.close()

    async def _greeting(self, loop: asyncio.AbstractEventLoop, caller: socket.socket) -> Link | None:
        if self._kind == "unix":
            uid = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            if uid not in (0, os.getuid()):
                raise WireError(f"its user id is {uid}")
        else:
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opening = await self._read(loop, caller)
        if not isinstance(opening, Opening):
            raise WireError("it did not open with an Opening")
        if opening.version != PROTOCOL_VERSION:
            await self._refuse(loop, caller, f"it speaks protocol {opening.version}, this side {PROTOCOL_VERSION}; "
                                             "run the same version everywhere")
            return None
        nonce = os.urandom(NONCE_BYTES)
        proof = prove(self._key, opening.nonce, self._me.member, opening.member)
        welcome = Welcome(self._me.member, self._me.boot_id, self._me.host_id, nonce, proof)
        await loop.sock_sendall(caller, encode("", welcome))
        answer = await self._read(loop, caller)
        expected = prove(self._key, nonce, opening.member, self._me.member)
        if not isinstance(answer, Proof) or not hmac.compare_digest(answer.proof, expected):
            await self._refuse(loop, caller, "the cluster keys differ")
            return None
        verdict = self._accept(opening)
        if isinstance(verdict, str):
            await self._refuse(loop, caller, verdict)
            return None
        fds = list(self._fds()) if self._kind == "unix" else []
        await loop.sock_sendall(caller, encode("", Proof(b"")))
        socket.send_fds(caller, [HAVE_FDS if fds else NO_FDS], fds)
        return verdict

    async def _refuse(self, loop: asyncio.AbstractEventLoop, caller: socket.socket, cause: str) -> None:
        await loop.sock_sendall(caller, encode("", Refused(cause)))
        log.warning("a caller at %s was refused: %s", self.address, cause)

    async def _read(self, loop: asyncio.AbstractEventLoop, caller: socket.socket) -> Any:
        head = await _receive(loop, caller, HEAD.size)
        body = await _receive(loop, caller, _greeting_length(head))
        return _greeting_message(head, body)


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = await loop.sock_recv(sock, length - len(data))
        if not more:
            raise WireError("it hung up during the greeting")
        data += more
    return data


def _greeting_length(head: bytes) -> int:
    length, _, _ = HEAD.unpack(head)
    if length > MAX_GREETING_BYTES:
        raise WireError(f"a greeting of {length} bytes is over the limit of {MAX_GREETING_BYTES}")
    return int(length)


def _greeting_message(head: bytes, body: bytes) -> Any:
    for _, message in FrameReader(GREETINGS, MAX_GREETING_BYTES).feed(head + body):
        return message
    raise WireError("a greeting is cut short")


async def call(address: str, me: Opening, key: bytes, make_link: Callable[[Welcome], Link],
               deadline_s: float = GREETING_DEADLINE_S) -> tuple[Link, list[int]]:
    """Open a link to a listener. Returns the link and the file descriptors that it handed over.

    Raises:
        WireError: refused, or not who it should be.
        OSError: nobody listens there.
        TimeoutError: no answer in time.
    """
    sock, welcome, fds = await asyncio.to_thread(_dial, address, me, key, deadline_s)
    loop = asyncio.get_running_loop()
    link = make_link(welcome)
    if sock.family == socket.AF_UNIX:
        await loop.create_unix_connection(lambda: link, sock=sock)
    else:
        await loop.create_connection(lambda: link, sock=sock)
    return link, fds


def _dial(address: str, me: Opening, key: bytes, deadline_s: float) -> tuple[socket.socket, Welcome, list[int]]:
    kind, where, port = parse_address(address)
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(deadline_s)
        target: Any = where
    else:
        sock = socket.socket(socket.AF_INET6 if ":" in where else socket.AF_INET, socket.SOCK_STREAM)
        sock.settimeout(deadline_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        target = (where, port)
    try:
        sock.connect(target)
        opening = Opening(me.version, me.member, me.role, me.boot_id, me.host_id, me.listen, os.urandom(NONCE_BYTES))
        sock.sendall(encode("", opening))
        welcome = _read_blocking(sock)
        if isinstance(welcome, Refused):
            raise WireError(f"{address} refused: {welcome.cause}")
        if not isinstance(welcome, Welcome):
            raise WireError(f"{address} did not answer with a Welcome")
        expected = prove(key, opening.nonce, welcome.member, me.member)
        if not hmac.compare_digest(welcome.proof, expected):
            raise WireError(f"{address} does not know the cluster key")
        sock.sendall(encode("", Proof(prove(key, welcome.nonce, me.member, welcome.member))))
        verdict = _read_blocking(sock)
        if isinstance(verdict, Refused):
            raise WireError(f"{address} refused: {verdict.cause}")
        data, fds, _, _ = socket.recv_fds(sock, 1, MAX_FDS)
        if not data:
            raise WireError(f"{address} hung up during the greeting")
        sock.settimeout(None)
        sock.setblocking(False)
        return sock, welcome, list(fds)
    except BaseException:
        sock.close()
        raise


def _read_blocking(sock: socket.socket) -> Any:
    def receive(length: int) -> bytes:
        data = b""
        while len(data) < length:
            more = sock.recv(length - len(data))
            if not more:
                raise WireError("the other side hung up during the greeting")
            data += more
        return data

    head = receive(HEAD.size)
    return _greeting_message(head, receive(_greeting_length(head)))
