"""From readings to a hardware file: grids of steps, rates of copies, and what they drifted meanwhile.

What is measured goes into two files: a machine as `tripool simulate --hardware` takes it, and the table of steps that
it names. Both are written whole or not at all. A reading of a cell is the mean of its steps in one round; a cell is the
median of its readings, so that a slow round does not count.
"""

from __future__ import annotations

import bisect
import itertools
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from tripool.cli.calibrate_probes import Grids, Probe
from tripool.cli.calibrate_readings import Copy, Readings, Step
from tripool.cli.files import write_whole
from tripool.core.errors import ConfigError
from tripool.core.messages import Role
from tripool.sim.costs.states import decode_state
from tripool.sim.costs.table import FORMAT, Grid, MeasuredCosts, RoleSteps, StepTable

LEAST_LATENCY_S, LEAST_RATE, MOST_RATE = 1e-6, 1e6, 1e12
READ_BYTES = 64 << 20              # of memory, to see how fast it is read
READ_TIMES = 5

COVERED = 0.9
"""The part of a step in which others compute too, from which on it counts as beside them."""


@dataclass(frozen=True, slots=True)
class CopyLine:
    """What copies of blocks take: so long for any, and so many bytes a second."""

    latency_s: float
    bytes_per_s: float


@dataclass(slots=True)
class Machine:
    """All that was measured."""

    model: str
    threads: Mapping[Role, int]
    num_ranks: int                 # of all instances
    roles: dict[Role, RoleSteps] = field(default_factory=dict)
    api_s: float = 0.0
    control_s: float = LEAST_LATENCY_S
    pull: CopyLine | None = None
    pool: CopyLine | None = None
    read_gbps: float = 0.0
    drift: float = 0.0             # last round to first, of the kind of step that changed the most
    spread: float = 0.0            # of a cell's readings, the median: half of (most - least) / their median
    num_steps: int = 0
    seconds: float = 0.0

    @property
    def table(self) -> StepTable:
        return StepTable(FORMAT, processor(), self.model, time.strftime("%Y-%m-%d"),
                         {str(role): steps for role, steps in self.roles.items()}, self.api_s)


class Cells:
    """Readings by cell: of each round one."""

    def __init__(self, name: str, rows: Sequence[int], columns: Sequence[int]) -> None:
        self.name = name
        self._rows, self._columns = rows, columns
        self._found: dict[tuple[int, int], dict[int, list[float]]] = {}
        self._across: dict[int, list[float]] = {each: [] for each in columns}

    def add(self, probe: Probe, steps: Sequence[Step], across: Iterable[float]) -> None:
        if steps:
            rounds = self._found.setdefault((probe.tokens, probe.across), {})
            rounds.setdefault(probe.round, []).append(statistics.fmean(step.seconds for step in steps))
            self._across[probe.across] += across

    def readings(self, row: int, column: int) -> dict[int, float]:
        """Of one cell, by round.

        Raises:
            ConfigError: there is none.
        """
        rounds = self._found.get((row, column))
        if rounds is None:
            raise ConfigError(f"no {self.name} step with {row} tokens at {column} was seen by itself: the machine is "
                              "too busy to be measured, or its deployment steps otherwise; try when it is idle")
        return {number: statistics.median(rounds[number]) for number in sorted(rounds)}

    @property
    def axis(self) -> list[float]:
        """What columns really were, on average."""
        return [round(statistics.fmean(self._across[each] or [each]), 1) for each in self._columns]

    def seconds(self, less_s: float = 0.0, number: int | None = None) -> list[list[float]]:
        """Medians; or what one round says, where it says anything."""
        def cell(row: int, column: int) -> float:
            readings = self.readings(row, column)
            return readings[number] if number in readings else statistics.median(readings.values())

        return [[max(cell(row, column) - less_s, 0.0) for column in self._columns] for row in self._rows]

    def drift(self) -> float:
        """How much the last round differs from the first, of all cells together."""
        pairs = [readings for row in self._rows for column in self._columns
                 if len(readings := list(self.readings(row, column).values())) > 1]
        return statistics.median(each[-1] / each[0] for each in pairs) - 1.0 if pairs else 0.0

    def spreads(self) -> list[float]:
        every = [self.readings(row, column).values() for row in self._rows for column in self._columns]
        return [(max(each) - min(each)) / 2 / statistics.median(each) for each in every]


