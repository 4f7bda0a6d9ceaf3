"""The OpenAPI page: complete, true, and a source of bad bodies that no request may crash on."""

import json

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.api.builders import application, chat_body, get, ids, post
from tests.api.scripted import Script, ScriptedBackend
from tripool.api import schema as shapes

APP = application(ScriptedBackend(Script(ids("so</think>Yes"))))
PAGE = schemathesis.openapi.from_dict(get(APP, "/openapi.json").json)


def serves_on():
    assert post(APP, "/v1/chat/completions", chat_body()).json["choices"][0]["message"]["content"] == "Yes"


def test_the_page_has_every_route():
    page = get(APP, "/openapi.json").json
    routes = {route.path.replace(":path}", "}") for route in APP.routes}
    assert routes - set(page["paths"]) == {"/docs", "/openapi.json"}
    assert set(page["paths"]) <= routes
    operations = [operation for methods in page["paths"].values() for operation in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))
    assert all("422" not in operation["responses"] for operation in operations)


def test_the_page_says_what_requests_are_read_with():
    page = get(APP, "/openapi.json").json
    for name in ("ChatRequest", "CompletionRequest", "TokenizeRequest"):
        fields = page["components"]["schemas"][name]["properties"]
        assert set(fields) == set(getattr(shapes, name).__struct_fields__)


@pytest.mark.parametrize(("path", "kind", "body"), [
    ("/v1/chat/completions", shapes.ChatCompletion, chat_body(logprobs=True, top_logprobs=1, return_token_ids=True)),
    ("/v1/completions", shapes.Completion, {"prompt": "a", "logprobs": 1, "echo": True, "return_token_ids": True}),
])
def test_answers_have_the_published_shape_and_no_other_fields(path, kind, body):
    raw = post(APP, path, body).body
    assert json.loads(msgspec.json.encode(msgspec.json.decode(raw, type=kind))) == json.loads(raw)


@PAGE.parametrize()
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_body_that_the_page_allows_or_forbids_crashes_the_server(case):
    case.call_and_validate(app=APP, checks=(
        not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance))


def test_after_all_of_them_a_normal_request_succeeds():
    serves_on()
