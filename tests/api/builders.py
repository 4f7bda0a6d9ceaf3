"""A small vocabulary, a chat template with DeepSeek's marks, and an application around a scripted backend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import tokenizers
import uvicorn
from starlette.applications import Starlette
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from tests.api.scripted import ScriptedBackend
from tripool.api.app import build_app
from tripool.api.chat import ChatTemplate
from tripool.api.schema import ChatCompletionChunk, CompletionChunk
from tripool.api.settings import ApiSettings
from tripool.api.tokenizer import Tokenizer

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
CORPUS = ["the quick brown fox jumps over the lazy dog and the answer is forty two because they think so",
          "once upon a time there was a careful boy named hugo who had a pink button that his grandmother made",
          "你好，世界。今天天气很好，我们去公园吧。", "naïve café résumé 🦊🐕 😀😃"]
MODEL = "tiny"
WINDOW = 128

THINKING_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '<｜User｜>' + message.content -}}
{%- elif message.role == 'assistant' -%}
{{- '<｜Assistant｜>' -}}
{%- if message.reasoning_content -%}{{- '<think>' + message.reasoning_content + '</think>' -}}{%- endif -%}
{{- (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '[' + call.function.name + call.function.arguments + ']' -}}
{%- endfor -%}
{{- eos_token -}}
{%- else -%}{{- message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<｜Assistant｜>' + ('</think>' if enable_thinking is defined and not enable_thinking else '<think>\\n') -}}
{%- endif -%}
"""


@cache
def tokenizer() -> Tokenizer:
    """A byte-level vocabulary: every text can be written, and many characters are split between tokens."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    inner.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in (BOS, EOS, USER, ASSISTANT)])
    inner.add_tokens([AddedToken(each, special=False, normalized=False) for each in ("<think>", "</think>")])
    return Tokenizer(inner, {"bos_token": BOS, "eos_token": {"content": EOS}, "add_bos_token": True})


def token(text: str) -> int:
    """The id of an added token."""
    found = tokenizer().inner.token_to_id(text)
    assert found is not None
    return found


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def split_ids(text: str) -> list[int]:
    """One token for each byte: characters and tags cut in as many places as possible."""
    table = {tokenizer().token_bytes(each): each for each in range(tokenizer().vocab_size)}
    return [table[bytes([byte])] for byte in text.encode()]


def settings(**changes: Any) -> ApiSettings:
    values: dict[str, Any] = dict(
        model_name=MODEL, tokenizer=tokenizer(), vocab_size=tokenizer().vocab_size + 8, max_model_len=WINDOW,
        template=ChatTemplate(THINKING_TEMPLATE, tokenizer().special_tokens), eos_token_ids=(token(EOS),))
    return ApiSettings(**{**values, **changes})


def application(backend: ScriptedBackend, **changes: Any) -> Starlette:
    return build_app(backend, settings(**changes))


@dataclass
class Reply:
    """An answer as it came over ASGI."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The data of each event; the terminator as text. Every chunk is checked against the published shape."""
        events: list[Any] = []
        for event in self.body.decode().split("\n\n")[:-1]:
            if event.startswith(":"):
                continue
            data = event.removeprefix("data: ")
            assert data != event and "\n" not in data
            if data != "[DONE]":
                loaded = json.loads(data)
                if "error" not in loaded:
                    kind = ChatCompletionChunk if loaded["object"] == "chat.completion.chunk" else CompletionChunk
                    msgspec.json.decode(data.encode(), type=kind)
                events.append(loaded)
            else:
                events.append(data)
        return events

    @property
    def chunks(self) -> list[Any]:
        """Events that have choices."""
        return [each for each in self.events if isinstance(each, dict) and each.get("choices")]

    def joined(self, name: str, index: int = 0) -> str:
        """A field of the deltas (or `text`) of one choice, joined."""
        pieces = []
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                if choice["index"] == index:
                    piece = choice["text"] if name == "text" else choice["delta"].get(name)
                    pieces.append(piece or "")
        return "".join(pieces)

    def finishes(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                if choice["finish_reason"] is not None:
                    assert choice["index"] not in found, "a choice ended twice"
                    found[choice["index"]] = choice["finish_reason"]
        return found


async def send(
    app: Starlette,
    path: str,
    body: Any = None,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    leave_after: int | None = None,
    client: tuple[str, int] = ("127.0.0.1", 1),
) -> Reply:
    """One request over ASGI. `leave_after`: the client closes the connection once so many parts have come."""
    reply = Reply()
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    incoming = [{"type": "http.request", "body": raw, "more_body": False}]
    left = asyncio.Event()
    if leave_after == 0:
        left.set()

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def take(message: Any) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            if message.get("body"):
                reply.parts.append(message["body"])
            reply.complete = not message.get("more_body", False)
            if leave_after is not None and len(reply.parts) >= leave_after:
                left.set()

    given = {"content-type": "application/json", **(headers or {})}
    path, _, query = path.partition("?")
    await app(
        {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "client": client,
            "server": ("127.0.0.1", 80),
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        },
        receive,
        take,
    )
    left.set()
    return reply


def post(app: Starlette, path: str, body: Any = None, **more: Any) -> Reply:
    """`send`, for tests that are not coroutines."""
    return asyncio.run(send(app, path, body, **more))


def get(app: Starlette, path: str, **more: Any) -> Reply:
    return asyncio.run(send(app, path, method="GET", **more))


def chat_body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **more}


@contextlib.contextmanager
def served(app: Starlette) -> Iterator[str]:
    """The application behind a real socket of the loopback; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        give_up = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < give_up and thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
