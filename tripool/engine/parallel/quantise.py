"""Rows as eight-bit integers with one scale each: what is sent when dispatch quantises early.

    scale = largest magnitude / 127        q = x * (127 / largest magnitude), rounded to even

A row of zeros (or as good as) has the scale zero. A row with something in it that is not a finite number has the scale
NaN, so that the mistake is not sent on as a plausible value.
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-30                                         # as good as zero


def quantise(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: int8 rows and float32 scales."""
    x_TD = x_TD.float()
    most_T = x_TD.abs().amax(-1) if x_TD.shape[0] else x_TD.new_zeros(0)
    limit = torch.tensor(127.0)                      # a plain number would be multiplied by a reciprocal
    usable_T = most_T.isfinite() & (most_T >= TINY)
    inverse_T = torch.where(usable_T, limit / most_T, 0.0)
    q_TD = torch.where(usable_T.unsqueeze(-1), x_TD * inverse_T.unsqueeze(-1), 0.0).round().to(torch.int8)
    scale_T = torch.where(usable_T, most_T / limit, torch.where(most_T < TINY, 0.0, torch.nan))
    return q_TD, scale_T


def dequantise(q_TD: Tensor, scale_T: Tensor, dtype: torch.dtype) -> Tensor:
    """What the rows say."""
    return (q_TD.float() * scale_T.unsqueeze(-1)).to(dtype)
