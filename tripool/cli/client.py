"""A small HTTP client for our own commands: kept-alive connections, server-sent events with their arrival times.

It is written on the event loop's transport, because a load generator shares the machine's few cores with the server
it measures: an event costs one scan of a buffer and no task switch. It speaks plain HTTP/1.1 as servers of this kind
do, with or without TLS; redirects, proxies and compression are not for it.
"""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from tripool.core.errors import ConfigError, RequestError

EventTaker = Callable[[bytes, float], None]
"""Called with an event's data and the time of its arrival, `time.perf_counter()`."""

END_OF_EVENTS = b"[DONE]"
MAX_HEAD_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is and how to be let in."""

    host: str = "127.0.0.1"
    port: int = 8000
    tls: bool = False
    prefix: str = ""
    key: str = ""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    def encode(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A request on the wire."""
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Accept: */*"]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        if body:
            lines.append("Content-Type: application/json")
        if body or method != "GET":
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join((*lines, "", "")).encode() + body


def parse_server(url: str, key: str = "") -> Server:
    """A server from a URL such as `http://127.0.0.1:8000` or `127.0.0.1:8000`; a closing `/v1` is taken off.

    Raises:
        ConfigError: it is no such URL.
    """
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not an address: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{url!r} is not an address of a server; write for example http://127.0.0.1:8000")
    tls = parts.scheme == "https"
    return Server(host, port or (443 if tls else 80 if "://" in url else 8000), tls,
                  parts.path.rstrip("/").removesuffix("/v1"), key)


@dataclass(slots=True)
class Answer:
    """A status and what came with it. `body` is empty if events were taken one by one."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """The body's value.

        Raises:
            RequestError: the server refused; with the reason it gave.
        """
        if self.status >= 400:
            raise refusal(self)
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError as error:
            raise RequestError(f"the server's answer is not JSON: {self.body[:100]!r}", status=502) from error


def refusal(answer: Answer) -> RequestError:
    """Why a server refused, in its own words."""
    try:
        body = msgspec.json.decode(answer.body)
        message = body["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = answer.body[:200].decode(errors="replace") or "no reason given"
    return RequestError(f"the server answered {answer.status}: {message}", status=answer.status)


class Connection(asyncio.Protocol):
    """One kept-alive connection; one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._waiter: asyncio.Future[Answer] | None = None
        self._take_event: EventTaker | None = None
        self._reset()

    def _reset(self) -> None:
        self._answer: Answer | None = None
        self._left: int | None = None      # bytes of a body of known length still to come
        self._chunked = False
        self._events: bytearray | None = None

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on it."""
        return self._transport is not None and not self._transport.is_closing() and self._waiter is None

    async def ask(self, request: bytes, take_event: EventTaker | None = None) -> Answer:
        """Send a request and wait for the end of its answer; events of a stream go to `take_event` as they arrive.

        Raises:
            ConnectionError: the connection ended before the answer did.
        """
        assert self._waiter is None, "one exchange at a time"
        if self._transport is None or self._transport.is_closing():
            raise ConnectionError("the connection is closed")
        self._reset()
        self._take_event = take_event
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waiter
        except BaseException:
            self.close()                   # the rest of an answer cut short would be taken for the next one's
            raise
        finally:
            self._waiter = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)      # uvloop's do not derive from it

    def connection_lost(self, error: Exception | None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None and self._answer is not None and self._left is None and not self._chunked:
            self._finish()                 # a body that ends with the connection
        else:
            self._waiter.set_exception(ConnectionError(str(error or "the server closed the connection")))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        if self._waiter is None or self._waiter.done():
            self.close()                   # bytes that nobody asked for
            return
        try:
            while self._waiter is not None and not self._waiter.done() and self._read_some(now):
                pass
        except ValueError as error:
            self._waiter.set_exception(ConnectionError(f"the answer is not HTTP: {error}"))
            self.close()

    def _read_some(self, now: float) -> bool:
        """Read one piece of the answer; False if it is not all there yet."""
        if self._answer is None:
            return self._read_head()
        if self._chunked:
            return self._read_chunk(now)
        if not self._buffer:
            return False
        taken = len(self._buffer) if self._left is None else min(self._left, len(self._buffer))
        self._read_body(bytes(self._buffer[:taken]), now)
        del self._buffer[:taken]
        if self._left is not None:
            self._left -= taken
            if self._left == 0:
                self._finish()
        return True

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ValueError("the head is too long")
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[:end + 4]
        if not first.startswith("HTTP/1."):
            raise ValueError(repr(first[:40]))
        status = int(first.split(" ", 2)[1])
        if status == 100:
            return True
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._answer = Answer(status, headers)
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if self._take_event is not None and headers.get("content-type", "").startswith("text/event-stream"):
            self._events = bytearray()
        if not self._chunked and "content-length" in headers:
            self._left = int(headers["content-length"])
            if self._left == 0:
                self._finish()
        return True

    def _read_chunk(self, now: float) -> bool:
        start = self._buffer.find(b"\r\n")
        if start < 0:
            return False
        size = int(self._buffer[:start].split(b";")[0], 16)
        end = start + 2 + size
        if len(self._buffer) < end + 2:
            return False
        payload = bytes(self._buffer[start + 2:end])
        del self._buffer[:end + 2]
        if size:
            self._read_body(payload, now)
        else:
            self._finish()
        return True

    def _read_body(self, payload: bytes, now: float) -> None:
        assert self._answer is not None
        if self._events is None:
            self._answer.body += payload
            return
        assert self._take_event is not None
        self._events += payload
        while (end := self._events.find(b"\n\n")) >= 0:
            event = bytes(self._events[:end])
            del self._events[:end + 2]
            data = b"\n".join(line[5:].lstrip() for line in event.splitlines() if line.startswith(b"data:"))
            if data:
                self._take_event(data, now)

    def _finish(self) -> None:
        answer, waiter = self._answer, self._waiter
        assert answer is not None and waiter is not None
        if answer.headers.get("connection", "").lower() == "close":
            self.close()
        waiter.set_result(answer)


class Client:
    """Asks one server, on as many connections as are needed at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._idle: list[Connection] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def connect(self) -> Connection:
        """An idle connection, or a new one.

        Raises:
            ConfigError: no server answers there.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, self.server.host, self.server.port, ssl=self.server.tls or None)
        except OSError as error:
            raise ConfigError(f"no server answers at {self.server.url} ({error.strerror or error}); "
                              "start one with `tripool serve`, or give its address with --url") from error
        return connection

    async def ask(self, method: str, path: str, body: Any = None, *, take_event: EventTaker | None = None,
                  timeout_s: float = 600.0) -> Answer:
        """One exchange. A connection that the server closed while it was idle is replaced once.

        Raises:
            ConfigError: no server answers there.
            ConnectionError: the connection ended before the answer did.
            TimeoutError: the answer was not complete in time.
        """
        request = self.server.encode(method, path, b"" if body is None else msgspec.json.encode(body))
        started = False

        def note_event(data: bytes, now: float) -> None:
            nonlocal started
            started = True
            assert take_event is not None
            take_event(data, now)

        for last_try in (False, True):
            reused = bool(self._idle)
            connection = await self.connect()
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await connection.ask(request, note_event if take_event else None)
            except ConnectionError:
                if last_try or started or not reused:
                    raise
                continue
            if connection.usable:
                self._idle.append(connection)
            return answer
        raise AssertionError("the second try either answers or raises")

    async def follow(self, path: str, body: dict[str, Any], take: Callable[[dict[str, Any], float], None]) \
            -> dict[str, Any]:
        """Ask for a stream; each event goes to `take` with its time. Returns the usage.

        Raises:
            RequestError: the server refused, or the answer broke off.
        """
        usage: dict[str, Any] = {}
        ended, problem = False, ""

        def take_event(data: bytes, now: float) -> None:
            nonlocal usage, ended, problem
            if data == END_OF_EVENTS:
                ended = True
                return
            event = msgspec.json.decode(data)
            problem = problem or (event.get("error") or {}).get("message", "")
            usage = event.get("usage") or usage
            take(event, now)

        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        answer = await self.ask("POST", path, streamed, take_event=take_event)
        if answer.status != 200:
            raise refusal(answer)
        if problem or not ended:
            raise RequestError(f"the answer broke off: {problem or 'the stream ended early'}", status=502)
        return usage

    async def get(self, path: str) -> Any:
        """The JSON value of a page."""
        return (await self.ask("GET", path, timeout_s=30.0)).json()

    async def post(self, path: str, body: Any) -> Any:
        """The JSON value of an answer."""
        return (await self.ask("POST", path, body)).json()
