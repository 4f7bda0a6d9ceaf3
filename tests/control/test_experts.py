"""Experts move, and nothing is read while it is written, whatever fails meanwhile."""

import random
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control.builders import as_placement
from tests.core.test_placement import geometries
from tripool.control.experts import (
    ExpertsMoved,
    LiveVersions,
    MapInUse,
    MoveExperts,
    NewMap,
    RankBack,
    RankLost,
    Rebalance,
    Rebalancer,
    RebalanceSettings,
    StepReport,
    Unservable,
)
from tripool.core.errors import ConfigError
from tripool.core.messages import Failed, Tick
from tripool.core.placement import DISK, EMPTY, Geometry, Placement, even_geometry, initial_layer, initial_placement

NOTHING = -2      # what a slot physically holds before it is written, while it is, and after a failure


# ---------------------------------------------------------------- the machine


def settings_of(**changes):
    """Moves cost next to nothing and are made at once, unless said otherwise."""
    usual = dict(expert_bytes=1, seconds_per_token=1.0, bytes_per_s=1e9, min_steps=1, interval_steps=1,
                 half_life_steps=1, plan_layers=100, chunk_bytes=2, chunk_layers=1)
    return RebalanceSettings(**{**usual, **changes})


@dataclass
class Instance:
    """A scheduler, a data plane and the memory of the ranks around a `Rebalancer`, each as fast as the test wants.

    Every rule that the rebalancer must keep is checked where it would be broken: a step may run only while every named
    slot holds its expert, and a slot may be written only while no map that a step can still use names it.
    """

    geometry: Geometry
    placement: Placement
    settings: RebalanceSettings
    now: float = 0.0
    maps: dict = field(default_factory=dict)            # by version: all that were ever published
    mail: list = field(default_factory=list)            # NewMaps on their way to the scheduler
    asked: dict = field(default_factory=dict)           # unanswered MoveExperts, with the lives of the target ranks
    timers: list = field(default_factory=list)
    running: dict = field(default_factory=dict)         # unanswered steps: the version each names
    runnable: bool = True
    unservable: list = field(default_factory=list)
    num_moves: int = 0
    num_steps: int = 0

    def __post_init__(self):
        self.machine = Rebalancer(self.geometry, self.placement, self.settings)
        self.rank_of = self.geometry.rank_of_slots()
        self.memory = [list(experts) for experts in self.placement.layers]
        self.alive = [True] * self.geometry.num_ranks
        self.lives = [0] * self.geometry.num_ranks
        self.maps[self.placement.version] = self.placement
        self.live = LiveVersions(self.placement.version)
        self.newest = self.placement.version
        self.losses = self.losses_known = 0              # ranks lost, and how many of them the map knows of

    # -------------------------------------------------------- messages

    def send(self, message):
        for send in self.machine.handle(message, self.now):
            match send.message:
                case NewMap(change, runnable, lost_ranks):
                    assert lost_ranks == tuple(rank for rank, lives in enumerate(self.alive) if not lives)
                    assert change.base == self.newest
                    after = self.maps[self.newest].apply(change)
                    after.check(partial=not runnable)
                    assert runnable == (not after.missing())
                    dead = [slot for slot, rank in enumerate(self.rank_of) if not self.alive[rank]]
                    assert all(layer[slot] == EMPTY for layer in after.layers for slot in dead)
                    self.newest, self.maps[change.version] = change.version, after
                    self.mail.append(send.message)
                case MoveExperts(verb_id, _, moves):
                    self.begin(verb_id, moves)
                case Tick():
                    assert send.to == self.machine.address
                    self.timers.append((self.now + send.delay_s, send.message))
                case Unservable(cause):
                    assert cause
                    self.unservable.append(cause)
        assert self.machine.placement == self.maps[self.newest]

    def begin(self, verb_id, moves):
        assert verb_id not in self.asked
        assert 0 < len(moves) <= self.settings.chunk_moves
        assert len({(move.layer, move.to_slot) for move in moves}) == len(moves)
        targets = [(move.layer, move.to_slot) for _, (each, _) in self.asked.items() for move in each]
        for move in moves:
            at = move.layer, move.to_slot
            assert self.alive[self.rank_of[move.to_slot]]
            assert at not in targets, f"{at} is written twice at the same time"
            oldest = self.live.oldest
            named = [version for version in range(oldest, self.newest + 1)
                     if self.maps[version].layers[move.layer][move.to_slot] != EMPTY]
            assert not named, f"{at} is written while versions {named} name it"
            if move.from_slot != DISK:
                assert self.alive[self.rank_of[move.from_slot]]
                assert self.memory[move.layer][move.from_slot] == move.expert, "copied from a slot with another"
        for move in moves:
            self.memory[move.layer][move.to_slot] = NOTHING
        self.asked[verb_id] = moves, [self.lives[self.rank_of[move.to_slot]] for move in moves]

    def answer(self, which=0, cause="", *, finished=False):
        """Answer one request. `finished`: it was done before its ranks were lost, only the answer took its time."""
        if not self.asked:
            return
        verb_id = list(self.asked)[which % len(self.asked)]
        moves, lives = self.asked.pop(verb_id)
        whole = all(life == self.lives[self.rank_of[move.to_slot]] for move, life in zip(moves, lives, strict=True))
        if cause or not (whole or finished):
            self.send(Failed(verb_id, cause or "a rank is gone"))
            return
        for move, life in zip(moves, lives, strict=True):
            if life == self.lives[self.rank_of[move.to_slot]]:
                self.memory[move.layer][move.to_slot] = move.expert
        self.num_moves += len(moves)
        self.send(ExpertsMoved(verb_id))
        self.send(ExpertsMoved(verb_id))                 # a double does no harm

    # -------------------------------------------------------- the scheduler

    def take(self):
        """The next map, if one came: plans name it from now on."""
        if self.mail:
            new = self.mail.pop(0)
            self.live.take(new.change.version)
            self.runnable = new.runnable
            self.losses_known = new.num_losses

    def tell(self):
        self.send(MapInUse(self.live.oldest))

    def start(self):
        """A step begins with the map taken last; two may be under way."""
        if not self.runnable or self.losses_known < self.losses or len(self.running) == 2:
            return
        self.num_steps += 1
        self.live.started(self.num_steps)
        self.running[self.num_steps] = self.live.newest
        self.read()

    def read(self):
        """All steps under way read all slots of their maps that are on living ranks."""
        for version in self.running.values():
            for layer, experts in enumerate(self.maps[version].layers):
                for slot, expert in enumerate(experts):
                    if expert != EMPTY and self.alive[self.rank_of[slot]]:
                        assert self.memory[layer][slot] == expert, (
                            f"a step with map {version} reads {self.memory[layer][slot]} for expert {expert} "
                            f"in layer {layer}, slot {slot}")

    def end(self, counts=None):
        """The oldest step ends."""
        if not self.running:
            return
        self.read()
        step = next(iter(self.running))
        del self.running[step]
        self.live.ended(step)
        packed = array("i", [count for layer in counts for count in layer]).tobytes() if counts else b""
        self.send(StepReport(self.live.oldest, 1, packed))

    def tick(self):
        if self.timers:
            self.timers.sort(key=lambda timer: timer[0])
            due, message = self.timers.pop(0)
            self.now = max(self.now, due)
            self.send(message)

    # -------------------------------------------------------- ranks

    def lose(self, rank):
        if not self.alive[rank]:
            return
        self.alive[rank] = False
        self.lives[rank] += 1
        self.losses += 1
        for step in list(self.running):                  # steps under way are aborted on all ranks
            del self.running[step]
            self.live.ended(step)
        for layer in self.memory:
            for slot in self.placement.slots_of_rank(rank):
                layer[slot] = NOTHING
        self.send(RankLost(rank))
        self.send(StepReport(self.live.oldest, 0, b""))

    def give_back(self, rank, *, loaded=True):
        if self.alive[rank]:
            return
        self.alive[rank] = True
        slots = self.placement.slots_of_rank(rank)
        held = [[layer[slot] if loaded else EMPTY for slot in slots] for layer in self.placement.layers]
        for layer, experts in zip(self.memory, held, strict=True):
            for slot, expert in zip(slots, experts, strict=True):
                layer[slot] = expert if expert != EMPTY else NOTHING
        self.send(RankBack(rank, array("h", [expert for experts in held for expert in experts]).tobytes()))

    # -------------------------------------------------------- all together

    def settle(self, counts=None, rounds=2000):
        """Let everything happen until nothing is left to do."""
        for _ in range(rounds):
            self.take()
            self.tell()
            self.start()
            self.answer()
            self.end(counts)
            if not self.mail and not self.asked and not self.machine.is_moving:
                self.take()
                self.tell()
                if not self.mail and not self.machine.is_moving and not (self.timers and not self.runnable):
                    return
            if not self.runnable and not self.mail and not self.asked:
                self.tick()
        raise AssertionError(f"not settled: {self.machine.figures()}")


