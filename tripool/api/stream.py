"""From token ids to what the client sees: text, thought, log-probabilities, usage, and the bytes of each event.

A `Choice` follows one sequence and is the only parser: a streamed and a whole answer come from the same
calls, token by token, so neither the backend's chunking nor the mode can change what they say. The writers
join constant parts, made once for each choice, with the little that varies. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from tripool.api.chat import END_THINK, THINK, ReasoningSplitter
from tripool.api.openai import Call, Prompt
from tripool.api.schema import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    FinishReason,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from tripool.api.stop import StopMatcher
from tripool.api.tokenizer import Tokenizer
from tripool.core.messages import Output
from tripool.core.plan import TokenLogprobs
from tripool.core.request import unpack_tokens

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still working\n\n"
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

encode_json = msgspec.json.Encoder().encode


class Scored(NamedTuple):
    """A token with its log-probabilities; `chosen` is None where there is none (the first of a prompt)."""

    token_id: int
    offset: int                       # in the text
    chosen: float | None
    top_ids: Sequence[int]
    top_values: Sequence[float]


class Choice:
    """One choice as it comes: counts, how it ended, and what has not been shown yet."""

    __slots__ = (
        "_call",
        "_detokenizer",
        "_matcher",
        "_num_unmatched",
        "_prompt_logprobs",
        "_scores",
        "_splitter",
        "_stop_ids",
        "answer",
        "finish",
        "index",
        "num_cached",
        "num_reasoning",
        "num_tokens",
        "prompt",
        "scored",
        "stop",
        "text_length",
        "thought",
        "token_ids",
    )

    def __init__(self, call: Call, index: int, tokenizer: Tokenizer) -> None:
        self.index = index
        self.prompt: Prompt = call.prompts[index // call.n]
        self.thought: list[str] = []          # pieces that have not been shown
        self.answer: list[str] = []
        self.token_ids: list[int] = []
        self.scored: list[Scored] = []
        self.num_tokens = 0
        self.num_reasoning = 0
        self.num_cached = 0
        self.finish: FinishReason | None = None
        self.stop: str | int | None = None    # the string or token that ended it
        self.text_length = len(self.prompt.text) if call.echo else 0
        self._call = call
        self._scores = call.num_logprobs >= 0
        self._prompt_logprobs: dict[int, Scored] = {}
        self._matcher = StopMatcher(call.stops, call.include_stop) if call.stops else None
        self._splitter = None if call.opening is None else ReasoningSplitter(call.opening)
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=call.skip_special_tokens,
                                                  keep=(THINK, END_THINK) if self._splitter else ())
        limits = call.requests[index].limits if call.requests else None
        self._stop_ids = frozenset(limits.stop_token_ids) if limits else frozenset()
        self._num_unmatched = limits.min_tokens if limits else 0   # tokens within which no stop string counts

    def advance(self, output: Output) -> None:
        """Take what the backend says next. After `finish` is set nothing changes any more."""
        if self.finish is not None:
            return
        if output.num_cached_tokens is not None:
            self.num_cached = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self._keep_prompt_logprobs(output.prompt_logprobs)
        if self._call.drop_output:
            if output.finish is not None:
                self.finish = "length"
            return
        tokens = output.tokens
        if tokens:
            ids = (int.from_bytes(tokens, "little", signed=True),) if len(tokens) == 4 else unpack_tokens(tokens)
            for token_id in ids:
                self._take(token_id, output.logprobs)
                if self.finish is not None:
                    return
        if output.finish is not None:
            self.end(output.finish, output.stop_token)

    def end(self, finish: FinishReason, stop: str | int | None = None) -> None:
        """Nothing more comes: let out what was held."""
        text = self._detokenizer.flush()
        if self._matcher is not None and self._matcher.stop is None:
            text = self._matcher.feed(text) + self._matcher.flush()
        self._show(text)
        if self._splitter is not None:
            thought, answer = self._splitter.flush()
            if thought:
                self.thought.append(thought)
            if answer:
                self.answer.append(answer)
        self.finish, self.stop = finish, stop

    def _take(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        number = self.num_tokens
        self.num_tokens = number + 1
        if self._call.return_token_ids:
            self.token_ids.append(token_id)
        if self._scores:
            self.scored.append(self._score(token_id, number, logprobs))
        if token_id in self._stop_ids and not self._call.include_stop:
            self.end("stop", token_id)
            return
        text = self._detokenizer.step(token_id)
        self.text_length += len(text)
        if self._matcher is not None and number >= self._num_unmatched:
            text = self._matcher.feed(text)
        if text:
            self._show(text)
        if self._splitter is not None and self._splitter.thinking:
            self.num_reasoning += 1
        if self._matcher is not None and self._matcher.stop is not None:
            self.end("stop", self._matcher.stop)
        elif token_id in self._stop_ids:
            self.end("stop", token_id)

    def _show(self, text: str) -> None:
        if self._splitter is None:
            if text:
                self.answer.append(text)
            return
        thought, answer = self._splitter.feed(text)
        if thought:
            self.thought.append(thought)
        if answer:
            self.answer.append(answer)

    def _score(self, token_id: int, number: int, logprobs: TokenLogprobs | None) -> Scored:
        at = number - logprobs.start if logprobs is not None else -1
        if logprobs is None or not 0 <= at < len(logprobs.chosen):
            return Scored(token_id, self.text_length, None, (), ())
        return Scored(
            token_id,
            self.text_length,
            logprobs.chosen[at],
            logprobs.top_ids[at] if logprobs.top_ids else (),
            logprobs.top_values[at] if logprobs.top_values else (),
        )

    def _keep_prompt_logprobs(self, logprobs: TokenLogprobs) -> None:
        """They come by chunks of the prompt, and again if an attempt failed."""
        for at, chosen in enumerate(logprobs.chosen):
            position = logprobs.start + at
            if 0 <= position < len(self.prompt.token_ids):
                self._prompt_logprobs[position] = Scored(
                    self.prompt.token_ids[position],
                    0,
                    chosen,
                    logprobs.top_ids[at] if logprobs.top_ids else (),
                    logprobs.top_values[at] if logprobs.top_values else (),
                )

    def scored_prompt(self, tokenizer: Tokenizer) -> list[Scored]:
        """The prompt's tokens, for echo. The first has no log-probability: nothing predicts it."""
        scored, length = [], 0
        detokenizer = tokenizer.detokenizer(skip_special_tokens=self._call.skip_special_tokens)
        for position, token_id in enumerate(self.prompt.token_ids):
            known = self._prompt_logprobs.get(position) if position else None
            scored.append(known._replace(offset=length) if known else Scored(token_id, length, None, (), ()))
            length += len(detokenizer.step(token_id))
        return scored

    @property
    def stop_reason(self) -> str | int | None:
        """What ended it, as far as the client asked for it: the end-of-sequence token is nobody's wish."""
        return self.stop if isinstance(self.stop, str) or self.stop in self._call.stop_token_ids else None


