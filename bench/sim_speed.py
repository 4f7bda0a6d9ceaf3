"""How fast is the simulation? A trace of an hour beside another simulator, and a supernode for ten minutes.

`trace`: the whole Mooncake conversation trace on 4 prefill and 4 decode instances, by `tripool`'s simulation and, where
there is an environment with it, by `dynamo.replay` (ai-dynamo 1.4.2, a Rust engine) with as many workers, blocks of the
same size and as many of them. They take turns, each in a process of its own on the same core; rates are requests over
the seconds inside each tool, without its start and without reading the trace.

`supernode`: 384 NPUs (14 prefill instances of 32 dies, one decode instance of 320), filled to 30,000 requests at once
and kept there, for 10 simulated minutes.

Prices of steps are linear ones, chosen here to be near the other tool's; latencies mean nothing beyond that.

    make bench NAME=sim_speed ARGS='--trace conversation_trace.jsonl --dynamo-python ENV/bin/python --json out/sim.json'
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Report, flags, in_turn, median
from tripool.core.deployment import CacheConfig, Deployment, GatewayConfig, InstanceConfig
from tripool.sim.outcome import Slo, outcome
from tripool.sim.pricing import LinearCosts, Plane, Planes
from tripool.sim.requests import Workload
from tripool.sim.simulation import Rig, Simulation
from tripool.sim.synthetic import SyntheticWork
from tripool.sim.traces import read_workload

DYNAMO_VERSION = "1.4.2"
BLOCK_TOKENS = 512                     # of the trace
WORKER_BLOCKS = 16384                  # what dynamo.replay gives each worker
BARS = {"sim.mooncake_trace_s": "<= 30", "sim.vs_dynamo_replay": ">= 0.5", "sim.supernode_10min_s": "<= 300"}
SLO = Slo(ttft_s=2.0, tpot_s=0.05)

PLANES = Planes({"ub": Plane(98e9, 2e-6), "rdma": Plane(25e9, 5e-6), "vpc": Plane(5e9, 100e-6)}, "rdma", "ub", "vpc")
NO_CAPS = GatewayConfig(max_queued_requests=1_000_000, max_queued_tokens=10**12, place_deadline_s=600.0,
                        prefill_deadline_s=600.0)

# Nobody asks for the context of answers, which the trace does not tell: decode instances neither keep nor store it.
TRACE_DEPLOYMENT = Deployment(
    gateway=NO_CAPS, block_tokens=BLOCK_TOKENS, heartbeat_s=1.0,
    prefill=InstanceConfig(count=4, max_num_seqs=256, max_num_batched_tokens=8192,
                           cache_tokens=WORKER_BLOCKS * BLOCK_TOKENS),
    decode=InstanceConfig(count=4, max_num_seqs=256, max_num_batched_tokens=8192,
                          cache_tokens=WORKER_BLOCKS * BLOCK_TOKENS, enable_prefix_caching=False),
    cache=CacheConfig(count=2, bytes=2 << 40))
TRACE_COSTS = LinearCosts(step_s=5.5e-3, row_s=15e-6, context_token_s=2e-9, chunk_token_s=25e-6)
TRACE_RIG = Rig({"prefill": TRACE_COSTS, "decode": TRACE_COSTS}, PLANES, token_bytes=70_272)

# Two dies to an NPU; a die of the decode instance has 96 rows of up to about 8,000 tokens.
SUPERNODE = Deployment(
    gateway=NO_CAPS, block_tokens=128, heartbeat_s=1.0,
    prefill=InstanceConfig(count=14, ranks=32, max_num_seqs=16, max_num_batched_tokens=16384, cache_tokens=400_000),
    decode=InstanceConfig(count=1, ranks=320, max_num_seqs=96, max_num_batched_tokens=1024, cache_tokens=800_000,
                          enable_prefix_caching=False),
    cache=CacheConfig(count=32, bytes=64 << 30))
SUPERNODE_RIG = Rig({"prefill": LinearCosts(step_s=20e-3, chunk_token_s=350e-6),
                     "decode": LinearCosts(step_s=10e-3, row_s=300e-6, context_token_s=25e-9)},
                    PLANES, token_bytes=70_272, npus_per_rank=0.5)
FILL = SyntheticWork(110.0, 275.0, prompt_tokens=3072, output_tokens=4096, spread=0.3)
KEEP = SyntheticWork(490.0, 134.0, prompt_tokens=3072, output_tokens=4096, spread=0.3, start_s=110.0)


def supernode_work() -> Workload:
    """First as fast as they can be prefilled, then as fast as they end."""
    fill, keep = FILL.draw(1).requests, KEEP.draw(2).requests
    later = tuple(replace(each, parts=((each.parts[0][0] + len(fill), each.parts[0][1]),)) for each in keep)
    return Workload("synthetic", fill + later)


def simulated(name: str, trace: str, limit: int | None, seconds: float) -> dict[str, Any]:
    """One run, in this process."""
    if name == "trace":
        simulation = Simulation(TRACE_DEPLOYMENT, read_workload(Path(trace), limit=limit), TRACE_RIG)
        until_s = None
    else:
        simulation, until_s = Simulation(SUPERNODE, supernode_work(), SUPERNODE_RIG), seconds
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    simulation.run(until_s=until_s)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    told = outcome(simulation, SLO)
    told.pop("timeline"), told.pop("distribution")
    return {"wall_s": wall_s, "cpu_s": cpu_s, "requests": len(simulation.users.journeys),
            "most_open": max(sum(each.num_open.values()) for each in simulation.samples),
            "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "events": simulation.host.num_events, "figures": told}


def replayed(python: str, trace: str) -> dict[str, Any]:
    """The trace by dynamo.replay."""
    prefill, decode = (json.dumps({"block_size": BLOCK_TOKENS, "num_gpu_blocks": WORKER_BLOCKS, "worker_type": kind})
                       for kind in ("prefill", "decode"))
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "report.json"
        done = subprocess.run(
            [python, "-m", "dynamo.replay", trace, "--num-prefill-workers", "4", "--num-decode-workers", "4",
             "--replay-mode", "offline", "--router-mode", "kv_router", "--sla-ttft-ms", "2000", "--sla-itl-ms", "50",
             "--prefill-engine-args", prefill, "--decode-engine-args", decode, "--report-json", str(told)],
            env=os.environ | {"DYN_LOG": "error"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False)
        if done.returncode:
            raise SystemExit(f"dynamo.replay failed:\n{done.stdout[-2000:]}")
        figures = json.loads(told.read_text())
    return {"wall_s": figures["wall_time_ms"] / 1e3, "requests": figures["completed_requests"], "figures": figures}


def in_process(*words: str) -> dict[str, Any]:
    """A run of this script in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def dynamo_version(python: str) -> str:
    done = subprocess.run([python, "-c", "import importlib.metadata as m; print(m.version('ai-dynamo'))"],
                          stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    parser = flags("How fast is the simulation?")
    parser.add_argument("--trace", metavar="FILE", required=True, help="the Mooncake conversation trace, whole")
    parser.add_argument("--dynamo-python", metavar="PATH", default="", help="python of an environment that has "
                        f"ai-dynamo {DYNAMO_VERSION}; without it nothing is compared")
    parser.add_argument("--rounds", type=int, default=3, help="readings of each tool")
    parser.add_argument("--only", choices=("trace", "supernode"), help="one of the two")
    parser.add_argument("--run", choices=("trace", "supernode"), help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=600.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(simulated(args.run, args.trace, args.limit, args.seconds)))
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})          # one core, for children too
    report = Report("How fast is the simulation, beside another and on a whole supernode?", {
        "trace_deployment": "4 prefill + 4 decode instances of 1 rank, blocks of 512 tokens, 16,384 of them each",
        "supernode": "14 x 32 prefill and 320 decode dies, 30,000 requests at once, 3,072 + 4,096 tokens on average",
        "quick": args.quick, "rounds": args.rounds})
    if args.only != "supernode":
        bench_trace(report, args)
    if args.only != "trace":
        bench_supernode(report, args)
    report.write(args.json)


