"""A block of a layer from float to INT8: attention, or one gated feed-forward.

Techniques follow one another: outliers are turned away and absorbed, scales found, the block's clip ratio chosen by its
output, errors compensated. Each has to lower an error to be used at all, so that a recipe is never worse than one
without. A block knows its weights and the rows it sees, not where they are stored; nothing else of the model has to be
in memory.

N rows · D model width · F feed-forward width · I inputs · O outputs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.core.shape import ModelShape
from tripool.engine.ops.rms_norm import rms_norm
from tripool.quant.calibrate import LayerRows
from tripool.quant.compensation import compensated
from tripool.quant.outliers import STRENGTH, best_strength, factors
from tripool.quant.policy import becomes_int8
from tripool.quant.recipe import Recipe
from tripool.quant.rotation import Rotation
from tripool.quant.scales import (
    Quantised,
    channel_scales,
    per_token,
    plain_error,
    product_error,
    relative,
    round_to_nearest,
    searched_scales,
)

CLIPS = (1.0, 0.98, 0.95, 0.92, 0.88)
MOST_ROWS = 1024             # of a block: more tell nothing new
SEARCH_ROWS = 512            # of these, at most, that scales are tried on
WORTH = 0.9                  # a rotation has to lower the error to this, as matrices that are kept are rounded for it


@dataclass(frozen=True, slots=True)
class Figure:
    """How one tensor fared: errors as parts of the norm, of its products but for `weight_error`."""

    tensor: str
    weight_error: float
    error: float
    plain_error: float           # of round to nearest, on the same rows, in the same basis of the residual stream
    rotated: bool                # its input, by a rotation of its own block
    strength: float              # of the absorption before it
    clip: float
    compensated: bool
    imagined: bool               # no calibration rows were there


@dataclass(slots=True)
class Converted:
    """Tensors as they are to be stored: floats, or INT8 with scales."""

    kept: dict[str, Tensor] = field(default_factory=dict)
    int8: dict[str, Quantised] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)


@dataclass(slots=True)
class _Linear:
    """One product: the float weights that are to be rounded, what they see, and both as they were before absorption."""

    tensor: str
    weight_OI: Tensor
    x_NI: Tensor
    plain_error: float
    strength: float = 0.0
    rotated: bool = False


def attention(shape: ModelShape, prefix: str, weights: Mapping[str, Tensor], rows: LayerRows,
              recipe: Recipe) -> Converted:
    """Norm and projections of one layer's attention; `prefix` is the layer's."""
    own = dict(weights)
    at, norm = f"{prefix}.self_attn", f"{prefix}.input_layernorm.weight"
    query_in = f"{at}.q_a_proj.weight" if shape.q_lora_rank else f"{at}.q_proj.weight"
    entry, latent, out = (f"{at}.{name}.weight" for name in ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
    x_ND = _few(rows.attention_ND)
    linears: list[_Linear] = []

    def see(name: str, x_NI: Tensor) -> None:
        linears.append(_Linear(name, own[name], x_NI, plain_error(x_NI, own[name])))

    see(query_in, x_ND)
    see(entry, x_ND)
    latent_NL = F.linear(x_ND, own[entry], own.get(entry.replace("weight", "bias")))[:, :shape.kv_lora_rank]
    latent_NL = rms_norm(latent_NL, own[f"{at}.kv_a_layernorm.weight"], shape.rms_norm_eps)
    if shape.q_lora_rank:
        query_NQ = F.linear(x_ND, own[query_in], own.get(query_in.replace("weight", "bias")))
        query_norm, query = f"{at}.q_a_layernorm.weight", f"{at}.q_b_proj.weight"
        see(query, rms_norm(query_NQ, own[query_norm], shape.rms_norm_eps))
    if rows.value_NV is not None:
        value_NV = _few(rows.value_NV)
    else:
        heads_NHx = F.linear(latent_NL, own[latent]).unflatten(-1, (shape.num_heads, -1))
        value_NV = heads_NHx[..., shape.qk_nope_head_dim:].flatten(1)
    see(out, value_NV)
    see(latent, latent_NL)
    linear = {each.tensor: each for each in linears}
    if recipe.rotation and shape.q_lora_rank:
        turn, norm_Q = Rotation.of(shape.q_lora_rank), own[query_norm]
        flat_NQ = rms_norm(query_NQ, torch.ones_like(norm_Q), shape.rms_norm_eps)
        if _turned(linear[query], turn(linear[query].weight_OI * norm_Q), turn(flat_NQ), recipe):
            own[query_norm] = torch.ones_like(norm_Q)
            linear[query_in].weight_OI = turn.rows(linear[query_in].weight_OI)
            if (bias := query_in.replace("weight", "bias")) in own:
                own[bias] = turn(own[bias])
    if recipe.rotation:
        turn, heads = Rotation.of(shape.v_head_dim), (shape.num_heads, -1)
        turned_OV, turned_NV = (turn(each.unflatten(-1, heads)).flatten(-2) for each in (own[out], value_NV))
        if _turned(linear[out], turned_OV, turned_NV, recipe):
            heads_HxL = own[latent].clone().unflatten(0, heads)
            heads_HxL[:, shape.qk_nope_head_dim:] = turn(heads_HxL[:, shape.qk_nope_head_dim:].mT).mT
            linear[latent].weight_OI = own[latent] = heads_HxL.flatten(0, 1)
    if recipe.absorption:
        factor_D = _absorb([linear[query_in], linear[entry]], recipe)
        own[norm] = own[norm] / factor_D
        if shape.q_lora_rank:
            own[query_norm] = own[query_norm] / _absorb([linear[query]], recipe)
        factor_HxV = _absorb([linear[out]], recipe).unflatten(0, (shape.num_heads, -1))
        heads_HxL = own[latent].clone().unflatten(0, (shape.num_heads, -1))
        heads_HxL[:, shape.qk_nope_head_dim:] /= factor_HxV.unsqueeze(-1)
        linear[latent].weight_OI = own[latent] = heads_HxL.flatten(0, 1)
    done = Converted()
    for each in linears:
        if becomes_int8(each.tensor, mixed_precision=recipe.mixed_precision):
            _finish(done, [each], _product_error_of(each), recipe, rows.imagined)
            del own[each.tensor]
    done.kept = own
    return done


def feed_forward(names: tuple[str, str, str], weights: Mapping[str, Tensor], x_ND: Tensor, factor_D: Tensor,
                 strength: float, imagined: bool, recipe: Recipe) -> Converted:
    """One gated feed-forward: gate, up and down. Its input has been divided by `factor_D`, which is made up for here.

    `x_ND` is the input before that.
    """
    gate_FD, up_FD, down_DF = (weights[name] for name in names)
    x_ND = _few(x_ND)
    h_NF = F.silu(x_ND @ gate_FD.T) * (x_ND @ up_FD.T)
    linears = [_Linear(name, weight, x_NI, plain_error(x_NI, weight)) for name, weight, x_NI in
               zip(names, (gate_FD, up_FD, down_DF), (x_ND, x_ND, h_NF), strict=True)]
    gate, up, down = linears
    for each in (gate, up):
        each.weight_OI, each.x_NI, each.strength = each.weight_OI * factor_D, each.x_NI / factor_D, strength
    if recipe.absorption:
        up.weight_OI = up.weight_OI / _absorb([down], recipe).unsqueeze(-1)
    wanted_ND = h_NF @ down_DF.T

    def block_error(quantised: Sequence[Quantised]) -> float:
        gate_q, up_q, down_q = (each.weight_OI for each in quantised)
        x = per_token(gate.x_NI)
        h = F.silu(x @ gate_q.T) * (x @ up_q.T)
        return relative(per_token(h) @ down_q.T, wanted_ND)

    done = Converted()
    _finish(done, linears, block_error, recipe, imagined)
    return done


def absorbed_input(x_ND: Tensor, weights_OI: Sequence[Tensor], most_D: Tensor, recipe: Recipe) -> tuple[Tensor, float]:
    """Factors of an input that many matrices read, tried on some of them; `most_D` is the largest weight of all."""
    if not recipe.absorption:
        return torch.ones_like(most_D), 0.0
    return _best_factors(_few(x_ND), weights_OI, [*weights_OI, most_D.unsqueeze(0)], recipe)


def input_error(x_NI: Tensor, weights_OI: Sequence[Tensor], recipe: Recipe) -> float:
    """Mean error of products with one input, rounded to nearest once its outliers are absorbed as the recipe says."""
    x_NI = x_NI[::max(1, x_NI.shape[0] // SEARCH_ROWS)]
    factor_I = _best_factors(x_NI, weights_OI, weights_OI, recipe)[0] if recipe.absorption else 1.0
    return sum(plain_error(x_NI / factor_I, weight_OI * factor_I) for weight_OI in weights_OI) / len(weights_OI)


def alone(tensor: str, weight_OI: Tensor, recipe: Recipe) -> Converted:
    """A matrix of which no input is known."""
    scale_O = searched_scales(weight_OI) if recipe.scale_search else channel_scales(weight_OI)
    quantised = round_to_nearest(weight_OI, scale_O)
    error = relative(quantised.weight_OI, weight_OI)
    plain = relative(round_to_nearest(weight_OI, channel_scales(weight_OI)).weight_OI, weight_OI)
    return Converted({}, {tensor: quantised}, [Figure(tensor, error, error, plain, False, 0.0, 1.0, False, True)])


def _few(x_NI: Tensor) -> Tensor:
    """At most so many rows, from everywhere."""
    return x_NI[::max(1, -(-x_NI.shape[0] // MOST_ROWS))]


def _turned(linear: _Linear, weight_OI: Tensor, x_NI: Tensor, recipe: Recipe) -> bool:
    """Take a weight and its input in another basis, if that is worth it."""
    if input_error(x_NI, [weight_OI], recipe) > WORTH * input_error(linear.x_NI, [linear.weight_OI], recipe):
        return False
    linear.weight_OI, linear.x_NI, linear.rotated = weight_OI, x_NI, True
    return True


def _absorb(linears: Sequence[_Linear], recipe: Recipe) -> Tensor:
    """Move outliers of an input into the weights that read it; what produces the input is to be divided by these."""
    weights = [each.weight_OI for each in linears]
    factor_I, strength = _best_factors(linears[0].x_NI, weights, weights, recipe)
    for each in linears:
        each.weight_OI, each.x_NI, each.strength = each.weight_OI * factor_I, each.x_NI / factor_I, strength
    return factor_I


def _best_factors(x_NI: Tensor, tried_OI: Sequence[Tensor], all_OI: Sequence[Tensor],
                  recipe: Recipe) -> tuple[Tensor, float]:
    if not recipe.scale_search:
        return factors(x_NI, all_OI, STRENGTH), STRENGTH
    x_NI = x_NI[::max(1, x_NI.shape[0] // SEARCH_ROWS)]
    wanted = [x_NI @ weight_OI.T for weight_OI in tried_OI]

    def error(strength: float) -> float:
        factor_I = factors(x_NI, all_OI, strength)
        x_q, total = per_token(x_NI / factor_I), 0.0
        for weight_OI, wanted_NO in zip(tried_OI, wanted, strict=True):
            scaled_OI = weight_OI * factor_I
            rounded_OI = round_to_nearest(scaled_OI, channel_scales(scaled_OI)).weight_OI
            total += relative(x_q @ rounded_OI.T, wanted_NO) ** 2
        return total

    strength = best_strength(error)
    return factors(x_NI, all_OI, strength), strength


def _product_error_of(linear: _Linear) -> Callable[[Sequence[Quantised]], float]:
    wanted_NO = linear.x_NI @ linear.weight_OI.T

    def error(quantised: Sequence[Quantised]) -> float:
        return relative(per_token(linear.x_NI) @ quantised[0].weight_OI.T, wanted_NO)
    return error


def _finish(done: Converted, linears: Sequence[_Linear], block_error: Callable[[Sequence[Quantised]], float],
            recipe: Recipe, imagined: bool) -> None:
    """Scales, the block's clip ratio by its output, compensation."""
    scales = [searched_scales(each.weight_OI, None if imagined else each.x_NI[:SEARCH_ROWS]) if recipe.scale_search
              else channel_scales(each.weight_OI) for each in linears]

    def rounded(clip: float) -> list[Quantised]:
        return [round_to_nearest(each.weight_OI, scale_O * clip) for each, scale_O in zip(linears, scales, strict=True)]

    clip = min(CLIPS, key=lambda clip: block_error(rounded(clip))) if recipe.clipping else 1.0
    for each, quantised in zip(linears, rounded(clip), strict=True):
        error, made_up = product_error(each.x_NI, each.weight_OI, quantised), False
        if recipe.compensation and not imagined:
            better = compensated(each.weight_OI, quantised.scale_O, each.x_NI)
            better_error = product_error(each.x_NI, each.weight_OI, better)
            if better_error < error:
                quantised, error, made_up = better, better_error, True
        done.int8[each.tensor] = quantised
        done.figures.append(Figure(each.tensor, relative(quantised.weight_OI, each.weight_OI), error, each.plain_error,
                                   each.rotated, each.strength, clip, made_up, imagined))
