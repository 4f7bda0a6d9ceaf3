"""The description of the HTTP paths, from the same routes and shapes that answer them (OpenAPI 3.1)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tripool.api import schema
from tripool.api.access import Door

Handler = Callable[[HttpRequest, bytes], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """One path: who answers, behind which door, and what goes in and out."""

    path: str
    methods: tuple[str, ...]
    handler: Handler
    door: Door
    summary: str
    tag: str
    returns: type | None                 # None: not JSON
    accepts: type | None = None
    streams: type | None = None          # the chunks, where the answer may be a stream
    body_required: bool = True
    statuses: tuple[int, ...] = ()       # refusals beyond those of the door and of the body
    query: tuple[tuple[str, str], ...] = ()    # (name, what it says) of what may stand behind a question mark


_REFUSALS = {
    400: "A value in the body is wrong; `param` names it.",
    401: "No valid key.",
    403: "Only from the machine the server runs on.",
    404: "There is no such model, member or path.",
    413: "The body is too long.",
    429: "Too many requests wait already; see Retry-After.",
    500: "The server failed.",
    503: "Loading, draining, or nothing is up that can compute; see Retry-After.",
    504: "Nothing came within the deadline.",
}


def openapi_document(version: str, routes: list[Route]) -> dict[str, Any]:
    """The page, from the same shapes that requests are read with."""
    kinds = sorted({kind for route in routes for kind in (route.accepts, route.returns, route.streams) if kind}
                   | {schema.ErrorBody}, key=lambda kind: kind.__name__)
    shapes, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    shape_of = dict(zip(kinds, shapes, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in route.methods:
            paths.setdefault(path, {})[method.lower()] = _operation(route, method, shape_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tripool", "version": version,
                 "description": "OpenAI-compatible serving of DeepSeek-class models from three pools."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "adminKey": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _operation(route: Route, method: str, shape_of: Mapping[type, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": shape_of[route.returns]}} if route.returns else {
        CONTENT_TYPE_LATEST.partition(";")[0]: {"schema": {"type": "string"}}}
    if route.streams is not None:
        event = {"anyOf": [shape_of[route.streams], shape_of[schema.ErrorBody]]}
        data = {"anyOf": [{"const": "[DONE]"}, {"contentMediaType": "application/json", "contentSchema": event}]}
        # Before OpenAPI 3.2 the schema of a stream describes each of its events.
        content["text/event-stream"] = {
            "schema": {"type": "object", "required": ["data"], "properties": {"data": {"type": "string", **data}}}
        }
    refusals = {*route.statuses, *((400, 413) if route.accepts else ()), *(() if route.door == "open" else (401,)),
                *((403,) if route.door == "admin" else ())}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    for status in sorted(refusals):
        kind = schema.HealthResponse if route.door == "open" and status == 503 else schema.ErrorBody
        responses[str(status)] = {
            "description": _REFUSALS[status],
            "content": {"application/json": {"schema": shape_of[kind]}},
        }
    operation: dict[str, Any] = {
        "summary": route.summary,
        "tags": [route.tag],
        "responses": responses,
        "operationId": f"{method.lower()}{route.path.split('{')[0].replace('/', '_').rstrip('_')}"
        + ("_id" if "{" in route.path else ""),
    }
    if route.accepts is not None:
        operation["requestBody"] = {
            "required": route.body_required,
            "content": {"application/json": {"schema": shape_of[route.accepts]}},
        }
    if "{" in route.path:
        operation["parameters"] = [
            {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    elif route.query:
        operation["parameters"] = [
            {"name": name, "in": "query", "required": False, "description": text, "schema": {"type": "string"}}
            for name, text in route.query
        ]
    if route.door != "open":
        operation["security"] = [{"adminKey" if route.door == "admin" else "key": []}]
    return operation
