import json

import pytest

from common import Report, in_turn, spread


def test_a_report_carries_everything_needed_to_judge_a_figure(tmp_path):
    report = Report("How long?", {"quick": True})
    report.figure("x.wait_ms_p50", 2.0, "ms", samples=[1.0, 2.0, 3.0], bar=5)
    report.write(str(tmp_path / "out" / "x.json"))

    found = json.loads((tmp_path / "out" / "x.json").read_text())
    assert set(found) == {"question", "commit", "machine", "parameters", "figures", "samples"}
    assert found["figures"] == [{"name": "x.wait_ms_p50", "value": 2.0, "unit": "ms", "kind": "measured", "bar": 5}]
    assert found["samples"]["x.wait_ms_p50"] == [1.0, 2.0, 3.0]
    assert found["machine"]["cores"] >= 1


def test_a_published_figure_names_its_version():
    with pytest.raises(AssertionError, match="version"):
        Report("?").figure("paper.tpot_ms", 50.0, "ms", "published")


def test_compared_things_take_turns():
    assert [name for _, name in in_turn(["a", "b"], 2)] == ["a", "b", "a", "b"]


def test_the_spread_is_the_middle_half():
    assert spread([1, 2, 3, 4, 5]) == (2, 4)
    assert spread([7]) == (7, 7)
