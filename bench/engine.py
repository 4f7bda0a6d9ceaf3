"""How fast is the engine beside others on the same checkpoint?

Prefill: one prompt of N random tokens, until its logits are there. Decode: B prompts of 32 random tokens, then the
same forced tokens for all engines, so that none of them falls into a loop in which it reads few experts; the rate is
tokens of all rows by the time of their steps. Each engine is a process of its own (`bench/peers`), with the same
number of threads, and stopped when it is not its turn. They take turns, and a ratio is one of two readings of the same
round. How fast the memory can be read is probed before and after each of our readings. The first round warms all up.
It also shows who is so slow that its first reading has to do (more than twice as slow as another peer, and 10 s or
longer; a larger cell that would take 60 s is left out), and who gets fewer decode steps than the others; the result
says so.

`tripool-int8` reads its output head in eight bits too (`--head-dtype int8`), as Q8_0 does.

Peers that do not fit into the memory together are measured one group after the other, each beside ours. The best peer
of a cell is the one with the lowest ratio. `transformers-float32` and `vllm-float32` are the BF16 checkpoint computed
in float32, as ours is where a CPU has no bfloat16 products; they count among the BF16 peers. Peers other than
transformers need environments of their own (`make peers`). The result is written after each group.

    make bench NAME=engine ARGS='--json out/engine.json'                           the embedded model
    python bench/checkpoint.py --preset mid --out ckpt && python bench/engine.py --json out/engine-mid.json \\
        --model ckpt/mid --int8 ckpt/mid-w8a8 --llamacpp .venv/engines/llamacpp --vllm .venv/engines/vllm
"""

from __future__ import annotations

import argparse
import json
import random
import re
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common import ROOT, Report, flags, median
from drivers import PEERS, Engine, EngineFailed
from tripool.engine.memory import large_pages
from tripool.engine.ops import native
from tripool.pool.arena import available_memory_bytes
from tripool.serve.budget import usable_cores
from tripool.serve.models import EMBEDDED

OURS = ("tripool", "tripool-int8")
HEAD_DTYPES = {"tripool": "auto", "tripool-int8": "int8"}
# Those that are likely to be fast come first: they show which of the others are slow.
BF16_PEERS = ("transformers-float32", "llamacpp-bf16", "vllm-bf16", "vllm-float32", "transformers")
INT8_PEERS = ("llamacpp-q8_0", "vllm-int8")
ENGINES = (*OURS, "transformers-float32", "llamacpp-bf16", "llamacpp-q8_0", "vllm-bf16", "vllm-float32", "vllm-int8",
           "transformers")

# Memory of an engine: so many times its folder, and so many GB (measured with `mid`; the result has what was seen).
NEEDS = {"tripool": (1.0, 1.2), "tripool-int8": (1.0, 1.2), "transformers": (1.0, 0.8),
         "transformers-float32": (2.0, 0.8), "llamacpp-bf16": (1.0, 1.0), "llamacpp-q8_0": (0.5, 1.0),
         "vllm-bf16": (1.0, 3.0), "vllm-float32": (2.0, 3.0), "vllm-int8": (2.0, 3.0)}
MEMORY_SHARE = 0.85
PROMPT_TOKENS, WARM_STEPS = 32, 4
ANSWER_TOKENS = 64                 # room behind the longest prompt
DECODE_S = 5.0                     # about so long are the steps of one reading, where they are slow
SLOW_S, SLOW_TIMES = 10.0, 2.0
TOO_LONG_S = 60.0
READ_BYTES = 1 << 30               # much more than caches hold
LEAST_BYTES = 1 << 28              # weights below this may lie in caches: nothing is said about bandwidth
VS_BEST_BAR, WORST_BAR, BANDWIDTH_BAR = ">= 1.5", ">= 1", ">= 0.75"
TRANSFORMERS_BARS = {1: ">= 1.5", 8: ">= 3", 32: ">= 3"}        # of the embedded model

Turn = tuple[int, int]             # group of peers, round


@dataclass(frozen=True)
class Cell:
    """What is asked of all engines: a prompt of so many tokens, or a batch of so many rows."""

    kind: str
    size: int

    @property
    def label(self) -> str:
        return f"prefill_{self.size}" if self.kind == "prefill" else f"decode_b{self.size}"

    def named(self, what: str) -> str:
        """A figure about this cell."""
        return f"{self.kind}_{what}_{'b' if self.kind == 'decode' else ''}{self.size}"


