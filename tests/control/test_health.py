"""Health: ready means that a request can be served now (case C24)."""

from dataclasses import replace

import pytest

from tripool.control.health import Health
from tripool.core.deployment import Deployment, InstanceConfig, ScalingConfig
from tripool.core.messages import Drain, Facts, Heartbeat, Hello, Lost, MemberChanged, Tick

STALL_S = 2.0
RUN_DEADLINE_S = 60.0


def health() -> Health:
    both = InstanceConfig(count=1)
    return Health(Deployment(prefill=both, decode=both, heartbeat_s=0.5, stall_s=STALL_S,
                             run_deadline_s=RUN_DEADLINE_S))


def beat(machine, name, at, *, boot="a", state="up", progress=0, running=0, waiting=0, in_step=False, layout="layout",
         held=(), role=None, load_fraction=0.0):
    facts = Facts("m", "f", layout, 4096, 16, 100) if state != "loading" else None
    return machine.handle(Heartbeat(name, boot, state, progress, running, waiting, 0, 100, facts, held=held, role=role,
                                    in_step=in_step, load_fraction=load_fraction), at)


def up(machine, *names, at=0.0):
    for name in names:
        machine.handle(Hello(name, name.partition("-")[0], "a"), at)
        beat(machine, name, at)


def check(machine, at):
    """Let the timer come as often as it should until `at`; what the last one brought."""
    sends = []
    while machine._check_at is not None and machine._check_at <= at:
        sends += machine.handle(Tick("check"), machine._check_at)
    return sends


def told(sends, to="gateway"):
    return [(each.message.member, each.message.state) for each in sends
            if each.to == to and isinstance(each.message, MemberChanged)]


def test_nobody_is_ready_before_a_pair_is_up():
    machine = health()
    assert not machine.snapshot().ready
    assert machine.snapshot().cause == "no instance has joined yet"

    up(machine, "prefill-0")
    assert not machine.snapshot().ready
    assert "no decode instance is up" in machine.snapshot().cause

    up(machine, "decode-0")
    assert machine.snapshot().ready


def test_load_is_told_to_the_router_with_every_heartbeat():
    machine = health()
    up(machine, "decode-0")
    facts = Facts("m", "f", "layout", 4096, 16, 100)
    (send,) = machine.handle(Heartbeat("decode-0", "a", "up", 1, 3, 2, 40, 70, facts, line_room=5, num_lost_ranks=1),
                             0.5)

    assert send.to == "gateway/router"
    assert send.message == MemberChanged("decode-0", "decode", "a", "up", facts, 3, 40, 70, line_room=5, num_waiting=2,
                                         num_lost_ranks=1)


def test_where_roles_change_a_change_is_told_to_all_and_its_load_to_scaling_too():
    both = InstanceConfig(count=2)
    machine = Health(Deployment(prefill=both, decode=both, scaling=ScalingConfig(enabled=True)))
    up(machine, "prefill-0")
    (_, to_scaling) = beat(machine, "prefill-0", 0.5)
    assert to_scaling.to == "gateway/scaling"

    leaving = Heartbeat("prefill-0", "a", "draining", 1, 0, 0, 0, 100, role="prefill", becomes="decode")
    assert told(machine.handle(leaving, 1.0)) == [("prefill-0", "draining")]
    assert machine.snapshot().members[0].cause == "draining, to serve as decode then"

    sends = machine.handle(replace(leaving, state="up", role="decode", becomes=None), 1.5)
    assert [each.to for each in sends] == ["gateway/router", "gateway/scaling", "gateway"]
    assert {each.message.role for each in sends} == {"decode"}


def test_a_member_that_was_idle_for_long_is_not_stalled_when_it_begins_to_work():
    machine = health()
    up(machine, "hybrid-0")
    for at in range(1, 20):
        beat(machine, "hybrid-0", 0.5 * at)

    assert told(beat(machine, "hybrid-0", 10.0, running=1)) == []
    assert told(beat(machine, "hybrid-0", 10.5, running=1)) == []


def test_a_hybrid_alone_is_ready():
    machine = health()
    up(machine, "hybrid-0")

    assert machine.snapshot().ready


def test_loading_is_not_ready_and_tells_how_far_it_is():
    machine = health()
    machine.handle(Hello("hybrid-0", "hybrid", "a"), 0.0)
    beat(machine, "hybrid-0", 0.5, state="loading", load_fraction=0.4)

    snapshot = machine.snapshot()

    assert not snapshot.ready and snapshot.load_fraction == 0.4
    assert "loading, 40 %" in snapshot.cause


def test_a_silent_member_is_down_within_the_stall_limit_and_the_others_are_told():
    machine = health()
    up(machine, "prefill-0", "decode-0")
    beat(machine, "prefill-0", 2.0)

    assert told(check(machine, 2.0)) == []
    sends = check(machine, 2.5)

    assert told(sends) == told(sends, "gateway/router") == [("decode-0", "down")]
    assert not machine.snapshot().ready
    assert "no heartbeat for 2 s" in machine.snapshot().cause


def test_a_member_that_is_heard_again_is_up_again():
    machine = health()
    up(machine, "hybrid-0")
    check(machine, 2.5)
    assert not machine.snapshot().ready

    assert told(beat(machine, "hybrid-0", 4.0)) == [("hybrid-0", "up")]
    assert machine.snapshot().ready


