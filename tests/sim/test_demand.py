"""Experts of a simulated instance: they are asked unevenly, the production rebalancer moves them, steps get shorter."""

from array import array
from dataclasses import replace

import numpy as np
import pytest

from tests.sim.rigs import figures, simulate
from tripool.control.balance import max_over_mean
from tripool.core.deployment import CacheConfig, Deployment, InstanceConfig
from tripool.core.errors import ConfigError
from tripool.core.placement import Edit, MapChange, even_geometry, pack_edits
from tripool.core.plan import StepPlan
from tripool.sim.costs.deployment import PAPER
from tripool.sim.costs.models import read_shape
from tripool.sim.costs.residuals import Residuals
from tripool.sim.demand import Demand, ExpertModel, LiveExperts, Popularity
from tripool.sim.failures import parse_failure
from tripool.sim.hardware.description import read_hardware
from tripool.sim.machine import rig_of
from tripool.sim.synthetic import SyntheticWork

FEW_LAYERS = replace(read_shape("deepseek-r1"), num_layers=5, num_mtp_layers=0, first_dense_layers=2)
CM384 = read_hardware("cloudmatrix384")
PREFILL = InstanceConfig(count=1, ranks=8, max_num_batched_tokens=4096, cache_tokens=50_000)
DECODE = InstanceConfig(count=1, ranks=8, redundant_experts=64, max_num_seqs=64, rebalance_steps=40,
                        cache_tokens=50_000)
WORK = SyntheticWork(3.0, 30.0, prompt_tokens=256, output_tokens=60)

GEOMETRY = even_geometry(8, 16, num_redundant=8, num_shared_copies=2)
MODEL = ExpertModel(GEOMETRY, 3, 2, expert_bytes=1 << 20, seconds_per_token=1e-6, room_tokens=64,
                    move_bytes_per_s=1e9, plane="UB")


def live(spread: float = 1.0, skew: float = 0.0, seed: int = 1) -> LiveExperts:
    return LiveExperts("decode-0", MODEL, Demand(MODEL, Popularity(spread, 100.0, skew), seed), [], seed)


def run(decode=DECODE, *, work=WORK, failures=(), perfect=False, spread=1.0, run_deadline_s=120.0, **more):
    made = Deployment(prefill=PREFILL, decode=decode, cache=CacheConfig(), block_tokens=64,
                      run_deadline_s=run_deadline_s)
    rig = rig_of(made, FEW_LAYERS, CM384, expert_spread=spread, style=replace(PAPER, perfect_balance=perfect),
                 residuals=Residuals(expert_skew=0.5))
    return simulate(made, work, rig=rig, failures=tuple(map(parse_failure, failures)), **more)


# ---------------------------------------------------------------- what is asked


def test_the_same_seed_asks_for_the_same_experts_and_they_drift():
    one, same, other = (Demand(MODEL, Popularity(1.0, 100.0), seed) for seed in (1, 1, 2))
    first = one.lasting_LE.copy()

    assert np.array_equal(first, same.lasting_LE) and not np.array_equal(first, other.lasting_LE)
    one.at(2.0)
    soon = np.corrcoef(np.log(first).ravel(), np.log(one.lasting_LE).ravel())[0, 1]
    for at_s in range(2, 500, 50):
        same.at(at_s)
    one.at(500.0)
    late = np.corrcoef(np.log(first).ravel(), np.log(one.lasting_LE).ravel())[0, 1]
    assert soon > 0.9 > 0.5 > abs(late)
    same.at(500.0)
    assert np.array_equal(one.lasting_LE, same.lasting_LE)              # however often somebody looked


def test_no_expert_is_asked_more_than_once_by_a_token():
    assert Demand(MODEL, Popularity(4.0), 1).lasting_LE.max() <= 16 / 2


def test_the_busiest_rank_is_the_one_that_the_production_code_finds():
    experts = live()
    loads = [[*layer, sum(layer) / MODEL.num_picks] for layer in experts.demand.lasting_LE.tolist()]
    rank_of, alive = GEOMETRY.rank_of_slots(), [True] * 8

    expected = [max_over_mean(slots, layer, rank_of, alive)
                for slots, layer in zip(experts.first.layers, loads, strict=True)]
    assert experts.imbalance() == pytest.approx(expected)
    assert experts.busiest(1 << 16) == pytest.approx(sum(expected) / 3)              # so many requests are even


def test_few_requests_are_less_even_than_many():
    experts = live(spread=0.0, skew=2.0)
    assert experts.busiest(1) > 1.5 * experts.busiest(4000)


