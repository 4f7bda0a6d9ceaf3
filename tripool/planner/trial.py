"""A deployment tried out: simulated under the workload for a while, and what its users would say.

Whoever comes while the instances still fill is not asked. A simulation runs in a process of its own where there are
cores for it, so a trial is made of values that travel.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.messages import ROLES, Role
from tripool.planner.fit import Machine
from tripool.planner.goals import Goals
from tripool.planner.traffic import Traffic
from tripool.sim.requests import Workload
from tripool.sim.simulation import Simulation

T = TypeVar("T")

LEAST_REQUESTS, MOST_REQUESTS = 300, 4000
"""Of a trial."""

FILLED_AFTER = 0.5
"""Of a trial, after which whoever comes is asked, at the latest."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is to be tried: at which pace, for how long."""

    deployment: Deployment
    requests_per_s: float
    seconds: float
    whole: bool = False                    # a trace from its beginning to its end, everybody asked


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it. Simulated."""

    trial: Trial
    share: float                           # of requests that kept the goals
    late: float                            # of requests that had no first token in time
    slow: float                            # of requests whose tokens came too slowly
    failed: float                          # of requests that were refused, failed or were still running at the end
    ttft_s: float                          # that the wanted share of the served does not exceed
    tpot_s: float
    requests_per_s: float                  # that came
    output_tokens_per_s: float             # of good requests
    reused_share: float                    # of prompt tokens
    npus: float
    full: dict[Role, float]                # how full steps are, of tokens or of rows
    cause: str = ""                        # of most failures

    @property
    def goodput(self) -> float:
        """Good requests a second."""
        return self.share * self.requests_per_s

    def keeps(self, goals: Goals) -> bool:
        return self.share >= goals.share


def trial_seconds(traffic: Traffic, requests_per_s: float, goals: Goals, mean_output: float) -> float:
    """How long a trial lasts: until queues would show and rows are as many as they will be, within bounds."""
    wanted = 6.0 * goals.ttft_s + 2.0 * mean_output * goals.tpot_s
    return min(max(wanted, LEAST_REQUESTS / requests_per_s), MOST_REQUESTS / requests_per_s)


def simulate(machine: Machine, traffic: Traffic, goals: Goals, trial: Trial) -> Outcome:
    """Try a deployment."""
    work = traffic.source if trial.whole and isinstance(traffic.source, Workload) else \
        traffic.at(trial.requests_per_s, trial.seconds)
    simulation = Simulation(trial.deployment, work, machine.rig(trial.deployment), seed=traffic.seed)
    longest = float(np.quantile([each.num_output for each in work.requests], goals.share))
    end_s = work.span_s + 2.0 * goals.ttft_s + 2.0 * longest * goals.tpot_s
    simulation.run(until_s=end_s)
    filled_s = 0.0 if trial.whole else min(goals.ttft_s + longest * goals.tpot_s, work.span_s * FILLED_AFTER)
    return _outcome(trial, simulation, goals, filled_s)


def _outcome(trial: Trial, simulation: Simulation, goals: Goals, filled_s: float) -> Outcome:
    work = simulation.workload
    journeys = [journey for journey, each in zip(simulation.users.journeys, work.requests, strict=False)
                if each.at_s >= filled_s]
    seconds = work.span_s - filled_s
    total = max(len(journeys), 1)
    served = [each for each in journeys if each.is_served]
    good = [each for each in journeys if goals.slo.is_kept_by(each)]
    late = sum(each.first_s < 0 or each.ttft_s > goals.ttft_s for each in journeys)
    slow = sum((each.tpot_s or 0.0) > goals.tpot_s for each in served)
    causes: dict[str, int] = {}
    for each in journeys:
        if each.error:
            causes[each.error] = causes.get(each.error, 0) + 1
    ttfts = [each.ttft_s for each in served] or [float("nan")]
    tpots = [each.tpot_s for each in served if each.tpot_s is not None] or [0.0]
    npus = sum(getattr(trial.deployment, role).count * getattr(trial.deployment, role).ranks for role in ROLES)
    prompts = sum(each.num_prompt for each in journeys)
    return Outcome(
        trial, len(good) / total, late / total, slow / total, 1.0 - len(served) / total,
        float(np.quantile(ttfts, goals.share)), float(np.quantile(tpots, goals.share)),
        len(journeys) / seconds if seconds else 0.0,
        sum(each.num_tokens for each in good) / seconds if seconds else 0.0,
        sum(each.num_cached for each in journeys) / prompts if prompts else 0.0,
        npus * simulation.rig.npus_per_rank,
        _full(simulation, filled_s, work.span_s),
        max(causes, key=lambda cause: causes[cause]) if causes else "")


def _full(simulation: Simulation, begin_s: float, end_s: float) -> dict[Role, float]:
    """How full steps are: of prefill instances the budget of tokens, over all steps; of others the rows, over time."""
    samples = [each for each in simulation.samples if begin_s <= each.at_s <= end_s]
    full: dict[Role, float] = {}
    for role in simulation.num_blocks:
        config: InstanceConfig = getattr(simulation.deployment, role)
        if role == "prefill":
            planes = [instance.plane for each, instance in simulation.lives() if each == role]
            room = sum(plane.num_steps for plane in planes) * config.ranks * config.max_num_batched_tokens
            full[role] = sum(plane.num_chunk_tokens for plane in planes) / room if room else 0.0
        else:
            rows = sum(each.num_rows[role] for each in samples) / max(len(samples), 1)
            full[role] = rows / (config.count * config.ranks * config.max_num_seqs)
    return full


class Workers:
    """Calls functions on several processes, one for each core, or right here if there is one."""

    def __init__(self, num_processes: int) -> None:
        # A process that is forked from one with threads may hang; a new one has to load half a second of code.
        self._pool = ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) \
            if num_processes > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def each(self, function: Callable[..., T], calls: Sequence[tuple[Any, ...]],
             progress: Callable[[int], None] = lambda number: None) -> list[T]:
        """The answers of all calls, in their order; `progress` is told how many have come."""
        if self._pool is None:
            found = []
            for number, call in enumerate(calls, start=1):
                found.append(function(*call))
                progress(number)
            return found
        waited = [self._pool.submit(function, *call) for call in calls]
        for number, _ in enumerate(as_completed(waited), start=1):
            progress(number)
        return [future.result() for future in waited]
