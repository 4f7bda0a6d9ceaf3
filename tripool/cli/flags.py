"""Which flag sets which field of a deployment: one table, from which the options, their help and their values are made.

Names follow what users of other servers type; further spellings are aliases. What is not given leaves the file's value
or the default. The order of precedence is: command line, `TRIPOOL_` variable (`--max-num-seqs` is
`TRIPOOL_MAX_NUM_SEQS`), file, default.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tripool.core.deployment import MOST_DRAFTS, Deployment, build, read_table
from tripool.core.errors import ConfigError
from tripool.core.messages import ROLES

MODEL, SERVER, POOLS = "Model", "Server", "Pools"
BATCH, CACHE, LIMITS = "Batch and memory", "Context cache", "Deadlines"
DEFAULT_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(help="The server.", envvar="TRIPOOL_URL", show_envvar=False)]
ApiKey = Annotated[str, typer.Option(help="The server's key.", envvar="TRIPOOL_API_KEY", show_envvar=False)]
CORES_FOR_POOLS = 4        # with fewer, three processes take turns on the cores and one hybrid instance is faster


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. `fields` are dotted paths in the deployment; the value lands in each of them."""

    names: tuple[str, ...]           # the first is ours
    kind: Any
    fields: tuple[str, ...]
    help: str
    panel: str
    metavar: str | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.names[0].split("/")[0]

    @property
    def parameter(self) -> str:
        """The name of the function parameter that carries the value."""
        return self.name.lstrip("-").replace("-", "_")


def parse_bytes(text: str) -> int:
    """A size: a plain number of bytes, or with a unit (`512MiB`, `4GB`, `1.5 GiB`).

    Raises:
        ConfigError: it is neither.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", str(text).strip().lower())
    if found is None:
        raise ConfigError(f"{text!r} is not a size; write a number of bytes, or for example 512MiB or 4GiB")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" kmgt".index(unit) if unit else 0))


def show_bytes(size: float) -> str:
    """A size for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class Size(int):
    """Bytes, as typed on a command line."""


def _all_roles(field: str) -> tuple[str, ...]:
    return tuple(f"{role}.{field}" for role in ROLES)