@dataclass
class Found:
    """All readings."""

    rate: dict[Cell, dict[str, dict[Turn, float]]] = field(default_factory=dict)         # tokens per second
    steps: dict[Cell, dict[str, int]] = field(default_factory=dict)                      # of decode readings
    distinct: dict[Cell, dict[str, dict[Turn, float]]] = field(default_factory=dict)     # experts of a layer in a step
    read: dict[Cell, dict[str, dict[Turn, float]]] = field(default_factory=dict)         # bytes per second, by engine
    single: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def note(self, cell: Cell, name: str, turn: Turn, rate: float) -> None:
        self.rate.setdefault(cell, {}).setdefault(name, {})[turn] = rate

    def samples(self, cell: Cell, name: str) -> list[float]:
        """Without those that warmed up, unless there is nothing else."""
        rates = self.rate.get(cell, {}).get(name, {})
        return [rate for turn, rate in rates.items() if turn[1]] or list(rates.values())

    def ratios(self, cell: Cell, ours: str, theirs: str) -> list[float]:
        """Round by round; of a single reading, to the median of ours beside it."""
        our, their = (self.rate.get(cell, {}).get(name, {}) for name in (ours, theirs))
        both = [our[turn] / their[turn] for turn in their if turn[1] and turn in our]
        if both or not their:
            return both
        (group, _), rate = next(iter(their.items()))
        beside = [each for turn, each in our.items() if turn[0] == group and turn[1]]
        return [median(beside) / rate] if beside else []

    def worst(self, cell: Cell, ours: str, peers: Sequence[str]) -> tuple[str, list[float]] | None:
        """The best of the peers, and our ratios to it."""
        found = {peer: ratios for peer in peers if (ratios := self.ratios(cell, ours, peer))}
        best = min(found, key=lambda peer: median(found[peer]), default=None)
        return None if best is None else (best, found[best])


class Memory:
    """Reads much memory, with the threads that engines get."""

    def __init__(self, threads: int) -> None:
        native.use_threads(threads)
        self.data = torch.frombuffer(large_pages(READ_BYTES), dtype=torch.uint8)
        self.data.fill_(1)

    def read(self) -> float:
        """Bytes per second."""
        begun = time.perf_counter()
        native.module().read_memory(native.chosen_level(), self.data.data_ptr(), self.data.nbytes)
        return self.data.nbytes / (time.perf_counter() - begun)


def commands(args: argparse.Namespace) -> tuple[dict[str, list[str]], dict[str, str]]:
    """How each engine is started, and why others are not."""
    rows, context = max(args.batches, default=1), max([*args.prefill, 4 * PROMPT_TOKENS]) + ANSWER_TOKENS
    common = ["--threads", str(args.threads), "--rows", str(rows), "--context", str(context)]
    found, not_run = {}, {}
    for name in ENGINES:
        kind, _, weights = name.partition("-")
        int8 = weights == "int8"
        env = {"llamacpp": args.llamacpp, "vllm": args.vllm}.get(kind)
        if name not in args.engines:
            not_run[name] = "left out by --engines"
        elif kind in ("llamacpp", "vllm") and env is None:
            not_run[name] = f"no environment was given (--{kind})"
        elif int8 and args.int8 is None:
            not_run[name] = "no INT8 folder was given (--int8)"
        else:
            python = str(env / "bin" / "python") if env else sys.executable
            dtype = ["--dtype", "float32" if weights == "float32" else "auto"]
            special = {"tripool": ["--head-dtype", HEAD_DTYPES[name]] if name in OURS else [],
                       "llamacpp": ["--weights", weights], "transformers": dtype, "vllm": dtype}
            found[name] = [python, str(PEERS / f"drive_{kind}.py"), "--model", str(args.int8 if int8 else args.model),
                           *common, *special.get(kind, ())]
    return found, not_run


