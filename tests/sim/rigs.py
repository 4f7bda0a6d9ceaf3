"""Small priced simulations for tests: a deployment, a machine, a workload."""

from dataclasses import replace
from typing import Any

from tripool.core.deployment import CacheConfig, Deployment, GatewayConfig, InstanceConfig
from tripool.sim.outcome import Slo, outcome
from tripool.sim.pricing import LinearCosts, Plane, Planes
from tripool.sim.requests import Workload
from tripool.sim.simulation import Rig, Simulation
from tripool.sim.synthetic import SyntheticWork

PLANES = Planes({"ub": Plane(100e9, 2e-6), "rdma": Plane(25e9, 5e-6), "vpc": Plane(5e9, 100e-6)}, "rdma", "ub", "vpc")
COSTS = LinearCosts(step_s=0.010, row_s=100e-6, context_token_s=20e-9, chunk_token_s=50e-6)
RIG = Rig({"prefill": COSTS, "decode": COSTS, "hybrid": COSTS}, PLANES, token_bytes=70_000, acceptance=(0.7, 0.5))

PREFILL = InstanceConfig(count=2, max_num_seqs=16, max_num_batched_tokens=4096, cache_tokens=100_000)
DECODE = InstanceConfig(count=2, max_num_seqs=32, max_num_batched_tokens=1024, cache_tokens=100_000)
HYBRID = InstanceConfig(count=2, max_num_seqs=32, max_num_batched_tokens=2048, cache_tokens=100_000)
NONE = InstanceConfig()

WORK = SyntheticWork(20.0, 4.0, prompt_tokens=1500, output_tokens=60, spread=0.6, num_prefixes=3, prefix_tokens=512,
                     share=0.6)


def deployment(*, prefill: InstanceConfig = PREFILL, decode: InstanceConfig = DECODE, hybrid: InstanceConfig = NONE,
               **more: Any) -> Deployment:
    settings = dict(cache=CacheConfig(count=2, bytes=20 << 30), block_tokens=128,
                    gateway=GatewayConfig(max_queued_requests=10_000, max_queued_tokens=10**9))
    return Deployment(prefill=prefill, decode=decode, hybrid=hybrid, **{**settings, **more})


def simulate(made: Deployment | None = None, work: Workload | SyntheticWork = WORK, *, rig: Rig = RIG,
             until_s: float | None = None, seed: int = 1, **more: Any) -> Simulation:
    """A run to its end, after which nobody holds anything (unless it was cut short)."""
    workload = work.draw(seed) if isinstance(work, SyntheticWork) else work
    simulation = Simulation(made or deployment(), workload, rig, seed=seed, **more)
    simulation.run(until_s=until_s)
    if until_s is None:
        simulation.host.run_until(simulation.host.now + 15.0)
        for member, instance in simulation.instances.items():
            instance.scheduler.check_invariants()
            assert instance.scheduler.is_idle, f"{member} is not idle"
            assert instance.plane.num_rows == 0, f"{member} has rows"
        simulation.gateway.check_invariants()
        simulation.router.check_invariants()
    return simulation


def figures(simulation: Simulation, slo: Slo | None = None) -> dict[str, Any]:
    return outcome(simulation, slo or Slo())


def but(config: InstanceConfig, **changes: Any) -> InstanceConfig:
    return replace(config, **changes)
