"""The grouped expert FFN: levels agree to the bit, and with the definition up to steps of a quantised middle."""

import pytest
import torch
import torch.nn.functional as F

from tests.engine.ops.builders import LEVELS, ROWS, experts, generator, same
from tripool.engine.ops.expert_ffn import expert_ffn, pack_experts
from tripool.engine.parallel.quantise import dequantise, quantise

SHAPES = ((1, 1, 1), (3, 8, 5), (4, 40, 24), (6, 100, 33), (5, 64, 129))
"""Experts, model width, feed-forward width."""


def weights(num_experts: int, width: int, hidden: int, chance: torch.Generator):
    """Gate and up, down: quantised, with scales."""
    return (*quantise(torch.randn(num_experts, 2 * hidden, width, generator=chance) / width ** 0.5),
            *quantise(torch.randn(num_experts, width, hidden, generator=chance) / hidden ** 0.5))


def pairs(num_rows: int, num_pairs: int, num_experts: int, chance: torch.Generator):
    return (torch.randint(0, max(num_rows, 1), (num_pairs,), generator=chance),
            torch.randint(0, num_experts, (num_pairs,), generator=chance))


def by_floats(x, row, expert, gate_up, gate_up_scale, down, down_scale):
    """The results without a quantised middle, and the most that one step of one element of it changes in each."""
    gate_up = dequantise(gate_up, gate_up_scale, torch.float32)[expert]
    down = dequantise(down, down_scale, torch.float32)[expert]
    gate, up = torch.bmm(gate_up, x[row].unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    h = F.silu(gate) * up
    step = h.abs().amax(-1) / 127 * down.abs().amax((1, 2)) if len(row) else x.new_zeros(0)
    return torch.bmm(down, h.unsqueeze(-1)).squeeze(-1), step.unsqueeze(-1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_a_kernel_agrees_with_its_definition(level, shape):
    """The last place of SiLU may move an element of the middle by one step; nearly all results have no such element."""
    for num_rows in ROWS:
        chance = generator(*shape, num_rows)
        given = weights(*shape, chance)
        stack = pack_experts(*given)
        x = torch.randn(num_rows, shape[1], generator=chance)
        row, expert = pairs(num_rows, 2 * num_rows + 1 if num_rows else 0, shape[0], chance)
        _, step = by_floats(x, row, expert, *given)
        for rows, scale in ((x, None), (x.bfloat16(), None), quantise(x)):
            found = expert_ffn(rows, row, expert, stack, scale_M=scale, level=level)
            off = (found - expert_ffn(rows, row, expert, stack, scale_M=scale, level=-1)).abs()
            assert found.shape == (len(row), shape[1])
            assert (off <= 1e-5 + 2.1 * step).all(), num_rows
            assert (off > 1e-5 * (1 + found.abs())).any(-1).sum() <= len(row) // 20, num_rows
            assert same(found, expert_ffn(rows, row, expert, stack, scale_M=scale, level=0)), num_rows
            rounded = expert_ffn(rows, row, expert, stack, scale_M=scale, level=level, dtype=torch.bfloat16)
            assert torch.equal(rounded, found.bfloat16()), num_rows


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_the_result_is_close_to_what_floats_give(level):
    chance = generator(2)
    given = weights(4, 256, 96, chance)
    x = torch.randn(30, 256, generator=chance)
    row, expert = pairs(30, 60, 4, chance)
    found, (exact, _) = expert_ffn(x, row, expert, pack_experts(*given), level=level), by_floats(x, row, expert, *given)
    assert (found - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("level", LEVELS)
def test_one_expert_may_have_all_rows_and_others_none(level):
    """So many that they pass in several parts, and in an order that is not theirs."""
    chance = generator(3)
    stack = experts(5, 1100, 40, chance)
    x = torch.randn(200, 1100, generator=chance)
    row, expert = torch.randperm(200, generator=chance), torch.full((200,), 3)
    y = expert_ffn(x, row, expert, stack, level=level)
    for pair in (0, 11, 12, 100, 199):
        alone = expert_ffn(x[row[pair]].unsqueeze(0), torch.tensor([0]), torch.tensor([3]), stack, level=level)
        assert torch.equal(alone[0], y[pair])


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_without_pairs_there_are_no_results(level):
    stack, nothing = experts(2, 12, 6, generator(4)), torch.zeros(0, dtype=torch.int64)
    for num_rows in (0, 3):
        assert expert_ffn(torch.ones(num_rows, 12), nothing, nothing, stack, level=level).shape == (0, 12)


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_what_is_not_finite_spoils_its_own_pairs(level):
    """A row that is not finite, and one whose middle overflows."""
    stack, x = experts(3, 20, 10, generator(5)), torch.randn(4, 20, generator=generator(6))
    x[1, 3], x[2] = float("inf"), x[2] * 1e30
    row, expert = torch.tensor([0, 1, 2, 3, 1]), torch.tensor([0, 0, 1, 1, 2])
    y = expert_ffn(x, row, expert, stack, level=level)
    assert y.isnan().all(-1).tolist() == [False, True, True, False, True]
    assert y[[0, 3]].isfinite().all()


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_strong_gates_are_open_or_shut(level):
    """Far from zero SiLU is its argument, or nothing."""
    one = torch.ones(1, 1, 1, dtype=torch.int8)
    stack = pack_experts(torch.tensor([[[127], [127]]], dtype=torch.int8), torch.ones(1, 2), one, torch.ones(1, 1))
    x = torch.tensor([[1000.0], [-1000.0], [0.0]])
    row = torch.arange(3)
    y = expert_ffn(x, row, torch.zeros(3, dtype=torch.int64), stack, level=level).flatten()
    assert y[0] == pytest.approx(127000.0 ** 2, rel=1e-5) and y[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("level", [-1, *LEVELS])
@pytest.mark.parametrize(("row", "expert"), [(4, 0), (-1, 0), (0, 3), (0, -1)])
def test_a_pair_of_something_that_is_not_there_is_refused(level, row, expert):
    stack, x = experts(3, 20, 10, generator(7)), torch.zeros(4, 20)
    with pytest.raises((AssertionError, IndexError)):
        expert_ffn(x, torch.tensor([0, row]), torch.tensor([0, expert]), stack, level=level)


def test_experts_that_do_not_fit_are_refused():
    gate_up, gate_up_scale, down, down_scale = weights(2, 8, 6, generator(8))
    with pytest.raises(AssertionError, match="do not fit"):
        pack_experts(gate_up[:, :10], gate_up_scale[:, :10], down, down_scale)
    with pytest.raises(AssertionError, match="a scale for each"):
        pack_experts(gate_up, gate_up_scale[:, :10], down, down_scale)
    with pytest.raises(AssertionError, match="as many"):
        pack_experts(gate_up, gate_up_scale, down[:1], down_scale[:1])
