"""Who begins and who steps back: the oldest always gets on, and nobody's worst case is reserved."""

from tests.control.builders import request
from tripool.control.decode import (
    LINE_ROUNDS,
    LOOK_AHEAD_BLOCKS,
    choose_to_step_back,
    has_room,
    line_room,
    look_ahead_blocks,
)
from tripool.control.sequence import Phase, Sequence


def holder(arrival, phase=Phase.DECODING, priority=0, **more):
    req = request(arrival, priority=priority)
    return Sequence(req, 1, arrival, 0.0, req.prompt, decodes=True, phase=phase, **more)


def test_a_line_has_room_until_it_would_fill_all_slots_so_many_times():
    many = 10**6

    assert line_room(0, 0, num_slots=2, num_blocks=many) == 2 * LINE_ROUNDS
    assert line_room(3, 6, num_slots=2, num_blocks=many) == 2 * LINE_ROUNDS - 3
    assert line_room(2 * LINE_ROUNDS + 1, 9, num_slots=2, num_blocks=many) == 0


def test_a_line_has_room_until_it_would_fill_all_blocks_so_many_times():
    most = 4 * LINE_ROUNDS                                # where each wants a quarter of the blocks

    for num_waiting in (1, most // 2, most - 1, most):
        assert line_room(num_waiting, 5 * num_waiting, num_slots=99, num_blocks=20) == most - num_waiting
    assert line_room(most + 1, 5 * most + 5, num_slots=99, num_blocks=20) == 0


def test_the_youngest_steps_back():
    old, young = holder(1), holder(2)

    assert choose_to_step_back([young, old]) is young


def test_the_least_urgent_steps_back_before_the_youngest():
    old, young = holder(1, priority=5), holder(2, priority=0)

    assert choose_to_step_back([old, young]) is old


def test_the_first_of_all_never_steps_back():
    assert choose_to_step_back([holder(1)]) is None
    assert choose_to_step_back([holder(1), holder(2, Phase.PULLING)]) is None


def test_nobody_steps_back_whose_blocks_an_unanswered_verb_names():
    old, middle, young = holder(1), holder(2), holder(3, Phase.FETCHING)

    assert choose_to_step_back([old, middle, young]) is middle


def test_one_that_ended_or_leaves_already_is_not_asked():
    old, middle, young = holder(1), holder(2, leaving=True), holder(3, ended=True)

    assert choose_to_step_back([old, middle, young]) is None


def test_blocks_are_kept_in_hand_only_as_far_as_a_request_may_still_grow():
    short, long = request(1, 8, max_tokens=2), request(2, 8, max_tokens=1000)

    def ahead(req):
        return look_ahead_blocks(Sequence(req, 1, 1, 0.0, req.prompt, decodes=True), block_tokens=4)

    assert ahead(short) == 0              # eight tokens and one more fill the three blocks it begins with
    assert ahead(long) == LOOK_AHEAD_BLOCKS


def test_a_request_that_is_handed_over_never_grows():
    req = request(1, 8, max_tokens=1000)

    assert look_ahead_blocks(Sequence(req, 1, 1, 0.0, req.prompt, decodes=False), block_tokens=4) == 0


def test_room_is_what_stays_after_the_rows_in_hand():
    assert has_room(num_spare=4, num_ahead=4, alone=False)
    assert not has_room(num_spare=3, num_ahead=4, alone=False)


def test_one_that_is_alone_needs_nothing_in_hand():
    assert has_room(num_spare=0, num_ahead=2, alone=True)
    assert not has_room(num_spare=-1, num_ahead=0, alone=True)
