"""A linear layer whose weights are floats (bfloat16 or float32), for those who do not quantise.

    y = x · w + bias        all in float32

Weights are packed once into the order in which a kernel reads them: blocks of 16 output channels, `[N/16][K][16]`, each
one stream from memory (see `csrc/float.h`). A bfloat16 weight costs half the reading and is widened in a register.

One rule gives the bits: an element of y is one chain of fused multiply-adds over the inputs in their order, in float32,
from zero; the bias is added last. So a row's results depend on nothing but the row: no tiles are needed to have the
same bits in any company, and levels and numbers of threads agree. (The definition keeps this rule only up to its
rounding: it sums in double precision, in an order that torch chooses.)

A weight may ask that rows be rounded to bfloat16 before they are multiplied: where a processor has instructions that
multiply such numbers two at a time, or a tile of 16 rows by 32 of them, many rows then take half the time or less. The
chain is one over pairs of inputs there, or over 32 of them.

T rows · K inputs · N output channels · E matrices of a stack
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.ops.native import FLOATS
from tripool.engine.ops.packed import BLOCK, PackedWeight, in_blocks, laid_out


@dataclass(frozen=True, slots=True)
class WidenedWeight(PackedWeight):
    """Matrices whose numbers become floats as they are read."""

    rounds: bool = field(default=False, kw_only=True)         # rows to bfloat16

    @property
    def format(self) -> int:
        """As compiled functions call it."""
        return native.FORMAT_CODES[self.data.dtype] | native.ROUNDED * self.rounds

    def as_multiplied(self, x: Tensor) -> Tensor:
        """Rows as they are multiplied, in double precision."""
        return (x.bfloat16() if self.rounds else x).double()


@dataclass(frozen=True, slots=True)
class FloatWeight(WidenedWeight):
    """Data is `[E, N/16, K, 16]`; in bfloat16 channel c of a block lies beside channel c + 8."""

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """As compiled functions take it."""
        return self.data.data_ptr(), self.format, self.num_outputs, self.num_inputs

    def unpacked(self) -> Tensor:
        """The matrices `[E, N, K]` that were packed."""
        data = self.data
        if data.dtype == torch.bfloat16:
            data = data.unflatten(3, (BLOCK // 2, 2)).transpose(3, 4).flatten(3)
        return data.transpose(2, 3).flatten(1, 2)[:, :self.num_outputs]


@dataclass(frozen=True, slots=True)
class ScaledWeight(WidenedWeight):
    """Data is int8 `[E, N/16, K, 16]`: weights that a kernel widens in a register, so that rows stay floats."""

    scale: Tensor         # float32, of outputs [E, N, 1] (N filled up) or of inputs [E, 1, K]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.data, self.scale

    def unpacked(self) -> Tensor:
        """The matrices `[E, N, K]` that were packed, in double precision."""
        return (self.integers() * self.scale.double())[:, :self.num_outputs]

    def integers(self) -> Tensor:
        """The same without scales and with outputs that fill up blocks."""
        return self.data.transpose(2, 3).flatten(1, 2).double()


def pack(weight_ENK: Tensor) -> FloatWeight:
    """Put matrices (one of them may come without E) into the order in which they are read."""
    if weight_ENK.dim() == 2:
        weight_ENK = weight_ENK.unsqueeze(0)
    assert weight_ENK.dtype in FLOATS, f"weights are float32 or bfloat16, not {weight_ENK.dtype}"
    data = in_blocks(weight_ENK)
    if weight_ENK.dtype == torch.bfloat16:
        data = data.unflatten(3, (2, BLOCK // 2)).transpose(3, 4).flatten(3)
    return FloatWeight(laid_out(data), *weight_ENK.shape[1:])


def pack_scaled(q_ENK: Tensor, scale: Tensor) -> ScaledWeight:
    """Put matrices into their order; scales are of outputs `[E, N, 1]` or of inputs `[E, 1, K]`."""
    num_matrices, num_outputs, num_inputs = q_ENK.shape
    assert q_ENK.dtype == torch.int8 and scale.dtype == torch.float32, "weights are int8, scales float32"
    of_outputs = scale.shape == (num_matrices, num_outputs, 1)
    assert of_outputs or scale.shape == (num_matrices, 1, num_inputs), \
        f"{list(q_ENK.shape)} needs other scales than {list(scale.shape)}"
    if of_outputs:
        scale = F.pad(scale, (0, 0, 0, -num_outputs % BLOCK))
    return ScaledWeight(laid_out(in_blocks(q_ENK)), num_outputs, num_inputs, scale.contiguous())


def float_linear(x_TK: Tensor, weight: FloatWeight | ScaledWeight, *, bias_N: Tensor | None = None,
                 dtype: torch.dtype = torch.float32, level: int | None = None) -> Tensor:
    """Rows times one matrix. Rows are float32 or bfloat16; scales of the weights, if it has any, are of outputs."""
    level = native.chosen_level() if level is None else level
    assert weight.num_matrices == 1, "a linear layer has one matrix"
    scale = weight.scale if isinstance(weight, ScaledWeight) else None
    assert scale is None or scale.shape[2] == 1, "scales are of outputs"
    check_rows(x_TK, weight.num_inputs, dtype)
    assert bias_N is None or (bias_N.dtype == torch.float32 and bias_N.shape == (weight.num_outputs,)), \
        "the bias is float32, one number for each output"
    if level < 0:
        return definition(x_TK, weight, bias_N, dtype)
    x_TK = x_TK.contiguous()
    bias_N = None if bias_N is None else bias_N.contiguous()
    num_rows = x_TK.shape[0]
    y_TN = torch.empty(num_rows, weight.num_outputs, dtype=dtype)
    native.module().float_linear(
        level, x_TK.data_ptr(), native.FORMAT_CODES[x_TK.dtype], num_rows, weight.data.data_ptr(),
        weight.format, weight.num_outputs, weight.num_inputs,
        0 if scale is None else scale.data_ptr(), 0 if bias_N is None else bias_N.data_ptr(), y_TN.data_ptr(),
        native.FORMAT_CODES[dtype])
    return y_TN


def definition(x_TK: Tensor, weight: FloatWeight | ScaledWeight, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The same in plain torch, in double precision."""
    y_TN = weight.as_multiplied(x_TK) @ weight.unpacked()[0].double().T
    return (y_TN if bias_N is None else y_TN + bias_N.double()).to(dtype)


def check_rows(x_TK: Tensor, num_inputs: int, dtype: torch.dtype) -> None:
    """What kernels trust."""
    assert x_TK.dim() == 2 and x_TK.shape[1] == num_inputs, f"rows of {num_inputs} inputs, not {list(x_TK.shape)}"
    assert x_TK.device.type == "cpu" and x_TK.dtype in FLOATS, f"no kernel for {x_TK.dtype} rows"
    assert dtype in FLOATS, f"no kernel gives {dtype}"
