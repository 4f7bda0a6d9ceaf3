"""Tokens travel to the ranks that hold their experts, and the results travel back.

The model calls `dispatch` with what it has and computes on what arrived; `combine` takes the handle back and
returns one result per token and pick, in the order in which they were picked. Weights stay at home: results are
summed by whoever asked, so that the sum's order does not depend on how experts are spread. Every rank of an
instance makes the same calls in the same order, with zero tokens too.

T own tokens · K picks of a token · N arrived rows · P pairs of token and pick · D model width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tripool.engine.parallel.groups import Group


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows to compute here: each goes through the experts named beside it (positions in this rank's stack)."""

    x_ND: Tensor
    expert_NK: Tensor


class Exchange(Protocol):
    """How a model reaches experts, wherever they are."""

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor) -> tuple[Arrived, Any]: ...

    def combine(self, handle: Any, y_NKD: Tensor) -> Tensor:
        """The results of this rank's own tokens, `[T, K, D]`."""


class LocalExchange:
    """All experts are here, so nothing moves."""

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor) -> tuple[Arrived, None]:
        return Arrived(x_TD, expert_TK), None

    def combine(self, handle: None, y_NKD: Tensor) -> Tensor:
        return y_NKD


@dataclass(frozen=True, slots=True)
class CollectiveHandle:
    """What `combine` needs to send results back the way their inputs came."""

    order_P: Tensor           # pair of each sent row
    num_picks: int
    sent: list[int]           # rows to each rank
    received: list[int]       # rows from each rank


class CollectiveExchange:
    """Every pair of token and pick is one row of an all-to-all. Plain and slow: the oracle of faster exchanges."""

    def __init__(self, group: Group, num_experts: int) -> None:
        assert num_experts % group.num_ranks == 0, f"{group.num_ranks} ranks do not divide {num_experts} experts"
        self.group = group
        self.experts_per_rank = num_experts // group.num_ranks

    def dispatch(self, x_TD: Tensor, expert_TK: Tensor) -> tuple[Arrived, CollectiveHandle]:
        num_picks = expert_TK.shape[1]
        expert_P = expert_TK.flatten()
        order_P = torch.sort(expert_P, stable=True).indices
        rank_P = expert_P // self.experts_per_rank
        sent = torch.bincount(rank_P, minlength=self.group.num_ranks).tolist()
        received = self.group.exchange_counts(sent)
        handle = CollectiveHandle(order_P, num_picks, sent, received)
        x_ND = self.group.all_to_all(x_TD.index_select(0, order_P // num_picks), sent, received)
        expert_N = self.group.all_to_all(expert_P.index_select(0, order_P) % self.experts_per_rank, sent, received)
        return Arrived(x_ND, expert_N.unsqueeze(-1)), handle

    def combine(self, handle: CollectiveHandle, y_NKD: Tensor) -> Tensor:
        y_PD = self.group.all_to_all(y_NKD.squeeze(1), handle.received, handle.sent)
        in_order_PD = torch.empty_like(y_PD).index_copy_(0, handle.order_P, y_PD)
        return in_order_PD.unflatten(0, (-1, handle.num_picks))
