"""`tripool reproduce`: the paper's tables beside what the simulator says of them.

Shown for each published number: ours, the error, and what the number is to the simulator (an input, one of the four
that fitted something, derived from others, held out). What is missed is shown as a miss with what was found out about
it. In a checkout every run whose figures are new is added to the log of scored runs.
"""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

import tripool
from tripool import __version__
from tripool.cli.files import make_folder, writing
from tripool.cli.reproduce_picture import draw
from tripool.cli.screen import err, out
from tripool.core.errors import ConfigError
from tripool.sim.costs.residuals import Residuals, fitted_residuals
from tripool.sim.reproduce.score import (
    BAR,
    GPU_MEDIAN_BAR,
    HELD_OUT,
    INFERSIM,
    MEDIAN_BAR,
    NOT_SHOWN,
    UNSCORED,
    Report,
    Scored,
    append_run,
    make_report,
)
from tripool.sim.reproduce.tables import PaperTable

ROOT = Path(tripool.__file__).parents[1]
LOG = ROOT / "bench" / "results" / "reproduce-runs.jsonl"

WHAT_IT_IS = (
    "Simulated (operators at the efficiency that was measured of each alone, and four corrections), never run on this "
    "hardware, and independent of the paper's authors. Baselines were measured by others and not side by side. "
    "\"Perfect EPLB\" is a projection of the paper's, not a run. Accuracy (Table 5) is quoted and not reproduced. The "
    "published numbers were known to whoever built the model; what was done after each scored run is in its log.")

STYLES = {"held out": "bold", "calibration": "cyan", "exact": "green"}


def reproduce(
    table: Annotated[list[str] | None, typer.Option("--table", metavar="ID", help="Show only this table; may be given "
                                                    "again. Without it, all in which something is reckoned.",
                                                    show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="Show inputs, quoted and uncovered numbers, too.")] = False,
    pictures: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw each table: published and ours as bars.",
                                                  show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, or all of --table, for other programs.")] = False,
) -> None:
    """See how the simulator's supernode compares with the published one, number by number.

        tripool reproduce
        tripool reproduce --table table4_slo
        tripool reproduce --pictures out/paper
        tripool reproduce --json > reproduce.json

    The four corrections, each fitted on one cell, are listed with their values. Held-out cells are what it is judged
    by: 15 % for each, 7 % for the median, 10 % for the median of GPU cells. A miss does not change the exit code.
    """
    report = make_report(fitted_residuals())
    chosen = _chosen(report, table or [])
    if LOG.exists():
        _log(report)
    if pictures is not None:
        _draw(report, chosen, pictures)
    if as_json:
        out.print(msgspec.json.encode(as_object(report, chosen)).decode(), markup=False)
        return
    out.print(Text(WHAT_IT_IS, style="dim"), soft_wrap=False)
    for each in chosen:
        shown = rows_of(report, each, every=every or bool(table))
        if shown:
            out.print()
            out.print(table_of(each, shown))
            _print_findings(shown)
    out.print()
    out.print(residuals_table(report.residuals))
    out.print(figures_table(report))


def _chosen(report: Report, ids: list[str]) -> list[PaperTable]:
    known = {each.id: each for each in report.tables}
    for name in ids:
        if name not in known:
            raise ConfigError(f"--table is {name!r}; known are {', '.join(known)}")
    return [known[name] for name in ids] if ids else report.tables


def _commit() -> str:
    """Of the checkout, if this is one."""
    described = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True,
                               text=True, check=False) if LOG.exists() else None
    return described.stdout.strip() if described and described.stdout.strip() else f"version {__version__}"


def _log(report: Report) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if append_run(LOG, report, now, _commit()):
        err.print(f"a new scored run: added to {LOG}", markup=False)


def _draw(report: Report, tables: list[PaperTable], folder: Path) -> None:
    make_folder(folder, "--pictures")
    for each in tables:
        shown = [scored for scored in rows_of(report, each, every=False) if scored.error is not None]
        if shown:
            with writing(folder, "--pictures"):
                draw(each, shown, folder / f"{each.id}.png")
    err.print(f"pictures are in {folder}", markup=False)


# ------------------------------------------------------------------------------- showing


def rows_of(report: Report, table: PaperTable, *, every: bool) -> list[Scored]:
    """Its numbers; unless `every`, those alone that something is said of."""
    cells = [report.scored[cell.id] for cell in table.cells if cell.role]
    return cells if every else [each for each in cells if (each.ours is not None and each.cell.role not in NOT_SHOWN)
                                or each.cell.role == UNSCORED]


