"""What a client can get wrong, and what the machines are given. Case C05 is here."""

import json

import pytest

from tests.api.builders import (
    BOS,
    EOS,
    MODEL,
    WINDOW,
    application,
    chat_body,
    ids,
    post,
    settings,
    token,
    tokenizer,
)
from tests.api.scripted import Script, ScriptedBackend
from tripool.api.openai import choice_seed
from tripool.core.request import Sampling, unpack_tokens

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = ids("the quick brown fox") * 100


def scripted(tokens=(1, 2, 3), **more):
    return ScriptedBackend(Script(tokens, **more))


def text_body(**more):
    return {"model": MODEL, "prompt": "hello", **more}


# ------------------------------------------------------------------------------------------------ the window


def test_the_last_free_place_of_the_window_is_used_and_a_full_one_is_refused():
    backend = scripted(LONG)
    app = application(backend)
    reply = post(app, TEXT, text_body(prompt=LONG[:WINDOW - 1]))
    assert reply.status == 200
    assert reply.json["choices"][0]["finish_reason"] == "length" and reply.json["usage"]["completion_tokens"] == 1
    for length in (WINDOW, WINDOW + 1):
        reply = post(app, TEXT, text_body(prompt=LONG[:length]))
        assert reply.status == 400
        assert reply.error["code"] == "context_length_exceeded" and reply.error["param"] == "prompt"
        assert str(WINDOW) in reply.error["message"] and f"{length} tokens" in reply.error["message"]
    assert len(backend.streams) == 1


def test_a_chat_too_long_is_refused_with_both_counts():
    words = "the quick brown fox " * 100
    app = application(scripted())
    count = post(app, "/tokenize", {"messages": [{"role": "user", "content": words}]}).json["count"]
    reply = post(app, CHAT, chat_body(messages=[{"role": "user", "content": words}]))
    assert reply.error["code"] == "context_length_exceeded" and reply.error["param"] == "messages"
    assert f"{WINDOW} tokens" in reply.error["message"] and str(count) in reply.error["message"]


def test_an_enormous_text_is_refused_by_a_bound_before_it_is_encoded():
    reply = post(application(scripted()), TEXT, text_body(prompt="a" * 200_000))
    assert reply.error["code"] == "context_length_exceeded" and "at least" in reply.error["message"]


def test_a_long_text_that_fits_is_encoded_aside():
    backend = ScriptedBackend(Script([1]))
    text = "the quick brown fox " * 1500
    assert post(application(backend, max_model_len=10**6), TEXT, text_body(prompt=text, max_tokens=1)).status == 200
    assert unpack_tokens(backend.last.prompt) == [token(BOS), *ids(text)]


@pytest.mark.parametrize(("path", "body", "asked"), [
    (TEXT, text_body(), None), (TEXT, text_body(max_tokens=10**6), 10**6), (TEXT, text_body(max_tokens=5), 5),
    (CHAT, chat_body(max_tokens=5), 5), (CHAT, chat_body(max_tokens=7, max_completion_tokens=5), 5),
])
def test_the_limit_is_what_is_asked_or_what_is_left(path, body, asked):
    backend = scripted()
    post(application(backend), path, body)
    assert backend.last.limits.max_tokens == min(asked or WINDOW, WINDOW - backend.last.num_prompt_tokens)


# ------------------------------------------------------------------------------------------------ bad values

