"""`tripool calibrate`: measure this machine, so that a simulation of it can be held against it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich import box
from rich.table import Table

from tripool.cli.calibrate_machine import CopyLine, Machine, machine_of, write_machine
from tripool.cli.calibrate_probes import Between, Grids, Probe, Prober, choose_grids, computing, roles_of
from tripool.cli.calibrate_readings import Readings, read_readings
from tripool.cli.client import Server
from tripool.cli.files import check_writable
from tripool.cli.flags import read_deployment, takes_flags
from tripool.cli.screen import err, loading, out
from tripool.core.deployment import Deployment
from tripool.core.errors import ConfigError
from tripool.core.shape import ModelShape
from tripool.serve.budget import threads_per_rank, usable_cores
from tripool.serve.launch import LaunchOptions, launch
from tripool.serve.models import kind_of, resolve
from tripool.serve.process import set_up_logs

ROUNDS, QUICK_ROUNDS = 5, 2
MOST_DRIFT = 0.10
"""Of the last round against the first: beyond, the machine was not the same one while it was measured."""

STARTS, PROBED = 0.15, 0.9         # of the progress bar, when the deployment is up and when all was asked
SETTLE_S = 0.2                     # after the last answer, for what is stored behind it


@takes_flags()
def calibrate(
    given: dict[str, Any],
    out_file: Annotated[Path, typer.Option("--out", metavar="FILE.toml", help="The hardware file to write. The table "
                                           "of steps goes beside it, as FILE.steps.json.")],
    config: Annotated[Path | None, typer.Option(help="The deployment to measure for, in TOML; flags win over it.",
                                                show_default=False)] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured. Five rounds of the embedded "
                                        "model take under a minute.")] = ROUNDS,
    quick: Annotated[bool, typer.Option("--quick", help="The corners of the grids alone, twice: rough.")] = False,
    allow_drift: Annotated[bool, typer.Option("--allow-drift", help=f"Write the file even if the machine changed by "
                                              f"more than {MOST_DRIFT:.0%} meanwhile; the file says so.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Measure this machine and write a hardware file for `tripool simulate` and `tripool plan`.

    Starts the deployment that is to be simulated, with the threads that each of its processes would have, asks it for
    batches, prompts and both at once, and reads in its recordings how long steps, copies and messages took. The machine
    should have nothing else to do; where it changed too much meanwhile, nothing is written.

        tripool calibrate --hybrid 1 --out machine.toml
        tripool calibrate --prefill 1 --decode 1 --cache 1 --out split.toml
        tripool calibrate --config deployment.toml --out machine.toml
        tripool simulate deployment.toml --model tiny --hardware machine.toml --rate 5

    The file is for this model, these roles, threads and ranks: measure again when one of them changes.
    """
    set_up_logs("calibrate", log_level)
    if out_file.suffix != ".toml":
        raise ConfigError(f"--out is {out_file}; a hardware file ends with .toml")
    check_writable(out_file, "--out")
    deployment = read_deployment(config, given, usable_cores())
    with loading("starting") as show:
        machine = measure(deployment, rounds=QUICK_ROUNDS if quick else rounds, quick=quick, progress=show).machine()
    out.print(table_of(machine))
    if abs(machine.drift) > MOST_DRIFT and not allow_drift:
        raise ConfigError(f"the machine changed while it was measured: steps of the last round took "
                          f"{machine.drift:+.0%} against the first. Try again when it has less to do, or write the "
                          "file all the same with --allow-drift")
    steps = write_machine(machine, out_file)
    err.print(f"written: {out_file} and {steps}, after {machine.seconds:.0f} s")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a deployment was asked, and what its recordings say of it."""

    deployment: Deployment
    shape: ModelShape
    grids: Grids
    probes: Sequence[Probe]
    readings: Readings
    element_bytes: int
    seconds: float

    def machine(self, rounds: Collection[int] | None = None) -> Machine:
        """The machine, as all rounds show it, or some.

        Raises:
            ConfigError: something was not seen even once.
        """
        deployment, shape, probes = self.deployment, self.shape, self.probes
        if rounds is not None:
            probes = [probe for probe in probes if probe.round in rounds or probe.kind == "pool"]
        threads = {role: threads_per_rank(deployment, getattr(deployment, role), usable_cores())
                   for role in roles_of(deployment)}
        block_bytes = shape.entry_width * shape.num_cached_layers * self.element_bytes * deployment.block_tokens
        machine = machine_of(deployment.model.served_name, threads, self.grids, probes, self.readings,
                             ranks=computing(deployment)[0].ranks, block_bytes=block_bytes)
        machine.seconds = self.seconds
        return machine


def measure(deployment: Deployment, *, rounds: int = ROUNDS, quick: bool = False, between: Between | None = None,
            record_dir: Path | None = None,
            progress: Callable[[str, float], None] = lambda words, part: None) -> Measured:
    """Start a deployment, ask it everything, and tell what was measured.

    Between rounds somebody else may use it; what happens then is in no figure. Recordings are kept if there is a folder
    for them.

    Raises:
        ConfigError: it does not start or answer.
        CheckpointError: the model cannot be used.
    """
    begun_s = time.monotonic()
    deployment, checkpoint = resolve(_measured(deployment))
    shape = checkpoint.shape
    grids = choose_grids(deployment, shape, rounds=rounds, quick=quick)
    with tempfile.TemporaryDirectory(prefix="tripool-calibrate-") as folder:
        records = record_dir or Path(folder)
        with launch(deployment, LaunchOptions(record_dir=str(records), log_level="error")) as fleet:
            fleet.wait_ready(deployment.load_deadline_s, lambda text: progress("starting", 0.0))
            where = urlsplit(fleet.url)
            prober = Prober(
                Server(where.hostname or "", where.port or 0), deployment.model.served_name, grids,
                vocab_size=shape.vocab_size, ranks=computing(deployment)[0].ranks,
                block_tokens=deployment.block_tokens, between=between,
                progress=lambda part: progress("measuring", STARTS + (PROBED - STARTS) * part))
            asyncio.run(prober.run())
            time.sleep(SETTLE_S)
            progress("reading what was recorded", PROBED)
        readings = read_readings(records).without(prober.others)
    element_bytes = 4 if kind_of(checkpoint, deployment.model) == "float32" else 2
    return Measured(deployment, shape, grids, prober.probes, readings, element_bytes, time.monotonic() - begun_s)


def _measured(deployment: Deployment) -> Deployment:
    """The same on a free port, open to us alone, with one instance of each role, and prefixes that are found again."""
    def alone(role: str) -> Any:
        instance = getattr(deployment, role)
        return replace(instance, count=min(instance.count, 1), enable_prefix_caching=True)

    if deployment.hybrid.count and (deployment.prefill.count or deployment.decode.count):
        raise ConfigError("the deployment has hybrid instances and others; measure for one kind at a time")
    for role in roles_of(deployment):
        if drafts := getattr(deployment, role).num_speculative_tokens:
            raise ConfigError(f"{role}.num_speculative_tokens is {drafts}, but only steps that draft nothing are "
                              "measured; leave it out")
    return replace(
        deployment, prefill=alone("prefill"), decode=alone("decode"), hybrid=alone("hybrid"),
        cache=replace(deployment.cache, count=min(deployment.cache.count, 1)),
        gateway=replace(deployment.gateway, host="127.0.0.1", port=0, api_keys=(), join=""))


def table_of(machine: Machine) -> Table:
    """What was measured, on one screen."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, title="measured", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("machine", f"{machine.table.machine}; one thread reads {machine.read_gbps:.1f} GB/s of memory")
    for role, steps in machine.roles.items():
        decode, prefill = steps.decode, steps.prefill
        last, longest, rate = decode.tokens[-1], decode.context[-1], prefill.tokens[-1] / prefill.seconds[-1][0]
        table.add_row(str(role), f"{steps.threads} thread(s); a step of 1 row {_ms(decode.seconds[0][0])}, of "
                      f"{last:.0f} {_ms(decode.seconds[-1][0])}, with {longest:.0f} tokens of context "
                      f"{_ms(decode.seconds[-1][-1])}; {rate:,.0f} prompt tokens a second; a step of nothing "
                      f"{_ms(steps.idle_s)}")
        if len(machine.roles) > 1:
            table.add_row("", f"{steps.beside:.2f} times as long while the other one computes")
        else:
            table.add_row("", f"rows and chunks of prompts in one step: {steps.mixed:.2f} times as long as both")
    table.add_row("messages", f"{_ms(machine.control_s)} from process to process; HTTP and the gateway add "
                              f"{_ms(machine.api_s)} to a first token")
    for name, copies in (("hand-over", machine.pull), ("pool", machine.pool)):
        if copies is not None:
            table.add_row(name, _copies(copies))
    table.add_row("steadiness", f"{machine.num_steps:,} steps; readings differ by {machine.spread:.1%} from round to "
                                f"round (median), the last round by {machine.drift:+.1%} from the first")
    return table


def _copies(copies: CopyLine) -> str:
    return f"{_ms(copies.latency_s)}, then {copies.bytes_per_s / 1e9:.2f} GB/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
