"""The third level: steps as they were measured on a machine. `tripool calibrate` writes such a table.

Each role has two grids, measured with the threads that its instances have. *Decode*: seconds of a step by tokens of a
rank (rows and drafts) and by the context of one row. *Prefill*: what a chunk adds to a step, by its tokens and by its
first position; chunks of one rank count as one with as many tokens and as many positions to look at. Between measured
points in proportion, beyond the last one as between the last two. The rank with the most to do decides.

    {"format": "tripool-step-costs/1", "machine": "...", "model": "...", "measured": "2026-11-30", "api_s": 0.0015,
     "roles": {"hybrid": {
        "threads": 1, "idle_s": 0.0004, "beside": 1.0, "mixed": 0.95,
        "decode": {"tokens": [1, 8], "context": [0, 4096], "seconds": [[0.01, 0.02], [0.03, 0.05]]},
        "prefill": {"tokens": [16, 512], "first": [0, 4096], "seconds": [[0.01, 0.02], [0.2, 0.4]]}}}}

`seconds` has a row for each number of tokens. `idle_s` is a step in which nobody computes. Three numbers say what a
grid cannot: `beside`, how many times as long a step takes while another instance of the machine computes; `mixed`, how
many times as long a step with rows and chunks takes as both together should (the engine computes them in one pass, so
mostly less); `api_s`, what HTTP and the gateway add to the first token of a request. As `mixed` is one number for all
such steps, none is taken to be shorter than its longer part alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt

from tripool.core.errors import ConfigError
from tripool.core.messages import ROLES, Role
from tripool.sim.costs.state import Breakdown, Part, StepState

FORMAT = "tripool-step-costs/1"
SHORTEST_S = 1e-9
Reals = npt.NDArray[np.float64]


class Grid(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Seconds at each pair of two measured axes."""

    tokens: list[float]
    seconds: list[list[float]]
    context: list[float] = []
    first: list[float] = []

    @property
    def across(self) -> list[float]:
        return self.context or self.first

    def at(self, tokens: Reals, across: Reals) -> Reals:
        """Bilinear, and straight on beyond the last points; never below 0."""
        seconds = np.array(self.seconds)
        i, x = _place(np.array(self.tokens), tokens)
        j, y = _place(np.array(self.across), across)
        found: Reals = (seconds[i, j] * (1 - x) * (1 - y) + seconds[i + 1, j] * x * (1 - y)
                        + seconds[i, j + 1] * (1 - x) * y + seconds[i + 1, j + 1] * x * y)
        return np.maximum(found, 0.0)


class RoleSteps(msgspec.Struct, forbid_unknown_fields=True):
    """Steps of an instance of one role."""

    idle_s: float
    decode: Grid
    prefill: Grid
    threads: int = 0                       # with which a rank computed; 0: not known
    beside: float = 1.0
    mixed: float = 1.0


