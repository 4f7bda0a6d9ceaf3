"""Simulated deployments for tests: a handful of members, a load, and what came of it."""

import random

from tripool.core.deployment import CacheConfig, Deployment, GatewayConfig, InstanceConfig
from tripool.sim.cluster import SimCluster, Sizes
from tripool.sim.dataplane import ToyPrice
from tripool.sim.host import SimHost
from tripool.sim.workload import SyntheticLoad

NO_CAPS = GatewayConfig(max_queued_requests=100_000, max_queued_tokens=10**9)


def deployment(*, prefill=2, decode=3, hybrid=1, **more) -> Deployment:
    """`prefill`, `decode` and `hybrid` are how many, or how exactly."""
    def instance(wanted: int | InstanceConfig) -> InstanceConfig:
        return wanted if isinstance(wanted, InstanceConfig) else InstanceConfig(count=wanted, max_num_seqs=64)

    settings = dict(gateway=NO_CAPS, prefill=instance(prefill), decode=instance(decode), hybrid=instance(hybrid),
                    cache=CacheConfig(count=1), block_tokens=16)
    return Deployment(**{**settings, **more})


def cluster(host: SimHost, *, sizes: Sizes | None = None, price: ToyPrice | None = None, **more) -> SimCluster:
    return SimCluster(host, deployment(**more), sizes or Sizes(600, 600, 600), price=price)


def run(made: SimCluster, load: SyntheticLoad, *, seed: int = 1, end_s: float = 1000.0) -> None:
    """Submit a load and run until every request has ended and nobody holds anything."""
    made.submit(load.arrivals(random.Random(seed)))
    made.start_all()
    assert made.host.run_while(lambda: made.client.num_open > 0, end_s=end_s), "some requests did not end"
    made.host.run_until(made.host.now + 5.0)
    assert made.wrongs == []
    made.check_idle()
