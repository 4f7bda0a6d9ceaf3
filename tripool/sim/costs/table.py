"""The third level: steps as they were measured on a machine. `tripool calibrate` writes such a table.

Two grids. *Decode*: seconds of a step by tokens of a rank (rows and drafts) and by the context of one row. *Prefill*:
what a chunk adds to a step, by its tokens and by its first position. Between measured points in proportion, beyond the
last one as between the last two. The rank with the most to do decides.

    {"format": "tripool-step-costs/1", "machine": "...", "model": "...", "measured": "2026-11-30", "idle_s": 0.0004,
     "decode": {"tokens": [1, 8], "context": [0, 4096], "seconds": [[0.01, 0.02], [0.03, 0.05]]},
     "prefill": {"tokens": [16, 512], "first": [0, 4096], "seconds": [[0.01, 0.02], [0.2, 0.4]]}}

`seconds` has a row for each number of tokens. `idle_s` is a step in which nobody computes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tripool.core.errors import ConfigError
from tripool.sim.costs.state import Breakdown, Part, StepState

FORMAT = "tripool-step-costs/1"
Reals = npt.NDArray[np.float64]


class Grid(msgspec.Struct, forbid_unknown_fields=True):
    """Seconds at each pair of two measured axes."""

    tokens: list[float]
    seconds: list[list[float]]
    context: list[float] = []
    first: list[float] = []

    @property
    def across(self) -> list[float]:
        return self.context or self.first


class StepTable(msgspec.Struct, forbid_unknown_fields=True):
    """A file of measured steps."""

    format: str
    machine: str
    model: str
    measured: str
    idle_s: float
    decode: Grid
    prefill: Grid


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Prices steps after a table. Fulfils `StepCosts`."""

    table: StepTable

    def step_time(self, state: StepState) -> Breakdown:
        tokens_R = (state.rows_R + state.drafts_R).astype(np.float64)
        busy = tokens_R > 0
        decode_R = np.where(busy, _at(self.table.decode, tokens_R, state.context_R / np.maximum(state.rows_R, 1)),
                            self.table.idle_s)
        prefill_R = np.zeros(len(tokens_R))
        if state.chunk_tokens_C.size:
            added = _at(self.table.prefill, state.chunk_tokens_C.astype(np.float64),
                        state.chunk_first_C.astype(np.float64))
            np.add.at(prefill_R, state.chunk_rank_C, np.where(state.chunk_tokens_C > 0, added, 0.0))
        slowest = int(np.argmax(decode_R + prefill_R))
        return Breakdown((Part("decode", float(decode_R[slowest]), "measured"),
                          Part("prefill", float(prefill_R[slowest]), "measured")))


def _at(grid: Grid, rows: Reals, across: Reals) -> Reals:
    """Bilinear, and straight on beyond the last points; never below 0."""
    seconds = np.array(grid.seconds)
    i, x = _place(np.array(grid.tokens), rows)
    j, y = _place(np.array(grid.across), across)
    found: Reals = (seconds[i, j] * (1 - x) * (1 - y) + seconds[i + 1, j] * x * (1 - y)
                    + seconds[i, j + 1] * (1 - x) * y + seconds[i + 1, j + 1] * x * y)
    return np.maximum(found, 0.0)


def _place(axis: Reals, values: Reals) -> tuple[npt.NDArray[np.intp], Reals]:
    index = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, len(axis) - 2)
    return index, (values - axis[index]) / (axis[index + 1] - axis[index])


def read_table(path: Path) -> MeasuredCosts:
    """The steps that a file holds.

    Raises:
        ConfigError: it cannot be read, is of another format, or a grid is not one; the message names the field.
    """
    try:
        table = msgspec.convert(json.loads(path.read_text()), StepTable)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no table of step costs: {error}") from error
    if table.format != FORMAT:
        raise ConfigError(f"{path}: format is {table.format!r}; this version reads {FORMAT!r}")
    if table.idle_s < 0:
        raise ConfigError(f"{path}: idle_s is {table.idle_s}; it must not be negative")
    for name, grid, second in (("decode", table.decode, "context"), ("prefill", table.prefill, "first")):
        for axis in ("tokens", second):
            values = getattr(grid, axis)
            if len(values) < 2 or values != sorted(set(values)):
                raise ConfigError(f"{path}: {name}.{axis} is {values}; give at least two numbers that ascend")
        rows, columns = len(grid.tokens), len(grid.across)
        if len(grid.seconds) != rows or any(len(row) != columns for row in grid.seconds):
            raise ConfigError(f"{path}: {name}.seconds must be {rows} lists of {columns} numbers")
        if any(value < 0 for row in grid.seconds for value in row):
            raise ConfigError(f"{path}: {name}.seconds has a negative number")
    return MeasuredCosts(table)
