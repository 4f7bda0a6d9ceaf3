"""`tripool simulate`: a deployment under a workload in virtual time, before anybody owns the machines.

What decides is what serves: the same gateway, router and schedulers run here, on data planes that price steps and
copies.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from tripool.cli.assumptions import (
    Acceptance,
    Assumptions,
    Corrections,
    ExpertDrift,
    ExpertSpread,
    Level,
    NpuHourPrice,
    PerfectBalance,
    PoolPlane,
    PullPlane,
)
from tripool.cli.files import check_files, write_whole
from tripool.cli.flags import show_bytes
from tripool.cli.machines import hardware_of
from tripool.cli.models import shape_of
from tripool.cli.screen import as_json, err, loading, out, show_seconds
from tripool.cli.simulate_page import page_of
from tripool.cli.workload import (
    DURATION_S,
    BurstEvery,
    BurstSeconds,
    BurstTimes,
    Duration,
    Limit,
    OutputTokens,
    Prefixes,
    PrefixTokens,
    PromptTokens,
    Rate,
    Share,
    SpeedUp,
    Spread,
    TraceFile,
    workload_of,
)
from tripool.core.deployment import Deployment, build, read_table
from tripool.core.errors import ConfigError
from tripool.sim.costs.models import known_models
from tripool.sim.failures import parse_failure
from tripool.sim.goals import check_goals
from tripool.sim.hardware.description import known_hardware
from tripool.sim.machine import EXPERT_DRIFT_S, rig_of
from tripool.sim.outcome import Slo, outcome
from tripool.sim.requests import Workload
from tripool.sim.simulation import Simulation
from tripool.sim.spans import Spans
from tripool.sim.synthetic import SyntheticWork

GOALS, ANSWERS = "Goals and failures", "What is written"

LONG_SPAN_S = 30 * 86400.0
"""Longer than any public trace."""

MOST_CAUSES = 3
"""Of failed requests, on the screen: one of each kind, of the commonest kinds."""


def simulate(
    deployment: Annotated[Path, typer.Argument(metavar="DEPLOYMENT", help="A TOML file, as `tripool serve --config` "
                                               "takes it.")],
    hardware: Annotated[str, typer.Option(metavar="NAME|FILE", help=f"The machine: {', '.join(known_hardware())}, or a "
                                          "TOML file of your own (docs/hardware.md). None is assumed.")],
    model: Annotated[str, typer.Option(metavar="NAME|FOLDER", help=f"Whose shape: {', '.join(known_models())}, or the "
                                       "folder of a checkpoint, of which only config.json is read; the deployment's "
                                       "model.path if not given.", show_default=False)] = "",
    acceptance: Acceptance = None,
    pull_plane: PullPlane = "scale_out",
    pool_plane: PoolPlane = "scale_up",
    level: Level = None,
    corrections: Corrections = True,
    expert_spread: ExpertSpread = 0.0,
    expert_drift: ExpertDrift = EXPERT_DRIFT_S,
    perfect_balance: PerfectBalance = False,
    npu_hour_price: NpuHourPrice = None,
    workload: TraceFile = None,
    limit: Limit = None,
    speed_up: SpeedUp = 1.0,
    concurrency: Annotated[int, typer.Option(min=0, help="Keep so many requests on their way, whatever their times: "
                                             "the next comes when one ends. 0: each comes at its time.",
                                             rich_help_panel=GOALS)] = 0,
    rate: Rate = None,
    duration: Duration = DURATION_S,
    prompt_tokens: PromptTokens = 1024,
    output_tokens: OutputTokens = 256,
    spread: Spread = 0.0,
    prefixes: Prefixes = 0,
    prefix_tokens: PrefixTokens = 0,
    share: Share = 0.0,
    burst_every: BurstEvery = 0.0,
    burst_seconds: BurstSeconds = 0.0,
    burst_times: BurstTimes = 1.0,
    slo_ttft: Annotated[float | None, typer.Option(min=0.0, metavar="SECONDS", help="A good request has its first "
                                                   "token by then.", show_default=False, rich_help_panel=GOALS)] = None,
    slo_tpot: Annotated[float | None, typer.Option(min=0.0, metavar="SECONDS", help="And no more than this between "
                                                   "its tokens, on average.", show_default=False,
                                                   rich_help_panel=GOALS)] = None,
    failure: Annotated[list[str] | None, typer.Option(metavar="WHAT", help="instance:decode-1@60+30 is killed after 60 "
                                                      "s and back after 30 more; die:decode-0/3@60; cache:cache-0@10; "
                                                      "plane:RDMA@100+5. May be repeated.", show_default=False,
                                                      rich_help_panel=GOALS)] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn. The same seed gives the same outcome, to the "
                                      "last byte.", rich_help_panel=GOALS)] = 0,
    until: Annotated[float | None, typer.Option(min=0.0, max=1e9, metavar="SECONDS", help="End then, whatever is "
                                                "unfinished.", show_default=False, rich_help_panel=GOALS)] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The limit that every request brings: all that schedulers know "
                                            "of its answer.", rich_help_panel=GOALS)] = 65536,
    json: Annotated[str, typer.Option(metavar="FILE", help="All figures; - prints them instead of the table.",
                                      show_default=False, rich_help_panel=ANSWERS)] = "",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="A page with plots, all in one file.",
                                              show_default=False, rich_help_panel=ANSWERS)] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Steps, copies and requests over time, for "
                                               "Perfetto (ui.perfetto.dev) or chrome://tracing.", show_default=False,
                                               rich_help_panel=ANSWERS)] = None,
    trace_window: Annotated[str, typer.Option(metavar="FROM:TO", help="Only these seconds of it.", show_default=False,
                                              rich_help_panel=ANSWERS)] = "",
) -> None:
    """Simulate a deployment under a workload, and say what its users and its machines would see.

    Gateway, router and schedulers are the ones that serve; time is virtual; steps are priced from their operators up,
    copies by the planes of the machine. All figures are simulated.

        tripool simulate deployment.toml --model deepseek-r1 --hardware cloudmatrix384 --workload trace.jsonl
        tripool simulate deployment.toml --model deepseek-r1 --hardware my.toml --rate 20 --slo-ttft 2 --slo-tpot 0.05
        tripool simulate ... --failure instance:decode-1@60+30 --html report.html --trace run.json
    """
    check_files({"--html": html, "--trace": trace, "--json": Path(json) if json not in ("", "-") else None})
    if concurrency and (speed_up != 1.0 or burst_every):
        raise ConfigError(f"--concurrency is {concurrency}, so requests do not come at their times; leave out "
                          f"{'--speed-up' if speed_up != 1.0 else '--burst-every'}")
    source = workload_of(workload, limit, speed_up, rate, SyntheticWork(
        duration, rate or 0.0, prompt_tokens, output_tokens, spread, prefixes, prefix_tokens, share, burst_every,
        burst_seconds, burst_times))
    made = build(Deployment, read_table(deployment), str(deployment))
    assumed = Assumptions(tuple(acceptance or ()), pull_plane, pool_plane, level, corrections, expert_spread,
                          expert_drift, perfect_balance, npu_hour_price)
    machine = hardware_of(hardware)
    rig = rig_of(made, shape_of(model or made.model.path), machine, **assumed.settings())
    work = source.draw(seed) if isinstance(source, SyntheticWork) else source
    _tell_oddities(work, max_tokens)
    slo = Slo(slo_ttft, slo_tpot)
    check_goals(made, rig.costs, work, slo)
    spans = _spans(trace, trace_window)
    simulation = Simulation(made, work, rig, seed=seed, failures=tuple(parse_failure(each) for each in failure or ()),
                            max_tokens=max_tokens, concurrency=concurrency, watcher=spans)
    seconds = _run(simulation, until)
    figures = outcome(simulation, slo)
    if json == "-":
        out.print(as_json(figures), markup=False, end="")
    else:
        out.print(table_of(figures, machine.package.name))
        err.print(f"{len(simulation.users.journeys)} requests and {figures['duration_s']:.1f} s simulated in "
                  f"{seconds:.1f} s")
    for each in simulation.failures:
        if each not in simulation.struck:
            err.print(f"the failure {each} did not happen: the run had ended after {figures['duration_s']:.1f} s")
    if json not in ("", "-"):
        write_whole(Path(json), as_json(figures), "--json")
    if html is not None:
        write_whole(html, page_of(figures), "--html")
    if trace is not None and spans is not None:
        spans.journeys(simulation.users.journeys)
        write_whole(trace, spans.as_json(), "--trace")
        if spans.num_left_out:
            err.print(f"{spans.num_left_out} events are not in {trace}; choose a part with --trace-window FROM:TO")


def _tell_oddities(work: Workload, max_tokens: int) -> None:
    """What is simulated as it was asked for, and perhaps was not meant."""
    cut = sum(each.num_output > max_tokens for each in work.requests)
    if cut:
        err.print(f"{cut} answers are longer than {max_tokens} tokens and are cut there; --max-tokens says how long "
                  "they may be")
    if work.span_s > LONG_SPAN_S:
        err.print(f"the last request of {work.source} comes {work.span_s / 86400:.0f} days after the first; are its "
                  "times in the unit that its format says?", markup=False)


def _run(simulation: Simulation, until_s: float | None) -> float:
    begun = time.perf_counter()
    total = len(simulation.workload.requests)
    with loading("simulating") as tell:
        def progress(at_s: float, num_ended: int) -> None:
            tell(f"{at_s:.0f} s simulated, {num_ended} of {total} requests ended",
                 at_s / until_s if until_s else num_ended / max(total, 1))
        simulation.run(progress, until_s)
    return time.perf_counter() - begun


def _spans(trace: Path | None, window: str) -> Spans | None:
    """What writes the trace, if one is wanted.

    Raises:
        ConfigError: the window is of no trace, or is none.
    """
    if trace is None:
        if window:
            raise ConfigError(f"--trace-window is {window}, but there is no --trace FILE")
        return None
    first, _, last = window.partition(":")
    try:
        begin_s, end_s = float(first or 0), float(last or "inf")
    except ValueError as error:
        raise ConfigError(f"--trace-window is {window!r}; write seconds, FROM:TO") from error
    if not begin_s < end_s:
        raise ConfigError(f"--trace-window is {window}; what it begins with must be less than what it ends with")
    return Spans(begin_s, end_s)


def table_of(figures: dict[str, Any], package: str) -> Table:
    """One screen; `package` is what the machine's accelerators are called."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, title="simulated", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column()
    work, requests, throughput = figures["workload"], figures["requests"], figures["throughput"]
    table.add_row("workload", f"{work['source']}: {work['requests']} requests, {work['prompt_tokens']:,} + "
                              f"{work['output_tokens']:,} tokens "
                  + (f"{work['concurrency']} at once" if work["concurrency"] else f"in {work['span_s']:.1f} s")
                  + f"; seed {figures['seed']}")
    troubles = ", ".join(f"{name} {count}" for name, count in (requests["failed"] | requests["retried"]).items())
    table.add_row("requests", f"{requests['served']} of {requests['sent']} served in {figures['duration_s']:.1f} s"
                  + (f", {requests['unfinished']} unfinished" if requests["unfinished"] else "")
                  + (f"; failed or tried again: {troubles}" if troubles else ""))
    if requests["causes"]:
        kinds: dict[str, str] = {}             # of those that differ in their numbers alone, the commonest
        for cause in requests["causes"]:
            kinds.setdefault(re.sub(r"\d+", "", cause), cause)
        table.add_row("causes", "; ".join([*kinds.values()][:MOST_CAUSES]))
    if figures["failures"]:
        table.add_row("failures", ", ".join(figures["failures"]))
    for name, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("itl_s", "ITL"), ("e2e_s", "E2E")):
        table.add_row(label, _latency(figures["latency"][name]))
    goodput = figures["goodput"]
    if goodput["slo_ttft_s"] is not None or goodput["slo_tpot_s"] is not None:
        table.add_row("goodput", f"{goodput['requests_per_s']:.3g} requests/s, {_percent(goodput['share'])} of all; "
                                 f"{goodput['late_first_token']} late, {goodput['slow_tokens']} slow")
    table.add_row("throughput", f"{throughput['requests_per_s']:.3g} requests/s; tokens/s: "
                                f"{throughput['prompt_tokens_per_s']:,.0f} in, "
                                f"{throughput['output_tokens_per_s']:,.0f} out")
    for role, pool in figures["pools"].items():
        table.add_row(role, f"{pool['instances']} × {pool['ranks']} rank(s), {_percent(pool['utilisation'])} busy; "
                            f"{pool['steps']:,} steps of {show_seconds(pool['mean_step_s'])}; at most "
                            f"{pool['most_rows']} rows"
                            + (f"; {pool['stepped_back']} stepped back" if pool["stepped_back"] else ""))
    if "roles" in figures:
        changes = ", ".join(f"{count} {where}" for where, count in figures["roles"]["changes"].items())
        table.add_row("roles", f"changed: {changes or 'none'}; {figures['roles']['withdrawn']} withdrawn")
    cache = figures["cache"]
    table.add_row("context", f"{_percent(cache['instance_hit_share'])} from the instance, "
                             f"{_percent(cache['pool_hit_share'])} from the pool; {cache['pool_blocks']:,} blocks on "
                             f"{cache['pool_servers']} server(s), {cache['pool_evicted_blocks']:,} evicted")
    for name, plane in figures["planes"].items():
        if plane["transfers"]:
            table.add_row(f"plane {name}", f"{show_bytes(plane['bytes'])} in {plane['transfers']:,} copies; "
                          f"{_percent(plane['utilisation'])} used, {_percent(plane['busiest_second_utilisation'])} at "
                          f"its busiest; {plane['level']}")
    if figures["drafts"]["drafted"]:
        table.add_row("drafts", f"{_percent(figures['drafts']['accepted_share'])} of {figures['drafts']['drafted']:,} "
                                "were right")
    for member, experts in figures["experts"].items():
        if experts["in_steps"] is not None and member.endswith("-0"):
            table.add_row(f"experts {member}", f"the busiest rank had {experts['in_steps']:.2f} times the mean; for "
                          f"long {experts['busiest_now']:.2f}, {experts['busiest_first']:.2f} if none had moved; "
                          f"{experts['experts_moved']:,} copied")
    table.add_row("cost", _cost(figures["cost"], package))
    table.add_row("steps", _levels(figures["step_parts"]))
    table.add_row("corrections", ", ".join(f"{name} {value:g}" for name, value in figures["factors"].items()))
    return table


