"""The HTTP application: routes, their doors, and the page that describes them.

`build_app` is all that the gateway process needs. Bodies are read and written by msgspec with the shapes of
`api.schema`, and the OpenAPI page is made from the same shapes, so it cannot say anything else than the server
does. Starlette routes the requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import cache

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from tripool.api import schema
from tripool.api.access import RECORD, AccessLog, AccessRecord, Keys, record_of
from tripool.api.answer import CLIENT_GONE, Answer, StreamResponse
from tripool.api.backend import Backend, BackendStatus
from tripool.api.errors import error_response
from tripool.api.metrics import ApiMetrics
from tripool.api.openai import Call, Translator, convert, decode_object
from tripool.api.openapi import Route, openapi_document
from tripool.api.settings import ApiSettings
from tripool.api.stream import Envelope
from tripool.core.errors import RequestError
from tripool.core.messages import MemberChanged
from tripool.core.request import Limits, Request, Sampling, pack_tokens

log = logging.getLogger("tripool.api")

RETRY_AFTER_S = 2.0
DRAINED_BODY_BYTES = 64 << 20
"""How much of an over-long body is read and thrown away, so that the client can hear the refusal."""
HEALTH_DEADLINE_S = 10.0
DOCS_PAGE = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Tripool</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css"></head>
<body><div id="page">The paths are described in <a href="openapi.json">openapi.json</a>; shown as a page, they need
a script from cdn.jsdelivr.net.</div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#page"})</script></body></html>
"""


_GENERATES = (404, 429, 500, 503, 504)


def build_app(backend: Backend, settings: ApiSettings) -> Starlette:
    """The application that speaks for a backend."""
    api = Api(backend, settings)
    app = Starlette()
    app.router.redirect_slashes = False
    for route in api.routes():
        _add(app, api, route)

    @cache          # made when it is first asked for: a server that nobody reads about starts without it
    def document() -> bytes:
        return msgspec.json.encode(openapi_document(settings.version, api.routes()))

    async def openapi(request: HttpRequest) -> Response:
        return Response(document(), media_type="application/json")

    async def docs(request: HttpRequest) -> Response:
        return HTMLResponse(DOCS_PAGE)

    app.add_route("/openapi.json", openapi)
    app.add_route("/docs", docs)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(AccessLog, metrics=api.metrics)
    return app


