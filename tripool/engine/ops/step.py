"""A decode step in one call: which rows take part, their drafts, the forward pass, the choice of tokens, what ends.

For a rank that is alone and has nothing but rows that decode: between two steps of few rows Python would else take as
long as a small model computes, and a drafting step asks more of it than a plain one. The slow definition is the
executor's own way of doing a step, with the same bits, which also serves rows whose log-probabilities are asked for or
whose logits are changed before a token is chosen.

S slots · L positions · B blocks of a row · K stop tokens · N rows that get a token · J drafts
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tripool.engine.batch import LatentCache
from tripool.engine.ops import native
from tripool.engine.ops.choose import Bools, RowTable
from tripool.engine.ops.forward import Forward
from tripool.engine.ops.layer import numbers
from tripool.engine.ops.sample import DRAW, Draws, Ints

TAKEN, NOT_PLAIN = -1, -2
GOES_ON, STOPPED, AT_LIMIT, HANDED = range(4)


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The columns of all slots, which stay where they are; a step reads and writes them in place."""

    rows: RowTable
    block_SB: Ints
    num_blocks_S: Ints
    limit_S: Ints              # of prompt and output together
    num_logprobs_S: Ints       # below zero: none are asked for
    plain_from_S: Ints         # the first position for which logits stay as they are
    draw_S: Draws
    decodes_S: Bools           # goes on after its next token
    drafts_S: Bools            # wishes to be drafted for
    decoding_S: Bools          # all tokens but the last are computed

    def __post_init__(self) -> None:
        integers = (self.num_blocks_S, self.limit_S, self.num_logprobs_S, self.plain_from_S)
        flags = (self.decodes_S, self.drafts_S, self.decoding_S)
        assert all(each.dtype == np.int64 for each in (self.block_SB, *integers)) and self.draw_S.dtype == DRAW, "types"
        assert all(each.dtype == np.bool_ for each in flags), "flags are bool"
        assert all(each.flags.c_contiguous for each in (self.block_SB, *integers, self.draw_S, *flags)), "whole columns"

    @property
    def numbers(self) -> tuple[int, ...]:
        """As C++ reads it."""
        columns = (self.num_blocks_S, self.limit_S, self.num_logprobs_S, self.plain_from_S, self.draw_S, self.decodes_S,
                   self.drafts_S, self.decoding_S)
        return (*self.rows.numbers.tolist(), len(self.limit_S), self.block_SB.ctypes.data, self.block_SB.shape[1],
                *(each.ctypes.data for each in columns))


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step brought. Arrays are good until the next one."""

    slots_N: Ints
    start_N: Ints              # output number of a row's first token
    count_N: Ints              # how many tokens it gets
    token_NJ: Ints
    ended_N: Ints              # GOES_ON, STOPPED by a stop token, AT_LIMIT, or HANDED to who decodes it
    need: tuple[int, ...]      # rows that decode and have no block for the position of the next step
    want: tuple[int, ...]      # or none for all its drafts
    drafted_J: Ints            # rows that had a first draft, a second, ...
    right_J: Ints              # those of them that became tokens


class DecodeStep:
    """Decode steps of one model over one cache and one table of slots."""

    def __init__(self, model: Forward, cache: LatentCache, table: SlotTable, *, num_drafts: int,
                 most_tokens: int) -> None:
        num_slots = len(table.limit_S)
        self._num_drafts, self._most_tokens = num_drafts, most_tokens
        self._slot, self._start, self._count, self._ended = np.zeros((4, num_slots), np.int64)
        self._token = np.zeros((num_slots, num_drafts + 1), np.int64)
        self._need, self._want = np.zeros((2, num_slots), np.int64)
        self._drafted, self._right = np.zeros((2, num_drafts), np.int64)
        self._out = np.array([each.ctypes.data for each in (
            self._slot, self._start, self._count, self._token, self._ended, self._need, self._want, self._drafted,
            self._right)] + [0, 0], np.int64)                # the last two are those of the loads
        self._counts = np.zeros(3, np.int64)
        self._table = numbers(*table.numbers)
        described = model.described(cache)
        self._given = (model, cache, table, described)       # as long as they are read
        self._call = (described[0].data_ptr(), described[1].data_ptr(), self._table.data_ptr(), num_drafts, most_tokens,
                      self._out.ctypes.data, self._counts.ctypes.data)

    def __call__(self, loads_LE: npt.NDArray[np.int64]) -> Taken | None:
        """Take a step, and add to `loads_LE` how often experts were chosen. None, and nothing done, if it is not plain.

        Raises:
            IndexError: a token is not in the vocabulary, or has no place in the cache.
        """
        self._out[-2:] = loads_LE.ctypes.data, loads_LE.shape[1]
        came = native.module().decode_step(native.chosen_level(), *self._call)
        if came == NOT_PLAIN:
            return None
        if came != TAKEN:
            raise IndexError(f"token {came} of the step is not in the vocabulary, or has no place in the cache")
        num_rows, num_need, num_want = self._counts.tolist()
        return Taken(self._slot[:num_rows], self._start[:num_rows], self._count[:num_rows], self._token[:num_rows],
                     self._ended[:num_rows], tuple(self._need[:num_need].tolist()),
                     tuple(self._want[:num_want].tolist()), self._drafted, self._right)
