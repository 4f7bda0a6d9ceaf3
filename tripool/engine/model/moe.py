"""The mixture of experts: who is chosen, what they compute, how it is summed.

Routing is float32 from the stored gate to the choice, at any precision of the model: scores a thousandth apart
decide who is chosen.

T tokens · D model width · E experts · K picks · F feed-forward width · N arrived rows
P pairs of row and pick
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.core.shape import ModelShape
from tripool.engine.model.layers import gated
from tripool.engine.model.products import Matrix, PackedExperts, PackedGated, Weights, packed
from tripool.engine.model.turns import Turns, to_the_end
from tripool.engine.ops.layer import ExpertLayer
from tripool.engine.ops.router import route
from tripool.engine.ops.weighted_sum import weighted_sum
from tripool.engine.parallel.exchange import ArrivedRows, Exchange, LocalExchange
from tripool.engine.parallel.placement import SlotTable

EVERY_EXPERT_ROWS = 8
"""Up to so many rows, running all (small) experts on all rows costs less than sorting rows by expert."""

SMALL_STACK_ELEMENTS = 1 << 22
"""A stack of experts up to this size (16 MB of float32) may be read as a whole; of a larger one only those hit."""


ONE_CALL_ROWS = 256
"""Of more rows the time between operations does not count, and their results would be kept twice."""


class Router:
    """Chooses experts and their weights."""

    def __init__(self, shape: ModelShape, gate: Matrix, bias_E: Tensor | None) -> None:
        """`gate`: of float32 weights, for float32 rows."""
        assert bias_E is None or bias_E.dtype == torch.float32, "the correction bias is stored and used in float32"
        self.shape = shape
        self.gate = gate
        self.bias_E = bias_E

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token, best first, and the float32 weights of their results."""
        return self.choose(self.gate(x_TD.float()))

    def choose(self, logit_TE: Tensor) -> tuple[Tensor, Tensor]:
        return route(logit_TE, self.bias_E, self.shape)


