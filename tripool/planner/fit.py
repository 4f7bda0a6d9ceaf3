"""What one instance can do within the goals, in closed form: before anything is simulated, and for hundreds of designs.

A *prefill* step lasts as long as the tokens that came during the one before it take; who waits for how long follows
from the arrivals themselves. A *decode* instance has as many rows as Little's law says, and no more than keep the goal.
A *hybrid* does both in one step. Steps are priced by what simulates, on rows and prompts drawn from the workload, so
contexts differ between ranks as they will. What is left out is found by simulation: placement, stepping back, queues
of unlike length.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.errors import ConfigError
from tripool.core.messages import Role
from tripool.core.shape import ModelShape
from tripool.planner.goals import Goals
from tripool.planner.traffic import Demand, Ints, Reals
from tripool.sim.costs.state import StepCosts, StepState
from tripool.sim.hardware.description import Hardware
from tripool.sim.machine import rig_of
from tripool.sim.simulation import Rig

NONE = np.zeros(0, np.int64)

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of a rank for which decode steps are priced; between them in proportion."""

FULL_CACHE = 0.92
"""Of a rank's tokens, that rows may have on average: contexts grow, and blocks are kept in hand for that."""

MOST_PACES = 40
"""Halvings when a pace is looked for."""

MOST_LOOPS = 40
"""Until a hybrid's step and its rows agree."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A role on a machine: what its steps cost and how many tokens a rank holds; and what all roles share."""

    costs: StepCosts
    cache_tokens: int
    rig: Rig


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a machine, with the prices that the simulation has. `settings` are further ones of `rig_of`."""

    shape: ModelShape
    hardware: Hardware
    settings: Mapping[str, Any] = field(default_factory=dict)

    def rig(self, deployment: Deployment) -> Rig:
        """What a deployment is simulated on.

        Raises:
            ConfigError: too few dies, or too little memory of one.
        """
        return rig_of(deployment, self.shape, self.hardware, **self.settings)

    def priced(self, role: Role, config: InstanceConfig) -> Priced:
        """The prices of one instance.

        Raises:
            ConfigError: its ranks have no room, with the bytes needed and had.
        """
        twice = replace(self.hardware, nodes=2 * self.hardware.nodes)      # the other half of a pair needs dies as well
        pair = Deployment(hybrid=config) if role == "hybrid" else Deployment(prefill=config, decode=config)
        try:
            rig = replace(self, hardware=twice).rig(pair)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix("prefill: ").removeprefix("hybrid: ")) from error
        return Priced(rig.costs[role], rig.cache_tokens[role], rig)


class PrefillFit:
    """Steps that compute chunks of prompts."""

    def __init__(self, demand: Demand, priced: Priced, config: InstanceConfig, pool_tokens: int) -> None:
        self.config, self.priced = config, priced
        self.pool_tokens, self._demand = pool_tokens, demand
        budget = config.max_num_batched_tokens
        reused_N = demand.reused_N(pool_tokens)
        computed_N = demand.prompt_N - reused_N
        self.mean_computed = float(computed_N.mean())
        drawn = demand.prompts(math.ceil(config.ranks * (budget / self.mean_computed + 1)), pool_tokens)
        self.full = _full_step(*drawn, config.ranks, budget)
        self.full_tokens = int(self.full.chunk_tokens_C.sum())
        self.full_s = self._cost(self.full)
        self.chunk_tokens = min(round(self.mean_computed), budget)
        # In the middle of what is computed, for the mean over all chunks of a prompt, as in a full step.
        first = float(reused_N.mean()) + (self.mean_computed - self.chunk_tokens) / 2
        self.alone = _chunks([(0, round(first), self.chunk_tokens)], config.ranks)
        self.base_s = min(self._cost(self.alone), self.full_s)
        self.chunks_N: Reals = np.ceil(computed_N / budget)
        self.fetch_N: Reals = _fetch_s(priced.rig, reused_N)

    def _cost(self, state: StepState) -> float:
        halves = 2 if self.config.microbatches and state.chunk_tokens_C.max() > 1 else 1
        return self.priced.costs.step_time(replace(state, num_microbatches=halves)).total_s

    @property
    def tokens_per_s(self) -> float:
        """Of an instance whose steps are full."""
        return self.full_tokens / self.full_s

    @cached_property
    def token_s(self) -> float:
        """What one token more adds to a step."""
        return max(0.0, (self.full_s - self.base_s) / max(self.full_tokens - self.chunk_tokens, 1))

    def step_s(self, tokens_per_s: float) -> float:
        """The step that takes as long as the tokens take that come meanwhile."""
        left = 1.0 - self.token_s * tokens_per_s
        return self.full_s if left <= 0 else min(self.base_s / left, self.full_s)

    def ttft_N(self, times: float, count: int, share: float) -> Reals:
        """Of each request, on so many instances: for this share of them no longer."""
        each = self._demand.requests_per_s * times / count
        step_s = self.step_s(each * self.mean_computed)
        waiting_N = self._demand.waiting_s(times, count * self.tokens_per_s, self.pool_tokens)
        part = waited_part(share, each * self.alone_busy_s)
        ttft_N: Reals = self.fetch_N + (self.chunks_N + part) * step_s + waiting_N
        return ttft_N

    @property
    def alone_busy_s(self) -> float:
        """How long an instance is in steps for a request that it computes alone, on average."""
        return float(self.chunks_N.mean()) * self.base_s

    def alone_s(self, share: float) -> float:
        """What the first token of this share of the requests takes at least, when each is alone."""
        return float(np.quantile(self.fetch_N + self.chunks_N * self.base_s, share))

    def keeps(self, goals: Goals, times: float, count: int) -> bool:
        """Whether so many instances have the first tokens in time."""
        share = goals.share_of_each
        if self._demand.requests_per_s * times * self.mean_computed > count * self.tokens_per_s:
            return False
        return bool((self.ttft_N(times, count, share) <= goals.ttft_s).mean() >= share)

    def most_times(self, goals: Goals, count: int) -> float:
        """The fastest pace, as a multiple of the workload's, at which they do."""
        most = count * self.tokens_per_s / (self._demand.requests_per_s * self.mean_computed)
        return fastest(lambda times: self.keeps(goals, times, count), most)


