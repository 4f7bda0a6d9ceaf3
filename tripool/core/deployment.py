"""A deployment: what runs, how many, how large. Read from TOML and flags, frozen once built, checked when built.

Each part of the system is given the piece it needs. Unknown keys are refused by name. The same file is
taken by `serve`, `simulate` and `plan`.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tripool.core.errors import ConfigError
from tripool.core.messages import ROLES, Role

T = TypeVar("T")

DTYPES = ("auto", "float32", "bfloat16", "float16")
HEAD_DTYPES = ("auto", "int8")
EXCHANGES = ("auto", "local", "collective", "direct")
EXCHANGED_ROWS = ("model", "int8")
LOAD_FORMATS = ("auto", "dummy")
EMBEDDED_NAME = "tripool-tiny"          # the model that comes with the package
MOST_DRAFTS = 8              # the one MTP layer guesses them one from the other, and the later ones are seldom right


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and in which numbers."""

    path: str = ""                       # folder or hub id; empty, or by its name: the embedded model
    revision: str | None = None          # of a hub id: a commit or tag, pinned
    served_name: str = ""                # empty: the last part of the path
    dtype: str = "auto"                  # auto: the checkpoint's
    head_dtype: str = "auto"             # auto: as stored; int8: the output head rounded to eight bits, on a CPU
    device: str = "cpu"                  # cpu, cuda, cuda:1, npu, ...
    max_model_len: int = 0               # 0: the model's own
    deterministic: bool = False          # FP32, and tokens that do not depend on the batch, cache hits or placement
    load_format: str = "auto"            # dummy: random weights, to measure with
    weights_cache: str = "none"          # folder in which packed weights are kept for the next start; none: nowhere
    tokenizer: str = ""                  # folder; empty: the model's
    chat_template: str = ""              # file; empty: the tokenizer's

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("head_dtype", self.head_dtype, HEAD_DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        if self.max_model_len < 0:
            raise ConfigError(f"max_model_len is {self.max_model_len}; "
                              "give a positive number, or 0 for the model's own")
        if self.deterministic and self.dtype not in ("auto", "float32"):
            raise ConfigError(f"dtype is {self.dtype}, but deterministic inference computes in float32; "
                              "leave one of them out")

    @property
    def packed_root(self) -> Path | None:
        """Where packed weights are kept."""
        return None if self.weights_cache == "none" else Path(self.weights_cache).expanduser()

    @property
    def on_accelerator(self) -> bool:
        return self.device.partition(":")[0] != "cpu"


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()       # none: open
    admin_keys: tuple[str, ...] = ()     # none: admin paths answer only the loopback
    max_queued_requests: int = 512
    max_queued_tokens: int = 1_000_000   # prompt tokens waiting for a prefill
    max_body_bytes: int = 8 << 20
    max_attempts: int = 4
    prefill_deadline_s: float = 120.0    # from placing to the first token
    decode_deadline_s: float = 30.0      # between tokens
    place_deadline_s: float = 30.0       # waiting for a member, when none is up or has room
    reasoning_fields: str = "both"       # both, reasoning, reasoning_content
    sampling_defaults: str = "model"     # model: generation_config.json of the checkpoint; openai: temperature 1
    seed: int | None = None              # of requests that bring none; None: every time another
    join: str = ""                       # tcp://host:port to let members of other hosts join; needs the cluster key

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; give 0 to 65535")
        _one_of("reasoning_fields", self.reasoning_fields, ("both", "reasoning", "reasoning_content"))
        _one_of("sampling_defaults", self.sampling_defaults, ("model", "openai"))
        for name in ("max_queued_requests", "max_queued_tokens", "max_body_bytes", "max_attempts"):
            _at_least(name, getattr(self, name), 1)
        _positive(self, "prefill_deadline_s", "decode_deadline_s", "place_deadline_s")


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """A prefill, decode or hybrid instance."""

    count: int = 0
    ranks: int = 1                       # data-parallel attention, experts split over them
    exchange: str = "auto"               # local: one rank · direct: shared memory · collective: torch.distributed
    exchange_rows: str = "model"         # what experts get: rows in the model's own type, or int8 with a scale
    exchange_tokens: int = 0             # room for so many of a rank at a time, more go in rounds; 0: decided
    redundant_experts: int = 0           # expert slots beyond one for each routed expert
    shared_expert_copies: int = 0        # slots for the shared expert; 0: each rank computes it for its own tokens
    expert_nodes: int = 1                # above 1: ranks in so many nodes, and a routing group's experts stay on one
    rebalance: bool = True               # move experts between ranks while requests run; needs redundant experts
    rebalance_steps: int = 1000          # from one look at the balance of all layers to the next
    num_speculative_tokens: int = 0      # drafted by the MTP layer for a row that decodes, in each step; 0: none
    microbatches: bool = False           # compute one half of a step's rows while the other travels between ranks
    max_num_seqs: int = 32               # rows per rank
    max_num_batched_tokens: int = 1024   # budget of one step, per rank
    cache_bytes: int = 0                 # per rank; 0: decided from the memory of the machine
    cache_tokens: int = 0                # the same in tokens; give one of the two
    threads: int = 0                     # per rank; 0: decided from the cores of the machine
    enable_prefix_caching: bool = True
    store_generated: bool = True         # blocks written while decoding are offered to the pool too

    def __post_init__(self) -> None:
        _one_of("exchange", self.exchange, EXCHANGES)
        _one_of("exchange_rows", self.exchange_rows, EXCHANGED_ROWS)
        for name in ("ranks", "expert_nodes", "max_num_seqs", "max_num_batched_tokens", "rebalance_steps"):
            _at_least(name, getattr(self, name), 1)
        for name in ("count", "cache_bytes", "cache_tokens", "threads", "exchange_tokens", "redundant_experts",
                     "shared_expert_copies", "num_speculative_tokens"):
            _at_least(name, getattr(self, name), 0)
        if self.num_speculative_tokens > MOST_DRAFTS:
            raise ConfigError(f"num_speculative_tokens is {self.num_speculative_tokens}; the most is {MOST_DRAFTS}")
        if self.max_num_batched_tokens < self.tokens_per_row:
            raise ConfigError(f"max_num_batched_tokens is {self.max_num_batched_tokens}, but with "
                              f"num_speculative_tokens {self.num_speculative_tokens} a row that decodes computes "
                              f"{self.tokens_per_row} tokens in a step; give at least {self.tokens_per_row}")
        if self.cache_bytes and self.cache_tokens:
            raise ConfigError(f"cache_bytes is {self.cache_bytes} and cache_tokens is {self.cache_tokens}; "
                              "both say how large the cache is, give one of them")
        if 0 < self.exchange_tokens < self.most_decode_tokens:      # a prefill's larger steps go in rounds
            drafts = f" of {self.tokens_per_row} tokens" if self.num_speculative_tokens else ""
            raise ConfigError(f"exchange_tokens is {self.exchange_tokens}, but a rank decodes up to max_num_seqs "
                              f"{self.max_num_seqs} rows{drafts} in a step; give at least {self.most_decode_tokens}, "
                              "or 0")
        if self.ranks > 1 and self.exchange == "local":
            raise ConfigError(f"exchange is local, but ranks is {self.ranks}; use exchange = \"direct\"")
        if self.exchange_rows == "int8" and self.exchange == "collective":
            raise ConfigError("exchange_rows is int8, but exchange is collective, which sends rows as they are; "
                              "use exchange = \"direct\"")

    @property
    def num_slots(self) -> int:
        """Rows that a rank really holds at once: no more than a step's budget has tokens for."""
        return min(self.max_num_seqs, self.max_num_batched_tokens // self.tokens_per_row)

    @property
    def tokens_per_row(self) -> int:
        """How many tokens a row that decodes computes in a step: its last one and the drafts behind it."""
        return 1 + self.num_speculative_tokens

    @property
    def most_decode_tokens(self) -> int:
        """The same of all rows of a rank."""
        return self.max_num_seqs * self.tokens_per_row

    @property
    def how_to_exchange(self) -> str:
        """`exchange`, decided: several ranks of one host write into each other's memory."""
        if self.exchange != "auto":
            return self.exchange
        return "direct" if self.ranks > 1 else "local"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The pool of cached context."""

    count: int = 0
    bytes: int = 512 << 20               # shared memory of each server
    fetch_deadline_s: float = 2.0
    store_deadline_s: float = 10.0

    def __post_init__(self) -> None:
        _at_least("count", self.count, 0)
        _at_least("bytes", self.bytes, 1 << 20)
        _positive(self, "fetch_deadline_s", "store_deadline_s")


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """Instances that change between prefill and decode with the load. A load of 1 is all that a role takes at once."""

    enabled: bool = False
    short_load: float = 0.9              # a role with this load or more is short of instances
    spare_load: float = 0.6              # most load that a role may come to have when it gives an instance away
    hold_s: float = 5.0                  # both must have been so for this long
    cool_down_s: float = 30.0            # nothing changes so long after a change, or after an instance came or went
    min_prefill: int = 1                 # instances that are left to a role, however little it has to do
    min_decode: int = 1

    def __post_init__(self) -> None:
        _positive(self, "hold_s", "cool_down_s")
        if not self.short_load > 0:
            raise ConfigError(f"short_load is {self.short_load}; give a positive number")
        if not 0 < self.spare_load < self.short_load:
            raise ConfigError(f"spare_load is {self.spare_load}; give a positive number below short_load "
                              f"{self.short_load}, or roles would change to and fro")
        _at_least("min_prefill", self.min_prefill, 1)
        _at_least("min_decode", self.min_decode, 1)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything that is started together."""

    model: ModelConfig = field(default_factory=ModelConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    prefill: InstanceConfig = field(default_factory=InstanceConfig)
    decode: InstanceConfig = field(default_factory=InstanceConfig)
    hybrid: InstanceConfig = field(default_factory=InstanceConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    block_tokens: int = 64
    heartbeat_s: float = 0.2
    stall_s: float = 5.0                 # without a heartbeat, or without progress while busy: not ready
    shutdown_s: float = 30.0             # budget for streams to finish on SIGTERM
    run_deadline_s: float = 120.0        # of one engine step
    pull_deadline_s: float = 5.0
    load_deadline_s: float = 3600.0
    verify_checksums: bool = True        # of every block copied between processes; generations are always checked

    def __post_init__(self) -> None:
        _at_least("block_tokens", self.block_tokens, 1)
        _at_least("shutdown_s", self.shutdown_s, 0)
        _positive(self, "heartbeat_s", "stall_s", "run_deadline_s", "pull_deadline_s", "load_deadline_s")
        if bool(self.prefill.count) != bool(self.decode.count):
            lonely, missing = ("prefill", "decode") if self.prefill.count else ("decode", "prefill")
            raise ConfigError(f"{lonely}.count is {getattr(self, lonely).count}, but there is no {missing} instance; "
                              f"add --{missing} 1, or use --hybrid")
        if not self.prefill.count and not self.hybrid.count:
            raise ConfigError("no instance can compute: set prefill.count and decode.count, or hybrid.count")
        for role in ROLES:
            num_ranks = getattr(self, role).ranks
            if num_ranks > 1 and self.model.on_accelerator:
                raise ConfigError(f"{role}.ranks is {num_ranks} and model.device is {self.model.device}; several ranks "
                                  "run on cpu only so far, on an accelerator use one rank and more instances")
        if self.scaling.enabled:
            self._check_roles_can_change()

    def may_serve(self, first_role: str, role: Role) -> bool:
        """Whether an instance that was started in one role may ever serve in another."""
        return first_role == role or (self.scaling.enabled and {first_role, role} == {"prefill", "decode"})

    def num_drafts(self, role: Role) -> int:
        """How many tokens an instance of a role can draft for a row: none where nobody ever decodes."""
        config: InstanceConfig = getattr(self, role)
        decodes = role == "hybrid" or self.may_serve(role, "decode")
        return config.num_speculative_tokens if decodes else 0

    def _check_roles_can_change(self) -> None:
        """What changes its role goes on with the memory and the engine that it has, so both roles must want the same.

        Raises:
            ConfigError: there is nothing to change, or the two roles are made in different ways.
        """
        if not self.prefill.count:
            raise ConfigError("scaling.enabled is true, but there are no prefill and decode instances that could "
                              "change their roles; set prefill.count and decode.count")
        for each in fields(InstanceConfig):
            prefill, decode = getattr(self.prefill, each.name), getattr(self.decode, each.name)
            if each.name != "count" and prefill != decode:
                raise ConfigError(f"decode.{each.name} is {decode}, but prefill.{each.name} is {prefill}; with "
                                  "scaling.enabled an instance serves in either role as it was started: give both the "
                                  "same value")


def parse_deployment(text: str, source: str = "the deployment file") -> Deployment:
    """Read a deployment from TOML text.

    Raises:
        ConfigError: not TOML, an unknown key, a value of the wrong type or out of range.
    """
    return build(Deployment, parse_table(text, source), source)


def parse_table(text: str, source: str) -> dict[str, Any]:
    """Read TOML text.

    Raises:
        ConfigError: it is not TOML.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML, in which deployments are written: {error}") from error


def read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: unreadable, or not TOML.
    """
    try:
        return parse_table(path.read_text(), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def build(kind: type[T], table: Mapping[str, Any], source: str, path: str = "", *,
          flags: Mapping[str, str] | None = None) -> T:
    """Build a frozen configuration value from a table. Every complaint names the field as it was written: by its flag,
    if `flags` has one for its dotted path, otherwise by the source and that path.

    Raises:
        ConfigError: an unknown or missing key, a value of the wrong type or out of range.
    """
    hints = typing.get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in table:
        if name not in names:
            raise ConfigError(f"{source}: unknown key {path + name!r}; known are {', '.join(names)}")
    flags = flags or {}
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            if each.name not in table:
                raise ConfigError(f"{source}: {path + each.name} is missing")
    values = {name: _value(hints[name], value, source, path + name, flags) for name, value in table.items()}
    try:
        return kind(**values)
    except ConfigError as error:          # begins with a field of one table, which does not know its own name
        name, _, complaint = str(error).partition(" ")
        raise ConfigError(f"{_as_written(path + name, source, flags)} {complaint}") from error


def _as_written(path: str, source: str, flags: Mapping[str, str]) -> str:
    return flags.get(path) or f"{source}: {path}"


def _value(kind: Any, value: Any, source: str, path: str, flags: Mapping[str, str]) -> Any:
    where = _as_written(path, source, flags)
    if isinstance(kind, types.UnionType):
        kinds = typing.get_args(kind)
        if value is None:
            return None
        kind = next(each for each in kinds if each is not type(None))
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a table")
        return build(kind, value, source, f"{path}.", flags=flags)  # type: ignore[arg-type]
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where} must be a list")
        return tuple(_value(typing.get_args(kind)[0], each, source, path, flags) for each in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{where} must be {kind.__name__}, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):      # no wait is without a bound
        raise ConfigError(f"{where} must be a finite number, not {value!r}")
    return value


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; known are {', '.join(known)}")


def _at_least(name: str, value: float, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}; the least is {least}")


def _positive(config: object, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ConfigError(f"{name} is {getattr(config, name)}; give a positive number of seconds")