def bench_trace(report: Report, args: argparse.Namespace) -> None:
    if args.dynamo_python and dynamo_version(args.dynamo_python) != DYNAMO_VERSION:
        raise SystemExit(f"{args.dynamo_python} has ai-dynamo {dynamo_version(args.dynamo_python)}; "
                         f"install {DYNAMO_VERSION}")
    limit = ["--limit", "1000"] if args.quick else []
    names = ["tripool"] + (["dynamo"] if args.dynamo_python and not args.quick else [])
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _, name in in_turn(names, 1 if args.quick else args.rounds):
        if name == "tripool":
            runs[name].append(in_process("--run", "trace", "--trace", args.trace, *limit))
        else:
            runs[name].append(replayed(args.dynamo_python, args.trace))
    rates = {name: [each["requests"] / each["wall_s"] for each in runs[name]] for name in names}
    ours = runs["tripool"]
    report.figure("sim.mooncake_trace_s", median([each["wall_s"] for each in ours]), "s",
                  samples=[each["wall_s"] for each in ours], bar=BARS["sim.mooncake_trace_s"])
    report.figure("sim.mooncake_requests_per_s", median(rates["tripool"]), "requests/s", samples=rates["tripool"])
    report.figure("sim.mooncake_memory_mb", median([each["memory_bytes"] / 1e6 for each in ours]), "MB")
    if "dynamo" in runs:
        report.figure("sim.dynamo_replay_requests_per_s", median(rates["dynamo"]), "requests/s",
                      samples=rates["dynamo"], version=f"ai-dynamo {DYNAMO_VERSION}")
        ratios = [mine / theirs for mine, theirs in zip(rates["tripool"], rates["dynamo"], strict=True)]
        report.figure("sim.vs_dynamo_replay", median(ratios), "x", "derived", samples=ratios,
                      bar=BARS["sim.vs_dynamo_replay"])
    told, cache = ours[0]["figures"], ours[0]["figures"]["cache"]
    report.figure("sim.mooncake_reused_share", cache["instance_hit_share"] + cache["pool_hit_share"], "part",
                  "simulated")
    report.figure("sim.mooncake_ttft_p50_s", told["latency"]["ttft_s"]["p50"], "s", "simulated")
    report.figure("sim.mooncake_itl_p50_s", told["latency"]["itl_s"]["p50"], "s", "simulated")


def bench_supernode(report: Report, args: argparse.Namespace) -> None:
    seconds = "30" if args.quick else "600"
    run = in_process("--run", "supernode", "--trace", args.trace, "--seconds", seconds)
    report.figure("sim.supernode_10min_s" if not args.quick else "sim.supernode_30s_s", run["wall_s"], "s",
                  samples=[run["wall_s"]], **({} if args.quick else {"bar": BARS["sim.supernode_10min_s"]}))
    report.figure("sim.supernode_cpu_s", run["cpu_s"], "s")
    report.figure("sim.supernode_most_requests", run["most_open"], "requests", "simulated")
    report.figure("sim.supernode_tokens_per_s", run["figures"]["pools"]["decode"]["decode_tokens"] / run["wall_s"],
                  "tokens/s", "derived")
    report.figure("sim.supernode_memory_mb", run["memory_bytes"] / 1e6, "MB")
    report.figure("sim.supernode_itl_p50_s", run["figures"]["latency"]["itl_s"]["p50"], "s", "simulated")


if __name__ == "__main__":
    main()