class DecodeFit:
    """Steps of rows that decode."""

    def __init__(self, demand: Demand, priced: Priced, config: InstanceConfig, goals: Goals) -> None:
        """Of steps that miss the goal only the first is looked at."""
        self.config, self.priced = config, priced
        self._demand = demand
        chances = np.cumprod(priced.rig.acceptance[:config.num_speculative_tokens])
        self.tokens_per_step = 1.0 + float(chances.sum())
        self.memory_rows = int(FULL_CACHE * priced.cache_tokens / float(demand.contexts.mean()))
        self.row_counts: list[int] = []
        self.step_at: list[float] = []
        for count in ROW_COUNTS:
            count = max(1, min(count, self.memory_rows))
            self.row_counts.append(count)
            self.step_at.append(self._cost(count))
            if count == max(1, self.memory_rows) or self.step_at[-1] > goals.tpot_s * self.tokens_per_step:
                break
        planes = priced.rig.planes
        pull = planes.planes[planes.pull]
        rate = min(pull.bytes_per_s, pull.flow_bytes_per_s or pull.bytes_per_s)
        self._steps_of: dict[float, float] = {}            # for a token, of a share of the requests
        self.pull_N: Reals = demand.prompt_N.astype(np.float64) * (priced.rig.token_bytes / rate) + pull.latency_s

    def _cost(self, rows: int) -> float:
        config = self.config
        halves = 2 if config.microbatches and config.ranks > 1 and rows * config.tokens_per_row > 1 else 1
        return self.priced.costs.step_time(replace(self.state(rows), num_microbatches=halves)).total_s

    def state(self, rows: int) -> StepState:
        """A step with so many rows on each rank."""
        ranks, drafts = self.config.ranks, self.config.num_speculative_tokens
        full = np.full(ranks, rows, np.int64)
        contexts_R = np.resize(self._demand.contexts, rows * ranks).reshape(ranks, rows).sum(1)
        return StepState(full, contexts_R, full * drafts, NONE, NONE, NONE)

    def step_s(self, rows: float) -> float:
        return self.between(rows, self.step_at.__getitem__)

    def between(self, rows: float, at: Callable[[int], float]) -> float:
        """What is known at places of `row_counts`, for any number of rows of a rank."""
        after = bisect_right(self.row_counts, rows)
        if after == 0 or after == len(self.row_counts):
            return at(max(after - 1, 0))
        before, next_ = self.row_counts[after - 1:after + 1]
        low, high = at(after - 1), at(after)
        return low + (high - low) * (rows - before) / (next_ - before)

    def tpot_s(self, rows: float) -> float:
        """With so many rows on each rank, without the hand-over."""
        return self.step_s(rows) / self.tokens_per_step

    def keeps(self, goals: Goals, rows: int) -> bool:
        """Whether answers come in time, with the hand-over and the wait for the step that takes them in."""
        gaps_N = np.maximum(self._demand.output_N - 1, 1)
        tpot_N = self.tpot_s(rows) + (self.pull_N + self.step_s(rows)) / gaps_N
        return self._share(tpot_N <= goals.tpot_s) >= goals.share_of_each

    def slowest_step_s(self, goals: Goals) -> float:
        """The longest step with which answers come in time where nothing is handed over."""
        share = goals.share_of_each
        if share not in self._steps_of:
            steps_N = 1.0 / self.tokens_per_step + 1.0 / np.maximum(self._demand.output_N - 1, 1)
            self._steps_of[share] = float(np.quantile(steps_N, share))
        return goals.tpot_s / self._steps_of[share]

    def _share(self, kept_N: npt.NDArray[np.bool_]) -> float:
        """Of the requests that have tokens after the first."""
        has_N = self._demand.output_N > 1
        return float(kept_N[has_N].mean()) if has_N.any() else 1.0

    @property
    def most_rows(self) -> int:
        """Rows of a rank that memory and prices allow."""
        return self.row_counts[-1]

    def rows_within(self, goals: Goals) -> int:
        """The most rows of a rank that keep the goal; 0 if not even one does."""
        return bisect_left(range(1, self.most_rows + 1), True,
                           key=lambda rows: not self.keeps(goals, rows))

    def most_times(self, goals: Goals, count: int, rows: int) -> float:
        """The fastest pace, as a multiple of the workload's, that so many instances keep up with."""
        if not rows:
            return 0.0
        demand, token_s = self._demand, self.tpot_s(rows)
        room = count * self.config.ranks * rows
        most = room / (demand.requests_per_s * demand.mean_output * token_s)
        return fastest(lambda times: demand.most_rows(times, token_s, goals.share_of_each) <= room, most)


