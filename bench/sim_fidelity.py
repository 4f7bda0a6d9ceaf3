"""Does the simulation say what a real run on this machine shows?

The embedded model is served by real processes, as 1P1D with a cache server and as one hybrid instance, under three
loads: 30 % and 70 % of what the deployment can do, and bursts with shared prefixes. The same requests, at the same
times, with answers of the same length, go through `Simulation` with hardware files as `tripool calibrate` writes them.
Nothing is fitted on these runs: what the simulation knows of the machine is what calibration measured.

A machine that is shared changes within a minute. So a load comes in short parts, and the same processes are calibrated
before and after each: of the rounds before all parts one hardware file is made, of those after them another. It
simulates with each of the two; the mean of both is held against the real run.

A pair whose two files differ by more than 5 % is discarded, told, and run again a few times. Every real run is
recorded, and its decisions are replayed: `fidelity.replay_mismatches` is how many came out otherwise.

    python bench/sim_fidelity.py --json out/fidelity.json
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common import Report, flags, median
from tripool.cli.calibrate import measure
from tripool.cli.calibrate_machine import Machine, write_machine
from tripool.cli.calibrate_probes import UNCUT
from tripool.cli.client import Server
from tripool.cli.load import COMPLETIONS, Arrivals, Job, run_load
from tripool.core.deployment import CacheConfig, Deployment, GatewayConfig, InstanceConfig, ModelConfig
from tripool.core.shape import ModelShape
from tripool.serve.models import resolve
from tripool.serve.recording import replay_recording
from tripool.sim.costs.table import Grid, StepTable
from tripool.sim.hardware.description import read_hardware
from tripool.sim.machine import rig_of
from tripool.sim.requests import Workload, WorkRequest
from tripool.sim.simulation import Rig, Simulation
from tripool.sim.synthetic import SyntheticWork

SERVED = "tripool-tiny"
INSTANCE = InstanceConfig(count=1, max_num_seqs=16, max_num_batched_tokens=1024, cache_tokens=16_384)
COMMON = {"model": ModelConfig(served_name=SERVED, max_model_len=2048), "gateway": GatewayConfig(port=0)}
DEPLOYMENTS = {
    "1p1d": Deployment(prefill=INSTANCE, decode=INSTANCE, cache=CacheConfig(count=1), **COMMON),
    "hybrid": Deployment(hybrid=INSTANCE, **COMMON),
}
STEADY = SyntheticWork(0.0, 1.0, prompt_tokens=128, output_tokens=96, spread=0.4)
BURSTY = replace(STEADY, prompt_tokens=256, num_prefixes=3, prefix_tokens=128, share=0.7, burst_every_s=5.0,
                 burst_s=1.0, burst_times=2.5)
LOADS = {"30": (0.3, STEADY), "70": (0.7, STEADY), "bursty": (0.4, BURSTY)}
"""Of each load: which part of the capacity comes on average, and of what kind."""

USERS = 16                         # at once, where capacity is looked for
CAPACITY_REQUESTS = 300
MOST_DRIFT = 0.05
BARS = {"ttft_p50_error": "<= 0.15", "tpot_p50_error": "<= 0.15", "throughput_error": "<= 0.10",
        "replay_mismatches": "<= 0"}
FIRST_TOKEN, VOCAB = 16, 4000
APART_S = 100.0                    # between the beginnings of parts, simulated: longer than one lasts
NAMES = 1 << 24                    # of what prompts are made of, in each part: parts share nothing


@dataclass(frozen=True)
class Seen:
    """What one run showed, real or simulated."""

    ttft_s: float                  # medians
    tpot_s: float
    tokens_per_s: float

    def error(self, real: Seen, name: str) -> float:
        return abs(getattr(self, name) / getattr(real, name) - 1.0)


ERRORS = {"ttft_p50_error": "ttft_s", "tpot_p50_error": "tpot_s", "throughput_error": "tokens_per_s"}


@dataclass
class Pair:
    """A real run and its simulations, and how much the machine changed meanwhile."""

    real: Seen
    simulated: list[Seen]
    drift: float
    rate: float
    num_requests: int
    decisions: int = 0
    mismatches: list[str] = field(default_factory=list)

    @property
    def is_kept(self) -> bool:
        return abs(self.drift) <= MOST_DRIFT

    @property
    def mean(self) -> Seen:
        return Seen(*(statistics.fmean(asdict(each)[name] for each in self.simulated)
                      for name in ("ttft_s", "tpot_s", "tokens_per_s")))

    def errors(self) -> dict[str, float]:
        return {name: self.mean.error(self.real, what) for name, what in ERRORS.items()}


@dataclass(frozen=True, slots=True)
class AtTimes(Arrivals):
    """Each job at its own time."""

    at_s: tuple[float, ...] = ()

    def times_s(self, count: int) -> list[float]:
        return list(self.at_s[:count])


def drift(before: StepTable, after: StepTable) -> float:
    """How much longer steps take after than before: of the grid that changed the most, the median of its cells."""
    def change(one: Grid, other: Grid) -> float:
        ratios = [late / early for row, later in zip(one.seconds, other.seconds, strict=True)
                  for early, late in zip(row, later, strict=True) if early and late]
        return median(ratios) - 1.0 if ratios else 0.0

    changes = [change(getattr(steps, grid), getattr(after.roles[role], grid))
               for role, steps in before.roles.items() for grid in ("decode", "prefill")]
    return max(changes, key=abs)


def prompt_of(work: WorkRequest) -> list[int]:
    """The tokens of a request: a part of one name begins alike everywhere."""
    return [token for name, count in work.parts
            for token in random.Random(name).choices(range(FIRST_TOKEN, VOCAB), k=count)]


def job_of(work: WorkRequest, number: int) -> Job:
    return Job(COMPLETIONS, {"model": SERVED, "prompt": prompt_of(work), "max_tokens": work.num_output,
                             "ignore_eos": True, "seed": number, **UNCUT})


@dataclass(frozen=True, slots=True)
class Answer:
    """What its client saw of one request."""

    sent_s: float
    ended_s: float
    num_tokens: int
    ttft_s: float
    tpot_s: float | None           # None of one token


def seen(parts: Sequence[Sequence[Answer]]) -> Seen:
    """All parts of a load together; what lies between them does not count."""
    every = [answer for part in parts for answer in part]
    duration_s = sum(max(each.ended_s for each in part) - min(each.sent_s for each in part) for part in parts if part)
    return Seen(median([each.ttft_s for each in every]),
                median([each.tpot_s for each in every if each.tpot_s is not None]),
                sum(each.num_tokens for each in every) / duration_s)


async def real_part(server: Server, work: Workload) -> list[Answer]:
    """Have one part served.

    Raises:
        SystemExit: a request did not end well.
    """
    requests = work.requests
    jobs = [job_of(each, number) for number, each in enumerate(requests)]
    run = await run_load(server, jobs, AtTimes(at_s=tuple(each.at_s for each in requests)))
    if len(run.ended_well) < len(requests) or any(each.num_tokens != work.num_output
                                                  for each, work in zip(run.outcomes, requests, strict=True)):
        raise SystemExit(f"requests failed: {sorted({each.failure or 'too short' for each in run.outcomes})}")
    return [Answer(each.sent_s, each.event_s[-1], each.num_tokens, each.ttft_s, each.tpot_s) for each in run.outcomes]


def simulated_parts(deployment: Deployment, parts: Sequence[Workload], rig: Rig, *, users: int = 0) -> Seen:
    """The same in virtual time, one part long after the other."""
    later = [replace(each, at_s=each.at_s + APART_S * number)
             for number, part in enumerate(parts) for each in part.requests]
    simulation = Simulation(deployment, Workload("parts", tuple(later)), rig, max_tokens=0, concurrency=users)
    simulation.run()
    ended = [each for each in simulation.users.journeys if each.is_served]
    assert len(ended) == len(later), "a simulated request was not served"
    answers = [Answer(each.sent_s, each.ended_s, each.num_tokens, each.ttft_s, each.tpot_s)
               for each in sorted(ended, key=lambda each: each.sent_s)]
    ends = list(itertools.accumulate(len(part.requests) for part in parts))
    return seen([answers[begin:end] for begin, end in zip([0, *ends], ends, strict=False)])


def rig_from(machine: Machine, deployment: Deployment, shape: ModelShape, path: Path) -> Rig:
    """By way of the files that a calibration writes."""
    write_machine(machine, path)
    return rig_of(deployment, shape, read_hardware(str(path)))


def workload(load: str, capacity: float, seconds: float, num_parts: int, seed: int) -> list[Workload]:
    """Parts of a load, `capacity` in requests a second."""
    share, kind = LOADS[load]
    parts = []
    for number in range(num_parts):
        drawn = replace(kind, duration_s=seconds / num_parts, requests_per_s=share * capacity).draw(
            seed * num_parts + number)
        parts.append(replace(drawn, requests=tuple(replace(
            each, parts=tuple((name + NAMES * (number + 1), count) for name, count in each.parts))
            for each in drawn.requests)))
    return parts


def capacity_of(deployment: Deployment, rig: Rig) -> float:
    """Requests a second with as many users at once as there is room for, simulated."""
    work = replace(STEADY, duration_s=1.0, requests_per_s=float(CAPACITY_REQUESTS)).draw(0)
    found = simulated_parts(deployment, [work], rig, users=USERS)
    return found.tokens_per_s * len(work.requests) / work.num_output_tokens


class Bench:
    """All pairs of one deployment."""

    def __init__(self, name: str, folder: Path, *, loads: Sequence[str], seconds: float, num_parts: int, tries: int,
                 end_s: float) -> None:
        self.name, self.folder, self.loads = name, folder, loads
        self.seconds, self.num_parts, self.tries, self.end_s = seconds, num_parts, tries, end_s
        self.deployment, checkpoint = resolve(DEPLOYMENTS[name])
        self.shape = checkpoint.shape
        self.pairs: dict[str, list[Pair]] = {}
        self.capacity = 0.0
        self.machines: list[Machine] = []

    def run(self) -> None:
        self.capacity = capacity_of(self.deployment, self.rig(measure(self.deployment, rounds=2).machine()))
        for load in self.loads:
            for attempt in range(self.tries):
                if time.monotonic() > self.end_s:
                    return
                pair = self.pair(load, attempt)
                self.pairs.setdefault(load, []).append(pair)
                print(f"{self.name} {load}: {pair.real} simulated {pair.simulated}, drift {pair.drift:+.1%}, "
                      f"{ {name: round(error, 3) for name, error in pair.errors().items()} }, {len(pair.mismatches)} "
                      f"mismatches of {pair.decisions}", file=sys.stderr)
                if pair.is_kept:
                    break

    def pair(self, load: str, attempt: int) -> Pair:
        """The parts of a load with calibration around each of them, and their simulations."""
        parts = workload(load, self.capacity, self.seconds, self.num_parts, attempt)
        record = self.folder / f"{self.name}-{load}-{attempt}"
        record.mkdir(parents=True)
        answers: list[list[Answer]] = []

        async def serve(server: Server, number: int) -> None:
            answers.append(await real_part(server, parts[number]))

        measured = measure(self.deployment, rounds=self.num_parts + 1, between=serve, record_dir=record)
        before, after = (measured.machine(range(first, first + self.num_parts)) for first in (0, 1))
        simulated = [simulated_parts(self.deployment, parts, self.rig(machine)) for machine in (before, after)]
        pair = Pair(seen(answers), simulated, drift(before.table, after.table), self.capacity * LOADS[load][0],
                    sum(len(part.requests) for part in parts))
        for path in sorted(record.iterdir()):
            decisions, wrong = replay_recording(path)
            pair.decisions += decisions
            pair.mismatches += [f"{path.name}: {each}" for each in wrong]
        return pair

    def rig(self, machine: Machine) -> Rig:
        self.machines.append(machine)
        return rig_from(machine, self.deployment, self.shape, self.folder / f"{self.name}-{len(self.machines)}.toml")


def add_figures(report: Report, found: Mapping[str, Mapping[str, Sequence[Pair]]]) -> None:
    """Figures of pairs by deployment and load. Of pairs that were run again, the kept one counts."""
    kept = {(name, load): pair for name, loads in found.items() for load, pairs in loads.items()
            for pair in pairs if pair.is_kept}
    every = [pair for loads in found.values() for pairs in loads.values() for pair in pairs]
    for name in ERRORS:
        errors = {key: pair.errors()[name] for key, pair in kept.items()}
        if errors:
            worst = max(errors, key=lambda key: errors[key])
            report.figure(f"fidelity.{name}", errors[worst], "ratio", "derived", samples=list(errors.values()),
                          bar=BARS[name], worst=" ".join(worst))
    report.figure("fidelity.replay_mismatches", sum(len(pair.mismatches) for pair in every), "decisions",
                  samples=[len(pair.mismatches) for pair in every], bar=BARS["replay_mismatches"],
                  decisions=sum(pair.decisions for pair in every))
    report.figure("fidelity.discarded_pairs", sum(not pair.is_kept for pair in every), "pairs", "derived",
                  samples=[pair.drift for pair in every])
    for (name, load), pair in kept.items():
        prefix = f"fidelity.{name}_{load}"
        for what, error in pair.errors().items():
            report.figure(f"{prefix}_{what}", error, "ratio", "derived", samples=[error])
        for what, unit in (("ttft_s", "s"), ("tpot_s", "s"), ("tokens_per_s", "tokens/s")):
            report.figure(f"{prefix}_{what}", getattr(pair.real, what), unit, samples=[getattr(pair.real, what)])
            report.figure(f"{prefix}_{what}_simulated", getattr(pair.mean, what), unit, "simulated",
                          samples=[getattr(each, what) for each in pair.simulated])


def told(pair: Pair) -> dict[str, Any]:
    """A pair in the result's parameters, discarded ones too."""
    return {"real": asdict(pair.real), "simulated": [asdict(each) for each in pair.simulated], "drift": pair.drift,
            "kept": pair.is_kept, "errors": pair.errors(), "requests_per_s": pair.rate, "requests": pair.num_requests}