class StepTable(msgspec.Struct, forbid_unknown_fields=True):
    """A file of measured steps."""

    format: str
    machine: str
    model: str
    measured: str
    roles: dict[str, RoleSteps]
    api_s: float = 0.0

    def of(self, role: Role) -> MeasuredCosts:
        """Prices for a role.

        Raises:
            ConfigError: its steps were not measured.
        """
        if role not in self.roles:
            raise ConfigError(f"steps of {', '.join(self.roles)} were measured, but none of {role}; calibrate with the "
                              "deployment that is simulated")
        return MeasuredCosts(self.roles[role])

    @property
    def beside(self) -> Mapping[Role, float]:
        """By role."""
        return {cast(Role, role): steps.beside for role, steps in self.roles.items()}

    @property
    def factors(self) -> dict[str, float]:
        """What corrects prices, by name."""
        factors = {"api_s": self.api_s}
        for role, steps in self.roles.items():
            factors |= {f"{role}_beside": steps.beside, f"{role}_mixed": steps.mixed}
        return factors


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Prices steps after a table. Fulfils `StepCosts`."""

    steps: RoleSteps

    def step_time(self, state: StepState) -> Breakdown:
        steps, num_ranks = self.steps, len(state.rows_R)
        tokens_R = (state.rows_R + state.drafts_R).astype(np.float64)
        decode_R = np.where(tokens_R > 0, steps.decode.at(tokens_R, state.context_R / np.maximum(state.rows_R, 1)),
                            steps.idle_s)
        prefill_R = np.zeros(num_ranks)
        if state.chunk_tokens_C.size:
            chunk_R, pairs_R = np.zeros(num_ranks), np.zeros(num_ranks)
            np.add.at(chunk_R, state.chunk_rank_C, state.chunk_tokens_C)
            np.add.at(pairs_R, state.chunk_rank_C,
                      state.chunk_tokens_C * (state.chunk_first_C + 0.5 * state.chunk_tokens_C))
            first_R = pairs_R / np.maximum(chunk_R, 1.0) - 0.5 * chunk_R
            prefill_R = np.where(chunk_R > 0, steps.prefill.at(chunk_R, first_R), 0.0)
            longer_R = np.maximum(decode_R, steps.idle_s + prefill_R)
            least_R = longer_R / np.maximum(decode_R + prefill_R, SHORTEST_S)
            mixed_R = np.where((chunk_R > 0) & (tokens_R > 0), np.maximum(steps.mixed, least_R), 1.0)
            decode_R, prefill_R = decode_R * mixed_R, prefill_R * mixed_R
        slowest = int(np.argmax(decode_R + prefill_R))
        return Breakdown((Part("decode", float(decode_R[slowest]), "measured"),
                          Part("prefill", float(prefill_R[slowest]), "measured")))


def _place(axis: Reals, values: Reals) -> tuple[npt.NDArray[np.intp], Reals]:
    index = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, len(axis) - 2)
    return index, (values - axis[index]) / (axis[index + 1] - axis[index])


def read_table(path: Path) -> StepTable:
    """The steps that a file holds.

    Raises:
        ConfigError: it cannot be read, is of another format, or a grid is not one; the message names the field.
    """
    try:
        table = msgspec.json.decode(path.read_bytes(), type=StepTable)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no table of step costs: {error}") from error
    if table.format != FORMAT:
        raise ConfigError(f"{path}: format is {table.format!r}; this version reads {FORMAT!r}")
    if table.api_s < 0:
        raise ConfigError(f"{path}: api_s is {table.api_s}; it must not be negative")
    if not table.roles:
        raise ConfigError(f"{path}: roles is empty; give the steps of {', '.join(ROLES)}, or of some of them")
    for role, steps in table.roles.items():
        _check_steps(steps, role, path)
    return table


def _check_steps(steps: RoleSteps, role: str, path: Path) -> None:
    where = f"{path}: roles.{role}"
    if role not in ROLES:
        raise ConfigError(f"{where} is no role; known are {', '.join(ROLES)}")
    if steps.idle_s < 0:
        raise ConfigError(f"{where}.idle_s is {steps.idle_s}; it must not be negative")
    if steps.beside < 1:
        raise ConfigError(f"{where}.beside is {steps.beside}; others do not make steps faster: give at least 1")
    if not steps.mixed > 0:
        raise ConfigError(f"{where}.mixed is {steps.mixed}; it must be positive")
    for name, grid, second in (("decode", steps.decode, "context"), ("prefill", steps.prefill, "first")):
        for axis in ("tokens", second):
            values = getattr(grid, axis)
            if len(values) < 2 or values != sorted(set(values)):
                raise ConfigError(f"{where}.{name}.{axis} is {values}; give at least two numbers that ascend")
        rows, columns = len(grid.tokens), len(grid.across)
        if len(grid.seconds) != rows or any(len(row) != columns for row in grid.seconds):
            raise ConfigError(f"{where}.{name}.seconds must be {rows} lists of {columns} numbers")
        if any(value < 0 for row in grid.seconds for value in row):
            raise ConfigError(f"{where}.{name}.seconds has a negative number")
