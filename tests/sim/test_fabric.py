"""Transfers take bytes over bandwidth, and share what they have in common."""

import pytest

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

    def begin(self, number: int, megabytes: int, *ends: tuple[str, float], deadline_s: float = 100.0) -> None:
        verb = Store(number, deadline_s, 0, (), ())
        self.fabric.begin("net", megabytes, MB, [((name, 0), share) for name, share in ends], "copier", verb,
                          self.host.now)

    def handle(self, message, now):
        if isinstance(message, FlowDue) and self.fabric.take(message, now):
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
    copier.fabric.begin("net", 100, MB, [(("a", 0), 1.0), (("c", 0), 1.0)], "other", Store(2, 100.0, 0, (), ()), 0.0)
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
