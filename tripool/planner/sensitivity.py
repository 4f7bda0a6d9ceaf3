"""How the choice changes when the workload or a goal is a fifth more or less than was said, in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tripool.core.deployment import Deployment
from tripool.core.errors import ConfigError
from tripool.planner.search import Question, Search
from tripool.planner.traffic import Traffic
from tripool.sim.requests import Workload

STEPS = (0.8, 1.2)


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing changed, and what would be chosen then; or why nothing would."""

    words: str
    deployment: Deployment | None
    requests_per_s: float = 0.0            # that it carries in closed form
    cause: str = ""


def variants(question: Question) -> Iterator[tuple[str, Question]]:
    """The questions to ask. What a budget serves at most does not depend on the load."""
    traffic, goals = question.traffic, question.goals
    for times in STEPS:
        if not question.most:
            yield f"load × {times:g}", replace(question, traffic=faster(traffic, times))
    for times in STEPS:
        yield f"prompts × {times:g}", replace(question, traffic=traffic.longer(times))
    for times in STEPS:
        yield f"TPOT goal × {times:g}", replace(question, goals=replace(goals, tpot_s=goals.tpot_s * times))
    for times in STEPS:
        yield f"TTFT goal × {times:g}", replace(question, goals=replace(goals, ttft_s=goals.ttft_s * times))


def choose(words: str, question: Question) -> Variant:
    """The best in closed form."""
    try:
        best = Search(question).candidates()[0]
    except ConfigError as error:
        return Variant(words, None, cause=str(error))
    return Variant(words, best.deployment, best.times * question.traffic.requests_per_s)


def faster(traffic: Traffic, times: float) -> Traffic:
    """The same requests, coming `times` as fast."""
    source = traffic.source
    if isinstance(source, Workload):
        return replace(traffic, source=source.faster(times))
    return replace(traffic, source=replace(source, requests_per_s=source.requests_per_s * times))
