"""What does the server add to the engine?

The same batches go in turn to the engine called in this process and, over HTTP, to a server with the same
engine settings (`hybrid`): time to the first token and between tokens at concurrency 1, output tokens per
second at 1, 8 and 32. Then 1P1D, idle: from the end of a request's last prefill step to the start of its
first decode step, taken from recordings of both processes (one clock serves the machine).

    python bench/serve.py --json out/serve.json
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from common import Report, flags, in_turn, median
from tripool.cli.client import Server
from tripool.cli.load import Arrivals, Job, run_load
from tripool.core import messages as m
from tripool.core.deployment import CacheConfig, Deployment, GatewayConfig, InstanceConfig, ModelConfig
from tripool.core.request import Limits, Request, Sampling, pack_tokens
from tripool.serve.launch import LaunchOptions, launch
from tripool.serve.offline import Offline
from tripool.serve.recording import read_recording

VOCAB = (16, 4000)
PROMPT_TOKENS = 64
READY_S = 120.0


@dataclass
class Batch:
    """What one batch of equal requests showed."""

    ttft_ms: float
    itl_ms: float
    tokens_per_s: float


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


def over_http(server: Server, asked: list[list[int]], num_tokens: int) -> Batch:
    """The same batch through the server, streamed."""
    jobs = [Job("/v1/completions", {"model": "tripool-tiny", "prompt": prompt, "max_tokens": num_tokens,
                                    "temperature": 0, "ignore_eos": True}) for prompt in asked]
    run = asyncio.run(run_load(server, jobs, Arrivals()))
    outcomes = run.ended_well
    assert len(outcomes) == len(jobs), [each.failure for each in run.outcomes if each.failure]
    gaps = [gap for each in outcomes for gap in each.itl_s]
    return Batch(median([each.ttft_s for each in outcomes]) * 1e3, median(gaps) * 1e3,
                 sum(each.num_tokens for each in outcomes) / run.duration_s)


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


def main() -> None:
    parser = flags(__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="folder; the embedded model by default")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in both")
    args = parser.parse_args()
    rounds, num_tokens = (3, 32) if args.quick else (11, 64)
    concurrencies = (1, 8, 32)
    rounds_alone = 8 * rounds            # one request is soon answered, and milliseconds are looked for
    model = ModelConfig(path=args.model, served_name="tripool-tiny")
    instance = InstanceConfig(threads=args.threads, max_num_seqs=32)
    deployment = Deployment(model=model, gateway=GatewayConfig(port=0), hybrid=replace(instance, count=1))
    report = Report(__doc__.splitlines()[0], {
        "prompt_tokens": PROMPT_TOKENS, "output_tokens": num_tokens, "rounds": rounds, "rounds_alone": rounds_alone,
        "threads": args.threads, "concurrency": concurrencies})
    rng = random.Random(0)
    engine = Offline(deployment)
    with launch(deployment, LaunchOptions(log_level="error")) as fleet:
        fleet.wait_ready(READY_S)
        where = urlsplit(fleet.url)
        server = Server(where.hostname or "", where.port or 0)
        for concurrency in concurrencies:
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
    report.write(args.json)


if __name__ == "__main__":
    main()
