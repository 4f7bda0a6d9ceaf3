"""The compiled half of the exchange: `csrc/exchange.cpp`, called with the addresses of tensors.

The functions are those of `definition`, under the same names, with the same arguments and answers. The extension is
optional: where it could not be built, `kernels()` gives the definition. It never reads the environment: rows are
quantised at the level that was chosen for operations (`ops.native`), unless a caller says otherwise.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from torch import Tensor

from tripool.engine.ops import native as operations
from tripool.engine.parallel.definition import DTYPES, Definition, Ints, Kernels
from tripool.engine.parallel.segment import FORMATS, WORDS, Context

log = logging.getLogger(__name__)

LEVELS = {-1: "none (slow definitions)", 0: "plain", 1: "AVX2", 2: "AVX-512"}
BEST = max(LEVELS)
FORMAT_CODES = {DTYPES[name]: code for code, name in enumerate(FORMATS)}

try:
    _native: Any = importlib.import_module("tripool._native")
except ImportError:
    _native = None


def is_built() -> bool:
    """Is the extension here, and of the same mind as this file?"""
    return _native is not None and _native.num_words() == len(WORDS)


def kernels(cap: int | None = None) -> Kernels:
    """The best that this machine has, no higher than the cap (-1: the definition); without one, than operations."""
    cap = operations.chosen_level() if cap is None else cap
    if cap >= 0 and not is_built():
        log.warning("the native exchange is %s; a slow definition takes its place (run `make native`)",
                    "not built" if _native is None else "of another version")
    if cap < 0 or not is_built():
        return Definition()
    return Native(cap)


class Native:
    """Calls into the extension. The level belongs to the process."""

    def __init__(self, cap: int = BEST) -> None:
        assert is_built(), "the native extension is not there, or is of another version"
        self.level: int = _native.set_level(cap)
        log.debug("native exchange: %s", LEVELS[self.level])

    def quantise(self, x_TD: Tensor, q_TD: Tensor, scale_T: Tensor) -> None:
        _native.quantise(x_TD.data_ptr(), FORMAT_CODES[x_TD.dtype], *x_TD.shape, q_TD.data_ptr(), scale_T.data_ptr())

    def send_dispatch(self, context: Context, tag: int, x_TD: Tensor, slot_TK: Tensor, rank_of_slot: Tensor,
                      first_slot: Tensor, rounds: int, order_P: Ints, sent_R: Ints) -> int:
        return _native.send_dispatch(context.address, tag, x_TD.data_ptr(), FORMAT_CODES[x_TD.dtype], x_TD.shape[0],
                                     slot_TK.data_ptr(), rank_of_slot.data_ptr(), first_slot.data_ptr(), rounds,
                                     _address(order_P), _address(sent_R))

    def await_counts(self, context: Context, tag: int, deadline_ns: int, count_3R: Ints) -> int:
        return _native.await_counts(context.address, tag, deadline_ns, _address(count_3R))

    def assemble(self, context: Context, tag: int, deadline_ns: int, count_3R: Ints, row_MD: Tensor,
                 scale_M: Tensor | None, row_N: Tensor, expert_NK: Tensor, progress_2R: Ints) -> int:
        return _native.assemble(context.address, tag, deadline_ns, _address(count_3R), row_MD.data_ptr(),
                                0 if scale_M is None else scale_M.data_ptr(), row_N.data_ptr(), expert_NK.data_ptr(),
                                _address(progress_2R))

    def send_combine(self, context: Context, tag: int, y_NKD: Tensor, received_R: Ints) -> int:
        return _native.send_combine(context.address, tag, y_NKD.data_ptr(), _address(received_R))

    def receive_combine(self, context: Context, tag: int, deadline_ns: int, y_NKD: Tensor, received_R: Ints,
                        order_P: Ints, sent_R: Ints, out_TKD: Tensor, progress_R: Ints) -> int:
        return _native.receive_combine(context.address, tag, deadline_ns, y_NKD.data_ptr(), _address(received_R),
                                       _address(order_P), _address(sent_R), out_TKD.data_ptr(), _address(progress_R))

    def join(self, context: Context, deadline_ns: int) -> int:
        return _native.join(context.address, deadline_ns)

    def abort_epoch(self, context: Context, epoch: int) -> None:
        _native.abort_epoch(context.address, epoch)


def _address(numbers: Ints) -> int:
    return numbers.buffer_info()[0]
