"""The kernel tests once more, with a native module that looks for bad addresses and undefined behaviour."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.ops.builders import compiler_library

ROOT = Path(__file__).parents[3]
KERNEL_TESTS = ("tests/engine/ops", "tests/engine/parallel/test_native.py", "tests/engine/test_levels.py",
                "tests/engine/model/test_one_call.py", "tests/engine/test_step.py")
TEST_LIMIT_S = 1200
RUN = """
import importlib.util, sys
import pytest
import tripool
spec = importlib.util.spec_from_file_location("tripool._native", sys.argv[1])
sys.modules["tripool._native"] = tripool._native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tripool._native)
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-m", "not slow", *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_kernels_are_clean_under_sanitizers(tmp_path):
    libraries = [compiler_library("libasan.so"), compiler_library("libubsan.so")]
    if not all(libraries):
        pytest.skip("there is no C++ compiler with address and undefined-behaviour sanitizers")
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp",
                    str(tmp_path / "build")], cwd=ROOT, check=True,
                   env={**os.environ, "CFLAGS": flags, "LDFLAGS": flags})
    built = list((tmp_path / "lib").rglob("_native*.so"))
    assert built, "the module does not build with sanitizers"
    run = subprocess.run([sys.executable, "-c", RUN, str(built[0]), f"--timeout={TEST_LIMIT_S}", *KERNEL_TESTS],
                         cwd=ROOT, capture_output=True, text=True, check=False,
                         env={**os.environ, "LD_PRELOAD": " ".join(libraries), "PYTHONPATH": str(ROOT),
                              "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"})
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-8000:]
