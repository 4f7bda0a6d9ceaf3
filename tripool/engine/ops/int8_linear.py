"""A linear layer in eight bits: rows quantised on the way, one scale for each row and each output channel.

    y = (q_x · q_w) * scale_x * scale_w        the product exact, in 32 bits

A few rows cost what reading the weights costs, so weights are packed once into the order in which a kernel reads them:
blocks of 16 output channels, in a block groups of four inputs, `[N/16][K/4][16][4]`. A block is one stream from memory,
and 64 bytes of it suit every instruction set (see `csrc/int8.h`).

Integers of a row lie between -127 and 127 (`parallel/quantise` gives no others); a weight may be -128 too. A row with
something in it that is not a finite number has the scale NaN, and so has NaN in all its results.

T rows · K inputs · N output channels · E matrices of a stack
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.ops.packed import BLOCK, PackedWeight, laid_out
from tripool.engine.parallel.quantise import quantise

QUAD = 4
MOST_INPUTS = 1 << 17
"""A sum of so many products of eight-bit numbers fits in 32 bits."""


@dataclass(frozen=True, slots=True)
class Int8Weight(PackedWeight):
    """Data is int8 `[E, N/16, K/4, 16, 4]`."""

    scale: Tensor         # float32 [E, N], N filled up
    sum: Tensor           # int32 [E, N]: of each channel over its inputs, for kernels that shift rows

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.data, self.scale, self.sum

    @property
    def arguments(self) -> tuple[int, int, int, int, int]:
        """As compiled functions take it."""
        return (self.data.data_ptr(), self.scale.data_ptr(), self.sum.data_ptr(), self.num_outputs, self.num_inputs)

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """The matrices `[E, N, K]` and scales `[E, N]` that were packed."""
        rows_ENK = self.data.transpose(2, 3).reshape(self.num_matrices, -1, QUAD * self.data.shape[2])
        return rows_ENK[:, :self.num_outputs, :self.num_inputs], self.scale[:, :self.num_outputs]


def pack(q_ENK: Tensor, scale_EN: Tensor) -> Int8Weight:
    """Put matrices (one of them may come without E) into the order in which they are read."""
    if q_ENK.dim() == 2:
        q_ENK, scale_EN = q_ENK.unsqueeze(0), scale_EN.unsqueeze(0)
    assert q_ENK.dtype == torch.int8 and scale_EN.dtype == torch.float32, "weights are int8, scales float32"
    assert scale_EN.shape == q_ENK.shape[:2], f"{list(q_ENK.shape)} needs other scales than {list(scale_EN.shape)}"
    num_outputs, num_inputs = q_ENK.shape[1:]
    assert 0 < num_inputs <= MOST_INPUTS and num_outputs > 0, f"no weight has {num_outputs} by {num_inputs} elements"
    more = -num_outputs % BLOCK
    filled_ENK = F.pad(q_ENK, (0, -num_inputs % QUAD, 0, more))
    data = laid_out(filled_ENK.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, QUAD)).transpose(2, 3))
    return Int8Weight(data, num_outputs, num_inputs, F.pad(scale_EN, (0, more)).contiguous(),
                      filled_ENK.sum(-1, dtype=torch.int32))


def int8_linear(x_TK: Tensor, weight: Int8Weight, *, scale_T: Tensor | None = None,
                dtype: torch.dtype = torch.float32, level: int | None = None) -> Tensor:
    """Rows times one matrix. Rows are floats, or int8 with the scales that `quantise` gave them."""
    level = native.chosen_level() if level is None else level
    assert weight.num_matrices == 1, "a linear layer has one matrix"
    check_rows(x_TK, scale_T, weight.num_inputs, dtype)
    if level < 0:
        return definition(x_TK, weight, scale_T, dtype)
    x_TK = x_TK.contiguous()
    num_rows = x_TK.shape[0]
    y_TN = torch.empty(num_rows, weight.num_outputs, dtype=dtype)
    native.module().int8_linear(level, x_TK.data_ptr(), native.FORMAT_CODES[x_TK.dtype],
                                0 if scale_T is None else scale_T.data_ptr(), num_rows, *weight.arguments,
                                y_TN.data_ptr(), native.FORMAT_CODES[dtype])
    return y_TN


def definition(x_TK: Tensor, weight: Int8Weight, scale_T: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The same in plain torch."""
    q_TK, scale_T = quantise(x_TK) if scale_T is None else (x_TK, scale_T)
    q_ENK, scale_EN = weight.unpacked()
    return rescaled(exact_product(q_TK, q_ENK[0]), scale_T, scale_EN[0]).to(dtype)


def exact_product(q_TK: Tensor, q_NK: Tensor) -> Tensor:
    """In double precision, which holds these integers (and all sums of them) exactly, as int32."""
    return (q_TK.double() @ q_NK.double().T).to(torch.int32)


def rescaled(sum_TN: Tensor, scale_T: Tensor, scale_N: Tensor) -> Tensor:
    """What sums of products of integers mean."""
    return sum_TN.float() * scale_T.unsqueeze(-1) * scale_N


def check_rows(x_TK: Tensor, scale_T: Tensor | None, num_inputs: int, dtype: torch.dtype) -> None:
    """What kernels trust."""
    assert x_TK.dim() == 2 and x_TK.shape[1] == num_inputs, f"rows of {num_inputs} inputs, not {list(x_TK.shape)}"
    assert x_TK.device.type == "cpu" and x_TK.dtype in native.FORMAT_CODES, f"no kernel for {x_TK.dtype} rows"
    assert dtype in (torch.float32, torch.bfloat16), f"no kernel gives {dtype}"
    assert (scale_T is None) == (x_TK.dtype != torch.int8), "rows that are int8, and only those, come with scales"
    if scale_T is not None:
        assert scale_T.shape == x_TK.shape[:1] and scale_T.dtype == torch.float32 and scale_T.is_contiguous(), \
            "one float32 scale for each row"
