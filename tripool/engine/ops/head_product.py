"""Products head by head: of queries with the key's expansion, of latents with the value's.

T tokens · H heads · A inputs · B outputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from tripool.engine.ops import native


def head_product(x_THA: Tensor, weight_HAB: Tensor, *, level: int | None = None) -> Tensor:
    """Each head's rows times its own matrix. A row's bits do not depend on the other rows.

    A matrix is contiguous (compiled levels need it so).
    """
    level = native.level_for(x_THA, level)
    num_tokens, num_heads, num_inputs = x_THA.shape
    num_outputs = weight_HAB.shape[2]
    if level < 0:
        return definition(x_THA, weight_HAB)
    assert weight_HAB.shape[:2] == (num_heads, num_inputs) and weight_HAB.dtype == x_THA.dtype, "other weights"
    assert weight_HAB.stride()[1:] == (num_outputs, 1), "a matrix lies input by input"
    assert x_THA.stride(2) == 1 or num_inputs == 1, "numbers of a row lie beside one another"
    y_THB = x_THA.new_empty(num_tokens, num_heads, num_outputs)
    native.module().head_product(
        level, native.FORMAT_CODES[x_THA.dtype], x_THA.data_ptr(), x_THA.stride(0), x_THA.stride(1), num_tokens,
        num_heads, num_inputs, num_outputs, weight_HAB.data_ptr(), weight_HAB.stride(0), y_THB.data_ptr(),
        y_THB.stride(0), y_THB.stride(1))
    return y_THB


def definition(x_THA: Tensor, weight_HAB: Tensor) -> Tensor:
    """The same in plain torch."""
    return torch.bmm(x_THA.transpose(0, 1), weight_HAB).transpose(0, 1)
