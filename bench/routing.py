"""From which bandwidth of the pool on is routing that knows no caches as good as routing that follows them?

The paper's claim (section 4.1): with context in a pool that every die reads at the same speed, any instance can serve
any request, and requests go where there is least to do. The other way, as Dynamo and SGLang route, is to keep context
where it was computed and to send a request to the instance that holds most of its prompt, unless that is too busy.

Both serve the same requests on the same machine: the production router beside a pool whose bandwidth (per die, all in
all, software included) goes from 1 to 196 GB/s, and a router that follows caches, without a pool. A prefill instance
of 32 dies is one cache here: what one of its dies holds all can use, which is the best case for following caches
(schedulers of today choose a die without looking). A prompt's context is read by one die. Goodput is the rate of
requests that keep both goals. The crossover is where the first is at least as good as the second, between two
bandwidths by logarithm; 0 says that it always is. The paper's own pool comes to 1.8 GB/s per die, by `tripool
reproduce`.

    make bench NAME=routing ARGS='--trace mooncake_conversation_trace.jsonl --plot docs/tour/routing.svg --json -'
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common import Report, flags, writable
from tripool.cli.simulate_page import plot
from tripool.control.router import Attempt, Member, Router
from tripool.core.deployment import CacheConfig, Deployment, GatewayConfig, InstanceConfig
from tripool.core.machine import Address
from tripool.sim.costs.models import read_shape
from tripool.sim.costs.residuals import fitted_residuals
from tripool.sim.costs.state import Breakdown, StepCosts, StepState
from tripool.sim.hardware.description import read_hardware
from tripool.sim.machine import rig_of
from tripool.sim.outcome import Slo, outcome
from tripool.sim.pricing import PoolEnds
from tripool.sim.requests import Workload
from tripool.sim.simulation import Rig, Simulation
from tripool.sim.synthetic import SyntheticWork
from tripool.sim.traces import read_workload

QUESTION = __doc__.splitlines()[0]
BANDWIDTHS_GBPS = (1.0, 2.0, 4.0, 8.0, 16.0, 48.0, 196.0)
GOALS = Slo(ttft_s=3.0, tpot_s=0.05)
NUM_PREFILLS, DIES = 4, 32
PREFILL = InstanceConfig(count=NUM_PREFILLS, ranks=DIES, redundant_experts=32, expert_nodes=2)
DECODE = InstanceConfig(count=1, ranks=160, redundant_experts=64, max_num_seqs=64, enable_prefix_caching=False)
WHOLE = InstanceConfig(count=NUM_PREFILLS, max_num_seqs=256, max_num_batched_tokens=65536)
NO_CAPS = GatewayConfig(max_queued_requests=1_000_000, max_queued_tokens=10**12, place_deadline_s=600.0,
                        prefill_deadline_s=600.0)
POOL = CacheConfig(count=16, bytes=512 << 30, fetch_deadline_s=60.0, store_deadline_s=60.0)


class FollowingRouter(Router):
    """Sends a request where most of its prompt was computed before, weighed against what waits there.

    What an instance holds is reckoned as Dynamo's router does without events: what was sent there, as much as fits.
    """

    def __init__(self, config: GatewayConfig, workload: Workload, instance_tokens: int) -> None:
        super().__init__(config)
        self._workload, self._instance_tokens = workload, instance_tokens
        self._held: dict[Address, OrderedDict[int, int]] = {}
        self._num_held: dict[Address, int] = {}

    def _prefill_cost(self, member: Member, entry: Attempt) -> tuple[Any, ...]:  # type: ignore[override]
        missing = entry.num_tokens - self._num_known(member.name, entry)
        return (member.name == entry.avoid, member.is_short_for(entry.num_tokens), member.queued_tokens + missing,
                member.num_prefilling + member.num_decoding, member.name)

    def _put(self, entry: Attempt, member: Member) -> list[Any]:
        if entry.stage == "prefill":
            held = self._held.setdefault(member.name, OrderedDict())
            total = self._num_held.get(member.name, 0)
            for name, count in self._workload.requests[entry.request_id - 1].parts:
                total += count - held.pop(name, 0)
                held[name] = count
            while total > self._instance_tokens:
                total -= held.popitem(last=False)[1]
            self._num_held[member.name] = total
        return super()._put(entry, member)

    def _num_known(self, name: Address, entry: Attempt) -> int:
        """Leading tokens of the prompt that were sent there before."""
        held, known = self._held.get(name, {}), 0
        for part, count in self._workload.requests[entry.request_id - 1].parts:
            if part not in held:
                break
            known += count
        return known


class WholeInstance:
    """Prices steps of an instance that is one rank to its scheduler, as those of its dies. Fulfils `StepCosts`."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs

    def step_time(self, state: StepState) -> Breakdown:
        """Its dies compute each prompt together (section 4.3.1); rows are divided among them."""
        shares = [np.full(DIES, -(-int(total[0]) // DIES)) for total in (state.rows_R, state.context_R, state.drafts_R)]
        return self._costs.step_time(StepState(*shares, np.arange(len(state.chunk_tokens_C)) % DIES,
                                               state.chunk_first_C, state.chunk_tokens_C))


def rig_for(deployment: Deployment, pool_gbps: float) -> Rig:
    """Experts are priced where they begin, and not moved: they are the same for both routers."""
    rig = rig_of(deployment, read_shape("deepseek-r1"), read_hardware("cloudmatrix384"), residuals=fitted_residuals())
    die = pool_gbps * 1e9
    pool = replace(rig.planes.planes[rig.planes.pool], flow_bytes_per_s=die)
    planes = replace(rig.planes, planes={**rig.planes.planes, rig.planes.pool: pool},
                     pool_ends=PoolEnds(DIES * die, NUM_PREFILLS * DIES * die))
    return replace(rig, costs={**rig.costs, "prefill": WholeInstance(rig.costs["prefill"])}, planes=planes, experts={},
                   cache_tokens={**rig.cache_tokens, "prefill": DIES * rig.cache_tokens["prefill"]},
                   links={})           # one rank stands for all dies of an instance, and its link is not that of a die


def run(work: Workload, pool_gbps: float | None) -> dict[str, Any]:
    """One simulation; without a bandwidth, the router follows caches and there is no pool."""
    described = Deployment(prefill=PREFILL, decode=DECODE, gateway=NO_CAPS, block_tokens=512, heartbeat_s=1.0,
                           cache=CacheConfig() if pool_gbps is None else POOL)
    deployment = replace(described, prefill=WHOLE)
    simulation = Simulation(deployment, work, rig_for(described, pool_gbps or 1.0))
    if pool_gbps is None:
        room = simulation.num_blocks["prefill"] * deployment.block_tokens
        simulation.router = FollowingRouter(deployment.gateway, work, room)
        simulation.host.add("gateway/router", simulation.router)
    simulation.run()
    return outcome(simulation, GOALS)


def crossover(bandwidths: tuple[float, ...], goodputs: list[float], goal: float) -> float | None:
    """The first bandwidth that is enough; None: none is."""
    for index, (gbps, goodput) in enumerate(zip(bandwidths, goodputs, strict=True)):
        if goodput >= goal:
            if not index:
                return 0.0
            before, less = bandwidths[index - 1], goodputs[index - 1]
            part = (goal - less) / (goodput - less) if goodput > less else 1.0
            return before * (gbps / before) ** part
    return None


def main() -> None:
    parser = flags(QUESTION)
    parser.add_argument("--trace", metavar="FILE", help="a Mooncake trace; a made-up workload if not given")
    parser.add_argument("--limit", type=int, default=2000, help="only the first requests of it")
    parser.add_argument("--speed-up", type=float, default=3.0, help="let them come so many times as fast")
    parser.add_argument("--plot", type=writable, metavar="FILE", help="goodput over bandwidth, as SVG")
    args = parser.parse_args()
    if args.trace:
        work = read_workload(Path(args.trace), limit=args.limit // 10 if args.quick else args.limit)
    else:
        work = SyntheticWork(12.0 if args.quick else 120.0, 5.0, prompt_tokens=12288, output_tokens=200, spread=0.3,
                             num_prefixes=30, prefix_tokens=8192, share=0.7).draw(1)
    work = work.faster(args.speed_up)
    bandwidths = BANDWIDTHS_GBPS[::3] if args.quick else BANDWIDTHS_GBPS
    follows = run(work, None)
    pooled = [run(work, each) for each in bandwidths]
    goodputs = [each["goodput"]["requests_per_s"] for each in pooled]
    goal = follows["goodput"]["requests_per_s"]
    at_gbps = crossover(bandwidths, goodputs, goal)
    report = Report(QUESTION, {
        "workload": follows["workload"], "speed_up": args.speed_up, "slo_ttft_s": GOALS.ttft_s,
        "slo_tpot_s": GOALS.tpot_s, "hardware": "cloudmatrix384", "model": "deepseek-r1", "prefills": NUM_PREFILLS,
        "bandwidths_gbps": list(bandwidths)})
    report.figure("routing.crossover_gbps", -1.0 if at_gbps is None else at_gbps, "GB/s", "simulated",
                  samples=goodputs, note="-1: not within the range")
    report.figure("routing.following_goodput", goal, "requests/s", "simulated")
    for name, told in (("following", follows), *((f"pool_{gbps:g}", each) for gbps, each in
                                                 zip(bandwidths, pooled, strict=True))):
        cache = told["cache"]
        report.figure(f"routing.ttft_p50_ms_{name}", told["latency"]["ttft_s"]["p50"] * 1e3, "ms", "simulated",
                      goodput_share=told["goodput"]["share"], ttft_p90_s=told["latency"]["ttft_s"]["p90"],
                      from_instance=cache["instance_hit_share"], from_pool=cache["pool_hit_share"])
    report.write(args.json)
    if args.plot:
        lines = {"any instance, context from the pool": list(zip(bandwidths, goodputs, strict=True)),
                 "follow the caches, no pool": [(each, goal) for each in bandwidths]}
        drawn = plot("Goodput by the pool's bandwidth", lines, "GB/s per die", "requests/s", logarithmic=True)
        Path(args.plot).write_text(drawn + "\n")


if __name__ == "__main__":
    main()