def table_of(table: PaperTable, shown: list[Scored]) -> Table:
    """For a terminal."""
    grid = Table(title=table.title, title_justify="left", title_style="bold", caption=_caption(table),
                 caption_justify="left", box=None, pad_edge=False)
    grid.add_column("row", overflow="fold")
    grid.add_column("number", overflow="fold")
    for name in ("published", "ours", "error"):
        grid.add_column(name, justify="right")
    grid.add_column("is")
    for each in shown:
        cell = each.cell
        error = Text("" if each.error is None else _error(each), style="" if each.is_met is not False else "red")
        ours = "-" if each.ours is None or cell.role == UNSCORED else show(each.ours)
        grid.add_row(Text(cell.label), cell.column, show(cell.value), ours, error,
                     Text(cell.role, style=STYLES.get(cell.role, "dim")))
    return grid


def _caption(table: PaperTable) -> str:
    words = [f"published: {table.source}"]
    if not table.verified:
        words.append("a secondary source")
    if table.because:
        words.append(table.because)
    return "; ".join(words)


def _error(each: Scored) -> str:
    assert each.error is not None and each.ours is not None
    if each.time_points is not None:
        return f"{100 * each.error:+.1f} % ({each.time_points:+.1f} points)"
    return f"{100 * each.error:+.1f} %"


def _print_findings(shown: list[Scored]) -> None:
    for each in shown:
        if each.cell.id in INFERSIM:
            out.print(Text(f"{each.cell.label}: InferSim says {INFERSIM[each.cell.id]} "
                           f"({INFERSIM[each.cell.id] / each.cell.value - 1:+.1%}).", style="dim"), soft_wrap=False)
        if each.finding:
            out.print(Text.assemble(("missed: ", "red"), f"{each.cell.label}, {each.cell.column}. {each.finding}"),
                      soft_wrap=False)


def residuals_table(residuals: Residuals) -> Table:
    """The four corrections."""
    grid = Table(title="Fitted, each on one number", title_justify="left", title_style="bold", box=None,
                 pad_edge=False)
    for name in ("correction", "value", "fitted on"):
        grid.add_column(name)
    grid.add_row("layer overhead", f"{residuals.layer_overhead:.1%}", "874 us of a decode layer without drafts")
    grid.add_row("step overhead", f"{residuals.step_overhead_ms:g} ms", "the 2 of xDeepServe's 93 + 2 ms")
    grid.add_row("expert skew", f"{residuals.expert_skew:.2f}", "SGLang's default over its perfect EPLB, 0.848")
    grid.add_row("pool software rate", f"{residuals.pool_gbps:.2f} GB/s, die", "861 ms that half a cached prompt saves")
    return grid


def figures_table(report: Report) -> Table:
    """What the simulator is judged by."""
    missed = [each for each in report.of_role(HELD_OUT) if each.is_met is False]
    gains = [each for each in report.of_role(HELD_OUT) if each.is_far and each.is_met]
    grid = Table(title=f"{len(report.of_role(HELD_OUT))} held-out numbers", title_justify="left", title_style="bold",
                 box=None, pad_edge=False)
    for name in ("", "value", "bar"):
        grid.add_column(name, justify="left" if not name else "right")
    for name, value, bar in (("worst error", report.held_out_worst, BAR),
                             ("median error", report.held_out_median, MEDIAN_BAR),
                             ("median error, GPUs", report.gpu_held_out_median, GPU_MEDIAN_BAR)):
        grid.add_row(name, Text(f"{value:.1%}", style="green" if value <= bar else "red"), f"{bar:.0%}")
    grid.add_row(f"off by more than {BAR:.0%}", str(len(missed)), "0")
    grid.add_row("microbatch gains whose time is off by more than 4 points", str(len(gains)), "0")
    grid.add_row("exact numbers that are not", str(report.num_inexact), "0")
    return grid


def show(value: Any) -> str:
    """A number with as many digits as it needs."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def as_object(report: Report, tables: Sequence[PaperTable]) -> dict[str, Any]:
    """Everything, in the form of the project's benchmarks, with all cells of these tables besides."""
    return {
        "question": "How close is the simulator to what was published and did not fit it?",
        "commit": _commit(), "what_it_is": WHAT_IT_IS,
        "parameters": {"residuals": {name: getattr(report.residuals, name) for name in Residuals.__slots__}},
        "figures": report.figures(),
        "tables": [{"id": each.id, "title": each.title, "source": each.source, "because": each.because,
                    "cells": [_cell(report.scored[cell.id]) for cell in each.cells if cell.role]}
                   for each in tables],
    }


def _cell(each: Scored) -> dict[str, Any]:
    cell = each.cell
    return {"id": cell.id, "row": cell.label, "column": cell.column, "published": cell.value,
            "ours": None if cell.role == UNSCORED else each.ours, "error": each.error, "role": cell.role,
            "is_met": each.is_met, "finding": each.finding}
