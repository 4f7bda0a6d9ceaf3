"""Roles change where the load has long been uneven, seldom, one at a time, and never below what a role is to keep."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tripool.control.scaling import Scaling
from tripool.core.deployment import Deployment, InstanceConfig, ScalingConfig
from tripool.core.messages import ChangeRole, Facts, MemberChanged, Role

HOLD_S, COOL_DOWN_S, BEAT_S = 2.0, 10.0, 0.5
SLOTS, BUDGET, BLOCKS = 10, 100, 1000
FACTS = Facts("m", "f", "layout", 4096, 16, BLOCKS)


class Deployed:
    """Instances that say twice a second how loaded they are, and do what they are told."""

    def __init__(self, *, prefill: int = 2, decode: int = 2, **config) -> None:
        each = InstanceConfig(max_num_seqs=SLOTS, max_num_batched_tokens=BUDGET)
        self.scaling = Scaling(Deployment(
            prefill=replace(each, count=prefill), decode=replace(each, count=decode),
            scaling=ScalingConfig(enabled=True, hold_s=HOLD_S, cool_down_s=COOL_DOWN_S, **config)))
        self.now = 0.0
        self.load: dict[Role, float] = {"prefill": 0.0, "decode": 0.0}
        self.members: dict[str, MemberChanged] = {}
        self.drain_s = 1.0
        self.heeds = True
        self.asked: list[tuple[float, str, Role]] = []         # each change once: when, who, and to which role
        self.heard: list[str] = []                             # who was told that it was heard to drain
        self._ends: dict[str, tuple[float, Role]] = {}
        for role, count in (("prefill", prefill), ("decode", decode)):
            for index in range(count):
                name = f"{role}-{index}"
                self.members[name] = MemberChanged(name, role, "life-1", "up", FACTS)

    def run(self, seconds: float, **load: float) -> None:
        """Time passes, with these loads from now on."""
        self.load |= load
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += BEAT_S
            for name in self.members:
                self.beat(name)

    def settle(self) -> None:
        """Until everybody has been up for long."""
        self.run(COOL_DOWN_S + HOLD_S)

    def beat(self, name: str) -> None:
        if name in self._ends and self.now >= self._ends[name][0]:
            self.members[name] = replace(self.members[name], state="up", role=self._ends.pop(name)[1])
        member = self.members[name]
        load = self.load[member.role]
        told = replace(member, num_waiting_tokens=round(load * BUDGET) if member.role == "prefill" else 0,
                       num_running=round(load * SLOTS) if member.role == "decode" else 0, num_free_blocks=BLOCKS)
        for send in self.scaling.handle(told, self.now):
            change = send.message
            assert isinstance(change, ChangeRole) and send.to == change.member and change.boot_id == member.boot_id
            if change.heard:
                self.heard.append(change.member)
                continue
            known = (change.member, change.role) == self.asked[-1][1:] if self.asked else False
            if not known:
                self.asked.append((self.now, change.member, change.role))
            if self.heeds:
                self.obey(change)

    def obey(self, change: ChangeRole) -> None:
        member = self.members[change.member]
        if change.role == member.role:
            self._ends.pop(change.member, None)
            self.members[change.member] = replace(member, state="up")
        else:
            self.members[change.member] = replace(member, state="draining")
            self._ends[change.member] = self.now + self.drain_s, change.role

    def become(self, name: str, state: str, boot_id: str = "") -> None:
        self.members[name] = replace(self.members[name], state=state,
                                     boot_id=boot_id or self.members[name].boot_id)

    def count(self, role: Role) -> int:
        return sum(each.role == role and each.state == "up" for each in self.members.values())


def test_a_load_that_stays_uneven_turns_an_instance():
    made = Deployed()
    made.settle()
    assert made.asked == []

    made.run(HOLD_S + 3.0, prefill=3.0, decode=0.2)

    assert [each[1:] for each in made.asked] == [("decode-0", "prefill")]
    assert made.asked[0][0] >= COOL_DOWN_S + HOLD_S * 2
    assert (made.count("prefill"), made.count("decode")) == (3, 1)
    assert made.scaling.stats.changes == {"prefill": 1}


def test_an_instance_is_told_when_it_was_heard_that_it_drains():
    made = Deployed()
    made.settle()
    made.run(HOLD_S, prefill=3.0, decode=0.2)
    assert made.heard == []

    made.run(BEAT_S)

    assert made.heard == ["decode-0"]


def test_decode_gets_an_instance_when_its_slots_are_taken_and_prompts_are_few():
    made = Deployed()
    made.settle()

    made.run(HOLD_S + 3.0, prefill=0.1, decode=1.0)

    assert [each[1:] for each in made.asked] == [("prefill-0", "decode")]


def test_decode_is_short_when_blocks_run_out_though_slots_do_not():
    made = Deployed()
    full = MemberChanged("decode-0", "decode", "life-1", "up", FACTS, num_running=4, num_free_blocks=150, num_waiting=1)
    made.members = {"decode-0": full}
    made.scaling.handle(full, 0.0)

    assert made.scaling.load("decode") == pytest.approx(0.85 * 5 / 4)


def test_ranks_that_are_gone_neither_have_room_nor_take_it():
    made = Deployed()
    four = replace(FACTS, num_blocks=4 * BLOCKS, num_ranks=4)
    for lost in (0, 1):
        there = 4 - lost
        decode = MemberChanged("decode-0", "decode", "life-1", "up", four, num_running=2 * there, num_lost_ranks=lost,
                               num_free_blocks=900 * there)
        prefill = MemberChanged("prefill-0", "prefill", "life-1", "up", four, num_waiting_tokens=70 * there,
                                num_lost_ranks=lost)
        for member in (decode, prefill):
            made.scaling.handle(member, 0.0)

        assert made.scaling.load("decode") == pytest.approx(2 / SLOTS)
        assert made.scaling.load("prefill") == pytest.approx(70 / BUDGET)

    made.scaling.handle(replace(decode, num_running=1), 0.0)
    assert made.scaling.load("decode") == pytest.approx(0.1), "blocks in use, of ranks that are there"


@pytest.mark.parametrize("loads", [
    dict(prefill=3.0, decode=0.95),            # both have too much
    dict(prefill=0.2, decode=0.2),             # neither has
    dict(prefill=3.0, decode=0.35),            # with one decode instance less, the other would have 0.7
])
def test_nothing_changes_where_a_change_would_not_help(loads):
    made = Deployed()
    made.settle()

    made.run(60.0, **loads)

    assert made.asked == []


def test_an_imbalance_that_pauses_within_the_hold_time_changes_nothing():
    made = Deployed()
    made.settle()

    for _ in range(30):
        made.run(HOLD_S - BEAT_S, prefill=3.0, decode=0.1)
        made.run(BEAT_S, prefill=0.1)

    assert made.asked == []


def test_a_load_that_swings_faster_than_the_cool_down_causes_no_flapping():
    """Every swing lasts long enough to be acted on; each change is undone, so the time between them doubles."""
    made = Deployed()
    made.settle()
    begun = made.now

    for _ in range(100):
        made.run(2 * HOLD_S, prefill=3.0, decode=0.1)
        made.run(2 * HOLD_S, prefill=0.1, decode=3.0)

    times = [at for at, _, _ in made.asked]
    gaps = [after - before for before, after in pairwise(times)]
    assert made.now - begun == 800.0 and min(gaps) >= COOL_DOWN_S
    assert 3 <= len(times) <= 20, "one for every swing would be 200, one after every cool-down about 80"


def test_after_a_change_that_lasted_the_next_one_waits_no_longer_than_usual():
    made = Deployed(prefill=3, decode=3)
    made.settle()

    made.run(10 * COOL_DOWN_S, prefill=3.0, decode=0.1)
    assert made.count("prefill") == 5
    made.run(10 * COOL_DOWN_S, prefill=0.05, decode=3.0)

    assert made.count("decode") == 5 and made.scaling._back_off == 1


@pytest.mark.parametrize(("role", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_a_role_keeps_as_many_instances_as_it_is_to_have(role, other):
    made = Deployed(prefill=4, decode=4, min_prefill=2, min_decode=3)
    made.settle()

    made.run(100 * COOL_DOWN_S, **{role: 5.0, other: 0.0})

    assert made.count(other) == {"prefill": 2, "decode": 3}[other]


def test_only_one_instance_changes_at_a_time():
    made = Deployed(prefill=2, decode=5)
    made.drain_s = 100.0
    made.settle()

    made.run(90.0, prefill=3.0, decode=0.1)

    assert len(made.asked) == 1


@pytest.mark.parametrize("state", ["loading", "draining"])
def test_nothing_changes_while_an_instance_loads_or_drains(state):
    made = Deployed(decode=4)
    made.settle()
    made.become("prefill-1", state)

    made.run(20 * COOL_DOWN_S, prefill=3.0, decode=0.1)
    assert made.asked == []

    made.become("prefill-1", "up")
    made.run(COOL_DOWN_S - BEAT_S)
    assert made.asked == []
    made.run(2 * HOLD_S)
    assert len(made.asked) == 1


def test_after_an_instance_was_lost_nothing_changes_for_a_while():
    """It is likely to come back; one that does not is not waited for for ever."""
    made = Deployed(decode=4)
    made.settle()
    made.run(HOLD_S - BEAT_S, prefill=3.0, decode=0.1)
    made.become("prefill-1", "down")
    lost = made.now

    made.run(5 * COOL_DOWN_S)

    assert made.asked[0][0] >= lost + COOL_DOWN_S
    assert made.asked[0][2] == "prefill"


def test_a_role_that_has_lost_its_last_instance_gets_one():
    made = Deployed(prefill=1, decode=2)
    made.settle()
    made.become("prefill-0", "down")

    made.run(2 * COOL_DOWN_S)

    assert [each[2] for each in made.asked] == ["prefill"]


def test_a_change_of_an_instance_that_dies_meanwhile_is_over():
    made = Deployed(decode=4)
    made.drain_s = 5.0
    made.settle()
    made.run(HOLD_S + BEAT_S, prefill=3.0, decode=0.1)
    assert made.asked[-1][1] == "decode-0"
    made._ends.clear()
    made.become("decode-0", "up", boot_id="life-2")
    made.run(BEAT_S)

    assert made.scaling.change is None
    made.run(COOL_DOWN_S - BEAT_S)
    assert len(made.asked) == 1 and made.scaling.stats.changes == {}


def test_an_instance_that_did_not_hear_is_told_again_and_at_last_left_alone():
    made = Deployed()
    made.heeds = False
    made.settle()

    sends = []
    made.load |= dict(prefill=3.0, decode=0.1)
    honest, made.scaling.handle = made.scaling.handle, lambda *told: (sends.extend(got := honest(*told)), got)[1]
    made.run(HOLD_S + 5.0)
    assert len(sends) > 5 and all(each == sends[0] for each in sends)

    made.run(COOL_DOWN_S)
    assert made.scaling.change is None


def test_one_that_does_not_listen_is_not_asked_again_and_another_one_is():
    made = Deployed()
    made.heeds = False
    made.settle()
    made.run(HOLD_S + COOL_DOWN_S + 2.0, prefill=3.0, decode=0.1)
    assert made.scaling.change is None

    made.heeds = True
    made.run(2 * (HOLD_S + COOL_DOWN_S), prefill=3.0, decode=0.1)

    assert [each[1:] for each in made.asked] == [("decode-0", "prefill"), ("decode-1", "prefill")]
    assert (made.count("prefill"), made.count("decode")) == (3, 1)


def test_one_that_hears_after_it_was_given_up_is_followed_after_all():
    """It drains until it is told that this was heard; and while somebody drains nobody else changes."""
    made = Deployed()
    made.heeds = False
    made.settle()
    made.run(HOLD_S + COOL_DOWN_S + 2.0, prefill=3.0, decode=0.1)
    (_, name, role), = made.asked
    assert made.scaling.change is None and made.heard == []

    made.obey(ChangeRole(name, "life-1", 1, role, "late"))
    made.run(made.drain_s + 1.0)

    assert set(made.heard) == {name}
    assert made.count("prefill") == 3 and made.scaling.stats.changes == {"prefill": 1}


def test_an_instance_that_drains_is_kept_when_its_role_needs_it_after_all():
    made = Deployed(decode=3)
    made.drain_s = 60.0
    made.settle()
    made.run(HOLD_S + BEAT_S, prefill=3.0, decode=0.1)
    made.run(HOLD_S + 1.0, prefill=0.1, decode=1.2)

    assert [each[1:] for each in made.asked] == [("decode-0", "prefill"), ("decode-0", "decode")]
    assert made.count("decode") == 3
    made.run(BEAT_S)
    assert made.scaling.change is None and made.scaling.stats.withdrawn == 1 and made.scaling.stats.changes == {}


def test_an_instance_that_drains_is_kept_when_it_is_one_of_the_last():
    made = Deployed(prefill=1, decode=2)
    made.drain_s = 60.0
    made.settle()
    made.run(HOLD_S + BEAT_S, prefill=3.0, decode=0.0)
    made.become("decode-1", "down")
    made.run(HOLD_S + 1.0)

    assert made.asked[-1][1:] == ("decode-0", "decode")


def test_the_instance_with_the_least_to_finish_is_chosen():
    made = Deployed(decode=3)
    made.settle()
    busy = {"decode-0": 3, "decode-1": 1, "decode-2": 2}
    for step in range(10):
        for name, num_running in busy.items():
            made.scaling.handle(replace(made.members[name], num_running=num_running, num_free_blocks=BLOCKS),
                                made.now + step)
        for name in ("prefill-0", "prefill-1"):
            made.scaling.handle(replace(made.members[name], num_waiting_tokens=500), made.now + step)

    assert made.scaling.change.member == "decode-1"


def test_hybrids_are_left_alone():
    made = Deployed()
    hybrid = MemberChanged("hybrid-0", "hybrid", "life-1", "loading", None)

    assert made.scaling.handle(hybrid, 0.0) == []
    assert made.scaling.members == {}