BAD_FIELDS = [
    (dict(max_tokens=0), "max_tokens"),
    (dict(max_tokens=-1), "max_tokens"),
    (dict(max_tokens="many"), "max_tokens"),
    (dict(max_tokens=1.5), "max_tokens"),
    (dict(max_tokens=2**70), "max_tokens"),
    (dict(logit_bias={"hello": 1}), "logit_bias"),
    (dict(logit_bias={"100000": 1}), "logit_bias"),
    (dict(logit_bias={"-1": 1}), "logit_bias"),
    (dict(logit_bias={"1": 101}), "logit_bias"),
    (dict(logit_bias={"1": "x"}), "logit_bias"),
    (dict(logit_bias={"²": 1}), "logit_bias"),
    (dict(logit_bias={"9" * 5000: 1}), "logit_bias"),
    (dict(top_k=0.01), "top_k"),
    (dict(top_k=-2), "top_k"),
    (dict(top_k=True), "top_k"),
    (dict(temperature=-1), "temperature"),
    (dict(temperature="hot"), "temperature"),
    (dict(temperature=[]), "temperature"),
    (dict(top_p=0), "top_p"),
    (dict(top_p=1.1), "top_p"),
    (dict(min_p=-0.1), "min_p"),
    (dict(repetition_penalty=0), "repetition_penalty"),
    (dict(presence_penalty=3), "presence_penalty"),
    (dict(frequency_penalty=-3), "frequency_penalty"),
    (dict(seed="x"), "seed"),
    (dict(seed=2**64), "seed"),
    (dict(n=0), "n"),
    (dict(n=1000), "n"),
    (dict(stop=""), "stop"),
    (dict(stop=["a", ""]), "stop[1]"),
    (dict(stop=5), "stop"),
    (dict(stop_token_ids=[-1]), "stop_token_ids[0]"),
    (dict(stop_token_ids=[10**6]), "stop_token_ids"),
    (dict(min_tokens=9, max_tokens=3), "min_tokens"),
    (dict(stream_options={"include_usage": True}), "stream_options"),
    (dict(stream="yes"), "stream"),
    (dict(stream=True, stream_options=5), "stream_options"),
    (dict(priority=2**40), "priority"),
    (dict(cache_salt=5), "cache_salt"),
    (dict(model=5), "model"),
    (dict(kv_transfer_params={"remote": "x"}), "kv_transfer_params"),
    (dict(guided_json={"type": "object"}), "guided_json"),
    (dict(truncate_prompt_tokens=5), "truncate_prompt_tokens"),
]
BAD_CHATS = [
    (dict(messages=[]), "messages"),
    (dict(messages="hello"), "messages"),
    (dict(messages=[5]), "messages[0]"),
    (dict(messages=[{"role": "user"}]), "messages[0].content"),
    (dict(messages=[{"content": "x"}]), "messages[0].role"),
    (dict(messages=[{"role": "robot", "content": "x"}]), "messages[0].role"),
    (dict(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
    (dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type"),
    (
        dict(messages=[{"role": "assistant", "tool_calls": [{"function": {}}]}]),
        "messages[0].tool_calls[0].function.name",
    ),
    (dict(top_logprobs=25, logprobs=True), "top_logprobs"),
    (dict(top_logprobs=3), "top_logprobs"),
    (dict(logprobs=5), "logprobs"),
    (dict(max_completion_tokens=0), "max_completion_tokens"),
    (dict(tool_choice="required"), "tool_choice"),
    (dict(tool_choice={"function": {"name": "f"}}), "tool_choice"),
    (dict(response_format={"type": "json_object"}), "response_format"),
    (dict(response_format=5), "response_format"),
    (dict(chat_template_kwargs=5), "chat_template_kwargs"),
    (dict(chat_template="{{ 1 }}"), "chat_template"),
    (dict(chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages"),
    (dict(continue_final_message=True), "continue_final_message"),
]
BAD_TEXTS = [
    (dict(prompt=[]), "prompt"),
    (dict(prompt=5), "prompt"),
    (dict(prompt=[1, "a"]), "prompt"),
    (dict(prompt=[[]]), "prompt"),
    (dict(prompt=[10**6]), "prompt"),
    (dict(prompt=[[1], [10**6]]), "prompt"),
    (dict(prompt=[1.5]), "prompt[0]"),
    (dict(prompt=None), "prompt"),
    (dict(suffix="x"), "suffix"),
    (dict(best_of=3), "best_of"),
    (dict(logprobs=25), "logprobs"),
    (dict(logprobs=True), "logprobs"),
    (dict(prompt=["a"] * 2000), "prompt"),
    (dict(prompt=["a"] * 100, n=100), "prompt"),
]


def test_a_bad_value_is_refused_by_name_and_the_server_goes_on():
    backend = scripted()
    app = application(backend)
    for path, body, cases in ((CHAT, chat_body(), BAD_FIELDS + BAD_CHATS), (TEXT, text_body(), BAD_FIELDS + BAD_TEXTS)):
        for fields, param in cases:
            reply = post(app, path, {**body, **fields})
            assert (reply.status, reply.error["param"]) == (400, param), (path, str(fields)[:100], reply.body)
            assert set(reply.error) == {"message", "type", "param", "code", "request_id"}
            assert reply.error["type"] == "invalid_request_error"
    assert backend.streams == [], "nothing may be computed for a body that is refused"
    assert post(app, CHAT, chat_body()).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "body"),
        (b"hello", "body"),
        (b"[1]", "body"),
        (b"null", "body"),
        (b'"x"', "body"),
        (b"\xff\xfe", "body"),
        (b'{"model": ', "body"),
        (b'{"prompt": "\xff"}', "body"),
        (b'{"prompt": "\\ud800"}', "body"),
        (b"{}", "prompt"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "top_p": Infinity}', "top_p"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "logit_bias": {"1": NaN}}', "logit_bias.1"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body"),
        (b"[" * 100_000, "body"),
    ],
)
def test_what_is_no_request_at_all_is_refused(body, param):
    reply = post(application(scripted()), TEXT, body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_an_unknown_model_is_not_found_and_none_is_the_served_one():
    app = application(scripted())
    for path, body in (
        (CHAT, chat_body()),
        (TEXT, text_body()),
        ("/tokenize", text_body()),
        ("/detokenize", {"tokens": [1]}),
    ):
        reply = post(app, path, {**body, "model": "gpt"})
        assert (reply.status, reply.error["param"], reply.error["code"]) == (404, "model", "model_not_found")
        assert post(app, path, {**body, "model": None}).status == 200


def test_a_long_body_is_refused_whether_or_not_it_says_so():
    app = application(scripted(), max_body_bytes=1000)
    body = json.dumps(text_body(prompt="a" * 2000)).encode()
    for headers in ({}, {"content-length": str(len(body))}):
        reply = post(app, TEXT, body, headers=headers)
        assert (reply.status, reply.error["param"]) == (413, "body")


def test_without_a_template_only_chat_is_refused():
    app = application(scripted(), template=None)
    assert post(app, CHAT, chat_body()).error["code"] == "no_chat_template"
    assert post(app, TEXT, text_body()).status == 200


# ------------------------------------------------------------------------------------------------ what the machines get


def test_sampling_comes_from_the_request_and_else_from_the_checkpoint():
    backend = scripted()
    app = application(backend, default_sampling=Sampling(temperature=0.6, top_p=0.95, top_k=7))
    post(app, TEXT, text_body())
    assert (backend.last.sampling.temperature, backend.last.sampling.top_p, backend.last.sampling.top_k) == (
        0.6,
        0.95,
        7,
    )
    post(
        app,
        TEXT,
        text_body(
            temperature=0.000001,
            top_p=0.5,
            top_k=-1,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.2,
            logit_bias={"5": 2, "3": -100},
            seed=-7,
            logprobs=2,
            priority=-3,
            draft=False,
        ),
    )
    assert backend.last.sampling == Sampling(
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.2,
        logit_bias=((3, -100.0), (5, 2.0)),
        seed=2**63 - 7,
        num_logprobs=2,
        num_prompt_logprobs=-1,
        drafts=False,
    )
    assert backend.last.priority == -3


def test_stop_tokens_are_the_models_and_the_clients_unless_the_models_are_ignored():
    backend = scripted()
    app = application(backend)
    post(app, TEXT, text_body(stop_token_ids=[5], min_tokens=2))
    assert backend.last.limits.stop_token_ids == (token(EOS), 5) and backend.last.limits.min_tokens == 2
    post(app, TEXT, text_body(stop_token_ids=[5], ignore_eos=True))
    assert backend.last.limits.stop_token_ids == (5,)


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]])
def test_a_list_of_prompts_is_one_request_each(prompt):
    backend = scripted()
    reply = post(application(backend), TEXT, text_body(prompt=prompt, n=2, seed=7))
    expected = [token(BOS), *ids("a")] if prompt[0] == "a" else [1, 2]
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2, 3]
    assert unpack_tokens(backend.requests[0].prompt) == unpack_tokens(backend.requests[1].prompt) == expected
    seeds = [request.sampling.seed for request in backend.requests]
    assert seeds[:2] == seeds[2:] == [7, choice_seed(7, 1)]


