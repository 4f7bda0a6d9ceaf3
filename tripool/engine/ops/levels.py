"""Levels of compiled operations: what each asks of a processor, and why no higher one runs.

Told without torch, so that commands which compute nothing can tell too. No setting asks for a level: the best one runs,
and a processor without even the first one is told which feature it lacks.
"""

from __future__ import annotations

import importlib
import platform

from tripool.engine.element_type import processor_flags

LEVELS = {-1: "slow definitions", 0: "plain", 1: "AVX2", 2: "AVX-512 VNNI", 3: "AMX INT8"}
BEST = max(LEVELS)
NEEDED = {1: ("avx2", "fma"), 2: ("avx512f", "avx512bw", "avx512vl", "avx512_vnni"), 3: ("amx_tile", "amx_int8")}
"""Features as the kernel calls them, beside those of the level below."""


def level_here() -> int:
    """The best level that this machine has, by its processor alone; -1 without the compiled half."""
    try:
        native = importlib.import_module("tripool._native")
    except ImportError:
        return -1
    return int(native.int8_level(BEST)) if hasattr(native, "int8_level") else -1         # an old one has none


def explained(level: int) -> str:
    """The name of a level that runs here, and why no higher one does."""
    why = why_not_higher(level)
    return f"{LEVELS[level]} ({why})" if why else LEVELS[level]


def why_not_higher(level: int) -> str:
    """Empty for the highest."""
    if level < 0:
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            return f"compiled for Linux on x86-64 alone, and this is {platform.system()} on {platform.machine()}"
        return "not built; run `make native`"
    if level >= BEST:
        return ""
    flags, higher = processor_flags(), LEVELS[level + 1]
    lacking = [feature for feature in NEEDED[level + 1] if feature not in flags]
    if not lacking:
        return f"{higher} cannot be used here"
    return f"no {higher if len(lacking) == len(NEEDED[level + 1]) else ', '.join(lacking)} on this processor"