def in_groups(peers: Sequence[str], needs: Mapping[str, float], room: float) -> list[list[str]]:
    """Each in the first group in which it fits; one that fits nowhere is alone."""
    groups: list[list[str]] = []
    for peer in peers:
        fits = [group for group in groups if sum(needs[each] for each in (*group, peer)) <= room]
        if fits:
            fits[0].append(peer)
        else:
            groups.append([peer])
    return groups or [[]]


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def weight_bytes(folder: Path, head_dtype: str = "auto") -> tuple[int, float]:
    """Bytes of weights that every step reads, and of one expert in all layers, as they are stored but for the head."""
    config = json.loads((folder / "config.json").read_text())
    tied = bool(config.get("tie_word_embeddings"))
    every, experts = 0, 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for name, entry in header.items():
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            if (name == "__metadata__" or (layer and int(layer[1]) >= config["num_hidden_layers"])
                    or (name == "model.embed_tokens.weight" and not tied)):
                continue
            num_bytes = entry["data_offsets"][1] - entry["data_offsets"][0]
            if head_dtype == "int8" and name == ("model.embed_tokens.weight" if tied else "lm_head.weight"):
                num_bytes = entry["shape"][0] * (entry["shape"][1] + 4)           # with a scale for each row
            if ".mlp.experts." in name:
                experts += num_bytes
            else:
                every += num_bytes
    return every, experts / config["n_routed_experts"]


