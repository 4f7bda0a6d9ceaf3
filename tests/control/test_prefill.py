"""A step's budget goes to short prompts first, and never all of it."""

from hypothesis import given
from hypothesis import strategies as st

from tests.control.builders import request
from tripool.control.prefill import split_budget
from tripool.control.sequence import Sequence


def row(num_tokens, arrival, priority=0, num_computed=0):
    req = request(arrival, num_tokens, priority=priority)
    return Sequence(req, 1, arrival, 0.0, req.prompt, decodes=True, num_computed=num_computed)


def shares(rows, budget):
    return {sequence.arrival: count for sequence, count in split_budget(rows, budget)}


def test_one_row_gets_what_it_needs_and_no_more():
    assert shares([row(10, 1)], budget=16) == {1: 10}
    assert shares([row(100, 1)], budget=16) == {1: 16}
    assert shares([row(100, 1, num_computed=95)], budget=16) == {1: 5}


def test_nothing_is_shared_out_when_the_budget_is_spent():
    assert shares([row(10, 1)], budget=0) == {}
    assert shares([], budget=16) == {}


def test_a_short_prompt_is_computed_whole_beside_a_long_one():
    assert shares([row(1000, 1), row(10, 2)], budget=16) == {2: 10, 1: 6}


def test_a_stream_of_short_prompts_leaves_a_quarter_to_the_row_that_came_first():
    rows = [row(1000, 1)] + [row(8, arrival) for arrival in range(2, 8)]

    assert shares(rows, budget=16)[1] == 4
    assert sum(shares(rows, budget=16).values()) == 16


def test_the_more_urgent_go_first():
    rows = [row(100, 1, priority=5), row(40, 2, priority=0)]

    assert shares(rows, budget=32) == {2: 32}


def test_a_long_row_is_done_in_the_end_though_short_ones_keep_coming():
    long, arrival, steps = row(400, 1), 2, 0
    short: list[Sequence] = []
    while long.num_to_compute:
        short = [each for each in short if each.num_to_compute] + [row(16, arrival)]
        for sequence, count in split_budget([long, *short], budget=16):
            sequence.num_computed += count
        arrival, steps = arrival + 1, steps + 1

    assert steps <= 400 // 4


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), min_size=1, max_size=8), st.integers(1, 64))
def test_the_whole_budget_is_used_never_more_and_nobody_gets_more_than_he_needs(needs, budget):
    rows = [row(num_tokens, arrival, priority) for arrival, (num_tokens, priority) in enumerate(needs, 1)]
    result = split_budget(rows, budget)

    assert sum(count for _, count in result) == min(budget, sum(num_tokens for num_tokens, _ in needs))
    assert all(0 < count <= sequence.num_to_compute for sequence, count in result)
    first = min(rows, key=lambda each: each.order)
    assert {sequence.arrival: count for sequence, count in result}.get(first.arrival, 0) > 0
