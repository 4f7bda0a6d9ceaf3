import dataclasses
import json
import statistics

import pytest

from tripool.core.deployment import read_table
from tripool.sim.costs.residuals import NONE, Residuals, fitted_residuals
from tripool.sim.costs.states import decode_state
from tripool.sim.costs.steps import OperatorCosts
from tripool.sim.hardware.description import DecodeSplit
from tripool.sim.reproduce import settings
from tripool.sim.reproduce.fit import fit
from tripool.sim.reproduce.score import BAR, FINDINGS, HELD_OUT, Report, Scored, append_run, make_report
from tripool.sim.reproduce.tables import PaperCell


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report(fitted_residuals())


def cell(value, role=HELD_OUT, is_gain=False, bar_points=None) -> PaperCell:
    return PaperCell("table", 0, "column", value, "row", role, is_gain, False, bar_points)


# ---------------------------------------------------------------- what is reckoned


def test_tables_1_and_10_and_the_buffers_are_exact(report):
    exact = report.of_role("exact")
    assert {each.cell.table for each in exact} == {"table1_model_loading", "table10_switch", "fused_op_buffers"}
    assert [each.cell.id for each in exact if not each.is_met] == []


def test_something_is_said_of_every_number_that_is_judged_or_fitted(report):
    for role in (HELD_OUT, "calibration", "exact", "compared"):
        assert [each.cell.id for each in report.of_role(role) if each.ours is None] == []


def test_the_fitted_cells_are_met(report):
    met = {each.cell.id: each.error for each in report.of_role("calibration")}
    assert met.pop("table2_prefill/1/tokens_per_s") is not None      # fits a ratio, below
    assert all(abs(error) < 0.001 for error in met.values())
    ratio = report.scored["table2_prefill/1/tokens_per_s"].ours / report.scored["table2_prefill/4/tokens_per_s"].ours
    assert ratio == pytest.approx(50302 / 59337, rel=0.002)


def test_the_residuals_in_the_file_are_those_that_the_four_cells_give():
    found, stored = fit(), fitted_residuals()
    for name in Residuals.__slots__:
        assert getattr(stored, name) == pytest.approx(getattr(found, name), rel=0.001), name


def test_operators_alone_give_the_612_us_that_are_known_to_be_too_few():
    """Two microbatches of attention, one after the other on 16 cores; 874 us were measured."""
    hardware = dataclasses.replace(settings.machine("cloudmatrix384"), decode_split=DecodeSplit(16, 8))
    costs = OperatorCosts(dataclasses.replace(settings.cm384_decode(), hardware=hardware))
    attention = costs.decode_stages(decode_state(320, 48, 4096, microbatches=2)).attention
    assert sum(attention.values()) - attention["norms"] == pytest.approx(612e-6, rel=0.01)


def test_a_number_that_restates_another_is_as_far_off(report):
    for one, other in (("table3_decode/3/tpot_ms", "table4_slo/2/tpot_ms"),
                       ("sglang_prefill/3/tokens_per_s_node", "table2_prefill/4/tokens_per_s"),
                       ("cann_prefill_r1/1/tokens_per_s", "cann_prefill_r1/1/latency_ms")):
        assert abs(report.scored[one].error) == pytest.approx(abs(report.scored[other].error), abs=0.01)


def test_predictions_do_not_know_what_was_published(report):
    """With other residuals the held-out numbers move: none of them is copied."""
    moved = make_report(Residuals(layer_overhead=0.2, step_overhead_ms=9.0, expert_skew=1.0, pool_gbps=5.0))
    for each in report.of_role(HELD_OUT):
        assert moved.scored[each.cell.id].ours != each.ours, each.cell.id


# ---------------------------------------------------------------- how it is scored


def test_the_error_is_relative_and_that_of_a_gain_is_of_the_ratio_of_times():
    assert Scored(cell(50.0), 55.0).error == pytest.approx(0.1)
    assert Scored(cell(25.0, is_gain=True), 50.0).error == pytest.approx(0.2)
    assert Scored(cell(25.0, is_gain=True), 50.0).time_points == pytest.approx(100 * (1 / 1.5 - 1 / 1.25))
    assert Scored(cell(0), 0.0).error == 0.0
    assert Scored(cell(5.0), None).error is None


def test_an_unscored_number_has_no_error(report):
    unscored = report.of_role("unscored")
    assert len(unscored) == 2 and all(each.error is None for each in unscored)


def test_exact_means_up_to_the_digits_that_are_printed():
    assert Scored(cell(92, "exact"), 91.67).is_met
    assert not Scored(cell(92, "exact"), 91.4).is_met
    assert Scored(cell(12.5, "exact"), 12.54).is_met


def test_a_gain_can_be_far_off_by_points_alone():
    within, beyond = (Scored(cell(20.0, is_gain=True, bar_points=4.0), ours) for ours in (25.0, 28.0))
    assert within.is_met and not within.is_far
    assert beyond.is_met and beyond.is_far


def test_the_figures_are_those_of_the_cells(report):
    figures = {each["name"]: each["value"] for each in report.figures()}
    errors = [abs(each.error) for each in report.of_role(HELD_OUT)]
    assert figures["reproduce.held_out_worst"] == pytest.approx(max(errors), abs=1e-4)
    assert figures["reproduce.held_out_median"] == pytest.approx(statistics.median(errors), abs=1e-4)
    gpu = [abs(each.error) for each in report.of_role(HELD_OUT) if each.cell.gpu]
    assert len(gpu) == 4 and figures["reproduce.gpu_held_out_median"] == pytest.approx(statistics.median(gpu), abs=1e-4)
    assert len(figures) == 4 + len(errors)


def test_every_miss_is_explained_and_nothing_else_is(report):
    far = {each.cell.id for each in report.of_role(HELD_OUT) if each.is_far}
    assert far == set(read_table(FINDINGS))
    assert all(each.finding for each in report.scored.values() if each.cell.id in far)
    assert any(abs(report.scored[name].error) > BAR for name in far)


# ---------------------------------------------------------------- the log


def test_a_run_is_logged_once(tmp_path, report):
    log = tmp_path / "runs.jsonl"
    assert append_run(log, report, "2026-11-30", "abc")
    assert not append_run(log, report, "2026-12-01", "def")
    other = make_report(NONE)
    assert append_run(log, other, "2026-12-01", "def")
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each["commit"] for each in entries] == ["abc", "def"]
    assert entries[0]["held_out_median"] == pytest.approx(report.held_out_median, abs=1e-4)
