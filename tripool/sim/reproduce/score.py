"""Published cells beside ours, with errors, and the figures that the simulator is judged by."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripool.core.deployment import read_table
from tripool.sim.costs.residuals import Residuals
from tripool.sim.reproduce.predictions import Predictions
from tripool.sim.reproduce.tables import FOLDER, PaperCell, PaperTable, all_cells, read_paper_tables

HELD_OUT, UNSCORED, EXACT = "held out", "unscored", "exact"
NOT_SHOWN = ("input", "quoted", "not covered")
FINDINGS = FOLDER / "findings.toml"
BAR, MEDIAN_BAR, GPU_MEDIAN_BAR = 0.15, 0.07, 0.10
INFERSIM = {"table2_prefill/3/tokens_per_s": 9034, "table3_decode/1/tokens_per_s": 2675}
"""alibaba/InferSim, its README: the same two cells by a closed form."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A published cell and ours."""

    cell: PaperCell
    ours: float | None                     # None: nothing is said of it
    known: str = ""                        # what was found out about the cell, if it was missed

    @property
    def error(self) -> float | None:
        """(ours - published) / published; of gains, the same of the ratios of times."""
        if self.ours is None or self.cell.role == UNSCORED or not isinstance(self.cell.value, (int, float)):
            return None
        ours, published = self.ours, float(self.cell.value)
        if self.cell.is_gain:
            ours, published = 100.0 + ours, 100.0 + published
        return (ours - published) / abs(published) if published else (0.0 if ours == 0.0 else None)

    @property
    def is_far(self) -> bool:
        """Whether a held-out cell is missed, or is a gain that is off by more points than it may."""
        if self.cell.role != HELD_OUT or self.error is None:
            return False
        points, bar = self.time_points, self.cell.bar_points
        return abs(self.error) > BAR or (points is not None and bar is not None and abs(points) > bar)

    @property
    def time_points(self) -> float | None:
        """Of a gain: by how many points the time that is left, in percent of the time without, is off."""
        if not self.cell.is_gain or self.ours is None:
            return None
        return 100.0 * (100.0 / (100.0 + self.ours) - 100.0 / (100.0 + float(self.cell.value)))

    @property
    def finding(self) -> str:
        """What was found out about a miss."""
        return self.known if self.is_far else ""

    @property
    def is_met(self) -> bool | None:
        """Whether a judged cell is within its bar; None: it is not judged."""
        if self.error is None:
            return None
        if self.cell.role == HELD_OUT:
            return abs(self.error) <= BAR
        if self.cell.role == EXACT:
            assert self.ours is not None
            return round(self.ours, _decimals(self.cell.value)) == float(self.cell.value)
        return None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that `tripool reproduce` shows."""

    residuals: Residuals
    tables: list[PaperTable]
    scored: dict[str, Scored]              # by the id of the cell

    def of_role(self, role: str) -> list[Scored]:
        return [each for each in self.scored.values() if each.cell.role == role]

    @property
    def held_out_errors(self) -> list[float]:
        return [abs(each.error) for each in self.of_role(HELD_OUT) if each.error is not None]

    @property
    def held_out_worst(self) -> float:
        return max(self.held_out_errors)

    @property
    def held_out_median(self) -> float:
        return statistics.median(self.held_out_errors)

    @property
    def gpu_held_out_errors(self) -> list[float]:
        return [abs(each.error) for each in self.of_role(HELD_OUT) if each.cell.gpu and each.error is not None]

    @property
    def gpu_held_out_median(self) -> float:
        return statistics.median(self.gpu_held_out_errors)

    @property
    def num_inexact(self) -> int:
        """Cells that have to be met up to rounding, and are not."""
        return sum(not each.is_met for each in self.of_role(EXACT))

    def figures(self) -> list[dict[str, Any]]:
        """As bench files have them: the three that have bars, then one for each held-out cell."""
        judged = [("held_out_worst", self.held_out_worst, BAR), ("held_out_median", self.held_out_median, MEDIAN_BAR),
                  ("gpu_held_out_median", self.gpu_held_out_median, GPU_MEDIAN_BAR),
                  ("inexact_cells", float(self.num_inexact), 0.0)]
        found = [_figure(name, value) | {"bar": f"<= {bar:g}"} for name, value, bar in judged]
        return found + [_figure(each.cell.id.replace("/", "."), each.error) for each in self.of_role(HELD_OUT)
                        if each.error is not None]


def make_report(residuals: Residuals) -> Report:
    """All cells of all tables."""
    tables, ours = read_paper_tables(), Predictions(residuals).cells()
    cells = {cell.id: cell for cell in all_cells(tables)}
    unknown = sorted(set(ours) - set(cells))
    assert not unknown, f"predictions of cells that are not there: {', '.join(unknown)}"
    findings = {name: " ".join(text.split()) for name, text in read_table(FINDINGS).items()}
    return Report(residuals, tables, {name: Scored(cell, ours.get(name), findings.get(name, ""))
                                      for name, cell in cells.items() if cell.role})


def append_run(path: Path, report: Report, date: str, commit: str) -> bool:
    """Write a scored run at the end of the log; not if its figures are those of the last one."""
    entry = {"date": date, "commit": commit, "held_out_worst": round(report.held_out_worst, 4),
             "held_out_median": round(report.held_out_median, 4),
             "gpu_held_out_median": round(report.gpu_held_out_median, 4), "inexact_cells": report.num_inexact,
             "residuals": {name: getattr(report.residuals, name) for name in Residuals.__slots__}}
    lines = path.read_text().splitlines() if path.exists() else []
    if lines:
        last = json.loads(lines[-1])
        if {**last, "date": "", "commit": ""} == {**entry, "date": "", "commit": ""}:
            return False
    with path.open("a") as log:
        log.write(json.dumps(entry) + "\n")
    return True


def _figure(name: str, value: float) -> dict[str, Any]:
    return {"name": f"reproduce.{name}", "value": round(value, 4), "unit": "", "kind": "simulated"}


def _decimals(value: Any) -> int:
    return len(str(value).partition(".")[2]) if isinstance(value, float) else 0
