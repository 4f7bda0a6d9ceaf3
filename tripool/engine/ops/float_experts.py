"""Experts whose weights are floats, in one call: each pair of row and expert through gate and up, SiLU, product, down.

    h = silu(gate(x)) * up(x)        y = down(h)        all in float32

Pairs are sorted by expert inside, so each expert that is hit is read once for all its rows; blocks of gate and of up
take turns, so that SiLU and product follow at once. The bits keep the rule of `float_linear`: a pair's result depends
on nothing but its row and its expert.

M rows · P pairs · D model width · F feed-forward width · E experts
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.ops.float_linear import FloatWeight, check_rows, pack
from tripool.engine.ops.packed import BLOCK, ExpertStack, check_experts, in_turn


class FloatExperts(ExpertStack[FloatWeight]):
    """A stack of experts whose weights are floats."""


def pack_experts(gate_up_EFD: Tensor, down_EDF: Tensor) -> FloatExperts:
    """Pack experts; `gate_up` holds all of gate, then all of up, as checkpoints and `layers.gated` have it."""
    check_experts(gate_up_EFD, down_EDF)
    return FloatExperts(pack(in_turn(gate_up_EFD)), pack(down_EDF))


def float_experts(x_MD: Tensor, row_P: Tensor, expert_P: Tensor, experts: FloatExperts, *,
                  dtype: torch.dtype = torch.float32, level: int | None = None) -> Tensor:
    """The result of each pair of row and expert, `[P, D]`, unweighted and in the order of the pairs."""
    level = native.chosen_level() if level is None else level
    check_rows(x_MD, experts.down.num_outputs, dtype)
    experts.check_pairs(row_P, expert_P)
    if level < 0:
        return definition(x_MD, row_P, expert_P, experts, dtype)
    x_MD, row_P, expert_P = x_MD.contiguous(), row_P.contiguous(), expert_P.contiguous()
    num_pairs = row_P.shape[0]
    y_PD = torch.empty(num_pairs, experts.down.num_outputs, dtype=dtype)
    wrong = native.module().float_experts(
        level, x_MD.data_ptr(), native.FORMAT_CODES[x_MD.dtype], x_MD.shape[0], row_P.data_ptr(), expert_P.data_ptr(),
        num_pairs, experts.num_experts, *experts.gate_up.arguments, *experts.down.arguments, y_PD.data_ptr(),
        native.FORMAT_CODES[dtype])
    assert wrong < 0, f"pair {wrong} is of row {row_P[wrong]} and expert {expert_P[wrong]}, which are not both there"
    return y_PD


def definition(x_MD: Tensor, row_P: Tensor, expert_P: Tensor, experts: FloatExperts, dtype: torch.dtype) -> Tensor:
    """The same in plain torch, in double precision, one expert after another."""
    y_PD = torch.empty(row_P.shape[0], x_MD.shape[1], dtype=dtype)
    in_turn_EFD, down_EDF = experts.gate_up.unpacked(), experts.down.unpacked()
    num_hidden = experts.down.num_inputs
    assert ((row_P >= 0) & (expert_P >= 0) & (expert_P < experts.num_experts)).all(), "there is no such row or expert"
    for expert in expert_P.unique().tolist():
        pairs = (expert_P == expert).nonzero().flatten()
        both_PF = experts.gate_up.as_multiplied(x_MD[row_P[pairs]]) @ in_turn_EFD[expert].double().T
        gate_PF, up_PF = both_PF.unflatten(1, (-1, 2, BLOCK)).unbind(2)
        h_PF = (F.silu(gate_PF) * up_PF).flatten(1)[:, :num_hidden]
        y_PD[pairs] = (experts.down.as_multiplied(h_PF) @ down_EDF[expert].double().T).to(dtype)
    return y_PD