def instance(geometry, num_layers=2, layers=None, **changes):
    placement = as_placement(geometry, *layers) if layers else initial_placement(geometry, num_layers)
    return Instance(geometry, placement, settings_of(**changes))


def counts_of(*layers):
    return [list(layer) for layer in layers]


def test_a_skewed_load_is_balanced_while_steps_run():
    one = instance(even_geometry(2, 8, num_redundant=2))
    hot = counts_of([90, 90, 90, 90, 10, 10, 10, 10], [10, 10, 10, 10, 90, 90, 90, 90])

    one.settle(hot)
    one.settle(hot)

    figures = one.machine.figures()
    assert max(figures.after) < 1.1
    assert figures.num_moves == one.num_moves > 0
    assert figures.moved_bytes == figures.num_moves * 1
    assert figures.num_failures == figures.num_blocked == 0
    assert one.num_steps > 4


def test_before_and_after_are_told_per_layer():
    one = instance(even_geometry(2, 4, num_redundant=1), plan_layers=1, horizon_steps=1)
    one.start()
    one.end(counts_of([9, 9, 1, 1], [5, 5, 5, 5]))

    assert one.machine.figures().before == (pytest.approx(18.5 / 10), 1.0)


def test_a_slot_is_dropped_then_filled_then_named():
    """Ranks hold (0 1) (2 0): expert 2 is hot, so one copy of 0 gives way to a second 2, in three versions."""
    one = instance(Geometry((2, 2), 3), layers=[(0, 1, 2, 0)])
    seen = [list(one.machine.placement.layers[0])]
    one.start()
    one.end(counts_of([1, 1, 100]))
    seen.append(list(one.machine.placement.layers[0]))
    assert not one.asked, "the old map is still in use"

    one.take()
    one.tell()
    (moves, _), = one.asked.values()
    one.answer()
    seen.append(list(one.machine.placement.layers[0]))

    assert seen == [[0, 1, 2, 0], [EMPTY, 1, 2, 0], [2, 1, 2, 0]]
    assert [(move.from_slot, move.to_slot, move.expert) for move in moves] == [(2, 0, 2)]


