"""INT8 arithmetic as it is defined, and the search for scales.

    weights       q_OI = round(w_OI / scale_O)            a scale for each output channel, found once
    activations   q_NI = round(x_NI / scale_N)            a scale for each token, its largest magnitude / 127
    product       y_NO = (q_NI @ q_OI.T) * scale_N * scale_O

A channel's scale need not be its largest magnitude / 127: clipping the few largest weights makes the steps of all
others finer. The search tries ratios and keeps, for each channel, the one of the least error: of the products with
calibration rows where there are some, else of the weights.

O outputs · I inputs · N rows
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tripool.engine.parallel.quantise import dequantise, quantise

LIMIT = 127
LEAST_SCALE = 1e-12          # of a channel of zeros: any number does, but not zero, which some engines divide by
RATIOS = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.87, 0.84, 0.8)


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix as it is stored."""

    q_OI: Tensor                 # int8
    scale_O: Tensor              # float32

    @property
    def weight_OI(self) -> Tensor:
        """The numbers it stands for."""
        return self.q_OI.float() * self.scale_O.unsqueeze(-1)


def channel_scales(weight_OI: Tensor) -> Tensor:
    """Scales at which nothing is clipped."""
    return (weight_OI.abs().amax(-1) / LIMIT).clamp(min=LEAST_SCALE)


def round_to_nearest(weight_OI: Tensor, scale_O: Tensor) -> Quantised:
    """Each weight by itself, clipped where it does not fit."""
    q_OI = (weight_OI / scale_O.unsqueeze(-1)).round().clamp(-LIMIT, LIMIT)
    return Quantised(q_OI.to(torch.int8), scale_O)


def per_token(x_NI: Tensor) -> Tensor:
    """What rows become when they are quantised, one scale for each."""
    return dequantise(*quantise(x_NI), torch.float32)


def searched_scales(weight_OI: Tensor, x_NI: Tensor | None = None) -> Tensor:
    """The scale of each channel whose error is least."""
    most_O = channel_scales(weight_OI)
    best_O, least_O = most_O, torch.full_like(most_O, torch.inf)
    for ratio in RATIOS:
        scale_O = most_O * ratio
        error_OI = round_to_nearest(weight_OI, scale_O).weight_OI - weight_OI
        if x_NI is not None:
            error_OI = error_OI @ x_NI.T
        error_O = error_OI.square().sum(-1)
        best_O = torch.where(error_O < least_O, scale_O, best_O)
        least_O = torch.minimum(error_O, least_O)
    return best_O


def product_error(x_NI: Tensor, weight_OI: Tensor, quantised: Quantised) -> float:
    """Of INT8 products against those of the floats: a part of the latter's norm."""
    return relative(per_token(x_NI) @ quantised.weight_OI.T, x_NI @ weight_OI.T)


def plain_error(x_NI: Tensor, weight_OI: Tensor) -> float:
    """The same, with weights rounded to nearest."""
    return product_error(x_NI, weight_OI, round_to_nearest(weight_OI, channel_scales(weight_OI)))


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The norm of the difference, a part of the norm."""
    norm = float(theirs.norm())
    return float((ours - theirs).norm()) / norm if norm else 0.0