def test_choices_without_a_seed_differ_and_with_one_repeat():
    backend = scripted()
    app = application(backend)
    for _ in range(2):
        post(app, CHAT, chat_body(n=3))
    drawn = [request.sampling.seed for request in backend.requests]
    assert len(set(drawn)) == 6 and all(0 <= seed < 2**63 for seed in drawn)
    assert len({choice_seed(seed, index) for seed in range(50) for index in range(50)}) > 2400


def test_a_servers_seed_repeats_the_draws_of_requests_without_one():
    drawn = []
    for seed in (7, 7, 8):
        backend = scripted()
        app = application(backend, seed=seed)
        for _ in range(2):
            post(app, CHAT, chat_body(n=2))
        drawn.append([request.sampling.seed for request in backend.requests])
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 4


@pytest.mark.parametrize(("fields", "said"), [
    (dict(temperature=-1), "temperature is -1: expected `float` >= 0.0"),
    (dict(seed="x"), 'seed is "x": expected `int | null`'),
    (dict(messages=[{"role": "robot", "content": "x"}]),
     'messages[0].role is "robot"; known are system, developer, user, assistant, tool'),
    (dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
     'messages[0].content[0].type is "image_url"; known are text'),
    (dict(messages=[{"content": "x"}]), "messages[0].role is missing"),
    (dict(logit_bias={"1": 101}), "logit_bias: expected `float` <= 100.0"),
])
def test_a_refusal_names_the_value_and_what_would_do(fields, said):
    assert post(application(scripted()), CHAT, chat_body(**fields)).error["message"] == said