def test_an_unanswered_step_keeps_the_old_map_and_its_slots():
    one = instance(Geometry((2, 2), 3), layers=[(0, 1, 2, 0)])
    one.start()
    one.start()
    one.end(counts_of([1, 1, 100]))
    one.take()
    one.tell()
    assert not one.asked, "the second step still reads the slot"

    one.end()
    assert len(one.asked) == 1


def test_experts_in_each_others_places_move_through_a_slot_that_can_be_spared():
    """A cycle of three with one redundant copy: no expert of the cycle has a copy to fall back on."""
    geometry = Geometry((2, 2, 1), 4)
    one = instance(geometry, layers=[(0, 1, 2, 0, 3)])
    goal = as_placement(geometry, (0, 2, 3, 0, 1))

    one.send(Rebalance(goal.pack()))
    one.settle()

    assert one.machine.placement.layers == goal.layers
    assert one.num_moves == 5                            # three in their places, one aside, one copy back


def test_an_empty_slot_serves_to_move_all_others():
    geometry = Geometry((3, 2), 4)
    one = instance(geometry, layers=[(0, 1, EMPTY, 2, 3)])
    goal = as_placement(geometry, (2, 3, EMPTY, 0, 1))

    one.send(Rebalance(goal.pack()))
    one.settle()

    assert one.machine.placement.layers == goal.layers


