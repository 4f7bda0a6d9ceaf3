"""Flags that users of other servers type and that are none here: what is so anyway, and what to use instead.

One table. A flag whose given value asks for what Tripool does anyway is passed over; every other one ends the command
with a sentence, which says what is not there and what takes its place. The flags that Tripool has are in `flags`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from tripool.core.deployment import MOST_DRAFTS
from tripool.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Habit:
    """Flags of other servers that come to one thing. `harmless` are values that change nothing here, in lower case."""

    names: tuple[str, ...]
    instead: str
    harmless: tuple[str, ...] = ()
    is_switch: bool = False       # stands alone, without a value


def _switch(names: str, instead: str) -> Habit:
    return Habit(tuple(names.split()), instead, is_switch=True)


def _always(names: str) -> Habit:
    """A switch for what is always so."""
    return Habit(tuple(names.split()), "", ("",), is_switch=True)


def _valued(names: str, instead: str, *harmless: str) -> Habit:
    return Habit(tuple(names.split()), instead, harmless)


DRAFTING = ("the one way to draft is the model's own MTP layer, token after token: leave it out; it is turned on with "
            "--num-speculative-tokens N")
DRAFTING_METHODS = ("mtp", "deepseek_mtp")
DRAFTING_EXAMPLE = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""
BALANCING = ("experts are moved layer by layer, each when a better placement pays for its copies: leave it out; what "
             "can be set is --redundant-experts N, --rebalance-steps N and --no-rebalance")
POOLS = ("pools are started with --prefill N --decode N --cache N, or member by member with "
         "--role ROLE --join ADDRESS (see `tripool serve --help`)")
MACHINES = ("machines are joined member by member: --accept-members on the first, --role ROLE --join ADDRESS on the "
            "others (see docs/deployment.md)")
TIERS = "the context pool is made of cache servers: --cache N --pool-bytes SIZE"
CACHE_SIZE = ("the cache is not sized as a share of the memory: use --max-total-tokens N or "
              "--kv-cache-memory-bytes SIZE, or leave it out and it is decided from the machine")

HABITS: tuple[Habit, ...] = (
    _valued("--gpu-memory-utilization --mem-fraction-static", CACHE_SIZE),
    _valued("--num-gpu-blocks-override", "use --max-total-tokens N: tokens of cache per rank"),
    _valued("--swap-space --cpu-offload-gb", "nothing is swapped out: what falls out of an instance's cache stays in "
            "the pool; use --cache N --pool-bytes SIZE", "0"),
    _valued("--kv-cache-dtype", "the cache has the numbers that the model is computed in, set by --dtype; FP8 and INT8 "
            "caches are not there yet", "auto"),
    _valued("--quantization -q", "number formats are read from the checkpoint (BF16, FP16, FP32, FP8, INT8 in "
            "compressed-tensors): leave it out; `tripool quantize` makes INT8",
            "fp8", "compressed-tensors", "w8a8_int8", "none"),
    _valued("--tensor-parallel-size --tp-size --tp -tp --pipeline-parallel-size --pp-size --pp -pp",
            "layers are not cut over ranks: attention is data-parallel and experts are split, both with --dp-size N; "
            "instances are added with --prefill N --decode N or --hybrid N", "1"),
    _valued("--expert-parallel-size --ep-size --ep", "experts are always split over the ranks of an instance: use "
            "--dp-size N", "1"),
    _always("--enable-expert-parallel --enable-ep-moe --enable-dp-attention"),
    _valued("--all2all-backend --moe-a2a-backend --deepep-mode", "ranks exchange over one implementation, chosen by "
            "itself: leave it out", "none"),
    _valued("--dbo-decode-token-threshold --dbo-prefill-token-threshold --tbo-token-distribution-threshold",
            "a step is cut in two as its rows allow: leave it out; --microbatches turns it on"),
    _valued("--eplb-algorithm --init-expert-location --ep-dispatch-algorithm", BALANCING, "auto", "trivial", "static"),
    _valued("--eplb-rebalance-layers-per-chunk", BALANCING, "1"),
    _valued("--eplb-min-rebalancing-utilization-threshold", BALANCING),
    _valued("--elastic-ep --elastic-ep-backend --elastic-ep-rejoin", "an instance goes on without a rank that ended, "
            "and takes it back once it is started again, by itself: leave it out; give it --redundant-experts N, so "
            "that every expert has a place meanwhile", "none"),
    _valued("--speculative-algorithm --speculative-num-draft-tokens", DRAFTING),
    _valued("--speculative-eagle-topk", DRAFTING, "1"),
    _valued("--tool-call-parser", "tool calls are not parsed yet: leave it out; tools reach the template and the "
            "answer stays text"),
    _switch("--enable-auto-tool-choice", "tool calls are not parsed yet: leave it out"),
    _valued("--reasoning-parser", "thoughts are parsed in the DeepSeek form, which is on by default: leave it out",
            "deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3"),
    _valued("--chat-template-content-format", "the template gets messages as text: leave it out", "auto", "string"),
    _valued("--guided-decoding-backend --grammar-backend --structured-outputs-config", "structured output is not "
            "there yet: leave it out"),
    _valued("--generation-config", "what a request leaves out is the checkpoint's generation_config.json; "
            "--sampling-defaults openai leaves that out", "auto"),
    _valued("--disaggregation-mode --kv-transfer-config", POOLS, "null"),
    _valued("--disaggregation-transfer-backend --disaggregation-bootstrap-port --disaggregation-ib-device "
            "--num-reserved-decode-tokens --policy", "decode instances pull from any prefill instance and the "
            "gateway chooses: leave it out; " + POOLS),
    _switch("--pd-disaggregation", POOLS),
    _switch("--headless", MACHINES),
    _valued("--nnodes --data-parallel-size-local", MACHINES, "1"),
    _valued("--node-rank --data-parallel-start-rank", MACHINES, "0"),
    _valued("--dist-init-addr --data-parallel-address --data-parallel-rpc-port", MACHINES),
    _switch("--enable-hierarchical-cache", TIERS),
    _valued("--hicache-size --hicache-ratio --hicache-write-policy --hicache-storage-backend "
            "--hicache-storage-prefetch-policy --kv-offloading-size", TIERS),
    _valued("--prefix-caching-hash-algo", "blocks are named by one strong hash: leave it out"),
    _valued("--model-checksum", "put checksums.json (file name to SHA-256) into the model folder; it is verified at "
            "every start"),
    _valued("--model-loader-extra-config --weight-loader-prefetch-checkpoints", "weights are read in parallel by "
            "themselves: leave it out"),
    _always("--enable-prompt-tokens-details --enable-cache-report --enable-metrics --enable-chunked-prefill "
            "--enforce-eager --disable-cuda-graph --disable-uvicorn-access-log --disable-log-requests "
            "--disable-log-stats --no-enable-log-requests"),
    _switch("--enable-force-include-usage", "a stream carries usage when its request says "
            "stream_options.include_usage"),
    _switch("--enable-log-requests --log-requests", "--log-level info logs a line for each request, without its text"),
    _valued("--log-requests-level --log-requests-format", "--log-level info logs a line for each request, without "
            "its text; --log-format json writes it as JSON"),
    _valued("--uvicorn-log-level", "use --log-level"),
    _switch("--enable-trace", "traces are not there yet: --record FOLDER keeps every decision, `tripool replay` shows "
            "a request's way"),
    _valued("--otlp-traces-endpoint", "traces are not there yet: --record FOLDER keeps every decision, `tripool "
            "replay` shows a request's way"),
    _valued("--soft-watchdog-timeout", "there is one watchdog: --watchdog-timeout SECONDS"),
    _switch("--trust-remote-code", "code from a checkpoint is never run: leave it out; nothing of the DeepSeek family "
            "needs it"),
    _valued("--ssl-keyfile --ssl-certfile --root-path --allowed-origins", "TLS, path prefixes and CORS are for a proxy "
            "in front"),
)

EPLB_FIELDS = {"num_redundant_experts": "--redundant-experts", "step_interval": "--rebalance-steps"}
"""Of vLLM's --eplb-config, the ones that are flags here."""

