"""Rounding errors are made up for where inputs can stand in for one another."""

from __future__ import annotations

import torch

from tripool.quant.compensation import compensated
from tripool.quant.scales import channel_scales, relative, round_to_nearest


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(x: torch.Tensor, weight: torch.Tensor, quantised) -> float:
    return relative(x @ quantised.weight_OI.T, x @ weight.T)


def test_products_of_inputs_that_rise_together_are_closer():
    hidden = normal(512, 24)
    x = hidden @ normal(24, 200, seed=1) + 0.05 * normal(512, 200, seed=2)      # 200 inputs of 24 causes
    weight = normal(32, 200, seed=3)
    scale = channel_scales(weight)

    assert error(x, weight, compensated(weight, scale, x)) < 0.5 * error(x, weight, round_to_nearest(weight, scale))


def test_it_holds_for_rows_it_has_not_seen():
    mix = normal(24, 200, seed=1)
    x, others = (normal(512, 24, seed=seed) @ mix for seed in (2, 3))
    weight = normal(32, 200, seed=4)
    scale = channel_scales(weight)

    assert error(others, weight, compensated(weight, scale, x)) < error(others, weight, round_to_nearest(weight, scale))


def test_inputs_that_have_nothing_to_do_with_each_other_are_rounded_to_nearest():
    x, weight = torch.eye(160) * 3, normal(8, 160)
    scale = channel_scales(weight)

    assert torch.equal(compensated(weight, scale, x).q_OI, round_to_nearest(weight, scale).q_OI)


def test_inputs_that_never_come_change_nothing():
    weight = normal(8, 40)
    scale = channel_scales(weight)

    assert torch.equal(compensated(weight, scale, torch.zeros(16, 40)).q_OI, round_to_nearest(weight, scale).q_OI)


def test_fewer_rows_than_inputs_do_no_harm_elsewhere():
    x, others = normal(8, 128), normal(256, 128, seed=5)
    weight = normal(16, 128, seed=1)
    scale = channel_scales(weight)

    plain = error(others, weight, round_to_nearest(weight, scale))
    assert error(others, weight, compensated(weight, scale, x)) < 1.3 * plain
