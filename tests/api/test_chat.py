"""Messages to a prompt, and text to thought and answer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.builders import ASSISTANT, BOS, THINKING_TEMPLATE, USER, tokenizer
from tripool.api.chat import ChatTemplate, ReasoningSplitter, load_chat_template
from tripool.core.errors import CheckpointError, RequestError

HELLO = [{"role": "user", "content": "hello"}]


def template(source=THINKING_TEMPLATE):
    return ChatTemplate(source, tokenizer().special_tokens)


def split(pieces, opening):
    splitter = ReasoningSplitter(opening)
    fed = [splitter.feed(piece) for piece in pieces] + [splitter.flush()]
    return "".join(thought for thought, _ in fed), "".join(answer for _, answer in fed)


# ------------------------------------------------------------------------------------------------ the prompt


def test_the_end_of_the_prompt_says_whether_the_model_begins_by_thinking():
    thinking = template().render(HELLO)
    assert thinking.text == f"{BOS}{USER}hello{ASSISTANT}<think>\n" and thinking.opening == "thinking"
    assert template().render(HELLO, arguments={"thinking": False}).opening == "answering"
    assert template().render(HELLO, add_generation_prompt=False).opening == "either"


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_either_name_switches_thinking_off(name):
    for spelled in ("thinking", "enable_thinking"):
        other = template(THINKING_TEMPLATE.replace("enable_thinking", spelled))
        assert other.render(HELLO, arguments={name: False}).text.endswith(f"{ASSISTANT}</think>")


def test_a_tag_in_the_users_words_decides_nothing():
    said = [{"role": "user", "content": "what does <think> mean?"}]
    assert template().render(said, arguments={"thinking": False}).opening == "answering"
    assert template().render(said, add_generation_prompt=False).opening == "either"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_the_thought_of_an_earlier_turn_is_read_under_either_name(name):
    turns = [*HELLO, {"role": "assistant", "content": "hi", name: "polite"}, *HELLO]
    assert "<think>polite</think>hi" in template().render(turns).text


def test_text_parts_are_joined_and_others_are_named():
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "a\nb" in template().render(parts).text
    with pytest.raises(RequestError) as refused:
        template().render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert refused.value.param == "messages[0].content[0]"


@pytest.mark.parametrize("shown", ["call.function.arguments", "(call.function.arguments | tojson)"])
def test_the_arguments_of_a_call_come_in_the_form_the_template_reads(shown):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    text = template(THINKING_TEMPLATE.replace("call.function.arguments", shown)).render(turns).text
    assert '[add{"a": 1}]' in text


def test_a_continued_message_ends_the_prompt_where_it_stops():
    rendered = template().render(
        [*HELLO, {"role": "assistant", "content": "The answer is "}], continue_final_message=True
    )
    assert rendered.text == f"{BOS}{USER}hello{ASSISTANT}The answer is " and rendered.opening == "answering"
    inside = template().render([*HELLO, {"role": "assistant", "content": "<think>well"}], continue_final_message=True)
    assert inside.text.endswith("<think>well") and inside.opening == "thinking"
    with pytest.raises(RequestError, match="last message of role assistant"):
        template().render(HELLO, continue_final_message=True)


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no') }}", "{{ 1 + 'a' }}", "{% for %}", "{{ ''.__class__.mro() }}"]
)
def test_a_template_that_cannot_render_one_message_is_refused_at_start(source):
    with pytest.raises(CheckpointError, match="chat template"):
        template(source)


def test_what_a_template_refuses_is_the_clients_mistake():
    picky = template("{%- if messages | length > 1 -%}{{ raise_exception('one message only') }}{%- endif -%}x")
    with pytest.raises(RequestError, match="one message only") as refused:
        picky.render(HELLO * 2)
    assert refused.value.status == 400 and refused.value.param == "messages"


def test_arguments_cannot_replace_what_the_server_gives_the_template():
    with pytest.raises(RequestError) as refused:
        template().render(HELLO, arguments={"messages": []})
    assert refused.value.param == "chat_template_kwargs.messages"


def test_a_template_is_found_in_its_file_or_in_the_configuration(tmp_path):
    assert load_chat_template(tmp_path, tokenizer()) is None
    tokenizer_with = type(tokenizer())(
        tokenizer().inner, {"chat_template": [{"name": "default", "template": "from the list"}]}
    )
    assert load_chat_template(tmp_path, tokenizer_with).render(HELLO).text == "from the list"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_chat_template(tmp_path, tokenizer_with).render(HELLO).text == "from the file"
    with pytest.raises(CheckpointError, match="no such file"):
        load_chat_template(tmp_path, tokenizer(), tmp_path / "absent.jinja")


def test_templates_write_json_as_prompts_need_it():
    shown = template("{% generation %}{{ {'a': '<é>'} | tojson }}{% endgeneration %}").render(HELLO).text
    assert shown == json.dumps({"a": "<é>"}, ensure_ascii=False)


# ------------------------------------------------------------------------------------------------ thought and answer


@pytest.mark.parametrize(("text", "opening", "thought", "answer"), [
    ("I think</think>42", "thinking", "I think", "42"),
    ("\nI think\n</think>\n\n42\n", "thinking", "I think", "42\n"),
    ("<think>I think</think>42", "thinking", "I think", "42"),
    ("<think>\nI think</think>42", "either", "I think", "42"),
    ("</think>42", "thinking", "", "42"),
    ("I think", "thinking", "I think", ""),
    ("I think </thin", "thinking", "I think </thin", ""),
    ("42 < 43 </think>", "answering", "", "42 < 43 </think>"),
    ("42", "either", "", "42"),
    ("<thinks", "either", "", "<thinks"),
    ("", "thinking", "", ""),
])
def test_thought_and_answer_are_told_apart_however_the_text_is_cut(text, opening, thought, answer):
    for width in range(1, len(text) + 2):
        pieces = [text[at:at + width] for at in range(0, len(text), width)]
        assert split(pieces, opening) == (thought, answer), f"pieces of {width}"


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/think>", "th", "\n", " ", "a"]), max_size=10),
       st.sampled_from(["thinking", "answering", "either"]), st.data())
def test_cutting_the_text_elsewhere_changes_nothing(words, opening, data):
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, opening) == split([text], opening)