EPLB_ALWAYS = ("log_balancedness", "log_balancedness_interval", "use_async")
"""Those that are so anyway: figures are in /metrics, and experts move while steps run."""

_BY_NAME = {name: habit for habit in HABITS for name in habit.names}


def without_habits(words: Iterable[str]) -> list[str]:
    """A command line without the flags that ask for what is so anyway.

    Raises:
        ConfigError: a flag asks for something else; with what to use instead.
    """
    kept: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*kept, word, *left]
        name, given, value = word.partition("=")
        if name.partition(".")[0] == "--eplb-config":
            if not given and left:
                value = left.pop(0)
            kept += _eplb_words(name, value)
            continue
        if name.partition(".")[0] == "--speculative-config":
            if not given and left:
                value = left.pop(0)
            if name == "--speculative-config":
                kept += _drafting_words(value)
            else:
                raise ConfigError(f"{name}: write it as one object: {DRAFTING_EXAMPLE}")
            continue
        habit = _BY_NAME.get(name)
        if habit is None:
            kept.append(word)
            continue
        if not habit.is_switch and not given and left:
            value = left.pop(0)
        if value.lower() not in habit.harmless:
            raise ConfigError(f"{' '.join(filter(None, (name, value)))}: {habit.instead}")
    return kept


def _eplb_words(name: str, value: str) -> list[str]:
    """`--eplb-config '{"num_redundant_experts": 4}'`, or `--eplb-config.num_redundant_experts 4`, in our flags.

    Raises:
        ConfigError: it is not JSON, or asks for something that cannot be set.
    """
    _, dotted, field = name.partition(".")
    try:
        asked = {field: json.loads(value)} if dotted else json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{name} {value}: this is not JSON ({error}); write for example "
                          """--eplb-config '{"num_redundant_experts": 4, "step_interval": 1000}'""") from error
    if not isinstance(asked, dict):
        raise ConfigError(f"{name} {value}: this is no JSON object")
    words: list[str] = []
    for field, wanted in asked.items():
        if field in EPLB_FIELDS:
            words += [EPLB_FIELDS[field], str(wanted)]
        elif field == "window_size":
            raise ConfigError(f"{name}: window_size is not set here: loads are smoothed over about 1,000 steps; leave "
                              "it out")
        elif field not in EPLB_ALWAYS and (field, wanted) != ("policy", "default"):
            raise ConfigError(f"{name}: {field} is not known here; {BALANCING}")
    return words


def _drafting_words(value: str) -> list[str]:
    """`--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'` in our flag.

    Raises:
        ConfigError: it is not JSON, or asks for something that there is not.
    """
    name = "--speculative-config"
    try:
        asked = json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{name} {value}: this is not JSON ({error}); "
                          f"write for example {DRAFTING_EXAMPLE}") from error
    if not isinstance(asked, dict):
        raise ConfigError(f"{name} {value}: this is no JSON object; write for example {DRAFTING_EXAMPLE}")
    method, count = asked.pop("method", "mtp"), asked.pop("num_speculative_tokens", None)
    if method not in DRAFTING_METHODS:
        raise ConfigError(f"{name}: method is {method!r}; known is mtp, which drafts with the model's own MTP layer")
    if asked:
        raise ConfigError(f"{name}: {next(iter(asked))} is not known here; known are method and num_speculative_tokens")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_DRAFTS:
        raise ConfigError(f"{name}: num_speculative_tokens is {json.dumps(count)}; give how many tokens to draft in a "
                          f"step, 1 to {MOST_DRAFTS}, for example {DRAFTING_EXAMPLE}")
    return ["--num-speculative-tokens", str(count)]
