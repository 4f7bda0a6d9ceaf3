"""Root-mean-square norm of rows, with a residual added before it and rows quantised after it.

T rows · D width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.parallel.quantise import quantise


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, more_TD: Tensor | None = None,
             level: int | None = None) -> Tensor:
    """Rows divided by their root mean square, times the weights. `more_TD` is added to `x_TD` first, in place."""
    level = native.level_for(x_TD, level)
    if level < 0:
        return definition(x_TD, weight_D, eps, more_TD)
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
    _run(level, x_TD, weight_D, eps, more_TD, y_TD.data_ptr(), 0, 0)
    return y_TD


def rms_norm_int8(x_TD: Tensor, weight_D: Tensor, eps: float, *, more_TD: Tensor | None = None,
                  y_TD: Tensor | None = None, level: int | None = None) -> tuple[Tensor, Tensor]:
    """`quantise(rms_norm(...))`: rows for INT8 products, and their scales. `y_TD` takes the rows before quantising."""
    if y_TD is not None:
        assert y_TD.shape == x_TD.shape and y_TD.dtype == x_TD.dtype and y_TD.is_contiguous(), "wrong place"
    level = native.level_for(x_TD, level)
    if level < 0:
        normed_TD = definition(x_TD, weight_D, eps, more_TD)
        if y_TD is not None:
            y_TD.copy_(normed_TD)
        return quantise(normed_TD)
    q_TD, scale_T = torch.empty(x_TD.shape, dtype=torch.int8), torch.empty(x_TD.shape[0])
    _run(level, x_TD, weight_D, eps, more_TD, 0 if y_TD is None else y_TD.data_ptr(), q_TD.data_ptr(),
         scale_T.data_ptr())
    return q_TD, scale_T


def _run(level: int, x_TD: Tensor, weight_D: Tensor, eps: float, more_TD: Tensor | None, y: int, q: int,
         scale: int) -> None:
    num_rows, width = x_TD.shape
    assert x_TD.stride(1) == 1 or width == 1, "numbers of a row lie beside one another"
    assert weight_D.shape == (width,) and weight_D.dtype == x_TD.dtype and weight_D.is_contiguous(), "other weights"
    more = 0
    if more_TD is not None:
        assert more_TD.shape == x_TD.shape and more_TD.dtype == x_TD.dtype, "what is added has another form"
        more_TD = more_TD.contiguous()
        more = more_TD.data_ptr()
    native.module().rms_norm(level, native.FORMAT_CODES[x_TD.dtype], x_TD.data_ptr(), x_TD.stride(0), num_rows, width,
                             more, weight_D.data_ptr(), native.float_bits(eps), y, q, scale)


def definition(x_TD: Tensor, weight_D: Tensor, eps: float, more_TD: Tensor | None = None) -> Tensor:
    """The same in plain torch."""
    if more_TD is not None:
        x_TD += more_TD
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
