"""INT8 arithmetic by its definition, and the search for scales."""

from __future__ import annotations

import torch

from tripool.quant.scales import (
    LIMIT,
    channel_scales,
    per_token,
    product_error,
    relative,
    round_to_nearest,
    searched_scales,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_rounded_weight_is_at_most_half_a_step_away():
    weight = normal(24, 40)
    scale = channel_scales(weight)

    error = (round_to_nearest(weight, scale).weight_OI - weight).abs()

    assert (error <= scale.unsqueeze(-1) * 0.5001).all()


def test_the_largest_weight_of_each_channel_uses_the_whole_range():
    quantised = round_to_nearest(normal(24, 40), channel_scales(normal(24, 40)))

    assert quantised.q_OI.abs().amax(-1).tolist() == [LIMIT] * 24


def test_a_channel_of_zeros_stays_zero_with_a_scale_that_can_be_divided_by():
    weight = normal(3, 8)
    weight[1] = 0

    quantised = round_to_nearest(weight, channel_scales(weight))

    assert quantised.scale_O[1] > 0
    assert not quantised.weight_OI[1].any()


def test_a_token_does_not_disturb_another():
    rows = normal(4, 32)
    large = rows.clone()
    large[0] *= 1000

    assert torch.equal(per_token(large)[1:], per_token(rows)[1:])


def test_products_are_those_of_integers():
    x, weight = normal(5, 48), normal(7, 48, seed=1)
    quantised = round_to_nearest(weight, channel_scales(weight))
    scale_N = x.abs().amax(-1) / LIMIT
    q_NI = (x / scale_N.unsqueeze(-1)).round()

    by_integers = (q_NI.long() @ quantised.q_OI.long().T) * scale_N.unsqueeze(-1) * quantised.scale_O

    # The same integers; what differs is where float32 rounds.
    assert relative(per_token(x) @ quantised.weight_OI.T, by_integers) < 1e-6


def test_searched_scales_lower_the_error_of_weights_with_a_few_large_ones():
    weight = normal(16, 512).clamp(-2, 2)
    weight[:, 0] = 2.4

    plain = round_to_nearest(weight, channel_scales(weight)).weight_OI
    searched = round_to_nearest(weight, searched_scales(weight)).weight_OI

    assert relative(searched, weight) < relative(plain, weight)


def test_searched_scales_are_best_for_the_rows_they_were_searched_with():
    weight, x = normal(16, 256), normal(64, 256, seed=1) * torch.linspace(0.01, 1, 256)
    weight[:, 0] *= 3                       # large weights where inputs are small

    def error(scale):
        return relative(x @ round_to_nearest(weight, scale).weight_OI.T, x @ weight.T)

    assert error(searched_scales(weight, x)) < error(channel_scales(weight))
    assert error(searched_scales(weight, x)) <= error(searched_scales(weight)) * 1.0001


def test_the_error_of_products_counts_rows_and_weights():
    x, weight = normal(32, 64), normal(16, 64, seed=1)
    quantised = round_to_nearest(weight, channel_scales(weight))

    assert 0.001 < product_error(x, weight, quantised) < 0.02
