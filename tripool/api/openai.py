"""From the body of a request to what the machines compute. Everything a client can get wrong is found here.

A `Call` is a checked request: one `core.request.Request` for each choice, and how to show what comes back.
Ids, seeds and the tenant's salt are made here, never taken from the body. Nothing after this file looks at
the body again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import msgspec

from tripool.api.chat import Opening, Rendered
from tripool.api.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    PartType,
    Role,
    TokenizeRequest,
    ToolChoice,
)
from tripool.api.settings import ApiSettings
from tripool.core.errors import RequestError
from tripool.core.request import Limits, Request, RequestId, Sampling, pack_tokens

T = TypeVar("T")

MAX_REQUESTS_PER_CALL = 1024
LONG_TEXT = 20_000
"""Characters from which a text is encoded in a thread, so that other clients' tokens do not wait for it."""
GREEDY_BELOW = 1e-5
"""A temperature this small divides logits out of range; it means greedy."""
SEED_MASK = 2**63 - 1
KNOWN_VALUES = {"role": get_args(Role), "type": get_args(PartType), "tool_choice": get_args(ToolChoice)}

# Each changes what the answer may be, so ignoring it would be a wrong answer.
REFUSED = {
    "kv_transfer_params": "it is set between members only",
    "suffix": "this model completes at the end only",
    "chat_template": "the template is the server's",
    "functions": "use tools",
    "function_call": "use tool_choice",
} | dict.fromkeys(
    (
        "structured_outputs",
        "guided_json",
        "guided_choice",
        "guided_regex",
        "guided_grammar",
        "regex",
        "ebnf",
        "stop_regex",
        "bad_words",
        "allowed_token_ids",
        "truncate_prompt_tokens",
        "prompt_logprobs",
        "thinking_token_budget",
        "use_beam_search",
        "audio",
        "modalities",
    ),
    "it is not supported",
)
# Known, without effect, and not worth a line in the log. The bootstrap trio belongs between members.
SILENT = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "request_id",
        "rid",
        "session_id",
        "extra_key",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "stream_reasoning",
        "no_stop_trim",
        "add_special_tokens",
        "verbosity",
    }
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one sequence begins with."""

    token_ids: list[int]
    text: str = ""                    # for echo


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request. Choice `i` belongs to prompt `i // n`."""

    is_chat: bool
    prompts: tuple[Prompt, ...]
    requests: tuple[Request, ...]     # one for each choice; none if nothing has to be computed
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    stop_token_ids: frozenset[int]    # the client's own
    num_logprobs: int                 # -1: none
    echo: bool
    drop_output: bool                 # echo with max_tokens 0: one token is computed and not shown
    opening: Opening | None           # None: all text is answer
    show_reasoning: bool
    return_token_ids: bool
    ignored: tuple[str, ...]          # fields of the body that had no effect

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


