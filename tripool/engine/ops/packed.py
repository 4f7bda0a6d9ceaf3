"""What packed weights have in common, floats or INT8: blocks of output channels, and stacks of experts.

P pairs of row and expert · E experts · D model width · F feed-forward width · N output channels · K inputs
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.core.placement import lie_side_by_side
from tripool.engine.memory import large_pages

BLOCK = 16
"""Output channels that lie together."""

LARGE_PAGE = 2 << 20
SHARED_BYTES = 8 * LARGE_PAGE        # of which weights that fill no large page take their share
LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One matrix, or a stack of them (experts), as kernels read it. Everything of one matrix is contiguous."""

    data: Tensor          # [E, N/16, ...], N filled up
    num_outputs: int
    num_inputs: int

    @property
    def num_matrices(self) -> int:
        return self.data.shape[0]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Its tensors; their first dimension counts matrices."""
        return (self.data,)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Weight = TypeVar("Weight", bound=PackedWeight)


@dataclass(frozen=True, slots=True)
class ExpertStack(Generic[Weight]):
    """A stack of experts as kernels read it."""

    gate_up: Weight       # blocks of gate and up in turn, each filled up to whole blocks
    down: Weight

    @property
    def num_experts(self) -> int:
        return self.down.num_matrices

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def check_pairs(self, row_P: Tensor, expert_P: Tensor) -> None:
        """What kernels trust."""
        assert row_P.dtype == expert_P.dtype == torch.int64 and row_P.dim() == 1 and row_P.shape == expert_P.shape, \
            "a row and an expert for each pair"


def in_blocks(weight_ENK: Tensor) -> Tensor:
    """Output channels in blocks, filled up with zeros, and in a block input after input: `[E, N/16, K, 16]`."""
    num_outputs, num_inputs = weight_ENK.shape[1:]
    assert num_inputs > 0 and num_outputs > 0, f"no weight has {num_outputs} by {num_inputs} elements"
    filled_ENK = F.pad(weight_ENK, (0, 0, 0, -num_outputs % BLOCK)) if num_outputs % BLOCK else weight_ENK
    return filled_ENK.unflatten(1, (-1, BLOCK)).transpose(2, 3)


def laid_out(data: Tensor) -> Tensor:
    """A contiguous copy, in large pages."""
    return _room(data.shape, data.dtype).copy_(data)


def in_slots(data: Tensor, held: Sequence[int]) -> Tensor:
    """The matrices that a rank's slots hold (below zero: nothing): where they lie, if in this order, else copied."""
    if lie_side_by_side(held):
        return data[held[0]:held[-1] + 1] if held else data[:0]
    found = _room((len(held), *data.shape[1:]), data.dtype)
    for slot, matrix in enumerate(held):
        if matrix >= 0:
            found[slot] = data[matrix]
    return found


class _SharedPages:
    """Large pages of several weights. Nothing comes back: pages are free when none of their weights is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Zeros, where nothing was written before."""
        filled = -(-num_bytes // LINE_BYTES) * LINE_BYTES
        with self._lock:
            if filled > len(self._rest):
                self._rest = torch.frombuffer(large_pages(SHARED_BYTES), dtype=torch.uint8)
            taken, self._rest = self._rest[:num_bytes], self._rest[filled:]
        return taken


_shared_pages = _SharedPages()


def _room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in large pages, of which none is there before it is written."""
    count = math.prod(shape)
    num_bytes = count * dtype.itemsize
    if num_bytes < LARGE_PAGE:
        return _shared_pages.take(num_bytes).view(dtype).view(shape)
    return torch.frombuffer(large_pages(num_bytes), dtype=dtype, count=count).view(shape)


def check_experts(gate_up_EFD: Tensor, down_EDF: Tensor) -> None:
    """See that gate and up, one below the other, and down are of the same experts."""
    assert gate_up_EFD.shape[1] == 2 * down_EDF.shape[2] and gate_up_EFD.shape[2] == down_EDF.shape[1], \
        f"gate and up {list(gate_up_EFD.shape)} do not fit down {list(down_EDF.shape)}"
    assert gate_up_EFD.shape[0] == down_EDF.shape[0], "as many experts going up as down"


def in_turn(gate_up_EF: Tensor) -> Tensor:
    """Channels of gate and up (the second dimension) in blocks that take turns."""
    gate_EF, up_EF = (_filled(each) for each in gate_up_EF.chunk(2, dim=1))
    return torch.stack([each.unflatten(1, (-1, BLOCK)) for each in (gate_EF, up_EF)], dim=2).flatten(1, 3)


def _filled(channels_EF: Tensor) -> Tensor:
    filled = channels_EF.new_zeros(channels_EF.shape[0], -(-channels_EF.shape[1] // BLOCK) * BLOCK,
                                   *channels_EF.shape[2:])
    filled[:, :channels_EF.shape[1]] = channels_EF
    return filled
