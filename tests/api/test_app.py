"""Routes and their doors, health, figures and the log."""

import json
import logging

import pytest

from tests.api.builders import MODEL, WINDOW, application, chat_body, get, ids, post
from tests.api.scripted import Script, ScriptedBackend

CHAT = "/v1/chat/completions"
OPEN = ["/health", "/live", "/ping", "/version", "/metrics", "/docs", "/openapi.json"]
KEYED = ["/v1/models", f"/v1/models/{MODEL}", "/load", "/server_info", "/get_model_info", "/health_generate"]
ADMIN = ["/flush_cache", "/reset_prefix_cache"]
FAR_AWAY = ("203.0.113.5", 4000)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def backend(**more):
    return ScriptedBackend(Script(ids("so</think>Yes"), num_cached=2), **more)


# ------------------------------------------------------------------------------------------------ doors


def test_every_path_but_the_open_ones_needs_a_key():
    app = application(backend(), api_keys=("k1", "k2"), admin_keys=("root",))
    for path in OPEN:
        assert get(app, path).status == 200, path
    for path in KEYED:
        assert [get(app, path, headers=headers).status for headers in ({}, bearer("k1"), bearer("k2"))] == [
            401,
            200,
            200,
        ], path
        for wrong in (bearer("k3"), bearer("root"), bearer(""), {"authorization": "k1"}, {"authorization": "Basic k1"}):
            assert get(app, path, headers=wrong).status == 401
    for path in ADMIN:
        assert [get(app, path, headers=headers).status for headers in ({}, bearer("k1"), bearer("root"))] == [
            401,
            401,
            200,
        ]
    for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize", "/abort_request", "/abort_requests"):
        refused = post(app, path, b"not even JSON")
        assert refused.status == 401 and refused.error["type"] == "authentication_error"
        assert refused.headers["www-authenticate"] == "Bearer"


def test_every_route_of_the_page_is_behind_the_door_that_the_page_says():
    app = application(backend(), api_keys=("k1",), admin_keys=("root",))
    for path, operations in get(app, "/openapi.json").json["paths"].items():
        for method, operation in operations.items():
            assert ("security" in operation) == (path not in OPEN), path
            status = post(app, path.replace("{model_id}", MODEL), method=method.upper()).status
            assert (status == 401) == ("security" in operation), path


def test_without_an_admin_key_operators_are_those_on_this_machine():
    app = application(backend(), api_keys=("k1",))
    assert get(app, "/flush_cache").status == 200
    assert get(app, "/flush_cache", client=("::1", 1)).status == 200
    assert get(app, "/flush_cache", client=FAR_AWAY).status == 403
    assert get(app, "/flush_cache", headers={"origin": "http://evil.example"}).status == 403
    assert get(app, "/flush_cache", headers={"sec-fetch-site": "cross-site"}).status == 403


@pytest.mark.parametrize("path", ADMIN)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_cache_is_flushed_with_an_empty_body(path, method):
    scripted = backend()
    reply = post(application(scripted), path, method=method)
    assert (reply.status, reply.json, scripted.num_flushed) == (200, {"success": True, "num_blocks": 5}, 1)


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/rerank", "/", "/v1/chat/completions/", "/flush_cache/", "/nope"]
)
def test_what_is_not_here_is_not_found_in_the_standard_body(path):
    reply = post(application(backend()), path, {})
    assert reply.status == 404 and reply.error["code"] == "not_found" and reply.error["request_id"]


def test_a_wrong_method_is_refused_in_the_standard_body():
    reply = get(application(backend()), CHAT)
    assert reply.status == 405 and reply.error["code"] == "method_not_allowed" and reply.headers["allow"] == "POST"


# ------------------------------------------------------------------------------------------------ health and models


@pytest.mark.parametrize(("state", "health", "word"), [
    ({}, 200, "ready"), ({"ready": False, "loaded": False}, 503, "loading"), ({"ready": False}, 503, "not ready"),
    ({"draining": True}, 503, "draining"),
])
def test_readiness_is_honest_and_liveness_is_not_readiness(state, health, word):
    app = application(backend(**state))
    for path in ("/health", "/ping"):
        reply = get(app, path)
        assert (reply.status, reply.json["status"]) == (health, word)
        assert ("retry-after" in reply.headers) == (health == 503)
    assert get(app, "/live").status == 200
    assert (post(app, CHAT, chat_body()).status == 503) == (word in ("loading", "draining"))


