"""Transfers and the exchange of steps on one plane: both get less of a link, and nothing else changes."""

from dataclasses import dataclass, replace

import pytest

from tests.sim.rigs import COSTS, DECODE, HYBRID, PLANES, PREFILL, RIG, but, deployment, figures, simulate
from tests.sim.test_fabric import MB, Copier
from tripool.core.deployment import CacheConfig
from tripool.core.errors import ConfigError
from tripool.sim.costs.state import Breakdown, Part, StepState
from tripool.sim.fabric import LinksChanged
from tripool.sim.failures import parse_failure
from tripool.sim.pricing import ExchangeLinks, Plane, Planes, PoolEnds
from tripool.sim.requests import Workload, WorkRequest
from tripool.sim.simulation import Rig

GB = 1e9
TOKEN_BYTES = 1_000_000                    # a prompt of 1,000 tokens is pulled in a second, when it is alone
LIGHT = 70_000
SHARED = "exchange beside transfers"


@dataclass(frozen=True)
class ExchangingCosts:
    """30 ms, a third of which is exchange that fills its links."""

    def step_time(self, state: StepState) -> Breakdown:
        return Breakdown((Part("expert FFN", 0.02, "measured"), Part("dispatch", 0.01 / state.link_share, "measured")))


def rig(pull: str = "ub", *roles: str, token_bytes: int = TOKEN_BYTES) -> Rig:
    planes = Planes({"ub": Plane(1 * GB), "rdma": Plane(1 * GB), "vpc": Plane(5 * GB, 1e-6)}, pull, "rdma", "vpc")
    links = {role: ExchangeLinks("ub", 1 * GB, "measured") for role in roles or ("decode",)}
    return replace(RIG, costs={"prefill": COSTS, "decode": ExchangingCosts(), "hybrid": COSTS}, planes=planes,
                   token_bytes=token_bytes, links=links)


ONE_EACH = deployment(prefill=but(PREFILL, count=1), decode=but(DECODE, count=1), cache=CacheConfig())
LONG_AND_LATER = Workload("one decodes, another is pulled", (WorkRequest(0.0, ((1, 128),), 400),
                                                             WorkRequest(3.0, ((2, 1280),), 4)))


def parts(simulation, role: str = "decode") -> dict[str, float]:
    return {part["part"]: part["seconds"] for part in figures(simulation)["step_parts"][role]}


def test_a_pull_during_steps_makes_exactly_their_exchange_longer():
    shared, apart = (simulate(ONE_EACH, LONG_AND_LATER, rig=rig(plane)) for plane in ("ub", "rdma"))

    # Half of the link is left, so steps take 40 ms; a third of each is exchange, so the pull has 5/6 of the link.
    pull_s = 1280 * TOKEN_BYTES / (5 / 6 * GB)
    with_it, without = parts(shared), parts(apart)
    assert with_it.pop(SHARED) == pytest.approx(pull_s * (1 - 30 / 40), rel=0.01)
    assert SHARED not in without
    assert {name: seconds / with_it["expert FFN"] for name, seconds in with_it.items()} == pytest.approx(
        {name: seconds / without["expert FFN"] for name, seconds in without.items()})
    long, later = shared.users.journeys
    assert long.tpot_s * 399 == pytest.approx(apart.users.journeys[0].tpot_s * 399 + pull_s / 4, rel=0.01)
    assert later.tpot_s > apart.users.journeys[1].tpot_s


def test_on_a_plane_of_its_own_a_pull_changes_nothing():
    apart = rig("rdma", token_bytes=LIGHT)
    met, unmet = (simulate(rig=each) for each in (apart, replace(apart, links={})))

    assert figures(met) == figures(unmet) and figures(met)["requests"]["served"] > 50
    assert "simulation.least_link_share" not in figures(met)["factors"]
    assert figures(simulate(rig=rig(token_bytes=LIGHT)))["factors"]["simulation.least_link_share"] == 1 / 32


def test_the_instance_that_is_pulled_from_is_slowed_too():
    costs = {"prefill": ExchangingCosts(), "decode": COSTS}
    work = Workload("a long prompt is prefilled while one is pulled", tuple(
        WorkRequest(0.01 * each, ((each, 1280),), 2) for each in range(12)))
    small = deployment(prefill=but(PREFILL, count=1, max_num_batched_tokens=256), decode=but(DECODE, count=1),
                       cache=CacheConfig())
    done = simulate(small, work, rig=replace(rig("ub", "prefill"), costs=costs))

    assert parts(done, "prefill")[SHARED] > 0.1 * parts(done, "prefill")["expert FFN"]