def test_without_a_slot_to_spare_nothing_is_moved_and_the_cause_is_told():
    geometry = even_geometry(2, 4)
    one = instance(geometry, num_layers=1)
    one.send(Rebalance(as_placement(geometry, (2, 3, 0, 1)).pack()))
    one.settle()

    assert one.machine.placement.layers == ((0, 1, 2, 3),)
    assert one.num_moves == 0
    assert one.machine.figures().num_blocked == 1
    assert "add a redundant slot" in one.machine.figures().cause


def test_a_failed_move_leaves_the_old_map_and_brings_dropped_copies_back():
    one = instance(Geometry((2, 2, 2), 3), layers=[(0, 1, 1, 0, 2, 0)], chunk_bytes=1)
    before = one.machine.placement
    one.start()
    one.end(counts_of([1, 1, 100]))
    one.take()
    one.tell()
    one.answer(cause="the link broke")
    after = one.machine.placement

    after.check()
    changed = [(old, new) for old, new in zip(before.layers[0], after.layers[0], strict=True) if old != new]
    assert changed == [(0, EMPTY)] or changed == [(1, EMPTY)]
    assert (one.machine.figures().num_failures, one.machine.figures().cause) == (1, "the link broke")
    assert not one.machine.is_moving


def test_a_copy_that_was_dropped_and_not_overwritten_is_named_again_after_a_failure():
    geometry = Geometry((2, 2), 3)
    one = instance(geometry, layers=[(0, 1, 2, 0)] * 2, chunk_bytes=1, chunk_layers=2)
    one.send(Rebalance(as_placement(geometry, (2, 1, 2, 0), (2, 1, 2, 0)).pack()))
    one.take()
    one.tell()
    assert one.machine.placement.layers == ((EMPTY, 1, 2, 0), (EMPTY, 1, 2, 0))

    one.answer(cause="the link broke")

    assert one.machine.placement.layers == ((EMPTY, 1, 2, 0), (0, 1, 2, 0))


def test_after_a_failure_there_is_a_pause_and_then_another_try():
    one = instance(Geometry((2, 2), 3), layers=[(0, 1, 2, 0)], retry_s=5.0)
    hot = counts_of([1, 1, 100])
    one.start()
    one.end(hot)
    one.take()
    one.tell()
    one.answer(cause="the link broke")
    one.take()
    one.start()
    one.end(hot)
    assert not one.machine.is_moving

    one.now = 5.0
    one.settle(hot)
    assert one.machine.placement.layers[0].count(2) == 2


def test_slots_of_an_overdue_move_are_left_alone_until_it_is_answered():
    one = instance(Geometry((2, 2), 3), layers=[(0, 1, 2, 0)], retry_s=1.0)
    hot = counts_of([1, 1, 100])
    one.start()
    one.end(hot)
    one.take()
    one.tell()
    one.tick()
    assert one.machine.figures().num_failures == 1
    for _ in range(5):
        one.now += 10
        one.start()
        one.end(hot)
        one.take()
        one.tell()
    assert len(one.asked) == 1, "nothing else is written meanwhile"

    one.answer()
    one.settle(hot)
    assert one.machine.placement.layers[0].count(2) == 2