def machine_of(model: str, threads: Mapping[Role, int], grids: Grids, probes: Sequence[Probe], readings: Readings, *,
               ranks: int, block_bytes: int) -> Machine:
    """What readings of these probes say.

    Raises:
        ConfigError: something was not seen even once.
    """
    machine = Machine(model, threads, ranks * len(threads), num_steps=len(readings.steps))
    begins = [step.begun_s for step in readings.steps]

    def within(probe: Probe) -> list[Step]:
        first, last = bisect.bisect_left(begins, probe.begun_s), bisect.bisect_right(begins, probe.ended_s)
        return [step for step in readings.steps[first:last] if step.ended_s <= probe.ended_s]

    decode = Cells("decode", grids.rows, grids.contexts)
    prefill = Cells("prefill", grids.chunks, grids.firsts)
    for probe in probes:
        if probe.kind == "decode":
            steps = [step for step in within(probe) if step.tokens == probe.tokens and not step.chunk_tokens]
            decode.add(probe, steps, [step.context for step in steps])
        elif probe.kind == "prefill":
            steps = [step for step in within(probe) if step.chunk_tokens == probe.tokens and not step.num_rows
                     and abs(step.chunk_first - probe.across) < 1.0]
            prefill.add(probe, steps, [step.chunk_first for step in steps])
    idle_s = min(_idle_s(readings.steps), *prefill.seconds()[0])

    def plain(number: int | None = None) -> RoleSteps:
        return RoleSteps(
            idle_s, Grid([float(each) for each in grids.rows], decode.seconds(number=number), context=decode.axis),
            Grid([float(each) for each in grids.chunks], prefill.seconds(idle_s, number), first=prefill.axis))

    for role, num_threads in threads.items():
        machine.roles[role] = steps_of = plain()
        steps_of.threads = num_threads
        found: dict[str, list[float]] = {"beside": [], "mixed": []}
        for number in range(grids.rounds):         # held against grids of the same round: it is the same minute
            seen = [step for probe in probes if (probe.kind, probe.round) == ("beside", number)
                    for step in within(probe)]
            own = [step for step in seen if _role_of(step) == role]
            found["beside"] += _beside(own, [step for step in seen if _role_of(step) != role], plain(number))
            found["mixed"] += _mixed(own, plain(number))
        steps_of.beside = max(1.0, statistics.median(found["beside"] or [1.0]))
        steps_of.mixed = statistics.median(found["mixed"] or [1.0])
    machine.drift = max(decode.drift(), prefill.drift(), key=abs)
    machine.spread = statistics.median([*decode.spreads(), *prefill.spreads()])
    machine.control_s = _control_s(readings, probes)
    machine.api_s = _api_s(readings, probes, machine.control_s)
    machine.pull = copy_line([each for each in readings.copies if each.kind == "Pull"], block_bytes)
    fetches = [each for each in readings.copies if each.kind == "Fetch"]
    stores = [each for each in readings.copies if each.kind == "Store"]
    machine.pool = copy_line(fetches if any(each.num_blocks for each in fetches) else [*fetches, *stores], block_bytes)
    machine.read_gbps = read_rate() / 1e9
    return machine


def _role_of(step: Step) -> str:
    return step.member.partition("-")[0]


def _idle_s(steps: Sequence[Step]) -> float:
    """A step in which nobody computes; where there was none, what a step takes besides the engine."""
    idle = [step.seconds for step in steps if not step.computes]
    return statistics.median(idle or [step.seconds - step.engine_s for step in steps])


def _price(steps: RoleSteps, step: Step) -> float:
    """What the grids say of a step, as if its busiest rank were alone."""
    state = decode_state(1, step.tokens, round(step.context))
    if step.chunk_tokens:
        state = replace(state, chunk_rank_C=np.array([0]), chunk_first_C=np.array([round(step.chunk_first)]),
                        chunk_tokens_C=np.array([step.chunk_tokens]))
    return MeasuredCosts(steps).step_time(state).total_s


def _beside(own: Sequence[Step], others: Sequence[Step], plain: RoleSteps) -> list[float]:
    """How many times as long steps took while another instance was in steps, too; nothing if there was none."""
    spans = [(step.begun_s, step.ended_s) for step in others if step.computes]
    begins = [begin_s for begin_s, _ in spans]

    def is_covered(step: Step) -> bool:
        """They are in order and do not overlap."""
        first, last = bisect.bisect_left(begins, step.begun_s), bisect.bisect_right(begins, step.ended_s)
        covered_s = sum(min(step.ended_s, end_s) - max(step.begun_s, begin_s)
                        for begin_s, end_s in spans[max(first - 1, 0):last] if end_s > step.begun_s)
        return covered_s >= COVERED * step.seconds

    beside = [step for step in own if step.computes and is_covered(step)]
    return [sum(step.seconds for step in beside) / sum(_price(plain, step) for step in beside)] if beside else []