class Api:
    """What the routes do."""

    def __init__(self, backend: Backend, settings: ApiSettings) -> None:
        self.metrics = ApiMetrics(backend, settings.model_name)
        self.keys = Keys(settings.api_keys, settings.admin_keys)
        self._backend, self._settings = backend, settings
        self._translator = Translator(settings, backend.new_request_id)
        self._running: dict[str, Answer] = {}
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        both = ("GET", "POST")
        return [
            Route("/v1/chat/completions", ("POST",), self.chat, "api", "Answer a conversation", "inference",
                  schema.ChatCompletion, schema.ChatRequest, schema.ChatCompletionChunk, statuses=_GENERATES),
            Route("/v1/completions", ("POST",), self.completion, "api", "Continue a text", "inference",
                  schema.Completion, schema.CompletionRequest, schema.CompletionChunk, statuses=_GENERATES),
            Route("/v1/models", ("GET",), self.models, "api", "List the models", "inference", schema.ModelList),
            Route("/v1/models/{model_id:path}", ("GET",), self.model, "api", "Describe a model", "inference",
                  schema.ModelCard, statuses=(404,)),
            Route("/tokenize", ("POST",), self.tokenize, "api", "Text or messages to token ids", "tokenizer",
                  schema.TokenizeResponse, schema.TokenizeRequest, statuses=(404,)),
            Route("/detokenize", ("POST",), self.detokenize, "api", "Token ids to text", "tokenizer",
                  schema.DetokenizeResponse, schema.DetokenizeRequest, statuses=(404,)),
            Route("/health", ("GET",), self.health, "open", "Whether a request sent now would be served", "health",
                  schema.HealthResponse, statuses=(503,)),
            Route("/ping", both, self.health, "open", "The same as /health", "health", schema.HealthResponse,
                  statuses=(503,)),
            Route("/live", ("GET",), self.live, "open", "Whether the process works", "health", schema.LiveResponse),
            Route("/health_generate", ("GET",), self.health_generate, "api", "Generate one token", "health",
                  schema.HealthResponse, statuses=(500, 503)),
            Route("/version", ("GET",), self.version, "open", "The server's version", "health", schema.VersionResponse),
            Route("/load", ("GET",), self.load, "api", "Requests on their way", "health", schema.LoadResponse),
            Route("/server_info", ("GET",), self.server_info, "api", "Settings in force and members", "health",
                  schema.ServerInfo),
            Route("/get_model_info", ("GET",), self.model_info, "api", "The served model", "health", schema.ModelInfo),
            Route("/metrics", ("GET",), self.metrics_page, "open", "Figures in the Prometheus form", "health", None),
            Route("/flush_cache", both, self.flush_cache, "admin", "Forget cached context", "admin",
                  schema.FlushResponse, statuses=(500, 503)),
            Route("/reset_prefix_cache", both, self.flush_cache, "admin", "The same as /flush_cache", "admin",
                  schema.FlushResponse, statuses=(500, 503)),
            Route("/abort_request", ("POST",), self.abort, "admin", "End requests", "admin", schema.AbortResponse,
                  schema.AbortRequest),
            Route("/abort_requests", ("POST",), self.abort, "admin", "End requests", "admin", schema.AbortResponse,
                  schema.AbortRequest),
            Route("/experts", ("GET",), self.experts, "admin", "How experts are used, and where they are", "admin",
                  schema.ExpertsResponse, statuses=(404, 500), query=(("member", "Of this instance alone."),)),
            Route("/rebalance", ("POST",), self.rebalance, "admin",
                  "Spread the experts of instances over their ranks anew", "admin", schema.RebalanceResponse,
                  schema.RebalanceRequest, body_required=False, statuses=(404, 500)),
        ]

    # ------------------------------------------------------------ inference

    async def chat(self, request: HttpRequest, salt: bytes) -> Response:
        return await self._answer(request, salt, self._translator.chat, "chatcmpl-")

    async def completion(self, request: HttpRequest, salt: bytes) -> Response:
        return await self._answer(request, salt, self._translator.completion, "cmpl-")

    async def _answer(self, request: HttpRequest, salt: bytes, read: Callable[[bytes, bytes], Awaitable[Call]],
                      prefix: str) -> Response:
        self._check_serving()
        call = await read(await read_body(request, self._settings.max_body_bytes), salt)
        record = record_of(request)
        if call.ignored:
            log.info(
                "fields without effect", extra={"fields": {"request_id": record.request_id, "names": call.ignored}}
            )
        own_id = call.requests[0].request_id if call.requests else self._backend.new_request_id()
        envelope = Envelope(f"{prefix}{own_id:016x}", int(time.time()), self._settings.model_name,
                            self._settings.shown_reasoning_fields)
        answer = Answer(call, envelope, self._backend, self._settings, self.metrics, self._running, record)
        return StreamResponse(answer) if call.stream else await answer.whole(request.receive)

    def _check_serving(self) -> None:
        """Refuse at once what could only wait for a model that is not there yet, or for a server that is leaving."""
        status = self._backend.status()
        if status.draining or status.facts is None:
            self.metrics.failed(503)
            word = "is shutting down" if status.draining else "is loading its model"
            raise RequestError(
                f"the server {word}{': ' + status.cause if status.cause else ''}",
                status=503,
                code="unavailable",
                retry_after_s=RETRY_AFTER_S,
            )

    def _max_model_len(self, status: BackendStatus) -> int:
        own = self._settings.max_model_len
        return own if status.facts is None else min(own, status.facts.max_model_len)

    def _card(self, status: BackendStatus) -> schema.ModelCard:
        name = self._settings.model_name
        return schema.ModelCard(name, "model", self._created, "tripool", self._settings.model_path or name,
                                self._max_model_len(status))

    async def models(self, request: HttpRequest, salt: bytes) -> Response:
        status = self._backend.status()
        return _json(schema.ModelList("list", [] if status.facts is None else [self._card(status)]))

    async def model(self, request: HttpRequest, salt: bytes) -> Response:
        status = self._backend.status()
        asked = request.path_params["model_id"]
        if status.facts is None or asked != self._settings.model_name:
            raise RequestError(
                f"the model {asked[:200]!r} does not exist", status=404, param="model", code="model_not_found"
            )
        return _json(self._card(status))

    # ------------------------------------------------------------ tokenizer

    async def tokenize(self, request: HttpRequest, salt: bytes) -> Response:
        token_ids, spelled = await self._translator.tokenize(await read_body(request, self._settings.max_body_bytes))
        texts = (
            [self._settings.tokenizer.token_bytes(each).decode("utf-8", "replace") for each in token_ids]
            if spelled
            else None
        )
        return _json(
            schema.TokenizeResponse(len(token_ids), self._max_model_len(self._backend.status()), token_ids, texts)
        )

    async def detokenize(self, request: HttpRequest, salt: bytes) -> Response:
        asked = convert(
            decode_object(await read_body(request, self._settings.max_body_bytes)), schema.DetokenizeRequest
        )
        self._translator.check_model(asked.model)
        self._translator.check_ids(asked.tokens, "tokens")
        return _json(
            schema.DetokenizeResponse(self._settings.tokenizer.decode(asked.tokens, skip_special_tokens=False))
        )

    # ------------------------------------------------------------ health and figures

    async def health(self, request: HttpRequest, salt: bytes) -> Response:
        status = self._backend.status()
        headers = {} if status.ready and not status.draining else {"Retry-After": f"{RETRY_AFTER_S:.0f}"}
        return _json(_health(status), 503 if headers else 200, headers)

    async def live(self, request: HttpRequest, salt: bytes) -> Response:
        return _json(schema.LiveResponse("live"))

    async def health_generate(self, request: HttpRequest, salt: bytes) -> Response:
        self._check_serving()
        token = self._settings.tokenizer.bos_token_id or 0
        stream = self._backend.open(
            Request(
                self._backend.new_request_id(),
                pack_tokens([token]),
                Sampling(temperature=0.0),
                Limits(max_tokens=1),
                salt,
            )
        )
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                async for output in stream:
                    if output.error is not None:
                        raise RequestError(output.error, status=503, code="unavailable", retry_after_s=RETRY_AFTER_S)
        except TimeoutError as error:
            raise RequestError(f"no token came within {HEALTH_DEADLINE_S:.0f} s", status=503, code="deadline_exceeded",
                               retry_after_s=RETRY_AFTER_S) from error
        finally:
            stream.close()
        return _json(_health(self._backend.status()))

    async def version(self, request: HttpRequest, salt: bytes) -> Response:
        return _json(schema.VersionResponse(self._settings.version))

    async def load(self, request: HttpRequest, salt: bytes) -> Response:
        status = self._backend.status()
        return _json(schema.LoadResponse(len(self._running), status.num_running, status.num_waiting))

    async def server_info(self, request: HttpRequest, salt: bytes) -> Response:
        status = self._backend.status()
        members = [
            schema.MemberInfo(
                each.member,
                each.role,
                each.state,
                each.boot_id,
                each.num_running,
                each.num_waiting_tokens,
                each.num_free_blocks,
                each.facts.num_blocks if each.facts else 0,
                each.cause,
            )
            for each in status.members
        ]
        return _json(schema.ServerInfo(
            self._settings.version, self._settings.model_name, self._max_model_len(status), _health(status),
            {**self._settings.shown, **status.settings}, members))

    async def model_info(self, request: HttpRequest, salt: bytes) -> Response:
        status, settings = self._backend.status(), self._settings
        shown = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        defaults = {name: value for name, value in asdict(settings.default_sampling).items() if name in shown}
        return _json(
            schema.ModelInfo(
                settings.model_path or settings.model_name,
                settings.tokenizer_path or settings.model_path or settings.model_name,
                True,
                self._max_model_len(status),
                status.facts.fingerprint if status.facts else None,
                defaults,
            )
        )

    async def metrics_page(self, request: HttpRequest, salt: bytes) -> Response:
        return Response(self.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    # ------------------------------------------------------------ operators

    async def flush_cache(self, request: HttpRequest, salt: bytes) -> Response:
        return _json(schema.FlushResponse(True, await self._backend.flush_cache()))

    async def abort(self, request: HttpRequest, salt: bytes) -> Response:
        asked = convert(decode_object(await read_body(request, self._settings.max_body_bytes)), schema.AbortRequest)
        named = {*(asked.request_ids or ()), *([asked.rid] if asked.rid else ())}
        chosen = [answer for answer in self._running.values()
                  if asked.abort_all or answer.envelope.id in named or answer.request_id in named]
        for answer in chosen:
            answer.abort()
        return _json(schema.AbortResponse([answer.envelope.id for answer in chosen]))

    async def experts(self, request: HttpRequest, salt: bytes) -> Response:
        chosen = self._instances(request.query_params.get("member"))
        told = await self._backend.experts(list(chosen))
        without = {name: _why_without_experts(chosen[name]) for name in chosen
                   if all(each.member != name for each in told)}
        return _json(schema.ExpertsResponse(told, without))

    async def rebalance(self, request: HttpRequest, salt: bytes) -> Response:
        body = await read_body(request, self._settings.max_body_bytes)
        asked = convert(decode_object(body), schema.RebalanceRequest) if body else schema.RebalanceRequest()
        names = self._backend.rebalance(list(self._instances(asked.member)))
        if asked.member is not None and not names:
            raise RequestError(f"{asked.member[:200]} has told nothing of experts", status=404, param="member",
                               code="no_experts")
        return _json(schema.RebalanceResponse(names))

    def _instances(self, name: str | None) -> dict[str, MemberChanged]:
        """The instance of a name, or all of them.

        Raises:
            RequestError: there is none of that name.
        """
        known = {each.member: each for each in self._backend.status().members}
        if name is None:
            return known
        if name not in known:
            raise RequestError(f"there is no instance {name[:200]!r}; there are {', '.join(known) or 'none'}",
                               status=404, param="member", code="member_not_found")
        return {name: known[name]}


def _why_without_experts(member: MemberChanged) -> str:
    if member.state == "up":
        return "it has told nothing of experts; either its model has none, or it came up a moment ago"
    return f"it is {member.state}" + (f": {member.cause}" if member.cause else "")


def _health(status: BackendStatus) -> schema.HealthResponse:
    if status.draining:
        return schema.HealthResponse("draining", status.cause, status.load_fraction)
    if status.ready:
        return schema.HealthResponse("ready", "", 1.0)
    return schema.HealthResponse("loading" if status.facts is None else "not ready", status.cause, status.load_fraction)


def _json(value: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def read_body(request: HttpRequest, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        RequestError: 413 if it is too long. The rest is read first, within reason: a client that is still
            writing would otherwise see a broken connection instead of the answer.
    """
    parts: list[bytes] = []
    size = 0
    announced = request.headers.get("content-length", "")
    keep = not (announced.isascii() and announced.isdecimal() and int(announced[:20]) > max_bytes)
    async for part in request.stream():
        size += len(part)
        keep = keep and size <= max_bytes
        if keep:
            parts.append(part)
        elif size > DRAINED_BODY_BYTES:
            break
    if not keep:
        raise RequestError(
            f"the body is longer than {max_bytes} bytes", status=413, param="body", code="body_too_large"
        )
    return b"".join(parts)


# ---------------------------------------------------------------- putting it together


def _add(app: Starlette, api: Api, route: Route) -> None:
    async def endpoint(request: HttpRequest) -> Response:
        record = record_of(request)
        record.handler = route.path
        try:
            return await route.handler(request, api.keys.admit(request, route.door))
        except RequestError as error:
            return error_response(error, record.request_id)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception:
            log.exception(
                "a handler failed", extra={"fields": {"request_id": record.request_id, "handler": route.path}}
            )
            return error_response(RequestError("internal error; the server's log has the cause under this request id",
                                               status=500, code="internal_error"), record.request_id)

    app.add_route(route.path, endpoint, methods=list(route.methods))


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Refusals of the router itself, in the standard body."""
    assert isinstance(error, HTTPException)
    record: AccessRecord = request.scope[RECORD]
    texts = {404: f"there is no {request.url.path[:200]} here; /docs lists the paths",
             405: f"{request.method[:20]} is not allowed on {request.url.path[:200]}"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    response = error_response(RequestError(texts.get(error.status_code, str(error.detail)), status=error.status_code,
                                           code=codes.get(error.status_code)), record.request_id)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response
