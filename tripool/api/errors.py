"""How a refusal or a failure looks to a client: one body for all of them, streamed or not."""

from __future__ import annotations

import math

import msgspec
from starlette.responses import Response

from tripool.api.schema import ErrorBody, ErrorDetail
from tripool.core.errors import RequestError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
          500: "server_error", 503: "service_unavailable", 504: "timeout_error"}


def error_body(error: RequestError, request_id: str) -> bytes:
    """The standard error object."""
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "server_error")
    return msgspec.json.encode(ErrorBody(ErrorDetail(str(error), kind, error.param, error.code, request_id)))


def error_headers(error: RequestError) -> dict[str, str]:
    """`Retry-After` where trying again makes sense."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_response(error: RequestError, request_id: str) -> Response:
    return Response(error_body(error, request_id), error.status, error_headers(error), "application/json")


def error_event(error: RequestError, request_id: str) -> bytes:
    """The event that a stream ends with, before its terminator, when something failed."""
    return b"data: " + error_body(error, request_id) + b"\n\n"
