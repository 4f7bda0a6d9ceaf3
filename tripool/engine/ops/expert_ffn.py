"""Experts in eight bits, in one call: each pair of a row and an expert through gate and up, SiLU, product and down.

    h = silu(gate(x)) * up(x)        y = down(quantised h)

Pairs are sorted by expert inside, so each expert that is hit is read once for all its rows, gate and up beside one
another (blocks of 16 channels take turns), then down. Rows are floats, or the int8 rows and scales that the exchange
delivers: they are quantised once, before they travel, and not again for each expert.

The integers are exact. Between the two products the definition's SiLU and the kernels' may differ in the last place,
and then now and then in one step of a quantised `h`; kernels of all levels agree to the bit.

M rows · P pairs · D model width · F feed-forward width · E experts
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.ops.int8_linear import Int8Weight, check_rows, exact_product, pack, rescaled
from tripool.engine.ops.packed import BLOCK, ExpertStack, check_experts, in_turn
from tripool.engine.parallel.quantise import quantise


class Int8Experts(ExpertStack[Int8Weight]):
    """A stack of experts in INT8."""


def pack_experts(gate_up_EFD: Tensor, gate_up_scale_EF: Tensor, down_EDF: Tensor, down_scale_ED: Tensor) -> Int8Experts:
    """Pack experts; `gate_up` holds all of gate, then all of up, as checkpoints and `layers.gated` have it."""
    check_experts(gate_up_EFD, down_EDF)
    assert gate_up_scale_EF.shape == gate_up_EFD.shape[:2], "gate and up need a scale for each channel"
    return Int8Experts(pack(in_turn(gate_up_EFD), in_turn(gate_up_scale_EF)), pack(down_EDF, down_scale_ED))


def expert_ffn(x_MD: Tensor, row_P: Tensor, expert_P: Tensor, experts: Int8Experts, *, scale_M: Tensor | None = None,
               dtype: torch.dtype = torch.float32, level: int | None = None) -> Tensor:
    """The result of each pair of row and expert, `[P, D]`, unweighted and in the order of the pairs."""
    level = native.chosen_level() if level is None else level
    check_rows(x_MD, scale_M, experts.down.num_outputs, dtype)
    experts.check_pairs(row_P, expert_P)
    if level < 0:
        return definition(x_MD, row_P, expert_P, experts, scale_M, dtype)
    x_MD, row_P, expert_P = x_MD.contiguous(), row_P.contiguous(), expert_P.contiguous()
    num_rows, num_pairs, x_format = x_MD.shape[0], row_P.shape[0], native.FORMAT_CODES[x_MD.dtype]
    y_PD = torch.empty(num_pairs, experts.down.num_outputs, dtype=dtype)
    wrong = native.module().expert_ffn(
        level, x_MD.data_ptr(), x_format, 0 if scale_M is None else scale_M.data_ptr(), num_rows, row_P.data_ptr(),
        expert_P.data_ptr(), num_pairs, experts.num_experts, *experts.gate_up.arguments, *experts.down.arguments,
        y_PD.data_ptr(), native.FORMAT_CODES[dtype])
    assert wrong < 0, f"pair {wrong} is of row {row_P[wrong]} and expert {expert_P[wrong]}, which are not both there"
    return y_PD


def definition(x_MD: Tensor, row_P: Tensor, expert_P: Tensor, experts: Int8Experts, scale_M: Tensor | None,
               dtype: torch.dtype) -> Tensor:
    """The same in plain torch, one expert after another."""
    q_MD, scale_M = quantise(x_MD) if scale_M is None else (x_MD, scale_M)
    y_PD = torch.empty(row_P.shape[0], x_MD.shape[1], dtype=dtype)
    in_turn_EFD, in_turn_scale_EF = experts.gate_up.unpacked()
    down_EDF, down_scale_ED = experts.down.unpacked()
    num_hidden = experts.down.num_inputs
    assert ((row_P >= 0) & (expert_P >= 0) & (expert_P < experts.num_experts)).all(), "there is no such row or expert"
    for expert in expert_P.unique().tolist():
        pairs = (expert_P == expert).nonzero().flatten()
        rows = row_P[pairs]
        both_PF = rescaled(exact_product(q_MD[rows], in_turn_EFD[expert]), scale_M[rows], in_turn_scale_EF[expert])
        gate_PF, up_PF = both_PF.unflatten(1, (-1, 2, BLOCK)).unbind(2)
        h_PF = (F.silu(gate_PF) * up_PF).flatten(1)[:, :num_hidden]
        q_PF, h_scale_P = quantise(h_PF)
        y_PD[pairs] = rescaled(exact_product(q_PF, down_EDF[expert]), h_scale_P, down_scale_ED[expert]).to(dtype)
    return y_PD
