"""`tripool plan`: which deployment for which workload, on a machine that is described.

What is planned is what is simulated and served: the answer is a deployment file. It is written, read back as `serve`
reads it, and compared with what was planned.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict, replace
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
from tripool.cli.files import check_files, make_folder, write_whole, writing
from tripool.cli.flags import parse_bytes, read_deployment, show_bytes, show_deployment
from tripool.cli.machines import hardware_of
from tripool.cli.models import path_of, shape_of
from tripool.cli.plan_picture import draw
from tripool.cli.screen import as_json, err, loading, out, show_seconds
from tripool.cli.workload import (
    DURATION_S,
    SYNTHETIC,
    BurstEvery,
    BurstSeconds,
    BurstTimes,
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
from tripool.core.deployment import Deployment, InstanceConfig, ModelConfig, build, read_table
from tripool.core.errors import ConfigError
from tripool.core.messages import ROLES
from tripool.planner.finalists import Found, Plan, confirm, settle
from tripool.planner.fit import Machine
from tripool.planner.frontier import Point, frontier, points
from tripool.planner.goals import Goals, budget_of
from tripool.planner.search import Candidate, Question, Search
from tripool.planner.sensitivity import Variant, choose, variants
from tripool.planner.traffic import Traffic
from tripool.planner.trial import Outcome, Workers
from tripool.planner.words import describe, differences, ratio
from tripool.serve.budget import usable_cores
from tripool.sim.costs.models import known_models
from tripool.sim.hardware.description import Hardware, known_hardware
from tripool.sim.machine import EXPERT_DRIFT_S
from tripool.sim.synthetic import SyntheticWork

GOALS, SPENT, ANSWERS = "Goals", "What may be spent", "What is written"
MOST_SHOWN = 10            # points of the front


def plan(
    model: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(known_models())}, or the folder of a "
                                       "checkpoint.")],
    hardware: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(known_hardware())}, or a TOML file of "
                                          "your own. None is assumed.")],
    slo_ttft: Annotated[float, typer.Option(metavar="SECONDS", help="A good request has its first token by then.",
                                            rich_help_panel=GOALS)],
    slo_tpot: Annotated[float, typer.Option(metavar="SECONDS", help="And no more than this between its tokens, on "
                                            "average.", rich_help_panel=GOALS)],
    slo_share: Annotated[float, typer.Option(help="Part of all requests that must be good.",
                                             rich_help_panel=GOALS)] = 0.9,
    workload: TraceFile = None,
    limit: Limit = None,
    speed_up: SpeedUp = 1.0,
    rate: Rate = None,
    duration: Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="Taken because `tripool simulate` takes "
                                            "it, and not used: a plan is for requests that go on coming.",
                                            rich_help_panel=SYNTHETIC)] = DURATION_S,
    prompt_tokens: PromptTokens = 1024,
    output_tokens: OutputTokens = 256,
    spread: Spread = 0.0,
    prefixes: Prefixes = 0,
    prefix_tokens: PrefixTokens = 0,
    share: Share = 0.0,
    burst_every: BurstEvery = 0.0,
    burst_seconds: BurstSeconds = 0.0,
    burst_times: BurstTimes = 1.0,
    npus: Annotated[int | None, typer.Option(min=1, help="At most so many; the whole machine if not given.",
                                             show_default=False, rich_help_panel=SPENT)] = None,
    budget: Annotated[float | None, typer.Option(min=0.0, max=1e12, metavar="PRICE", help="The same as a price per "
                                                 "hour.", show_default=False, rich_help_panel=SPENT)] = None,
    node_cache: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each node for the pool (512GiB); if not "
                                            "given half of what the hardware says, and where that says nothing, as "
                                            "much as helps.", show_default=False,
                                            rich_help_panel=SPENT)] = "",
    most: Annotated[bool, typer.Option("--most", help="Not the fewest NPUs for this workload, but the most of it that "
                                       "they serve: requests come faster until the goals are missed.",
                                       rich_help_panel=GOALS)] = False,
    acceptance: Acceptance = None,
    pull_plane: PullPlane = "scale_out",
    pool_plane: PoolPlane = "scale_up",
    level: Level = None,
    corrections: Corrections = True,
    expert_spread: ExpertSpread = 0.0,
    expert_drift: ExpertDrift = EXPERT_DRIFT_S,
    perfect_balance: PerfectBalance = False,
    npu_hour_price: NpuHourPrice = None,
    against: Annotated[Path | None, typer.Option(metavar="DEPLOYMENT", help="A deployment to compare with, simulated "
                                                 "under the same workload.", show_default=False,
                                                 rich_help_panel=ANSWERS)] = None,
    to: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Deployment files: best.toml, the others "
                                            "by their number, and hybrid.toml. `simulate` and `serve --config` take "
                                            "them.", show_default=False, rich_help_panel=ANSWERS)] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="The front, drawn.", show_default=False,
                                             rich_help_panel=ANSWERS)] = None,
    json: Annotated[str, typer.Option(metavar="FILE", help="All figures; - prints them instead of the tables.",
                                      show_default=False, rich_help_panel=ANSWERS)] = "",
    processes: Annotated[int, typer.Option(min=0, help="Simulations at a time; 0: one for each core.",
                                           rich_help_panel=ANSWERS)] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.", rich_help_panel=ANSWERS)] = 0,
) -> None:
    """Find the deployment that serves a workload within goals on the fewest NPUs, or the most of it on so many.

    Hundreds of designs are screened in closed form, the best are simulated by the machinery of `tripool simulate` and
    mended: sizes of the pools, ranks of an instance (its EP degree), batch, blocks, redundant experts, cache, drafts,
    microbatches. Instances that do both, prefill and decode, are the baseline; where they win, nothing is split.

        tripool plan --model deepseek-r1 --hardware cloudmatrix384 --rate 60 --prompt-tokens 4096 --slo-ttft 4
            --slo-tpot 0.05 --acceptance 0.7 --out plans
        tripool plan ... --workload conversation_trace.jsonl --npus 64 --png front.png
        tripool plan ... --npus 256 --most --against ours.toml
        tripool simulate plans/best.toml --hardware cloudmatrix384 ...
    """
    check_files({"--png": png, "--json": Path(json) if json not in ("", "-") else None})
    if to is not None:
        make_folder(to, "--out")
    assumed = Assumptions(tuple(acceptance or ()), pull_plane, pool_plane, level, corrections, expert_spread,
                          expert_drift, perfect_balance, npu_hour_price)
    machine = Machine(shape_of(model), hardware_of(hardware), assumed.settings())
    work = workload_of(workload, limit, speed_up, rate, SyntheticWork(
        duration, rate or 0.0, prompt_tokens, output_tokens, spread, prefixes, prefix_tokens, share, burst_every,
        burst_seconds, burst_times))
    spent = budget_of(machine.hardware, npus, budget, npu_hour_price, parse_bytes(node_cache) if node_cache else None)
    question = Question(machine, Traffic(work, seed), Goals(slo_ttft, slo_tpot, slo_share), spent, most,
                        ModelConfig(path=path_of(model)), len(acceptance or ()))
    other = build(Deployment, read_table(against), str(against)) if against is not None else None
    if other is not None:
        machine.rig(other)                 # whether it can be simulated at all, before minutes are spent on ours
    begun = time.perf_counter()
    with Workers(processes or usable_cores()) as workers, loading("planning") as tell:
        search = Search(question, tell)
        candidates = search.candidates()
        given = [search.given(other)] if other is not None else []
        found = confirm(search, workers, settle(search, workers, candidates + given))
        asked = list(variants(question))
        changes = workers.each(choose, asked, lambda number: tell("what if", number / len(asked)))
    theirs = next((each for each in (*found.plans, *found.failed) if each.candidate.is_fixed), None)
    found = _without(found, theirs)
    if not found.plans:
        raise ConfigError(_nothing_keeps(found, question, machine.hardware))
    front = points(search)
    options = shlex.join(["--hardware", hardware, *assumed.options()])
    written = _write(found, to, question, options) if to is not None else []
    if png is not None:
        with writing(png, "--png"):
            draw(front, [(1 / each.outcome.tpot_s, each.outcome.output_tokens_per_s / each.outcome.npus)
                         for each in found.plans if each.outcome.tpot_s], slo_tpot, machine.hardware.package.name, png)
    figures = _figures(search, found, theirs, front, changes, time.perf_counter() - begun)
    if json == "-":
        out.print(as_json(figures), markup=False, end="")
        return
    if json:
        write_whole(Path(json), as_json(figures), "--json")
    _show(search, found, theirs, front, changes)
    for path in written:
        out.print(f"written: {path}", markup=False)
    err.print(f"planned in {time.perf_counter() - begun:.1f} s")


def _without(found: Found, plan_: Plan | None) -> Found:
    return replace(found, plans=tuple(each for each in found.plans if each is not plan_),
                   failed=tuple(each for each in found.failed if each is not plan_))


def _nothing_keeps(found: Found, question: Question, hardware: Hardware) -> str:
    """What came nearest, and what it missed."""
    nearest = max(found.failed, key=lambda each: each.outcome.share)
    told, goals = nearest.outcome, question.goals
    why = f"; {told.failed:.0%} failed: {told.cause}" if told.failed > 0.01 and told.cause else ""
    return (f"no deployment keeps the goals for {goals.share:.0%} of the requests within the budget. Nearest is "
            f"{describe(nearest.deployment, hardware)}, with {told.share:.1%}: {told.late:.1%} have a late first token "
            f"(TTFT {told.ttft_s:.3g} s, goal {goals.ttft_s:g}), {told.slow:.1%} have slow tokens "
            f"(TPOT {told.tpot_s:.3g} s, goal {goals.tpot_s:g}){why}")


# ---------------------------------------------------------------------- files


def _write(found: Found, folder: Path, question: Question, options: str) -> list[Path]:
    """Deployment files, each read back as `serve` and `simulate` read it.

    Raises:
        ConfigError: one cannot be written, or what was read back is not what was planned.
    """
    written = []
    for number, each in enumerate(found.plans, start=1):
        name = "best" if number == 1 else str(number) if each.candidate.is_split else "hybrid"
        path = folder / f"{name}.toml"
        write_whole(path, plan_text(each, question, options), "--out")
        check_written(path, each.deployment)
        written.append(path)
    return written


def plan_text(each: Plan, question: Question, options: str) -> str:
    """A deployment file that says at its head what it was planned for, and with which `options` it is simulated."""
    goals, told, hardware = question.goals, each.outcome, question.machine.hardware
    lines = [f"{describe(each.deployment, hardware)}, planned by `tripool plan` for {hardware.name}.",
             f"Simulated at {told.requests_per_s:.4g} requests/s: {told.share:.1%} keep TTFT {goals.ttft_s:g} s and "
             f"TPOT {goals.tpot_s:g} s (goal {goals.share:.0%}).",
             f"Planned with what `tripool simulate` takes as: {options}",
             "Answers are not kept in the cache (store_generated): the workload does not say who asks for them again."]
    return "".join(f"# {line}\n" for line in lines) + "\n" + show_deployment(each.deployment, changed_only=True)


def check_written(path: Path, planned: Deployment) -> None:
    """See that a file says what was planned, to `simulate` and to `serve`.

    Raises:
        ConfigError: it does not.
    """
    read = build(Deployment, read_table(path), str(path))
    served = read_deployment(path, {}, usable_cores())     # which keeps packed weights on this machine, besides
    served = replace(served, model=replace(served.model, weights_cache=planned.model.weights_cache))
    if read != planned or served != planned:
        raise ConfigError(f"{path} was read back as another deployment than was planned")


# ---------------------------------------------------------------------- the screen


def _show(search: Search, found: Found, theirs: Plan | None, front: list[Point], changes: list[Variant]) -> None:
    question, hardware = search.question, search.question.machine.hardware
    goals, npu = question.goals, hardware.package.name
    title = (f"The {'most' if question.most else 'fewest'} for TTFT {goals.ttft_s:g} s and TPOT {goals.tpot_s:g} s, "
             f"kept by {goals.share:.0%} (simulated)")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in ("", "pools", "good/s", f"tokens/s per {npu}", "good", "TTFT", "TPOT", "steps full"):
        table.add_column(name, justify="left" if name in ("", "pools", "steps full") else "right")
    rows = [(str(number), each) for number, each in enumerate(found.plans, start=1)]
    rows += [("yours", theirs)] if theirs is not None else []
    for name, each in rows:
        told = each.outcome
        full = ", ".join(f"{role} {part:.0%}" for role, part in told.full.items())
        table.add_row(name, describe(each.deployment, hardware), f"{told.goodput:.4g}",
                      f"{told.output_tokens_per_s / told.npus:,.4g}", f"{told.share:.1%}", show_seconds(told.ttft_s),
                      show_seconds(told.tpot_s), full)
    out.print(table)
    out.print(_verdict(found, question), markup=False)
    out.print(_details(found.plans[0], search))
    factors = ", ".join(f"{name} {value:g}" for name, value in _factors(found, question).items())
    out.print(f"Prices of steps: {_level(question)}; corrections: {factors or '-'}", markup=False)
    if theirs is not None:
        out.print(_compared(found.plans[0], theirs, question))
    out.print(_front(front, npu))
    out.print(_what_if(question, search.candidates()[0], changes))


def _verdict(found: Found, question: Question) -> str:
    """Whether to split, and what bounds the best."""
    split, whole = found.split, found.whole
    best = found.plans[0].outcome
    if split is None:
        words = "Do not split: instances that do both keep the goals, split ones do not within the budget."
    elif whole is None:
        words = "Split: instances that do both do not keep the goals within the budget."
    else:
        mine, theirs = _worth(split, question), _worth(whole, question)
        words = (f"Split: {mine / theirs:.2f} times what instances that do both serve for an NPU." if mine > theirs else
                 f"Do not split: instances that do both serve {theirs / mine:.2f} times as much for an NPU.")
    ttft, tpot = best.ttft_s / question.goals.ttft_s, best.tpot_s / question.goals.tpot_s
    return (f"{words} The best is bound by its {'TTFT' if ttft > tpot else 'TPOT'} goal: {question.goals.share:.0%} of "
            f"its requests need up to {ttft:.0%} of the TTFT and {tpot:.0%} of the TPOT.")


def _worth(each: Plan, question: Question) -> float:
    """Good requests a second for an NPU."""
    return each.outcome.goodput / each.outcome.npus


def _details(best: Plan, search: Search) -> Table:
    made, machine = best.deployment, search.question.machine
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="1 in detail", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for role in ROLES:
        config: InstanceConfig = getattr(made, role)
        if not config.count:
            continue
        experts = [f"EP{config.ranks}"] if machine.shape.num_routed_experts else []
        experts += [f"{config.redundant_experts} redundant"] if config.redundant_experts else []
        experts += [f"{config.shared_expert_copies} of the shared one"] if config.shared_expert_copies else []
        drafts = f"{config.num_speculative_tokens} draft(s)" if config.num_speculative_tokens else "no drafts"
        table.add_row(role, f"{config.count} × {config.ranks} rank(s)" + (f" ({', '.join(experts)})" if experts else "")
                      + f"; {config.max_num_seqs} rows and {config.max_num_batched_tokens} tokens a step, "
                      f"{config.cache_tokens // made.block_tokens} blocks of {made.block_tokens} tokens on each; "
                      + (drafts + ", " if role != "prefill" else "")
                      + ("two microbatches" if config.microbatches else "one batch"))
    table.add_row("prefill : decode", ratio(made))
    if made.cache.count:
        table.add_row("cache", f"{made.cache.count} server(s) of {show_bytes(made.cache.bytes)}; "
                      f"{best.outcome.reused_share:.1%} of the prompts' tokens were there")
    else:
        table.add_row("cache", "none: prompts share too little")
    return table


def _compared(best: Plan, theirs: Plan, question: Question) -> Table:
    factor = best.outcome.goodput / theirs.outcome.goodput if theirs.outcome.goodput else float("inf")
    title = f"1 serves {factor:.2f} times what yours does; what differs" if question.most else \
        f"1 has {best.outcome.npus:g}, yours {theirs.outcome.npus:g}; what differs"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in ("", "1", "yours"):
        table.add_column(name)
    for row in differences(best.deployment, theirs.deployment):
        table.add_row(*row)
    return table


def _front(found: list[Point], npu: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="What speed costs (closed form)", title_justify="left")
    for name in ("TPOT", "tokens/s of a user", f"per {npu}", "", "decoding instances"):
        table.add_column(name, justify="left" if name in ("", "decoding instances") else "right")
    best = frontier(found)
    shown = best if len(best) <= MOST_SHOWN else [best[round(index * (len(best) - 1) / (MOST_SHOWN - 1))]
                                                  for index in range(MOST_SHOWN)]
    for point in shown:
        table.add_row(show_seconds(point.tpot_s), f"{point.tokens_per_s_per_user:.1f}",
                      f"{point.tokens_per_s_per_npu:,.4g}", "split" if point.is_split else "not split", point.words)
    return table


def _what_if(question: Question, chosen: Candidate, changes: list[Variant]) -> Table:
    """Beside what the closed form alone chooses, which the simulation may have mended."""
    hardware = question.machine.hardware
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="If the workload or a goal were another (closed form)",
                  title_justify="left")
    for name in ("", "requests/s", "best"):
        table.add_column(name, justify="right" if name == "requests/s" else "left")
    table.add_row("as they are", f"{chosen.times * question.traffic.requests_per_s:.4g}",
                  describe(chosen.deployment, hardware))
    for each in changes:
        if each.deployment is None:
            table.add_row(each.words, "-", each.cause)
            continue
        same = _sizes(each.deployment) == _sizes(chosen.deployment)
        table.add_row(each.words, f"{each.requests_per_s:.4g}",
                      describe(each.deployment, hardware) + (" (the same)" if same else ""))
    return table


def _sizes(deployment: Deployment) -> list[tuple[int, int]]:
    return [(getattr(deployment, role).count, getattr(deployment, role).ranks) for role in ROLES]


# ---------------------------------------------------------------------- figures


def _figures(search: Search, found: Found, theirs: Plan | None, front: list[Point], changes: list[Variant],
             seconds: float) -> dict[str, Any]:
    question = search.question
    return {
        "kind": "simulated", "seconds": seconds, "hardware": question.machine.hardware.name,
        "goals": asdict(question.goals), "budget_dies": question.budget.num_dies, "most": question.most,
        "requests_per_s": question.traffic.requests_per_s,
        "level": _level(question), "factors": _factors(found, question),
        "plans": [_plan_figures(each, question) for each in found.plans],
        "failed": [_plan_figures(each, question) for each in found.failed],
        "against": _plan_figures(theirs, question) if theirs is not None else None,
        "verdict": _verdict(found, question),
        "front": [{"kind": "closed form", "tpot_s": each.tpot_s, "tokens_per_s_per_npu": each.tokens_per_s_per_npu,
                   "split": each.is_split, "decoding": each.words} for each in frontier(front)],
        "what_if": [{"kind": "closed form", "change": each.words, "requests_per_s": each.requests_per_s,
                     "deployment": describe(each.deployment, question.machine.hardware) if each.deployment else None,
                     "cause": each.cause or None} for each in changes],
    }


def _level(question: Question) -> str:
    """What prices of steps rest on."""
    machine = question.machine
    return machine.settings.get("level") or ("measured" if machine.hardware.steps else "efficiency")


def _factors(found: Found, question: Question) -> dict[str, float]:
    """Corrections and assumptions in the prices of the best, by name."""
    return dict(question.machine.rig(found.plans[0].deployment).factors)


def _plan_figures(each: Plan, question: Question) -> dict[str, Any]:
    told: Outcome = each.outcome
    values = asdict(told)
    values.pop("trial")
    return {"deployment": describe(each.deployment, question.machine.hardware), "split": each.candidate.is_split,
            "goodput_requests_per_s": told.goodput, "simulated_s": told.trial.seconds, **values,
            "closed_form_requests_per_s": each.candidate.predicted * question.traffic.requests_per_s,
            "toml": show_deployment(each.deployment, changed_only=True)}
