"""What does the server add to the engine, and how does it do beside other servers?

The same batches go in turn to the engine called in this process and, over HTTP, to a server with the same
engine settings (`hybrid`): time to the first token and between tokens at concurrency 1, output tokens per
second at 1, 8 and 32. Then 1P1D, idle: from the end of a request's last prefill step to the start of its
first decode step, taken from recordings of both processes (one clock serves the machine).

Beside other servers, if their folders are given: ours and the OpenAI servers of vLLM and llama.cpp, each with the
same number of threads, one after the other in every round, so that each is up alone. A reading is as many requests as
are under way at once, streamed, of 64 random tokens and 64 more at temperature 1 without any cut: greedy
continuations of random weights fall into loops in which rows share experts. A smaller batch goes before, to warm up.
`tripool-...-1p1d` is a prefill, a decode and a cache process, as the product starts by itself on 4 cores or more,
each instance with half of the threads. Ours in INT8 read the output head in eight bits too, as Q8_0 does. Ratios are
of the same round, of our better INT8 deployment to the peer that leaves it the least.

    python bench/serve.py --json out/serve.json
    python bench/serve.py --json out/serve.json --beside ckpt/mid --beside-int8 ckpt/mid-w8a8 \\
        --vllm .venv/engines/vllm --llamacpp .venv/engines/llamacpp
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common import Report, flags, in_turn, median
from peers import drive_llamacpp, drive_vllm
from peers.servers import ServerFailed, free_port, ours, peer
from tripool.cli.client import Server
from tripool.cli.load import Arrivals, Job, run_load
from tripool.core import messages as m
from tripool.core.deployment import CacheConfig, Deployment, GatewayConfig, InstanceConfig, ModelConfig
from tripool.core.errors import TripoolError
from tripool.core.request import Limits, Request, Sampling, pack_tokens
from tripool.serve.budget import usable_cores
from tripool.serve.launch import LaunchOptions, launch
from tripool.serve.offline import Offline
from tripool.serve.recording import read_recording

VOCAB = (16, 4000)
PROMPT_TOKENS = 64
READY_S = 120.0
CONCURRENCIES = (1, 8, 32)
SERVED = "tripool-tiny"

OURS_INT8 = ("tripool-int8", "tripool-int8-1p1d")
PEERS = ("llamacpp-q8_0", "llamacpp-bf16", "vllm-bf16", "vllm-float32", "vllm-int8")
SERVERS = (*OURS_INT8, "tripool-bf16", *PEERS)
CONTEXT = 512                      # of a request, more than it needs
UNCUT = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
WARM_TOKENS = 4
THROUGHPUT_BAR, P99_BAR = ">= 1.5", "<= 1"


@dataclass
class Batch:
    """What one batch of equal requests showed."""

    ttft_ms: float
    itl_ms: float
    tokens_per_s: float
    itl_p99_ms: float = 0.0


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Fresh random prompts, so that no cached prefix helps anybody."""
    return [[rng.randrange(*VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def in_process(engine: Offline, asked: list[list[int]], num_tokens: int) -> Batch:
    """A batch through the engine in this process."""
    arrived: dict[int, list[float]] = {}

    def on_output(output: m.Output) -> None:
        if output.tokens:
            arrived.setdefault(output.request_id, []).append(time.perf_counter())

    requests = [Request(i, pack_tokens(prompt), Sampling(temperature=0), Limits(num_tokens), salt=b"bench")
                for i, prompt in enumerate(asked, start=time.monotonic_ns())]
    begun = time.perf_counter()
    engine.generate(requests, on_output)
    elapsed = time.perf_counter() - begun
    gaps = [after - before for times in arrived.values() for before, after in itertools.pairwise(times)]
    return Batch(median([times[0] - begun for times in arrived.values()]) * 1e3, median(gaps) * 1e3,
                 len(asked) * num_tokens / elapsed)


def over_http(server: Server, asked: list[list[int]], num_tokens: int, model: str = SERVED,
              sampling: Mapping[str, float] | None = None) -> Batch:
    """The same batch through a server, streamed; greedy unless `sampling` says otherwise.

    Raises:
        ServerFailed: a request did not end well.
    """
    jobs = [Job("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True,
                                    **(sampling or {"temperature": 0})}) for prompt in asked]
    run = asyncio.run(run_load(server, jobs, Arrivals()))
    outcomes = run.ended_well
    if len(outcomes) < len(jobs):
        raise ServerFailed(f"requests failed: {sorted({each.failure for each in run.outcomes if each.failure})}")
    came = {each.num_tokens for each in outcomes}
    if came != {num_tokens}:
        raise ServerFailed(f"{sorted(came)} tokens came, not {num_tokens} for each request")
    gaps = [gap for each in outcomes for gap in each.itl_s]
    return Batch(median([each.ttft_s for each in outcomes]) * 1e3, median(gaps) * 1e3,
                 sum(each.num_tokens for each in outcomes) / run.duration_s, percentile_99(gaps) * 1e3)


def percentile_99(readings: Sequence[float]) -> float:
    return statistics.quantiles(readings, n=100, method="inclusive")[-1] if len(readings) > 1 else readings[0]


def handovers_ms(folder: Path) -> list[float]:
    """End of the step that gave a request's first token on the prefill side, to the start of its first decode step."""
    prefilled: dict[int, float] = {}
    started: dict[int, float] = {}
    for path in folder.iterdir():
        member = path.name.partition("-")[0]
        if member not in ("prefill", "decode"):
            continue
        for record in read_recording(path)[1]:
            for send in record.sends:
                if member == "prefill" and isinstance(send.message, m.Prefilled):
                    prefilled[send.message.request_id] = record.now
                elif member == "decode" and isinstance(send.message, m.Run):
                    for section in send.message.plan.sections:
                        for join in section.joins:
                            started.setdefault(join.request_id, record.now)
    return [(started[each] - prefilled[each]) * 1e3 for each in sorted(prefilled) if each in started]


def add_to_engine(report: Report, args: argparse.Namespace) -> None:
    rounds, num_tokens = (3, 32) if args.quick else (11, 64)
    rounds_alone = 8 * rounds            # one request is soon answered, and milliseconds are looked for
    model = ModelConfig(path=args.model, served_name=SERVED)
    instance = InstanceConfig(threads=args.threads, max_num_seqs=32)
    deployment = Deployment(model=model, gateway=GatewayConfig(port=0), hybrid=replace(instance, count=1))
    report.parameters = {**report.parameters, "output_tokens": num_tokens, "rounds": rounds,
                         "rounds_alone": rounds_alone, "threads": args.threads}
    rng = random.Random(0)
    engine = Offline(deployment)
    with launch(deployment, LaunchOptions(log_level="error")) as fleet:
        fleet.wait_ready(READY_S)
        where = urlsplit(fleet.url)
        server = Server(where.hostname or "", where.port or 0)
        for concurrency in CONCURRENCIES:
            found: dict[str, list[Batch]] = {"engine": [], "server": []}
            alone = concurrency == 1
            for number, name in in_turn(("engine", "server"), (rounds_alone if alone else rounds) + 1):
                asked = prompts(rng, concurrency)
                length = num_tokens // 4 if alone else num_tokens
                batch = in_process(engine, asked, length) if name == "engine" else over_http(server, asked, length)
                if number:                   # the first round warms both up
                    found[name].append(batch)
            if alone:
                ttft = [s.ttft_ms - e.ttft_ms for s, e in zip(found["server"], found["engine"], strict=True)]
                itl = [s.itl_ms - e.itl_ms for s, e in zip(found["server"], found["engine"], strict=True)]
                report.figure("serve.ttft_added_ms_p50_c1", median(ttft), "ms", samples=ttft, bar="<= 3")
                report.figure("serve.itl_added_ms_p50_c1", median(itl), "ms", samples=itl, bar="<= 1")
            for name, batches in found.items():
                for what, unit in (("ttft_ms", "ms"), ("itl_ms", "ms"), ("tokens_per_s", "tokens/s")):
                    readings = [getattr(batch, what) for batch in batches]
                    report.figure(f"serve.{name}_{what}_c{concurrency}", median(readings), unit, samples=readings)
            ratios = [s.tokens_per_s / e.tokens_per_s for s, e in zip(found["server"], found["engine"], strict=True)]
            more = {"bar": ">= 0.85"} if concurrency == 32 else {}
            report.figure(f"serve.throughput_ratio_c{concurrency}", median(ratios), "ratio", samples=ratios, **more)
    engine.close()

    split = Deployment(model=model, gateway=GatewayConfig(port=0), prefill=replace(instance, count=1),
                       decode=replace(instance, count=1), cache=CacheConfig(count=1))
    with tempfile.TemporaryDirectory() as folder:
        with launch(split, LaunchOptions(log_level="error", record_dir=folder)) as fleet:
            fleet.wait_ready(READY_S)
            where = urlsplit(fleet.url)
            server = Server(where.hostname or "", where.port or 0)
            over_http(server, prompts(rng, 1), 4)
            for _ in range(10 if args.quick else 40):
                over_http(server, prompts(rng, 1), 4)
                time.sleep(0.05)
        readings = handovers_ms(Path(folder))[1:]
        report.figure("serve.handover_ms_p50", median(readings), "ms", samples=readings, bar="<= 5")


# ------------------------------------------------------------------------------- beside other servers


@dataclass(frozen=True)
class Candidate:
    """A server that can be started: the name of its model, and how."""

    model: str
    start: Callable[[], AbstractContextManager[Server]]


def candidates(args: argparse.Namespace) -> tuple[dict[str, Candidate], dict[str, str]]:
    """The servers to compare, and why others are not."""
    found: dict[str, Candidate] = {}
    not_run: dict[str, str] = {}
    for name in SERVERS:
        engine, _, weights = name.partition("-")
        env = {"llamacpp": args.llamacpp, "vllm": args.vllm}.get(engine)
        folder = args.beside_int8 if weights.startswith("int8") else args.beside
        if name not in args.servers:
            not_run[name] = "left out by --servers"
        elif folder is None:
            not_run[name] = f"no folder was given ({'--beside-int8' if weights.startswith('int8') else '--beside'})"
        elif engine == "tripool":
            found[name] = Candidate(SERVED, lambda made=our_deployment(name, folder, args.beside_threads): ours(made))
        elif env is None:
            not_run[name] = f"no environment was given (--{engine})"
        else:
            found[name] = Candidate(folder.name, lambda engine=engine, weights=weights, env=env, folder=folder: other(
                engine, weights, env.absolute(), folder.absolute(), args.beside_threads))
    return found, not_run


def our_deployment(name: str, folder: Path, threads: int) -> Deployment:
    most = max(CONCURRENCIES)
    split = name.endswith("-1p1d")
    instance = InstanceConfig(count=1, threads=max(1, threads // 2) if split else threads, max_num_seqs=most,
                              max_num_batched_tokens=max(most * PROMPT_TOKENS, CONTEXT), cache_tokens=most * CONTEXT)
    roles: dict[str, Any] = {"hybrid": instance}
    if split:
        roles = {"prefill": instance, "decode": instance, "cache": CacheConfig(count=1)}
    model = ModelConfig(path=str(folder), served_name=SERVED, head_dtype="int8" if name in OURS_INT8 else "auto")
    return Deployment(model=model, gateway=GatewayConfig(port=0), **roles)


def other(engine: str, weights: str, env: Path, folder: Path, threads: int) -> AbstractContextManager[Server]:
    port, most = free_port(), max(CONCURRENCIES)
    if engine == "llamacpp":
        return peer(drive_llamacpp.server_command(env, folder, weights, port, threads, most, CONTEXT), {}, port)
    dtype = "float32" if weights == "float32" else "auto"
    return peer(drive_vllm.server_command(env, folder, port, most, CONTEXT, dtype),
                drive_vllm.environment(env, threads), port)


Readings = dict[int, dict[str, dict[int, Batch]]]
"""By concurrency, server and round."""


def beside_others(report: Report, args: argparse.Namespace) -> None:
    servers, not_run = candidates(args)
    num_tokens = 16 if args.quick else 64
    found: Readings = {concurrency: {} for concurrency in CONCURRENCIES}
    if servers:
        config = json.loads((args.beside_int8 or args.beside).joinpath("config.json").read_text())
        vocab = range(16, config["vocab_size"])
    for number, name in in_turn(list(servers), args.beside_rounds):
        if name in not_run:
            continue
        rng = random.Random(number)                 # all servers get the prompts of the round
        try:
            with servers[name].start() as server:
                for concurrency in CONCURRENCIES:
                    warm, asked = ([rng.choices(vocab, k=PROMPT_TOKENS) for _ in range(concurrency)] for _ in range(2))
                    over_http(server, warm, WARM_TOKENS, servers[name].model, UNCUT)
                    batch = over_http(server, asked, num_tokens, servers[name].model, UNCUT)
                    found[concurrency].setdefault(name, {})[number] = batch
                    print(f"round {number}, {name} c{concurrency}: {batch}", file=sys.stderr)
        except (ServerFailed, TripoolError, OSError, subprocess.SubprocessError) as error:
            not_run[name] = str(error)
            print(f"{name} does not run: {error}", file=sys.stderr)
    report.parameters = {**report.parameters, "beside": {
        "model": args.beside and args.beside.name, "int8": args.beside_int8 and args.beside_int8.name,
        "threads": args.beside_threads, "rounds": args.beside_rounds, "output_tokens": num_tokens, "sampling": UNCUT,
        "not_run": not_run}}
    add_beside_figures(report, found)


def add_beside_figures(report: Report, found: Readings) -> None:
    for concurrency, by_server in found.items():
        for name, batches in by_server.items():
            for what, unit in (("tokens_per_s", "tokens/s"), ("ttft_ms", "ms"), ("itl_ms", "ms"), ("itl_p99_ms", "ms")):
                samples = [getattr(batch, what) for batch in batches.values()]
                report.figure(f"serve.{name}_{what}_c{concurrency}", median(samples), unit, samples=samples)
        own = max((name for name in OURS_INT8 if name in by_server), default=None,
                  key=lambda name: median([batch.tokens_per_s for batch in by_server[name].values()]))
        others = [name for name in PEERS if name in by_server]
        if own is None or not others:
            continue
        which, ratios = worst(by_server, own, others, "tokens_per_s", min)
        bar = {"bar": THROUGHPUT_BAR} if concurrency > 1 else {}
        report.figure(f"serve.throughput_vs_best_peer_c{concurrency}", median(ratios), "ratio", "derived",
                      samples=ratios, ours=own, peer=which, **bar)
        which, ratios = worst(by_server, own, others, "itl_p99_ms", max)
        bar = {"bar": P99_BAR} if concurrency == max(CONCURRENCIES) else {}
        report.figure(f"serve.itl_p99_vs_best_peer_c{concurrency}", median(ratios), "ratio", "derived",
                      samples=ratios, ours=own, peer=which, **bar)


def worst(by_server: Mapping[str, Mapping[int, Batch]], own: str, others: Sequence[str], what: str,
          choose: Callable[..., str]) -> tuple[str, list[float]]:
    """The peer beside which ours does worst, and the ratios of the rounds that both took part in."""
    ratios = {name: [getattr(by_server[own][number], what) / getattr(batch, what)
                     for number, batch in by_server[name].items() if number in by_server[own]] for name in others}
    which = choose((name for name in others if ratios[name]), key=lambda name: median(ratios[name]))
    return which, ratios[which]


def main() -> None:
    parser = flags(__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="folder; the embedded model by default")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in both")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="BF16 checkpoint on which servers are compared")
    parser.add_argument("--beside-int8", type=Path, metavar="FOLDER", help="the same as INT8, compressed-tensors")
    parser.add_argument("--beside-threads", type=int, default=usable_cores(), help="of each server (default: cores)")
    parser.add_argument("--beside-rounds", type=int, metavar="N", help="turns of each server (default: 5, quick: 2)")
    parser.add_argument("--llamacpp", type=Path, metavar="ENV", help="environment with llama.cpp, made by `make peers`")
    parser.add_argument("--vllm", type=Path, metavar="ENV", help="environment with vLLM, made by `make peers`")
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), choices=SERVERS, help="those to compare")
    parser.add_argument("--only-beside", action="store_true", help="leave out what the server adds to the engine")
    args = parser.parse_args()
    args.beside_rounds = args.beside_rounds or (2 if args.quick else 5)
    report = Report(__doc__.splitlines()[0], {"prompt_tokens": PROMPT_TOKENS, "concurrency": CONCURRENCIES})
    if not args.only_beside:
        add_to_engine(report, args)
    beside_others(report, args)
    report.write(args.json)


if __name__ == "__main__":
    main()