def test_busy_without_progress_is_down_though_the_heart_beats():
    machine = health()
    up(machine, "hybrid-0")
    states = [told(beat(machine, "hybrid-0", at, running=3, progress=7)) for at in (1.0, 2.0, 3.0, 3.5)]

    assert states == [[], [], [], [("hybrid-0", "down")]]
    assert "without progress" in machine.snapshot().cause


def test_an_idle_member_is_ready_for_ever():
    machine = health()
    up(machine, "hybrid-0")
    for at in range(1, 3600):
        beat(machine, "hybrid-0", at, progress=7)
        assert told(check(machine, at)) == []

    assert machine.snapshot().ready


def test_one_very_long_step_is_ready_as_long_as_its_own_deadline_holds():
    machine = health()
    up(machine, "hybrid-0")
    for at in range(1, int(RUN_DEADLINE_S)):
        assert told(beat(machine, "hybrid-0", at, running=1, in_step=True)) == []
    assert machine.snapshot().ready

    at = RUN_DEADLINE_S + STALL_S + 2
    assert told(beat(machine, "hybrid-0", at, running=1, in_step=True)) == [("hybrid-0", "down")]


def test_a_prefill_that_waits_for_its_blocks_to_be_pulled_is_not_stalled():
    machine = health()
    up(machine, "prefill-0")
    for at in range(1, 20):
        assert told(beat(machine, "prefill-0", at, running=0, waiting=5)) == []


def test_the_death_of_a_prefill_leaves_decode_up():
    machine = health()
    up(machine, "prefill-0", "decode-0")

    assert told(machine.handle(Lost("prefill-0", "a"), 1.0)) == [("prefill-0", "down")]

    states = [(each.member, each.state) for each in machine.snapshot().members]
    assert states == [("decode-0", "up"), ("prefill-0", "down")]


def test_a_new_life_is_told_after_the_end_of_the_old_one():
    machine = health()
    up(machine, "hybrid-0")

    sends = machine.handle(Hello("hybrid-0", "hybrid", "b"), 1.0)

    assert [(each.message.boot_id, each.message.state) for each in sends if each.to == "gateway"] == [
        ("a", "down"), ("b", "loading")]


def test_what_an_old_life_still_sends_is_ignored():
    machine = health()
    up(machine, "hybrid-0")
    machine.handle(Hello("hybrid-0", "hybrid", "b"), 1.0)

    assert beat(machine, "hybrid-0", 1.1, boot="a") == []
    assert machine.handle(Lost("hybrid-0", "a"), 1.2) == []
    assert machine.handle(Hello("hybrid-0", "hybrid", "a"), 1.3) == []
    assert machine.snapshot().members[0].boot_id == "b"


def test_a_lost_hello_is_made_good_by_a_heartbeat_that_tells_its_role():
    machine = health()

    sends = beat(machine, "hybrid-0", 0.0, role="hybrid")

    assert told(sends) == [("hybrid-0", "loading"), ("hybrid-0", "up")]
    assert sends[-1].message != Tick("check") and Tick("check") in [each.message for each in sends]


def test_draining_is_asked_for_until_it_is_done_and_ends_readiness():
    machine = health()
    up(machine, "hybrid-0")

    sends = machine.handle(Drain("hybrid-0"), 1.0)
    assert [each.message for each in sends if each.to == "hybrid-0"] == [Drain("hybrid-0")]
    assert told(sends) == [("hybrid-0", "draining")]
    assert not machine.snapshot().ready

    again = beat(machine, "hybrid-0", 1.5)
    assert [each.to for each in again if each.message == Drain("hybrid-0")] == ["hybrid-0"]
    assert told(again) == []

    assert [each for each in beat(machine, "hybrid-0", 2.0, state="draining") if each.to == "hybrid-0"] == []


def test_what_members_hold_is_passed_on_to_the_gateway():
    machine = health()
    up(machine, "hybrid-0")

    assert [each.to for each in beat(machine, "hybrid-0", 1.0)] == ["gateway/router"]
    sends = beat(machine, "hybrid-0", 1.0, held=((7, 1),))

    assert [each.message.held for each in sends if each.to == "gateway"] == [((7, 1),)]


def test_different_layouts_are_not_ready_and_say_so():
    machine = health()
    up(machine, "prefill-0")
    machine.handle(Hello("decode-0", "decode", "a"), 0.0)
    beat(machine, "decode-0", 0.0, layout="other")

    assert not machine.snapshot().ready
    assert "different block layouts" in machine.snapshot().cause


def test_members_are_not_blamed_for_the_gateways_own_sleep():
    machine = health()
    up(machine, "hybrid-0")

    late = machine.handle(Tick("check"), 30.0)       # 29.5 s after its time: whose silence was it?

    assert told(late) == []
    assert told(check(machine, 31.0)) == []
    assert told(check(machine, 33.0)) == [("hybrid-0", "down")]


@pytest.mark.parametrize("times", [1, 3])
def test_time_is_watched_by_one_timer_however_many_members_there_are(times):
    machine = health()
    timers = [each for number in range(times) for each in machine.handle(Hello(f"hybrid-{number}", "hybrid", "a"), 0.0)
              if each.message == Tick("check")]

    assert len(timers) == 1