class HybridFit:
    """Steps of rows that decode and of chunks beside them."""

    def __init__(self, demand: Demand, prefill: PrefillFit, decode: DecodeFit) -> None:
        self.config = prefill.config
        self._demand, self._prefill, self._decode = demand, prefill, decode
        self._mixed: dict[tuple[int, bool], float] = {}    # by place of a number of rows, and whether full of chunks

    @property
    def priced(self) -> Priced:
        return self._prefill.priced

    @property
    def tokens_per_step(self) -> float:
        return self._decode.tokens_per_step

    @property
    def num_drafts(self) -> int:
        return self._decode.config.num_speculative_tokens

    def step_s(self, times: float, count: int) -> tuple[float, float]:
        """How long a step is at a pace, and how many rows each rank has; infinite if work comes faster than it goes."""
        each = self._demand.requests_per_s * times / count
        tokens = each * self._prefill.mean_computed
        chunks = float(self._prefill.chunks_N.mean())
        step, rows = self._decode.step_s(1), 0.0
        for _ in range(MOST_LOOPS):
            rows = each * self._demand.mean_output * step / self._decode.tokens_per_step / self.config.ranks
            if rows > self._decode.most_rows:
                return float("inf"), rows
            rows_s, first_s = self._decode.step_s(rows), self.mixed_s(rows, full=False)
            left = 1.0 - tokens * self._token_s(rows)
            if left <= 0:
                return float("inf"), rows
            with_chunks = min(1.0, each * step * chunks)
            longer = (rows_s + with_chunks * max(first_s - rows_s, 0.0)) / left
            if abs(longer - step) < 1e-3 * step:
                break
            step = longer
        return step, rows

    def mixed_s(self, rows: float, *, full: bool) -> float:
        """A step with so many rows on each rank and one prompt, or as many as its budget holds."""
        def at(place: int) -> float:
            if (place, full) not in self._mixed:
                chunks = self._prefill.full if full else self._prefill.alone
                state = replace(self._decode.state(self._decode.row_counts[place]), chunk_rank_C=chunks.chunk_rank_C,
                                chunk_first_C=chunks.chunk_first_C, chunk_tokens_C=chunks.chunk_tokens_C,
                                num_microbatches=2 if self.config.microbatches and self.config.ranks > 1 else 1)
                self._mixed[place, full] = self.priced.costs.step_time(state).total_s
            return self._mixed[place, full]
        return self._decode.between(rows, at)

    def _token_s(self, rows: float) -> float:
        """What one token of a prompt more adds to a step."""
        added_s = self.mixed_s(rows, full=True) - self.mixed_s(rows, full=False)
        return max(0.0, added_s / max(self._prefill.full_tokens - self._prefill.chunk_tokens, 1))

    def keeps(self, goals: Goals, times: float, count: int) -> bool:
        """Whether so many instances keep both goals at a pace."""
        step, rows = self.step_s(times, count)
        tokens = self._demand.requests_per_s * times / count * self._prefill.mean_computed
        share = goals.share_of_each
        if step == float("inf") or tokens * step > self._prefill.full_tokens:
            return False
        if step > self._decode.slowest_step_s(goals):
            return False
        full_s = self.mixed_s(rows, full=True)
        busy = rows * self.config.ranks + self._demand.requests_per_s * times / count * self._prefill.alone_busy_s
        waiting_N = self._demand.waiting_s(times, count * self._prefill.full_tokens / full_s, self._prefill.pool_tokens)
        own_s = max(step, self.mixed_s(rows, full=False))                          # of its own chunks, not the mean one
        ttft_N = self._prefill.fetch_N + self._prefill.chunks_N * own_s + waited_part(share, busy) * step + waiting_N
        return bool((ttft_N <= goals.ttft_s).mean() >= share)

    def most_times(self, goals: Goals, count: int) -> float:
        """The fastest pace, as a multiple of the workload's, at which they do."""
        most = count * self._prefill.tokens_per_s / (self._demand.requests_per_s * self._prefill.mean_computed)
        return fastest(lambda times: self.keeps(goals, times, count), most)


