"""One forward pass's input: tokens of many rows, packed, with where their cache entries live.

A row is one request in this step. Tokens of a row follow one another, rows follow one another, and rows that
decode come first, because they take the absorbed form of attention together. The batch knows nothing of
requests, sampling or slots; it names blocks of one rank's cache.

T tokens · R rows · B blocks in the longest table · W width of a cache entry · D model width
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tripool.engine.ops.sample import Ints


def rows_and_positions(first_R: Ints, count_R: Ints) -> tuple[Ints, Ints]:
    """The row and the position of each token `[T]`, of rows that have `count_R` tokens from positions `first_R`."""
    row_T = np.arange(len(count_R)).repeat(count_R)
    if len(row_T) == len(count_R) and count_R.all():
        return row_T, first_R
    before_R = first_R - count_R.cumsum() + count_R
    return row_T, np.arange(len(row_T)) + before_R[row_T]


@dataclass(frozen=True)
class Batch:
    """Tokens to compute. No tokens at all (T = 0, R = 0) is an ordinary case: a rank with nothing to do still steps."""

    token_T: Tensor           # int64
    first_R: list[int]        # position of each row's first token in this batch: that many entries exist already
    count_R: list[int]        # tokens of each row in this batch
    num_decode_rows: int      # leading rows of one token, or of few: absorbed attention, equally long ones together
    block_table_RB: Tensor    # int64 block ids, enough for first + count positions; padded with any valid id

    @cached_property
    def row_T(self) -> Tensor:
        """int64: which row each token belongs to."""
        return self._rows_and_positions[0]

    @cached_property
    def position_T(self) -> Tensor:
        """int64."""
        return self._rows_and_positions[1]

    @cached_property
    def _rows_and_positions(self) -> tuple[Tensor, Tensor]:
        found = rows_and_positions(np.array(self.first_R, np.int64), np.array(self.count_R, np.int64))
        row_T, position_T = (torch.from_numpy(each).to(self.token_T.device) for each in found)
        return row_T, position_T

    @property
    def num_tokens(self) -> int:
        return self.token_T.shape[0]

    @property
    def num_rows(self) -> int:
        return len(self.first_R)


class LatentCache(Protocol):
    """What the model asks of the paged cache. Its element type is the model's.

    The model writes the entries and, where there is an MTP layer, the hidden state of the last token computed in
    each block; it reads the hidden state before a row's first token from there. It also zeroes a block that it
    starts to fill, so that the unwritten end of a block is always zeros.
    """

    @property
    def block_tokens(self) -> int: ...

    @property
    def data(self) -> Tensor:
        """`[num_blocks, block_elements]`."""

    @property
    def hidden(self) -> Tensor:
        """View `[num_blocks, D]`: the final-normed hidden state of the last token computed in each block."""

    def entries(self, layer: int) -> Tensor:
        """View `[num_blocks, block_tokens, W]` of one layer; MTP layers follow the main ones."""