def test_a_move_that_costs_more_than_it_brings_is_not_made():
    """One token fewer on the busiest rank saves 1 ms per step; a copy of 1 GB at 1 GB/s delays steps by 0.2 s."""
    costs = dict(expert_bytes=10**9, chunk_bytes=10**9, bytes_per_s=1e9, seconds_per_token=1e-3)
    hot = counts_of([10, 4, 4, 4])
    dear = instance(Geometry((3, 2), 4), layers=[(0, 1, 2, 3, 1)], horizon_steps=10, **costs)
    dear.settle(hot)
    cheap = instance(Geometry((3, 2), 4), layers=[(0, 1, 2, 3, 1)], horizon_steps=1000, **costs)
    cheap.settle(hot)

    assert dear.num_moves == 0
    assert dear.machine.figures().num_gated > 0
    assert cheap.num_moves > 0
    assert cheap.machine.figures().after[0] < dear.machine.figures().after[0]


def test_an_even_load_moves_nothing():
    one = instance(even_geometry(4, 8, num_redundant=0))
    for _ in range(20):
        one.settle(counts_of([5] * 8, [5] * 8))

    assert one.num_moves == 0
    assert one.machine.version == 1


def test_requests_to_the_data_plane_are_as_small_as_they_must_be():
    one = instance(even_geometry(4, 16, num_redundant=4), num_layers=3, chunk_bytes=3, chunk_layers=2)
    one.settle([[100] * 4 + [1] * 12] * 3)                                   # `begin` counts the moves of each

    assert one.num_moves > 3


def test_a_lost_rank_is_left_out_at_once_where_copies_remain():
    """Every expert is on two ranks: one message, one version, no copying."""
    one = instance(even_geometry(4, 4, num_redundant=4))
    one.start()
    one.lose(1)

    assert one.machine.runnable and not one.asked
    assert len(one.mail) == 1
    one.take()
    one.start()
    one.end()
    assert one.machine.figures().lost_ranks == (1,)


def test_experts_without_another_copy_are_loaded_from_disk_before_steps_go_on():
    """Ranks (0 1) (2 3) (0 2): with rank 1 expert 3 is gone; it takes the place of a copy."""
    one = instance(Geometry((2, 2, 2), 4), layers=[(0, 1, 2, 3, 0, 2)])
    one.start()
    one.lose(1)
    assert not one.machine.runnable
    one.take()
    one.take()
    one.start()
    assert not one.running, "no step with an expert missing"
    one.tell()
    ((move,), _), = one.asked.values()
    assert (move.from_slot, move.expert) == (DISK, 3)
    one.answer()
    one.take()
    one.start()

    assert one.runnable and one.running
    assert sorted(expert for expert in one.machine.placement.layers[0] if expert != EMPTY) == [0, 1, 2, 3]


def test_an_expert_that_is_on_its_way_when_its_rank_dies_is_not_fetched_twice():
    """Expert 3 is being copied from rank 1 when rank 1 is lost: the copy under way is waited for and named."""
    geometry = Geometry((2, 2, 2), 4)
    one = instance(geometry, layers=[(0, 1, 2, 3, 0, 2)])
    one.send(Rebalance(as_placement(geometry, (3, 1, 2, 3, 0, 2)).pack()))
    one.take()
    one.tell()
    ((move,), _), = one.asked.values()
    assert (move.from_slot, move.to_slot, move.expert) == (3, 0, 3)

    one.lose(1)
    one.take()
    one.tell()
    assert len(one.asked) == 1 and not one.machine.runnable
    one.answer()
    one.take()

    assert one.runnable and not one.asked
    assert one.machine.placement.layers[0][move.to_slot] == 3


