"""Root-mean-square norm of rows, with a residual added before it or rows quantised after it.

T rows · D width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.parallel.quantise import quantise


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, level: int | None = None) -> Tensor:
    """Rows divided by their root mean square, times the weights."""
    level = native.level_for(x_TD, level)
    if level < 0:
        return definition(x_TD, weight_D, eps)
    y_TD = x_TD.new_empty(x_TD.shape)
    _run(level, x_TD, weight_D, eps, y=y_TD.data_ptr())
    return y_TD


def add_and_norm(x_TD: Tensor, more_TD: Tensor, weight_D: Tensor, eps: float, *,
                 level: int | None = None) -> tuple[Tensor, Tensor]:
    """The sum of both, and its norm."""
    level = native.level_for(x_TD, level)
    if level < 0:
        sum_TD = x_TD + more_TD
        return sum_TD, definition(sum_TD, weight_D, eps)
    assert more_TD.shape == x_TD.shape and more_TD.dtype == x_TD.dtype, "what is added has another form"
    more_TD = more_TD.contiguous()
    sum_TD, y_TD = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape)
    _run(level, x_TD, weight_D, eps, more=more_TD.data_ptr(), total=sum_TD.data_ptr(), y=y_TD.data_ptr())
    return sum_TD, y_TD


def rms_norm_int8(x_TD: Tensor, weight_D: Tensor, eps: float, *, level: int | None = None) -> tuple[Tensor, Tensor]:
    """`quantise(rms_norm(...))`: rows for INT8 products, and their scales."""
    level = native.level_for(x_TD, level)
    if level < 0:
        return quantise(definition(x_TD, weight_D, eps))
    q_TD, scale_T = torch.empty(x_TD.shape, dtype=torch.int8), torch.empty(x_TD.shape[0])
    _run(level, x_TD, weight_D, eps, q=q_TD.data_ptr(), scale=scale_T.data_ptr())
    return q_TD, scale_T


def _run(level: int, x_TD: Tensor, weight_D: Tensor, eps: float, *, more: int = 0, total: int = 0, y: int = 0,
         q: int = 0, scale: int = 0) -> None:
    num_rows, width = x_TD.shape
    assert x_TD.stride(1) == 1 or width == 1, "numbers of a row lie beside one another"
    assert weight_D.shape == (width,) and weight_D.dtype == x_TD.dtype and weight_D.is_contiguous(), "other weights"
    native.module().rms_norm(level, native.FORMAT_CODES[x_TD.dtype], x_TD.data_ptr(), x_TD.stride(0), num_rows, width,
                             more, total, weight_D.data_ptr(), native.float_bits(eps), y, q, scale)


def definition(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The same in plain torch."""
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
