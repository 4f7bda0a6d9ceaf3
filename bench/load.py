"""How long until the first token, and how fast are weights read?

Cold start: from `tripool serve` as a new process to the first token of a first request, on the embedded model
(new processes; the files may be in the page cache). Load rate: a synthetic BF16 checkpoint of the family is checked and
read into a model's tensors, in turn with reading the same files by plain `readinto` into fresh memory; once as stored,
and once widened to float32, which writes twice the bytes. Plain reading gets memory of large pages, the quicker kind
(and of ordinary pages, for comparison). A virtual machine may get its memory from the host when it is first touched,
which costs more than reading: before each measurement as much as any of them needs is touched and freed.

    make bench NAME=load ARGS='--json out/load.json'
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from common import ROOT, Report, flags, in_turn, median
from tests.checkpoints import tiny_config, write_checkpoint
from tripool.core.deployment import Deployment, GatewayConfig, InstanceConfig
from tripool.engine.checkpoint import open_checkpoint
from tripool.engine.load import compute_dtype
from tripool.engine.model.layout import weight_plan
from tripool.engine.threads import set_threads
from tripool.engine.weights import load_weights
from tripool.serve.launch import free_port

DEADLINE_S = 120.0


def cold_start_s() -> float:
    """From the command to the first token."""
    port = free_port(Deployment(gateway=GatewayConfig(port=0), hybrid=InstanceConfig(count=1)))
    command = [sys.executable, "-m", "tripool.cli.main", "serve", "--hybrid", "1", "--port", str(port)]
    begun = time.perf_counter()
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    body = json.dumps({"model": "tripool-tiny", "prompt": "Once upon a time", "max_tokens": 1}).encode()
    try:
        while time.perf_counter() - begun < DEADLINE_S:
            try:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body,
                                                 {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=30) as answer:
                    assert json.load(answer)["usage"]["completion_tokens"] == 1
                    return time.perf_counter() - begun
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.02)
        raise SystemExit(f"no token within {DEADLINE_S:.0f} s")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def fresh(size: int, advice: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    return memory


def touch(size: int) -> None:
    memory = fresh(size, mmap.MADV_HUGEPAGE)
    for at in range(0, size, mmap.PAGESIZE):
        memory[at] = 1
    memory.close()


def plain_read(folder: Path, advice: int) -> float:
    """Bytes per second of reading all weight files, each into its own new memory."""
    begun = time.perf_counter()
    total, kept = 0, []
    for path in sorted(folder.glob("*.safetensors")):
        view, at = memoryview(fresh(path.stat().st_size, advice)), 0
        with path.open("rb", buffering=0) as file:
            while at < len(view):
                at += file.readinto(view[at:])
        kept.append(view)
        total += len(view)
    return total / (time.perf_counter() - begun)


def loading(folder: Path, dtype: str) -> float:
    """Bytes per second, of those stored, of checking the folder and reading it into a model's tensors."""
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    begun = time.perf_counter()
    checkpoint = open_checkpoint(folder)
    loaded = load_weights(checkpoint, weight_plan(checkpoint.shape), compute_dtype(checkpoint, dtype))
    elapsed = time.perf_counter() - begun
    del loaded
    return total / elapsed


def main() -> None:
    parser = flags(__doc__.splitlines()[0])
    args = parser.parse_args()
    rounds = 2 if args.quick else 7
    report = Report(__doc__.splitlines()[0], {"rounds": rounds, "cores": os.cpu_count()})
    starts = [cold_start_s() for _ in range(rounds)]
    report.figure("load.cold_start_s", median(starts), "s", samples=starts, bar="<= 8")
    set_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = dict(hidden_size=512, num_hidden_layers=6, n_routed_experts=16, moe_intermediate_size=512)
        if not args.quick:
            size = dict(hidden_size=1024, num_hidden_layers=10, n_routed_experts=64, moe_intermediate_size=512,
                        n_group=8, topk_group=4, intermediate_size=4096, vocab_size=32000)
        write_checkpoint(folder, tiny_config("v3", **size), num_shards=4)
        stored_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        report.parameters = {**report.parameters, "checkpoint_bytes": stored_bytes}
        legs = {
            "plain": lambda: plain_read(folder, mmap.MADV_HUGEPAGE),
            "plain_small_pages": lambda: plain_read(folder, mmap.MADV_NOHUGEPAGE),
            "bfloat16": lambda: loading(folder, "bfloat16"),
            "float32": lambda: loading(folder, "float32"),
        }
        found: dict[str, list[float]] = {which: [] for which in legs}
        for number, which in in_turn(list(legs), 2 * rounds + 1):
            touch(2 * stored_bytes + (64 << 20))
            rate = legs[which]()
            if number:
                found[which].append(rate / 1e9)
    for which, rates in found.items():
        report.figure(f"load.{which}_gb_per_s", median(rates), "GB/s", samples=rates)
    bar = {"bar": ">= 0.8"}
    for which, name, more in (("bfloat16", "load.rate_ratio", bar), ("float32", "load.rate_ratio_f32", {})):
        ratios = [ours / plain for ours, plain in zip(found[which], found["plain"], strict=True)]
        report.figure(name, median(ratios), "ratio", samples=ratios, **more)
    report.write(args.json)


if __name__ == "__main__":
    main()
