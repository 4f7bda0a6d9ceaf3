import json

import pytest

from common import Report, flags, in_turn, spread, writable


def test_a_report_carries_everything_needed_to_judge_a_figure(tmp_path):
    report = Report("How long?", {"quick": True})
    report.figure("x.wait_ms_p50", 2.0, "ms", samples=[1.0, 2.0, 3.0], bar=5)
    report.write(writable(str(tmp_path / "out" / "x.json")))

    found = json.loads((tmp_path / "out" / "x.json").read_text())
    assert set(found) == {"question", "commit", "machine", "parameters", "figures", "samples"}
    assert found["figures"] == [{"name": "x.wait_ms_p50", "value": 2.0, "unit": "ms", "kind": "measured", "bar": 5}]
    assert found["samples"]["x.wait_ms_p50"] == [1.0, 2.0, 3.0]
    assert found["machine"]["cores"] >= 1


def test_a_published_figure_names_its_version():
    with pytest.raises(AssertionError, match="version"):
        Report("?").figure("paper.tpot_ms", 50.0, "ms", "published")


def test_what_cannot_be_written_is_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "x.json"):
        with pytest.raises(SystemExit):
            flags("?").parse_args(["--json", str(path)])
        assert f"argument --json: {path} cannot be written" in capsys.readouterr().err
    assert flags("?").parse_args([]).json == "-"


def test_compared_things_take_turns():
    assert [name for _, name in in_turn(["a", "b"], 2)] == ["a", "b", "a", "b"]


def test_the_spread_is_the_middle_half():
    assert spread([1, 2, 3, 4, 5]) == (2, 4)
    assert spread([7]) == (7, 7)
