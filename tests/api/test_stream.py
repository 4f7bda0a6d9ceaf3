"""What a client sees of the tokens. Cases C01, C03 and C04, and: a stream says what the whole answer says."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.builders import EOS, MODEL, application, chat_body, ids, post, split_ids, token, tokenizer
from tests.api.scripted import Script, ScriptedBackend, logprob_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CHUNKS = (1, 3, 0)


def both(path, body, script, **changes):
    """The whole answer and the stream of the same script."""
    app = application(ScriptedBackend(script), **changes)
    whole, streamed = post(app, path, body), post(app, path, {**body, "stream": True})
    assert whole.status == streamed.status == 200, (whole.body, streamed.body)
    assert streamed.events[-1] == "[DONE]" and streamed.complete
    return whole.json, streamed


def no_empty_delta(streamed):
    """Besides the role, no delta has empty text; in text completions only the very last may."""
    for number, chunk in enumerate(streamed.chunks):
        for choice in chunk["choices"]:
            if "delta" in choice:
                assert choice["delta"].get("role") or "" not in choice["delta"].values()
            else:
                assert choice["text"] or choice["finish_reason"] or number == 0
    return True


# ------------------------------------------------------------------------------------------------ C01


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("spell", [ids, split_ids])
def test_the_thought_is_in_its_fields_and_the_answer_in_content(chunk, spell):
    script = Script([*spell("I think so</think>The answer."), token(EOS)], chunk)
    whole, streamed = both(CHAT, chat_body(), script)
    message = whole["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "The answer.",
        "reasoning_content": "I think so",
        "reasoning": "I think so",
    }
    for name in ("content", "reasoning_content", "reasoning"):
        assert streamed.joined(name) == message[name]
    assert "think>" not in streamed.body.decode()
    assert streamed.finishes() == {0: "stop"} and no_empty_delta(streamed)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_an_output_cut_inside_the_thought_has_no_content(chunk):
    whole, streamed = both(CHAT, chat_body(max_tokens=5), Script(split_ids("I think that"), chunk))
    choice = whole["choices"][0]
    assert choice["message"]["content"] == "" and choice["message"]["reasoning"] == "I thi"
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == whole["usage"]["completion_tokens"] == 5
    assert (
        streamed.joined("reasoning") == "I thi"
        and streamed.joined("content") == ""
        and streamed.finishes() == {0: "length"}
    )


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("off", [{"thinking": False}, {"enable_thinking": False}])
def test_with_thinking_off_everything_is_content(chunk, off):
    whole, streamed = both(
        CHAT, chat_body(chat_template_kwargs=off), Script([*split_ids("The answer."), token(EOS)], chunk)
    )
    assert whole["choices"][0]["message"]["content"] == streamed.joined("content") == "The answer."
    assert whole["choices"][0]["message"]["reasoning"] is None and streamed.joined("reasoning") == ""
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("spell", [ids, split_ids])
def test_an_opening_tag_that_the_model_repeats_is_dropped(chunk, spell):
    whole, streamed = both(
        CHAT, chat_body(), Script([*spell("<think>\nI think so\n</think>\n\nYes"), token(EOS)], chunk)
    )
    assert whole["choices"][0]["message"]["reasoning"] == streamed.joined("reasoning") == "I think so"
    assert whole["choices"][0]["message"]["content"] == streamed.joined("content") == "Yes"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_the_server_can_be_told_to_send_one_field(field):
    whole, streamed = both(CHAT, chat_body(), Script(ids("so</think>Yes")), reasoning_fields=field)
    assert set(whole["choices"][0]["message"]) == {"role", "content", field}
    other = ({"reasoning", "reasoning_content"} - {field}).pop()
    assert streamed.joined(field) == "so" and streamed.joined(other) == ""


def test_a_request_can_leave_the_thought_out_or_leave_it_in_the_content():
    script = Script(ids("so</think>Yes"))
    whole, streamed = both(CHAT, chat_body(include_reasoning=False), script)
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes",
        "reasoning_content": None,
        "reasoning": None,
    }
    assert streamed.joined("reasoning") == "" and streamed.joined("content") == "Yes"
    whole, streamed = both(CHAT, chat_body(separate_reasoning=False), script)
    assert whole["choices"][0]["message"]["content"] == streamed.joined("content") == "so</think>Yes"


# ------------------------------------------------------------------------------------------------ C03


@pytest.mark.parametrize(
    ("stops", "include", "text", "finish", "met"),
    [
        ("DEFG", False, "ABC", "stop", "DEFG"),
        ("DEFG", True, "ABCDEFG", "stop", "DEFG"),
        ("CDX", False, "ABCDEFG", "length", None),
        (["CDE", "CD"], False, "AB", "stop", "CD"),
        (["X", "EF"], True, "ABCDEF", "stop", "EF"),
    ],
)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_stop_string_across_tokens_never_leaks(stops, include, text, finish, met, chunk):
    pairs = [token_id for pair in ("AB", "CD", "EF", "G") for token_id in split_ids(pair)]
    backend = ScriptedBackend(Script(pairs, chunk))
    app = application(backend)
    body = {"prompt": "x", "stop": stops, "include_stop_str_in_output": include, "max_tokens": 7}
    whole, streamed = post(app, TEXT, body).json["choices"][0], post(app, TEXT, {**body, "stream": True})
    assert whole["text"] == streamed.joined("text") == text
    last = streamed.chunks[-1]["choices"][0]
    for choice in (whole, last):
        assert (choice["finish_reason"], choice["stop_reason"], choice["matched_stop"]) == (finish, met, met)
    assert no_empty_delta(streamed)
    assert backend.all_closed(), "the rest of the request has to be cancelled"


def test_tokens_after_a_stop_string_are_not_counted_however_they_came():
    for chunk in CHUNKS:
        whole, _ = both(TEXT, {"prompt": "x", "stop": "C"}, Script(split_ids("ABCDEFG"), chunk))
        assert whole["usage"]["completion_tokens"] == 3


def test_a_stop_string_can_be_a_character_of_several_bytes():
    whole, streamed = both(TEXT, {"prompt": "x", "stop": "界"}, Script(split_ids("世界地图")))
    assert whole["choices"][0]["text"] == streamed.joined("text") == "世" and whole["choices"][0]["stop_reason"] == "界"


def test_a_stop_string_before_the_least_number_of_tokens_does_not_count():
    whole, _ = both(TEXT, {"prompt": "x", "stop": "B", "min_tokens": 3}, Script(split_ids("ABCABC")))
    assert whole["choices"][0]["text"] == "ABCA"


def test_a_stop_token_ends_the_text_without_being_in_it():
    whole, streamed = both(TEXT, {"prompt": "x", "stop_token_ids": split_ids("C")}, Script(split_ids("ABCD")))
    choice = whole["choices"][0]
    assert choice["text"] == streamed.joined("text") == "AB"
    assert choice["stop_reason"] == choice["matched_stop"] == split_ids("C")[0]
    shown, _ = both(TEXT, {"prompt": "x", "stop_token_ids": split_ids("C"), "include_stop_str_in_output": True},
                    Script(split_ids("ABCD")))
    assert shown["choices"][0]["text"] == "ABC"


def test_the_end_of_the_text_is_a_stop_that_nobody_asked_for():
    whole, _ = both(TEXT, {"prompt": "x"}, Script([*ids("A"), token(EOS)]))
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"], choice["matched_stop"]) == (
        "A",
        "stop",
        None,
        token(EOS),
    )


# ------------------------------------------------------------------------------------------------ C04


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), (TEXT, {"prompt": "hello"})])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_usage_comes_when_asked_and_is_the_same_streamed_or_not(path, body, chunk):
    app = application(ScriptedBackend(Script(ids("I think</think>so it is"), chunk, num_cached=3)))
    whole = post(app, path, body).json["usage"]
    assert whole["prompt_tokens_details"] == {"cached_tokens": 3}
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]

    plain = post(app, path, {**body, "stream": True})
    assert all("usage" not in event for event in plain.events[:-1])

    asked = post(app, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert asked.events[-2]["choices"] == [] and asked.events[-2]["usage"] == whole
    assert [event for event in asked.events[:-2] if "usage" in event or not event["choices"]] == []

    running = post(app, path, {**body, "stream": True,
                               "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    counts = [event["usage"]["completion_tokens"] for event in running.events[:-1]]
    assert counts == sorted(counts) and running.events[-2]["usage"] == running.events[-3]["usage"] == whole
    assert running.events[-2]["choices"] == []

    assert post(app, path, {**body, "stream_options": {"include_usage": True}}).error["param"] == "stream_options"


# ------------------------------------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_token_of_a_chat_has_its_logprob(chunk):
    tokens = [*split_ids("Aé</think>B"), token(EOS)]
    whole, streamed = both(CHAT, chat_body(logprobs=True, top_logprobs=2), Script(tokens, chunk))
    content = whole["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in content] == [logprob_of(each) for each in tokens]
    assert [each["bytes"] for each in content] == [list(tokenizer().token_bytes(each)) for each in tokens]
    assert [len(each["top_logprobs"]) for each in content] == [2] * len(tokens)
    assert content[0]["top_logprobs"][0] == {"token": "A", "logprob": logprob_of(tokens[0]), "bytes": [65]}
    pieces = [
        choice["logprobs"]["content"] for chunk in streamed.chunks for choice in chunk["choices"] if choice["logprobs"]
    ]
    assert [each for piece in pieces for each in piece] == content
    none, _ = both(CHAT, chat_body(logprobs=True), Script(tokens, chunk))
    assert none["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_text_completion_has_the_four_lists(chunk):
    tokens = ids("so it is")
    whole, streamed = both(TEXT, {"prompt": "x", "logprobs": 1}, Script(tokens, chunk))
    lists = whole["choices"][0]["logprobs"]
    assert lists["token_logprobs"] == [logprob_of(each) for each in tokens]
    assert "".join(lists["tokens"]) == "so it is"
    assert lists["text_offset"] == [len("".join(lists["tokens"][:at])) for at in range(len(tokens))]
    assert all(set(top) == {name} for top, name in zip(lists["top_logprobs"], lists["tokens"], strict=True))
    for name, values in lists.items():
        assert [each for chunk in streamed.chunks for each in chunk["choices"][0]["logprobs"][name]] == values


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_scores_a_prompt_as_evaluation_tools_need_it(max_tokens):
    prompt = ids("the answer is 42")
    backend = ScriptedBackend(Script([5, 6]))
    reply = post(application(backend), TEXT, {
        "prompt": [prompt], "max_tokens": max_tokens, "logprobs": 1, "echo": True, "temperature": 0}).json
    assert backend.last.sampling.num_prompt_logprobs == 1 and backend.last.limits.max_tokens == 1
    lists = reply["choices"][0]["logprobs"]
    assert lists["token_logprobs"] == [None, *map(logprob_of, prompt[1:]), *map(logprob_of, [5][:max_tokens])]
    assert lists["top_logprobs"][0] is None and lists["top_logprobs"][1] == {lists["tokens"][1]: logprob_of(prompt[1])}
    assert reply["choices"][0]["text"].startswith("the answer is 42")
    assert reply["usage"]["completion_tokens"] == max_tokens and reply["choices"][0]["finish_reason"] == "length"


def test_an_echo_without_logprobs_or_output_computes_nothing():
    backend = ScriptedBackend(Script([5]))
    app = application(backend)
    whole = post(app, TEXT, {"prompt": "hello", "max_tokens": 0, "echo": True}).json
    streamed = post(app, TEXT, {"prompt": "hello", "max_tokens": 0, "echo": True, "stream": True})
    assert whole["choices"][0]["text"] == streamed.joined("text") == "hello" and backend.streams == []
    assert whole["usage"]["completion_tokens"] == 0 and streamed.finishes() == {0: "length"}


def test_a_minus_infinity_is_written_as_a_number():
    whole, _ = both(TEXT, {"prompt": "x", "logprobs": 5, "max_tokens": 1}, Script(ids("A")))
    assert json.loads(json.dumps(whole, allow_nan=False)) == whole


@pytest.mark.parametrize("chunk", CHUNKS)
def test_token_ids_are_returned_when_asked(chunk):
    tokens = [*split_ids("Aé</think>B"), token(EOS)]
    for path, body in ((CHAT, chat_body(return_token_ids=True)), (TEXT, {"prompt": "x", "return_token_ids": True})):
        whole, streamed = both(path, body, Script(tokens, chunk))
        assert whole["choices"][0]["token_ids"] == tokens
        assert [each for part in streamed.chunks for each in part["choices"][0].get("token_ids", [])] == tokens
        inner = whole if path == CHAT else whole["choices"][0]
        first = streamed.chunks[0] if path == CHAT else streamed.chunks[0]["choices"][0]
        assert inner["prompt_token_ids"] == first["prompt_token_ids"] != []


# ------------------------------------------------------------------------------------------------ a stream and a whole

ONE_BACKEND = ScriptedBackend(Script([]))
ONE_APP = application(ONE_BACKEND)


def scripted(script, path, body):
    """One application for all examples, as building one costs more than a request."""
    ONE_BACKEND.script = script
    ONE_BACKEND.streams.clear()
    return post(ONE_APP, path, body)


words = st.lists(
    st.sampled_from(["AB", "CD", "é", "世界", "🦊", "</think>", "<think>", "\n", " the", "<"]), max_size=12
)


@settings(max_examples=80)
@given(
    words=words,
    cut=st.booleans(),
    bytewise=st.booleans(),
    chunk=st.integers(0, 5),
    drop_last=st.booleans(),
    stops=st.lists(st.sampled_from(["CD", "BC", "D世", "界", "🦊A", "think", "<"]), max_size=3, unique=True),
    include=st.booleans(),
    thinking=st.booleans(),
    logprobs=st.booleans(),
    returns=st.booleans(),
    least=st.integers(0, 3),
)
def test_joined_deltas_are_the_whole_answer(
    words, cut, bytewise, chunk, drop_last, stops, include, thinking, logprobs, returns, least
):
    tokens = (split_ids if bytewise else ids)("".join(words))
    tokens = tokens[:-1] if drop_last else [*tokens, token(EOS)]
    body = chat_body(stop=stops, include_stop_str_in_output=include, logprobs=logprobs, return_token_ids=returns,
                     min_tokens=least, max_tokens=6 if cut else None, chat_template_kwargs={"thinking": thinking},
                     stream_options={"include_usage": True})
    reference = scripted(Script(tokens, 1), CHAT, {**body, "stream_options": None}).json
    streamed = scripted(Script(tokens, chunk), CHAT, {**body, "stream": True})
    message, choice = reference["choices"][0]["message"], reference["choices"][0]
    assert streamed.joined("content") == message["content"]
    assert streamed.joined("reasoning") == streamed.joined("reasoning_content") == (message["reasoning"] or "")
    assert streamed.finishes() == {0: choice["finish_reason"]}
    assert streamed.events[-2]["usage"] == reference["usage"] and no_empty_delta(streamed)
    last = streamed.chunks[-1]["choices"][0]
    assert (last["stop_reason"], last["matched_stop"]) == (choice["stop_reason"], choice["matched_stop"])
    if returns:
        assert [each for part in streamed.chunks for each in part["choices"][0].get("token_ids", [])] == choice[
            "token_ids"
        ]


@settings(max_examples=50)
@given(words=words, bytewise=st.booleans(), chunk=st.integers(0, 5), echo=st.booleans(),
       stops=st.lists(st.sampled_from(["CD", "BC", "D世", "🦊A"]), max_size=2, unique=True), logprobs=st.booleans())
def test_joined_texts_are_the_whole_text(words, bytewise, chunk, echo, stops, logprobs):
    tokens = (split_ids if bytewise else ids)("".join(words))
    body = {"model": MODEL, "prompt": "世 x", "stop": stops, "echo": echo, "logprobs": 1 if logprobs else None}
    reference = scripted(Script(tokens, 1), TEXT, body).json["choices"][0]
    streamed = scripted(Script(tokens, chunk), TEXT, {**body, "stream": True})
    assert streamed.joined("text") == reference["text"] and no_empty_delta(streamed)
    if logprobs:
        names = [each for part in streamed.chunks for each in part["choices"][0]["logprobs"]["tokens"]]
        assert names == reference["logprobs"]["tokens"]
