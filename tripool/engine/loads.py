"""How often each expert was chosen by this rank's own tokens: what the expert map is balanced by.

Experts are counted as the map counts them: by MoE layer, logical, the shared one among them where it has slots. A step
keeps the choices as they are and they are counted once for all layers, which costs some microseconds.

L layers · T tokens · K picks · E experts
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tripool.engine.model.moe import MixtureOfExperts


class ExpertLoads:
    """Tokens per layer and expert since they were last taken."""

    def __init__(self, blocks: Sequence[MixtureOfExperts | None]) -> None:
        """The model's MoE layers; None is one whose experts are not run."""
        self._blocks = [(layer, block) for layer, block in enumerate(blocks) if block is not None]
        self._num_layers = len(blocks)
        self._count_LE: NDArray[np.int64] | None = None
        self.forget()

    def forget(self) -> None:
        """What has been chosen since the last count is void."""
        for _, block in self._blocks:
            block.chosen = []

    def count(self) -> None:
        """Add what has been chosen since the last count."""
        chosen = [(layer, block.chosen) for layer, block in self._blocks if block.chosen]
        if not chosen:
            return
        choices = [each[0] if len(each) == 1 else torch.cat(each) for _, each in chosen]
        count_LE = np.zeros(self._num_layers * self._num_experts, np.int64)
        for num_tokens in dict.fromkeys(map(len, choices)):         # of the MTP layer, which drafts, others
            layers = [layer for (layer, _), each in zip(chosen, choices, strict=True) if len(each) == num_tokens]
            choice_LTK = torch.stack([each for each in choices if len(each) == num_tokens]).cpu().numpy()
            layer_L11 = np.array(layers, np.int64).reshape(-1, 1, 1)
            count_LE += np.bincount((choice_LTK + layer_L11 * self._num_experts).ravel(), minlength=len(count_LE))
        self._count_LE = count_LE if self._count_LE is None else self._count_LE + count_LE
        self.forget()

    def take(self) -> bytes:
        """The counts so far, int32 layer by layer; they begin anew."""
        count_LE, self._count_LE = self._count_LE, None
        if count_LE is None:
            return bytes(4 * self._num_layers * self._num_experts)
        return count_LE.astype("<i4").tobytes()

    @property
    def _num_experts(self) -> int:
        return self._blocks[0][1].slot_table.num_experts if self._blocks else 0
