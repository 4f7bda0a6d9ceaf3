"""The sum over a token's picks, in float32, and what else is added to its row.

T tokens · K picks · D model width
"""

from __future__ import annotations

import torch
from torch import Tensor

from tripool.engine.ops import native


def weighted_sum(y_TKD: Tensor, weight_TK: Tensor, *added_TD: Tensor, level: int | None = None) -> Tensor:
    """The sum of weight times row, and of what is added (two at most: a shared expert and the residual stream).

    Compiled levels round once, in the end.
    """
    level = native.level_for(y_TKD, level)
    if level < 0:
        return definition(y_TKD, weight_TK, *added_TD)
    num_tokens, num_picks, width = y_TKD.shape
    assert weight_TK.shape == (num_tokens, num_picks) and weight_TK.dtype == torch.float32, "a weight for each pick"
    assert len(added_TD) <= 2, "no more than two are added"
    if num_tokens and (y_TKD.stride(2) != 1 or y_TKD.stride(1) != width):
        y_TKD = y_TKD.contiguous()
    weight_TK = weight_TK.contiguous()
    added = [0, 0, 0, 0]
    for number, each_TD in enumerate(added_TD):
        assert each_TD.shape == (num_tokens, width) and each_TD.dtype == y_TKD.dtype, "what is added has another form"
        assert each_TD.stride(1) == 1 or width == 1, "numbers of a row lie beside one another"
        added[2 * number:2 * number + 2] = each_TD.data_ptr(), each_TD.stride(0)
    out_TD = y_TKD.new_empty(num_tokens, width)
    native.module().weighted_sum(
        level, native.FORMAT_CODES[y_TKD.dtype], y_TKD.data_ptr(), y_TKD.stride(0), num_tokens, num_picks, width,
        weight_TK.data_ptr(), *added, out_TD.data_ptr())
    return out_TD


def definition(y_TKD: Tensor, weight_TK: Tensor, *added_TD: Tensor) -> Tensor:
    """The same in plain torch."""
    out_TD = torch.bmm(weight_TK.unsqueeze(1), y_TKD.float()).squeeze(1).to(y_TKD.dtype)
    for each_TD in added_TD:
        out_TD = out_TD + each_TD
    return out_TD
