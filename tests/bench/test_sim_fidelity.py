"""The arithmetic of `bench/sim_fidelity.py`; what it measures is measured by running it."""

import pytest

import sim_fidelity
from common import Report
from sim_fidelity import Answer, AtTimes, Pair, Seen
from tests.sim.rigs import RIG
from tripool.sim.costs.table import FORMAT, Grid, RoleSteps, StepTable
from tripool.sim.requests import WorkRequest, prompt_tokens


def table(decode: float = 1.0, prefill: float = 1.0) -> StepTable:
    """Steps that take so many times as long."""
    rows = Grid([1, 8], [[0.01 * decode, 0.02 * decode], [0.03 * decode, 0.05 * decode]], context=[0, 100])
    chunks = Grid([16, 512], [[0.0, 0.02 * prefill], [0.2 * prefill, 0.4 * prefill]], first=[0, 100])
    return StepTable(FORMAT, "here", "tiny", "today", {"hybrid": RoleSteps(0.001, rows, chunks)})


def pair(real=(0.1, 0.01, 100.0), simulated=((0.1, 0.01, 100.0),), drift=0.0, **more) -> Pair:
    return Pair(Seen(*real), [Seen(*each) for each in simulated], drift, 5.0, 100, **more)


def figures(found) -> dict[str, dict]:
    report = Report("?")
    sim_fidelity.add_figures(report, found)
    return {figure["name"]: figure for figure in report.figures}


def test_both_simulations_together_are_held_against_the_real_run():
    errors = pair(simulated=((0.10, 0.011, 90.0), (0.14, 0.013, 90.0))).errors()
    assert errors == pytest.approx({"ttft_p50_error": 0.2, "tpot_p50_error": 0.2, "throughput_error": 0.1})


def test_the_kind_of_step_that_changed_the_most_is_the_drift():
    assert sim_fidelity.drift(table(), table()) == 0.0
    assert sim_fidelity.drift(table(), table(decode=1.02, prefill=0.9)) == pytest.approx(-0.1)


def test_the_worst_of_the_kept_pairs_is_the_figure_and_the_discarded_are_counted():
    found = figures({
        "1p1d": {"30": [pair(simulated=((9.0, 9.0, 9.0),), drift=0.2), pair(simulated=((0.12, 0.01, 100.0),))],
                 "70": [pair(simulated=((0.1, 0.01, 97.0),), drift=-0.04)]},
        "hybrid": {"30": [pair(simulated=((9.0, 9.0, 9.0),), drift=-0.051)]}})

    assert found["fidelity.ttft_p50_error"]["value"] == pytest.approx(0.2)
    assert found["fidelity.ttft_p50_error"]["worst"] == "1p1d 30"
    assert found["fidelity.throughput_error"]["value"] == pytest.approx(0.03)
    assert found["fidelity.discarded_pairs"]["value"] == 2
    assert "fidelity.hybrid_30_ttft_s" not in found


def test_decisions_that_came_out_otherwise_count_in_every_run():
    found = figures({"1p1d": {"30": [pair(drift=0.2, decisions=10, mismatches=["a"]), pair(decisions=20)]}})
    assert found["fidelity.replay_mismatches"]["value"] == 1
    assert found["fidelity.replay_mismatches"]["decisions"] == 30


def test_prompts_share_what_the_workload_says():
    first = sim_fidelity.prompt_of(WorkRequest(0.0, ((1, 100), (7, 20)), 5))
    second = sim_fidelity.prompt_of(WorkRequest(0.0, ((1, 100), (8, 30)), 5))
    assert first[:100] == second[:100] and first[100:110] != second[100:110]
    assert len(second) == 130 == len(prompt_tokens(((1, 100), (8, 30)))) // 4


def test_jobs_are_sent_at_the_times_of_the_workload():
    assert AtTimes(at_s=(0.0, 0.5, 2.0)).times_s(2) == [0.0, 0.5]
    job = sim_fidelity.job_of(WorkRequest(0.0, ((1, 10),), 7), 3)
    assert (job.body["max_tokens"], job.body["ignore_eos"], len(job.body["prompt"])) == (7, True, 10)


def test_loads_are_parts_of_what_the_deployment_can_do():
    made = sim_fidelity.DEPLOYMENTS["hybrid"]
    capacity = sim_fidelity.capacity_of(made, RIG)
    parts = sim_fidelity.workload("70", capacity, 120.0, 3, 0)
    assert len(parts) == 3
    assert sum(len(part.requests) for part in parts) == pytest.approx(120.0 * 0.7 * capacity, rel=0.2)
    found = sim_fidelity.simulated_parts(made, parts, RIG)
    assert found.tokens_per_s == pytest.approx(0.7 * capacity * sim_fidelity.STEADY.output_tokens, rel=0.25)
    names = [{name for each in part.requests for name, _ in each.parts}
             for part in sim_fidelity.workload("bursty", capacity, 60.0, 2, 0)]
    assert names[0] and names[1] and not names[0] & names[1]


def test_what_lies_between_the_parts_of_a_load_does_not_count():
    one, two = Answer(5.0, 7.0, 10, 0.5, 0.1), Answer(100.0, 103.0, 20, 0.7, None)
    assert sim_fidelity.seen([[one], [two]]) == Seen(pytest.approx(0.6), 0.1, 6.0)
