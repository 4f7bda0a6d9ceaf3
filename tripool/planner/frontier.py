"""What speed costs: the most tokens of an NPU for each speed that users may be given, in closed form.

A point is one design of a decode instance with so many rows, with as much prefill as it keeps busy, or instances that
do both at one pace. Points that another one beats in both are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tripool.core.deployment import InstanceConfig
from tripool.planner.search import Search

PREFILL_COUNT = 4
"""Prefill instances behind whose line the first token is awaited: one alone would be judged by its own fluctuations."""

PACES = tuple(part / 12 for part in range(1, 13))
"""Parts of its fastest pace, at which a hybrid instance is looked at."""


@dataclass(frozen=True, slots=True)
class Point:
    """One way to serve."""

    tpot_s: float
    tokens_per_s_per_npu: float            # of output, over all NPUs, those for prefill too
    is_split: bool
    words: str

    @property
    def tokens_per_s_per_user(self) -> float:
        return 1.0 / self.tpot_s


def points(search: Search) -> list[Point]:
    """All that was looked at."""
    demand, goals = search.demand, search.question.goals
    dies = search.question.machine.hardware.package.dies
    tokens_per_s = demand.requests_per_s * demand.mean_output
    found = []
    prefill = max((fit.most_times(goals, PREFILL_COUNT) / (PREFILL_COUNT * fit.config.ranks)
                   for fit in search.prefill), default=0.0)
    if prefill > 0.0:
        for decode in search.decode_fits:
            for rows in decode.row_counts:
                tpot_s = decode.tpot_s(rows)
                each = rows / (tpot_s * tokens_per_s)          # of the workload's pace, for one die
                found.append(Point(tpot_s, tokens_per_s * dies / (1.0 / prefill + 1.0 / each), True,
                                   _words(decode.config, decode.config.num_speculative_tokens, rows)))
    for hybrid, _ in search.hybrid:
        most = hybrid.most_times(goals, 1)
        for pace in PACES:
            step_s, on_rank = hybrid.step_s(most * pace, 1)
            if most > 0.0 and 0.0 < step_s < float("inf"):
                found.append(Point(step_s / hybrid.tokens_per_step,
                                   most * pace * tokens_per_s * dies / hybrid.config.ranks, False,
                                   _words(hybrid.config, hybrid.num_drafts, round(on_rank))))
    return found


def frontier(found: Iterable[Point]) -> list[Point]:
    """Those that no other beats, the fastest for users first."""
    best: list[Point] = []
    for point in sorted(found, key=lambda each: (each.tpot_s, -each.tokens_per_s_per_npu)):
        if not best or point.tokens_per_s_per_npu > best[-1].tokens_per_s_per_npu:
            best.append(point)
    return best


def _words(config: InstanceConfig, num_drafts: int, rows: int) -> str:
    drafts = f", {num_drafts} draft(s)" if num_drafts else ""
    return f"{config.ranks} rank(s), {rows} rows each{drafts}{', microbatches' if config.microbatches else ''}"
