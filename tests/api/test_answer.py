"""Ends: failures, several choices, clients that leave, operators that abort. Cases C06 and C07 are here."""

import asyncio
import re

import pytest

from tests.api.builders import MODEL, application, chat_body, get, ids, post, send, split_ids
from tests.api.scripted import Script, ScriptedBackend, ScriptedStream

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = ids("the quick brown fox jumps over the lazy dog")


def figure(app, name, **labels):
    """One number from /metrics; 0 if it is not there yet."""
    for line in get(app, "/metrics").body.decode().splitlines():
        if line.startswith(f"tripool:{name}") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            if re.match(rf"tripool:{name}(\{{| )", line):
                return float(line.rsplit(" ", 1)[1])
    return 0.0


# ------------------------------------------------------------------------------------------------ C06


@pytest.mark.parametrize("status", [500, 503, 504])
def test_a_failure_in_mid_stream_is_an_error_event_and_then_the_end(status):
    backend = ScriptedBackend(Script(WORDS, fail_after=5, status=status))
    app = application(backend)
    cause = {500: "internal", 503: "unavailable", 504: "deadline"}[status]
    streamed = post(app, CHAT, chat_body(stream=True), headers={"x-request-id": "abc-1"})
    assert streamed.status == 200 and streamed.complete
    assert streamed.events[-1] == "[DONE]" and streamed.finishes() == {}
    error = streamed.events[-2]["error"]
    assert error["request_id"] == "abc-1" and error["type"] and "decode-0" in error["message"]
    assert figure(app, "request_failure_total", cause=cause) == 1 and backend.all_closed()

    whole = post(app, CHAT, chat_body(), headers={"x-request-id": "abc-2"})
    assert whole.status == status and whole.error == {**error, "request_id": "abc-2"}
    assert whole.headers["retry-after"] == "2"
    assert figure(app, "request_failure_total", cause=cause) == 2 and figure(app, "request_success_total") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "code"), [(429, "queue_full"), (503, "unavailable")])
