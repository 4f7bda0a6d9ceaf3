import json

import numpy as np
import pytest

from tripool.core.errors import ConfigError
from tripool.sim.costs.state import StepState
from tripool.sim.costs.states import decode_state, prefill_state
from tripool.sim.costs.table import FORMAT, MeasuredCosts, read_table

STEPS = {
    "idle_s": 0.001, "threads": 1,
    "decode": {"tokens": [1, 3], "context": [0, 100], "seconds": [[0.010, 0.020], [0.030, 0.050]]},
    "prefill": {"tokens": [10, 20], "first": [0, 100], "seconds": [[0.1, 0.2], [0.3, 0.4]]},
}
TABLE = {"format": FORMAT, "machine": "a laptop", "model": "tripool-tiny", "measured": "2026-11-30", "api_s": 0.002,
         "roles": {"hybrid": STEPS}}


def read(tmp_path, **changes):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(TABLE | changes))
    return read_table(path)


def costs(tmp_path, **changes) -> MeasuredCosts:
    """Of a hybrid instance, with changed steps."""
    return read(tmp_path, roles={"hybrid": STEPS | changes}).of("hybrid")


@pytest.mark.parametrize(("rows", "context", "expected"), [
    (1, 0, 0.010), (3, 100, 0.050), (2, 50, 0.0275), (5, 0, 0.050), (1, 300, 0.040)])
def test_steps_between_and_beyond_the_measured_ones(tmp_path, rows, context, expected):
    assert costs(tmp_path).step_time(decode_state(1, rows, context)).total_s == pytest.approx(expected)


def test_drafts_count_as_tokens_and_everything_is_called_measured(tmp_path):
    breakdown = costs(tmp_path).step_time(decode_state(1, 1, 0, drafts=2))
    assert breakdown.total_s == pytest.approx(0.030)
    assert {part.level for part in breakdown.parts} == {"measured"}


def test_a_chunk_adds_to_the_step_and_the_slowest_rank_decides(tmp_path):
    table = costs(tmp_path)
    assert table.step_time(prefill_state(1, 1, 20)).total_s == pytest.approx(0.001 + 0.3)
    rows = np.array([1, 3])
    state = StepState(rows, rows * 0, rows * 0, np.array([0]), np.array([0]), np.array([10]))
    assert table.step_time(state).total_s == pytest.approx(0.010 + 0.1)


def test_chunks_of_a_rank_cost_what_one_with_as_many_tokens_and_positions_does(tmp_path):
    table = costs(tmp_path)
    one = table.step_time(prefill_state(1, 1, 20 + 40, cached=40)).total_s
    none = np.zeros(1, np.int64)
    two = StepState(none, none, none, np.array([0, 0]), np.array([40, 50]), np.array([10, 10]))
    assert table.step_time(two).total_s == pytest.approx(one)


def test_rows_and_chunks_in_one_step_may_cost_less_than_both(tmp_path):
    rows = np.array([3])
    state = StepState(rows, rows * 0, rows * 0, np.array([0]), np.array([0]), np.array([10]))
    costs_of = costs(tmp_path, mixed=0.8)
    assert costs_of.step_time(state).total_s == pytest.approx(0.8 * (0.030 + 0.1))
    assert costs_of.step_time(decode_state(1, 3, 0)).total_s == pytest.approx(0.030)


def test_a_step_of_both_is_never_shorter_than_its_longer_part(tmp_path):
    rows = np.array([1])
    state = StepState(rows, rows * 0, rows * 0, np.array([0]), np.array([0]), np.array([20]))
    breakdown = costs(tmp_path, mixed=0.8).step_time(state)
    assert breakdown.total_s == pytest.approx(0.001 + 0.3)       # as if nobody decoded: 0.8 times both would be less
    assert {part.level for part in breakdown.parts} == {"measured"}


def test_nobody_computes_and_the_step_is_idle(tmp_path):
    assert costs(tmp_path).step_time(decode_state(4, 0, 0)).total_s == pytest.approx(0.001)


def test_each_role_has_its_own_steps_and_factors(tmp_path):
    table = read(tmp_path, roles={"prefill": STEPS | {"beside": 1.3}, "decode": STEPS | {"idle_s": 0.002}})
    idle = decode_state(1, 0, 0)
    assert [table.of(role).step_time(idle).total_s for role in ("prefill", "decode")] == pytest.approx([0.001, 0.002])
    assert table.beside == {"prefill": 1.3, "decode": 1.0}
    assert table.factors["api_s"] == 0.002
    assert table.factors["prefill_beside"] == 1.3
    with pytest.raises(ConfigError, match="steps of prefill, decode were measured, but none of hybrid"):
        table.of("hybrid")


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"format": "other/1"}, "format is 'other/1'"),
    ({"speed": 9}, "unknown field `speed`"),
    ({"api_s": -1}, "api_s is -1"),
    ({"roles": {}}, "roles is empty"),
    ({"roles": {"oracle": STEPS}}, "roles.oracle is no role"),
])
def test_a_table_that_is_none_is_refused(tmp_path, changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, **changes)


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"idle_s": -1}, r"hybrid\.idle_s is -1"),
    ({"beside": 0.5}, r"hybrid\.beside is 0\.5"),
    ({"mixed": 0.0}, r"hybrid\.mixed is 0\.0"),
    ({"decode": STEPS["decode"] | {"tokens": [3, 1]}}, r"decode\.tokens is"),
    ({"decode": STEPS["decode"] | {"context": []}}, r"decode\.context is"),
    ({"prefill": STEPS["prefill"] | {"seconds": [[0.1], [0.3]]}}, r"prefill\.seconds must be 2 lists of 2"),
    ({"prefill": STEPS["prefill"] | {"seconds": [[0.1, -0.2], [0.3, 0.4]]}}, "negative"),
])
def test_steps_that_are_none_are_refused(tmp_path, changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        costs(tmp_path, **changes)


def test_a_number_that_is_none_is_refused(tmp_path):
    path = tmp_path / "table.json"
    path.write_text('{"format": "tripool-steps/1", "api_s": NaN}')
    with pytest.raises(ConfigError, match="is no table of step costs"):
        read_table(path)


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_table(tmp_path / "none.json")
