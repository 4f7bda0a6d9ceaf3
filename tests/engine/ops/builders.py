"""Rows, weights and levels for the tests of operations: everything from one generator."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.ops.expert_ffn import Int8Experts, pack_experts
from tripool.engine.ops.int8_linear import Int8Weight, pack
from tripool.engine.parallel.quantise import quantise

ROWS = (0, 1, 2, 3, 5, 16, 17, 64, 200)


def level_params() -> list[object]:
    """Every compiled level; one that cannot run here is skipped and says why."""
    def why(level: int) -> str:
        return ("the native module is not built" if not native.is_built() else
                f"this processor has no {native.LEVELS[level]}" if native.best_level(level) < level else "")

    return [pytest.param(level, id=native.LEVELS[level], marks=pytest.mark.skipif(bool(why(level)), reason=why(level)))
            for level in native.LEVELS if level >= 0] + [
        pytest.param(native.AMX_EMULATED, id="AMX emulated",
                     marks=pytest.mark.skipif(not native.is_built(), reason="the native module is not built"))]


LEVELS = level_params()


def generator(*seed: int) -> torch.Generator:
    number = 0
    for each in seed:
        number = number * 8191 + each
    return torch.Generator().manual_seed(number)


def rows(num_rows: int, width: int, chance: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of different lengths, among them zeros, and (from five on) tiny and huge ones."""
    x = torch.randn(num_rows, width, generator=chance) * torch.rand(num_rows, 1, generator=chance).mul(20).sub(10).exp()
    if num_rows > 4:
        x[1], x[2], x[3] = 0.0, x[2] * 1e-35, x[3] * 1e25
    return x.to(dtype)


KINDS_OF_LOGITS = ("normal", "flat", "peaked", "ties", "equal", "masked", "broken")


def logits_of(kind: str, count: int, num_tokens: int, chance: torch.Generator) -> Tensor:
    logits = torch.randn(count, num_tokens, generator=chance)
    match kind:
        case "flat":
            return logits * 0.01
        case "peaked":
            return logits * 7
        case "ties":
            return (logits * 3).round() / 2
        case "equal":
            return torch.full_like(logits, -1.5)
        case "masked":
            return logits.masked_fill(torch.rand(count, num_tokens, generator=chance) < 0.98, -torch.inf)
        case "broken":
            odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3e38, -3e38])
            which = torch.randint(0, 14, logits.shape, generator=chance)
            kinds = 1 + torch.randint(0, 7, (count, 1), generator=chance)        # some rows have neither inf nor NaN
            logits = torch.where(which < 7, odd[(which % 7 - kinds) % 7], logits)
            logits[::5] = torch.where(which[::5] < 7, -torch.inf, torch.nan)
            return logits
    return logits


def matrix(num_outputs: int, num_inputs: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """All values that int8 has, -128 too, and a scale for each output."""
    q = torch.randint(-128, 128, (num_outputs, num_inputs), dtype=torch.int8, generator=chance)
    return q, torch.rand(num_outputs, generator=chance) + 0.1


def weight(num_outputs: int, num_inputs: int, chance: torch.Generator) -> Int8Weight:
    return pack(*matrix(num_outputs, num_inputs, chance))


def experts(num_experts: int, width: int, hidden: int, chance: torch.Generator) -> Int8Experts:
    """Experts as a quantised model has them."""
    gate_up, gate_up_scale = quantise(torch.randn(num_experts, 2 * hidden, width, generator=chance) / width ** 0.5)
    down, down_scale = quantise(torch.randn(num_experts, width, hidden, generator=chance) / hidden ** 0.5)
    return pack_experts(gate_up, gate_up_scale, down, down_scale)


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal to the bit, except that one NaN is like another."""
    return found.dtype == expected.dtype and torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.nan_to_num(0.0), expected.nan_to_num(0.0))


FLOATS = [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bfloat16")]


def close(found: Tensor, expected: Tensor, near: float | Tensor = 0.0) -> bool:
    """Equal but for some rounding: each number to a few units in its last place, or in that of `near`."""
    unit = 2.0**-7 if found.dtype == torch.bfloat16 else 2.0**-20
    off = (found.float() - expected.float()).abs()
    finite = expected.isfinite()
    largest = expected.float().nan_to_num(0.0, 0.0, 0.0).abs()
    return found.dtype == expected.dtype and found.shape == expected.shape and bool(
        (off <= unit * (largest + near))[finite].all()) and same(found[~finite], expected[~finite])


def compiler_library(name: str) -> str:
    """Where the compiler keeps one of its libraries, or nothing."""
    try:
        found = subprocess.run(["c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.strip() if os.path.isabs(found.strip()) else ""
