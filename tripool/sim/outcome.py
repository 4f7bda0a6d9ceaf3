"""What came of a simulation, in figures: latencies, goodput, use of every pool and plane, caches, and what it costs.

Definitions: TTFT is from sending a request to its first token, at the client; TPOT the mean time between the tokens of
one request after the first; ITL each single gap between two outputs of a request (with drafts one output may have
several tokens); E2E from sending to the end. Requests that were refused or failed have no latencies, and count against
goodput. Every figure is simulated. Corrections in the prices are listed by name; those of the simulation itself too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tripool.core.messages import Role
from tripool.sim.fabric import LEAST_SHARE
from tripool.sim.pricing import CONTEXT_BITS
from tripool.sim.simulation import WARM_UP_S, Instance, Sample, Simulation
from tripool.sim.users import Journey

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to be good; None: it does not matter."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def is_kept_by(self, journey: Journey) -> bool:
        """Whether a request was served, and in time."""
        if not journey.is_served or (self.ttft_s is not None and journey.ttft_s > self.ttft_s):
            return False
        tpot_s = journey.tpot_s
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s


def outcome(simulation: Simulation, slo: Slo) -> dict[str, Any]:
    """All figures, as JSON. Keys say their units; the order is fixed."""
    journeys = simulation.users.journeys
    served = [each for each in journeys if each.is_served]
    duration_s = _duration_s(simulation)
    figures: dict[str, Any] = _rounded({
        "kind": "simulated",
        "workload": {
            "source": simulation.workload.source, "requests": len(simulation.workload.requests),
            "prompt_tokens": simulation.workload.num_prompt_tokens,
            "output_tokens": simulation.workload.num_output_tokens, "span_s": simulation.workload.span_s,
            "concurrency": simulation.concurrency or None},
        "seed": simulation.seed,
        "failures": [str(each) for each in simulation.struck],
        "duration_s": duration_s,
        "requests": _requests(simulation, served),
        "latency": latencies(simulation, served),
        "goodput": _goodput(journeys, slo, duration_s),
        "throughput": _throughput(served, duration_s),
        "pools": {role: _pool(simulation, role, duration_s) for role in simulation.num_blocks},
        "planes": {name: _plane(simulation, name, duration_s) for name in simulation.world.fabric.wires},
        "cache": _cache(simulation),
        **_roles(simulation),
        "drafts": _drafts(simulation),
        "experts": {member: _experts(instance) for member, instance in simulation.instances.items()
                    if instance.plane.experts is not None},
        "step_parts": {role: [{"part": name, "level": level, "seconds": seconds}
                              for (name, level), seconds in simulation.prices[role].parts().items()]
                       for role in simulation.num_blocks},
        "cost": _cost(simulation, served, duration_s),
        "factors": {"simulation.context_rounding": 2.0**-CONTEXT_BITS / 2, **_links_met(simulation),
                    **dict(simulation.rig.factors)},
        "distribution": _distribution(simulation, served),
        "timeline": _timeline(simulation),
    })
    return figures


def _duration_s(simulation: Simulation) -> float:
    """From the first moment at which a request could come to the last end, or to where the run was cut short."""
    ended_s = max((each.ended_s for each in simulation.users.journeys), default=WARM_UP_S)
    return (ended_s if simulation.users.is_done else simulation.host.now) - WARM_UP_S


def latencies(simulation: Simulation, served: Sequence[Journey]) -> dict[str, Any]:
    """TTFT, TPOT, ITL and E2E."""
    gaps = simulation.world.gaps
    itl: dict[str, Any] = {"count": gaps.num_gaps}
    if gaps.num_gaps:
        itl |= {"mean": gaps.mean_s, **{f"p{each}": gaps.quantile_s(each / 100) for each in PERCENTILES}}
    return {"ttft_s": _spread(each.ttft_s for each in served),
            "tpot_s": _spread(each.tpot_s for each in served if each.tpot_s is not None),
            "itl_s": itl,
            "e2e_s": _spread(each.e2e_s for each in served)}


def _distribution(simulation: Simulation, served: Sequence[Journey]) -> dict[str, Any]:
    """What 0, 1, 2, ... 100 % of the requests (of the gaps, for ITL) do not exceed."""
    values = {"ttft_s": [each.ttft_s for each in served],
              "tpot_s": [each.tpot_s for each in served if each.tpot_s is not None],
              "e2e_s": [each.e2e_s for each in served]}
    lines: dict[str, Any] = {name: np.quantile(each, np.linspace(0, 1, 101), method="inverted_cdf").tolist()
                             for name, each in values.items() if each}
    if simulation.world.gaps.num_gaps:
        lines["itl_s"] = [simulation.world.gaps.quantile_s(part / 100) for part in range(101)]
    return lines


def _requests(simulation: Simulation, served: Sequence[Journey]) -> dict[str, Any]:
    journeys, stats = simulation.users.journeys, simulation.gateway.stats
    causes: dict[str, int] = {}
    for each in journeys:
        if each.error:
            cause = f"{each.status}: {each.error}"
            causes[cause] = causes.get(cause, 0) + 1
    return {"sent": len(journeys), "served": len(served), "unfinished": simulation.users.num_open,
            "failed": dict(sorted(stats.failed.items())), "retried": dict(sorted(stats.retried.items())),
            "causes": dict(sorted(causes.items(), key=lambda item: (-item[1], item[0]))[:10])}


def _goodput(journeys: Sequence[Journey], slo: Slo, duration_s: float) -> dict[str, Any]:
    good = [each for each in journeys if slo.is_kept_by(each)]
    late = [each for each in journeys if each.is_served and slo.ttft_s is not None and each.ttft_s > slo.ttft_s]
    slow = [each for each in journeys if each.is_served and slo.tpot_s is not None and (each.tpot_s or 0) > slo.tpot_s]
    return {"slo_ttft_s": slo.ttft_s, "slo_tpot_s": slo.tpot_s, "requests": len(good),
            "share": len(good) / len(journeys) if journeys else None,
            "requests_per_s": len(good) / duration_s if duration_s else 0.0,
            "output_tokens_per_s": sum(each.num_tokens for each in good) / duration_s if duration_s else 0.0,
            "late_first_token": len(late), "slow_tokens": len(slow)}


def _throughput(served: Sequence[Journey], duration_s: float) -> dict[str, Any]:
    seconds = duration_s or 1.0
    prompt, output = sum(each.num_prompt for each in served), sum(each.num_tokens for each in served)
    return {"requests_per_s": len(served) / seconds, "prompt_tokens_per_s": prompt / seconds,
            "output_tokens_per_s": output / seconds, "total_tokens_per_s": (prompt + output) / seconds}


def _pool(simulation: Simulation, role: Role, duration_s: float) -> dict[str, Any]:
    """Utilisation is time in steps over time; a rank that waits for the busiest of its instance counts as used. An
    instance that changes its role counts in the pool in which it began."""
    config = getattr(simulation.deployment, role)
    lives = [instance for each, instance in simulation.lives() if each == role]
    now = simulation.host.now
    busy_s = sum(instance.plane.busy_s(now) for instance in lives)
    planes, stats = [each.plane for each in lives], [each.scheduler.stats for each in lives]
    peak = max((sample.num_rows[role] for sample in simulation.samples), default=0)
    return {"instances": config.count, "ranks": config.ranks, "npus": _npus(simulation, role),
            "cache_tokens_per_rank": simulation.num_blocks[role] * simulation.deployment.block_tokens,
            "utilisation": busy_s / (duration_s * config.count) if duration_s else 0.0,
            "steps": sum(each.num_steps for each in planes),
            "mean_step_s": busy_s / sum(each.num_steps for each in planes) if any(p.num_steps for p in planes) else 0.0,
            "chunk_tokens": sum(each.num_chunk_tokens for each in planes),
            "decode_tokens": sum(each.num_decode_tokens for each in planes),
            "most_rows": peak,
            "stepped_back": sum(each.preemptions for each in stats),
            "aborted_steps": sum(each.aborted_steps for each in stats)}


def _plane(simulation: Simulation, name: str, duration_s: float) -> dict[str, Any]:
    """Utilisation is of the endpoints that the plane has here, all together."""
    fabric = simulation.world.fabric
    wire = fabric.wires[name]
    ends = _num_endpoints(simulation, name)
    moved = fabric.moved_bytes(name, simulation.host.now)
    room = wire.bytes_per_s * ends * duration_s
    carries = [what for what in ("pull", "pool", "control") if getattr(fabric.planes, what) == name]
    return {"carries": carries, "level": fabric.planes.planes[name].level, "bytes": moved, "transfers": wire.num_flows,
            "utilisation": 2 * moved / room if room else 0.0,          # a byte leaves one endpoint and enters another
            "busiest_second_utilisation": _busiest(simulation.samples, name, wire.bytes_per_s * ends)}


def _num_endpoints(simulation: Simulation, name: str) -> int:
    """Ranks, and cache servers where the plane reaches them."""
    deployment = simulation.deployment
    configs = [getattr(deployment, role) for role in simulation.num_blocks]
    ranks: int = sum(config.count * config.ranks for config in configs)
    return ranks + (deployment.cache.count if name == simulation.rig.planes.pool else 0)


def _busiest(samples: Sequence[Sample], name: str, bytes_per_s: float) -> float:
    most = 0.0
    for before, after in pairwise(samples):
        seconds = after.at_s - before.at_s
        if seconds > 0:
            most = max(most, 2 * (after.moved_bytes[name] - before.moved_bytes[name]) / seconds / bytes_per_s)
    return most


def _cache(simulation: Simulation) -> dict[str, Any]:
    """Prompt tokens by where their context came from. What was prefilled again after a failure counts again."""
    stats = [instance.scheduler.stats for role, instance in simulation.lives()
             if role != "decode" or simulation.deployment.scaling.enabled]
    local, pool = sum(each.local_hit_tokens for each in stats), sum(each.pool_hit_tokens for each in stats)
    computed = sum(each.computed_tokens for each in stats)
    total = local + pool + computed
    return {"instance_hit_tokens": local, "pool_hit_tokens": pool, "computed_tokens": computed,
            "instance_hit_share": local / total if total else 0.0, "pool_hit_share": pool / total if total else 0.0,
            "pool_servers": simulation.deployment.cache.count,
            "pool_server_blocks": simulation.world.servers.server_blocks,
            "pool_blocks": simulation.world.servers.num_blocks,
            "pool_evicted_blocks": simulation.world.servers.num_evicted,
            "failed_fetches": sum(each.fetches_failed for each in stats)}


def _roles(simulation: Simulation) -> dict[str, Any]:
    """Changes of roles, where there may be any."""
    if not simulation.deployment.scaling.enabled:
        return {}
    stats = simulation.scaling.stats
    return {"roles": {"changes": {f"to {role}": count for role, count in sorted(stats.changes.items())},
                      "withdrawn": stats.withdrawn}}


def _drafts(simulation: Simulation) -> dict[str, Any]:
    planes = [instance.plane for _, instance in simulation.lives()]
    drafted, accepted = sum(each.num_drafted for each in planes), sum(each.num_accepted for each in planes)
    return {"assumed_acceptance": list(simulation.rig.acceptance), "drafted": drafted, "accepted": accepted,
            "accepted_share": accepted / drafted if drafted else 0.0}


def _experts(instance: Instance) -> dict[str, Any]:
    """How evenly experts fell on the ranks of one instance: `busiest` is the busiest rank over the mean, by layer.

    `in_steps` is what steps waited for, mean over layers; `first` and `now` are with what is asked for long, in the
    places of the beginning and of the end; `before` and `after` are the rebalancer's own view, from what it was told.
    """
    experts, rebalancer = instance.plane.experts, instance.scheduler.rebalancer
    assert experts is not None, "asked only where experts are simulated"
    told: dict[str, Any] = {"in_steps": experts.sum_busiest / experts.num_priced if experts.num_priced else None}
    busiest = {"first": experts.imbalance(experts.first), "now": experts.imbalance()}
    if rebalancer is not None:
        figures = rebalancer.figures()
        busiest |= {"before": list(figures.before), "after": list(figures.after)}
        told |= {"map_version": figures.version, "layers_looked_at": figures.num_planned,
                 "layers_changed": figures.num_changed, "layers_not_worth_it": figures.num_gated,
                 "experts_moved": figures.num_moves, "moved_bytes": figures.moved_bytes,
                 "lost_ranks": list(figures.lost_ranks), "failures": figures.num_failures, "cause": figures.cause}
    return {**told, **{f"busiest_{name}": sum(each) / len(each) for name, each in busiest.items()}, "layers": busiest}


def _links_met(simulation: Simulation) -> dict[str, float]:
    """Where transfers meet the exchange of steps on one plane: by a fair share of each link, the smallest left out."""
    return {"simulation.least_link_share": LEAST_SHARE} if simulation.rig.met_links else {}


def _npus(simulation: Simulation, role: Role) -> float:
    config = getattr(simulation.deployment, role)
    npus: float = config.count * config.ranks * simulation.rig.npus_per_rank
    return npus


def _cost(simulation: Simulation, served: Sequence[Journey], duration_s: float) -> dict[str, Any]:
    """Input is paid with prefill, output with decode NPUs; a hybrid's are divided by its time in chunks and rows.
    Where a step has both, rows take what they would alone, and chunks what they add."""
    npus = {role: _npus(simulation, role) for role in simulation.num_blocks}
    price = simulation.rig.npu_hour_price
    figures: dict[str, Any] = {"npus": sum(npus.values()), "npu_hours": sum(npus.values()) * duration_s / 3600,
                               "npu_hour_price": price or None, "currency": simulation.rig.currency}
    prompt, output = sum(each.num_prompt for each in served), sum(each.num_tokens for each in served)
    hybrid_share = _chunk_share(simulation)
    hybrid = npus.get("hybrid", 0.0)
    spent = {"input": (npus.get("prefill", 0.0) + hybrid * hybrid_share, prompt),
             "output": (npus.get("decode", 0.0) + hybrid * (1 - hybrid_share), output),
             "total": (sum(npus.values()), prompt + output)}
    for name, (count, tokens) in spent.items():
        hours = count * duration_s / 3600
        figures[f"npu_hours_per_million_{name}_tokens"] = hours / tokens * 1e6 if tokens else None
        figures[f"per_million_{name}_tokens"] = hours * price / tokens * 1e6 if tokens and price else None
    return figures


def _chunk_share(simulation: Simulation) -> float:
    """Part of the time that hybrids spent in steps which went to prompts."""
    planes, now = [instance.plane for role, instance in simulation.lives() if role == "hybrid"], simulation.host.now
    busy_s = sum(each.busy_s(now) for each in planes)
    return sum(each.chunk_s for each in planes) / busy_s if busy_s else 0.0


def _timeline(simulation: Simulation) -> dict[str, Any]:
    """Between one sample and the next."""
    samples, wires = simulation.samples, simulation.world.fabric.wires
    spans = [(before, after) for before, after in pairwise(samples) if after.at_s > before.at_s]
    lines: dict[str, Any] = {"at_s": [after.at_s for _, after in spans]}
    for role in simulation.num_blocks:
        count = getattr(simulation.deployment, role).count
        lines[f"{role}_utilisation"] = [
            round((after.busy_s[role] - before.busy_s[role]) / (after.at_s - before.at_s) / count, 6)
            for before, after in spans]
        lines[f"{role}_rows"] = [after.num_rows[role] for _, after in spans]
        if simulation.deployment.scaling.enabled:
            lines[f"{role}_instances"] = [after.num_instances[role] for _, after in spans]
    for phase in ("placing", "prefill", "handover", "retrying"):
        lines[f"requests_{phase}"] = [after.num_open[phase] for _, after in spans]
    lines["requests_decode"] = [after.num_open["admitted"] + after.num_open["decode"] for _, after in spans]
    for name, wire in wires.items():
        lines[f"plane_{name}_utilisation"] = [
            round(2 * (after.moved_bytes[name] - before.moved_bytes[name]) / (after.at_s - before.at_s)
                  / (wire.bytes_per_s * _num_endpoints(simulation, name)), 6) for before, after in spans]
    for role in simulation.rig.experts:
        lines[f"{role}_busiest"] = _means((before.busiest[role], after.busiest[role]) for before, after in spans)
    lines["pool_blocks"] = [after.pool_blocks for _, after in spans]
    return lines


def _means(sums: Iterable[tuple[tuple[float, int], tuple[float, int]]]) -> list[float]:
    """Of what was added between one sum and another; where nothing was, as before."""
    means, last = [], 0.0
    for (total, count), (later, more) in sums:
        last = (later - total) / (more - count) if more > count else last
        means.append(last)
    return means


def _spread(values: Iterable[float]) -> dict[str, Any]:
    """Mean and percentiles (nearest rank), of nothing nothing."""
    ordered = np.sort(np.array(list(values)))
    if not len(ordered):
        return {"count": 0}
    picks = {f"p{each}": float(ordered[min(len(ordered) - 1, -(-len(ordered) * each // 100) - 1)])
             for each in PERCENTILES}
    return {"count": len(ordered), "mean": float(ordered.mean()), **picks}


def _rounded(value: Any) -> Any:
    """Nine significant digits: what lies beyond is rounding, not simulation."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
