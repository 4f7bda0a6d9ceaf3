"""A machine described by a few prices, from a TOML file: what a calibration measures, or what a user reckons.

    token_bytes = 70272            # of one token's cache entries, of all layers
    npus_per_rank = 0.5            # a rank is one of two dies
    npu_hour_price = 2.5           # leave it out, and no price is told
    acceptance = [0.7]             # of the first draft of a step, the second, ...

    [cache_tokens]                 # of a rank, by role; a deployment's own cache_tokens go before
    prefill = 400_000
    decode = 900_000

    [costs.prefill]                # of a step, in seconds; likewise costs.decode and costs.hybrid
    step_s = 8e-3
    chunk_token_s = 150e-6

    [planes]                       # which of them carries what
    pull = "rdma"
    pool = "ub"
    control = "vpc"

    [planes.rdma]                  # bytes a second into or out of one endpoint
    bytes_per_s = 25e9
    latency_s = 10e-6

There is no default machine: what is not said is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from tripool.core.deployment import build, read_table
from tripool.core.errors import ConfigError
from tripool.core.messages import ROLES, Role
from tripool.sim.costs.state import Level, StepCosts
from tripool.sim.pricing import LinearCosts, Plane, Planes
from tripool.sim.simulation import Rig

CARRIES = ("pull", "pool", "control")
NUMBERS = ("token_bytes", "max_model_len", "npus_per_rank", "npu_hour_price", "currency")


def read_rig(path: Path) -> Rig:
    """Read a machine.

    Raises:
        ConfigError: unreadable, an unknown key, or something is missing or out of range; with the key.
    """
    table, source = read_table(path), str(path)
    _check_keys(table, (*NUMBERS, "acceptance", "cache_tokens", "costs", "planes", "factors"), source, "")
    if "token_bytes" not in table:
        raise ConfigError(f"{source}: token_bytes is missing: the bytes of one token's cache entries")
    values: dict[str, Any] = {name: _number(table[name], name, source) for name in NUMBERS if name in table}
    tokens = _table(table, "cache_tokens", source)
    _check_keys(tokens, ROLES, source, "cache_tokens.")
    factors = _table(table, "factors", source)
    try:
        return Rig(_costs(_table(table, "costs", source), source), _planes(_table(table, "planes", source), source),
                   cache_tokens={role: int(_number(each, f"cache_tokens.{role}", source))
                                 for role, each in _by_role(tokens).items()},
                   acceptance=tuple(float(_number(each, "acceptance", source)) for each in table.get("acceptance", ())),
                   factors={name: float(_number(each, f"factors.{name}", source)) for name, each in factors.items()},
                   **values)
    except ConfigError as error:
        raise error if str(error).startswith(source) else ConfigError(f"{source}: {error}") from error


def _costs(table: Mapping[str, Any], source: str) -> dict[Role, StepCosts]:
    _check_keys(table, ROLES, source, "costs.")
    if not table:
        raise ConfigError(f"{source}: costs is missing: give costs.prefill and costs.decode, or costs.hybrid")
    costs: dict[Role, StepCosts] = {}
    for role, each in _by_role(table).items():
        own = dict(each) if isinstance(each, dict) else each
        level = own.pop("level", "measured") if isinstance(own, dict) else "measured"
        if level not in get_args(Level):
            raise ConfigError(f"{source}: costs.{role}.level is {level!r}; known are {', '.join(get_args(Level))}")
        if not isinstance(own, dict):
            raise ConfigError(f"{source}: costs.{role} must be a table")
        linear = build(LinearCosts, own, source, f"costs.{role}.")
        costs[role] = replace(linear, level=cast(Level, level))
    return costs


def _planes(table: Mapping[str, Any], source: str) -> Planes:
    missing = [name for name in CARRIES if not isinstance(table.get(name), str)]
    if missing:
        raise ConfigError(f"{source}: planes.{missing[0]} is missing: the name of the plane that carries it")
    planes = {}
    for name, each in table.items():
        if name in CARRIES:
            continue
        if not isinstance(each, dict) or "bytes_per_s" not in each:
            raise ConfigError(f"{source}: planes.{name} must be a table with bytes_per_s")
        planes[name] = build(Plane, each, source, f"planes.{name}.")
    return Planes(planes, table["pull"], table["pool"], table["control"])


def _by_role(table: Mapping[str, Any]) -> dict[Role, Any]:
    return {role: table[role] for role in ROLES if role in table}


def _table(table: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    value = table.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: {name} must be a table")
    return value


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], source: str, path: str) -> None:
    for name in table:
        if name not in known:
            raise ConfigError(f"{source}: unknown key {path + name!r}; known are {', '.join(known)}")


def _number(value: Any, name: str, source: str) -> Any:
    kinds = (str,) if name == "currency" else (int,) if name in ("token_bytes", "max_model_len") else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ConfigError(f"{source}: {name} is {value!r}; give a {'word' if str in kinds else 'number'}")
    return value