def test_what_was_copied_to_a_rank_before_it_died_is_not_there_when_it_is_back():
    geometry = Geometry((2, 2, 2), 4)
    one = instance(geometry, layers=[(0, 1, 2, 3, 0, 2)], min_steps=10**9)
    goal = as_placement(geometry, (3, 1, 2, 3, 0, 2)).pack()
    one.send(Rebalance(goal))
    one.take()
    one.tell()
    one.lose(0)
    one.give_back(0, loaded=False)
    one.answer(finished=True)
    one.settle()
    one.send(Rebalance(goal))
    one.settle()                                         # reads what the map names

    assert one.runnable
    assert one.machine.placement.layers[0] == (3, 1, 2, 3, 0, 2)


def test_a_slot_that_a_late_answer_gives_back_is_used_to_serve_again():
    geometry = Geometry((1, 1), 1)
    one = instance(geometry, layers=[(0, EMPTY)], min_steps=10**9)
    one.send(Rebalance(as_placement(geometry, (0, 0)).pack()))
    one.lose(0)
    one.lose(1)
    one.give_back(1, loaded=False)
    assert not one.machine.runnable and len(one.asked) == 1, "the only slot is still being written"

    one.answer(finished=True)
    one.settle()

    assert one.runnable


def test_copies_dropped_for_moves_are_named_again_when_a_rank_is_lost():
    geometry = Geometry((2, 2, 2), 3)
    one = instance(geometry, layers=[(0, 1, 2, 0, 1, 2)] * 2, chunk_bytes=1, chunk_layers=2)
    one.send(Rebalance(as_placement(geometry, (2, 1, 2, 0, 1, 2), (2, 1, 2, 0, 1, 2)).pack()))
    one.take()
    one.tell()
    one.lose(2)

    assert one.machine.placement.layers == ((EMPTY, 1, 2, 0, EMPTY, EMPTY), (0, 1, 2, 0, EMPTY, EMPTY))


def test_too_few_slots_on_the_survivors_are_told_and_a_returning_rank_mends_it():
    one = instance(even_geometry(3, 6, num_redundant=1))
    one.lose(0)
    one.settle()
    assert one.unservable and "have no slot" in one.unservable[0]
    assert not one.machine.runnable

    one.give_back(0)
    one.settle()
    assert one.runnable
    one.machine.placement.check()


def test_a_rank_that_returns_empty_is_filled_again():
    one = instance(even_geometry(4, 8, num_redundant=8))
    one.lose(2)
    one.settle(counts_of([10] * 8, [10] * 8))
    one.give_back(2, loaded=False)
    for _ in range(3):
        one.settle(counts_of([10] * 8, [10] * 8))

    assert all(experts[slot] != EMPTY for experts in one.machine.placement.layers for slot in range(8, 12))
    assert max(one.machine.figures().after) < 1.05


def test_loads_that_fail_again_and_again_are_told_and_tried_again():
    one = instance(Geometry((2, 2, 2), 4), layers=[(0, 1, 2, 3, 0, 2)], max_failures=3, retry_s=5.0)
    one.lose(1)
    for _ in range(3):
        one.take()
        one.take()
        one.tell()
        one.answer(cause="the disk is gone")
    assert one.unservable and "the disk is gone" in one.unservable[0]
    assert not one.asked

    one.settle()
    assert one.runnable


def test_a_map_to_rebalance_to_is_checked():
    one = instance(Geometry((2, 2), 3), layers=[(0, 1, 2, 0)])
    for goal in (Placement(1, 3, (2, 2), ((0, 1, 0, 1),)), Placement(1, 3, (2, 2, 1), ((0, 1, 2, 0, 1),))):
        one.send(Rebalance(goal.pack()))
        assert not one.machine.is_moving
        assert one.machine.figures().cause


