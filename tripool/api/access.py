"""Who may do what, and one line in the log for each request.

Every route says which of three doors it stands behind: open, the API key's, or the operator's. A key is
compared by its digest, and the digest also separates the tenants' cached context. The log line has sizes,
times and ids, never text.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tripool.api.metrics import ApiMetrics
from tripool.core.errors import RequestError

Door = Literal["open", "api", "admin"]

log = logging.getLogger("tripool.api.access")

RECORD = "tripool.record"
"""Key of an `AccessRecord` in the connection's scope."""

POLLED = ("/health", "/ping", "/live", "/metrics")
"""Routes that machines ask all the time: told at debug level only."""

_GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class AccessRecord:
    """What is known of an HTTP request apart from its text."""

    request_id: str
    received_s: float
    send: Send                                  # the connection's own, below all layers: for the events of a stream
    handler: str = "none"                       # the route, not the path, so that metrics stay few
    figures: dict[str, Any] | None = None       # of a call


def record_of(request: HttpRequest) -> AccessRecord:
    record = request.scope[RECORD]
    assert isinstance(record, AccessRecord)
    return record


class Keys:
    """The keys of a server."""

    def __init__(self, api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        # Looked up by digest, a wrong key tells nothing by the time it takes.
        self._api = {_digest(key): _salt(key) for key in api_keys}
        self._admin = {_digest(key) for key in admin_keys}

    def admit(self, request: HttpRequest, door: Door) -> bytes:
        """Let a request through a door. Returns the tenant's salt, empty where there are no keys.

        Raises:
            RequestError: 401 without a valid key, 403 where there is no key to have.
        """
        if door == "open":
            return b""
        if door == "api":
            if not self._api:
                return b""
            salt = self._api.get(_digest(_bearer(request)))
            if salt is None:
                raise RequestError(
                    "a valid API key is needed: Authorization: Bearer KEY", status=401, code="invalid_api_key"
                )
            return salt
        if self._admin:
            if _digest(_bearer(request)) not in self._admin:
                raise RequestError(
                    "a valid admin key is needed: Authorization: Bearer KEY", status=401, code="invalid_api_key"
                )
        elif not _is_local(request):
            raise RequestError(
                "without an admin key this path answers only the machine it runs on; set --admin-api-key",
                status=403,
                code="admin_only",
            )
        return b""


def _bearer(request: HttpRequest) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=32, person=b"tripool-key").digest()


def _salt(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"tripool-salt").digest()


def _is_local(request: HttpRequest) -> bool:
    """From this machine and not at the wish of a web page, whose requests name their origin."""
    if "origin" in request.headers or request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    if request.client is None:      # a Unix socket
        return True
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


class AccessLog:
    """The outermost layer: gives each request an id, returns it, counts the answer and logs a line."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        record = AccessRecord(request_id, time.monotonic(), send)
        scope[RECORD] = record
        status = 499   # if nothing is answered, the client had gone

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._metrics.answered(_method(scope), record.handler, status)
            level = logging.DEBUG if record.handler in POLLED else logging.INFO
            if log.isEnabledFor(level):
                self._write(level, scope, record, status)

    def _write(self, level: int, scope: Scope, record: AccessRecord, status: int) -> None:
        client = scope.get("client")
        log.log(level, "request", extra={"fields": {
            "request_id": record.request_id,
            "method": _method(scope),
            "path": scope["path"][:256],
            "status": status,
            "duration_s": round(time.monotonic() - record.received_s, 6),
            "client": client[0] if client else None,
            **(record.figures or {}),
        }})


def _method(scope: Scope) -> str:
    """Methods are the client's words; unknown ones share a name, so that metrics stay few."""
    method = scope["method"]
    return method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE") else "other"