FLAGS: tuple[Flag, ...] = (
    Flag(("--model", "--model-path"), str, ("model.path",),
         "A folder with a checkpoint of the DeepSeek family, or a hub id. Without it, the embedded model.", MODEL),
    Flag(("--revision",), str, ("model.revision",), "Commit or tag of a hub id.", MODEL),
    Flag(("--served-model-name",), str, ("model.served_name",), "The name clients ask for.", MODEL),
    Flag(("--tokenizer", "--tokenizer-path"), str, ("model.tokenizer",), "A folder with another tokenizer.", MODEL),
    Flag(("--chat-template",), str, ("model.chat_template",), "A file with another chat template.", MODEL),
    Flag(("--dtype",), str, ("model.dtype",), "auto, float32, bfloat16 or float16.", MODEL),
    Flag(("--head-dtype",), str, ("model.head_dtype",), "auto: the output head as stored. int8: rounded to eight bits, "
         "which a CPU reads in half the time.", MODEL),
    Flag(("--device",), str, ("model.device",), "cpu, or cuda, cuda:1, ...", MODEL),
    Flag(("--max-model-len", "--context-length"), int, ("model.max_model_len",),
         "Longest prompt plus answer, in tokens.", MODEL),
    Flag(("--load-format",), str, ("model.load_format",), "auto, or dummy: random weights, to measure with.", MODEL),
    Flag(("--weights-cache",), str, ("model.weights_cache",),
         "Folder in which packed weights are kept, so that the next start maps them, once for all ranks; none keeps "
         "none. Without it, tripool/weights in XDG_CACHE_HOME or ~/.cache. It may be removed at any time.", MODEL,
         "FOLDER"),
    Flag(("--enable-deterministic-inference/--no-deterministic-inference", "--deterministic"), bool,
         ("model.deterministic",),
         "Tokens do not depend on the batch, on cache hits or on placement. Computes in float32; slower.", MODEL),

    Flag(("--host",), str, ("gateway.host",), "Address to listen on. The default answers this machine alone.", SERVER),
    Flag(("--port",), int, ("gateway.port",), "Port to listen on; 0 takes a free one.", SERVER),
    Flag(("--api-key",), list[str], ("gateway.api_keys",),
         "A key that clients must send; may be repeated. Without one, the server is open.", SERVER),
    Flag(("--admin-api-key",), list[str], ("gateway.admin_keys",), "A key for the admin paths.", SERVER),
    Flag(("--reasoning-fields",), str, ("gateway.reasoning_fields",),
         "Where thoughts go in answers: both, reasoning or reasoning_content.", SERVER),
    Flag(("--sampling-defaults",), str, ("gateway.sampling_defaults",),
         "What requests leave out: model takes the checkpoint's generation settings, openai temperature 1.", SERVER),
    Flag(("--seed", "--random-seed"), int, ("gateway.seed",),
         "Seed of requests that bring none: the same requests in the same order are answered alike.", SERVER),
    Flag(("--max-num-queued-reqs", "--max-queued-requests"), int, ("gateway.max_queued_requests",),
         "Requests that may wait; more are answered 429.", SERVER),
    Flag(("--max-num-queued-tokens",), int, ("gateway.max_queued_tokens",),
         "Prompt tokens that may wait; more are answered 429.", SERVER),
    Flag(("--max-body-bytes",), Size, ("gateway.max_body_bytes",), "Largest request body.", SERVER, "SIZE"),
    Flag(("--max-attempts", "--migration-limit"), int, ("gateway.max_attempts",),
         "How often a request is tried when instances fail under it.", SERVER),

    Flag(("--prefill",), int, ("prefill.count",), "Prefill instances.", POOLS, "N"),
    Flag(("--decode",), int, ("decode.count",), "Decode instances.", POOLS, "N"),
    Flag(("--cache",), int, ("cache.count",), "Cache servers.", POOLS, "N"),
    Flag(("--hybrid",), int, ("hybrid.count",), "Instances that do both prefill and decode.", POOLS, "N"),
    Flag(("--dp-size", "--data-parallel-size", "--ranks"), int, _all_roles("ranks"),
         "Ranks of each instance: attention data-parallel, experts split over them.", POOLS, "N"),
    Flag(("--exchange",), str, _all_roles("exchange"),
         "How ranks exchange expert work: direct (shared memory), collective (torch.distributed) or local (one rank).",
         POOLS),
    Flag(("--exchange-rows",), str, _all_roles("exchange_rows"),
         "What experts get: model (rows as they are) or int8 (quantised once, with a scale).", POOLS),
    Flag(("--exchange-tokens",), int, _all_roles("exchange_tokens"),
         "Room of a direct exchange, in tokens of a rank; larger batches go in rounds. Without it, decided.", POOLS,
         "N"),
    Flag(("--shared-expert-copies",), int, _all_roles("shared_expert_copies"),
         "Slots for the shared expert on ranks of its own; without it each rank computes it.", POOLS, "N"),
    Flag(("--expert-nodes",), int, _all_roles("expert_nodes"),
         "Divide the ranks into nodes (sockets) and keep the experts of a routing group on one.", POOLS, "N"),
    Flag(("--redundant-experts", "--ep-num-redundant-experts"), int, _all_roles("redundant_experts"),
         "Expert slots beyond one per expert, for copies of busy ones.", POOLS, "N"),
    Flag(("--rebalance/--no-rebalance", "--enable-eplb/--disable-eplb"), bool, _all_roles("rebalance"),
         "Move experts between ranks while requests run, so that all have as much to do; needs --redundant-experts.",
         POOLS),
    Flag(("--rebalance-steps", "--eplb-step-interval", "--eplb-rebalance-num-iterations"), int,
         _all_roles("rebalance_steps"), "Steps from one look at the balance of all layers to the next.", POOLS, "N"),
    Flag(("--microbatches/--no-microbatches", "--enable-dbo", "--enable-two-batch-overlap"), bool,
         _all_roles("microbatches"), "Compute one half of a step's rows while the other travels between ranks.", POOLS),
    Flag(("--num-speculative-tokens", "--speculative-num-steps"), int,
         _all_roles("num_speculative_tokens"),
         f"Tokens that the MTP layer drafts for a request in each step, at most {MOST_DRAFTS}; 0, the default, drafts "
         "none.", BATCH, "N"),
    Flag(("--adaptive-roles/--fixed-roles",), bool, ("scaling.enabled",),
         "Let instances change between prefill and decode where the load has long been uneven.", POOLS),
    Flag(("--short-load",), float, ("scaling.short_load",),
         "Load from which a role is short of instances; 1 is all that it takes at once.", POOLS),
    Flag(("--spare-load",), float, ("scaling.spare_load",),
         "Most load that a role may come to have when it gives an instance away.", POOLS),
    Flag(("--role-hold",), float, ("scaling.hold_s",), "How long both must have been so.", POOLS, "SECONDS"),
    Flag(("--role-cool-down",), float, ("scaling.cool_down_s",),
         "No role changes so long after a change, or after an instance came or went.", POOLS, "SECONDS"),
    Flag(("--min-prefill",), int, ("scaling.min_prefill",), "Instances that are left to prefill.", POOLS, "N"),
    Flag(("--min-decode",), int, ("scaling.min_decode",), "Instances that are left to decode.", POOLS, "N"),
    Flag(("--accept-members",), str, ("gateway.join",),
         "tcp://HOST:PORT on which members from other machines may join; needs --cluster-key-file.", POOLS, "ADDRESS"),

    Flag(("--max-num-seqs", "--max-running-requests"), int, _all_roles("max_num_seqs"),
         "Requests that run at once, per rank.", BATCH),
    Flag(("--max-num-batched-tokens", "--chunked-prefill-size", "--max-prefill-tokens"), int,
         _all_roles("max_num_batched_tokens"), "Tokens of one step, per rank: long prompts are cut up.", BATCH),
    Flag(("--kv-cache-memory-bytes",), Size, _all_roles("cache_bytes"),
         "Context memory per rank. Without it, decided from the machine.", BATCH, "SIZE"),
    Flag(("--max-total-tokens",), int, _all_roles("cache_tokens"), "The same in tokens.", BATCH, "N"),
    Flag(("--block-size", "--page-size"), int, ("block_tokens",), "Tokens in one block of the cache.", BATCH),
    Flag(("--threads",), int, _all_roles("threads"), "Threads per rank. Without it, the cores are divided.", BATCH),

    Flag(("--enable-prefix-caching/--no-enable-prefix-caching", " /--disable-radix-cache"), bool,
         _all_roles("enable_prefix_caching"), "Compute a prompt's known beginning only once.", CACHE),
    Flag(("--store-generated/--no-store-generated",), bool, _all_roles("store_generated"),
         "Keep answers in the cache too, not only prompts.", CACHE),
    Flag(("--pool-bytes",), Size, ("cache.bytes",), "Shared memory of each cache server.", CACHE, "SIZE"),
    Flag(("--verify-checksums/--no-verify-checksums", "--disaggregation-enable-kv-checksum"), bool,
         ("verify_checksums",), "Check every block copied between processes by its checksum too.", CACHE),

    Flag(("--shutdown-timeout",), float, ("shutdown_s",), "Time for streams to end when stopped.", LIMITS, "SECONDS"),
    Flag(("--watchdog-timeout",), float, ("stall_s",),
         "A member without a heartbeat, or without progress while busy, is not used after this.", LIMITS, "SECONDS"),
    Flag(("--heartbeat-interval",), float, ("heartbeat_s",), "Time between heartbeats.", LIMITS, "SECONDS"),
    Flag(("--prefill-deadline",), float, ("gateway.prefill_deadline_s",),
         "From placing a request to its first token.", LIMITS, "SECONDS"),
    Flag(("--decode-deadline",), float, ("gateway.decode_deadline_s",), "Between two tokens.", LIMITS, "SECONDS"),
    Flag(("--place-deadline",), float, ("gateway.place_deadline_s",),
         "Waiting for a member when none is up.", LIMITS, "SECONDS"),
    Flag(("--run-deadline",), float, ("run_deadline_s",), "One step of the engine.", LIMITS, "SECONDS"),
    Flag(("--pull-deadline",), float, ("pull_deadline_s",), "Copying blocks to a decode instance.", LIMITS, "SECONDS"),
    Flag(("--fetch-deadline",), float, ("cache.fetch_deadline_s",), "Reading blocks from the pool.", LIMITS, "SECONDS"),
    Flag(("--store-deadline",), float, ("cache.store_deadline_s",), "Writing blocks to the pool.", LIMITS, "SECONDS"),
    Flag(("--load-deadline",), float, ("load_deadline_s",), "Loading the weights.", LIMITS, "SECONDS"),
)

