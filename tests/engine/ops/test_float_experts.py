"""The grouped expert FFN of floats: close to its definition, and the same bits at every level and in any company."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.engine.ops.builders import LEVELS, generator, same
from tripool.engine.ops import native
from tripool.engine.ops.float_experts import FloatExperts, float_experts, pack_experts
from tripool.engine.ops.native import FLOATS

SHAPES = ((1, 1, 1), (3, 8, 5), (4, 40, 24), (5, 64, 129))
"""Experts, model width, feed-forward width."""

ROWS = (0, 1, 2, 5, 16, 70)


def weights(num_experts, width, hidden, chance, dtype=torch.float32):
    """Gate and up, down."""
    return ((torch.randn(num_experts, 2 * hidden, width, generator=chance) / width ** 0.5).to(dtype),
            (torch.randn(num_experts, width, hidden, generator=chance) / hidden ** 0.5).to(dtype))


def pairs(num_rows, num_pairs, num_experts, chance):
    return (torch.randint(0, max(num_rows, 1), (num_pairs,), generator=chance),
            torch.randint(0, num_experts, (num_pairs,), generator=chance))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_a_kernel_agrees_with_its_definition_and_with_plain_to_the_bit(level, kind, shape):
    """Numbers about 1, sums of up to 129 of them, an exponential good to some last places: a hundred of 2**-24."""
    for num_rows in ROWS:
        chance = generator(*shape, num_rows)
        stack = pack_experts(*weights(*shape, chance, kind))
        x = torch.randn(num_rows, shape[1], generator=chance)
        row, expert = pairs(num_rows, 2 * num_rows + 1 if num_rows else 0, shape[0], chance)
        for given in (x, x.bfloat16()):
            found = float_experts(given, row, expert, stack, level=level)
            exact = float_experts(given, row, expert, stack, level=-1)
            assert found.shape == (len(row), shape[1])
            assert ((found - exact).abs() <= 1e-5 * (1 + exact.abs().amax(-1, keepdim=True))).all(), num_rows
            assert same(found, float_experts(given, row, expert, stack, level=0)), num_rows
            rounded = float_experts(given, row, expert, stack, level=level, dtype=torch.bfloat16)
            assert torch.equal(rounded, found.bfloat16()), num_rows


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_rows_and_what_lies_between_are_rounded_for_experts_that_ask_for_it(level, shape):
    """What lies between may be rounded to either side of a half: of so many, a few places of bfloat16."""
    for num_rows in ROWS:
        chance = generator(*shape, num_rows)
        plain = pack_experts(*weights(*shape, chance, torch.bfloat16))
        stack = FloatExperts(replace(plain.gate_up, rounds=True), replace(plain.down, rounds=True))
        x = torch.randn(num_rows, shape[1], generator=chance)
        row, expert = pairs(num_rows, 2 * num_rows + 1 if num_rows else 0, shape[0], chance)
        found = float_experts(x, row, expert, stack, level=level)
        exact = float_experts(x, row, expert, stack, level=-1)
        assert ((found - exact).abs() <= 2e-3 * (1 + exact.abs().amax(-1, keepdim=True))).all(), num_rows
        assert same(found, float_experts(x.bfloat16(), row, expert, stack, level=level))
        for pair in {0, len(row) - 1} if num_rows else ():
            alone = float_experts(x[row[pair]].unsqueeze(0), torch.tensor([0]), expert[pair].reshape(1), stack,
                                  level=level)
            assert same(alone[0], found[pair]), (num_rows, pair)


def test_the_definition_is_a_gated_feed_forward():
    chance = generator(2)
    gate_up, down = weights(3, 20, 10, chance)
    x, (row, expert) = torch.randn(6, 20, generator=chance), pairs(6, 9, 3, chance)
    gate, up = torch.bmm(gate_up[expert], x[row].unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    expected = torch.bmm(down[expert], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(float_experts(x, row, expert, pack_experts(gate_up, down), level=-1), expected, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", FLOATS, ids=str)
def test_one_expert_may_have_most_rows_and_others_none(level, kind):
    """So many that they pass in several panels, and in an order that is not theirs."""
    chance = generator(3)
    num_rows = 430 if level else 20
    stack = pack_experts(*weights(5, 600, 40, chance, kind))
    x = torch.randn(num_rows, 600, generator=chance)
    row, expert = torch.randperm(num_rows, generator=chance), torch.full((num_rows,), 3)
    expert[::50] = 1
    y = float_experts(x, row, expert, stack, level=level)
    for pair in (0, 11, 12, num_rows - 1):
        alone = float_experts(x[row[pair]].unsqueeze(0), torch.tensor([0]), expert[pair].reshape(1), stack, level=level)
        assert torch.equal(alone[0], y[pair])


@pytest.mark.parametrize("level", [level for level in LEVELS if level.values[0] > 0])
def test_more_pairs_than_are_worked_on_at_once(level):
    """A wide middle: some hundred pairs at once, so that an expert's pairs are cut in two."""
    chance = generator(4)
    num_pairs, hidden = 1500, 5000
    stack, x = pack_experts(*weights(2, 4, hidden, chance)), torch.randn(7, 4, generator=chance)
    row, expert = pairs(7, num_pairs, 2, chance)
    y = float_experts(x, row, expert, stack, level=level)
    every = float_experts(x, torch.arange(14) % 7, torch.arange(14) // 7, stack, level=level)
    assert torch.equal(y, every[expert * 7 + row])


@pytest.mark.parametrize("level", [level for level in LEVELS if level.values[0] > 0])
def test_results_do_not_depend_on_the_number_of_threads(level):
    chance = generator(10)
    stack = pack_experts(*weights(6, 257, 330, chance, torch.bfloat16))
    for num_rows in (1, 5, 250):
        x, (row, expert) = torch.randn(num_rows, 257, generator=chance), pairs(num_rows, 4 * num_rows, 6, chance)
        expected = float_experts(x, row, expert, stack, level=level)
        try:
            for number in (2, 5):
                native.use_threads(number)
                assert same(float_experts(x, row, expert, stack, level=level), expected), (num_rows, number)
        finally:
            native.use_threads(1)


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_without_pairs_there_are_no_results(level):
    stack, nothing = pack_experts(*weights(2, 12, 6, generator(4))), torch.zeros(0, dtype=torch.int64)
    for num_rows in (0, 3):
        assert float_experts(torch.ones(num_rows, 12), nothing, nothing, stack, level=level).shape == (0, 12)


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_what_is_not_finite_spoils_its_own_pairs(level):
    stack, x = pack_experts(*weights(3, 20, 10, generator(5))), torch.randn(4, 20, generator=generator(6))
    x[1, 3] = float("nan")
    row, expert = torch.tensor([0, 1, 2, 3, 1]), torch.tensor([0, 0, 1, 1, 2])
    y = float_experts(x, row, expert, stack, level=level)
    assert y.isnan().all(-1).tolist() == [False, True, False, False, True]
    assert y[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_strong_gates_are_open_or_shut(level):
    """Far from zero SiLU is its argument, or nothing."""
    stack = pack_experts(torch.full((1, 2, 1), 127.0), torch.ones(1, 1, 1))
    y = float_experts(torch.tensor([[1000.0], [-1000.0], [0.0]]), torch.arange(3), torch.zeros(3, dtype=torch.int64),
                      stack, level=level).flatten()
    assert y[0].item() == pytest.approx(127000.0 ** 2, rel=1e-5) and y[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("level", [-1, *LEVELS])
@pytest.mark.parametrize(("row", "expert"), [(4, 0), (-1, 0), (0, 3), (0, -1)])
def test_a_pair_of_something_that_is_not_there_is_refused(level, row, expert):
    stack, x = pack_experts(*weights(3, 20, 10, generator(7))), torch.zeros(4, 20)
    with pytest.raises((AssertionError, IndexError)):
        float_experts(x, torch.tensor([0, row]), torch.tensor([0, expert]), stack, level=level)


def test_experts_that_do_not_fit_are_refused():
    gate_up, down = weights(2, 8, 6, generator(8))
    with pytest.raises(AssertionError, match="do not fit"):
        pack_experts(gate_up[:, :10], down)
    with pytest.raises(AssertionError, match="as many"):
        pack_experts(gate_up, down[:1])