def test_a_server_that_loads_says_how_far_it_is_and_refuses_at_once():
    app = application(backend(ready=False, loaded=False))
    assert get(app, "/health").json == {"status": "loading", "cause": "prefill-0 is loading", "load_fraction": 0.25}
    reply = post(app, CHAT, chat_body())
    assert reply.error["code"] == "unavailable" and "loading" in reply.error["message"] and reply.headers["retry-after"]
    assert get(app, "/v1/models").json["data"] == [] and get(app, f"/v1/models/{MODEL}").status == 404


def test_the_model_is_described():
    app = application(backend())
    card = get(app, "/v1/models").json["data"][0]
    assert card["id"] == MODEL and card["max_model_len"] == WINDOW and get(app, f"/v1/models/{MODEL}").json == card
    assert get(app, "/v1/models/a/b").error["code"] == "model_not_found"
    assert get(app, "/get_model_info").json["fingerprint"] == "f00d"
    info = get(application(backend(), shown={"block_tokens": 16}), "/server_info").json
    assert (
        info["settings"] == {"block_tokens": 16, "placement_version": 1} and info["members"][0]["member"] == "prefill-0"
    )
    assert get(app, "/load").json == {"server_load": 0, "num_running": 4, "num_waiting": 3}


def test_one_token_shows_that_everything_works():
    scripted = backend()
    assert get(application(scripted), "/health_generate").status == 200 and scripted.last.limits.max_tokens == 1
    failing = application(ScriptedBackend(Script([1], fail_after=0, status=500)))
    assert get(failing, "/health_generate").status == 503


# ------------------------------------------------------------------------------------------------ figures and the log


def test_figures_have_the_names_that_dashboards_know():
    app = application(backend())
    post(app, CHAT, chat_body())
    post(app, CHAT, chat_body(stream=True))
    post(app, CHAT, chat_body(temperature=-1))
    page = get(app, "/metrics").body.decode()
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    model = f'model_name="{MODEL}"'
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                 "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"):
        assert figures[f"tripool:{name}_count{{{model}}}"] == "2.0"
        assert f'tripool:{name}_bucket{{le="640.0",{model}}}' in figures
    num_tokens = len(ids("so</think>Yes"))
    assert float(figures[f"tripool:inter_token_latency_seconds_count{{{model}}}"]) == 2 * (num_tokens - 1)
    assert float(figures[f"tripool:generation_tokens_total{{{model}}}"]) == 2 * num_tokens
    assert (
        figures[f"tripool:cached_tokens_total{{{model}}}"]
        == figures[f"tripool:prefix_cache_hits_total{{{model}}}"]
        == "4.0"
    )
    assert figures[f"tripool:num_requests_running{{{model}}}"] == "4.0"
    assert figures[f'tripool:kv_cache_usage_perc{{member="prefill-0",{model},role="prefill"}}'] == "0.25"
    assert figures[f'tripool:pool_hits_total{{{model},tier="memory"}}'] == "7.0"
    assert figures[f'tripool:request_success_total{{finished_reason="stop",{model}}}'] == "2.0"
    assert figures[f'http_requests_total{{handler="{CHAT}",method="POST",status="400"}}'] == "1.0"
    assert "process_cpu_seconds_total" in figures
    series = [line.rsplit(" ", 1)[0] for line in page.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series)), "no series may be told twice"


def test_one_line_of_the_log_tells_a_request_without_its_text(caplog):
    caplog.set_level(logging.INFO, "tripool.api.access")
    app = application(backend(), api_keys=("verysecretkey",))
    body = chat_body(stream=True, messages=[{"role": "user", "content": "my private words"}])
    reply = post(app, CHAT, body, headers={**bearer("verysecretkey"), "x-request-id": "id-1"})
    fields = caplog.records[-1].fields
    assert fields["request_id"] == "id-1" == reply.headers["x-request-id"]
    assert fields["path"] == CHAT and fields["status"] == 200 and fields["finish"] == ["stop"]
    assert fields["completion_tokens"] == len(ids("so</think>Yes")) and fields["cached_tokens"] == 2
    assert fields["first_token_s"] <= fields["duration_s"]
    json.dumps(fields)
    everything = str([vars(record) for record in caplog.records])
    assert "private" not in everything and "verysecretkey" not in everything and "Yes" not in everything


def test_what_machines_ask_all_the_time_is_no_line_of_the_log(caplog):
    caplog.set_level(logging.INFO, "tripool.api.access")
    app = application(backend())
    for path in ("/health", "/live", "/metrics", "/version"):
        get(app, path)
    assert [record.fields["path"] for record in caplog.records] == ["/version"]


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\tb", "é"])
def test_an_odd_request_id_is_replaced(given):
    reply = get(application(backend()), "/live", headers={"x-request-id": given})
    assert reply.headers["x-request-id"] not in ("", given)