def _mixed(own: Sequence[Step], plain: RoleSteps) -> list[float]:
    """How many times as long steps with rows and chunks took as both should; nothing where the two never met."""
    both = [step for step in own if step.num_rows and step.chunk_tokens]
    return [sum(step.seconds for step in both) / sum(_price(plain, step) for step in both)] if both else []


def _control_s(readings: Readings, probes: Sequence[Probe]) -> float:
    """A message from process to process while one request is under way: of each kind the median, of these the mean."""
    ends = [(probe.begun_s, probe.ended_s) for probe in probes if probe.kind == "alone"]
    begins, kinds = [begun_s for begun_s, _ in ends], dict[str, list[float]]()
    for hop in readings.hops:
        last = bisect.bisect_right(begins, hop.sent_s) - 1
        if last >= 0 and hop.sent_s < ends[last][1]:
            kinds.setdefault(hop.kind, []).append(hop.seconds)
    return max(statistics.fmean(map(statistics.median, kinds.values())), LEAST_LATENCY_S) if kinds else LEAST_LATENCY_S


def _api_s(readings: Readings, probes: Sequence[Probe], control_s: float) -> float:
    """What a client waits for a first token, beyond two messages and the instance."""
    request_ids = sorted(readings.submitted_s, key=lambda each: readings.submitted_s[each])
    submitted = [readings.submitted_s[each] for each in request_ids]
    found = []
    for probe in probes:
        at = bisect.bisect_left(submitted, probe.begun_s)
        alone = at + 1 == bisect.bisect_right(submitted, probe.ended_s)
        if probe.ttft_s and probe.kind == "alone" and alone and request_ids[at] in readings.first_s:
            found.append(probe.ttft_s - readings.first_s[request_ids[at]] - 2 * control_s)
    return max(0.0, statistics.median(found)) if found else 0.0


def copy_line(copies: Sequence[Copy], block_bytes: int) -> CopyLine | None:
    """Latency and rate of copies, through the medians of each size; None of no copies. Those count that did not wait
    for another one, if there are such."""
    copies = sorted(copies, key=lambda copy: copy.begun_s)
    ends = [float("-inf"), *itertools.accumulate((copy.begun_s + copy.seconds for copy in copies), max)]
    begins = [*(copy.begun_s for copy in copies[1:]), float("inf")]
    alone = [copy for copy, end_s, next_s in zip(copies, ends, begins, strict=False)
             if end_s <= copy.begun_s and copy.begun_s + copy.seconds <= next_s]
    sizes: dict[int, list[float]] = {}
    for each in alone or copies:
        sizes.setdefault(each.num_blocks, []).append(each.seconds)
    if not sizes:
        return None
    points = [(size * block_bytes, statistics.median(seconds), len(seconds)) for size, seconds in sorted(sizes.items())]
    if len(points) == 1:
        num_bytes, seconds, _ = points[0]
        return CopyLine(seconds, MOST_RATE) if not num_bytes else CopyLine(LEAST_LATENCY_S, num_bytes / seconds)
    sizes_P, seconds_P, counts_P = np.array(points, float).T
    slope, latency_s = np.polyfit(sizes_P, seconds_P, 1, w=np.sqrt(counts_P))
    rate = 1.0 / slope if slope > 0 else MOST_RATE
    return CopyLine(max(float(latency_s), LEAST_LATENCY_S), float(np.clip(rate, LEAST_RATE, MOST_RATE)))


def read_rate() -> float:
    """Bytes a second that one thread reads of memory."""
    data = np.ones(READ_BYTES // 8)
    times = []
    for _ in range(READ_TIMES):
        begun_s = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - begun_s)
    return READ_BYTES / min(times)


def processor() -> str:
    """The machine, in a word."""
    try:
        names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                 if line.startswith("model name")]
    except OSError:
        names = []
    cores = len(os.sched_getaffinity(0))
    return f"{names[0] if names else platform.machine()}, {cores} core{'s' if cores != 1 else ''}"


# ------------------------------------------------------------ files

