"""Rows that decode without drafts: all that run emit one token in every step, so a step is counted once for all.

A row's tokens are the steps since it began to run, and the step in which it will end or lack a block is known when it
does. So a stretch of steps costs what happens in it, however many rows there are and however long it is. A row that
lacks a block rests until it gets one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from tripool.sim.costs.state import Ints
from tripool.sim.measures import GapHistogram
from tripool.sim.row import Row


@dataclass(slots=True, eq=False)
class Runner:
    """A live row. While it runs, `number` is less by the steps counted so far than the tokens it has emitted."""

    row: Row
    number: int
    ahead: int                         # positions in the cache, less tokens emitted
    full: int                          # number of tokens at which it lacks a block
    last_s: float                      # when it last emitted, before it began to run
    runs: bool = False
    since: int = 0                     # step at which it began to run
    stops: int = 0                     # step after which it has ended or lacks a block


class Lockstep:
    """Live rows of one instance."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._clear()

    def _clear(self) -> None:
        self._num_running = 0
        self._context = 0                                  # tokens in the cache that they read, before these steps
        self._rows = [0] * self._num_ranks                 # both by rank
        self._contexts = [0] * self._num_ranks
        self._num_steps = 0                                # counted so far
        self._last_s = 0.0                                 # when the last of them ended
        self._runners: dict[Row, Runner] = {}
        self._begun: dict[Runner, None] = {}               # began to run since the last step
        self._stops: list[int] = []                        # a heap of steps after which somebody stops, once each
        self._stopping: dict[int, list[Runner]] = {}       # who does; some have gone meanwhile

    # ------------------------------------------------------------ rows

    def put(self, row: Row, number: int, last_s: float) -> None:
        """A row begins to decode. It emitted `number` tokens before, all of them told, the last at `last_s`."""
        row.live, row.told = True, number
        ahead = row.computed - number
        runner = self._runners[row] = Runner(row, number, ahead, row.room - ahead, last_s)
        self._begin(runner)

    def grow(self, grown: list[tuple[Row, int]]) -> None:
        """Rows have got blocks, for so many positions more."""
        for row, room in grown:
            runner = self._runners[row]
            if runner.runs:
                self._rest(runner)
            runner.full += room
            self._begin(runner)

    def take_off(self, row: Row) -> None:
        """A row is gone, live or not."""
        if row.live:
            row.live = False
            runner = self._runners.pop(row)
            if runner.runs:
                self._rest(runner)

    def clear(self) -> None:
        """All rows are gone."""
        for row in self._runners:
            row.live = False
        self._clear()

    def number(self, row: Row) -> int:
        """Tokens that a live row has emitted."""
        runner = self._runners[row]
        return runner.number + self._num_steps if runner.runs else runner.number

    def computed(self, row: Row) -> int:
        """Its positions in the cache."""
        return self.number(row) + self._runners[row].ahead

    def last_s(self, row: Row) -> float:
        """When it last emitted."""
        runner = self._runners[row]
        return self._last_s if runner.runs and runner.since < self._num_steps else runner.last_s

    # ------------------------------------------------------------ steps

    def begin(self) -> int:
        """How many rows run in the next steps: those that have a block to write to."""
        return self._num_running

    def load(self) -> tuple[Ints, Ints]:
        """By rank: rows that run, and tokens in the cache that they read."""
        rows_R = np.array(self._rows)
        return rows_R, np.array(self._contexts) + rows_R * self._num_steps

    def load_alone(self) -> tuple[int, int]:
        """The same of the only rank."""
        return self._num_running, self._context + self._num_running * self._num_steps

    def num_plain_steps(self) -> int:
        """How many steps these rows take until one of them ends or lacks a block."""
        while True:
            step = self._stops[0]
            if any(runner.runs and runner.stops == step for runner in self._stopping[step]):
                return step - self._num_steps
            heapq.heappop(self._stops)
            del self._stopping[step]

    def take(self, begun_s: float, num_steps: int, first_s: float, last_s: float, gaps: GapHistogram) -> int:
        """Rows that run have emitted, the first token at `first_s`. Counts the gaps before it that are no step.

        Returns how many rows had not emitted when the first step began.
        """
        late = [runner for runner in self._begun if runner.runs and runner.last_s != begun_s]
        num_late = len(late)
        for runner in late:
            if runner.last_s > 0:
                gaps.add(first_s - runner.last_s, 1)
        if begun_s != self._last_s:                        # nor had those that ran before
            num_others = self._num_running - sum(runner.runs for runner in self._begun)
            num_late += num_others
            if self._last_s > 0:
                gaps.add(first_s - self._last_s, num_others)
        self._begun.clear()
        self._num_steps += num_steps
        self._last_s = last_s
        return num_late

    def stopped(self) -> list[Row]:
        """Rows that have ended or lack a block since this was last asked, by place. They rest."""
        rows: list[Row] = []
        while self._stops and self._stops[0] <= self._num_steps:
            step = heapq.heappop(self._stops)
            for runner in self._stopping.pop(step):
                if runner.runs and runner.stops == step:
                    self._rest(runner)
                    rows.append(runner.row)
        return sorted(rows, key=lambda row: row.place)

    def _begin(self, runner: Runner) -> None:
        """It runs from now on, if it has a block."""
        if runner.number >= runner.full:
            return
        stops = self._num_steps + min(runner.row.total, runner.full) - runner.number
        if stops not in self._stopping:
            self._stopping[stops] = []
            heapq.heappush(self._stops, stops)
        self._stopping[stops].append(runner)
        runner.runs, runner.since, runner.stops = True, self._num_steps, stops
        runner.number -= self._num_steps
        self._begun[runner] = None
        self._count(runner, 1)

    def _rest(self, runner: Runner) -> None:
        """It runs no more."""
        self._count(runner, -1)
        if runner.since < self._num_steps:
            runner.last_s = self._last_s
        runner.runs = False
        runner.number += self._num_steps

    def _count(self, runner: Runner, sign: int) -> None:
        """Of a runner that runs at this moment."""
        rank, context = runner.row.rank, sign * (runner.number + runner.ahead)
        self._num_running += sign
        self._context += context
        self._rows[rank] += sign
        self._contexts[rank] += context
