"""Rows that decode with drafts: how many tokens each emits in a step is drawn, so all are kept as columns (`columns`).

The same questions are answered as by `lockstep`, and some more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tripool.sim.columns import Columns, Taken
from tripool.sim.costs.state import Ints
from tripool.sim.measures import GapHistogram
from tripool.sim.row import Row


class Drafting:
    """Live rows of one instance."""

    def __init__(self, num_ranks: int, num_slots: int, num_drafts: int, acceptance: Sequence[float], seed: int) -> None:
        self._columns = Columns(num_ranks, num_slots, num_drafts, acceptance, seed)
        self._rows: dict[int, Row] = {}                    # by place
        self._runs_N = self._columns.running_N()           # those that run in the present steps

    # ------------------------------------------------------------ rows

    def put(self, row: Row, number: int, last_s: float) -> None:
        """A row begins to decode. It emitted `number` tokens before, all of them told, the last at `last_s`."""
        row.live, row.told = True, number
        self._rows[row.place] = row
        self._columns.put(row.place, row.join.request_id, number=number, end=row.total,
                          limit=row.join.limits.max_tokens, computed=row.computed, room=row.room, last_s=last_s)

    def grow(self, grown: list[tuple[Row, int]]) -> None:
        """Rows have got blocks, for so many positions more."""
        self._columns.grow([row.place for row, _ in grown], [room for _, room in grown])

    def take_off(self, row: Row) -> None:
        """A row is gone, live or not."""
        if row.live:
            row.live = False
            del self._rows[row.place]
            self._columns.take_off(row.place)

    def clear(self) -> None:
        """All rows are gone."""
        for row in self._rows.values():
            row.live = False
        self._rows.clear()
        self._columns.clear()

    def number(self, row: Row) -> int:
        """Tokens that a live row has emitted."""
        return int(self._columns.number_N[row.place])

    def computed(self, row: Row) -> int:
        """Its positions in the cache."""
        return self._columns.computed(row.place)

    def last_s(self, row: Row) -> float:
        """When it last emitted."""
        return float(self._columns.last_s_N[row.place])

    # ------------------------------------------------------------ steps

    def begin(self) -> int:
        """How many rows run in the next steps: those that have a block to write to."""
        self._runs_N = self._columns.running_N()
        return int(np.count_nonzero(self._runs_N))

    def load(self) -> tuple[Ints, Ints]:
        """By rank: rows that run, and tokens in the cache that they read."""
        columns, runs_N = self._columns, self._runs_N
        return columns.by_rank(runs_N), columns.by_rank(columns.contexts_N(runs_N))

    def drafts_R(self) -> Ints:
        """Drafts that they verify in the next step."""
        return self._columns.by_rank(self._columns.drafts_N(self._runs_N))

    def step(self) -> Taken:
        """They emit their next token, and one more for each right draft before the first wrong one."""
        return self._columns.step(self._runs_N)

    def revert(self, taken: Taken) -> None:
        """That step was not taken after all."""
        self._columns.number_N -= taken.emitted_N

    def happens(self) -> bool:
        """Whether one of them has ended, lacks a block, or would draft more with one."""
        return self._columns.happens(self._runs_N)

    def take(self, begun_s: float, num_steps: int, first_s: float, last_s: float, gaps: GapHistogram) -> int:
        """Rows that run have emitted, the first token at `first_s`. Counts the gaps before it that are no step.

        Returns how many rows had not emitted when the first step began.
        """
        columns = self._columns
        late_N = self._runs_N & (columns.last_s_N != begun_s)
        gaps.add_all(first_s - columns.last_s_N[late_N & (columns.last_s_N > 0)])
        columns.last_s_N[self._runs_N] = last_s
        return int(np.count_nonzero(late_N))

    def stopped(self) -> list[Row]:
        """Rows that have ended or lack a block since this was last asked, by place."""
        return [self._rows[place] for place in self._columns.stopped_N(self._runs_N).nonzero()[0].tolist()]

    def wanting(self) -> list[Row]:
        """Rows that would draft more if they had another block."""
        return [self._rows[place] for place in self._columns.wants_N().nonzero()[0].tolist()]