@pytest.mark.parametrize(("changes", "names"), [
    (dict(expert_bytes=0), "experts.expert_bytes is 0"),
    (dict(chunk_bytes=1, expert_bytes=2), "experts.chunk_bytes is 1"),
    (dict(interference=-1.0), "experts.interference"),
    (dict(retry_s=0), "experts.retry_s"),
])
def test_impossible_settings_are_refused_by_name(changes, names):
    with pytest.raises(ConfigError, match=names):
        settings_of(**changes)


def test_a_map_of_another_instance_is_refused():
    with pytest.raises(ConfigError, match="3 experts on ranks with"):
        Rebalancer(even_geometry(2, 4), as_placement(Geometry((2, 2), 3), (0, 1, 2, 0)), settings_of())


EVENTS = ("take", "tell", "start", "start", "end", "end", "answer", "answer", "fail", "tick", "lose", "back", "empty",
          "goal")


@given(st.data(), geometries(max_ranks=5, max_experts=6), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_whatever_happens_no_live_slot_is_written_and_steps_find_every_expert(data, geometry, chunk, layers, seed):
    """`Instance` checks every map, every write and every step; at the end all must come to rest and serve again."""
    rng = random.Random(seed)
    one = instance(geometry, num_layers=2, chunk_bytes=chunk, chunk_layers=layers, retry_s=1.0)

    def loads():
        hot = rng.randrange(geometry.num_experts)
        return [[100 if expert == (hot + layer) % geometry.num_experts else rng.randint(0, 20)
                 for expert in range(geometry.num_experts)] for layer in range(2)]

    for event in data.draw(st.lists(st.sampled_from(EVENTS), max_size=60)):
        rank = rng.randrange(geometry.num_ranks)
        match event:
            case "end":
                one.end(loads())
            case "answer":
                one.answer(rng.randrange(4), finished=rng.random() < 0.5)
            case "fail":
                one.answer(rng.randrange(4), cause="told to fail")
            case "lose":
                one.lose(rank)
            case "back":
                one.give_back(rank)
            case "empty":
                one.give_back(rank, loaded=False)
            case "goal":
                renamed = rng.sample(range(geometry.num_routed), geometry.num_routed) + [geometry.num_routed]
                mixed = tuple(renamed[expert] for expert in initial_layer(geometry))
                one.send(Rebalance(as_placement(geometry, mixed, mixed).pack()))
            case _:
                getattr(one, event)()
        one.read()
    for rank in range(geometry.num_ranks):
        one.give_back(rank, loaded=rng.random() < 0.5)
    one.settle(loads())

    assert one.runnable
    one.machine.placement.check()
    steps = one.num_steps
    one.start()
    one.end()
    assert one.num_steps == steps + 1
    twin = instance(geometry, num_layers=2)
    assert twin.machine.placement == one.placement


@given(st.data(), geometries(max_ranks=5, max_experts=7), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_any_map_is_reached_from_any_other_if_one_slot_can_be_spared(data, geometry, chunk, rng):
    """Through live maps alone, each checked by `Instance`, with two moves more for a cycle at most."""
    def mixed():
        renamed = [*rng.sample(range(geometry.num_routed), geometry.num_routed), geometry.num_routed]
        return [renamed[expert] for expert in initial_layer(geometry)]

    first, last = mixed(), mixed()
    if geometry.num_redundant and data.draw(st.booleans()):
        copied = [slot for slot, expert in enumerate(last) if last.count(expert) > 1 and expert < geometry.num_routed]
        last[rng.choice(copied)] = EMPTY
    one = instance(geometry, layers=[first, first], chunk_bytes=chunk, min_steps=10**9)
    goal = as_placement(geometry, last, first)

    one.send(Rebalance(goal.pack()))
    one.settle()

    figures = one.machine.figures()
    if geometry.num_redundant:
        assert one.machine.placement.layers == goal.layers
        wrong = sum(new not in (EMPTY, old) for old, new in zip(first, last, strict=True))
        assert wrong <= one.num_moves <= 2 * wrong
    else:
        assert figures.num_blocked == (first != last)
