"""Tokens travel to the ranks that hold their experts, and the results travel back.

The model dispatches what it has and computes on what arrived; combine takes the handle back and returns one result
per token and pick, in the order in which they were picked. Weights stay at home: results are summed by whoever asked,
so that the sum's order does not depend on how experts are spread. Every rank of an instance makes the same calls in
the same order, with zero tokens too.

Each of the two has halves, so that a rank can compute something else between sending and receiving: `begin` sends and
waits for nobody (unless a transport cannot), `finish` waits. Two exchanges may be in flight, one for each microbatch;
they end in the order in which they began.

What is picked here are slots, numbered over all ranks: each rank owns consecutive ones, not always equally many.
Which slot stands for an expert is decided before (`placement`). Three exchanges: local, collective (any transport that
torch.distributed has; the oracle), and direct (`direct`: memory shared by the ranks of one host).

T own tokens · K picks of a token · N arrived rows · P pairs of token and pick · D model width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tripool.engine.parallel.groups import Group
from tripool.engine.parallel.quantise import dequantise, quantise


class ArrivedRows(Protocol):
    """Rows to compute here: each goes through the experts named beside it (positions in this rank's stack)."""

    @property
    def x_ND(self) -> Tensor: ...

    @property
    def expert_NK(self) -> Tensor: ...

    def pairs(self) -> Pairs:
        """The same for kernels, which take each row once, as it travelled."""


class Pairs(NamedTuple):
    """What to compute, a pair of row and expert each: `P` is all of `expert_NK`, in its order."""

    row_MD: Tensor                  # int8 with scales, or rows as they are
    scale_M: Tensor | None
    row_P: Tensor
    expert_P: Tensor


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows as they are."""

    x_ND: Tensor
    expert_NK: Tensor

    def pairs(self) -> Pairs:
        num_rows, num_picks = self.expert_NK.shape
        row_P = torch.arange(num_rows) if num_picks == 1 else torch.arange(num_rows * num_picks) // num_picks
        return Pairs(self.x_ND, None, row_P, self.expert_NK.flatten())


class Exchange(Protocol):
    """How a model reaches experts, wherever they are."""

    @property
    def is_alone(self) -> bool:
        """Whether no other rank takes part, so that nobody waits for a call that brings nothing."""

    def begin_dispatch(self, x_TD: Tensor, slot_TK: Tensor) -> Any:
        """Send tokens to the ranks of their slots; returns what `finish_dispatch` asks for."""

    def finish_dispatch(self, sent: Any) -> tuple[ArrivedRows, Any]:
        """What arrived here, and the handle that combine asks for."""

    def begin_combine(self, handle: Any, y_NKD: Tensor) -> Any:
        """Send results back to the ranks whose tokens they are; returns what `finish_combine` asks for."""

    def finish_combine(self, sent: Any) -> Tensor:
        """The results of this rank's own tokens, `[T, K, D]`."""


class InOneGo:
    """Both halves in a row, for whoever has nothing to do between them."""

    def dispatch(self: Exchange, x_TD: Tensor, slot_TK: Tensor) -> tuple[Any, Any]:
        """Send tokens to the ranks of their slots; returns what arrived here."""
        return self.finish_dispatch(self.begin_dispatch(x_TD, slot_TK))

    def combine(self: Exchange, handle: Any, y_NKD: Tensor) -> Tensor:
        """The results of this rank's own tokens, `[T, K, D]`."""
        return self.finish_combine(self.begin_combine(handle, y_NKD))


class LocalExchange(InOneGo):
    """All experts are here, so nothing moves. It can quantise rows as early dispatch does, to be compared with it."""

    is_alone = True

    def __init__(self, *, quantised: bool = False) -> None:
        self.quantised = quantised

    def begin_dispatch(self, x_TD: Tensor, slot_TK: Tensor) -> Arrived:
        return Arrived(dequantise(*quantise(x_TD), x_TD.dtype) if self.quantised else x_TD, slot_TK)

    def finish_dispatch(self, sent: Arrived) -> tuple[Arrived, None]:
        return sent, None

    def begin_combine(self, handle: None, y_NKD: Tensor) -> Tensor:
        return y_NKD

    def finish_combine(self, sent: Tensor) -> Tensor:
        return sent


@dataclass(frozen=True, slots=True)
class CollectiveHandle:
    """What `combine` needs to send results back the way their inputs came."""

    order_P: Tensor           # pair of each sent row
    num_picks: int
    sent: list[int]           # rows to each rank
    received: list[int]       # rows from each rank


class CollectiveExchange(InOneGo):
    """Every pair of token and pick is one row of an all-to-all. Plain and slow: the oracle of faster exchanges.

    A collective needs all ranks at once, so `begin` does everything.
    """

    def __init__(self, group: Group, slots: int | Sequence[int]) -> None:
        """`slots`: of all ranks together, in equal shares, or of each."""
        if isinstance(slots, int):
            assert slots % group.num_ranks == 0, f"{group.num_ranks} ranks do not divide {slots} slots"
            slots = [slots // group.num_ranks] * group.num_ranks
        assert len(slots) == group.num_ranks, f"{slots} are the slots of other than {group.num_ranks} ranks"
        self.group = group
        self.is_alone = group.num_ranks == 1
        self.first_slot = torch.tensor(list(accumulate(slots, initial=0)))

    def begin_dispatch(self, x_TD: Tensor, slot_TK: Tensor) -> tuple[Arrived, CollectiveHandle]:
        num_picks = slot_TK.shape[1]
        slot_P = slot_TK.flatten()
        order_P = torch.sort(slot_P, stable=True).indices
        first_slot = self.first_slot.to(slot_P.device)
        rank_P = torch.bucketize(slot_P, first_slot[1:], right=True)
        sent = torch.bincount(rank_P, minlength=self.group.num_ranks).tolist()
        received = self.group.exchange_counts(sent)
        handle = CollectiveHandle(order_P, num_picks, sent, received)
        x_ND = self.group.all_to_all(x_TD.index_select(0, order_P // num_picks), sent, received)
        expert_P = slot_P - first_slot[rank_P]
        expert_N = self.group.all_to_all(expert_P.index_select(0, order_P), sent, received)
        return Arrived(x_ND, expert_N.unsqueeze(-1)), handle

    def finish_dispatch(self, sent: tuple[Arrived, CollectiveHandle]) -> tuple[Arrived, CollectiveHandle]:
        return sent

    def begin_combine(self, handle: CollectiveHandle, y_NKD: Tensor) -> Tensor:
        y_PD = self.group.all_to_all(y_NKD.squeeze(1), handle.received, handle.sent)
        in_order_PD = torch.empty_like(y_PD).index_copy_(0, handle.order_P, y_PD)
        return in_order_PD.unflatten(0, (-1, handle.num_picks))

    def finish_combine(self, sent: Tensor) -> Tensor:
        return sent
