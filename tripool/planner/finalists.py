"""The finalists of a search: simulated, mended round by round, and ranked by what their users would say.

What closed forms leave out shows here. A deployment that keeps the goals gives an instance back, or takes a faster
pace; one that misses them gets an instance more where it fell short, or a slower pace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tripool.core.deployment import Deployment
from tripool.core.messages import ROLES, Role
from tripool.planner.search import Candidate, Search
from tripool.planner.trial import Outcome, Trial, Workers, simulate, trial_seconds
from tripool.sim.requests import Workload

NUM_ROUNDS = 4
"""Of simulations."""

MOST_CONFIRMED = 20_000
"""Requests of a trace that is simulated whole, in the end."""

FASTER = 1.08
"""The pace after one that kept the goals, over that one."""

NEAR_ENOUGH = 1.03
"""A pace that missed the goals over one that kept them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A deployment that was simulated, and what its users would say."""

    candidate: Candidate
    outcome: Outcome

    @property
    def deployment(self) -> Deployment:
        return self.candidate.deployment


@dataclass(frozen=True, slots=True)
class Found:
    """The answer: what keeps the goals, the best first; and what was tried and does not."""

    plans: tuple[Plan, ...]
    failed: tuple[Plan, ...]

    @property
    def split(self) -> Plan | None:
        return next((plan for plan in self.plans if plan.candidate.is_split), None)

    @property
    def whole(self) -> Plan | None:
        return next((plan for plan in self.plans if not plan.candidate.is_split), None)


def settle(search: Search, workers: Workers, candidates: Sequence[Candidate]) -> Found:
    """Simulate the candidates, mend them for some rounds, and rank what keeps the goals."""
    goals = search.question.goals
    best: list[Plan | None] = [None] * len(candidates)
    last: list[Plan | None] = [None] * len(candidates)
    open_: dict[int, Candidate] = dict(enumerate(candidates))
    missed: list[Plan | None] = [None] * len(candidates)       # of a candidate, the slowest pace that was too fast
    tried: list[set[tuple[float, int, int, int]]] = [set() for _ in candidates]
    for _ in range(NUM_ROUNDS):
        if not open_:
            break
        question, done = search.question, sum(len(each) for each in tried)
        asked = [(question.machine, question.traffic, goals, _trial(search, candidate))
                 for candidate in open_.values()]
        outcomes = workers.each(simulate, asked, partial(_tell, search.progress, done, len(asked)))
        following: dict[int, Candidate] = {}
        for (number, candidate), outcome in zip(open_.items(), outcomes, strict=True):
            plan = last[number] = Plan(candidate, outcome)
            tried[number].add(_key(candidate))
            if not outcome.keeps(goals):
                missed[number] = plan
            elif best[number] is None or _rank(search, plan) < _rank(search, best[number]):
                best[number] = plan
            other = _at_another_pace(search, best[number], missed[number]) if search.question.most else \
                _of_another_size(search, plan, best[number])
            if other is not None and _key(other) not in tried[number]:
                following[number] = other
        if search.question.most:
            following = {number: other for number, other in following.items()
                         if not _is_behind(other, best[number], best)}
        open_ = following
    kept = sorted((plan for plan in best if plan is not None), key=lambda plan: _rank(search, plan))
    return Found(tuple(kept), tuple(plan for plan, good in zip(last, best, strict=True)
                                    if good is None and plan is not None))


def confirm(search: Search, workers: Workers, found: Found) -> Found:
    """The best plan under the whole trace, where it was simulated under a part; with more instances if needed."""
    question = search.question
    source = question.traffic.source
    if question.most or not isinstance(source, Workload) or not found.plans \
            or len(source.requests) > MOST_CONFIRMED or found.plans[0].outcome.trial.seconds >= source.span_s:
        return found
    first, *others = found.plans
    candidate: Candidate | None = first.candidate
    for _ in range(NUM_ROUNDS):
        assert candidate is not None
        search.progress("the whole trace", 0.5)
        trial = replace(_trial(search, candidate), whole=True)
        plan = Plan(candidate, workers.each(simulate, [(question.machine, question.traffic, question.goals, trial)])[0])
        if plan.outcome.keeps(question.goals):
            return replace(found, plans=(plan, *others))
        candidate = _of_another_size(search, plan, None)
        if candidate is None:
            break
    return replace(found, plans=tuple(others), failed=(*found.failed, plan))


def _is_behind(candidate: Candidate, kept: Plan | None, best: Sequence[Plan | None]) -> bool:
    """Whether another one keeps a pace that this one, which keeps one too, is not expected to."""
    most = max((plan.candidate.times for plan in best if plan is not None and not plan.candidate.is_fixed), default=0.0)
    return not candidate.is_fixed and kept is not None and max(candidate.predicted, kept.candidate.times) < most


def _tell(progress: Callable[[str, float], None], done: int, total: int, number: int) -> None:
    progress(f"{done + number} simulations, {total - number} under way", number / total)


def _rank(search: Search, plan: Plan | None) -> tuple[float, float]:
    assert plan is not None
    if search.question.most:
        return (-plan.outcome.goodput, plan.candidate.num_dies)
    return (plan.candidate.num_dies, -plan.outcome.share)


def _key(candidate: Candidate) -> tuple[float, int, int, int]:
    made = candidate.deployment
    return (round(candidate.times, 3), made.prefill.count, made.decode.count, made.hybrid.count)


def _trial(search: Search, candidate: Candidate) -> Trial:
    question = search.question
    pace = question.traffic.requests_per_s * (candidate.times if question.most else 1.0)
    return Trial(candidate.deployment, pace,
                 trial_seconds(question.traffic, pace, question.goals, search.demand.mean_output))


def _at_another_pace(search: Search, kept: Plan | None, missed: Plan | None) -> Candidate | None:
    """The same deployment, faster than at the pace that kept the goals, slower than at the one that missed them."""
    if missed is None:
        assert kept is not None, "a deployment that was simulated kept the goals or missed them"
        return replace(kept.candidate, times=kept.candidate.times * FASTER)
    too_fast = missed.candidate.times
    if kept is None:
        less = min(0.25, 0.04 + 0.3 * (search.question.goals.share - missed.outcome.share))
        return replace(missed.candidate, times=too_fast * (1.0 - less))
    if too_fast <= kept.candidate.times * NEAR_ENOUGH:
        return None
    return replace(kept.candidate, times=(kept.candidate.times * too_fast) ** 0.5)


def _of_another_size(search: Search, plan: Plan, best: Plan | None) -> Candidate | None:
    """One instance fewer where there is slack, one more where the goals were missed."""
    made, outcome, goals = plan.deployment, plan.outcome, search.question.goals
    if plan.candidate.is_fixed or (best is not None and not outcome.keeps(goals)):
        return None
    change = -1 if outcome.keeps(goals) else +1
    if made.hybrid.count:
        role: Role = "hybrid"
    elif change < 0:                       # where the goal is further away
        role = "prefill" if outcome.ttft_s / goals.ttft_s < outcome.tpot_s / goals.tpot_s else "decode"
    else:
        role = "prefill" if outcome.late >= outcome.slow else "decode"
    if getattr(made, role).count + change < 1:
        return None
    other = _resized(search, plan.candidate, role, change)
    return other if other.num_dies <= search.question.budget.num_dies else None


def _resized(search: Search, candidate: Candidate, role: Role, change: int) -> Candidate:
    made = candidate.deployment
    configs = {each: getattr(made, each) for each in ROLES if getattr(made, each).count}
    configs[role] = replace(configs[role], count=configs[role].count + change)
    return replace(candidate, deployment=search.assemble(configs, candidate.times))
