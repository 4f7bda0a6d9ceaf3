"""From messages to a prompt, and from what the model writes to thought and answer.

The template is the checkpoint's own, run in a sandbox; what clients send reaches it as data only. Whether
the model begins by thinking is read from the end of the rendered prompt, since templates differ in who
writes the opening tag. The splitter knows nothing of tokens or HTTP: text in, (thought, answer) out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tripool.api.tokenizer import Tokenizer
from tripool.core.errors import CheckpointError, RequestError

THINK, END_THINK = "<think>", "</think>"
REASONING_FIELDS = ("reasoning_content", "reasoning")
Opening = Literal["thinking", "answering", "either"]
"""How the model's output begins; `either`: thinking if it writes the opening tag itself."""

_CONTINUE_MARK = "⟪tripool continues here⟫"
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token",
                       "unk_token"})

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and how the output after it begins."""

    text: str
    opening: Opening


class ChatTemplate:
    """A checkpoint's chat template, compiled once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError("the chat template", [f"does not compile: {error}"]) from error
        self._wants_objects = self._reads_arguments_as_objects()
        try:
            self.render([{"role": "user", "content": "hello"}])
        except RequestError as error:
            raise CheckpointError("the chat template", [f"cannot render one user message: {error}"]) from error

    def render(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None,
               add_generation_prompt: bool = True, continue_final_message: bool = False,
               arguments: Mapping[str, Any] | None = None) -> Rendered:
        """The prompt for the next assistant turn.

        `arguments` are the client's `chat_template_kwargs`. With `continue_final_message` the prompt ends inside
        the last message, which the model goes on with.

        Raises:
            RequestError: the template refuses these messages, or there is nothing to continue.
        """
        prepared = [self._prepared(message, at) for at, message in enumerate(messages)]
        given = _both_thinking_names(arguments or {})
        if not continue_final_message:
            text = self._run(prepared, tools, add_generation_prompt, given)
            return Rendered(text, _opening(text))
        last = prepared[-1]
        if last["role"] != "assistant" or not isinstance(last["content"], str):
            raise RequestError("continue_final_message needs a last message of role assistant with text",
                               param="continue_final_message")
        begun = last["content"]
        last["content"] = begun + _CONTINUE_MARK
        text, found, _ = self._run(prepared, tools, False, given).rpartition(_CONTINUE_MARK)
        kept = begun.rsplit(END_THINK, 1)[-1].strip()
        if not found or not text.rstrip().endswith(kept):
            raise RequestError("the chat template does not keep the end of the last message, so it cannot be continued",
                               param="continue_final_message")
        return Rendered(text, _opening_within(text, begun))

    def _run(self, messages: list[Message], tools: Sequence[Any] | None, add_generation_prompt: bool,
             given: Mapping[str, Any]) -> str:
        try:
            return self._template.render(**{
                **self._special_tokens, **given,
                "messages": messages, "tools": tools or None, "documents": None,
                "add_generation_prompt": add_generation_prompt,
            })
        except Exception as error:   # templates fail in every way Python can, on messages they did not expect
            raise RequestError(f"the chat template refused these messages: {error}", param="messages") from error

    def _prepared(self, message: Message, at: int) -> Message:
        """A message as templates expect it: text content, both names of the thought, arguments in the form it reads."""
        prepared = dict(message)
        prepared["content"] = _text_content(message.get("content"), at)
        thought = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
        if thought is not None:
            prepared.update(dict.fromkeys(REASONING_FIELDS, thought))
        if message.get("tool_calls"):
            prepared["tool_calls"] = [self._prepared_call(call) for call in message["tool_calls"]]
        return prepared

    def _prepared_call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        arguments = function.get("arguments")
        if self._wants_objects and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except ValueError:
                pass   # what a model once wrote need not be JSON; the template then shows it as it is
        elif not self._wants_objects and not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    def _reads_arguments_as_objects(self) -> bool:
        """Whether the template turns arguments into JSON itself; the API has them as text."""

        def shown(arguments: Any) -> str:
            call = {"id": "0", "type": "function", "function": {"name": "probe", "arguments": arguments}}
            try:
                return self._template.render(
                    **{
                        **self._special_tokens,
                        "add_generation_prompt": False,
                        "tools": None,
                        "messages": [
                            {"role": "user", "content": "probe"},
                            {"role": "assistant", "content": None, "tool_calls": [call]},
                        ],
                    }
                )
            except Exception:  # as in _run
                return ""
        return '"probe"' in shown({"probe": "x"}) and '"probe"' not in shown('{"probe": "x"}')


