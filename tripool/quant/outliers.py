"""Outliers of activations are moved into weights before anything is rounded: scale absorption.

A channel a hundred times larger than the others takes the steps of its whole row with it. Dividing it by a factor and
multiplying the weights that read it changes nothing in the float model, and where a norm, or the rows of a matrix
before, produces the channel, dividing costs nothing when the model runs (the paper's 4.5; SmoothQuant). Four places
produce channels so: the two norms before attention and feed-forward, the norm of the low-rank query, value rows of the
latent expansion, and the up projection of each gated feed-forward.

Factors are powers of two, so that norms, router and everything else that stays in BF16 keeps every bit: the model that
is rounded is exactly the model that was given.

N rows · I channels
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

STRENGTH = 0.5                                # without a search: half of the spread moves
STRENGTHS = (0.0, 0.3, 0.5, 0.65, 0.8)
LARGEST_EXPONENT = 10


def factors(x_NI: Tensor, weights_OI: Sequence[Tensor], strength: float) -> Tensor:
    """What each channel is divided by, and the weights that read it multiplied; powers of two around one."""
    x_most_I = x_NI.abs().amax(0)
    weight_most_I = torch.stack([weight_OI.abs().amax(0) for weight_OI in weights_OI]).amax(0)
    if strength == 0:
        return torch.ones_like(x_most_I)
    usable_I = (x_most_I > 0) & (weight_most_I > 0)
    exponent_I = strength * x_most_I.clamp(min=1e-30).log2() - (1 - strength) * weight_most_I.clamp(min=1e-30).log2()
    if usable_I.any():
        exponent_I = exponent_I - exponent_I[usable_I].median()
    exponent_I = torch.where(usable_I, exponent_I.round().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT), 0.0)
    return torch.exp2(exponent_I)


def best_strength(error: Callable[[float], float], strengths: Sequence[float] = STRENGTHS) -> float:
    """The strength of the least error, the weakest of equals (the paper's search: || Q(W s) (X / s) - W X ||)."""
    return min(strengths, key=lambda strength: (error(strength), strength))
