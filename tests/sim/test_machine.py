"""A deployment on a described machine: prices, planes and room are what the hardware's file says."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.sim.rigs import figures, simulate
from tripool.core.deployment import CacheConfig, Deployment, InstanceConfig, ModelConfig
from tripool.core.errors import ConfigError
from tripool.sim.costs.models import read_shape
from tripool.sim.costs.residuals import Residuals, fitted_residuals
from tripool.sim.costs.state import StepState
from tripool.sim.costs.states import decode_state
from tripool.sim.failures import parse_failure
from tripool.sim.hardware.description import FOLDER, read_hardware
from tripool.sim.machine import EXPERT_DRIFT_S, rig_of
from tripool.sim.requests import Workload, WorkRequest
from tripool.sim.simulation import Simulation
from tripool.sim.synthetic import SyntheticWork

R1, CM384 = read_shape("deepseek-r1"), read_hardware("cloudmatrix384")
PREFILL = InstanceConfig(count=1, ranks=32, redundant_experts=32, expert_nodes=2, max_num_batched_tokens=8192)
DECODE = InstanceConfig(count=1, ranks=40, redundant_experts=24, max_num_seqs=48)
WORK = SyntheticWork(1.0, 12.0, prompt_tokens=2048, output_tokens=8)


def deployment(**changes) -> Deployment:
    return Deployment(**dict(prefill=PREFILL, decode=DECODE, cache=CacheConfig(count=2, bytes=8 << 30),
                             block_tokens=128) | changes)


def state(rows: list[int], chunks: dict[int, int] | None = None) -> StepState:
    """Rows of each rank with 1,024 tokens of context each, and chunks by rank."""
    rows_R, chunks = np.array(rows), chunks or {}
    return StepState(rows_R, rows_R * 1024, rows_R * 0, np.array(list(chunks), np.int64), np.zeros(len(chunks), int),
                     np.array(list(chunks.values()), np.int64))


def test_planes_have_the_names_and_numbers_of_the_hardware():
    rig = rig_of(deployment(), R1, CM384)

    planes = rig.planes
    assert (planes.pull, planes.pool, planes.control) == ("RDMA", "UB", "VPC")
    gbps = {name: plane.bytes_per_s / 1e9 for name, plane in planes.planes.items()}
    assert gbps == {"UB": 164, "RDMA": 25, "VPC": 50}
    assert planes.planes["VPC"].latency_s == pytest.approx(50e-6)
    assert planes.planes["UB"].latency_s == pytest.approx(20e-6)                  # a copy engine has to be started
    assert planes.pool_ends.die_bytes_per_s == pytest.approx(147e9)
    assert planes.pool_ends.server_bytes_per_s == pytest.approx(4 * 160e9)
    assert rig.npus_per_rank == 0.5 and rig.max_model_len == R1.max_position
    assert rig.token_bytes == 1152 * 62


def test_the_pools_software_is_in_series_with_its_plane():
    slow = rig_of(deployment(), R1, CM384, residuals=Residuals(pool_gbps=2.0)).planes.pool_ends
    over_vpc = rig_of(deployment(), R1, CM384, residuals=Residuals(pool_gbps=2.0), pool_plane="management").planes

    assert slow.die_bytes_per_s == pytest.approx(1e9 / (1 / 147 + 1 / 2))
    assert over_vpc.pool == "VPC"
    assert over_vpc.pool_ends.die_bytes_per_s == pytest.approx(1e9 / (16 / 50 + 2 / 2))       # handled twice
    assert over_vpc.pool_ends.server_bytes_per_s == pytest.approx(50e9)


def test_blocks_from_the_pool_take_as_long_as_the_costs_of_transfers_say():
    prompt = WorkRequest(0.0, ((7, 8192),), 1)
    work = Workload("twice", (prompt, replace(prompt, at_s=30.0)))
    rig = rig_of(deployment(), R1, CM384, residuals=Residuals(pool_gbps=1.0))

    done = simulate(deployment(), work, rig=rig, failures=(parse_failure("instance:prefill-0@10+5"),))     # forgets

    first, second = done.users.journeys
    fetched = figures(done)["cache"]["pool_hit_tokens"]
    assert fetched == 63 * 128
    saved_s = first.ttft_s - second.ttft_s
    fetched_s = fetched * rig.token_bytes / rig.planes.pool_ends.die_bytes_per_s
    one_block = [rig.costs["prefill"].step_time(state([0] * 32, {0: tokens})).total_s for tokens in (8192, 128)]
    assert saved_s == pytest.approx(one_block[0] - one_block[1] - fetched_s, rel=0.03)      # experts: where they begin


def test_prices_say_where_they_are_from():
    fitted = fitted_residuals()
    real, light = (rig_of(deployment(), R1, CM384, residuals=fitted, level=level) for level in (None, "speed of light"))

    assert real.factors == {name: getattr(fitted, name) for name in
                            ("pool_gbps", "layer_overhead", "step_overhead_ms", "expert_skew")}
    assert light.factors == {"pool_gbps": fitted.pool_gbps}
    uneven = rig_of(deployment(), R1, CM384, expert_spread=0.3)
    assert uneven.factors["expert_spread"] == 0.3 and uneven.factors["expert_drift_s"] == EXPERT_DRIFT_S
    assert {part.level for part in real.costs["decode"].step_time(state([8] * 40)).parts} == {"efficiency", "residual"}
    assert {part.level for part in light.costs["decode"].step_time(state([8] * 40)).parts} == {"speed of light"}


def test_a_hardware_file_may_name_measured_steps(tmp_path):
    grid = {"tokens": [1, 8], "seconds": [[0.01, 0.02], [0.03, 0.05]]}
    (tmp_path / "steps.json").write_text(json.dumps({
        "format": "tripool-step-costs/1", "machine": "m", "model": "tiny", "measured": "2026-11-30", "api_s": 0.002,
        "roles": {"hybrid": {"idle_s": 0.0004, "decode": grid | {"context": [0, 4096]},
                             "prefill": grid | {"first": [0, 4096]}}}}))
    text = (FOLDER / "cpu.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('name = "cpu"', 'name = "mine"\nsteps = "steps.json"'))
    mine = read_hardware(str(tmp_path / "mine.toml"))
    made = Deployment(hybrid=InstanceConfig(count=1))

    rig = rig_of(made, read_shape("tiny"), mine, residuals=fitted_residuals())
    assert rig.costs["hybrid"].step_time(state([1])).total_s == pytest.approx(0.0125)
    assert "layer_overhead" not in rig.factors and rig.factors["api_s"] == rig.api_s == 0.002
    operators = rig_of(made, read_shape("tiny"), mine, level="efficiency")
    assert operators.costs["hybrid"].step_time(state([1])).parts[0].level == "efficiency"

    (tmp_path / "steps.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*steps\.json"):
        rig_of(made, read_shape("tiny"), mine)


@pytest.mark.parametrize(("rows", "chunks"), [
    ([0] * 40, {}), ([0] * 39 + [1], {}), ([3] * 40, {}), ([0] * 40, {5: 512}), ([2] * 20 + [0] * 20, {0: 64, 39: 1}),
    ([0] * 40, {3: 0}),
])
def test_any_step_has_a_price(rows, chunks):
    costs = rig_of(deployment(), R1, CM384).costs["decode"]
    price = costs.step_time(state(rows, chunks))

    assert 0 < price.total_s < 1.0
    assert price.total_s >= costs.step_time(state([0] * 40)).total_s
    halves = replace(state(rows, chunks), num_microbatches=2)
    assert 0 < costs.step_time(halves).total_s < 1.0


def test_an_idle_step_still_exchanges_nothing_with_everybody():
    parts = rig_of(deployment(), R1, CM384).costs["decode"].step_time(state([0] * 40)).parts

    assert [part.name for part in parts] == ["dispatch", "combine"]
    assert sum(part.seconds for part in parts) == pytest.approx(58 * 2 * 3 * 2.1e-6)


@pytest.mark.parametrize("ranks", [36, 37, 41, 300])
def test_ranks_need_not_divide_the_experts(ranks):
    made = deployment(decode=replace(DECODE, ranks=ranks, redundant_experts=44))
    price = rig_of(made, R1, CM384).costs["decode"].step_time(decode_state(ranks, 8, 1024))
    assert 0 < price.total_s < 0.1


def test_a_whole_run_on_a_described_machine_serves_everything():
    rig = rig_of(deployment(), R1, CM384, residuals=fitted_residuals())
    done = simulate(deployment(), WORK, rig=rig)
    assert all(each.is_served for each in done.users.journeys)
    assert done.world.fabric.wires["RDMA"].moved_bytes > 0


def test_no_pool_needs_no_plane_to_read_it_over():
    blind = replace(CM384, planes=replace(CM384.planes, scale_up=replace(CM384.planes.scale_up, host_read_gbps=0.0)))
    assert rig_of(deployment(cache=CacheConfig()), R1, blind).planes.pool_ends is None
    with pytest.raises(ConfigError, match="choose the management plane"):
        rig_of(deployment(), R1, blind)


def test_the_length_of_a_model_is_the_deployments_or_its_own():
    assert rig_of(deployment(model=ModelConfig(max_model_len=4096)), R1, CM384).max_model_len == 4096


def test_a_later_life_waits_for_its_weights():
    rig = rig_of(deployment(), R1, CM384)
    weights = rig.load_s["decode"] * 40e9
    assert 1e9 < weights < 64e9                # from the pool, at what one die of sixteen gets of it
    without = rig_of(deployment(cache=CacheConfig()), R1, CM384)
    assert without.load_s["decode"] == pytest.approx(weights * 16 / 50e9, rel=0.01)            # from the node's disks


def test_320_ranks_with_one_expert_each_serve_beside_prefills_of_32():
    """The paper's decode instance (section 5.1): attention is data-parallel on each die, experts are on all of them."""
    wide = InstanceConfig(count=1, ranks=320, redundant_experts=32, shared_expert_copies=32, max_num_seqs=48,
                          num_speculative_tokens=1, microbatches=True)
    made = deployment(decode=wide)
    rig = rig_of(made, R1, CM384, residuals=fitted_residuals(), acceptance=(0.7,))
    burst = Workload("a burst after silence", tuple(WorkRequest(20.0, ((index, 512),), 12) for index in range(60)))

    done = Simulation(made, burst, rig, seed=1)
    done.run()

    told = figures(done)
    assert told["requests"]["served"] == 60 and told["pools"]["decode"]["ranks"] == 320
    assert told["pools"]["decode"]["npus"] == 160.0
    assert 0.02 < told["latency"]["itl_s"]["p50"] < 0.06
    assert len(told["experts"]["decode-0"]["layers"]["now"]) == 58


def test_a_prompt_that_no_rank_can_hold_fails_alone():
    made = deployment(prefill=replace(PREFILL, cache_tokens=4096))
    long = Workload("long", (WorkRequest(0.0, ((1, 5000),), 4), WorkRequest(0.1, ((2, 1000),), 4)))

    told = figures(simulate(made, long, rig=rig_of(made, R1, CM384)))

    assert told["requests"]["served"] == 1
    [cause] = told["requests"]["causes"]
    assert "5000" in cause
