"""Products head by head: of queries with the key's expansion, of latents with the value's.

The matrices are packed as those of a linear layer are (`float_linear`), and one rule gives the bits as there: a result
is one chain of fused multiply-adds, whatever the company, the level or the number of threads.

A matrix may also be eight-bit integers with scales, which a kernel widens in a register: rows stay floats. An expansion
has one scale for each key or value channel. Where it makes keys and values these are its outputs, and results are
multiplied by them; where it makes latents of queries the key channels are its inputs, and queries are.

T tokens · H heads · A inputs · B outputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.ops.float_linear import FloatWeight, ScaledWeight
from tripool.engine.ops.native import FLOATS

HeadWeight = FloatWeight | ScaledWeight


def head_product(x_THA: Tensor, weight: HeadWeight, *, out_THB: Tensor | None = None,
                 level: int | None = None) -> Tensor:
    """Each head's rows times its own matrix, in the type of the rows."""
    level = native.chosen_level() if level is None else level
    num_tokens, num_heads, num_inputs = x_THA.shape
    assert (num_heads, num_inputs) == (weight.num_matrices, weight.num_inputs), \
        f"{num_heads} heads of {num_inputs} inputs, but {weight.num_matrices} matrices of {weight.num_inputs}"
    assert x_THA.is_cpu and x_THA.dtype in FLOATS, f"no kernel for {x_THA.dtype} rows"
    assert x_THA.stride(2) == 1 or num_inputs == 1, "numbers of a row lie beside one another"
    if out_THB is None:
        out_THB = x_THA.new_empty(num_tokens, num_heads, weight.num_outputs)
    assert out_THB.shape == (num_tokens, num_heads, weight.num_outputs) and out_THB.dtype == x_THA.dtype and \
        out_THB.stride(2) == 1, "results are of the type of the rows, and lie beside one another"
    if level < 0:
        return out_THB.copy_(definition(x_THA, weight))
    native.module().head_product(level, *_rows(x_THA), num_tokens, num_heads, *_matrices(weight), *_rows(out_THB))
    return out_THB


def definition(x_THA: Tensor, weight: HeadWeight) -> Tensor:
    """The same in plain torch, in double precision."""
    out_dtype = x_THA.dtype
    matrix_HBA = weight.unpacked().double()
    if isinstance(weight, ScaledWeight) and weight.scale.shape[1] == 1:         # of inputs: before rows are rounded
        x_THA = x_THA.float() * weight.scale.transpose(0, 1)
        matrix_HBA = weight.integers()[:, :weight.num_outputs]
    return torch.einsum("tha,hba->thb", weight.as_multiplied(x_THA), matrix_HBA).to(out_dtype)


def _matrices(weight: HeadWeight) -> tuple[int, ...]:
    """As compiled functions take them: data, and scales of inputs and of outputs."""
    inputs, outputs = 0, 0
    if isinstance(weight, ScaledWeight):
        if weight.scale.shape[1] == 1:
            inputs = weight.scale.data_ptr()
        else:
            outputs = weight.scale.data_ptr()
    return (weight.data.data_ptr(), weight.format, weight.num_outputs, weight.num_inputs,
            inputs, outputs)


def _rows(rows_THA: Tensor) -> tuple[int, int, int, int]:
    return rows_THA.data_ptr(), native.FORMAT_CODES[rows_THA.dtype], rows_THA.stride(0), rows_THA.stride(1)
