"""Rows in lockstep: counted once for all, they come as far as if each were counted by itself."""

import random
from dataclasses import dataclass, field

import pytest

from tripool.core.plan import Join
from tripool.core.request import Limits, Sampling
from tripool.sim.lockstep import Lockstep
from tripool.sim.measures import GapHistogram
from tripool.sim.row import Row

NUM_SLOTS = 4


def row(place: int, *, computed=50, room=128, total=100) -> Row:
    join = Join(place % NUM_SLOTS, place + 1, 1, "gateway", b"", 0, computed, (), Sampling(), Limits(1000), True)
    return Row(join, place // NUM_SLOTS, place, 0, computed, room, 0, total, "stop")


def take(made: Lockstep, num_steps: int, begun_s=0.0, step_s=1.0, gaps=None) -> int:
    return made.take(begun_s, num_steps, begun_s + step_s, begun_s + num_steps * step_s, gaps or GapHistogram())


def test_rows_run_while_they_have_a_block_and_are_counted_by_rank():
    made = Lockstep(2)
    made.put(row(0), 1, 0.0)
    made.put(row(5, computed=100), 1, 0.0)
    made.put(row(6, computed=128), 1, 0.0)

    assert made.begin() == 2
    assert [each.tolist() for each in made.load()] == [[1, 1], [50, 100]]


def test_steps_go_until_the_first_row_ends_or_lacks_a_block():
    made = Lockstep(1)
    made.put(row(0, total=41), 1, 0.0)
    made.put(row(1, computed=100), 1, 0.0)
    assert made.num_plain_steps() == 28

    made.put(short := row(2, total=11), 1, 0.0)
    assert made.num_plain_steps() == 10
    made.take_off(short)
    assert made.num_plain_steps() == 28


def test_a_row_that_lacks_a_block_rests_until_it_gets_one():
    made = Lockstep(1)
    made.put(needy := row(0, computed=126), 1, 0.0)
    made.put(row(1), 1, 0.0)
    take(made, 2)
    assert made.stopped() == [needy] and made.begin() == 1 and made.number(needy) == 3

    take(made, 5, begun_s=2.0)
    assert made.stopped() == [] and made.number(needy) == 3

    made.grow([(needy, 128)])
    assert made.begin() == 2
    take(made, 1, begun_s=7.0)
    assert (made.number(needy), made.computed(needy), made.last_s(needy)) == (4, 129, 8.0)


def test_gaps_are_from_a_rows_last_token_to_its_next():
    made, gaps = Lockstep(1), GapHistogram()
    made.put(needy := row(0, computed=127), 1, 0.0)            # it never emitted: no gap
    made.put(row(1), 1, 0.5)
    assert take(made, 1, begun_s=1.0, gaps=gaps) == 2
    assert (gaps.num_gaps, gaps.mean_s) == (1, pytest.approx(1.5))

    made.stopped()
    take(made, 3, begun_s=2.0, gaps=gaps)                      # those of whole steps are counted elsewhere
    made.grow([(needy, 128)])
    assert take(made, 1, begun_s=5.0, gaps=gaps) == 1          # the one that rested for three steps
    assert (gaps.num_gaps, gaps.mean_s) == (2, pytest.approx((1.5 + 4.0) / 2))

    assert take(made, 1, begun_s=9.0, gaps=gaps) == 2          # nobody computed in between
    assert gaps.num_gaps == 4


def test_rows_that_are_cleared_are_gone():
    made = Lockstep(2)
    made.put(gone := row(0), 1, 0.0)
    made.clear()

    assert not gone.live and made.begin() == 0 and made.stopped() == []
    made.put(row(1), 1, 0.0)
    assert [each.tolist() for each in made.load()] == [[1, 0], [50, 0]]


@dataclass
class Slow:
    """A row counted by itself."""

    number: int
    computed: int
    room: int
    total: int
    emitted: list[float] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return self.computed < self.room

    @property
    def is_stopped(self) -> bool:
        return self.number >= self.total or not self.runs


@pytest.mark.parametrize("seed", range(5))
def test_rows_come_as_far_as_if_each_were_counted_by_itself(seed):
    generator = random.Random(seed)
    made, slow, rows = Lockstep(2), {}, {}
    now = 1.0
    for _ in range(150):
        place = generator.randrange(2 * NUM_SLOTS)
        if place not in rows and generator.random() < 0.7:
            computed = generator.randrange(1, 40)
            rows[place] = row(place, computed=computed, room=computed + generator.randrange(0, 12),
                              total=generator.randrange(2, 30))
            slow[place] = Slow(1, computed, rows[place].room, rows[place].total)
            made.put(rows[place], 1, 0.0)
        elif place in rows and generator.random() < 0.2:
            made.take_off(rows.pop(place))
            del slow[place]
        grown = [each for each in sorted(rows) if not slow[each].runs and generator.random() < 0.5]
        made.grow([(rows[each], 8) for each in grown])
        for each in grown:
            slow[each].room += 8
        running = [each for each in sorted(rows) if slow[each].runs]
        assert made.begin() == len(running)
        if not running:
            continue
        most = min(min(slow[each].total - slow[each].number, slow[each].room - slow[each].computed) for each in running)
        assert made.num_plain_steps() == most
        loads = [[each for each in running if each // NUM_SLOTS == rank] for rank in range(2)]
        rows_R, context_R = made.load()
        assert rows_R.tolist() == [len(each) for each in loads]
        assert context_R.tolist() == [sum(slow[place].computed for place in each) for each in loads]
        num_steps = generator.randrange(1, most + 1)
        take(made, num_steps, begun_s=now)
        now += num_steps
        for each in running:
            slow[each].number += num_steps
            slow[each].computed += num_steps
            slow[each].emitted.append(now)
        stopped = [each.place for each in made.stopped()]
        assert stopped == [each for each in running if slow[each].is_stopped]
        for each in list(rows):
            told = made.number(rows[each]), made.computed(rows[each]), made.last_s(rows[each])
            assert told == (slow[each].number, slow[each].computed, (slow[each].emitted or [0.0])[-1])
            if slow[each].number >= slow[each].total:
                made.take_off(rows.pop(each))
                del slow[each]
