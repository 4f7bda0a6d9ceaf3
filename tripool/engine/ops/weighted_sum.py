"""The sum over a token's picks, in float32, and what else is added to its row.

T tokens · K picks · D model width
"""

from __future__ import annotations

import torch
from torch import Tensor

from tripool.engine.ops import native


def weighted_sum(y_TKD: Tensor, weight_TK: Tensor, *, more_TD: Tensor | None = None,
                 residual_TD: Tensor | None = None, level: int | None = None) -> Tensor:
    """`residual + (sum of weight * y + more)`; compiled levels round once, in the end."""
    level = native.level_for(y_TKD, level)
    if level < 0:
        return definition(y_TKD, weight_TK, more_TD, residual_TD)
    num_tokens, num_picks, width = y_TKD.shape
    assert weight_TK.shape == (num_tokens, num_picks) and weight_TK.dtype == torch.float32, "a weight for each pick"
    if num_tokens and (y_TKD.stride(2) != 1 or y_TKD.stride(1) != width):
        y_TKD = y_TKD.contiguous()
    weight_TK = weight_TK.contiguous()
    more_stride, more, residual = 0, 0, 0
    if more_TD is not None:
        assert more_TD.shape == (num_tokens, width) and more_TD.dtype == y_TKD.dtype, "what is added has another form"
        assert more_TD.stride(1) == 1 or width == 1, "numbers of a row lie beside one another"
        more_stride, more = more_TD.stride(0), more_TD.data_ptr()
    if residual_TD is not None:
        assert residual_TD.shape == (num_tokens, width) and residual_TD.dtype == y_TKD.dtype, "another residual"
        residual_TD = residual_TD.contiguous()
        residual = residual_TD.data_ptr()
    out_TD = torch.empty(num_tokens, width, dtype=y_TKD.dtype)
    native.module().weighted_sum(
        level, native.FORMAT_CODES[y_TKD.dtype], y_TKD.data_ptr(), y_TKD.stride(0), num_tokens, num_picks, width,
        weight_TK.data_ptr(), more, more_stride, residual, out_TD.data_ptr())
    return out_TD


def definition(y_TKD: Tensor, weight_TK: Tensor, more_TD: Tensor | None = None,
               residual_TD: Tensor | None = None) -> Tensor:
    """The same in plain torch."""
    out_TD = torch.bmm(weight_TK.unsqueeze(1), y_TKD.float()).squeeze(1).to(y_TKD.dtype)
    if more_TD is not None:
        out_TD = out_TD + more_TD
    return out_TD if residual_TD is None else residual_TD + out_TD
