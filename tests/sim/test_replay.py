"""A recorded run, given to fresh machines, brings the same decisions."""

import random
from dataclasses import replace

import pytest

from tests.sim.builders import cluster, deployment, run
from tripool.control.gateway import Gateway
from tripool.control.health import Health
from tripool.control.router import Router
from tripool.control.scaling import Scaling
from tripool.control.scheduler import InstanceScheduler
from tripool.core.deployment import InstanceConfig, ScalingConfig
from tripool.core.machine import Machine
from tripool.core.messages import ExpertsMoved, Heartbeat, RankBack, RankLost, Run
from tripool.core.timeline import Record, replay
from tripool.sim.dataplane import ToyPrice
from tripool.sim.host import SimHost
from tripool.sim.workload import SyntheticLoad


def fresh_machines() -> dict[str, Machine]:
    """The machines of `recording`, as they were before its first message."""
    made = deployment()
    machines: dict[str, Machine] = {"gateway": Gateway(made.gateway), "gateway/router": Router(made.gateway),
                                    "gateway/health": Health(made)}
    members = [("prefill", 2, made.prefill), ("decode", 3, made.decode), ("hybrid", 1, made.hybrid)]
    for role, count, config in members:
        for index in range(count):
            name, life = f"{role}-{index}", len(machines) - 2
            machines[name] = InstanceScheduler(name, role, config, made, f"life-{life}")
    return machines


@pytest.fixture(scope="module")
def recording() -> list[Record]:
    records: list[Record] = []
    load = SyntheticLoad(150, 100.0, prompt_tokens=(4, 150), output_tokens=(1, 30), cancel=0.1, logprobs=0.1)
    run(cluster(SimHost(record=records.append)), load)
    return records


def test_a_recorded_run_replays_to_identical_decisions(recording):
    machines = fresh_machines()
    assert {record.address for record in recording} > set(machines)

    assert replay(machines, recording) == []


def test_one_machine_can_be_replayed_without_the_others(recording):
    assert replay({"decode-1": fresh_machines()["decode-1"]}, recording) == []


def test_a_message_that_was_not_recorded_is_noticed(recording):
    lost = next(index for index, record in enumerate(recording) if record.address == "decode-0"
                and any(isinstance(send.message, Run) for send in record.sends))

    assert replay(fresh_machines(), recording[:lost] + recording[lost + 1:]) != []


def test_another_decision_than_the_recorded_one_is_told_with_its_place(recording):
    index = next(index for index, record in enumerate(recording) if record.address == "gateway/router" and record.sends
                 and not isinstance(record.message, Heartbeat))
    changed = list(recording)
    changed[index] = replace(changed[index], sends=())

    mismatches = replay(fresh_machines(), changed)

    assert [each.index for each in mismatches] == [index]
    assert "gateway/router" in str(mismatches[0])


def test_roles_that_change_replay_to_the_same_changes():
    records: list[Record] = []
    each = InstanceConfig(count=2, max_num_seqs=16, max_num_batched_tokens=256)
    more = dict(prefill=each, decode=replace(each, count=3), hybrid=0,
                scaling=ScalingConfig(enabled=True, hold_s=0.4, cool_down_s=0.5))
    made = cluster(SimHost(record=records.append), price=ToyPrice(chunk_token_s=500e-6), **more)
    run(made, SyntheticLoad(300, 60.0, prompt_tokens=(50, 150), output_tokens=(1, 10)))
    assert made.scaling.stats.changes["prefill"] > 0
    again = deployment(**more)
    machines: dict[str, Machine] = {"gateway": Gateway(again.gateway), "gateway/router": Router(again.gateway),
                                    "gateway/health": Health(again), "gateway/scaling": Scaling(again)}
    machines |= {f"{role}-{index}": InstanceScheduler(f"{role}-{index}", role, each, again, f"life-{life}")
                 for life, (role, index) in enumerate([("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1),
                                                       ("decode", 2)], 1)}

    assert replay(machines, records) == []

    assert machines["gateway/scaling"].stats == made.scaling.stats
    assert {name: machine.role for name, machine in machines.items() if name in made.schedulers} == \
        {name: scheduler.role for name, scheduler in made.schedulers.items()}


def test_experts_that_move_and_ranks_that_come_and_go_replay_to_the_same_maps():
    records: list[Record] = []
    trio = dict(prefill=0, decode=0, hybrid=InstanceConfig(count=1, ranks=3, exchange="collective",
                                                           redundant_experts=3, rebalance_steps=4, microbatches=True))
    made = cluster(SimHost(record=records.append), **trio)
    made.submit(SyntheticLoad(80, 40.0, prompt_tokens=(4, 60), output_tokens=(10, 60)).arrivals(random.Random(1)))
    made.start_all()
    made.host.run_until(1.2)
    made.lose_rank("hybrid-0", 2)
    made.host.run_until(1.8)
    made.return_rank("hybrid-0", 2)
    assert made.host.run_while(lambda: made.client.num_open > 0, end_s=100.0) and made.wrongs == []
    again = InstanceScheduler("hybrid-0", "hybrid", deployment(**trio).hybrid, deployment(**trio), "life-1")

    assert replay({"hybrid-0": again}, records) == []

    kinds = {type(record.message) for record in records if record.address == "hybrid-0"}
    assert kinds > {RankLost, RankBack, ExpertsMoved}
    assert again.rebalancer.placement == made.schedulers["hybrid-0"].rebalancer.placement
