"""The tokens that rows get in one step: one, and one more for as long as what is chosen is what was guessed.

In one call, with the bookkeeping of rows: the slow definition is the executor's, which chooses one token after the
other and also serves rows whose logits change with what they have seen.

N rows · X positions with logits · V vocabulary · S slots · L positions · K stop tokens · J tokens of a row in one step
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.ops.layer import numbers
from tripool.engine.ops.sample import DRAW, Draws, Ints

Bools = npt.NDArray[np.bool_]


class RowTable:
    """The columns of all rows, which stay where they are."""

    def __init__(self, token_SL: npt.NDArray[np.int32], stop_SK: Ints, num_tokens_S: Ints, num_prompt_S: Ints,
                 num_computed_S: Ints, min_tokens_S: Ints) -> None:
        columns = (num_tokens_S, num_prompt_S, num_computed_S, min_tokens_S)
        assert token_SL.dtype == np.int32 and token_SL.flags.c_contiguous and stop_SK.flags.c_contiguous, "whole tables"
        assert all(each.dtype == np.int64 and each.flags.c_contiguous for each in columns), "columns of int64"
        self._kept = (token_SL, stop_SK, *columns)
        self.numbers = numbers(token_SL.ctypes.data, token_SL.shape[1], stop_SK.ctypes.data, stop_SK.shape[1],
                               *(each.ctypes.data for each in columns))


def choose(logits_XV: Tensor, table: RowTable, slots_N: Ints, num_drafts_N: Ints, draw_N: Draws,
           ) -> tuple[Ints, Ints, Bools]:
    """How many tokens each row gets, these `[N, J]`, and which rows chose a stop token. Writes them to the table.

    `draw_N` is of each row's first.
    """
    assert logits_XV.dtype == torch.float32 and logits_XV.stride(1) == 1, "rows of float32"
    assert len(logits_XV) == len(slots_N) + num_drafts_N.sum() and draw_N.dtype == DRAW, "logits for each position"
    assert all(each.flags.c_contiguous for each in (slots_N, num_drafts_N, draw_N)), "rows lie one after the other"
    most = int(num_drafts_N.max()) + 1
    count_N, token_NJ = np.empty(len(slots_N), np.int64), np.zeros((len(slots_N), most), np.int64)
    stopped_N = np.empty(len(slots_N), np.bool_)
    native.module().choose(
        native.chosen_level(), table.numbers.data_ptr(), logits_XV.data_ptr(), logits_XV.stride(0), logits_XV.shape[1],
        native.address(slots_N), native.address(num_drafts_N), draw_N.ctypes.data, len(slots_N), most,
        native.address(count_N), native.address(token_NJ), native.address(stopped_N))
    return count_N, token_NJ, stopped_N