TEXT = """\
# Measured by `tripool calibrate` on {date}: {machine}.
# {model}, {threads}; {num_steps} steps seen. Readings of a step differ by {spread:.1%} from round to round (median),
# and the last round was {drift:+.1%} against the first.
# Steps come from the table beside this file; what is marked so is rough and used where no table is.

name = "{name}"
steps = "{steps}"
nodes = 1
graph_launch_ms = 0.0

[die]                                       # what one rank has of the machine
peak_16bit_tflops = {tflops:.4g}            # rough: cores x 3 GHz x 32 FLOP
peak_8bit_tops = {tops:.4g}                 # rough: twice that
memory_gb = {memory_gb:.4g}
memory_gbps = {read_gbps:.4g}               # measured: one thread reads
matrix_cores = {cores}
vector_cores = {cores}
tile_rows = 1

[package]
name = "CPU"
dies = {ranks}

[node]
packages = 1
cpu_sockets = 1

[planes.scale_up]                           # the pool{pool_said}
name = "shared memory of the pool"
spans = "node"
die_gbps = {pool_gbps:.5g}
read_gbps = {pool_gbps:.5g}
write_gbps = {pool_gbps:.5g}
latency_us = {pool_us:.5g}
host_read_gbps = {pool_gbps:.5g}
socket_gbps = {pool_gbps:.5g}

[planes.scale_out]                          # from prefill to decode{pull_said}
name = "shared memory of prefill"
spans = "node"
die_gbps = {pull_gbps:.5g}
read_gbps = {pull_gbps:.5g}
write_gbps = {pull_gbps:.5g}
latency_us = {pull_us:.5g}

[planes.management]                         # messages between processes: their latency was measured
name = "sockets"
spans = "beyond"
die_gbps = 1
read_gbps = 1
write_gbps = 1
node_gbps = 1
latency_us = {control_us:.5g}

[storage]                                   # rough
bucket_gbps = 0.1
disk_gbps = 1

[exchange]                                  # between ranks; part of the measured steps, so these are rough
flag_us = 5
times = [
    {{ op = "dispatch", ranks = 2, microseconds = 400, tokens = 128, picks = 8, message_bytes = 1024 }},
    {{ op = "combine", ranks = 2, microseconds = 400, tokens = 128, picks = 8, message_bytes = 1024 }},
]

[exchange.bulk]
copies = "expert"
mover = "cores"
dispatch_gbps = 5
combine_gbps = 5

[efficiency]                                # rough
projection = [[1, 0.3], [16, 0.6]]
expert = [[1, 0.3], [16, 0.6]]
weights = 0.6
attention = 0.4
attention_memory = 0.6
vector = 0.5

[decode_split]
attention_cores = 0
expert_cores = 0
"""

ROUGH_COPY = CopyLine(1e-3, 1e9)
"""Where nothing was copied, and so nothing was measured."""


def write_machine(machine: Machine, out: Path) -> Path:
    """Write both files; returns the path of the steps. A file that is there stays until the new one is whole."""
    steps = out.with_suffix(".steps.json")
    cores = max(1, len(os.sched_getaffinity(0)) // machine.num_ranks)
    pool, pull = machine.pool or ROUGH_COPY, machine.pull or ROUGH_COPY
    text = TEXT.format(
        date=time.strftime("%Y-%m-%d"), machine=processor(), model=machine.model, name=out.stem, steps=steps.name,
        threads=", ".join(f"{role} on {count} thread{'s' if count != 1 else ''}" for role, count
                          in machine.threads.items()),
        num_steps=machine.num_steps, spread=machine.spread, drift=machine.drift, cores=cores,
        tflops=cores * 3e9 * 32 / 1e12, tops=2 * cores * 3e9 * 32 / 1e12, read_gbps=machine.read_gbps,
        memory_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 / machine.num_ranks,
        ranks=machine.num_ranks,
        pool_said=", measured" if machine.pool else "; there was none: rough",
        pull_said=", measured" if machine.pull else "; there was no such copy: rough",
        pool_gbps=pool.bytes_per_s / 1e9, pool_us=pool.latency_s * 1e6, pull_gbps=pull.bytes_per_s / 1e9,
        pull_us=pull.latency_s * 1e6, control_us=machine.control_s * 1e6)
    write_whole(steps, msgspec.json.format(msgspec.json.encode(machine.table), indent=1) + b"\n", "--out")
    write_whole(out, text, "--out")
    return steps
