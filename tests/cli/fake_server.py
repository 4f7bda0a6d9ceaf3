"""A server on the loopback whose answers and their times are written down beforehand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from typer.testing import CliRunner, Result

from tripool.cli.client import Server
from tripool.cli.main import app

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Script:
    """One answer. Each event is (seconds after the request, event); an event is a value, or text sent as it is."""

    events: Sequence[tuple[float, Any]] = ()
    status: int = 200
    body: Any = None                   # instead of events
    closes: bool = False               # the connection, in the middle of the answer
    sent_s: list[float] = field(default_factory=list)      # when each event was really sent, `time.perf_counter()`


@dataclass
class Seen:
    """What the server was asked."""

    requests: list[tuple[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    connections: int = 0
    most_at_once: int = 0
    at_once: int = 0


def tokens(first_s: float, gap_s: float, count: int, *, per_event: int = 1, field_name: str = "content",
           finish: str = "stop", running_usage: bool = False) -> list[tuple[float, Any]]:
    """A chat stream of `count` tokens with exact times: events of `per_event` tokens, each token taking `gap_s`."""
    events, at = [(0.0, chat({"role": "assistant", "content": ""}))], first_s
    for start in range(0, count, per_event):
        brought = min(per_event, count - start)
        event = chat({field_name: "x" * brought})
        if running_usage:
            event["usage"] = {"prompt_tokens": 5, "completion_tokens": start + brought}
        events.append((at, event))
        at += gap_s * per_event
    end = events[-1][0]
    usage = {"prompt_tokens": 5, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 3}}
    return [*events, (end, chat({}, finish)), (end, {"choices": [], "usage": usage}), (end, "[DONE]")]


def chat(delta: dict, finish: str | None = None) -> dict:
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


@contextlib.asynccontextmanager
async def fake_server(script_for: Callable[[str, Any], Script]) -> AsyncIterator[tuple[Server, Seen]]:
    """Serve scripts, chosen by path and body, until the block ends."""
    seen = Seen()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(line.split(":")[1]) for line in head.splitlines()
                               if line.lower().startswith("content-length:")), 0)
                body = json.loads(await reader.readexactly(length)) if length else None
                path = head.split(" ")[1]
                seen.requests.append((path, body))
                seen.heads.append(head)
                seen.at_once += 1
                seen.most_at_once = max(seen.most_at_once, seen.at_once)
                try:
                    if not await answer(writer, script_for(path, body)):
                        break
                finally:
                    seen.at_once -= 1
        writer.close()

    async def answer(writer: asyncio.StreamWriter, script: Script) -> bool:
        if script.body is not None or script.status != 200:
            text = json.dumps(script.body).encode() if script.body is not None else b""
            writer.write(f"HTTP/1.1 {script.status} Status\r\nContent-Type: application/json\r\n"
                         f"Content-Length: {len(text)}\r\n\r\n".encode() + text)
            await writer.drain()
            return True
        start = asyncio.get_running_loop().time()
        writer.write(HEAD.encode())
        for at, event in script.events:
            wait_s = start + at - asyncio.get_running_loop().time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            script.sent_s.append(time.perf_counter())
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        if script.closes:
            await writer.drain()
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Server(port=server.sockets[0].getsockname()[1]), seen
    finally:
        server.close()


@contextlib.contextmanager
def fake_server_beside(script_for: Callable[[str, Any], Script]) -> Iterator[tuple[str, Seen]]:
    """The same on a thread of its own, for commands that bring their own event loop: its URL and what it saw."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    context = fake_server(script_for)
    try:
        server, seen = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(timeout=10)
        yield server.url, seen
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(timeout=10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10)


def tripool(*words: str, stdin: str = "") -> Result:
    """Run a command in this process, as a terminal 120 columns wide would. The logs are as before afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        return CliRunner().invoke(app, list(words), input=stdin, env={"COLUMNS": "120"})
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
