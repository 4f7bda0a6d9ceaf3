"""The native half of the package; everything else is in pyproject.toml.

It is optional: without a compiler, or on another machine than Linux on x86-64, the package installs all the same and
runs its slow definitions. The module keeps to Python's stable interface and to no instruction set: it looks for what
the machine has when it is loaded.
"""

import platform
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

SOURCES = sorted(str(path) for path in Path("tripool/engine").glob("*/csrc/*.cpp"))
HEADERS = sorted(str(path) for path in Path("tripool/engine").glob("*/csrc/*.h"))

native = Extension(
    "tripool._native", SOURCES, depends=HEADERS, language="c++", optional=True, py_limited_api=True,
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    extra_compile_args=["-O3", "-std=c++17", "-Wall", "-fno-strict-aliasing", "-ffp-contract=off",
                        "-fvisibility=hidden"],
)
suited = sys.platform == "linux" and platform.machine() == "x86_64" and not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(ext_modules=[native] if suited else [],
      options={"bdist_wheel": {"py_limited_api": "cp311"}} if suited else {})
