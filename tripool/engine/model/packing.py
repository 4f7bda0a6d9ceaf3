"""How weights lie in memory, where the order of their elements decides how fast they are read.

A product of one row with a matrix stored output by output reads it at half the speed of the same matrix stored input
by input (measured on one core, weights not in cache: 6.5 against 14 GB/s); with more rows the two are near equal.
A model small enough to be copied is therefore turned when it is built. Shapes do not change, only strides.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

PACKED_BYTES = 1 << 30
"""Larger models stay as they were loaded: a second copy would cost more than it gives."""

UNTURNED = ("embed", ".attention.latent")
"""Tables that are read by rows."""


def packed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights, those on a CPU turned if they are small in all."""
    small = sum(weight.nbytes for weight in weights.values()) <= PACKED_BYTES
    return {name: _turned(weight) if small and _worth_turning(name, weight) else weight
            for name, weight in weights.items()}


def _worth_turning(name: str, weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dim() > 1 and not name.endswith(UNTURNED)


def _turned(weight: Tensor) -> Tensor:
    return weight.mT.contiguous().mT