def test_steps_that_are_taken_together_end_when_a_pull_begins():
    together, one_by_one = (simulate(rig=rig(token_bytes=LIGHT), every_step=each) for each in (False, True))

    first, second = figures(together), figures(one_by_one)
    assert first["pools"]["decode"]["steps"] == second["pools"]["decode"]["steps"]
    assert first["latency"] == second["latency"]
    assert parts(together)[SHARED] == pytest.approx(parts(one_by_one)[SHARED]) != 0.0


def test_rows_that_draft_meet_pulls_too():
    made = deployment(prefill=but(PREFILL, count=1), decode=but(DECODE, count=1, num_speculative_tokens=2),
                      cache=CacheConfig())
    together, one_by_one = (simulate(made, rig=rig(token_bytes=LIGHT), every_step=each) for each in (False, True))

    assert parts(together)[SHARED] > 0.0
    assert figures(together)["latency"] == figures(one_by_one)["latency"]


@pytest.mark.parametrize("failure", ["instance:decode-0@4+3", "plane:ub@4+1", "instance:prefill-0@3.5+2"])
def test_whatever_fails_meanwhile_everything_is_served(failure):
    done = simulate(deployment(hybrid=HYBRID), rig=rig("ub", "prefill", "decode", token_bytes=LIGHT),
                    failures=(parse_failure(failure),))
    assert figures(done)["requests"]["unfinished"] == 0 and parts(done)[SHARED] > 0.0


def test_slow_software_of_a_pool_leaves_the_link_to_the_exchange():
    planes = replace(PLANES, pool_ends=PoolEnds(die_bytes_per_s=2 * GB, server_bytes_per_s=100 * GB))
    links = {"decode": ExchangeLinks("ub", 100 * GB, "measured")}
    slow = replace(RIG, planes=planes, links=links)
    fast = replace(slow, planes=replace(planes, pool_ends=PoolEnds(50 * GB, 100 * GB)))

    assert slow.met_links == {} and fast.met_links == links
    with pytest.raises(ConfigError, match="bytes_per_s is 0"):
        ExchangeLinks("ub", 0, "measured")


# ---------------------------------------------------------------- the plane itself


@pytest.fixture
def copier() -> Copier:
    copier = Copier(Plane(bytes_per_s=100 * MB))
    copier.told = []
    copier.host.add("steps", Steps(copier.told))
    copier.fabric.join("a", "net", 100 * MB, "steps")
    return copier


class Steps:
    def __init__(self, told: list[float]) -> None:
        self.told = told

    def handle(self, message, now):
        assert isinstance(message, LinksChanged)
        self.told.append(round(now, 6))
        return []


def test_a_transfer_gets_its_fair_share_while_tokens_are_on_their_way(copier):
    copier.fabric.exchange("a", "net", 0.5, 0.0)
    copier.begin(1, 75, ("a", 1.0), ("b", 1.0))
    copier.begin(2, 75, ("c", 1.0))
    copier.host.run_until(0.5)
    assert copier.fabric.link_share("a", "net") == 0.5
    copier.host.run_until(10.0)

    assert copier.ended == {1: (1.0, ""), 2: (0.75, "")}       # half of the time with half of the link
    assert copier.told == [0.0, 1.0]
    assert copier.fabric.link_share("a", "net") == 1.0


def test_what_transfers_cannot_take_is_left_to_the_exchange(copier):
    copier.begin(1, 100, ("a", 1.0), ("slow", 4.0))
    copier.host.run_until(0.5)
    assert copier.fabric.link_share("a", "net") == 0.75
    copier.begin(2, 100, ("a", 1.0))
    copier.host.run_until(0.6)
    assert copier.fabric.link_share("a", "net") == pytest.approx(1 / 3)


def test_a_step_that_ends_gives_transfers_its_part(copier):
    copier.fabric.exchange("a", "net", 1.0, 0.0)
    copier.begin(1, 100, ("a", 1.0))
    copier.host.run_until(1.0)                                  # 50 of 100 MB
    copier.fabric.exchange("a", "net", 0.0, 1.0)
    copier.host.run_until(10.0)

    assert copier.ended == {1: (1.5, "")}
