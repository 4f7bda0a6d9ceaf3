"""A level is told with what keeps the machine from a higher one."""

import platform
import subprocess
import sys

import pytest

from tripool.engine.ops import levels, native

ZEN3 = {"avx2", "fma"}
CASCADE_LAKE = {*ZEN3, "avx512f", "avx512bw", "avx512vl", "avx512_vnni"}
SAPPHIRE_RAPIDS = {*CASCADE_LAKE, "amx_tile", "amx_int8"}


@pytest.mark.parametrize(("flags", "level", "words"), [
    (set(), 0, "plain (no AVX2 on this processor)"),
    ({"avx2"}, 0, "plain (no fma on this processor)"),
    (ZEN3, 1, "AVX2 (no AVX-512 VNNI on this processor)"),
    (CASCADE_LAKE - {"avx512_vnni"}, 1, "AVX2 (no avx512_vnni on this processor)"),
    (CASCADE_LAKE, 2, "AVX-512 VNNI (no AMX INT8 on this processor)"),
    (SAPPHIRE_RAPIDS, 2, "AVX-512 VNNI (AMX INT8 cannot be used here)"),
    (SAPPHIRE_RAPIDS, 3, "AMX INT8")])
def test_the_missing_feature_is_named(monkeypatch, flags, level, words):
    monkeypatch.setattr(levels, "processor_flags", lambda: flags)
    assert levels.explained(level) == words


@pytest.mark.parametrize(("system", "machine", "words"), [
    ("Linux", "x86_64", "slow definitions (not built; run `make native`)"),
    ("Linux", "aarch64", "slow definitions (compiled for Linux on x86-64 alone, and this is Linux on aarch64)"),
    ("Darwin", "x86_64", "slow definitions (compiled for Linux on x86-64 alone, and this is Darwin on x86_64)")])
def test_where_nothing_is_compiled_it_says_why(monkeypatch, system, machine, words):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert levels.explained(-1) == words


def test_the_machines_own_level_is_told_without_torch():
    assert levels.level_here() == native.best_level()
    code = "import sys; from tripool.engine.ops import levels; levels.level_here(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_what_keeps_this_processor_from_a_level_is_what_the_compiled_half_asks():
    """The names here and the questions there are two lists of one thing."""
    if not native.is_built():
        pytest.skip("the native module is not built")
    level, flags = native.best_level(), levels.processor_flags()
    assert all(flags.issuperset(levels.NEEDED[each]) for each in range(1, level + 1))
    assert level == native.BEST or "cannot be used" in levels.explained(level) or not flags.issuperset(
        levels.NEEDED[level + 1])
