"""`tripool plan` answers on the screen, in JSON, as a picture, and with files that `simulate` and `serve` take."""

import json
import shlex
from dataclasses import replace

import pytest
from PIL import Image
from typer.testing import CliRunner

from tripool.cli.flags import show_deployment
from tripool.cli.main import app
from tripool.cli.plan import check_written
from tripool.core.deployment import Deployment, InstanceConfig, build, read_table
from tripool.core.errors import ConfigError
from tripool.sim.hardware.description import FOLDER

ASKED = ("--model", "tiny", "--rate", "15", "--prompt-tokens", "400", "--output-tokens", "20", "--slo-ttft", "1",
         "--slo-tpot", "0.02", "--processes", "1")


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    path = tmp_path_factory.mktemp("machine") / "cluster.toml"
    path.write_text((FOLDER / "cpu.toml").read_text().replace("nodes = 1", "nodes = 2"))
    return str(path)


def run(command: str, *words: str) -> str:
    done = CliRunner().invoke(app, [command, *words], catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def planned(machine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned")
    ours = folder / "ours.toml"
    ours.write_text(show_deployment(Deployment(hybrid=InstanceConfig(count=2, max_num_seqs=64)), changed_only=True))
    told = run("plan", *ASKED, "--hardware", machine, "--against", str(ours), "--out", str(folder / "plans"),
               "--png", str(folder / "front.png"), "--json", str(folder / "figures.json"), "--no-corrections")
    return folder, told, json.loads((folder / "figures.json").read_text())


def test_the_screen_says_what_is_best_what_binds_and_what_else(planned):
    _, told, figures = planned

    for words in ("The fewest for TTFT 1 s", figures["plans"][0]["deployment"], "split", "is bound by", "1 in detail",
                  "blocks of 128 tokens", "Prices of steps: efficiency; corrections: layer_overhead 0, ",
                  "What speed costs", "as they are", "load × 1.2", "yours", "what differs", "hybrid.count"):
        assert words in told


def test_figures_say_what_is_simulated_and_what_is_closed_form(planned):
    _, _, figures = planned

    best = figures["plans"][0]
    assert figures["kind"] == "simulated" and best["share"] >= 0.9
    assert figures["level"] == "efficiency" and not any(figures["factors"].values())
    assert {each["kind"] for each in figures["front"] + figures["what_if"]} == {"closed form"}
    assert figures["against"]["npus"] == 2 and best["npus"] <= 2
    assert best["goodput_requests_per_s"] == pytest.approx(best["share"] * best["requests_per_s"])


def test_files_are_taken_by_simulate_and_serve_and_say_what_was_planned(planned, machine):
    folder, _, figures = planned
    best = folder / "plans" / "best.toml"

    made = build(Deployment, read_table(best), "best")
    assert show_deployment(made, changed_only=True) == figures["plans"][0]["toml"]
    options = best.read_text().partition("`tripool simulate` takes as: ")[2].partition("\n")[0]
    assert shlex.split(options) == ["--hardware", machine, "--no-corrections"]
    simulated = run("simulate", str(best), *shlex.split(options), "--rate", "15", "--duration", "3", "--prompt-tokens",
                    "400", "--output-tokens", "20", "--json", "-")
    assert json.loads(simulated)["requests"]["served"] > 20
    assert "pool_gbps" not in json.loads(simulated)["factors"]
    shown = run("serve", "--config", str(best), "--show-config")
    assert f"cache_tokens = {max(made.hybrid.cache_tokens, made.decode.cache_tokens)}" in shown
    assert best.read_text().startswith(f"# {figures['plans'][0]['deployment']}, planned by `tripool plan`")
    assert len(list((folder / "plans").iterdir())) == len(figures["plans"])


def test_what_is_read_back_as_another_deployment_is_an_error(planned):
    folder, _, _ = planned
    best = folder / "plans" / "best.toml"
    made = build(Deployment, read_table(best), "best")

    check_written(best, made)
    with pytest.raises(ConfigError, match="read back as another"):
        check_written(best, replace(made, block_tokens=64))


def test_the_front_is_drawn(planned):
    folder, _, _ = planned
    with Image.open(folder / "front.png") as image:
        assert image.size == (980, 620)
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 5


@pytest.mark.parametrize(("words", "complaint"), [
    (("--against", "large.toml"), "the deployment needs 5 dies, and cpu has 1"),
    (("--out", "large.toml"), "--out is large.toml, which cannot be written: File exists"),
])
def test_files_that_cannot_be_used_are_told_before_the_search(words, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tripool.cli.plan.Search", None)
    (tmp_path / "large.toml").write_text("[hybrid]\ncount = 5\n")
    with pytest.raises(ConfigError, match=complaint):
        CliRunner().invoke(app, ["plan", *ASKED, "--hardware", "cpu", *words], catch_exceptions=False)


@pytest.mark.parametrize(("words", "complaint"), [
    ((*ASKED, "--hardware", "nowhere"), "there is no hardware 'nowhere'"),
    (("--model", "none", *ASKED[2:], "--hardware", "cpu"), "there is no model 'none'"),
    ((*ASKED[:8], "--slo-ttft", "1", "--slo-tpot", "0.000001", "--hardware", "cpu"), "TPOT 1e-06 s cannot be met"),
    ((*ASKED, "--hardware", "cpu", "--npus", "7"), "the budget is 7 CPUs, and cpu has 1"),
    ((*ASKED, "--hardware", "cpu", "--budget", "3"), "does not say what one CPU costs"),
    (("--model", "tiny", *ASKED[4:], "--hardware", "cpu"), "give --workload FILE or"),
    ((*ASKED, "--hardware", "cpu", "--png", "nowhere/front.png"), "there is no folder nowhere"),
    ((*ASKED, "--hardware", "cpu", "--png", "one", "--json", "one"), "--png and --json are both one"),
    ((*ASKED, "--hardware", "cpu", "--burst-seconds", "5"), "burst_s is 5 .* give burst_every_s, too"),
    ((*ASKED, "--hardware", "cpu", "--expert-drift", "60"), "--expert-drift is 60, but --expert-spread is 0"),
])
def test_what_cannot_be_planned_is_said_before_anything_is_simulated(words, complaint):
    with pytest.raises(ConfigError, match=complaint):
        CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