def _levels(step_parts: dict[str, Any]) -> str:
    """What prices of steps rest on, with its part of their time."""
    told = []
    for role, parts in step_parts.items():
        seconds: dict[str, float] = {}
        for part in parts:
            seconds[part["level"]] = seconds.get(part["level"], 0.0) + part["seconds"]
        total = sum(seconds.values())
        told += [f"{role} " + ", ".join(f"{level} {_percent(each / total)}" for level, each in seconds.items())
                 if total else f"{role} -"]
    return "; ".join(told)


def _latency(spread: dict[str, Any]) -> str:
    if not spread["count"]:
        return "-"
    return "   ".join(f"{name} {show_seconds(spread[name])}" for name in ("p50", "p90", "p99", "mean"))


def _cost(cost: dict[str, Any], package: str) -> str:
    priced = cost["npu_hour_price"] is not None
    told = []
    for name in ("input", "output", "total"):
        hours, money = cost[f"npu_hours_per_million_{name}_tokens"], cost[f"per_million_{name}_tokens"]
        if hours is not None:
            told.append(f"{name} {cost['currency']}{money:.4g}" if priced else f"{name} {hours:.4g} {package}-hours")
    return (f"{cost['npus']:g} {package}s, {cost['npu_hours']:.4g} hours of them; per million tokens: "
            + (", ".join(told) or "-"))


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f} %"
