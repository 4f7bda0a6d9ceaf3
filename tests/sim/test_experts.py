"""The simulated expert slots: right maps and moves pass, wrong ones are noticed."""

from array import array

import pytest

from tripool.core.deployment import InstanceConfig
from tripool.core.placement import DISK, EMPTY, Edit, MapChange, Move, pack_edits
from tripool.core.plan import Section, StepPlan
from tripool.core.request import pack_tokens
from tripool.sim.experts import SimExperts, ToyMixture, chosen_experts

PAIR = InstanceConfig(ranks=2, redundant_experts=2, exchange="collective")
MIXTURE = ToyMixture(num_layers=1, num_routed=4)           # slots hold 0 1 2 | 2 3 0


class Slots:
    """An instance of two ranks, and what was noted of it."""

    def __init__(self, mixture=MIXTURE, config=PAIR) -> None:
        self.wrongs: list[str] = []
        self.experts = SimExperts("decode-0", mixture, mixture.geometry(config), self.wrongs)
        self.version = 1
        self.num_steps = 0

    def plan(self, *edits: tuple[int, int], lost=()) -> StepPlan:
        """The next step's, in which slots name other experts in the only layer."""
        self.num_steps += 1
        changes = ()
        if edits:
            self.version += 1
            changes = (MapChange(self.version - 1, self.version, pack_edits([Edit(0, *each) for each in edits])),)
        return StepPlan(self.num_steps, (Section(), Section()), self.version, changes, lost)

    def step(self, *edits: tuple[int, int]) -> str:
        """A whole step; what was wrong with it."""
        self.experts.begin_step(self.plan(*edits))
        self.experts.end_step()
        return "; ".join(self.wrongs)

    def move(self, from_slot, to_slot, expert, *, cause="") -> str:
        self.experts.begin_moves(1, (Move(0, from_slot, to_slot, expert),))
        return self.experts.end_moves(1, cause)


def test_the_slots_first_hold_what_the_first_map_names():
    slots = Slots()

    assert slots.experts.held == [[0, 1, 2, 2, 3, 0]] == [list(slots.experts.first.layers[0])]
    assert slots.step() == ""


def test_an_expert_moves_into_a_slot_between_two_maps():
    slots = Slots()

    assert slots.step((5, EMPTY)) == ""
    slots.experts.begin_step(slots.plan())
    slots.experts.begin_moves(1, (Move(0, 1, 5, 1),))
    slots.experts.end_step()                               # a step with the old content named nowhere
    assert slots.experts.held[0][5] == EMPTY
    assert slots.experts.end_moves(1, "") == ""

    assert slots.step((5, 1)) == ""
    assert slots.experts.num_moved == 1


def test_a_slot_that_is_named_before_its_expert_has_come_is_noticed():
    slots = Slots()
    slots.step((5, EMPTY))
    slots.experts.begin_moves(1, (Move(0, 1, 5, 1),))

    assert "names expert 1 in slot 5 of layer 0, but there is -1" in slots.step((5, 1))


def test_a_slot_that_is_written_under_a_step_whose_map_names_it_is_noticed():
    slots = Slots()
    slots.experts.begin_step(slots.plan())

    slots.experts.begin_moves(1, (Move(0, 1, 5, 1),))

    assert "is written while step 1 names it" in slots.wrongs[0]
    slots.experts.end_step()
    assert "step 1 ends with map 1, which names expert 0 in slot 5" in slots.wrongs[1]


@pytest.mark.parametrize("cause", ["", "chance"])
def test_after_a_move_that_failed_a_slot_holds_nothing(cause):
    slots = Slots()
    slots.step((5, EMPTY))

    assert slots.move(1, 5, 1, cause=cause) == cause

    assert slots.experts.held[0][5] == (EMPTY if cause else 1)


def test_a_copy_from_a_slot_with_another_expert_is_noticed():
    slots = Slots()
    slots.step((5, EMPTY))

    slots.move(4, 5, 1)

    assert "copied from slot 4, where there is 3" in slots.wrongs[0]


def test_a_move_fails_whose_source_is_written_meanwhile():
    slots = Slots()
    slots.step((5, EMPTY), (3, EMPTY))
    slots.experts.begin_moves(1, (Move(0, 3, 5, 2),))
    slots.experts.begin_moves(2, (Move(0, DISK, 3, 1),))

    assert slots.experts.end_moves(1, "") == "slot 3 was written while it was copied"

    assert slots.experts.end_moves(2, "") == "" and slots.experts.held == [[0, 1, 2, 1, 3, EMPTY]]
    assert slots.wrongs == []


def test_two_moves_into_one_slot_at_once_are_noticed():
    slots = Slots()
    slots.step((5, EMPTY))
    for verb_id in (1, 2):
        slots.experts.begin_moves(verb_id, (Move(0, DISK, 5, 1),))

    assert "written by moves 1 and 2 at once" in slots.wrongs[0]


def test_a_change_that_never_came_is_noticed():
    slots = Slots()
    slots.plan((5, EMPTY))

    assert "step 2 names map 2, but map 1 is known" in slots.step()


def test_changes_that_are_known_are_skipped():
    slots = Slots()
    plan = slots.plan((5, EMPTY))
    slots.experts.begin_step(plan)
    slots.experts.drop_step()                              # it failed; the next plan brings the change again

    slots.experts.begin_step(plan)

    assert slots.wrongs == []


def test_a_map_without_an_expert_is_noticed():
    assert "1 experts in no slot" in Slots().step((1, EMPTY))


def test_with_a_rank_everything_in_its_slots_is_gone_until_it_is_back():
    slots = Slots()

    slots.experts.lose_rank(1)
    assert slots.experts.held == [[0, 1, 2, EMPTY, EMPTY, EMPTY]] and slots.experts.is_lost(1)
    assert "but there is -1" in slots.step()

    held = slots.experts.return_rank(1)
    assert array("h", held).tolist() == [2, 3, 0] == slots.experts.held[0][3:] and not slots.experts.is_lost(1)


@pytest.mark.parametrize(("from_slot", "to_slot"), [(1, 5), (4, 0)])
def test_a_move_fails_whose_rank_begins_another_life_meanwhile(from_slot, to_slot):
    slots = Slots()
    slots.step((to_slot, EMPTY))
    expert = slots.experts.held[0][from_slot]
    slots.experts.begin_moves(1, (Move(0, from_slot, to_slot, expert),))
    slots.experts.lose_rank(1)
    slots.experts.return_rank(1)

    assert "is gone" in slots.experts.end_moves(1, "")

    assert slots.experts.held == [[EMPTY if to_slot == 0 else 0, 1, 2, 2, 3, 0]]
    assert slots.wrongs == []


def test_tokens_choose_few_experts_often_and_their_shared_one_always():
    mixture = ToyMixture(num_layers=2, num_routed=16, num_picks=4)
    slots = Slots(mixture, InstanceConfig(ranks=2, shared_expert_copies=1, exchange="collective"))
    slots.experts.count(pack_tokens(range(500)))

    counts = array("i", slots.experts.report()).tolist()

    layers = [counts[:17], counts[17:]]
    for layer in layers:
        assert layer[16] == 500 and sum(layer) == 5 * 500
        assert max(layer[:16]) > 2 * sum(layer[:16]) / 16
    assert layers[0] != layers[1]
    assert not any(array("i", slots.experts.report()))     # they are told once
    assert len(set(chosen_experts(7, mixture, 17))) == 10