def read_deployment(config: Path | None, given: Mapping[str, Any], num_cores: int) -> Deployment:
    """Build a deployment from a file and from flags. `given` maps parameter names to values; None was not given.

    Raises:
        ConfigError: the file or a flag is wrong.
    """
    table = read_table(config) if config else {}
    flags: dict[str, str] = {}
    for flag in FLAGS:
        value = given.get(flag.parameter)
        if value is None or value == []:
            continue
        for path in flag.fields:
            _set(table, path, value if not isinstance(value, list) else tuple(value))
            flags[path] = flag.name
    _choose_pools(table, num_cores)
    if isinstance(table.setdefault("model", {}), dict):
        table["model"].setdefault("weights_cache", str(weights_cache()))
    return build(Deployment, table, str(config) if config else "the command line", flags=flags)


def weights_cache() -> Path:
    """Where packed weights are kept if nobody says so."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tripool" / "weights"


def _set(table: dict[str, Any], path: str, value: Any) -> None:
    *rooms, name = path.split(".")
    for room in rooms:
        table = table.setdefault(room, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{room} must be a table")
    table[name] = value


def _choose_pools(table: dict[str, Any], num_cores: int) -> None:
    """What runs if nothing says so: three pools where there are cores for them, otherwise one hybrid instance."""
    rooms = {name: table.setdefault(name, {}) for name in (*ROLES, "cache")}
    if any(isinstance(room, dict) and "count" in room for name, room in rooms.items() if name != "cache"):
        return
    chosen = {"hybrid": 1} if num_cores < CORES_FOR_POOLS else {"prefill": 1, "decode": 1, "cache": 1}
    for name, count in chosen.items():
        if isinstance(rooms[name], dict):
            rooms[name].setdefault("count", count)


def takes_flags(*panels: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of the table (of some panels, or of all). They arrive as its parameter `given`."""
    chosen = [flag for flag in FLAGS if not panels or flag.panel in panels]

    def wrap(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "given"]

        def call(**values: Any) -> Any:
            given = {flag.parameter: values.pop(flag.parameter) for flag in chosen}
            return command(given=given, **values)

        options = [inspect.Parameter(flag.parameter, inspect.Parameter.KEYWORD_ONLY, default=None,
                                     annotation=_annotation(flag)) for flag in chosen]
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + options
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in parameters}
        return call

    return wrap


def _annotation(flag: Flag) -> Any:
    more: dict[str, Any] = {"help": flag.help, "rich_help_panel": flag.panel, "show_default": False,
                            "envvar": "TRIPOOL_" + flag.parameter.upper(), "show_envvar": False}
    kind = flag.kind
    if kind is Size:
        more["parser"], kind = _size, int
    if flag.metavar:
        more["metavar"] = flag.metavar
    return Annotated[kind | None, typer.Option(*flag.names, **more)]


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def show_deployment(deployment: Deployment, *, changed_only: bool = False) -> str:
    """A deployment as TOML, as it could be given to `--config`; `changed_only` leaves out what is so by default."""
    lines: list[str] = []
    tables: list[str] = []
    for each in dataclasses.fields(Deployment):
        value = getattr(deployment, each.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            default = type(value)()
            told = [f"{field.name} = {_toml(own)}" for field in dataclasses.fields(value)
                    if (own := getattr(value, field.name)) is not None
                    and not (changed_only and own == getattr(default, field.name))]
            if told or not changed_only:
                tables += ["", f"[{each.name}]", *told]
        elif not (changed_only and value == each.default):
            lines.append(f"{each.name} = {_toml(value)}")
    return "\n".join(lines + tables) + "\n"


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
