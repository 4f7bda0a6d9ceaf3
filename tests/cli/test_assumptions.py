"""What is assumed of the machine is said as the options that assume it."""

from dataclasses import fields, replace

import pytest
from typer.testing import CliRunner

from tripool.cli.assumptions import Assumptions
from tripool.cli.main import app
from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.errors import ConfigError
from tripool.sim.costs.models import read_shape
from tripool.sim.hardware.description import read_hardware
from tripool.sim.machine import rig_of

OTHER = {"acceptance": (0.7, 0.5), "pull_plane": "management", "pool_plane": "management", "level": "speed of light",
         "corrections": False, "expert_spread": 0.3, "expert_drift": 60.0, "npu_hour_price": 2.5}
EVEN = {"perfect_balance": True}           # in place of a spread


def test_what_is_so_by_default_is_not_typed():
    assert Assumptions().options() == []
    assert set(OTHER | EVEN) == {each.name for each in fields(Assumptions)}
    assert replace(Assumptions(), **OTHER).options() == [
        "--acceptance", "0.7", "--acceptance", "0.5", "--pull-plane", "management", "--pool-plane", "management",
        "--level", "speed of light", "--no-corrections", "--expert-spread", "0.3", "--expert-drift", "60.0",
        "--npu-hour-price", "2.5"]
    assert replace(Assumptions(), **EVEN).options() == ["--perfect-balance"]


def test_a_spread_is_not_told_where_all_experts_are_asked_alike():
    with pytest.raises(ConfigError, match=r"--expert-spread is 0\.3, but with --perfect-balance all experts are asked"):
        replace(Assumptions(), perfect_balance=True, expert_spread=0.3)


class Seen(Exception):
    """Ends a command where it asks what its options mean."""


@pytest.mark.parametrize("assumed", [OTHER, EVEN], ids=["other", "even"])
@pytest.mark.parametrize("words", [("simulate", "hybrid.toml"), ("plan", "--model", "tiny", "--slo-ttft", "1",
                                                                 "--slo-tpot", "1")], ids=lambda words: words[0])
def test_both_commands_assume_what_the_options_say(words, assumed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hybrid.toml").write_text('[model]\npath = "tripool-tiny"\n[hybrid]\ncount = 1\n')

    def show(meant: Assumptions) -> None:
        raise Seen(*meant.options())

    monkeypatch.setattr(Assumptions, "settings", show)
    typed = replace(Assumptions(), **assumed).options()
    with pytest.raises(Seen) as caught:
        CliRunner().invoke(app, [*words, "--hardware", "cpu", "--rate", "1", *typed], catch_exceptions=False)
    assert list(caught.value.args) == typed


def test_settings_are_what_a_machine_is_made_with(tmp_path):
    hybrid = Deployment(hybrid=InstanceConfig(count=1, ranks=4, redundant_experts=4))
    shape, hardware = read_shape("tiny"), read_hardware("cloudmatrix384")

    plain = rig_of(hybrid, shape, hardware, **Assumptions().settings())
    other = rig_of(hybrid, shape, hardware, **replace(Assumptions(), **OTHER | {"level": None}).settings())
    assert (plain.planes.pull, other.planes.pull, other.planes.pool) == ("RDMA", "VPC", "VPC")
    assert (other.acceptance, other.npu_hour_price) == ((0.7, 0.5), 2.5)
    assert "layer_overhead" in plain.factors and other.factors.get("layer_overhead", 0.0) == 0.0
    assert rig_of(hybrid, shape, hardware, **replace(Assumptions(), expert_spread=0.3).settings()).factors[
        "expert_spread"] == 0.3
