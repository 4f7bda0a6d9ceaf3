"""The shapes of bodies: what is read and what is written, once, for the parser, the encoder and the OpenAPI page.

msgspec checks types and ranges while it converts, so a request costs no second validation. Fields that the
page does not name are ignored by the server; what changes a result and is not supported is refused in
`api.openai`. Responses leave out a field that is UNSET and show one that is None.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOPS = 64
INT32_MAX = 2**31 - 1

NotNegative = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Role = Literal["system", "developer", "user", "assistant", "tool"]
PartType = Literal["text"]
ToolChoice = Literal["none", "auto"]


def _told(text: str) -> Meta:
    """What the OpenAPI page says of a field."""
    return Meta(description=text)


ChatTemplateArguments = Annotated[
    dict[str, Any], _told("`thinking` or `enable_thinking`, and whatever else the template reads.")
]
Limit = Annotated[
    NotNegative,
    _told(
        "At most so many tokens. Absent: what is left of the window. A larger value is clamped to what is left; "
        "the prompt is never shortened. 0 only with `echo`."
    ),
]

# ---------------------------------------------------------------- requests


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, kw_only=True):
    """What text and chat completions have in common. A field that is null counts as absent.

    Sampling fields that are absent take the checkpoint's generation settings.
    """

    model: str | None = None
    max_tokens: Limit | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX), _told("0 and -1 keep every token.")] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], _told("By token id.")] | None = None
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    min_tokens: NotNegative | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[Int32, _told("Smaller runs earlier.")] | None = None
    draft: Annotated[bool, _told("False: no drafts for this request; its tokens are the same.")] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    return_token_ids: bool | None = None
    user: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class TextPart(Struct):
    type: PartType
    text: str


class ChatMessage(Struct):
    """A message of a conversation. The thought of an earlier turn is accepted under either name."""

    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionSpec(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolSpec(Struct):
    function: FunctionSpec
    type: str | None = None


class ResponseFormat(Struct):
    type: str


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[Limit, _told("As `max_tokens`, and before it where both are given.")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS), _told("Needs `logprobs`.")] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[ResponseFormat, _told("Only of type `text` so far.")] | None = None
    reasoning_effort: Annotated[str, _told("`none` switches thinking off, anything else on.")] | None = None
    chat_template_kwargs: ChatTemplateArguments | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | TokenId | list[TokenId]]   # text, texts, token ids, lists of token ids
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES), _told("Only the value of `n`.")] | None = None
    suffix: Annotated[str, _told("Refused: the model completes at the end only.")] | None = None


class TokenizeRequest(Struct):
    """POST /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[ToolSpec] | None = None
    add_special_tokens: bool | None = None       # absent: for a prompt yes, for messages no, as their template has them
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: ChatTemplateArguments | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct):
    """POST /detokenize"""

    tokens: list[TokenId]
    model: str | None = None


class AbortRequest(Struct):
    """POST /abort_request, /abort_requests: response ids or X-Request-Id values, or everything."""

    rid: str | None = None
    request_ids: list[str] | None = None
    abort_all: bool | None = None


# ---------------------------------------------------------------- responses


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


FinishReason = Literal["stop", "length", "abort"]


class AssistantMessage(Struct):
    role: Literal["assistant"]
    content: str
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None      # the client's stop string or token that ended it
    matched_stop: str | int | None     # the same, and the end-of-sequence token too
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    matched_stop: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str | None


class ErrorBody(Struct):
    error: ErrorDetail


# Chunks are written piece by piece in `api.stream`; these say what the pieces add up to.


class ChatDelta(Struct, forbid_unknown_fields=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChunkChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a piece of a choice has in both kinds of stream."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    matched_stop: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(ChunkChoice, kw_only=True):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class CompletionChunkChoice(ChunkChoice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET


class Chunk(Struct, forbid_unknown_fields=True, kw_only=True):
    """What every chunk of a stream has."""

    id: str
    created: int
    model: str
    usage: Usage | UnsetType = UNSET


class ChatCompletionChunk(Chunk, kw_only=True):
    """One `data:` line of a streamed chat; the last one is `data: [DONE]`, after an ErrorBody if something failed."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Chunk, kw_only=True):
    """One `data:` line of a streamed completion; it ends as a streamed chat does."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class ModelCard(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(Struct):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct):
    prompt: str


class HealthResponse(Struct):
    status: Literal["ready", "loading", "draining", "not ready"]
    cause: str
    load_fraction: float


class LiveResponse(Struct):
    status: Literal["live"]


class VersionResponse(Struct):
    version: str


class LoadResponse(Struct):
    server_load: int               # requests that the HTTP side holds open
    num_running: int
    num_waiting: int


class MemberInfo(Struct):
    member: str
    role: str
    state: str
    boot_id: str
    num_running: int
    num_waiting_tokens: int
    num_free_blocks: int
    num_blocks: int
    cause: str


class ServerInfo(Struct):
    version: str
    model: str
    max_model_len: int
    status: HealthResponse
    settings: dict[str, Any]       # in force: the server's, and the backend's roles and placement
    members: list[MemberInfo]


class ModelInfo(Struct):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    max_model_len: int
    fingerprint: str | None
    preferred_sampling_params: dict[str, Any]


class FlushResponse(Struct):
    success: bool
    num_blocks: int


class AbortResponse(Struct):
    aborted: list[str]


class LayerExperts(Struct):
    """One MoE layer. Loads are tokens per step, smoothed over many steps."""

    loads: list[float]             # of each expert
    slots: list[int]               # the expert in each slot, rank by rank; -1 for an empty slot
    rank_loads: list[float]        # of each rank, with the present map
    first_rank_loads: list[float]  # what it would be with the map that the instance started with
    max_over_mean: float | None    # of the living ranks' loads; null until it had any
    max_over_mean_before: float | None     # when the layer was last looked at, before any move that followed


class ExchangeCounts(Struct):
    """What one rank counted of its exchange with the others, since its start."""

    wait_seconds: float
    sent_bytes: int
    sleeps: int
    wakes: int


class MemberExperts(Struct):
    """The experts of one instance."""

    member: str
    map_version: int
    runnable: bool                 # false while some expert is in no slot
    num_steps: int                 # counted in the loads, ever
    num_experts: int               # of a layer; a shared expert that the map places is the last
    num_routed: int
    slots_per_rank: list[int]
    layers: list[LayerExperts]
    lost_ranks: list[int]
    layers_planned: int            # looked at by the rebalancer
    layers_changed: int
    layers_gated: int              # whose better placement was not worth its moves
    layers_blocked: int            # that could not be changed, because no slot can be spared
    num_moves: int                 # experts copied
    moved_bytes: int
    num_failures: int
    cause: str                     # of the last failure or refusal
    exchange: list[ExchangeCounts | None]      # of each rank; null where nothing crosses ranks


class ExpertsResponse(Struct):
    members: list[MemberExperts]
    without: dict[str, str]        # instances that have told nothing of experts, and why


class RebalanceRequest(Struct):
    member: str | None = None      # without it, all instances that have experts


class RebalanceResponse(Struct):
    members: list[str]             # that were told to
