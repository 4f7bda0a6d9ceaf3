"""Transfers take bytes over bandwidth, and share what they have in common."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripool.core.messages import Store
from tripool.sim.fabric import ADDRESS, Fabric, FlowDue
from tripool.sim.host import SimHost
from tripool.sim.pricing import Plane, Planes

MB = 1_000_000


class Copier:
    """Begins transfers of so many MB and notes when each ended, and how."""

    def __init__(self, plane: Plane) -> None:
        self.host = SimHost()
        self.fabric = Fabric(Planes({"net": plane}, "net", "net", "net"), self.host.post,
                             self.host.withdraw)
        self.ended: dict[int, tuple[float, str]] = {}
        self.host.add("copier", self)
        self.host.add(ADDRESS, self.fabric)

    def begin(self, number: int, megabytes: int, *ends: tuple[str, float], deadline_s: float = 100.0, rank: int = 0,
              to: str = "copier") -> None:
        verb = Store(number, deadline_s, rank, (), ())
        self.fabric.begin("net", megabytes, MB, [((name, 0), share) for name, share in ends], to, verb, self.host.now)

    def handle(self, message, now):
        if isinstance(message, FlowDue) and self.fabric.take(message, now):
            assert message.flow.verb.verb_id not in self.ended, "it ended twice"
            self.ended[message.flow.verb.verb_id] = round(now, 6), message.cause
        return []


@pytest.fixture
def copier() -> Copier:
    return Copier(Plane(bytes_per_s=100 * MB, latency_s=0.01))


def test_one_transfer_takes_its_bytes_over_the_bandwidth_and_the_latency(copier):
    copier.begin(1, 50, ("a", 1.0), ("b", 1.0))
    copier.host.run_until(10.0)

    assert copier.ended == {1: (0.51, "")}
    assert copier.fabric.moved_bytes("net", 10.0) == 50 * MB


def test_nothing_to_copy_takes_the_latency(copier):
    copier.begin(1, 0, ("a", 1.0))
    copier.host.run_until(10.0)

    assert copier.ended == {1: (0.01, "")}


def test_two_that_meet_at_an_endpoint_share_it_and_the_one_left_is_as_fast_as_alone(copier):
    copier.begin(1, 50, ("a", 1.0), ("b", 1.0))
    copier.begin(2, 100, ("a", 1.0), ("c", 1.0))
    copier.begin(3, 50, ("d", 1.0), ("e", 1.0))
    copier.host.run_until(10.0)

    # 1 has half of a until its last byte has arrived; 2 has moved 50.5 MB by then.
    assert copier.ended == {1: (1.01, ""), 2: (1.515, ""), 3: (0.51, "")}


def test_one_that_begins_later_slows_the_other_from_then_on(copier):
    copier.begin(1, 100, ("a", 1.0))
    copier.host.run_until(0.5)
    copier.begin(2, 25, ("a", 1.0))
    copier.host.run_until(10.0)

    assert copier.ended[2] == (1.01, "")            # 25 MB at half the bandwidth
    assert copier.ended[1][0] == pytest.approx(1.26, abs=0.01)


def test_a_transfer_from_many_servers_is_bound_by_its_target(copier):
    copier.begin(1, 100, ("target", 1.0), *((f"server-{index}", 0.25) for index in range(4)))
    copier.begin(2, 100, ("other", 1.0), *((f"server-{index}", 0.25) for index in range(4)))
    copier.host.run_until(10.0)

    assert copier.ended == {1: (1.01, ""), 2: (1.01, "")}


def test_software_may_be_slower_than_the_plane():
    copier = Copier(Plane(100 * MB, flow_bytes_per_s=10 * MB))
    copier.begin(1, 50, ("a", 1.0))
    copier.host.run_until(10.0)

    assert copier.ended == {1: (5.0, "")}


def test_what_does_not_end_in_time_fails_at_its_deadline(copier):
    copier.begin(1, 500, ("a", 1.0), deadline_s=2.0)
    copier.begin(2, 10, ("a", 1.0))
    copier.host.run_until(10.0)

    assert copier.ended[1] == (2.0, "it did not end within 2 s")
    assert copier.ended[2] == (0.21, "")


def test_over_a_lost_plane_nothing_moves_until_it_is_back(copier):
    copier.begin(1, 100, ("a", 1.0), deadline_s=2.0)
    copier.begin(2, 100, ("b", 1.0), deadline_s=20.0)
    copier.host.run_until(0.5)
    copier.fabric.lose_plane("net", 0.5)
    copier.host.run_until(3.0)
    copier.fabric.return_plane("net", 3.0)
    copier.host.run_until(10.0)

    assert copier.ended == {1: (2.0, "it did not end within 2 s"), 2: (3.51, "")}


def test_transfers_for_somebody_who_is_gone_leave_their_share_to_others_and_nobody_is_told(copier):
    copier.begin(1, 100, ("a", 1.0), ("b", 1.0))
    copier.begin(2, 100, ("a", 1.0), ("c", 1.0), to="other")
    copier.host.run_until(1.0)                                  # half of each
    copier.fabric.end_transfers_of("other", 1.0)
    copier.host.add("other", copier)                            # a new life, which did not begin it
    copier.host.run_until(10.0)

    assert copier.ended == {1: (1.51, "")}
    assert copier.fabric.moved_bytes("net", 10.0) == 150 * MB


def test_transfers_of_a_process_that_is_gone_fail_at_once_and_others_go_on(copier):
    copier.begin(1, 100, ("a", 1.0), ("server", 1.0))
    copier.begin(2, 100, ("b", 1.0))
    copier.host.run_until(0.5)
    copier.fabric.lose_endpoint("server", 0.5)
    copier.host.run_until(10.0)

    assert copier.ended == {1: (0.5, "server is gone"), 2: (1.01, "")}


def test_a_transfer_of_nothing_for_somebody_who_is_gone_is_not_told_to_his_next_life(copier):
    copier.begin(1, 0, ("a", 1.0), to="other")
    copier.begin(2, 0, ("a", 1.0))
    copier.fabric.end_transfers_of("other", 0.0)
    copier.host.add("other", copier)
    copier.host.run_until(10.0)

    assert copier.ended == {2: (0.01, "")}


def test_transfers_that_a_lost_rank_made_fail_at_once_and_leave_their_share_to_others(copier):
    copier.begin(1, 100, ("a", 1.0), ("lost", 1.0))            # from the lost rank, for another one
    copier.begin(2, 100, ("a", 1.0), ("lost", 1.0), rank=3)
    copier.host.run_until(1.0)                                 # half of each
    copier.begin(3, 0, ("lost", 1.0), rank=3)
    copier.fabric.fail_transfers_of("copier", 3, "rank 3 is gone", 1.0)
    copier.host.run_until(10.0)

    assert copier.ended == {1: (1.51, ""), 2: (1.0, "rank 3 is gone"), 3: (1.0, "rank 3 is gone")}


def test_a_loss_is_not_forgotten_because_something_else_begins_at_that_moment(copier):
    copier.begin(1, 100, ("a", 1.0), ("server", 1.0))
    copier.host.run_until(0.5)
    copier.fabric.lose_endpoint("server", 0.5)
    copier.begin(2, 50, ("a", 1.0))                            # 1 meets it, and is reckoned anew
    copier.begin(3, 50, ("b", 1.0), ("server-2", 1.0))
    copier.begin(4, 50, ("c", 1.0), ("server-2", 1.0))
    copier.fabric.lose_endpoint("server-2", 0.5)               # they never had a rate
    copier.host.run_until(10.0)

    assert copier.ended == {1: (0.5, "server is gone"), 2: (1.01, ""), 3: (0.5, "server-2 is gone"),
                            4: (0.5, "server-2 is gone")}


def test_a_last_byte_that_a_plane_takes_along_arrives_when_it_is_back(copier):
    copier.begin(1, 50, ("a", 1.0))
    copier.host.run_until(0.505)                               # it has left, and is not there yet
    copier.fabric.lose_plane("net", 0.505)
    copier.host.run_until(2.0)
    copier.fabric.return_plane("net", 2.0)
    copier.host.run_until(10.0)

    assert copier.ended == {1: (2.01, "")}


NAMES, OWNERS = ("a", "b", "c"), ("copier", "other")
BEGIN = st.tuples(st.just("begin"), st.sampled_from((0, 1, 25, 50, 100)),
                  st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from((1.0, 0.5))), min_size=1, max_size=3,
                           unique_by=lambda each: each[0]),
                  st.sampled_from((0.25, 1.0, 9.0)), st.sampled_from((0, 1)), st.sampled_from(OWNERS))
LOSE = (st.tuples(st.just("endpoint"), st.sampled_from(NAMES))
        | st.tuples(st.just("rank"), st.sampled_from(OWNERS), st.sampled_from((0, 1)))
        | st.tuples(st.just("owner"), st.sampled_from(OWNERS))
        | st.tuples(st.sampled_from(("plane", "plane is back"))))
MOMENTS = st.lists(st.tuples(st.integers(1, 2), st.lists(st.lists(BEGIN | LOSE, max_size=4), max_size=3)), max_size=6)
"""Of each: quarters of a second after the one before, and what happens then. After each part of it messages that are
due come in between."""


class Troubled(Copier):
    """Knows of each transfer whether it was failed or dropped."""

    def __init__(self, plane: Plane) -> None:
        super().__init__(plane)
        self.begun: dict[int, tuple[set[str], int, str]] = {}      # where it meets others, its rank, and whose it is
        self.failed: dict[int, float] = {}                         # and when
        self.dropped: dict[int, None] = {}
        self.host.add("other", self)
        self.host.add("trouble", self)

    def handle(self, message, now):
        if isinstance(message, FlowDue):
            return super().handle(message, now)
        for name, *what in message[0]:
            self.strike(name, what, now)
        if len(message) > 1:
            self.host.post("trouble", message[1:])
        return []

    def strike(self, name: str, what: list, now: float) -> None:
        match name, what:
            case "begin", (megabytes, ends, deadline_s, rank, to):
                is_met = megabytes or self.fabric.wires["net"].is_lost
                number = len(self.begun) + 1
                self.begun[number] = ({end for end, _ in ends} if is_met else set(), rank, to)
                self.begin(number, megabytes, *ends, deadline_s=deadline_s, rank=rank, to=to)
            case "endpoint", (lost,):
                self.fail(lambda ends, rank, to: lost in ends, now)
                self.fabric.lose_endpoint(lost, now)
            case "rank", (lost_of, lost):
                self.fail(lambda ends, rank, to: (to, rank) == (lost_of, lost), now)
                self.fabric.fail_transfers_of(lost_of, lost, "its rank is gone", now)
            case "owner", (gone,):
                self.dropped |= {number: None for number in self.under_way() if self.begun[number][2] == gone}
                self.fabric.end_transfers_of(gone, now)
            case "plane", _:
                self.fabric.lose_plane("net", now)
            case _:
                self.fabric.return_plane("net", now)

    def under_way(self) -> list[int]:
        return [number for number in self.begun if number not in self.ended and number not in self.dropped]

    def fail(self, which: Callable[[set[str], int, str], bool], now: float) -> None:
        self.failed |= {number: now for number in self.under_way()
                        if number not in self.failed and which(*self.begun[number])}

    def check(self) -> None:
        """What holds between two moments."""
        wire = self.fabric.wires["net"]
        flows = [*wire.flows(), *wire.empty]
        assert sorted(flow.verb.verb_id for flow in flows) == self.under_way()
        assert not self.dropped.keys() & self.ended.keys()
        for end in wire.ends.values():
            shares = [share for flow in end.flows for at, share in flow.ends if at is end]
            assert shares and end.load == pytest.approx(sum(shares)), end.name
        for flow in wire.flows():
            rate = 0.0 if wire.is_lost else wire.bytes_per_s / max(end.load for end in flow.places)
            assert flow.rate == pytest.approx(min(rate, wire.flow_bytes_per_s or rate)), flow.verb
        for number, at_s in self.failed.items():
            if number not in self.dropped:
                ended_s, cause = self.ended[number]
                assert ended_s == at_s and cause.endswith("is gone"), number


@given(moments=MOMENTS, latency_s=st.sampled_from((0.0, 0.25)), cap=st.sampled_from((0.0, 60.0 * MB)))
def test_whatever_happens_at_one_moment_each_transfer_is_over_once_and_shares_are_right(moments, latency_s, cap):
    copier, now = Troubled(Plane(100 * MB, latency_s, cap)), 0.0
    for quarters, parts in moments:
        now += quarters / 4
        if parts:
            copier.host.post("trouble", parts, now)            # before or after what else is due then
        copier.host.run_until(now + 1e-6)
        copier.check()

    copier.host.post("trouble", [[("plane is back",)]])
    copier.host.run_until(now + 100.0)
    copier.check()
    assert copier.under_way() == []
