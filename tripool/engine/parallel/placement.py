"""The copy of an expert that computes a token, for all picks of a batch at once.

The tensor form of `core.placement.choose`: copies take turns by the token's position in the batch, and ranks begin at
different ones. This is the one point of the data path at which logical experts become slots; an exchange sees slots
alone, and here nothing is known of who owns them.

T tokens · K picks · E experts · C copies
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tripool.core.placement import EMPTY


class SlotTable:
    """The slots of each expert in one layer, as one rank uses them."""

    def __init__(self, expert_of_slot: Sequence[int], num_experts: int, *, source_rank: int = 0,
                 device: torch.device | str = "cpu") -> None:
        """From the expert in each slot (EMPTY where there is none), a layer of a checked `core.placement.Placement`."""
        copies: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(expert_of_slot):
            if expert != EMPTY:
                copies[expert].append(slot)
        assert all(copies), f"expert {copies.index([])} is in no slot: the map was not checked"
        self.source_rank = source_rank
        self.num_experts = num_experts
        self.is_identity = list(expert_of_slot) == list(range(num_experts))
        most = max(map(len, copies))
        self.slot_EC = torch.tensor([each + [EMPTY] * (most - len(each)) for each in copies], device=device)
        self.num_copies_E = torch.tensor([len(each) for each in copies], device=device)

    @classmethod
    def identity(cls, num_experts: int) -> SlotTable:
        """Slot i holds expert i, and no expert has a second copy."""
        return cls(range(num_experts), num_experts)

    def slots(self, expert_TK: Tensor) -> Tensor:
        """The slot of each pick."""
        if self.is_identity:
            return expert_TK
        turn_T1 = torch.arange(expert_TK.shape[0], device=expert_TK.device).unsqueeze(-1) + self.source_rank
        return self.slot_EC[expert_TK, turn_T1 % self.num_copies_E[expert_TK]]