def test_a_map_of_a_plan_is_priced_from_then_on():
    experts = live()
    before = experts.imbalance()
    slots = experts.first.layers[0]
    copies = [slot for slot, expert in enumerate(slots) if expert < 4 and slots.index(expert) != slot]
    edits = [Edit(layer, slot, -1) for layer in range(3) for slot in copies]
    change = MapChange(1, 2, pack_edits(edits))
    experts.begin_step(StepPlan(1, (), map_version=2, map_changes=(change,)))

    assert experts.state[1] == 2 and experts.imbalance() != before and not experts._wrongs
    assert experts.imbalance(experts.first) == before


def test_reports_count_what_was_asked():
    experts = live(skew=0.3)
    experts.count(1000, 50)
    counts = np.array(array("i", experts.report())).reshape(3, 17)

    assert counts[:, 16].tolist() == [1000] * 3                            # the shared expert
    assert counts[:, :16].sum(1) == pytest.approx([2000] * 3, rel=0.01)
    assert np.corrcoef(counts[0, :16], experts.demand.lasting_LE[0])[0, 1] > 0.9
    assert not any(array("i", experts.report()))


# ---------------------------------------------------------------- whole runs


def test_experts_are_moved_to_where_they_are_even_and_steps_get_shorter():
    work = SyntheticWork(1.0, 300.0, prompt_tokens=256, output_tokens=150)
    moved, stayed = (run(replace(DECODE, rebalance=each), work=work, concurrency=150) for each in (True, False))

    one, other = (figures(each)["experts"]["decode-0"] for each in (moved, stayed))
    assert one["experts_moved"] > 0 == other["experts_moved"]
    assert one["busiest_now"] < 0.8 * one["busiest_first"]
    assert one["busiest_first"] == other["busiest_first"] == other["busiest_now"]
    assert one["in_steps"] < other["in_steps"]
    assert len(one["layers"]["now"]) == 3 and one["busiest_after"] < 1.1
    line = figures(moved)["timeline"]["decode_busiest"]
    assert line[-1] < line[len(line) // 10]


def test_perfect_balance_is_a_load_vector():
    done = run(perfect=True)
    told = figures(done)["experts"]["decode-0"]

    assert told["in_steps"] == pytest.approx(told["busiest_first"]) and told["busiest_first"] < 1.2         # the grain
    assert told["experts_moved"] == 0
    assert "expert_spread" not in done.rig.factors and done.rig.factors["expert_skew"] == 0.0


def test_steps_taken_alone_are_the_same_as_always():
    assert figures(run()) == figures(run(every_step=True))


def test_a_lost_die_takes_its_experts_along_and_copies_serve():
    done = run(failures=("die:decode-0/3@2",))
    told = figures(done)

    assert told["requests"]["served"] == told["requests"]["sent"]
    assert told["experts"]["decode-0"]["lost_ranks"] == [3]
    assert done.instances["decode-0"].scheduler.rebalancer.runnable
    slots = done.instances["decode-0"].scheduler.rebalancer.placement
    assert all(set(experts) >= set(range(256)) for experts in slots.layers)


def test_without_room_for_its_experts_an_instance_waits_for_its_die():
    done = run(replace(DECODE, redundant_experts=0), failures=("die:decode-0/3@2+4",))
    told = figures(done)

    line = dict(zip(told["timeline"]["at_s"], told["timeline"]["decode_utilisation"], strict=True))
    assert max(busy for at_s, busy in line.items() if 2.2 < at_s < 6.0) == 0.0
    assert max(busy for at_s, busy in line.items() if at_s > 6.5) > 0.5
    assert told["requests"]["served"] == told["requests"]["sent"]
    assert told["experts"]["decode-0"]["lost_ranks"] == []


def test_without_the_plane_of_the_exchange_a_step_stands_still_and_is_finished_after():
    calm, halted = run(), run(failures=("plane:UB@2+3",))
    one, other = (figures(each) for each in (calm, halted))

    assert other["requests"]["served"] == other["requests"]["sent"] and other["requests"]["retried"] == {}
    longest = max(each.e2e_s for each in halted.users.journeys)
    assert longest == pytest.approx(max(each.e2e_s for each in calm.users.journeys) + 3.0, abs=0.2)
    line = other["distribution"]["itl_s"]
    assert line[-1] == pytest.approx(3.0, rel=0.05) and one["distribution"]["itl_s"][-1] < 0.1


def test_a_step_that_stands_still_for_too_long_fails():
    done = run(failures=("plane:UB@2+3",), run_deadline_s=1.0)
    told = figures(done)

    assert told["requests"]["retried"]["attempt_failed"] > 0


@pytest.mark.parametrize(("wrong", "told"), [
    (dict(spread=-1.0), "spread is -1"), (dict(drift_s=0.0), "drift_s is 0"), (dict(skew=-0.1), "skew is -0.1"),
])
def test_popularities_that_cannot_be_are_told(wrong, told):
    with pytest.raises(ConfigError, match=told):
        Popularity(**wrong)