def usage_of(call: Call, choices: Sequence[Choice]) -> Usage:
    """What a call cost. A prompt counts once for all its choices, and so does what was cached of it."""
    prompt_tokens = sum(len(prompt.token_ids) for prompt in call.prompts)
    completion_tokens = sum(choice.num_tokens for choice in choices)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(choice.num_cached for choice in choices[:: call.n])),
        completion_tokens_details=CompletionTokensDetails(sum(choice.num_reasoning for choice in choices)),
    )


# ---------------------------------------------------------------- log-probabilities


def chat_logprobs(scored: Iterable[Scored], tokenizer: Tokenizer) -> ChatLogprobs:
    """The form of chat completions."""
    content = []
    for each in scored:
        data = tokenizer.token_bytes(each.token_id)
        top = [
            TopLogprob(_spelled(spelled := tokenizer.token_bytes(token_id)), max(value, LEAST_LOGPROB), list(spelled))
            for token_id, value in zip(each.top_ids, each.top_values, strict=True)
        ]
        content.append(TokenLogprob(_spelled(data), _finite(each.chosen), list(data), top))
    return ChatLogprobs(content)


def completion_logprobs(scored: Sequence[Scored], tokenizer: Tokenizer) -> CompletionLogprobs:
    """The form of text completions: four lists. The chosen token is among the top ones, in whatever rank."""
    top_logprobs: list[dict[str, float] | None] = []
    for each in scored:
        if each.chosen is None:
            top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        pairs = zip((*each.top_ids, each.token_id), (*each.top_values, each.chosen), strict=True)
        for token_id, value in sorted(pairs, key=lambda pair: -pair[1]):
            top.setdefault(_spelled(tokenizer.token_bytes(token_id)), max(value, LEAST_LOGPROB))
        top_logprobs.append(top)
    return CompletionLogprobs(
        text_offset=[each.offset for each in scored],
        token_logprobs=[_finite(each.chosen) for each in scored],
        tokens=[_spelled(tokenizer.token_bytes(each.token_id)) for each in scored],
        top_logprobs=top_logprobs)


