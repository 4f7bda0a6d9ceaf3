"""Which implementation of an operation runs: a level, chosen once for the machine.

    -1 slow definitions in torch    0 plain C++    1 AVX2    2 AVX-512 VNNI    3 AMX INT8

The compiled half is optional; where it could not be built, operations run their definitions. Operations take a level
so that tests can force one; everybody else leaves it out. The compiled functions trust their arguments: what they are
given is checked by the public function of each operation.

Not every machine that runs a level has been at hand to test it. So a level above AVX2 has to give the bits of plain C++
on a small sample before it is chosen; one that does not is passed over with a warning.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tripool.engine.ops.levels import BEST, LEVELS, explained, why_not_higher

log = logging.getLogger(__name__)

AMX_EMULATED = 4
"""For tests: what level 3 does, in plain C++."""
TRUSTED = 1
ROUNDED_SAMPLE = ((3, 70, 70), (18, 33, 40), (70, 289, 20))
SAMPLE = {"int8": ((1, 70, 20), (5, 128, 33), (33, 580, 70)), "bfloat16": ROUNDED_SAMPLE, "widened": ROUNDED_SAMPLE}
"""Rows, inputs and outputs on which higher levels are tried, by weights: integers; floats and integers as floats, these
of rounded rows."""
FLOATS = (torch.float32, torch.bfloat16)
FORMAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
ROUNDED = 4
"""Beside the code of a weight: its rows are rounded to bfloat16."""

try:
    _native: Any = importlib.import_module("tripool._native")
except ImportError:
    _native = None

NEWEST = ("attention_layer", "expert_layer", "logprobs")
"""What older extensions do not have."""


def is_built() -> bool:
    """Is the extension here, and does it have these operations?"""
    return _is_complete(_native)


@functools.cache
def _is_complete(extension: Any) -> bool:
    """Asked before every call of an operation, so it is looked up once."""
    return all(hasattr(extension, name) for name in NEWEST)


@functools.cache
def module() -> Any:
    """The compiled functions."""
    assert is_built(), "the native extension is not there, or is older than this file"
    return _native


def best_level(cap: int = BEST) -> int:
    """The highest level that this machine has, no higher than the cap."""
    return _native.int8_level(cap) if cap >= 0 and is_built() else -1


def is_right(level: int) -> bool:
    """Does a level give the results of plain C++ on a small sample?

    To the bit: where rows are rounded to bfloat16, levels add in different orders, but sums of small integers are exact
    in all of them.
    """
    return all(torch.equal(_product(level, kind, *shape), _product(0, kind, *shape))
               for kind, shapes in SAMPLE.items() for shape in shapes)


def _product(level: int, kind: str, num_rows: int, num_inputs: int, num_outputs: int) -> Tensor:
    """A linear layer with float rows (and so all that a level does but SiLU), on numbers that are no pattern."""
    def numbers(*shape: int) -> Tensor:
        return (torch.arange(math.prod(shape), dtype=torch.int64) * 7919 % 65521 % 256 - 128).view(shape)

    num_blocks, x = -(-num_outputs // 16), numbers(num_rows, num_inputs).float()
    y = torch.empty(num_rows, num_outputs)
    if kind == "int8":
        data = numbers(num_blocks, -(-num_inputs // 4), 16, 4).to(torch.int8)
        sums = data.sum((1, 3), dtype=torch.int32)
        scales = torch.ones(sums.numel())
        _native.int8_linear(level, x.data_ptr(), 0, 0, num_rows, data.data_ptr(), scales.data_ptr(), sums.data_ptr(),
                            num_outputs, num_inputs, y.data_ptr(), 0)
    else:
        x *= 1 + 2 ** -10                              # and rounding brings it back
        data = numbers(num_blocks, num_inputs, 16).to(torch.int8 if kind == "widened" else torch.bfloat16)
        _native.float_linear(level, x.data_ptr(), 0, num_rows, data.data_ptr(), FORMAT_CODES[data.dtype] | ROUNDED,
                             num_outputs, num_inputs, 0, 0, y.data_ptr(), 0)
    return y


@functools.cache
def chosen_level() -> int:
    """The level that runs unless a caller says otherwise."""
    level = best_level()
    while level > TRUSTED and not is_right(level):
        log.warning("native operations: this processor's %s gives other results than plain code, and is not used; "
                    "please report it", LEVELS[level])
        level = best_level(level - 1)
    if level < 0:
        log.warning("native operations are missing (%s); slow definitions take their place",
                    why_not_higher(level) if _native is None else "of another version; run `make native`")
    elif level == 0:
        log.warning("native operations: %s, several times slower", explained(level))
    else:
        log.info("native operations: %s", explained(level))
    return level


def use_threads(num_threads: int) -> None:
    """So many threads of this process work on each operation from now on, the caller's among them.

    Results do not depend on it. Threads beyond the first are made when an operation needs them.
    """
    assert num_threads >= 1, f"{num_threads} threads"
    if is_built():
        _native.set_num_threads(num_threads)


def num_threads() -> int:
    """Threads that work on an operation."""
    return _native.num_threads() if is_built() else 1


def level_for(rows: Tensor, level: int | None = None) -> int:
    """The level at which operations on rows of floats run: the machine's, or what a caller says; -1 for rows that are
    not on a CPU, or of a type that is not compiled for."""
    if not rows.is_cpu or rows.dtype not in FLOATS:
        return -1
    return chosen_level() if level is None else level


def address(values: npt.NDArray[np.generic]) -> int:
    """Where an array lies."""
    return torch.from_numpy(values).data_ptr()         # quicker than numpy's own


@functools.cache
def float_bits(value: float) -> int:
    """A float32 as compiled functions take it."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