class Bench:
    """Puts every cell to the engines that are up."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rounds, self.num_steps = (2, 8) if args.quick else (5, 32)
        self.cells = [*(Cell("prefill", size) for size in args.prefill),
                      *(Cell("decode", size) for size in args.batches)]
        self.vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
        self.memory = Memory(args.threads) if native.is_built() else None
        self.found = Found()

    def measure(self, engines: Mapping[str, Engine], group: int) -> None:
        for cell in self.cells:
            running = {name: engine for name, engine in engines.items()
                       if not engine.is_gone and self._worth_trying(cell, name)}
            for number in range(self.rounds + 1):
                for name, engine in list(running.items()):
                    try:
                        self._probed(cell, name, engine, (group, number))
                    except EngineFailed as error:
                        what = f"{cell.label}{' and after it' if engine.is_gone else ''} {name}"
                        self.found.failed[what] = str(error)
                        print(f"{what}: {error}", file=sys.stderr)
                        running.pop(name)
                if not number:
                    self._leave_out_slow(cell, running)

    def _probed(self, cell: Cell, name: str, engine: Engine, turn: Turn) -> None:
        """A reading; of ours, between two of the memory, the mean of which counts."""
        if self.memory is None or name not in OURS:
            self._reading(cell, name, engine, turn)
            return
        before = self.memory.read()
        self._reading(cell, name, engine, turn)
        if turn[1]:
            self.found.read.setdefault(cell, {}).setdefault(name, {})[turn] = (before + self.memory.read()) / 2

    def _reading(self, cell: Cell, name: str, engine: Engine, turn: Turn) -> None:
        chance = random.Random(f"{cell.label} {turn}")

        def ids(count: int) -> list[int]:
            return [chance.randrange(3, self.vocab_size) for _ in range(count)]

        if cell.kind == "prefill":
            self.found.note(cell, name, turn, cell.size / engine.ask({"prefill": ids(cell.size)})["seconds"])
        else:
            prompts = [ids(PROMPT_TOKENS) for _ in range(cell.size)]
            forced = [ids(self.num_steps) for _ in range(cell.size)]
            steps_of = self.found.steps.setdefault(cell, {})
            steps = steps_of[name] if turn[1] else WARM_STEPS
            request = {"decode": prompts, "forced": [row[:steps] for row in forced],
                       **({"count_experts": True} if name in OURS else {})}
            answer = engine.ask(request)
            seconds = answer["seconds"]
            self.found.note(cell, name, turn, cell.size * len(seconds) / sum(seconds))
            if name in OURS:
                self.found.distinct.setdefault(cell, {}).setdefault(name, {})[turn] = answer["distinct_experts"]
            if not turn[1]:
                steps_of[name] = max(WARM_STEPS, min(self.num_steps, int(DECODE_S / median(seconds))))
        print(f"{cell.label} {name} {turn}: {self.found.rate[cell][name][turn]:.1f} tokens/s", file=sys.stderr)

    def _leave_out_slow(self, cell: Cell, running: dict[str, Engine]) -> None:
        """Who cannot be the best peer, and takes long, has been read enough."""
        for name in [name for name in running if name not in OURS]:
            if self._is_slow(cell, name) and self._takes(cell, name) > SLOW_S:
                self.found.single.append(f"{cell.label} {name}")
                running.pop(name)

    def _worth_trying(self, cell: Cell, name: str) -> bool:
        """Whether a reading is worth the time it is going to take, as far as smaller cells of the kind tell."""
        before = [each for each in self.cells[:self.cells.index(cell)]
                  if each.kind == cell.kind and name in self.found.rate.get(each, {})]
        if name in OURS or not before or not self._is_slow(before[-1], name) or self._takes(cell, name) < TOO_LONG_S:
            return True
        self.found.failed[f"{cell.label} {name}"] = (
            f"left out, would take {self._takes(cell, name):.0f} s and was slow in {before[-1].label}")
        return False

    def _is_slow(self, cell: Cell, name: str) -> bool:
        """Beside another peer, in what was read of this cell."""
        most = {each: max(rates.values()) for each, rates in self.found.rate.get(cell, {}).items() if each not in OURS}
        return name in most and most[name] * SLOW_TIMES < max(most.values())

    def _takes(self, cell: Cell, name: str) -> float:
        """Seconds of a reading, as far as earlier ones tell."""
        def rate(of: Cell) -> float:
            return max(self.found.rate.get(of, {}).get(name, {}).values(), default=0.0)

        prefill = [rate(each) for each in self.cells if each.kind == "prefill" and rate(each)]
        prompts = cell.size if cell.kind == "prefill" else cell.size * PROMPT_TOKENS
        seconds = prompts / prefill[-1] if prefill else 0.0
        if cell.kind == "decode" and rate(cell):
            seconds += cell.size * self.found.steps[cell][name] / rate(cell)
        return seconds


def add_figures(report: Report, found: Found, folders: Mapping[str, Path], cells: Sequence[Cell],
                token_bytes: Mapping[str, int], embedded: bool) -> None:
    for cell in cells:
        for name in found.rate.get(cell, {}):
            samples = found.samples(cell, name)
            steps = {"steps": found.steps[cell][name]} if cell.kind == "decode" else {}
            report.figure(f"engine.{cell.label}_{name}", median(samples), "tokens/s", samples=samples, **steps)
        for ours in OURS:
            for peer in (*BF16_PEERS, *INT8_PEERS):
                if ratios := found.ratios(cell, ours, peer):
                    report.figure(f"engine.{cell.label}_{ours}_vs_{peer}", median(ratios), "ratio", "derived",
                                  samples=ratios)
    add_ratios(report, found, cells, embedded)
    add_bandwidth(report, found, folders, token_bytes)


def add_ratios(report: Report, found: Found, cells: Sequence[Cell], embedded: bool) -> None:
    """Those that have a bar."""
    worst: tuple[float, Cell, str, list[float]] | None = None
    for cell in cells:
        if embedded and cell.kind == "decode" and (ratios := found.ratios(cell, "tripool", "transformers")):
            bar = {"bar": TRANSFORMERS_BARS[cell.size]} if cell.size in TRANSFORMERS_BARS else {}
            report.figure(f"engine.{cell.named('ratio')}", median(ratios), "ratio", "derived", samples=ratios, **bar)
        if against := found.worst(cell, "tripool-int8", (*BF16_PEERS, *INT8_PEERS)):
            bar = {"bar": VS_BEST_BAR} if cell.kind == "prefill" or cell.size in TRANSFORMERS_BARS else {}
            report.figure(f"engine.{cell.named('vs_best_peer')}", median(against[1]), "ratio", "derived",
                          samples=against[1], peer=against[0], **bar)
        if against := found.worst(cell, "tripool", BF16_PEERS):
            if worst is None or median(against[1]) < worst[0]:
                worst = median(against[1]), cell, *against
    if worst:
        report.figure("engine.bf16_worst_vs_best_peer", worst[0], "ratio", "derived", samples=worst[3], peer=worst[2],
                      cell=worst[1].label, bar=WORST_BAR)


def add_bandwidth(report: Report, found: Found, folders: Mapping[str, Path], token_bytes: Mapping[str, int]) -> None:
    """What a step has to read, by the time it takes, of what the memory gives in that round."""
    for cell, by_name in found.distinct.items():
        for name, experts in by_name.items():
            samples = [each for turn, each in experts.items() if turn[1]]
            report.figure(f"engine.distinct_experts_{cell.label}_{name}", median(samples), "experts", samples=samples)
    speeds = [speed / 1e9 for by_name in found.read.values() for by_turn in by_name.values()
              for speed in by_turn.values()]
    if speeds:
        report.figure("engine.read_gbps", median(speeds), "GB/s", samples=speeds)
    cell, shares = Cell("decode", 1), {}
    for name in OURS:
        if name not in found.rate.get(cell, {}) or cell not in found.read or folder_bytes(folders[name]) < LEAST_BYTES:
            continue
        every, expert = weight_bytes(folders[name], HEAD_DTYPES[name])
        cache = token_bytes[name] * (PROMPT_TOKENS + (found.steps[cell][name] + 1) / 2)
        speed, distinct = found.read[cell][name], found.distinct[cell][name]
        shares[name] = [(every + distinct[turn] * expert + cache) * rate / speed[turn]
                        for turn, rate in found.rate[cell][name].items() if turn[1]]
        report.figure(f"engine.decode_of_bandwidth_b1_{name}", median(shares[name]), "ratio", "derived",
                      samples=shares[name])
    if len(shares) == len(OURS):
        name = min(shares, key=lambda each: median(shares[each]))
        report.figure("engine.decode_of_bandwidth_b1", median(shares[name]), "ratio", "derived", samples=shares[name],
                      engine=name, bar=BANDWIDTH_BAR)


def start(stack: ExitStack, names: Sequence[str], command: Mapping[str, list[str]], threads: int,
          not_run: dict[str, str]) -> dict[str, Engine]:
    """Those that can be started."""
    engines = {}
    for name in names:
        environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1",
                       "PYTHONPATH": str(ROOT) if name in OURS else ""}
        try:
            engines[name] = stack.enter_context(Engine(name, command[name], environment))
            print(f"{name}: {engines[name].about}", file=sys.stderr)
        except EngineFailed as error:
            not_run[name] = str(error)
            print(f"{name} does not run: {error}", file=sys.stderr)
    return engines


def main() -> None:
    parser = flags(__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="BF16 folder (default: the embedded model)")
    parser.add_argument("--int8", type=Path, help="the same model as INT8 in the compressed-tensors format")
    parser.add_argument("--llamacpp", type=Path, metavar="ENV", help="environment with llama.cpp, made by `make peers`")
    parser.add_argument("--vllm", type=Path, metavar="ENV", help="environment with vLLM, made by `make peers`")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of each engine (default: cores)")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--memory", type=float, metavar="GB", help="for all engines that are up at once")
    args = parser.parse_args()
    command, not_run = commands(args)
    folders = {name: args.int8 if name.endswith("-int8") else args.model for name in command}
    needs = {name: NEEDS[name][0] * folder_bytes(folders[name]) + NEEDS[name][1] * 1e9 for name in command}
    room = args.memory * 1e9 if args.memory else MEMORY_SHARE * available_memory_bytes()
    ours = [name for name in command if name in OURS]
    groups = in_groups([name for name in command if name not in OURS], needs,
                       room - READ_BYTES - sum(needs[name] for name in ours))
    bench = Bench(args)
    about: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        own = start(stack, ours, command, args.threads, not_run)
        for number, names in enumerate(groups):
            with ExitStack() as peers:
                others = start(peers, names, command, args.threads, not_run)
                bench.measure({**own, **others}, number)
                about |= {name: {**engine.about, "memory_bytes": engine.most_bytes}
                          for name, engine in (*own.items(), *others.items())}
            if args.json != "-" or number == len(groups) - 1:
                later = {name: "the run ended before its group" for group in groups[number + 1:] for name in group}
                reported(args, bench, about, not_run | later, groups[:number + 1], folders).write(args.json)


def reported(args: argparse.Namespace, bench: Bench, about: dict[str, dict[str, Any]], not_run: dict[str, str],
             groups: list[list[str]], folders: Mapping[str, Path]) -> Report:
    """What the groups so far have shown."""
    found = bench.found
    report = Report(__doc__.splitlines()[0], {
        "model": args.model.name, "int8": args.int8.name if args.int8 else None, "threads": args.threads,
        "rounds": bench.rounds, "output_tokens": bench.num_steps, "prompt_tokens": PROMPT_TOKENS, "engines": about,
        "not_run": not_run, "groups": groups, "single_readings": found.single, "failed": found.failed})
    token_bytes = {name: about[name]["cache_token_bytes"] for name in OURS if name in about}
    add_figures(report, found, folders, bench.cells, token_bytes, args.model == EMBEDDED)
    return report


if __name__ == "__main__":
    main()