def _spelled(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _finite(value: float | None) -> float | None:
    return None if value is None else max(value, LEAST_LOGPROB)


# ---------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str
    reasoning_fields: tuple[str, ...]


def whole_chat(call: Call, envelope: Envelope, choices: Sequence[Choice], tokenizer: Tokenizer) -> bytes:
    """The body of a chat completion that is not streamed."""
    shown = []
    for choice in choices:
        thought = "".join(choice.thought) or None
        if not call.show_reasoning:
            thought = None
        fields = dict.fromkeys(envelope.reasoning_fields, thought) if call.opening is not None else {}
        shown.append(ChatChoice(
            index=choice.index, message=AssistantMessage("assistant", "".join(choice.answer), **fields),
            logprobs=chat_logprobs(choice.scored, tokenizer) if call.num_logprobs >= 0 else None,
            finish_reason=_finish(choice), stop_reason=choice.stop_reason, matched_stop=choice.stop,
            token_ids=choice.token_ids if call.return_token_ids else UNSET))
    return encode_json(ChatCompletion(
        envelope.id, "chat.completion", envelope.created, envelope.model, shown, usage_of(call, choices),
        call.prompts[0].token_ids if call.return_token_ids else UNSET))


def whole_completion(call: Call, envelope: Envelope, choices: Sequence[Choice], tokenizer: Tokenizer) -> bytes:
    """The body of a text completion that is not streamed."""
    shown = []
    for choice in choices:
        scored = (
            choice.scored_prompt(tokenizer) + choice.scored if call.echo and call.num_logprobs >= 0 else choice.scored
        )
        text = (choice.prompt.text if call.echo else "") + "".join(choice.answer)
        shown.append(CompletionChoice(
            index=choice.index, text=text,
            logprobs=completion_logprobs(scored, tokenizer) if call.num_logprobs >= 0 else None,
            finish_reason=_finish(choice), stop_reason=choice.stop_reason, matched_stop=choice.stop,
            token_ids=choice.token_ids if call.return_token_ids else UNSET,
            prompt_token_ids=choice.prompt.token_ids if call.return_token_ids else UNSET))
    return encode_json(Completion(
        envelope.id, "text_completion", envelope.created, envelope.model, shown, usage_of(call, choices)))


def _finish(choice: Choice) -> FinishReason:
    assert choice.finish is not None, f"choice {choice.index} is shown before its end"
    return choice.finish


# ---------------------------------------------------------------- events of a stream


class ChunkWriter:
    """Writes what a choice has to show as events. One for each choice, as the constant parts name its index."""

    def __init__(
        self, call: Call, envelope: Envelope, choices: Sequence[Choice], choice: Choice, tokenizer: Tokenizer
    ) -> None:
        self._call, self._choices, self._choice, self._tokenizer = call, choices, choice, tokenizer
        kind = b"chat.completion.chunk" if call.is_chat else b"text_completion"
        self._head = (
            b'data: {"id":'
            + encode_json(envelope.id)
            + b',"object":"'
            + kind
            + b'","created":%d' % envelope.created
            + b',"model":'
            + encode_json(envelope.model)
            + b',"choices":['
        )
        self._open = self._head + b'{"index":%d' % choice.index + (b',"delta":' if call.is_chat else b',"text":')
        close = b',"logprobs":null,"finish_reason":null}]}\n\n'
        # Encoded text joined by these parts is a whole event.
        self._answer_parts = ((self._open + b'{"content":', b"}" + close) if call.is_chat else (self._open, close))
        fields = [b'"' + name.encode() + b'":' for name in envelope.reasoning_fields]
        self._thought_delta = (b"{" + fields[0], *(b"," + field for field in fields[1:]), b"}")
        self._thought_parts = (self._open + self._thought_delta[0], *self._thought_delta[1:-1], b"}" + close)
        # Whether an event is no more than its text between constant parts.
        self._plain = (
            not (call.num_logprobs >= 0 or call.continuous_usage or call.return_token_ids) and call.show_reasoning
        )
        self._begun = False

    def chunk(self) -> bytes:
        """The events for what has come since the last call; empty if there is nothing to show yet."""
        choice = self._choice
        if self._begun and self._plain and choice.finish is None and not (choice.thought and choice.answer):
            pieces, parts = (
                (choice.thought, self._thought_parts) if choice.thought else (choice.answer, self._answer_parts)
            )
            if not pieces:
                return b""
            text = pieces[0] if len(pieces) == 1 else "".join(pieces)
            pieces.clear()
            return encode_json(text).join(parts)
        return self._any_chunk()

    def _any_chunk(self) -> bytes:
        choice, call = self._choice, self._call
        if not call.show_reasoning:
            choice.thought.clear()
        events: list[bytes] = []
        if not self._begun and (choice.num_tokens or choice.finish is not None):
            self._begun = True
            events += self._beginning()
        shown: list[bytes] = []
        if choice.thought:
            shown.append(encode_json("".join(choice.thought)).join(self._thought_delta))
        if choice.answer:
            text = encode_json("".join(choice.answer))
            shown.append(b'{"content":' + text + b"}" if call.is_chat else text)
        if choice.finish is not None and not shown:
            shown.append(b"{}" if call.is_chat else b'""')
        choice.thought.clear()
        choice.answer.clear()
        for number, each in enumerate(shown, start=1):
            events.append(self._event(each, ends=number == len(shown)))
        return b"".join(events)

    def _beginning(self) -> list[bytes]:
        """Before the first text: the role in a chat, the prompt where it is to be echoed."""
        call, choice = self._call, self._choice
        if call.is_chat:
            extra = b""
            if call.return_token_ids and choice.index == 0:
                extra = b',"prompt_token_ids":' + encode_json(choice.prompt.token_ids)
            return [self._event(b'{"role":"assistant","content":""}', outer=extra)]
        inner = b',"prompt_token_ids":' + encode_json(choice.prompt.token_ids) if call.return_token_ids else b""
        if not call.echo:
            return [self._event(b'""', inner=inner)] if inner else []
        scored = choice.scored_prompt(self._tokenizer) if call.num_logprobs >= 0 else []
        return [self._event(encode_json(choice.prompt.text), scored=scored, inner=inner)]

    def _event(self, shown: bytes, *, ends: bool = False, scored: Sequence[Scored] = (), inner: bytes = b"",
               outer: bytes = b"") -> bytes:
        """One event. The last of a chunk has the token ids and log-probabilities that have waited for text."""
        call, choice = self._call, self._choice
        logprobs = b"null"
        if ends:
            scored = choice.scored
            if call.return_token_ids:
                inner += b',"token_ids":' + encode_json(choice.token_ids)
                choice.token_ids.clear()
        if call.num_logprobs >= 0 and (scored or not call.is_chat):
            form = chat_logprobs if call.is_chat else completion_logprobs
            logprobs = encode_json(form(scored, self._tokenizer))
            if ends:
                choice.scored.clear()
        ending = b',"finish_reason":null'
        if ends and choice.finish is not None:
            ending = (
                b',"finish_reason":"'
                + choice.finish.encode()
                + b'","stop_reason":'
                + encode_json(choice.stop_reason)
                + b',"matched_stop":'
                + encode_json(choice.stop)
            )
        if call.continuous_usage:
            outer += b',"usage":' + encode_json(usage_of(call, self._choices))
        return self._open + shown + b',"logprobs":' + logprobs + ending + inner + b"}]" + outer + b"}\n\n"

    def usage(self) -> bytes:
        """The extra event with what everything cost, and no choices."""
        return self._head + b'],"usage":' + encode_json(usage_of(self._call, self._choices)) + b"}\n\n"
