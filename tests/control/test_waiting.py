"""The line is served in order; who lacks room may be passed, but not for ever."""

from tests.control.builders import request
from tripool.control.sequence import Sequence
from tripool.control.waiting import MAX_PASSED, WaitingLine

BLOCK_TOKENS = 4


def waiting(arrival, priority=0, stepped_back=False):
    req = request(arrival, priority=priority)
    return Sequence(req, 1, arrival, 0.0, req.prompt, decodes=True, stepped_back=stepped_back)


def begun(line, fits):
    """Who begins, if only those `fits` names have room."""
    names = []

    def try_begin(sequence):
        if sequence.arrival in fits:
            names.append(sequence.arrival)
            return True
        return False

    line.begin(try_begin)
    return names


def line_of(*sequences):
    line = WaitingLine(BLOCK_TOKENS)
    for sequence in sequences:
        line.add(sequence)
    return line


def test_the_more_urgent_stand_first_and_then_the_older():
    line = line_of(waiting(3), waiting(1, priority=2), waiting(2), waiting(4, priority=-1))

    assert [sequence.arrival for sequence in line] == [4, 2, 3, 1]


def test_everybody_with_room_begins_in_order():
    assert begun(line_of(waiting(2), waiting(1), waiting(3)), fits={1, 2, 3}) == [1, 2, 3]


def test_one_without_room_is_passed_by_one_with_room():
    line = line_of(waiting(1), waiting(2), waiting(3))

    assert begun(line, fits={3}) == [3]
    assert [sequence.arrival for sequence in line] == [1, 2]


def test_one_without_room_is_not_passed_by_the_less_urgent():
    assert begun(line_of(waiting(1), waiting(2, priority=1)), fits={2}) == []


def test_one_without_room_is_passed_only_so_often():
    line = line_of(*[waiting(arrival) for arrival in range(1, 40)])

    passed = begun(line, fits=set(range(2, 40)))

    assert passed == list(range(2, 2 + MAX_PASSED))
    assert begun(line, fits={30}) == []
    assert begun(line, fits={1})[0] == 1


def test_one_that_stepped_back_is_never_passed():
    assert begun(line_of(waiting(1, stepped_back=True), waiting(2)), fits={2}) == []