class Translator:
    """Reads bodies by the server's settings."""

    def __init__(self, settings: ApiSettings, new_request_id: Callable[[], RequestId]) -> None:
        self._settings = settings
        self._new_request_id = new_request_id
        # Seeds for requests without one: any will do, so long as they differ; drawn alike where the server has a seed.
        self._random = random.SystemRandom() if settings.seed is None else random.Random(settings.seed)

    async def chat(self, body: bytes, salt: bytes) -> Call:
        """A chat completion.

        Raises:
            RequestError: something in the body is wrong.
        """
        fields = decode_object(body)
        _refuse_unsupported(fields)
        _refuse_later(fields)
        asked = convert(fields, ChatRequest)
        self.check_model(asked.model)
        rendered = self._render(asked, fields)
        prompt = Prompt(await self._encode(rendered.text, add_special_tokens=False, param="messages"))
        top = asked.top_logprobs or 0
        if top and not asked.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        limit_name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
        limit: int | None = getattr(asked, limit_name)
        if limit == 0:
            raise RequestError(f"{limit_name} is 0; give at least 1", param=limit_name)
        return self._call(
            asked, (prompt,), salt, limit=limit, param="messages", num_logprobs=top if asked.logprobs else -1,
            opening=None if asked.separate_reasoning is False else rendered.opening,
            show_reasoning=asked.include_reasoning is not False, ignored=_ignored(fields, ChatRequest))

    async def completion(self, body: bytes, salt: bytes) -> Call:
        """A text completion.

        Raises:
            RequestError: something in the body is wrong.
        """
        fields = decode_object(body)
        _refuse_unsupported(fields)
        asked = convert(fields, CompletionRequest)
        self.check_model(asked.model)
        if asked.best_of is not None and asked.best_of != (asked.n or 1):
            raise RequestError(
                f"best_of is {asked.best_of}; only the value of n, {asked.n or 1}, is served", param="best_of"
            )
        echo = bool(asked.echo)
        if asked.max_tokens == 0 and not echo:
            raise RequestError("max_tokens is 0; give at least 1, or use echo", param="max_tokens")
        prompts = tuple(
            [await self._prompt(each, echo, asked.skip_special_tokens is not False) for each in _prompts(asked.prompt)]
        )
        return self._call(
            asked,
            prompts,
            salt,
            limit=asked.max_tokens,
            param="prompt",
            num_logprobs=-1 if asked.logprobs is None else asked.logprobs,
            echo=echo,
            ignored=_ignored(fields, CompletionRequest),
        )

    async def tokenize(self, body: bytes) -> tuple[list[int], bool]:
        """Token ids of a prompt or of messages, and whether their spelling is asked for."""
        fields = decode_object(body)
        asked = convert(fields, TokenizeRequest)
        self.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        special = asked.add_special_tokens
        if asked.prompt is not None:
            text, special = asked.prompt, special is not False
        else:
            text, special = self._render(asked, fields).text, special is True
        return await self._ids(text, special), bool(asked.return_token_strs)

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse ids that the model does not have."""
        beyond = next((each for each in token_ids if not 0 <= each < self._settings.vocab_size), None)
        if beyond is not None:
            raise RequestError(
                f"token id {beyond} is outside the vocabulary of {self._settings.vocab_size}", param=param
            )

    # ------------------------------------------------------------ parts

    def check_model(self, model: str | None) -> None:
        """Refuse a name that is not the served one; none at all is fine."""
        if model is not None and model != self._settings.model_name:
            raise RequestError(
                f"the model {model[:200]!r} does not exist; this server has {self._settings.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _render(self, asked: ChatRequest | TokenizeRequest, fields: Mapping[str, Any]) -> Rendered:
        """Messages to text. The template is given the body's own objects, which may hold more than the page names."""
        if self._settings.template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or start the server with --chat-template",
                param="messages",
                code="no_chat_template",
            )
        _check_messages(fields["messages"])
        arguments = dict(asked.chat_template_kwargs or {})
        effort = asked.reasoning_effort if isinstance(asked, ChatRequest) else None
        if effort is not None:
            arguments.setdefault("reasoning_effort", effort)
            if "thinking" not in arguments and "enable_thinking" not in arguments:
                arguments["thinking"] = effort != "none"
        continues = bool(asked.continue_final_message)
        if continues and asked.add_generation_prompt:
            raise RequestError("continue_final_message and add_generation_prompt exclude each other",
                               param="continue_final_message")
        return self._settings.template.render(
            fields["messages"],
            tools=None if fields.get("tool_choice") == "none" else fields.get("tools"),
            add_generation_prompt=asked.add_generation_prompt is not False,
            continue_final_message=continues,
            arguments=arguments,
        )

    async def _prompt(self, prompt: str | list[int], echo: bool, skip: bool) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(await self._encode(prompt, add_special_tokens=True, param="prompt"), prompt)
        self.check_ids(prompt, "prompt")
        self._check_length(len(prompt), "prompt")
        return Prompt(prompt, self._settings.tokenizer.decode(prompt, skip_special_tokens=skip) if echo else "")

    async def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        least = self._settings.tokenizer.least_tokens(text)
        if least >= self._settings.max_model_len:
            self._check_length(least, param, "at least ")
        ids = await self._ids(text, add_special_tokens)
        self._check_length(len(ids), param)
        return ids

    async def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        encode = self._settings.tokenizer.encode
        if len(text) < LONG_TEXT:
            return encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)

    def _check_length(self, num_tokens: int, param: str, qualifier: str = "") -> None:
        if num_tokens == 0:
            raise RequestError("the prompt is empty", param=param)
        if num_tokens >= self._settings.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {self._settings.max_model_len} tokens, but the prompt has "
                f"{qualifier}{num_tokens} tokens; it may have {self._settings.max_model_len - 1} at most, "
                f"to leave room for an answer.",
                param=param,
                code="context_length_exceeded",
            )

    def _call(
        self,
        asked: GenerationRequest,
        prompts: tuple[Prompt, ...],
        salt: bytes,
        *,
        limit: int | None,
        param: str,
        num_logprobs: int,
        ignored: tuple[str, ...],
        echo: bool = False,
        opening: Opening | None = None,
        show_reasoning: bool = True,
    ) -> Call:
        if asked.stream_options is not None and not asked.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        n = asked.n or 1
        if len(prompts) * n > MAX_REQUESTS_PER_CALL:
            raise RequestError(
                f"{len(prompts)} prompts with n = {n} are more than {MAX_REQUESTS_PER_CALL} choices", param=param
            )
        options = asked.stream_options or msgspec.UNSET
        drop_output = limit == 0
        stops = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
        sampling = self._sampling(asked, num_logprobs, num_logprobs if echo else -1)
        requests: tuple[Request, ...] = ()
        if not drop_output or num_logprobs >= 0:
            requests = tuple(self._requests(asked, prompts, n, limit, sampling, _tenant_salt(salt, asked.cache_salt)))
        return Call(
            is_chat=isinstance(asked, ChatRequest), prompts=prompts, requests=requests, n=n, stream=bool(asked.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            stops=tuple(dict.fromkeys(stops)), include_stop=bool(asked.include_stop_str_in_output),
            skip_special_tokens=asked.skip_special_tokens is not False,
            stop_token_ids=frozenset(asked.stop_token_ids or ()), num_logprobs=num_logprobs, echo=echo,
            drop_output=drop_output, opening=opening, show_reasoning=show_reasoning,
            return_token_ids=bool(asked.return_token_ids), ignored=ignored)

    def _requests(
        self,
        asked: GenerationRequest,
        prompts: Sequence[Prompt],
        n: int,
        limit: int | None,
        sampling: Sampling,
        salt: bytes,
    ) -> Iterator[Request]:
        """One request for each choice. The seeds are the same for each prompt: a list answers as its parts would."""
        own_stops = asked.stop_token_ids or []
        self.check_ids(own_stops, "stop_token_ids")
        eos = () if asked.ignore_eos else self._settings.eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*eos, *own_stops)))
        min_tokens = asked.min_tokens or 0
        if limit and min_tokens > limit:
            raise RequestError(f"min_tokens is {min_tokens}, more than max_tokens, {limit}", param="min_tokens")
        for prompt in prompts:
            room = self._settings.max_model_len - len(prompt.token_ids)
            max_tokens = room if limit is None else min(max(limit, 1), room)
            limits = Limits(
                max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop_token_ids=stop_token_ids
            )
            packed = pack_tokens(prompt.token_ids)
            base = self._random.getrandbits(63) if asked.seed is None else asked.seed
            for index in range(n):
                yield Request(
                    request_id=self._new_request_id(),
                    prompt=packed,
                    limits=limits,
                    salt=salt,
                    priority=asked.priority or 0,
                    sampling=replace(sampling, seed=choice_seed(base, index)),
                )

    def _sampling(self, asked: GenerationRequest, num_logprobs: int, num_prompt_logprobs: int) -> Sampling:
        otherwise = self._settings.default_sampling
        temperature = _or(asked.temperature, otherwise.temperature)
        return Sampling(
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_p=_or(asked.top_p, otherwise.top_p),
            top_k=max(_or(asked.top_k, otherwise.top_k), 0),
            min_p=_or(asked.min_p, otherwise.min_p),
            repetition_penalty=_or(asked.repetition_penalty, otherwise.repetition_penalty),
            presence_penalty=_or(asked.presence_penalty, otherwise.presence_penalty),
            frequency_penalty=_or(asked.frequency_penalty, otherwise.frequency_penalty),
            logit_bias=self._logit_bias(asked.logit_bias or {}),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            drafts=asked.draft is not False,
        )

    def _logit_bias(self, given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
        bias: dict[int, float] = {}
        for key, value in given.items():
            if not (key.isascii() and key.isdecimal() and len(key) < 12):
                raise RequestError(f"logit_bias has the key {key[:100]!r}; keys are token ids", param="logit_bias")
            bias[int(key)] = value
        self.check_ids(list(bias), "logit_bias")
        return tuple(sorted(bias.items()))


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def choice_seed(seed: int, index: int) -> int:
    """The seed of a choice. The first has the client's own, as n = 1 does; the others are far apart."""
    if index == 0:
        return seed & SEED_MASK
    digest = hashlib.blake2b((seed & (2**64 - 1)).to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8,
                             person=b"tripool-choice").digest()
    return int.from_bytes(digest, "little") & SEED_MASK


def _tenant_salt(credential_salt: bytes, client_salt: str | None) -> bytes:
    """Whose cached context a request may meet. A client can narrow its own, and never reach another tenant's."""
    if not client_salt:
        return credential_salt
    digest = hashlib.blake2b(digest_size=16, person=b"tripool-salt2")
    digest.update(len(credential_salt).to_bytes(8, "little"))
    digest.update(credential_salt)
    digest.update(client_salt.encode())
    return digest.digest()


# ---------------------------------------------------------------- reading bodies


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RequestError: not JSON, or not an object. Where JSON is broken by a value (NaN), the field is named.
    """
    if not body.strip():
        raise RequestError("the body is empty; send a JSON object", param="body", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        param = _odd_number(body)
        if param is not None:
            raise RequestError(f"{param} is not a number that JSON has", param=param) from error
        raise RequestError(f"the body is not valid JSON: {error}", param="body", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError(
            f"the body must be a JSON object, not {type(value).__name__}", param="body", code="invalid_json"
        )
    return value


def convert(fields: Mapping[str, Any], kind: type[T]) -> T:
    """Check types and ranges.

    Raises:
        RequestError: naming the field.
    """
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        message = str(error)
        path = re.search(r" - at (?:key in )?`\$\.?([^`]*)`", message)
        missing = re.search(r"missing required field `([^`]+)`", message)
        where = path.group(1).replace("[...]", "") if path else ""
        param = ".".join(each for each in (where, missing.group(1) if missing else "") if each) or "body"
        said = f"{param} is missing" if missing else _complaint(fields, param, message.split(" - at ")[0])
        raise RequestError(said, param=param) from error


def _complaint(fields: Mapping[str, Any], param: str, message: str) -> str:
    """What is wrong with a value, with the value where it is short enough to show."""
    value: Any = fields
    for name, at in re.findall(r"([^.\[\]]+)|\[(\d+)\]", param):
        if at:
            value = value[int(at)] if isinstance(value, list) else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    short = value[:40] if isinstance(value, str) else value
    shown = f"{param} is {json.dumps(short)}"[:200] if isinstance(value, str | int | float) else param
    known = KNOWN_VALUES.get(re.split(r"[.\]]", param)[-1])
    if "enum" in message and known:
        return f"{shown}; known are {', '.join(known)}"
    return f"{shown}: {message.partition(', got ')[0].replace('Expected', 'expected', 1)}"


def _odd_number(body: bytes) -> str | None:
    """The field that holds NaN or an infinite number, in a body that is JSON otherwise."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        path, each = pending.pop()
        if isinstance(each, float) and not math.isfinite(each):
            return path or "body"
        if isinstance(each, dict):
            pending += [(f"{path}.{key}" if path else key, inner) for key, inner in each.items()]
        elif isinstance(each, list):
            pending += [(f"{path}[{at}]", inner) for at, inner in enumerate(each)]
    return None


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name, reason in REFUSED.items():
        if name in fields and fields[name] not in (None, False, "", [], {}):
            raise RequestError(f"{name} is not accepted: {reason}", param=name, code="unsupported")


def _refuse_later(fields: Mapping[str, Any]) -> None:
    """What the server does not do yet: said in words, where the type check would only name a wrong value."""
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) or choice == "required":
        raise RequestError(
            "tool_choice must be 'auto' or 'none': forced calls are not supported yet",
            param="tool_choice",
            code="unsupported",
        )
    form = fields.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        raise RequestError("response_format must be of type 'text': structured output is not supported yet",
                           param="response_format", code="unsupported")


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    for at, message in enumerate(messages):
        if message.get("content") is None and not (message["role"] == "assistant" and
                                                   (message.get("tool_calls") or message.get("reasoning_content")
                                                    or message.get("reasoning"))):
            raise RequestError(f"messages[{at}] has no content", param=f"messages[{at}].content")


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The four forms of a prompt as a list of texts and lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    if all(isinstance(each, int) for each in prompt):
        return [prompt]
    if any(isinstance(each, int) for each in prompt):
        raise RequestError("prompt mixes token ids with texts or lists", param="prompt")
    if len(prompt) > MAX_REQUESTS_PER_CALL:
        raise RequestError(f"prompt is a list of {len(prompt)}, more than {MAX_REQUESTS_PER_CALL}", param="prompt")
    return prompt


def _ignored(fields: Mapping[str, Any], kind: type[msgspec.Struct]) -> tuple[str, ...]:
    if fields.keys() <= _KNOWN[kind]:
        return ()
    return tuple(name[:64] for name in fields if name not in _KNOWN[kind])[:32]


_KNOWN: dict[type[msgspec.Struct], frozenset[str]] = {
    kind: frozenset(kind.__struct_fields__) | SILENT | frozenset(REFUSED) for kind in (ChatRequest, CompletionRequest)
}
