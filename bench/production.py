"""What would the simulator have said of xDeepServe's production service, whose TTFT and TPOT were kept back?

arXiv 2508.02520, section 7.2: four prefill instances of 32 dies and one decode instance of 128; prompts of 13,000
tokens on average (0 to 64K) and answers of 2,100; one draft, 90 % of them right; a cache of eight bits. TTFT 900 ms
and TPOT 34.8 ms are averages. Neither load nor batch is published, and without them nothing follows; assumed here,
before anything was run: requests come at random and so many that the prefill pool is 70 % busy; lengths are log-normal
with a spread of 0.9. Attention of prefill is the paper's SP-TP-SP, where xDeepServe has eight groups of four dies.

Scored once, when everything else was final; nothing was fitted to it before, and nothing is after.

    make bench NAME=production ARGS='--json out/production.json'
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common import Report, flags
from tripool.core.deployment import Deployment, GatewayConfig, InstanceConfig
from tripool.sim.costs.deployment import PAPER
from tripool.sim.costs.models import read_shape
from tripool.sim.costs.residuals import fitted_residuals
from tripool.sim.hardware.description import read_hardware
from tripool.sim.machine import rig_of
from tripool.sim.outcome import Slo, outcome
from tripool.sim.reproduce.settings import INT8_CACHE
from tripool.sim.simulation import Simulation
from tripool.sim.synthetic import SyntheticWork

QUESTION = __doc__.splitlines()[0]
PUBLISHED_TTFT_MS, PUBLISHED_TPOT_MS, VERSION = 900.0, 34.8, "arXiv 2508.02520, section 7.2"
BUSY = 0.7
DEPLOYMENT = Deployment(
    gateway=GatewayConfig(max_queued_requests=1_000_000, max_queued_tokens=10**12, place_deadline_s=600.0,
                          prefill_deadline_s=600.0),
    block_tokens=128, heartbeat_s=1.0,
    prefill=InstanceConfig(count=4, ranks=32, redundant_experts=32, expert_nodes=2, max_num_seqs=8,
                           max_num_batched_tokens=8192, microbatches=True),
    decode=InstanceConfig(count=1, ranks=128, max_num_seqs=60, num_speculative_tokens=1, enable_prefix_caching=False,
                          microbatches=True))


def simulated(rate: float, seconds: float) -> dict[str, Any]:
    """The service at so many requests per second."""
    work = SyntheticWork(seconds, rate, prompt_tokens=13_000, output_tokens=2_100, spread=0.9).draw(0)
    rig = rig_of(DEPLOYMENT, read_shape("deepseek-r1"), read_hardware("cloudmatrix384"),
                 style=replace(PAPER, numbers=INT8_CACHE), residuals=fitted_residuals(), acceptance=(0.9,))
    simulation = Simulation(DEPLOYMENT, work, rig)
    simulation.run(until_s=seconds)
    return outcome(simulation, Slo(2.0, 0.035))


def main() -> None:
    args = flags(QUESTION).parse_args()
    seconds = 60.0 if args.quick else 400.0
    low, high = 1.0, 64.0                  # requests per second, between which the pool is as busy as assumed
    while high / low > 1.1:
        rate = (low * high) ** 0.5
        if simulated(rate, seconds / 8)["pools"]["prefill"]["utilisation"] < BUSY:
            low = rate
        else:
            high = rate
    told = simulated(low, seconds)
    report = Report(QUESTION, {"requests_per_s": low, "prefill_busy": told["pools"]["prefill"]["utilisation"],
                               "assumed_prefill_busy": BUSY, "workload": told["workload"], "factors": told["factors"]})
    for name, key, published in (("ttft_ms", "ttft_s", PUBLISHED_TTFT_MS), ("tpot_ms", "tpot_s", PUBLISHED_TPOT_MS)):
        ours = told["latency"][key]["mean"] * 1e3
        report.figure(f"production.{name}", ours, "ms", "simulated")
        report.figure(f"production.{name}_published", published, "ms", "published", version=VERSION)
        report.figure(f"production.{name}_error", ours / published - 1, "", "derived")
    report.write(args.json)


if __name__ == "__main__":
    main()
