"""Rows as columns: how far a step brings each, with and without drafts."""

import numpy as np
import pytest

from tripool.sim.columns import Columns


def columns(*, num_drafts=0, acceptance=(), seed=0, num_slots=4, num_ranks=2) -> Columns:
    return Columns(num_ranks, num_slots, num_drafts, acceptance, seed)


def put(made: Columns, place: int, request_id=1, *, number=1, end=100, limit=1000, computed=50, room=128) -> None:
    made.put(place, request_id, number=number, end=end, limit=limit, computed=computed, room=room, last_s=0.0)


def test_rows_run_while_they_have_a_block_and_are_counted_by_rank():
    made = columns()
    put(made, 0)
    put(made, 5, computed=100)
    put(made, 6, computed=128)

    assert made.by_rank(made.running_N()).tolist() == [1, 1]
    assert made.by_rank(made.contexts_N(made.running_N())).tolist() == [50, 100]


def test_plain_steps_go_until_the_first_row_ends_or_lacks_a_block():
    made = columns()
    put(made, 0, end=41)
    put(made, 1, computed=100)
    assert made.num_plain_steps(made.running_N()) == 28

    put(made, 2, end=11)
    assert made.num_plain_steps(made.running_N()) == 10


@pytest.mark.parametrize("acceptance", [(0.7,), (0.8, 0.5)])
def test_drafts_are_right_as_often_as_was_said(acceptance):
    made = columns(num_drafts=len(acceptance), acceptance=acceptance, num_slots=1000, num_ranks=1)
    for place in range(1000):
        put(made, place, request_id=place, end=10**6, limit=10**6, room=10**6)

    taken = [made.step(made.running_N()) for _ in range(20)]

    drafted, accepted = (np.sum([getattr(each, name) for each in taken], 0) for name in ("drafted", "accepted"))
    assert drafted.tolist() == [20_000] * len(acceptance)
    chained = np.cumprod(acceptance)
    assert accepted / drafted == pytest.approx(chained, abs=0.02)
    assert int(sum(each.emitted_N.sum() for each in taken)) == 20_000 + int(accepted.sum())


def test_whether_a_draft_is_right_does_not_depend_on_who_else_is_there_or_in_which_slot():
    def numbers(place: int, others: int) -> list[int]:
        made = columns(num_drafts=2, acceptance=(0.6, 0.6), seed=5, num_slots=16)
        for other in range(others):
            put(made, other, request_id=100 + other)
        put(made, place, request_id=7)
        found = []
        for _ in range(10):
            made.step(made.running_N())
            found.append(int(made.number_N[place]))
        return found

    assert numbers(0, 0) == numbers(9, 8)


def test_a_row_neither_drafts_beyond_its_blocks_nor_emits_beyond_its_end():
    made = columns(num_drafts=2, acceptance=(1.0, 1.0))
    put(made, 0, computed=126)                     # room for its token and one draft
    put(made, 1, request_id=2, number=98)          # two tokens are left
    put(made, 2, request_id=3, number=999, end=1000)

    taken = made.step(made.running_N())

    assert taken.emitted_N.tolist()[:3] == [2, 2, 1]
    assert made.wants_N().tolist()[:2] == [True, False]
