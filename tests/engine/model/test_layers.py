"""Rotary positions and YaRN's two factors."""

import math

import pytest
import torch

from tests.checkpoints import YARN, tiny_config
from tripool.core.shape import YarnScaling, model_shape
from tripool.engine.model.layers import gated, rotary_factor, rotary_table, softmax_scale
from tripool.engine.ops.rotary import rotate


def yarn(mscale, mscale_all_dim):
    return YarnScaling(factor=40.0, original_max_position=4096, mscale=mscale, mscale_all_dim=mscale_all_dim)


def shape_with(scaling, **changes):
    return model_shape(tiny_config("v3", rope_scaling=scaling, **changes))


def test_equal_factors_leave_cosine_and_sine_alone():
    assert rotary_factor(None) == rotary_factor(yarn(1.0, 1.0)) == rotary_factor(yarn(0.707, 0.707)) == 1.0


def test_without_the_second_factor_cosine_and_sine_carry_the_first():
    assert rotary_factor(yarn(1.0, 0.0)) == pytest.approx(0.1 * math.log(40) + 1)
    assert rotary_factor(yarn(0.5, 0.0)) == pytest.approx(0.05 * math.log(40) + 1)


def test_the_second_factor_alone_scales_the_logits():
    plain = (16 + 16) ** -0.5
    scaled = {all_dim: softmax_scale(shape_with(YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": all_dim}))
              for all_dim in (0, 0.707, 1.0)}
    assert scaled[0] == pytest.approx(plain)
    assert scaled[1.0] == pytest.approx(plain * (0.1 * math.log(40) + 1) ** 2)
    assert scaled[0.707] == pytest.approx(plain * (0.0707 * math.log(40) + 1) ** 2)


def test_the_first_factor_does_not_reach_the_logits():
    scales = {softmax_scale(shape_with(YARN | {"mscale": mscale, "mscale_all_dim": 1.0})) for mscale in (0.5, 1.0, 2.0)}
    assert len(scales) == 1


def test_changing_both_factors_together_changes_the_softmax_scale_alone():
    tables = [rotary_table(shape_with(YARN | {"mscale": each, "mscale_all_dim": each}), torch.device("cpu"))
              for each in (0.707, 1.0)]
    assert torch.equal(*tables)


def test_fast_pairs_keep_their_frequency_and_slow_ones_are_stretched():
    table = rotary_table(shape_with(YARN | {"factor": 4.0}), torch.device("cpu"))
    plain = rotary_table(shape_with(None), torch.device("cpu"))
    assert torch.allclose(table[1, 0], plain[1, 0])
    assert table[1].angle()[-1] == pytest.approx(plain[1].angle()[-1].item() / 4, rel=1e-3)


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_turns_each_pair_by_its_angle(interleaved, heads):
    width, num_tokens = 8, 5
    angle = torch.rand(num_tokens, width // 2)
    x = torch.randn(num_tokens, width) if heads is None else torch.randn(num_tokens, heads, width)
    turned = rotate(x, torch.polar(torch.ones_like(angle), angle), interleaved)
    for token in range(num_tokens):
        for pair in range(width // 2):
            at = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + width // 2)
            a, b = x[token, ..., at[0]], x[token, ..., at[1]]
            cos, sin = angle[token, pair].cos(), angle[token, pair].sin()
            assert torch.allclose(turned[token, ..., at[0]], a * cos - b * sin, atol=1e-6)
            assert torch.allclose(turned[token, ..., at[1]], b * cos + a * sin, atol=1e-6)


def test_the_gated_feed_forward_is_its_definition():
    gate, up, down, x = torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 6), torch.randn(3, 4)
    wanted = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    assert torch.allclose(gated(x, torch.cat([gate, up]), down), wanted, atol=1e-5)