def main() -> None:
    parser = flags(__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=24.0, help="of each load")
    parser.add_argument("--parts", type=int, default=6, help="of each load, with calibration around each")
    parser.add_argument("--tries", type=int, default=3, help="for a pair, if the machine drifts")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no pair is begun")
    parser.add_argument("--deployments", nargs="+", choices=DEPLOYMENTS, default=list(DEPLOYMENTS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--keep", type=Path, help="a folder for hardware files and recordings, to be looked at")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.parts, args.tries = 5.0, 2, 1
    report = Report(__doc__.split("\n")[0], {})
    end_s = time.monotonic() + args.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        benches = [Bench(name, args.keep or Path(folder), loads=args.loads, seconds=args.seconds, num_parts=args.parts,
                         tries=args.tries, end_s=end_s) for name in args.deployments]
        for bench in benches:
            bench.run()
    found = {bench.name: bench.pairs for bench in benches}
    report.parameters = {
        "seconds": args.seconds, "parts": args.parts, "tries": args.tries, "most_drift": MOST_DRIFT,
        "loads": {name: {"of_capacity": share, **asdict(kind)} for name, (share, kind) in LOADS.items()},
        "capacity_requests_per_s": {bench.name: bench.capacity for bench in benches},
        "missing": [f"{bench.name} {load}" for bench in benches for load in args.loads
                    if not any(pair.is_kept for pair in bench.pairs.get(load, ()))],
        "pairs": {name: {load: [told(pair) for pair in pairs] for load, pairs in loads.items()}
                  for name, loads in found.items()},
        "measured": {bench.name: [{"api_s": each.api_s, "control_s": each.control_s, "drift": each.drift,
                                   "spread": each.spread, "factors": each.table.factors} for each in bench.machines]
                     for bench in benches}}
    add_figures(report, found)
    report.write(args.json)


if __name__ == "__main__":
    main()
