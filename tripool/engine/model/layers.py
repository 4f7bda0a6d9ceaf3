"""The small parts every layer shares: rotary positions, the gated feed-forward.

YaRN has two factors that are kept apart. `mscale` over `mscale_all_dim` scales cosine and sine, so it reaches only
the rotary part of a query and a key; `mscale_all_dim` alone, squared, scales the logits of the whole head.

T tokens · D model width · F feed-forward width · P rotary pairs
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.core.shape import ModelShape, YarnScaling


def gated(x_TD: Tensor, gate_up_2FD: Tensor, down_DF: Tensor) -> Tensor:
    """`down(silu(gate(x)) * up(x))`, gate and up in one product."""
    gate_TF, up_TF = F.linear(x_TD, gate_up_2FD).chunk(2, dim=-1)
    return F.linear(F.silu(gate_TF) * up_TF, down_DF)


def rotary_table(shape: ModelShape, device: torch.device) -> Tensor:
    """The rotation of each position and pair as a complex number, `[max_position, P]`."""
    angle = torch.arange(shape.max_position, dtype=torch.float32).unsqueeze(-1) * _frequencies(shape)
    length = torch.full_like(angle, rotary_factor(shape.yarn))
    return torch.polar(length, angle).to(device)


def rotary_factor(yarn: YarnScaling | None) -> float:
    """What cosine and sine are scaled by."""
    if yarn is None:
        return 1.0
    return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)


def softmax_scale(shape: ModelShape) -> float:
    """What the logits of attention are scaled by."""
    scale = (shape.qk_nope_head_dim + shape.qk_rope_head_dim) ** -0.5
    if shape.yarn is None:
        return scale
    return scale * _mscale(shape.yarn.factor, shape.yarn.mscale_all_dim) ** 2


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _frequencies(shape: ModelShape) -> Tensor:
    """Radians per position of each pair; slow pairs are stretched by YaRN, fast ones left, with a ramp between."""
    width, yarn = shape.qk_rope_head_dim, shape.yarn
    pair = torch.arange(0, width, 2, dtype=torch.float32)
    turn = shape.rope_theta ** (pair / width)
    if yarn is None:
        return 1.0 / turn

    def pair_that_turns(times: float) -> float:
        """The (fractional) pair that makes so many turns over the original context."""
        return width * math.log(yarn.original_max_position / (times * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / (max(high - low, 0.001))
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (yarn.factor * turn) * (1 - kept) + 1.0 / turn * kept
