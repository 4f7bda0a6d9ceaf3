"""The one form of a benchmark's result, and the flags all benchmarks share.

A benchmark answers one question. It gathers raw readings, makes figures of them and writes one JSON object:
`question`, `commit`, `machine`, `parameters`, `figures` and `samples` (the raw readings behind each figure).
A figure has a name, a value, a unit and a kind: *measured*, *simulated*, *published* or *derived*; a published one
names the version it comes from and whether it was later withdrawn. Tables are made from these files.

    from common import Report, flags

    report = Report("What does the server add to the engine?", parameters)
    report.figure("serve.ttft_added_ms_p50_c1", 1.9, "ms", samples=added_ms)
    report.write(args.json)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

Kind = Literal["measured", "simulated", "published", "derived"]
KINDS = ("measured", "simulated", "published", "derived")
ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Report:
    """What a benchmark found, on its way to a file."""

    question: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def figure(self, name: str, value: float, unit: str, kind: Kind = "measured", *, samples: Sequence[float] = (),
               **more: Any) -> None:
        """Add a figure, with the readings it was made of. `more` is what else a reader must know (a bar, a version)."""
        assert kind in KINDS, f"{kind} is no kind of figure"
        assert all(each["name"] != name for each in self.figures), f"the figure {name} is given twice"
        assert kind != "published" or "version" in more, f"{name} is published: say in which version"
        self.figures.append({"name": name, "value": value, "unit": unit, "kind": kind, **more})
        if samples:
            self.samples[name] = list(samples)

    def as_json(self) -> dict[str, Any]:
        return {"question": self.question, "commit": commit(), "machine": machine(),
                "parameters": dict(self.parameters), "figures": self.figures, "samples": self.samples}

    def write(self, path: str) -> None:
        """Write the result; `-` prints it."""
        text = json.dumps(self.as_json(), indent=1, ensure_ascii=False)
        if path == "-":
            print(text)
            return
        Path(path).write_text(text + "\n")
        for each in self.figures:
            print(f"{each['name']:44} {each['value']:12.4g} {each['unit']:10} {each['kind']}", file=sys.stderr)


def flags(question: str) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark; add your own to it."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--json", type=writable, metavar="PATH", default="-",
                        help="where to write the result; - prints it")
    parser.add_argument("--quick", action="store_true", help="the smallest honest version")
    return parser


def writable(path: str) -> str:
    """Of a file that a run will write, `-` for none: refused before anything starts where it cannot be. Its folder is
    made."""
    file = Path(path)
    if path != "-":
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{path} cannot be written: {error.strerror}") from error
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise argparse.ArgumentTypeError(f"{path} cannot be written; give another")
    return path


def in_turn(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """A B A B ...: compared things take turns, so that a slow minute of the machine meets both."""
    for number in range(rounds):
        for name in names:
            yield number, name


def median(readings: Sequence[float]) -> float:
    return statistics.median(readings)


def spread(readings: Sequence[float]) -> tuple[float, float]:
    """The middle half: first and third quartile."""
    if len(readings) < 2:
        return readings[0], readings[0]
    quartiles = statistics.quantiles(readings, n=4, method="inclusive")
    return quartiles[0], quartiles[2]


def commit() -> str:
    """The commit that was measured, with a mark if files differ from it."""
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()
    name = git("rev-parse", "--short=12", "HEAD") or "unknown"
    return name + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers, and nothing that identifies the machine."""
    cpu, flags_seen = _cpu()
    return {
        "cpu": cpu, "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "features": [name for name in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
                     if name in flags_seen],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "transformers", "numpy")},
    }


def _cpu() -> tuple[str, set[str]]:
    name, flags_seen = platform.processor() or "unknown", set()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name, flags_seen
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            flags_seen = set(value.split())
            break
    return name, flags_seen


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
