"""Outliers are absorbed by weights, and the float model stays the same."""

from __future__ import annotations

import torch

from tripool.quant.outliers import LARGEST_EXPONENT, best_strength, factors
from tripool.quant.scales import channel_scales, product_error, round_to_nearest


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_outliers() -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = normal(64, 96), normal(32, 96, seed=1)
    x[:, 5] *= 256
    weight[:, 5] /= 256
    return x, weight


def test_factors_are_powers_of_two_within_bounds():
    x, weight = with_outliers()
    x[:, 7] *= 1e30

    exponents = factors(x, [weight], 0.5).log2()

    assert torch.equal(exponents, exponents.round())
    assert exponents.abs().max() <= LARGEST_EXPONENT


def test_the_float_product_is_the_same():
    x, weight = with_outliers()
    factor = factors(x, [weight], 0.5)

    assert torch.equal((x / factor) * factor, x)
    assert torch.allclose((x / factor) @ (weight * factor).T, x @ weight.T, rtol=1e-5, atol=1e-4)


def test_absorption_takes_an_outlier_channels_error_away():
    x, weight = with_outliers()
    factor = factors(x, [weight], 0.5)
    absorbed_x, absorbed = x / factor, weight * factor

    before = product_error(x, weight, round_to_nearest(weight, channel_scales(weight)))
    after = product_error(absorbed_x, absorbed, round_to_nearest(absorbed, channel_scales(absorbed)))

    assert before > 0.05
    assert after < 0.015


def test_a_channel_that_is_never_used_is_left_alone():
    x, weight = normal(16, 8), normal(4, 8)
    x[:, 3] = 0
    weight[:, 4] = 0

    factor = factors(x, [weight], 0.5)

    assert factor[3] == 1 and factor[4] == 1
    assert factor.isfinite().all()


def test_no_strength_moves_nothing():
    x, weight = with_outliers()
    assert torch.equal(factors(x, [weight], 0.0), torch.ones(96))


def test_the_weakest_of_equal_strengths_is_taken():
    assert best_strength(lambda strength: 1.0) == 0.0
    assert best_strength(lambda strength: abs(strength - 0.6)) == 0.65
