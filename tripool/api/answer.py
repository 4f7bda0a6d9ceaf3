"""A call on its way: streams opened, the client watched, every end accounted for.

Each choice is read by a coroutine of its own; with one choice that is the request's. The status line is not
sent before there is something to send, so a refusal still gets its proper code. Whatever happens - the
client leaves, an operator aborts, the backend fails or falls silent - every stream is closed, and the client
sees either a finish reason for each choice or one error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tripool.api.access import AccessRecord
from tripool.api.backend import Backend, OutputStream
from tripool.api.errors import error_event, error_response
from tripool.api.metrics import ApiMetrics
from tripool.api.openai import Call
from tripool.api.settings import ApiSettings
from tripool.api.stream import DONE, KEEP_ALIVE, Choice, ChunkWriter, Envelope, usage_of, whole_chat, whole_completion
from tripool.core.errors import RequestError
from tripool.core.messages import FinishReason

log = logging.getLogger("tripool.api")

CLIENT_GONE = 499
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
                  (b"x-accel-buffering", b"no")]


class Answer:
    """One call, from open streams to its last byte."""

    def __init__(self, call: Call, envelope: Envelope, backend: Backend, settings: ApiSettings, metrics: ApiMetrics,
                 running: dict[str, Answer], record: AccessRecord) -> None:
        self.call, self.envelope, self.request_id = call, envelope, record.request_id
        self.choices = [Choice(call, index, settings.tokenizer) for index in range(call.num_choices)]
        self._running = running         # every answer on its way, by its id
        self._backend, self._settings, self._metrics = backend, settings, metrics
        self._record = record
        self._received_s = self._last_output_s = self._last_sent_s = record.received_s
        self._streams: list[OutputStream] = []
        self._readers: list[asyncio.Future[None]] = []
        self._first_token_s: list[float | None] = [None] * call.num_choices
        self._failure: RequestError | None = None
        self._aborted = False
        self._writers: Sequence[ChunkWriter] = ()
        self._send: Send | None = None
        self._started = False
        self._starting = asyncio.Lock()

    # ------------------------------------------------------------ what others may do to it

    def abort(self) -> None:
        """An operator ends it: each choice finishes with reason `abort`."""
        self._aborted = True
        self._stop_reading()

    # ------------------------------------------------------------ the two modes

    async def whole(self, receive: Receive) -> Response:
        """Answer with one body."""
        try:
            await self._run(receive)
        except RequestError as error:
            return error_response(error, self.request_id)
        write = whole_chat if self.call.is_chat else whole_completion
        return Response(
            write(self.call, self.envelope, self.choices, self._settings.tokenizer), media_type="application/json"
        )

    async def stream(self, receive: Receive, send: Send) -> None:
        """Answer with events. An error before the first of them is an ordinary error response."""
        self._send = send
        self._writers = [ChunkWriter(self.call, self.envelope, self.choices, choice, self._settings.tokenizer)
                         for choice in self.choices]
        try:
            await self._run(receive)
            last = self._writers[0].usage() + DONE if self.call.include_usage else DONE
        except RequestError as error:
            if error.status == CLIENT_GONE:
                return
            if not self._started:
                await self._refuse(error, send)
                return
            last = error_event(error, self.request_id) + DONE
        await self._begin()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    # ------------------------------------------------------------ running

    async def _run(self, receive: Receive) -> None:
        """Read every choice to its end.

        Raises:
            RequestError: it cannot be answered; status 499 if nobody is there to answer.
        """
        watcher = asyncio.ensure_future(self._watch(receive))
        self._running[self.envelope.id] = self
        try:
            self._metrics.received(self.call.num_choices)
            for request in self.call.requests:
                self._streams.append(self._backend.open(request))
            if self._streams:
                await self._read_all()
            await self._end_unfinished("abort" if self._aborted else "length")
        except RequestError as error:
            if self._failure is None:
                self._failure = error
        except asyncio.CancelledError:
            self._failure = RequestError("the server stopped working on this request", status=CLIENT_GONE)
            raise
        except Exception as error:
            log.exception("a request failed unexpectedly", extra={"request_id": self.request_id})
            self._failure = RequestError(
                "internal error; the server's log has the cause under this request id",
                status=500,
                code="internal_error",
            )
            raise self._failure from error
        finally:
            watcher.cancel()
            self._running.pop(self.envelope.id, None)
            self._stop_reading()
            self._account()
            self._record.figures = self._figures()
        if self._failure is not None:
            raise self._failure

    async def _read_all(self) -> None:
        """Choices go on independently; the first failure ends them all."""
        self._readers = [asyncio.ensure_future(self._read(*each)) for each in enumerate(self._streams)]
        try:
            done, _ = await asyncio.wait(self._readers, return_when=asyncio.FIRST_EXCEPTION)
            for reader in done:
                if not reader.cancelled():
                    reader.result()
        finally:
            self._stop_reading()
            await asyncio.gather(*self._readers, return_exceptions=True)

    async def _read(self, index: int, stream: OutputStream) -> None:
        choice = self.choices[index]
        writer = self._writers[index] if self._writers else None
        last_s: float | None = None
        async for output in stream:
            if output.error is not None:
                raise RequestError(output.error, status=output.status if output.status >= 400 else 500,
                                   code=_CODES.get(output.status, "internal_error"), retry_after_s=output.retry_after_s)
            choice.advance(output)
            now = time.monotonic()
            self._last_output_s = now
            if output.tokens:
                if last_s is None:
                    self._first_token_s[index] = now
                    self._metrics.time_to_first_token.observe(now - self._received_s)
                else:
                    self._metrics.inter_token.observe(now - last_s)
                last_s = now
            if writer is not None:
                body = writer.chunk()
                if body:
                    await self._write(body)
            if choice.finish is not None:
                stream.close()
                return
        if not self._aborted and self._failure is None:
            raise RequestError(
                "the request was lost between the gateway and its instances", status=500, code="internal_error"
            )

    async def _end_unfinished(self, reason: FinishReason) -> None:
        """Choices of an answer that was aborted, or that had nothing to compute."""
        if self._failure is None:
            for choice in self.choices:
                if choice.finish is None:
                    choice.end(reason)
                    await self._show(choice)

    async def _show(self, choice: Choice) -> None:
        if self._writers:
            body = self._writers[choice.index].chunk()
            if body:
                await self._write(body)

    async def _write(self, body: bytes) -> None:
        if not self._started:
            await self._begin()
        self._last_sent_s = self._last_output_s
        # Past the layers between: they look at the start of an answer, and would cost each token a call each.
        await self._record.send({"type": "http.response.body", "body": body, "more_body": True})

    async def _begin(self) -> None:
        async with self._starting:
            if not self._started:
                assert self._send is not None
                await self._send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
                self._started = True

    async def _refuse(self, error: RequestError, send: Send) -> None:
        response = error_response(error, self.request_id)
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})

    # ------------------------------------------------------------ watching

    async def _watch(self, receive: Receive) -> None:
        """Notice that the client has left, that a stream has been silent for long, that the backend says nothing."""
        incoming = asyncio.ensure_future(receive())
        try:
            while True:
                done, _ = await asyncio.wait((incoming,), timeout=self._settings.keep_alive_s)
                if done:
                    if incoming.result()["type"] == "http.disconnect":
                        self._fail(RequestError("the client closed the connection", status=CLIENT_GONE))
                        return
                    incoming = asyncio.ensure_future(receive())
                else:
                    await self._tick(time.monotonic())
        finally:
            incoming.cancel()

    async def _tick(self, now: float) -> None:
        if now - self._last_output_s > self._settings.output_deadline_s:
            self._fail(
                RequestError(
                    f"nothing came from the instances for {self._settings.output_deadline_s:.0f} s",
                    status=504,
                    code="deadline_exceeded",
                )
            )
        elif self._send is not None and now - self._last_sent_s >= self._settings.keep_alive_s:
            await self._write(KEEP_ALIVE)
            self._last_sent_s = now

    def _fail(self, error: RequestError) -> None:
        if self._failure is None:
            self._failure = error
        self._stop_reading()

    def _stop_reading(self) -> None:
        """End all streams, and the readers too: a backend that is stuck must not hold the client."""
        for stream in self._streams:
            stream.close()
        for reader in self._readers:
            reader.cancel()

    # ------------------------------------------------------------ accounts

    def _account(self) -> None:
        """Count how it ended, each choice once."""
        metrics, now = self._metrics, time.monotonic()
        for choice, first_s in zip(self.choices, self._first_token_s, strict=True):
            metrics.generation_tokens.inc(choice.num_tokens)
            if choice.finish is None or choice.finish == "abort":
                if self._failure is not None and self._failure.status != CLIENT_GONE:
                    metrics.failed(self._failure.status)
                else:
                    metrics.aborted("prefill" if first_s is None else "decode")
                continue
            metrics.succeeded(choice.finish)
            metrics.end_to_end.observe(now - self._received_s)
            metrics.output_length.observe(choice.num_tokens)
            metrics.prompt_length.observe(len(choice.prompt.token_ids))
            if first_s is not None:
                queued_s = self._streams[choice.index].queued_s
                metrics.queue_time.observe(queued_s)
                metrics.prefill_time.observe(max(first_s - self._received_s - queued_s, 0.0))
                metrics.decode_time.observe(now - first_s)
                metrics.inference_time.observe(max(now - self._received_s - queued_s, 0.0))
        if not any(self._first_token_s):
            return
        usage = usage_of(self.call, self.choices)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.cache_queries.inc(usage.prompt_tokens)
        metrics.cached_tokens.inc(usage.prompt_tokens_details.cached_tokens)
        metrics.cache_hits.inc(usage.prompt_tokens_details.cached_tokens)

    def _figures(self) -> dict[str, Any]:
        """For the access log: sizes and times, no text."""
        usage = usage_of(self.call, self.choices)
        firsts = [first_s for first_s in self._first_token_s if first_s is not None]
        return {
            "response_id": self.envelope.id,
            "stream": self.call.stream,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "finish": [choice.finish for choice in self.choices[:8]],
            "first_token_s": round(min(firsts) - self._received_s, 6) if firsts else None,
            "cause": None if self._failure is None else str(self._failure),
        }


class StreamResponse(Response):
    """Hands the connection to an answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(None, 200)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer.stream(receive, send)


_CODES = {429: "queue_full", 500: "internal_error", 503: "unavailable", 504: "deadline_exceeded"}
