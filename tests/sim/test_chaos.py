"""Fault schedules find nothing wrong with the control plane, and something wrong where something is."""

from dataclasses import replace

import pytest

from tripool.control.blocks import BlockAllocator
from tripool.control.expert_map import ExpertMap
from tripool.control.experts import LiveVersions
from tripool.control.gateway import Gateway
from tripool.control.scheduler import InstanceScheduler
from tripool.core.messages import Heartbeat, Release
from tripool.sim import chaos
from tripool.sim.chaos import Tally, Violation, draw_schedule, run_schedule
from tripool.sim.dataplane import Sabotage

NUM_SCHEDULES = 500
REACHED = ("killed", "stopped", "drained", "leaving", "retries", "placed elsewhere", "stepped back", "stale pulls",
           "forgotten attempts", "reused tokens", "lost ranks", "steps given up",
           "steps given up in part", "plans behind a loss", "steps in halves", "moved experts", "failed moves",
           "map versions", "without an expert", "changed roles", "withdrawn changes", "drafted", "accepted drafts",
           "ended: abort", "ended: stop", "ended: length", "ended: error 429")


@pytest.mark.timeout(1800)         # about a minute of one core, but the machine may be shared by many
def test_no_schedule_breaks_an_invariant(capsys):
    assert chaos.main(["--schedules", str(NUM_SCHEDULES)]) == 0, capsys.readouterr().out

    told = capsys.readouterr().out
    for name in REACHED:
        assert f"{name} " in told and f"{name} 0" not in told, f"the schedules never reached: {name}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_schedule_of_ten_thousand_breaks_an_invariant(capsys):
    assert chaos.main(["--schedules", "10000"]) == 0, capsys.readouterr().out


def first_violation(num_schedules=60, tally=None, **how) -> str:
    """What the schedules find; empty if nothing."""
    for seed in range(num_schedules):
        try:
            run_schedule(draw_schedule(seed), tally or Tally(), **how)
        except Violation as violation:
            return str(violation)
    return ""


def test_a_schedule_is_repeated_exactly_by_its_seed():
    first, second = Tally(), Tally()

    assert run_schedule(draw_schedule(3), first) == run_schedule(draw_schedule(3), second)
    assert first == second
    assert draw_schedule(3).describe() != draw_schedule(4).describe()


def test_members_that_promise_more_room_than_they_have_cost_refusals_and_nothing_else():
    def boast(cluster):
        honest = cluster.health.handle
        cluster.health.handle = lambda message, now: honest(
            replace(message, line_room=100) if isinstance(message, Heartbeat) else message, now)

    tally = Tally()

    assert first_violation(tally=tally, tamper=boast) == ""
    assert tally.counts["refused as full"] > 10


def test_an_allocator_that_frees_what_is_being_written_is_caught(monkeypatch):
    """Blocks of an ended request are freed at once, instead of when the running step or copy has answered."""
    def careless(blocks: BlockAllocator, block: int) -> None:
        blocks.pin(block)
        blocks.release(block)
        blocks.unpin(block)

    monkeypatch.setattr(BlockAllocator, "quarantine", careless)

    assert first_violation() != ""


def test_a_pull_that_is_not_proved_brings_foreign_blocks():
    """Prefill lets go of blocks that are still to be pulled; without the proof of generation nobody would notice."""
    def hasty(cluster):
        for member, scheduler in cluster.schedulers.items():
            if member.startswith("prefill"):
                scheduler.handle = let_go_at_once(scheduler, scheduler.handle)

    def let_go_at_once(scheduler, handle):
        def handle_and_release(message, now):
            sends = handle(message, now)
            for send in list(sends):
                if type(send.message).__name__ == "Prefilled":
                    sends += handle(Release(send.message.request_id, send.message.attempt), now)
            return sends
        return handle_and_release

    assert first_violation(tamper=hasty) == ""
    assert "decode" in first_violation(tamper=hasty, sabotage=Sabotage(skip_pull_proof=True))


def test_a_gateway_that_believes_old_attempts_is_caught(monkeypatch):
    honest = Gateway._take_rows

    def credulous(gateway, emitted, done, source, now):
        for request_id, _, start, _ in emitted.columns.rows():
            entry = gateway.entries.get(request_id)
            if entry is not None and start > entry.num_emitted:
                entry.emitted += b"\\0\\0\\0\\0" * (start - entry.num_emitted)     # a gap is no gap
        return honest(gateway, emitted, done, source, now)

    monkeypatch.setattr(Gateway, "_take_rows", credulous)

    assert "request" in first_violation()


def test_a_gateway_that_never_asks_what_members_hold_leaves_something_behind(monkeypatch):
    monkeypatch.setattr(Gateway, "_reconcile", lambda gateway, beat, now: [])

    assert "still has requests" in first_violation()


def test_a_slot_that_is_written_before_the_old_map_has_ended_is_caught(monkeypatch):
    monkeypatch.setattr(LiveVersions, "oldest", property(lambda versions: versions.newest))

    assert "is written while step" in first_violation()


def test_experts_that_are_said_to_be_moved_and_are_not_are_caught():
    assert "names expert" in first_violation(sabotage=Sabotage(skip_moves=True))


def test_a_scheduler_that_keeps_changes_of_the_map_to_itself_is_caught(monkeypatch):
    honest = ExpertMap.plan
    monkeypatch.setattr(ExpertMap, "plan", lambda *arguments: replace(honest(*arguments), map_changes=()))

    assert "is known" in first_violation()


def test_a_scheduler_that_tells_changes_of_the_map_only_once_is_caught(monkeypatch):
    """A step that failed may not have brought them to the ranks."""
    honest = ExpertMap.plan

    def forgetful(experts, *arguments):
        plan = honest(experts, *arguments)
        experts._changes.clear()
        return plan

    monkeypatch.setattr(ExpertMap, "plan", forgetful)

    assert "is known" in first_violation()


def test_a_scheduler_that_takes_a_step_that_was_given_up_for_taken_is_caught(monkeypatch):
    monkeypatch.setattr(InstanceScheduler, "_given_up", lambda *arguments: None)

    assert first_violation() != ""


def test_a_scheduler_that_counts_on_a_lost_rank_is_caught(monkeypatch):
    monkeypatch.setattr(InstanceScheduler, "_rank_lost", lambda *arguments: None)

    assert "was planned with rank" in first_violation()


def test_a_failure_tells_its_seed_and_how_to_replay_it(monkeypatch, capsys):
    monkeypatch.setattr(Gateway, "_reconcile", lambda gateway, beat, now: [])

    assert chaos.main(["--schedules", "60"]) == 1

    told = capsys.readouterr().out
    seed = told.split("VIOLATION in schedule ")[1].split(":")[0]
    assert f"python -m tripool.sim.chaos --seed {seed}" in told
    assert chaos.main(["--seed", seed]) == 1
