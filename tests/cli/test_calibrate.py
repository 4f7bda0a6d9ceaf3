"""`tripool calibrate` finds again what a machine's steps, copies and messages take."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.cli.fake_server import tripool
from tests.sim.rigs import COSTS, DECODE, HYBRID, NONE, PLANES, PREFILL, RIG, but, deployment
from tripool.cli import calibrate
from tripool.cli.calibrate_machine import Cells, CopyLine, Machine, copy_line, machine_of, write_machine
from tripool.cli.calibrate_probes import Grids, Probe, choose_grids
from tripool.cli.calibrate_readings import Copy, Hop, Readings, Step, read_readings
from tripool.core.deployment import Deployment, InstanceConfig, ModelConfig
from tripool.core.errors import ConfigError
from tripool.serve.models import resolve
from tripool.serve.recording import Recorder, Setup
from tripool.sim.costs.residuals import fitted_residuals
from tripool.sim.costs.states import decode_state, prefill_state
from tripool.sim.costs.table import Grid, RoleSteps
from tripool.sim.hardware.description import read_hardware
from tripool.sim.machine import rig_of
from tripool.sim.pricing import Plane
from tripool.sim.requests import Workload, WorkRequest
from tripool.sim.simulation import WARM_UP_S, Simulation

SPLIT = deployment(prefill=but(PREFILL, count=1), decode=but(DECODE, count=1), block_tokens=64)
ONE = deployment(prefill=NONE, decode=NONE, hybrid=but(HYBRID, count=1), block_tokens=64)
BLOCK_BYTES = 64 * RIG.token_bytes
CLIENT_S = 0.1                 # until a client has its first token
GRIDS = Grids(rows=(1, 4), contexts=(32, 512), chunks=(16, 256), firsts=(0, 512), beside=((4, 96),), pool_blocks=(),
              held_tokens=0, rounds=2)


def recorded(made, work, rig, folder):
    """A simulation whose decisions are recorded as those of real processes are."""
    simulation = Simulation(made, work, rig, max_tokens=0, every_step=True)
    recorders = {}
    for member in ("gateway", *simulation.roles):
        setup = Setup(member, simulation.roles.get(member, "gateway"), "life-1", made)
        recorders[member] = Recorder(folder / member, setup)

    def record(each):
        member = each.address.partition("/")[0]
        if member in recorders and not each.address.endswith(("/data", "/api")):
            recorders[member](each)

    simulation.host._record = record
    simulation.run()
    for each in recorders.values():
        each.close()
    return simulation


def probes_and_work(grids=GRIDS, *, beside=True):
    """What a prober would ask, at times far enough apart, and when it would have."""
    probes, requests, at_s, name = [], [], 1.0, 1000

    def probe(kind, number, tokens, across, asked):
        nonlocal at_s
        requests.extend(WorkRequest(at_s, parts, output) for parts, output in asked)
        end_s = at_s + 5.0
        ttft_s = CLIENT_S if len(asked) == 1 else 0.0
        probes.append(Probe(kind, number, tokens, across, WARM_UP_S + at_s - 0.01, WARM_UP_S + end_s - 0.02, ttft_s))
        at_s = end_s

    def fresh(count):
        nonlocal name
        name += 1
        return name, count

    probe("warm-up", 0, 0, 0, [(((512, 512), fresh(16)), 1)])
    for number in range(grids.rounds):
        for context in grids.contexts:
            for rows in grids.rows:
                probe("decode", number, rows, context, [((fresh(context),), 24) for _ in range(rows)])
        for first in grids.firsts:
            for chunk in grids.chunks:
                parts = ((first, first), fresh(chunk)) if first else (fresh(chunk),)
                probe("prefill", number, chunk, first, [(parts, 1)])
        for _ in range(2):
            probe("alone", number, 16, 0, [((fresh(16),), 4)])
        if beside:
            begin_s = at_s
            asked = [((fresh(16),), 96) for _ in range(4)]
            probe("beside", number, 4, 256, asked)
            requests.extend(WorkRequest(begin_s + 0.1 * (i + 1), (fresh(256),), 1) for i in range(8))
    return probes, Workload("probes", tuple(sorted(requests, key=lambda each: each.at_s)))


# ---------------------------------------------------------------- from recordings


def test_what_is_read_of_a_step_prices_it_to_what_it_took(tmp_path):
    _, work = probes_and_work()
    simulation = recorded(SPLIT, work, RIG, tmp_path)

    readings = read_readings(tmp_path)

    kinds = {bool(step.tokens) + 2 * bool(step.chunk_tokens) for step in readings.steps}
    assert kinds == {1, 2}
    for step in readings.steps:
        price_s = COSTS.step_s + step.tokens * (COSTS.row_s + step.context * COSTS.context_token_s) \
            + step.chunk_tokens * COSTS.chunk_token_s
        assert step.seconds == pytest.approx(price_s, rel=0.002)
        assert step.engine_s == pytest.approx(step.seconds)
    steps = sum(instance.plane.num_steps for _, instance in simulation.lives())
    assert len(readings.steps) >= steps > 100
    assert {hop.kind for hop in readings.hops} == {"Prefill", "Prefilled", "Admit", "Tokens"}
    assert all(hop.seconds == pytest.approx(PLANES.planes["vpc"].latency_s) for hop in readings.hops)
    assert {each.kind for each in readings.copies} == {"Pull", "Fetch", "Store"}


def test_a_machine_is_found_again_from_its_recordings(tmp_path):
    probes, work = probes_and_work()
    slow = replace(RIG, beside={"prefill": 1.5, "decode": 1.25},
                   planes=replace(PLANES, planes={**PLANES.planes, "rdma": Plane(5e9, 1e-3)}))
    recorded(SPLIT, work, slow, tmp_path)

    machine = machine_of("toy", {"prefill": 1, "decode": 1}, GRIDS, probes, read_readings(tmp_path), ranks=1,
                         block_bytes=BLOCK_BYTES)

    decode, prefill = machine.roles["decode"], machine.roles["prefill"]
    for rows, context in ((1, 100), (3, 500), (4, 32), (8, 300)):
        found = machine.table.of("decode").step_time(decode_state(1, rows, context)).total_s
        assert found == pytest.approx(COSTS.step_time(decode_state(1, rows, context)).total_s, rel=0.01)
    for tokens, cached in ((16, 0), (100, 0), (128, 512), (300, 200)):
        state = prefill_state(1, 1, tokens + cached, cached=cached)
        assert machine.table.of("prefill").step_time(state).total_s == pytest.approx(
            COSTS.step_time(state).total_s, rel=0.01)
    assert (decode.beside, prefill.beside) == pytest.approx((1.25, 1.5), rel=0.01)
    assert machine.control_s == pytest.approx(PLANES.planes["vpc"].latency_s)
    first_s = COSTS.step_s + 16 * COSTS.chunk_token_s
    assert machine.api_s == pytest.approx(CLIENT_S - first_s - 2 * machine.control_s, abs=1e-4)
    assert machine.pull.bytes_per_s == pytest.approx(5e9, rel=0.02)
    assert machine.pull.latency_s == pytest.approx(1e-3, rel=0.1)
    assert machine.drift == pytest.approx(0.0, abs=1e-3)
    assert machine.spread == pytest.approx(0.0, abs=1e-3)


def test_of_one_instance_rows_and_chunks_meet_in_a_step(tmp_path):
    probes, work = probes_and_work()
    recorded(ONE, work, RIG, tmp_path)

    machine = machine_of("toy", {"hybrid": 2}, GRIDS, probes, read_readings(tmp_path), ranks=1, block_bytes=BLOCK_BYTES)

    assert 0.5 < machine.roles["hybrid"].mixed < 0.9                      # what every step costs is paid once
    assert machine.roles["hybrid"].beside == 1.0
    assert machine.pull is None


def test_what_was_never_seen_is_told_by_its_cell():
    cells = Cells("decode", (1, 4), (32, 512))
    with pytest.raises(ConfigError, match="no decode step with 4 tokens at 512 was seen"):
        cells.readings(4, 512)


def test_a_slow_last_round_is_drift_and_does_not_count():
    cells = Cells("decode", (1,), (32,))
    for number, seconds in enumerate((0.010, 0.011, 0.010, 0.010, 0.020)):
        cells.add(Probe("decode", number, 1, 32, 0, 1), [step(seconds)], [32.0])
    assert cells.seconds() == [[0.010]]
    assert cells.drift() == pytest.approx(1.0)
    assert cells.spreads() == pytest.approx([0.5])


def step(seconds: float) -> Step:
    return Step("decode-0", 0.0, seconds, seconds, 1, 1, 32.0, 0, 0.0)


@pytest.mark.parametrize(("sizes", "expected"), [
    ({1: 0.002, 3: 0.004}, CopyLine(0.001, 1e6)),
    ({0: 0.003}, CopyLine(0.003, 1e12)),
    ({2: 0.001}, CopyLine(1e-6, 2e6)),
    ({1: 0.004, 3: 0.002}, CopyLine(0.005, 1e12)),           # larger ones were faster: only chance can be
])
def test_copies_have_a_latency_and_a_rate(sizes, expected):
    found = copy_line([Copy("Pull", 0.0, seconds, count) for count, seconds in sizes.items()], 1000)
    assert (found.latency_s, found.bytes_per_s) == pytest.approx((expected.latency_s, expected.bytes_per_s))


def test_no_copies_are_no_line():
    assert copy_line([], 1000) is None


def test_copies_that_waited_for_each_other_do_not_count():
    queued = [Copy("Pull", 1.0, 0.001 * (i + 1), 1) for i in range(9)]
    alone = [Copy("Pull", 2.0, 0.001, 1), Copy("Pull", 3.0, 0.003, 3)]
    assert copy_line([*queued, *alone], 1000) == copy_line(alone, 1000)


# ---------------------------------------------------------------- grids


def test_grids_fit_what_a_deployment_can_hold():
    made = Deployment(model=ModelConfig(max_model_len=2048),
                      hybrid=InstanceConfig(count=1, max_num_seqs=12, max_num_batched_tokens=512, cache_tokens=8192))
    made, checkpoint = resolve(made)
    grids = choose_grids(made, checkpoint.shape, rounds=3)
    assert grids.rows == (1, 2, 4, 8, 12)
    assert grids.rows[-1] * grids.contexts[-1] <= 8192 / 2
    assert grids.chunks[-1] == 512
    assert grids.firsts[-1] % made.block_tokens == 0
    assert grids.firsts[-1] + grids.chunks[-1] < 2048
    assert grids.pool_blocks == ()


def test_requests_that_are_too_short_are_told():
    made, checkpoint = resolve(Deployment(model=ModelConfig(max_model_len=64), hybrid=InstanceConfig(count=1)))
    with pytest.raises(ConfigError, match="too short to measure with"):
        choose_grids(made, checkpoint.shape, rounds=1)


# ---------------------------------------------------------------- files and the command


def machine(**changes) -> Machine:
    grid = Grid([1.0, 8.0], [[0.01, 0.02], [0.03, 0.05]], context=[0.0, 1000.0])
    chunks = Grid([16.0, 512.0], [[0.01, 0.02], [0.2, 0.4]], first=[0.0, 1000.0])
    steps = RoleSteps(0.001, grid, chunks, 1, beside=1.2)
    values = dict(model="tripool-tiny", threads={"prefill": 1, "decode": 1}, num_ranks=2, num_steps=100,
                  roles={"prefill": steps, "decode": steps}, api_s=0.002, control_s=0.0004,
                  pull=CopyLine(0.001, 2e9), pool=CopyLine(0.0005, 1e9), read_gbps=10.0, drift=0.01, spread=0.02)
    return Machine(**{**values, **changes})


def test_what_is_written_is_a_machine_that_can_be_simulated(tmp_path):
    written = write_machine(machine(), tmp_path / "laptop.toml")
    assert written == tmp_path / "laptop.steps.json"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["laptop.steps.json", "laptop.toml"]

    hardware = read_hardware(str(tmp_path / "laptop.toml"))
    small = InstanceConfig(count=1, cache_tokens=8192)
    made, checkpoint = resolve(Deployment(prefill=small, decode=small))
    rig = rig_of(made, checkpoint.shape, hardware, residuals=fitted_residuals())

    assert rig.costs["decode"].step_time(decode_state(1, 8, 1000)).total_s == pytest.approx(0.05)
    assert {part.level for part in rig.costs["decode"].step_time(decode_state(1, 8, 1000)).parts} == {"measured"}
    assert rig.planes.planes[rig.planes.control].latency_s == pytest.approx(0.0004)
    pull, pool = rig.planes.planes[rig.planes.pull], rig.planes.planes[rig.planes.pool]
    assert (pull.bytes_per_s, pull.latency_s) == pytest.approx((2e9, 0.001))
    assert (pool.bytes_per_s, pool.latency_s) == pytest.approx((1e9, 0.0005))
    assert (rig.api_s, rig.beside) == (0.002, {"prefill": 1.2, "decode": 1.2})
    assert "pool_gbps" not in rig.factors                  # of another machine; this one was measured
    assert rig.factors["api_s"] == 0.002 and rig.factors["decode_beside"] == 1.2


def test_a_machine_without_a_pool_says_so(tmp_path):
    write_machine(machine(pool=None, pull=None), tmp_path / "laptop.toml")
    text = (tmp_path / "laptop.toml").read_text()
    assert "the pool; there was none: rough" in text
    assert read_hardware(str(tmp_path / "laptop.toml")).steps.endswith("laptop.steps.json")


def test_what_others_did_between_rounds_is_in_no_reading():
    steps = [Step("hybrid-0", at_s, at_s + 0.5, 0.4, 1, 1, 5.0, 0, 0.0) for at_s in (1.0, 3.0, 5.0)]
    copies = [Copy("Pull", at_s, 0.1, 1) for at_s in (3.5, 5.5)]
    found = Readings(steps, copies, [Hop("Tokens", 3.2, 0.1)], {}, {1: 1.0, 2: 3.0}).without([(2.9, 4.0)])
    assert found == Readings([steps[0], steps[2]], copies[1:], [], {}, {1: 1.0})


@pytest.mark.parametrize(("words", "complaint"), [
    (("--out", "machine.json"), "a hardware file ends with .toml"),
    (("--out", "nowhere/machine.toml"), "there is no folder nowhere"),
    (("--out", "machine.toml", "--hybrid", "1", "--prefill", "1", "--decode", "1"), "one kind at a time"),
    (("--out", "machine.toml", "--hybrid", "1", "--num-speculative-tokens", "3"),
     "hybrid.num_speculative_tokens is 3, but only steps that draft nothing are measured"),
])
def test_what_cannot_be_measured_is_refused_before_it_is(words, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = tripool("calibrate", *words)
    assert isinstance(done.exception, ConfigError)
    assert complaint in str(done.exception)


def test_a_machine_that_changed_meanwhile_is_not_written_unless_that_is_allowed(tmp_path, monkeypatch):
    measured = SimpleNamespace(machine=lambda: machine(drift=0.3))
    monkeypatch.setattr(calibrate, "measure", lambda *words, **more: measured)
    path = tmp_path / "laptop.toml"
    done = tripool("calibrate", "--out", str(path))
    assert isinstance(done.exception, ConfigError)
    assert "the machine changed while it was measured: steps of the last round took +30%" in str(done.exception)
    assert not path.exists()

    done = tripool("calibrate", "--out", str(path), "--allow-drift")
    assert done.exit_code == 0, done.output
    assert "+30.0% against the first" in path.read_text()


def test_the_embedded_model_is_measured_on_this_machine(tmp_path):
    path = tmp_path / "here.toml"
    done = tripool("calibrate", "--hybrid", "1", "--quick", "--allow-drift", "--max-num-seqs", "4",
                   "--max-num-batched-tokens", "128", "--max-model-len", "512", "--out", str(path))

    assert done.exit_code == 0, done.output
    assert "a step of 1 row" in done.output and "steadiness" in done.output
    steps = json.loads((tmp_path / "here.steps.json").read_text())["roles"]["hybrid"]
    one, four = (steps["decode"]["seconds"][i][0] for i in (0, 1))
    assert steps["decode"]["tokens"] == [1, 4]
    assert 0 < one < 10 and 0 < four < 10
    assert read_hardware(str(path)).steps
