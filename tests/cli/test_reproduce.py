import json
import re

import pytest
from PIL import Image
from typer.testing import CliRunner

from tripool.cli import reproduce as command
from tripool.cli.main import app
from tripool.core.errors import ConfigError
from tripool.sim.reproduce.score import make_report


@pytest.fixture(autouse=True)
def log(tmp_path, monkeypatch):
    """A log of its own, and a wide terminal."""
    path = tmp_path / "runs.jsonl"
    monkeypatch.setattr(command, "LOG", path)
    monkeypatch.setenv("COLUMNS", "160")
    return path


def run(*words: str):
    done = CliRunner().invoke(app, ["reproduce", *words], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_a_table_shows_published_numbers_ours_and_what_they_are():
    text = " ".join(run("--table", "table4_slo").split())
    assert re.search(r"tpot_ms 24\.6 2\d\.\d+ [-+]\d+\.\d % held out", text), text
    assert "never run on this hardware" in text
    assert "layer overhead" in text and "median error" in text


def test_a_miss_is_shown_with_what_was_found_out():
    assert "missed: " in run("--table", "xdeepserve_comm")


def test_what_is_unscored_stays_so():
    line = next(line for line in run("--table", "xdeepserve_production").splitlines() if "ttft_ms" in line)
    assert "900" in line and "unscored" in line and "%" not in line


def test_json_has_every_number_of_every_table():
    found = json.loads(run("--json"))
    cells = [cell for table in found["tables"] for cell in table["cells"]]
    assert len(cells) > 600 and len(found["tables"]) == 47
    assert {figure["name"] for figure in found["figures"]} >= {
        "reproduce.held_out_worst", "reproduce.held_out_median", "reproduce.gpu_held_out_median"}
    assert all(cell["ours"] is None for cell in cells if cell["role"] == "unscored")


def test_json_of_a_table_has_that_table_alone_and_all_figures():
    found = json.loads(run("--json", "--table", "table10_switch"))
    assert [table["id"] for table in found["tables"]] == ["table10_switch"]
    assert len(found["figures"]) > 30


def test_each_table_becomes_a_picture(tmp_path):
    run("--pictures", str(tmp_path / "paper"))
    with Image.open(tmp_path / "paper" / "table4_slo.png") as picture:
        assert picture.size[0] > 800
    assert not (tmp_path / "paper" / "hw_chip.png").exists()


def test_pictures_go_into_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--pictures is .*file, which cannot be written: File exists"):
        run("--table", "table4_slo", "--pictures", str(tmp_path / "file"))


def test_a_run_is_logged_in_a_checkout_and_nowhere_else(log):
    run("--json")
    assert not log.exists()
    log.touch()
    run("--json")
    run("--json")
    assert len(log.read_text().splitlines()) == 1


def test_an_unknown_table_is_named():
    with pytest.raises(ConfigError, match="--table is 'table99'; known are hw_chip"):
        CliRunner().invoke(app, ["reproduce", "--table", "table99"], catch_exceptions=False)


def test_the_log_of_the_checkout_ends_with_the_figures_of_today(monkeypatch):
    monkeypatch.undo()
    last = json.loads(command.LOG.read_text().splitlines()[-1])
    report = make_report(command.fitted_residuals())
    assert last["held_out_worst"] == pytest.approx(report.held_out_worst, abs=2e-4)
    assert last["held_out_median"] == pytest.approx(report.held_out_median, abs=2e-4)