def test_a_refusal_before_the_first_token_has_its_own_status(status, code, stream):
    app = application(
        ScriptedBackend(Script(WORDS, fail_after=0, status=status, retry_after_s=1.2, error="the queue is full"))
    )
    reply = post(app, CHAT, chat_body(stream=stream))
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (status, code, "2")
    assert reply.complete and reply.headers["x-request-id"] == reply.error["request_id"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_first_token_that_never_comes_is_an_error_within_the_deadline(stream):
    backend = ScriptedBackend(Script(WORDS, hang_after=0))
    app = application(backend, keep_alive_s=0.05, output_deadline_s=0.2)
    reply = post(app, CHAT, chat_body(stream=stream))
    if stream:
        assert reply.parts[0].startswith(b":"), "a silent stream is kept alive by comments"
        assert reply.events[-2]["error"]["code"] == "deadline_exceeded" and reply.events[-1] == "[DONE]"
    else:
        assert reply.status == 504 and reply.error["code"] == "deadline_exceeded"
    assert backend.all_closed() and figure(app, "request_failure_total", cause="deadline") == 1


class DeafStream(ScriptedStream):
    """Says nothing and does not end when it is closed."""

    async def __anext__(self):
        await asyncio.Event().wait()


@pytest.mark.parametrize("stream", [False, True])
def test_a_backend_that_does_not_even_end_cannot_hold_the_client(stream):
    backend = ScriptedBackend(Script(WORDS))
    backend.open = lambda request: DeafStream(request, Script(WORDS))
    reply = post(application(backend, keep_alive_s=0.02, output_deadline_s=0.1), CHAT, chat_body(stream=stream))
    assert (reply.events[-2] if stream else reply.json)["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_an_iteration_that_ends_without_a_last_word_is_an_error(stream):
    reply = post(application(ScriptedBackend(Script(WORDS, lose_after=3))), CHAT, chat_body(stream=stream))
    assert (reply.events[-2] if stream else reply.json)["error"]["code"] == "internal_error"
    assert reply.status == (200 if stream else 500)


@pytest.mark.parametrize("stream", [False, True])
def test_a_backend_that_breaks_is_an_internal_error_without_its_words(stream):
    def broken(request):
        raise ZeroDivisionError("secret")
    reply = post(application(ScriptedBackend(broken)), CHAT, chat_body(stream=stream))
    assert reply.status == 500 and reply.error["code"] == "internal_error" and "secret" not in reply.body.decode()


def test_a_slow_stream_is_kept_alive_and_says_the_same():
    app = application(ScriptedBackend(Script(ids("so</think>Yes"), delay_s=0.06)), keep_alive_s=0.02)
    reply = post(app, CHAT, chat_body(stream=True))
    assert any(part.startswith(b":") for part in reply.parts)
    assert reply.joined("content") == "Yes" and reply.finishes() == {0: "stop"}


# ------------------------------------------------------------------------------------------------ C07


def by_seed(request):
    """Text and length that depend on the seed alone."""
    letters = [chr(ord("a") + (request.sampling.seed >> at) % 26) for at in range(3)]
    return Script(split_ids("".join(letters) * (1 + request.sampling.seed % 5)), delay_s=0.001)


def test_choices_differ_repeat_and_end_each_by_itself():
    app = application(ScriptedBackend(by_seed))
    body = {"model": MODEL, "prompt": "x", "n": 3, "seed": 7, "temperature": 1}
    whole, again = post(app, TEXT, body).json, post(app, TEXT, body).json
    texts = [choice["text"] for choice in whole["choices"]]
    assert len(set(texts)) == 3 and texts == [choice["text"] for choice in again["choices"]]
    assert whole["usage"]["prompt_tokens"] == len(ids("x")) + 1
    assert whole["usage"]["completion_tokens"] == sum(map(len, texts))

    streamed = post(app, TEXT, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert [streamed.joined("text", index) for index in range(3)] == texts
    assert set(streamed.finishes()) == {0, 1, 2} and streamed.events[-2]["usage"] == whole["usage"]
    first_end = next(at for at, chunk in enumerate(streamed.chunks) if chunk["choices"][0]["finish_reason"])
    ended = streamed.chunks[first_end]["choices"][0]["index"]
    assert any(chunk["choices"][0]["index"] != ended for chunk in streamed.chunks[first_end + 1:])


def test_each_choice_of_a_chat_begins_with_its_role():
    streamed = post(application(ScriptedBackend(by_seed)), CHAT, chat_body(n=3, stream=True, seed=7))
    for index in range(3):
        first = next(chunk["choices"][0] for chunk in streamed.chunks if chunk["choices"][0]["index"] == index)
        assert first["delta"] == {"role": "assistant", "content": ""}


def short_then_endless(request):
    return Script(WORDS[:1]) if request.request_id % 3 == 1 else Script(WORDS * 10, delay_s=0.01)


def test_a_client_that_leaves_after_the_first_choice_frees_all():
    backend = ScriptedBackend(short_then_endless)
    app = application(backend)
    reply = asyncio.run(send(app, CHAT, chat_body(n=3, stream=True), leave_after=4))
    assert not reply.complete and len(backend.streams) == 3 and backend.all_closed()
    assert all(stream.num_sent < 20 for stream in backend.streams)
    assert figure(app, "num_aborted_requests_total", phase="decode") == 2 and figure(app, "request_success_total") == 1


def test_one_failed_choice_ends_them_all():
    backend = ScriptedBackend(
        lambda request: Script(WORDS, delay_s=0.005, fail_after=2 if request.request_id == 2 else None)
    )
    app = application(backend)
    streamed = post(app, CHAT, chat_body(n=3, stream=True))
    assert "error" in streamed.events[-2] and streamed.events[-1] == "[DONE]" and backend.all_closed()
    whole = post(application(ScriptedBackend(backend.script)), CHAT, chat_body(n=3))
    assert whole.status == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "phase"), [(Script(WORDS, hang_after=0), "prefill"), (Script(WORDS, hang_after=2), "decode")]
)
def test_a_client_that_leaves_cancels_its_request_in_either_phase(stream, script, phase):
    backend = ScriptedBackend(script)
    app = application(backend)

    async def leave():
        asking = asyncio.ensure_future(
            send(app, CHAT, chat_body(stream=stream), leave_after=0 if phase == "prefill" else None)
        )
        if phase == "decode":
            while not backend.streams or backend.streams[0].num_sent < 2:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    assert backend.all_closed() and figure(app, "num_aborted_requests_total", phase=phase) == 1


@pytest.mark.parametrize("path", ["/abort_request", "/abort_requests"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_operator_ends_a_request_by_either_id(path, stream):
    async def abort(named):
        backend = ScriptedBackend(Script(ids("so</think>Yes, it"), hang_after=4))
        app = application(backend)
        asking = asyncio.ensure_future(send(app, CHAT, chat_body(stream=stream), headers={"x-request-id": "mine"}))
        while not backend.streams or backend.streams[0].num_sent < 4:
            await asyncio.sleep(0.001)
        assert (await send(app, "/load", method="GET")).json["server_load"] == 1
        assert (await send(app, path, {"rid": "another"})).json == {"aborted": []}
        assert (await send(app, path, named)).json == {"aborted": ["chatcmpl-0000000000000001"]}
        reply = await asking
        assert backend.all_closed() and (await send(app, "/load", method="GET")).json["server_load"] == 0
        return reply

    for named in ({"rid": "mine"}, {"request_ids": ["chatcmpl-0000000000000001"]}, {"abort_all": True}):
        reply = asyncio.run(abort(named))
        assert reply.status == 200
        if stream:
            assert reply.finishes() == {0: "abort"} and reply.events[-1] == "[DONE]"
        else:
            assert reply.json["choices"][0]["finish_reason"] == "abort"
            assert reply.json["usage"]["completion_tokens"] in (3, 4)      # the fourth may be sent, but not yet read