class Experts:
    """This rank's routed experts.

    Four forms of one computation. While experts are small, what counts is the number of operations: a copy of the
    few experts that are hit (a row or two), all experts on all rows (some rows), rows grouped by expert in one padded
    batch (more rows). Otherwise, and whenever work is done in tiles, one expert after another.
    """

    held_in: Literal["model"] = "model"          # element type of weights, as `layout` calls it

    def __init__(self, gate_up_EFD: Tensor, down_EDF: Tensor, num_picks: int, run: Any, tiled: bool) -> None:
        self.gate_up_EDF = gate_up_EFD.transpose(1, 2)        # gate and up beside one another
        self.down_EFD = down_EDF.transpose(1, 2)
        self.run = run
        self.small = not tiled and gate_up_EFD.numel() + down_EDF.numel() <= SMALL_STACK_ELEMENTS
        self.num_experts = gate_up_EFD.shape[0]
        self.grouped_rows = 64 * max(1, self.num_experts // num_picks)

    def __call__(self, arrived: ArrivedRows) -> Tensor:
        """Each row through each of its experts, `[N, K, D]`."""
        x_ND, expert_NK = arrived.x_ND, arrived.expert_NK
        num_rows = x_ND.shape[0]
        if not self.small or num_rows > self.grouped_rows:
            return self.one_by_one(x_ND, expert_NK)
        if 2 * expert_NK.numel() <= self.num_experts:
            return self.copied(x_ND, expert_NK)
        if num_rows <= EVERY_EXPERT_ROWS:
            return self.every_expert(x_ND, expert_NK)
        return self.grouped(x_ND, expert_NK)

    def slot(self, number: int) -> tuple[Tensor, Tensor]:
        """Views of one expert's gate and up `[2F, D]`, and down `[D, F]`; who writes there changes the expert."""
        return self.gate_up_EDF[number].t(), self.down_EFD[number].t()

    def as_slot(self, expert: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What to write to a slot, of an expert as `layout.expert_plan` names its tensors."""
        return expert["gate_up"], expert["down"]

    def copied(self, x_ND: Tensor, expert_NK: Tensor) -> Tensor:
        expert_P = expert_NK.flatten()
        x_P1D = x_ND.unsqueeze(1).expand(-1, expert_NK.shape[1], -1).reshape(-1, 1, x_ND.shape[1])
        y_P1D = _batched(x_P1D, self.gate_up_EDF.index_select(0, expert_P), self.down_EFD.index_select(0, expert_P))
        return y_P1D.view(*expert_NK.shape, x_ND.shape[1])

    def every_expert(self, x_ND: Tensor, expert_NK: Tensor) -> Tensor:
        num_rows = x_ND.shape[0]
        y_END = _batched(x_ND.unsqueeze(0).expand(self.num_experts, -1, -1), self.gate_up_EDF, self.down_EFD)
        row_N1 = torch.arange(num_rows, device=x_ND.device).unsqueeze(-1)
        return y_END.flatten(0, 1)[expert_NK * num_rows + row_N1]

    def grouped(self, x_ND: Tensor, expert_NK: Tensor) -> Tensor:
        num_picks = expert_NK.shape[1]
        expert_P, order_P = torch.sort(expert_NK.flatten(), stable=True)
        count_E = torch.bincount(expert_P, minlength=self.num_experts)
        most = int(count_E.max())
        first_E = count_E.cumsum(0) - count_E
        place_P = torch.arange(expert_P.shape[0], device=x_ND.device) + (expert_P * most - first_E[expert_P])
        x_END = x_ND.new_zeros(self.num_experts * most, x_ND.shape[1])
        x_END.index_copy_(0, place_P, x_ND.index_select(0, order_P // num_picks))
        y_END = _batched(x_END.unflatten(0, (self.num_experts, most)), self.gate_up_EDF, self.down_EFD)
        place_of_pair_P = torch.empty_like(place_P).index_copy_(0, order_P, place_P)
        return y_END.flatten(0, 1).index_select(0, place_of_pair_P).unflatten(0, expert_NK.shape)

    def one_by_one(self, x_ND: Tensor, expert_NK: Tensor) -> Tensor:
        expert_P, order_P = torch.sort(expert_NK.flatten(), stable=True)
        x_PD = x_ND.index_select(0, order_P // expert_NK.shape[1])
        y_PD = torch.empty_like(x_PD)
        start = 0
        for expert, count in enumerate(torch.bincount(expert_P, minlength=self.num_experts).tolist()):
            if count:
                rows = slice(start, start + count)
                compute = partial(gated, gate_up_2FD=self.gate_up_EDF[expert].t(), down_DF=self.down_EFD[expert].t())
                y_PD[rows] = self.run(compute, x_PD[rows])
                start += count
        return torch.empty_like(y_PD).index_copy_(0, order_P, y_PD).unflatten(0, expert_NK.shape)


def _batched(x_END: Tensor, gate_up_EDF: Tensor, down_EFD: Tensor) -> Tensor:
    gate_ENF, up_ENF = torch.bmm(x_END, gate_up_EDF).chunk(2, dim=-1)
    return torch.bmm(F.silu(gate_ENF) * up_ENF, down_EFD)


class MixtureOfExperts:
    """Routed and shared experts of one layer.

    The shared expert is computed here, or, where the expert map gives it slots, is one more expert that every token
    picks (the paper's copies on ranks of their own, 4.1).
    """

    def __init__(self, shape: ModelShape, weights: Weights, layer: int, exchange: Exchange, run: Any,
                 tiled: bool) -> None:
        name = f"layers.{layer}"
        gate = f"{name}.router.gate"
        assert weights[gate].dtype == torch.float32, "the gate is stored and used in float32"
        self.router = Router(shape, weights.matrix(gate), weights.get(f"{name}.router.bias"))
        stack = f"{name}.experts"
        self.experts: Experts | PackedExperts = (
            PackedExperts(weights.stack(stack), weights.dtype) if weights.packs(stack) else
            Experts(*weights.turned_stack(stack), shape.num_experts_per_token, run, tiled))
        self.shared = weights.gated(f"{name}.shared") if f"{name}.shared.down" in weights else None
        self.exchange = exchange
        self.slot_table = SlotTable.identity(shape.num_routed_experts)
        self.shared_expert = shape.num_routed_experts       # its number where the map places it
        self.run = run
        self.one_call = self._in_one_call() if weights.row_by_row else None
        self.chosen: list[Tensor] | None = None             # the experts of each batch, if somebody counts them

    def __call__(self, x_TD: Tensor, *residual_TD: Tensor) -> Tensor:
        """What the experts give, and the residual stream, if that is to be added."""
        return to_the_end(self.in_turns(x_TD, *residual_TD))

    def in_turns(self, x_TD: Tensor, *residual_TD: Tensor) -> Turns:
        """The same with a pause after each sending. What is sent travels while the shared expert computes too."""
        if (self.one_call is not None and len(residual_TD) == 1 and x_TD.shape[0] <= ONE_CALL_ROWS
                and self.places_are_plain):
            out_TD, expert_TK = self.one_call(x_TD, *residual_TD)
            self.count(expert_TK)
            return out_TD
        expert_TK, weight_TK = self.run(self.router, x_TD)
        num_picks = expert_TK.shape[1]
        if self.shared_by_map:
            expert_TK = F.pad(expert_TK, (0, 1), value=self.shared_expert)
        self.count(expert_TK)
        dispatched = self.exchange.begin_dispatch(x_TD, self.slot_table.slots(expert_TK))
        shared_TD = self.run(self.shared, x_TD) if self.shared else None
        yield
        arrived, handle = self.exchange.finish_dispatch(dispatched)
        combined = self.exchange.begin_combine(handle, self.experts(arrived))
        yield
        y_TKD = self.exchange.finish_combine(combined)
        if self.shared_by_map:
            shared_TD = y_TKD[:, num_picks]
        added_TD = residual_TD if shared_TD is None else (shared_TD, *residual_TD)
        return self.run(weighted_sum, y_TKD[:, :num_picks], weight_TK, *added_TD)

    @property
    def places_are_plain(self) -> bool:
        """Expert i is in slot i, and the shared one in none."""
        return self.slot_table.is_identity and not self.shared_by_map

    def count(self, expert_TK: Tensor) -> None:
        """Keep what was chosen, if somebody counts it."""
        if self.chosen is not None:
            self.chosen.append(expert_TK)

    def _in_one_call(self) -> ExpertLayer | None:
        """For experts that are all here."""
        if type(self.exchange) is not LocalExchange or self.exchange.quantised:      # what builds on it does more
            return None
        gate = packed(self.router.gate)
        assert isinstance(self.experts, PackedExperts) and gate is not None, "all is packed"
        assert self.shared is None or isinstance(self.shared, PackedGated), "all is packed"
        routed, shared = self.experts.stack, self.shared and self.shared.stack
        return ExpertLayer(self.router.shape, gate[0], self.router.bias_E,
                           (routed.gate_up, routed.down), (shared.gate_up, shared.down) if shared else None)

    @property
    def shared_by_map(self) -> bool:
        return self.slot_table.num_experts > self.shared_expert
