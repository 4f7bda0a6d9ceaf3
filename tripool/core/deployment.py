"""A deployment: what runs, how many, how large. Read from TOML and flags, frozen once built, checked when built.

Each part of the system is given the piece it needs. Unknown keys are refused by name. The same file is
taken by `serve`, `simulate` and `plan`.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tripool.core.errors import ConfigError

T = TypeVar("T")

DTYPES = ("auto", "float32", "bfloat16", "float16")
EXCHANGES = ("local", "collective")
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and in which numbers."""

    path: str = ""                       # folder or hub id; empty: the embedded model
    revision: str | None = None          # of a hub id: a commit or tag, pinned
    served_name: str = ""                # empty: the last part of the path
    dtype: str = "auto"                  # auto: the checkpoint's
    device: str = "cpu"                  # cpu, cuda, cuda:1, npu, ...
    max_model_len: int = 0               # 0: the model's own
    deterministic: bool = False          # FP32, and tokens that do not depend on the batch, cache hits or placement
    load_format: str = "auto"            # dummy: random weights, to measure with
    tokenizer: str = ""                  # folder; empty: the model's
    chat_template: str = ""              # file; empty: the tokenizer's

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, DTYPES)
        _one_of("model.load_format", self.load_format, LOAD_FORMATS)
        if self.max_model_len < 0:
            raise ConfigError(f"model.max_model_len is {self.max_model_len}; "
                              "give a positive number, or 0 for the model's own")
        if self.deterministic and self.dtype not in ("auto", "float32"):
            raise ConfigError(f"model.dtype is {self.dtype}, but deterministic inference computes in float32; "
                              "leave one of them out")

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
    place_deadline_s: float = 30.0       # waiting for a member, when none is up
    reasoning_fields: str = "both"       # both, reasoning, reasoning_content
    sampling_defaults: str = "model"     # model: generation_config.json of the checkpoint; openai: temperature 1
    seed: int | None = None              # of requests that bring none; None: every time another
    join: str = ""                       # tcp://host:port to let members of other hosts join; needs the cluster key

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"gateway.port is {self.port}; give 0 to 65535")
        _one_of("gateway.reasoning_fields", self.reasoning_fields, ("both", "reasoning", "reasoning_content"))
        _one_of("gateway.sampling_defaults", self.sampling_defaults, ("model", "openai"))
        for name in ("max_queued_requests", "max_queued_tokens", "max_body_bytes", "max_attempts"):
            _at_least(f"gateway.{name}", getattr(self, name), 1)


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """A prefill, decode or hybrid instance."""

    count: int = 0
    ranks: int = 1                       # data-parallel attention, experts split over them
    exchange: str = "local"              # collective with several ranks
    max_num_seqs: int = 32               # rows per rank
    max_num_batched_tokens: int = 1024   # budget of one step, per rank
    cache_bytes: int = 0                 # per rank; 0: decided from the memory of the machine
    cache_tokens: int = 0                # the same in tokens; give one of the two
    threads: int = 0                     # per rank; 0: decided from the cores of the machine
    enable_prefix_caching: bool = True
    store_generated: bool = True         # blocks written while decoding are offered to the pool too

    def __post_init__(self) -> None:
        _one_of("exchange", self.exchange, EXCHANGES)
        if self.count < 0:
            raise ConfigError(f"count is {self.count}; give 0 or more instances")
        for name in ("ranks", "max_num_seqs", "max_num_batched_tokens"):
            _at_least(name, getattr(self, name), 1)
        for name in ("cache_bytes", "cache_tokens", "threads"):
            _at_least(name, getattr(self, name), 0)
        if self.cache_bytes and self.cache_tokens:
            raise ConfigError(f"cache_bytes is {self.cache_bytes} and cache_tokens is {self.cache_tokens}; "
                              "both say how large the cache is, give one of them")
        if self.ranks > 1 and self.exchange == "local":
            raise ConfigError(f"exchange is local, but ranks is {self.ranks}; use exchange = \"collective\"")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The pool of cached context."""

    count: int = 0
    bytes: int = 512 << 20               # shared memory of each server
    fetch_deadline_s: float = 2.0
    store_deadline_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything that is started together."""

    model: ModelConfig = field(default_factory=ModelConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    prefill: InstanceConfig = field(default_factory=InstanceConfig)
    decode: InstanceConfig = field(default_factory=InstanceConfig)
    hybrid: InstanceConfig = field(default_factory=InstanceConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
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
        if bool(self.prefill.count) != bool(self.decode.count):
            lonely, missing = ("prefill", "decode") if self.prefill.count else ("decode", "prefill")
            raise ConfigError(f"{lonely}.count is {getattr(self, lonely).count}, but there is no {missing} instance; "
                              f"add --{missing} 1, or use --hybrid")
        if not self.prefill.count and not self.hybrid.count:
            raise ConfigError("no instance can compute: set prefill.count and decode.count, or hybrid.count")
        for role in ("prefill", "decode", "hybrid"):
            num_ranks = getattr(self, role).ranks
            if num_ranks > 1 and self.model.on_accelerator:
                raise ConfigError(f"{role}.ranks is {num_ranks} and model.device is {self.model.device}; several ranks "
                                  "run on cpu only so far, on an accelerator use one rank and more instances")


def parse_deployment(text: str, source: str = "the deployment file") -> Deployment:
    """Read a deployment from TOML text.

    Raises:
        ConfigError: not TOML, an unknown key, a value of the wrong type or out of range.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error
    return build(Deployment, table, source)


def load_deployment(path: Path) -> Deployment:
    """Read a deployment file."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return parse_deployment(text, str(path))


def build(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    """Build a frozen configuration value from a table, naming the field in every complaint."""
    hints = typing.get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in table:
        if name not in names:
            raise ConfigError(f"{where}: unknown key {name!r}; known are {', '.join(names)}")
    values = {name: _value(hints[name], value, f"{where}: {name}") for name, value in table.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _value(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a table")
        return build(kind, value, where)  # type: ignore[arg-type]
    if isinstance(kind, types.UnionType):
        kinds = typing.get_args(kind)
        if value is None:
            return None
        kind = next(each for each in kinds if each is not type(None))
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where} must be a list")
        return tuple(_value(typing.get_args(kind)[0], each, where) for each in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{where} must be {kind.__name__}, not {value!r}")
    return value


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; known are {', '.join(known)}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}; the least is {least}")
