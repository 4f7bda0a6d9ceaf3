"""The paper's decode instance (section 4.1) in the simulator: 320 ranks, one expert slot each, in 58 MoE layers."""

import random
from array import array

import pytest

from tests.sim.builders import deployment
from tripool.control.balance import max_over_mean
from tripool.core.deployment import InstanceConfig
from tripool.core.messages import Ran
from tripool.core.placement import Placement
from tripool.sim.cluster import SimCluster, Sizes
from tripool.sim.dataplane import ToyPrice
from tripool.sim.experts import ToyMixture
from tripool.sim.host import SimHost
from tripool.sim.workload import SyntheticLoad

NUM_LAYERS, NUM_RANKS = 58, 320
DECODE = InstanceConfig(count=1, ranks=NUM_RANKS, exchange="collective", redundant_experts=32, shared_expert_copies=32,
                        rebalance_steps=6, max_num_seqs=4)
PREFILL = InstanceConfig(count=1, max_num_seqs=64, max_num_batched_tokens=4096)
MIXTURE = ToyMixture(NUM_LAYERS, num_routed=256, num_picks=8, expert_bytes=44 << 20)
PRICE = ToyPrice(step_s=0.02, decode_row_s=1e-4, chunk_token_s=1e-6, move_bytes_per_s=20e9)


class Counts:
    """What the decode instance reported of its experts, all together."""

    def __init__(self) -> None:
        self.loads = [0] * (NUM_LAYERS * 257)

    def watch(self, address, message, sends, now):
        if address == "decode-0" and isinstance(message, Ran) and message.result.expert_counts:
            counts = array("i", message.result.expert_counts)
            self.loads = [one + more for one, more in zip(self.loads, counts, strict=True)]

    def imbalance(self, placement: Placement) -> list[float]:
        """Of each layer the load of the busiest rank over the mean."""
        rank_of = placement.rank_of_slots()
        return [max_over_mean(experts, self.loads[257 * layer:257 * (layer + 1)], rank_of, [True] * NUM_RANKS)
                for layer, experts in enumerate(placement.layers)]


@pytest.mark.timeout(900)          # about fifteen seconds of one core, but the machine may be shared by many
def test_320_ranks_balance_their_experts_while_they_serve_and_outlive_the_loss_of_one():
    counts = Counts()
    host = SimHost(watch=counts.watch)
    made = SimCluster(host, deployment(prefill=PREFILL, decode=DECODE, hybrid=0), Sizes(4000, 60, 1), mixture=MIXTURE,
                      price=PRICE)
    made.start_all()
    load = SyntheticLoad(300, 600.0, prompt_tokens=(4, 40), output_tokens=(200, 240), stop=0.0)
    made.submit(load.arrivals(random.Random(1)))
    plane, scheduler = made.planes["decode-0"], made.schedulers["decode-0"]
    host.run_until(1.0)
    made.lose_rank("decode-0", 7)
    host.run_until(1.2)
    rebalancer = scheduler.rebalancer
    assert scheduler.lost_ranks == [7] and rebalancer.runnable and plane.num_steps_given_up == 1
    made.return_rank("decode-0", 7)

    assert host.run_while(lambda: made.client.num_open > 0, end_s=100.0)
    host.run_until(host.now + 5.0)
    made.check_idle()

    before, after = counts.imbalance(plane.experts.first), counts.imbalance(rebalancer.placement)
    assert sum(before) / NUM_LAYERS > 10.0 and max(before) > 15.0
    assert sum(after) / NUM_LAYERS < 2.5 and max(after) < 3.0
    assert rebalancer.figures().num_failures == 0 and plane.experts.num_moved > 1000
    assert made.wrongs == [] and made.gateway.stats.failed == {}
    assert sum(made.gateway.stats.retried.values()) <= DECODE.max_num_seqs      # those of the lost rank
