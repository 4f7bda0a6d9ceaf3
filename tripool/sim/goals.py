"""Goals that cannot be met: told before anything is simulated, with what stands in the way.

The bound is what a request would see that has the whole deployment to itself: one decode step with a single row, and a
prefill of what it does not share with any earlier request. Whoever cannot keep a goal then never can. It says nothing
of goals that many requests together miss; that is what a simulation is for.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.errors import ConfigError
from tripool.core.messages import Role
from tripool.sim.costs.state import StepCosts, StepState
from tripool.sim.outcome import Slo
from tripool.sim.pricing import NO_CHUNKS
from tripool.sim.requests import Workload, WorkRequest


def check_goals(deployment: Deployment, costs: Mapping[Role, StepCosts], workload: Workload, slo: Slo) -> None:
    """See that some request could keep each goal.

    Raises:
        ConfigError: none can; with the bound, and the request that comes nearest.
    """
    if not workload.requests:
        return
    if slo.ttft_s is not None:
        num_new = _new_tokens(workload)
        nearest = min(range(len(num_new)), key=num_new.__getitem__)
        least_s, role = min((_prefill_s(costs[role], config, workload.requests[nearest], num_new[nearest]), role)
                            for role, config in _living(deployment, "prefill"))
        if least_s > slo.ttft_s:
            raise ConfigError(f"no request can have its first token within {slo.ttft_s:g} s: request {nearest + 1} "
                              f"comes nearest, with {num_new[nearest]} tokens that no earlier one shares, and they "
                              f"take a {role} instance that has nothing else to do {least_s:.3g} s")
    if slo.tpot_s is not None and all(each.num_output > 1 for each in workload.requests):
        context = min(each.num_prompt for each in workload.requests)
        least_s, role = min((_row_s(costs[role], config, context), role)
                            for role, config in _living(deployment, "decode"))
        if least_s > slo.tpot_s:
            raise ConfigError(f"no request can have {slo.tpot_s:g} s between its tokens: a step of a {role} instance "
                              f"with a single row of {context} tokens takes {least_s:.3g} s for each")


def _living(deployment: Deployment, role: Role) -> list[tuple[Role, InstanceConfig]]:
    """Instances that do what a role does."""
    roles: tuple[Role, ...] = (role, "hybrid")
    return [(each, config) for each in roles if (config := getattr(deployment, each)).count]


def _new_tokens(workload: Workload) -> list[int]:
    """What each request has to have computed, if everything that came before it is remembered; the last token always
    is."""
    seen: dict[int, None] = {}
    counts = []
    for request in workload.requests:
        shared = 0
        for name, count in request.parts:
            if name not in seen:
                break
            shared += count
        seen.update(dict.fromkeys(name for name, _ in request.parts))
        counts.append(max(1, request.num_prompt - shared))
    return counts


def _prefill_s(costs: StepCosts, config: InstanceConfig, request: WorkRequest, num_new: int) -> float:
    """In chunks as large as a step may have, all on one rank."""
    seconds, first = 0.0, request.num_prompt - num_new
    while first < request.num_prompt:
        count = min(config.max_num_batched_tokens, request.num_prompt - first)
        none_R = np.zeros(config.ranks, np.int64)
        chunk = StepState(none_R, none_R, none_R, np.array([0]), np.array([first]), np.array([count]))
        seconds += costs.step_time(chunk).total_s
        first += count
    return seconds


def _row_s(costs: StepCosts, config: InstanceConfig, context: int) -> float:
    """Of each token, if all drafts are right."""
    rows_R = np.zeros(config.ranks, np.int64)
    rows_R[0] = 1
    state = StepState(rows_R, rows_R * context, rows_R * config.num_speculative_tokens, NO_CHUNKS, NO_CHUNKS, NO_CHUNKS)
    return costs.step_time(state).total_s / config.tokens_per_row