def load_chat_template(folder: Path, tokenizer: Tokenizer, override: Path | None = None) -> ChatTemplate | None:
    """The template of a checkpoint: `override`, else `chat_template.jinja`, else the tokenizer's, else None.

    Raises:
        CheckpointError: it cannot be read, does not compile, or cannot render one message.
    """
    path = override or folder / "chat_template.jinja"
    if override is not None and not path.is_file():
        raise CheckpointError(str(path), ["there is no such file for --chat-template"])
    source: Any = path.read_text(encoding="utf-8") if path.is_file() else tokenizer.config.get("chat_template")
    if isinstance(source, list):
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default") or next(iter(named.values()), None)
    return ChatTemplate(source, tokenizer.special_tokens) if isinstance(source, str) else None


# ---------------------------------------------------------------- what templates are given


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its body is simply shown."""

    tags = {"generation"}   # noqa: RUF012  (the base class says so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _text_content(content: Any, at: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"messages[{at}].content[{number}] is of type {part.get('type')!r}; this model reads text only",
                param=f"messages[{at}].content[{number}]",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _both_thinking_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Templates call the switch `thinking` or `enable_thinking`; either name from the client reaches both."""
    for name in arguments:
        if name in _RESERVED:
            raise RequestError(f"chat_template_kwargs.{name} cannot be set", param=f"chat_template_kwargs.{name}")
    given = dict(arguments)
    for name, other in (("thinking", "enable_thinking"), ("enable_thinking", "thinking")):
        if name in given and other not in given:
            given[other] = given[name]
    return given


# ---------------------------------------------------------------- thought and answer


def _opening(prompt: str) -> Opening:
    """Only the very end counts: a tag further up may be a user's own words."""
    end = prompt.rstrip()
    if end.endswith(THINK):
        return "thinking"
    return "answering" if end.endswith(END_THINK) else "either"


def _opening_within(prompt: str, begun: str) -> Opening:
    """Of a prompt that ends with the beginning of an answer, `begun`."""
    if THINK in begun or END_THINK in begun:
        return "thinking" if begun.rfind(THINK) > begun.rfind(END_THINK) else "answering"
    before = _opening(prompt[:len(prompt.rstrip()) - len(begun.strip())])
    return before if before != "either" or not begun.strip() else "answering"


class ReasoningSplitter:
    """Parts a stream of text into thought and answer. What comes out does not depend on how the text was cut.

    The closing tag alone ends a thought; an opening tag that the model repeats is dropped. Line breaks next to
    the tags belong to neither side.
    """

    def __init__(self, opening: Opening) -> None:
        self._state: Literal["opening", "thinking", "answer_begins", "answering"]
        self._state = "answering" if opening == "answering" else "opening"
        self._silent_means_thinking = opening == "thinking"
        self._held = ""
        self._begun = False        # whether the thought has any text yet

    @property
    def thinking(self) -> bool:
        """Whether what came so far ends inside a thought."""
        return self._state == "thinking" or (self._state == "opening" and self._silent_means_thinking)

    def feed(self, text: str) -> tuple[str, str]:
        """More text; returns what is now certain to be (thought, answer)."""
        if self._state == "answering":
            return "", text
        held = self._held + text
        thought = ""
        if self._state == "opening":
            stripped = held.lstrip()
            if THINK.startswith(stripped):          # undecided, or exactly the tag: wait for what follows
                if stripped != THINK:
                    self._held = held
                    return "", ""
            if stripped.startswith(THINK):
                held = stripped[len(THINK):]
                self._state = "thinking"
            elif self._silent_means_thinking:
                self._state = "thinking"
            else:
                self._state, self._held = "answering", ""
                return "", held
        if self._state == "thinking":
            if not self._begun:
                held = held.lstrip("\n")
                self._begun = bool(held)
            if "<" not in held and not held.endswith("\n"):   # nearly all of a thought
                self._held = ""
                return held, ""
            before, found, after = held.partition(END_THINK)
            if not found:
                certain = len(held) - _held_tail(held)
                self._held = held[certain:]
                return held[:certain], ""
            thought, held = before.rstrip("\n"), after
            self._state = "answer_begins"
        held = held.lstrip("\n")
        if held:
            self._state = "answering"
        self._held = ""
        return thought, held

    def flush(self) -> tuple[str, str]:
        """The output has ended: what was still held."""
        held, self._held = self._held, ""
        if self._state == "opening":
            return (held, "") if self._silent_means_thinking else ("", held)
        return held.rstrip("\n"), ""


def _held_tail(text: str) -> int:
    """Length of the end of a thought that may belong to a closing tag: line breaks, then a beginning of the tag."""
    for length in range(min(len(END_THINK) - 1, len(text)), 0, -1):
        if END_THINK.startswith(text[-length:]):
            break
    else:
        length = 0
    before = text[:len(text) - length]
    return length + len(before) - len(before.rstrip("\n"))
