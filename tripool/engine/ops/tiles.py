"""Work in tiles of a fixed number of rows, so that a row's bits do not depend on its company.

A matrix product may sum in another order when its number of rows changes, and an elementwise kernel may treat the
end of a tensor differently from its middle. A stage that always sees `TILE_ROWS` rows has one shape, hence one
order, and inside a tile all rows are treated alike. `in_tiles` makes torch's operations deterministic; `whole` is the
fast way, and deterministic too where all operations are compiled, because these treat every row by itself. The model
writes its mathematics once, as stages, and is told which of the two runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TILE_ROWS = 16
"""Enough rows to read a weight seldom; few enough that a decode step of one row wastes little."""

Stage = Callable[..., Any]
"""From tensors whose first dimension is the rows to one such tensor, or to a tuple of them."""


def whole(stage: Stage, *inputs_T: Tensor) -> Any:
    """Run a stage over all rows at once."""
    return stage(*inputs_T)


def in_tiles(stage: Stage, *inputs_T: Tensor) -> Any:
    """Run a stage over tiles of `TILE_ROWS` rows; the last tile is filled up with zeros."""
    num_rows = inputs_T[0].shape[0]
    num_tiles = max(1, -(-num_rows // TILE_ROWS))
    tiles = zip(*(_filled(each, num_tiles * TILE_ROWS).split(TILE_ROWS) for each in inputs_T), strict=True)
    results = [stage(*tile) for tile in tiles]
    if isinstance(results[0], tuple):
        return tuple(torch.cat(column)[:num_rows] for column in zip(*results, strict=True))
    return torch.cat(results)[:num_rows]


def _filled(x_T: Tensor, num_rows: int) -> Tensor:
    """A fresh copy (so every tile is dense and equally aligned) with zero rows at its end."""
    filled = x_T.new_zeros(num_rows, *x_T.shape[1:])
    filled[:x_T.shape[0]] = x_T
    return filled
