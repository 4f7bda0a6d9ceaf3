"""Each technique lowers the error that it is meant to lower; none changes the float model."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.checkpoints import random_tensors, tiny_config
from tripool.core.shape import model_shape
from tripool.engine.ops.rms_norm import rms_norm
from tripool.quant.blocks import absorbed_input, attention, feed_forward
from tripool.quant.calibrate import LayerRows
from tripool.quant.recipe import PLAIN, Recipe
from tripool.quant.scales import per_token, relative

CONFIG = tiny_config("v3", hidden_size=96, intermediate_size=160)
SHAPE = model_shape(CONFIG)
NAMES = tuple(f"model.layers.0.mlp.{kind}_proj.weight" for kind in ("gate", "up", "down"))
ABSORBING = replace(PLAIN, absorption=True)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return normal(num_rows, 16, seed=seed) @ normal(16, width, seed=99) + 0.1 * normal(num_rows, width, seed=seed + 1)


def outlier_ridden() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A feed-forward that reads an outlier, and makes one between up and down."""
    weights = {name: value for name, value in random_tensors(CONFIG).items() if name in NAMES}
    x_ND = correlated(300, 96)
    x_ND[:, 4] *= 128
    for name in NAMES[:2]:
        weights[name][:, 4] /= 128
    weights[NAMES[1]][7] *= 128
    weights[NAMES[2]][:, 7] /= 128
    return weights, x_ND


def output_error(weights, x_ND, recipe: Recipe, *, imagined: bool = False) -> float:
    read = [weights[name] for name in NAMES[:2]]
    factor_D, strength = absorbed_input(x_ND, read, torch.cat(read).abs().amax(0), recipe)
    done = feed_forward(NAMES, weights, x_ND, factor_D, strength, imagined, recipe)
    gate, up, down = (weights[name] for name in NAMES)
    wanted = (torch.nn.functional.silu(x_ND @ gate.T) * (x_ND @ up.T)) @ down.T
    gate, up, down = (done.int8[name].weight_OI for name in NAMES)
    x = per_token(x_ND / factor_D)
    return relative(per_token(torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T, wanted)


def test_absorption_takes_outliers_away():
    assert output_error(*outlier_ridden(), PLAIN) > 4 * output_error(*outlier_ridden(), ABSORBING)


def test_the_search_for_scales_is_no_worse_than_a_fixed_strength():
    searched = replace(ABSORBING, scale_search=True)
    assert output_error(*outlier_ridden(), searched) < output_error(*outlier_ridden(), ABSORBING)


def test_clipping_is_chosen_by_the_blocks_output():
    weights, x_ND = outlier_ridden()
    for name in NAMES:
        weights[name] = weights[name].clamp(-0.2, 0.2)        # no channel needs its whole range for one large weight
    assert output_error(weights, x_ND, replace(ABSORBING, clipping=True)) <= output_error(weights, x_ND, ABSORBING)


def test_compensation_lowers_the_error_further():
    weights, x_ND = outlier_ridden()
    compensating = replace(ABSORBING, compensation=True)
    assert output_error(weights, x_ND, compensating) < 0.97 * output_error(weights, x_ND, ABSORBING)


def test_compensation_needs_rows_that_were_seen():
    weights, x_ND = outlier_ridden()
    compensating = replace(ABSORBING, compensation=True)
    assert output_error(weights, x_ND, compensating, imagined=True) == output_error(weights, x_ND, ABSORBING)


def test_attention_with_absorbed_outliers_is_the_same_float_model():
    prefix = "model.layers.0"
    weights = {name: value for name, value in random_tensors(CONFIG).items()
               if name.startswith((f"{prefix}.self_attn", f"{prefix}.input_layernorm"))}
    hidden = correlated(200, 96)
    norm = f"{prefix}.input_layernorm.weight"
    weights[norm][9] *= 64
    x_ND = rms_norm(hidden, weights[norm], 1e-6)
    rows = LayerRows(x_ND, None, x_ND, None)

    done = attention(SHAPE, prefix, weights, rows, ABSORBING)

    factor = weights[norm] / done.kept[norm]
    assert factor[9] > 4                                     # it has moved
    assert torch.equal(factor.log2(), factor.log2().round())
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        tensor = f"{prefix}.self_attn.{name}.weight"
        assert relative(done.int8[tensor].weight_OI / factor, weights[tensor]) < 0.03
    latent, out = f"{prefix}.self_attn.kv_b_proj.weight", f"{prefix}.self_attn.o_proj.weight"
    rounded = done.int8[latent].weight_OI
    factor = (weights[latent].norm(dim=-1) / rounded.norm(dim=-1)).log2().round().exp2()
    assert relative(rounded * factor.unsqueeze(-1), weights[latent]) < 0.03
    values = factor.view(4, -1)
    assert (values[:, :SHAPE.qk_nope_head_dim] == 1).all()   # keys are as they were
    restored = done.int8[out].weight_OI / values[:, SHAPE.qk_nope_head_dim:].flatten()
    assert relative(restored, weights[out]) < 0.03


def test_attention_that_is_turned_is_the_same_float_model():
    prefix, heads = "model.layers.0.self_attn", SHAPE.num_heads
    weights = {name: value for name, value in random_tensors(CONFIG).items()
               if name.startswith((prefix, "model.layers.0.input_layernorm"))}
    query_in, norm, query, latent, out = [
        f"{prefix}.{name}.weight" for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_b_proj", "o_proj")]
    weights[norm][3] *= 64                                             # outliers in the query's rank and in a value
    weights[query][:, 3] /= 64
    weights[latent].unflatten(0, (heads, -1))[:, SHAPE.qk_nope_head_dim + 5] *= 64
    weights[out].unflatten(-1, (heads, -1))[..., 5] /= 64
    x_ND = correlated(200, 96)

    done = attention(SHAPE, "model.layers.0", weights, LayerRows(x_ND, None, x_ND, None), replace(PLAIN, rotation=True))

    assert {each.tensor for each in done.figures if each.rotated} == {query, out}
    after = done.kept | {name: quantised.weight_OI for name, quantised in done.int8.items()}
    assert (after[norm] == 1).all()
    wanted, ours = (w[query] * w[norm] @ w[query_in] for w in (weights, after))
    assert relative(ours, wanted) < 0.03
    wanted, ours = (w[out] @ w[latent].unflatten(0, (heads, -1))[:, SHAPE.qk_nope_head_dim:].flatten(0, 1)
                    for w in (weights, after))
    assert relative(ours, wanted) < 0.2                            # weights are rounded, and values 64 times larger
    assert all(each.error < 0.5 * each.plain_error for each in done.figures if each.rotated)


def test_every_rounded_tensor_has_its_figure():
    weights, x_ND = outlier_ridden()
    factor_D, strength = absorbed_input(x_ND, [weights[NAMES[0]]], weights[NAMES[0]].abs().amax(0), Recipe())

    done = feed_forward(NAMES, weights, x_ND, factor_D, strength, False, Recipe())

    assert [each.tensor for each in done.figures] == list(NAMES)
    assert all(each.error < each.plain_error for each in done.figures)
    assert all(0 < each.weight_error < 0.1 for each in done.figures)