def test_an_empty_body_is_called_so():
    error = post(application(scripted()), CHAT, b"").error
    assert error["message"] == "the body is empty; send a JSON object"


def test_ids_and_routes_in_a_body_have_no_effect():
    backend = scripted()
    reply = post(application(backend), TEXT, text_body(
        request_id="mine", rid="mine", bootstrap_host="10.0.0.1", bootstrap_port=1, bootstrap_room=2, session_id="s"))
    assert reply.status == 200 and "mine" not in reply.body.decode() and isinstance(backend.last.request_id, int)


def test_fields_without_effect_are_logged_by_name_only(caplog):
    caplog.set_level("INFO", "tripool.api")
    assert post(application(scripted()), TEXT, text_body(wibble="secret", user="u")).status == 200
    named = [record.fields["names"] for record in caplog.records if record.message == "fields without effect"]
    assert named == [("wibble",)]
    assert "secret" not in str([vars(record) for record in caplog.records])


def test_the_salt_comes_from_the_credential_and_a_client_can_only_narrow_it():
    backend = scripted()
    app = application(backend, api_keys=("one", "two"))
    salts = {}
    for key in ("one", "two"):
        for own in (None, "x", "y"):
            post(app, TEXT, text_body(cache_salt=own), headers={"authorization": f"Bearer {key}"})
            salts[key, own] = backend.last.salt
    assert len(set(salts.values())) == 6 and all(salts.values())
    post(app, TEXT, text_body(cache_salt="x"), headers={"authorization": "Bearer one"})
    assert backend.last.salt == salts["one", "x"]
    open_backend = scripted()
    post(application(open_backend), TEXT, text_body())
    assert open_backend.last.salt == b""


def test_reasoning_effort_switches_thinking():
    backend = scripted()
    app = application(backend)
    for effort, ending in (("none", "</think>"), ("high", "<think>\n")):
        post(app, CHAT, chat_body(reasoning_effort=effort))
        assert tokenizer().decode(unpack_tokens(backend.last.prompt), skip_special_tokens=False).endswith(ending)


def test_tools_in_the_history_and_in_the_request_do_not_crash():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "add"}, {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "2"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    backend = scripted()
    reply = post(application(backend), CHAT, chat_body(messages=messages, tools=tools, tool_choice="auto"))
    assert reply.status == 200
    assert '[add{"a": 1}]' in tokenizer().decode(unpack_tokens(backend.last.prompt), skip_special_tokens=False)


def test_tokens_and_text_go_both_ways():
    app = application(scripted())
    reply = post(app, "/tokenize", {"prompt": "hello 🦊", "return_token_strs": True}).json
    assert reply["tokens"] == [token(BOS), *ids("hello 🦊")] and reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == WINDOW and reply["token_strs"][0] == BOS
    assert post(app, "/tokenize", {"prompt": "hello", "add_special_tokens": False}).json["tokens"] == ids("hello")
    assert post(app, "/detokenize", {"tokens": reply["tokens"]}).json == {"prompt": BOS + "hello 🦊"}
    assert post(app, "/detokenize", {"tokens": [10**6]}).error["param"] == "tokens"
    for wrong in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}):
        assert post(app, "/tokenize", wrong).status == 400
    chat = post(app, "/tokenize", {"messages": chat_body()["messages"]}).json["tokens"]
    rendered = settings().template.render(chat_body()["messages"]).text
    assert chat == ids(rendered)
