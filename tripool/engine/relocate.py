"""An expert moves into a slot of this rank while steps go on.

It is read from the checkpoint with all its tensors, proved, and only then written into the stack with which the model
computes; no live map names the slot, so a half-written one harms nobody, and who is interrupted may begin again. Proof
is twofold: the files are still those that were checked, and what this process has read of them before reads the same
again. The reading thread rests often, so that steps on others hardly notice.

F feed-forward width · D model width
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tripool.core.errors import CheckpointError
from tripool.core.shape import ModelShape
from tripool.engine.checkpoint import Checkpoint
from tripool.engine.model.deepseek import DeepseekModel
from tripool.engine.model.layout import expert_plan, moe_layers
from tripool.engine.weights import read_again

REST_S = 0.0002              # between two strides, which take about as long
COPIED_ELEMENTS = 1 << 14    # at a time: below the size from which torch would take other threads to help


class ExpertLoader:
    """Fills slots of one rank. One thread uses it at a time; steps may run on another."""

    def __init__(self, checkpoint: Checkpoint, shape: ModelShape, dtype: torch.dtype, model: DeepseekModel, *,
                 digests: Mapping[str, int] | None = None, load_format: str = "auto") -> None:
        """`digests` are those of `LoadedModel`: of the tensors that this rank has read already."""
        self._checkpoint = checkpoint
        self._shape = shape
        self._dtype = dtype
        self._model = model
        self._digests = dict(digests or {})
        self._is_dummy = load_format == "dummy"
        self._layers = moe_layers(shape)

    def load(self, layer_index: int, local_slot: int, expert: int) -> None:
        """Put an expert into a slot of this rank. On return the next map may name it.

        Layers are counted as the expert map counts them; after the routed experts comes the shared one. Of layers whose
        experts are not run (the MTP layer's) nothing is kept, so nothing is done; random weights stay what they are.

        Raises:
            CheckpointError: a file cannot be read, or is not what was checked or read before; the slot is unchanged.
        """
        block = self._model.moe_blocks[layer_index]
        if block is None or self._is_dummy:
            return
        assert 0 <= local_slot < block.experts.num_experts, f"this rank has no slot {local_slot}"
        assert 0 <= expert <= self._shape.num_routed_experts, f"there is no expert {expert}"
        plan = [replace(spec, dtype=block.experts.held_in)
                for spec in expert_plan(self._shape, self._layers[layer_index], expert)]
        found = read_again(self._checkpoint, plan, self._dtype, _rest)
        changed = [name for name, digest in found.digests.items() if self._digests.get(name, digest) != digest]
        if changed:
            raise CheckpointError(str(self._checkpoint.folder), [
                f"{self._checkpoint.tensors[name].file}: {name} has not the contents it had when it was loaded"
                for name in changed])
        self._digests.update(found.digests)
        for source, target in zip(block.experts.as_slot(found.tensors), block.experts.slot(local_slot), strict=True):
            _copy(source, target)


def _rest() -> None:
    time.sleep(REST_S)


@torch.inference_mode()
def _copy(source: Tensor, target: Tensor) -> None:
    """Some rows at a time, into whatever order of elements and on whatever device the target has."""
    stride = max(1, COPIED_ELEMENTS * source.shape[0] // source.numel())
    for row in range(0, source.shape[0], stride):
        target[row:row + stride].copy_(source[row:row + stride])
        _rest()