def waited_part(share: float, busy: float) -> float:
    """The part of a step that this share of the requests waits at the most until the one ends during which they come,
    if there is one for so much of the time: whoever comes between two steps waits for none."""
    return max(0.0, 1.0 - (1.0 - share) / min(busy, 1.0)) if busy > 0.0 else 0.0


def fastest(keeps: Callable[[float], bool], most: float) -> float:
    """The fastest pace up to `most` that is kept, to half a percent; 0 if none is."""
    if keeps(most):
        return most
    low, high = 0.0, most
    for _ in range(MOST_PACES):
        middle = (low + high) / 2
        if keeps(middle):
            low = middle
        else:
            high = middle
        if high - low <= 0.005 * high or high < 1e-6 * most:
            break
    return low


def _full_step(firsts: Sequence[int], tokens: Sequence[int], ranks: int, budget: int) -> StepState:
    """A step in which every rank computes its whole budget of these prompts; what is left of one is not looked at."""
    chunks: list[tuple[int, int, int]] = []
    place = 0
    for rank in range(ranks):
        left = budget
        while left > 0:
            taken = min(tokens[place], left)
            # The chunk of a long prompt is somewhere in it: in its middle, for the mean over all of them.
            chunks.append((rank, firsts[place] + (tokens[place] - taken) // 2, taken))
            left -= taken
            place = (place + 1) % len(tokens)
    return _chunks(chunks, ranks)


def _chunks(chunks: Sequence[tuple[int, int, int]], ranks: int) -> StepState:
    """A step of chunks alone: rank, first position, tokens."""
    zeros = np.zeros(ranks, np.int64)
    columns = np.array(chunks, np.int64).reshape(-1, 3)
    return StepState(zeros, zeros, zeros, columns[:, 0], columns[:, 1], columns[:, 2])


def _fetch_s(rig: Rig, tokens_N: Ints) -> Reals:
    """Seconds until so many tokens have come from the pool."""
    plane, ends = rig.planes.planes[rig.planes.pool], rig.planes.pool_ends
    rate = ends.die_bytes_per_s if ends is not None else plane.bytes_per_s
    seconds: Reals = np.where(tokens_N > 0, tokens_N * (rig.token_bytes / rate) + plane.latency_s, 0.0)
    return seconds
