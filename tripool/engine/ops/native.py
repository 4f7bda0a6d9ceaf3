"""Which implementation of an operation runs: a level, chosen once for the machine.

    -1 slow definitions in torch    0 plain C++    1 AVX2    2 AVX-512 VNNI

The compiled half is optional; where it could not be built, operations run their definitions. Operations take a level
so that tests can force one; everybody else leaves it out. The compiled functions trust their arguments: what they are
given is checked by the public function of each operation.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch

log = logging.getLogger(__name__)

LEVELS = {-1: "none (slow definitions)", 0: "plain", 1: "AVX2", 2: "AVX-512 VNNI"}
BEST = max(LEVELS)
FORMAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}

try:
    _native: Any = importlib.import_module("tripool._native")
except ImportError:
    _native = None


def is_built() -> bool:
    """Is the extension here, and does it have these operations?"""
    return hasattr(_native, "absorbed_attention")


def module() -> Any:
    """The compiled functions."""
    assert is_built(), "the native extension is not there, or is older than this file"
    return _native


def best_level(cap: int = BEST) -> int:
    """The highest level that this machine has, no higher than the cap."""
    return _native.int8_level(cap) if cap >= 0 and is_built() else -1


@functools.cache
def chosen_level() -> int:
    """The level that runs unless a caller says otherwise."""
    level = best_level()
    if level < 0:
        log.warning("native operations are %s; slow definitions take their place (run `make native`)",
                    "not built" if _native is None else "of another version")
    else:
        log.info("native operations: %s", LEVELS[level])
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
