import json

import numpy as np
import pytest

from tripool.core.errors import ConfigError
from tripool.sim.costs.state import StepState
from tripool.sim.costs.states import decode_state, prefill_state
from tripool.sim.costs.table import FORMAT, read_table

TABLE = {
    "format": FORMAT, "machine": "a laptop", "model": "tripool-tiny", "measured": "2026-11-30", "idle_s": 0.001,
    "decode": {"tokens": [1, 3], "context": [0, 100], "seconds": [[0.010, 0.020], [0.030, 0.050]]},
    "prefill": {"tokens": [10, 20], "first": [0, 100], "seconds": [[0.1, 0.2], [0.3, 0.4]]},
}


def costs(tmp_path, **changes):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(TABLE | changes))
    return read_table(path)


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


def test_nobody_computes_and_the_step_is_idle(tmp_path):
    assert costs(tmp_path).step_time(decode_state(4, 0, 0)).total_s == pytest.approx(0.001)


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"format": "other/1"}, "format is 'other/1'"),
    ({"idle_s": -1}, "idle_s is -1"),
    ({"speed": 9}, "unknown field `speed`"),
    ({"decode": TABLE["decode"] | {"tokens": [3, 1]}}, r"decode\.tokens is"),
    ({"decode": TABLE["decode"] | {"context": []}}, r"decode\.context is"),
    ({"prefill": TABLE["prefill"] | {"seconds": [[0.1], [0.3]]}}, r"prefill\.seconds must be 2 lists of 2"),
    ({"prefill": TABLE["prefill"] | {"seconds": [[0.1, -0.2], [0.3, 0.4]]}}, "negative"),
])
def test_a_table_that_is_none_is_refused(tmp_path, changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        costs(tmp_path, **changes)


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_table(tmp_path / "none.json")
