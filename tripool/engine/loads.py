"""How often each expert was chosen by this rank's own tokens: what the expert map is balanced by.

Experts are counted as the map counts them: by MoE layer, logical, the shared one among them where it has slots. A step
keeps the choices as they are; many steps' are counted at once.

L layers · T tokens · K picks · E experts
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tripool.engine.model.moe import MixtureOfExperts

MOST_KEPT = 4096
"""Tokens whose choices wait to be counted."""


class ExpertLoads:
    """Tokens per layer and expert since they were last taken."""

    def __init__(self, blocks: Sequence[MixtureOfExperts | None]) -> None:
        """The model's MoE layers; None is one whose experts are not run."""
        self._blocks = [(layer, block) for layer, block in enumerate(blocks) if block is not None]
        self._num_layers = len(blocks)
        self._kept: list[list[Tensor]] = [[] for _ in self._blocks]
        self._num_kept = 0                            # tokens whose choices are in them
        self._count_LE: NDArray[np.int64] | None = None
        self.forget()

    def forget(self) -> None:
        """What has been chosen since the last count is void."""
        for _, block in self._blocks:
            block.chosen = []

    def count(self, num_tokens: int) -> None:
        """Add what has been chosen, by so many tokens, since the last count."""
        for kept, (_, block) in zip(self._kept, self._blocks, strict=True):
            if block.chosen:
                kept += block.chosen
                block.chosen = []
        self._num_kept += num_tokens
        if self._num_kept > MOST_KEPT:
            self._add_kept()

    @property
    def count_LE(self) -> NDArray[np.int64]:
        """The counts so far, but for what is kept; who counts by himself adds to them."""
        if self._count_LE is None:
            self._count_LE = np.zeros((self._num_layers, self._num_experts), np.int64)
        return self._count_LE

    def take(self) -> bytes:
        """The counts so far, int32 layer by layer; they begin anew."""
        self._add_kept()
        count_LE, self._count_LE = self.count_LE, None
        return count_LE.astype("<i4").tobytes()

    def _add_kept(self) -> None:
        """Count what is kept, whose experts are numbered as now."""
        if not any(self._kept):
            return
        for kept, (layer, _) in zip(self._kept, self._blocks, strict=True):
            if kept:
                choices = torch.cat([each.flatten() for each in kept]).cpu().numpy()
                self.count_LE[layer] += np.bincount(choices, minlength=self._num_experts)
                kept.clear()
        self._num_kept = 0

    @property
    def _num_experts(self) -> int:
        return self._blocks[0][1].slot_table.num_experts if self._blocks else 0
