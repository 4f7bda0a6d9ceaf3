"""`tripool top`: the pools of a running server, live. Everything shown comes from `/server_info` and `/metrics`.

Rates are differences between two looks; percentiles are of what happened between them where something did, otherwise
since the start. Two looks are made for `--once`, a short while apart.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tripool.cli.client import Client, parse_server
from tripool.cli.flags import DEFAULT_URL, ApiKey, Url, show_bytes
from tripool.cli.screen import out
from tripool.core.errors import ConfigError, RequestError
from tripool.core.messages import ROLES

COLOURS = {"up": "green", "loading": "yellow", "draining": "yellow", "down": "red"}
ONCE_S = 0.5               # between the two looks of --once
BAR_WIDTH = 8


@dataclass(frozen=True, slots=True)
class MemberRow:
    """One instance at one moment. Rates are per second."""

    member: str
    role: str
    state: str
    cause: str
    running: int
    waiting: int
    waiting_tokens: int
    blocks_free: int
    blocks_held: int
    blocks_cached: int
    blocks: int
    tokens_rate: float
    prefill_rate: float
    local_hit_tokens: int
    pool_hit_tokens: int
    preemptions: int
    pulls: int
    drafts_right: list[float]          # of all drafts so far, the share that became tokens, by position


@dataclass(frozen=True, slots=True)
class ExpertRow:
    """The experts of one instance at one moment; None for what is not known. Waits are of all ranks together."""

    member: str
    map_version: int
    max_over_mean: float | None        # load of the busiest rank over the mean, in the worst layer
    max_over_mean_before: float | None
    ranks: int
    lost_ranks: int
    moved_experts: int
    wait_ms_per_step: float | None     # one rank's, on average
    bytes_rate: float | None           # between ranks, per second


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One cache server at one moment."""

    member: str
    up: bool
    blocks: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    misses: int


@dataclass(frozen=True, slots=True)
class View:
    """What is shown."""

    model: str
    status: str
    running: int
    waiting: int
    finished: int
    failed: int
    retried: int
    tokens_rate: float
    ttft_ms_p50: float | None
    itl_ms_p50: float | None
    prompt_tokens: int
    cached_tokens: int
    members: list[MemberRow] = field(default_factory=list)
    caches: list[CacheRow] = field(default_factory=list)
    experts: list[ExpertRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Look:
    """Both pages at one time."""

    at_s: float
    info: Mapping[str, Any]
    metrics: Mapping[str, float]      # sample name with labels -> value


def top(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a look, for other programs.")] = False,
) -> None:
    """Watch the three pools of a running server.

    Of each instance: requests that run and wait; blocks free, held and cached; tokens read (in) and generated (out)
    per second; prompt tokens found in its own cache + in the pool; requests that stepped back for lack of blocks;
    drafts that became tokens, the first of a step, the second, and so on.
    Where ranks share the experts: how much more the busiest has than the mean, in the worst layer, now and before the
    last moves; how long a rank waits for others in a step; what they exchange (`tripool experts` shows each layer).

        tripool top
        tripool top --url http://10.0.0.5:8000 --interval 0.5
        tripool top --once --json | jq .members
    """
    try:
        asyncio.run(_watch(url, api_key, interval, once, as_json))
    except ConnectionError as error:
        raise ConfigError(f"the connection to {url} was lost: {error}") from error


async def _watch(url: str, key: str, interval_s: float, once: bool, as_json: bool) -> None:
    async with Client(parse_server(url, key)) as client:
        last = await look(client)
        if once or as_json:
            while True:
                await asyncio.sleep(ONCE_S if once else interval_s)
                now = await look(client)
                view = compare(last, now)
                if as_json:
                    out.print(json.dumps(asdict(view)), markup=False)
                else:
                    out.print(render(view))
                if once:
                    return
                last = now
        with Live(render(compare(last, last)), console=out, refresh_per_second=4, screen=out.is_terminal) as live:
            while True:
                await asyncio.sleep(interval_s)
                try:
                    now = await look(client)
                except (ConfigError, RequestError, ConnectionError) as error:
                    live.update(Text(f"no answer from {url}: {error}", style="red"))
                    continue
                live.update(render(compare(last, now)))
                last = now


async def look(client: Client) -> Look:
    """Read both pages."""
    info = await client.get("/server_info")
    page = await client.ask("GET", "/metrics", timeout_s=30.0)
    return Look(time.monotonic(), info, parse_metrics(page.body.decode()) if page.status == 200 else {})


def parse_metrics(page: str) -> dict[str, float]:
    """Samples of a Prometheus page: `name{labels}` -> value."""
    samples = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


def compare(before: Look, now: Look) -> View:
    """What a look and the one before it say together."""
    seconds = max(1e-9, now.at_s - before.at_s)
    backend, old = backend_of(now.info), backend_of(before.info)
    reports, old_reports = backend.get("reports", {}), old.get("reports", {})
    gateway = backend.get("gateway", {})
    phases = gateway.get("phases", {})
    rows = [_member_row(each, reports.get(each["member"], {}), old_reports.get(each["member"], {}), seconds)
            for each in now.info["members"]]
    waiting = phases.get("placing", 0) + phases.get("retrying", 0)
    return View(
        model=now.info["model"], status=now.info["status"]["cause"] or now.info["status"]["status"],
        running=sum(phases.values()) - waiting, waiting=waiting,
        finished=sum(gateway.get("finished", {}).values()), failed=sum(gateway.get("failed", {}).values()),
        retried=sum(gateway.get("retried", {}).values()),
        tokens_rate=_rate(gateway, old.get("gateway", {}), "output_tokens", seconds),
        ttft_ms_p50=_median_ms(before.metrics, now.metrics, "tripool:time_to_first_token_seconds"),
        itl_ms_p50=_median_ms(before.metrics, now.metrics, "tripool:inter_token_latency_seconds"),
        prompt_tokens=gateway.get("prompt_tokens", 0), cached_tokens=gateway.get("cached_tokens", 0),
        members=rows, caches=[_cache_row(name, values) for name, values in sorted(backend.get("caches", {}).items())],
        experts=[_expert_row(each["member"], reports[each["member"]], old_reports.get(each["member"], {}), seconds)
                 for each in now.info["members"] if "expert_map_version" in reports.get(each["member"], {})])


def backend_of(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the gateway process adds to the HTTP side's own settings."""
    found = info.get("backend") or info.get("settings") or {}
    assert isinstance(found, Mapping)
    return found


def _member_row(said: Mapping[str, Any], report: Mapping[str, float], old: Mapping[str, float],
                seconds: float) -> MemberRow:
    """An instance's row: its state as the gateway judges it, the rest as it reports itself."""
    def count(name: str) -> int:
        return int(report.get(name, 0))

    return MemberRow(
        said["member"], said["role"], said["state"], said["cause"],
        said["num_running"], count("num_waiting"), said["num_waiting_tokens"], count("num_free_blocks"),
        count("num_held_blocks") + count("num_quarantined_blocks"), count("num_cached_blocks"), count("num_blocks"),
        _rate(report, old, "generated_tokens", seconds), _rate(report, old, "computed_tokens", seconds),
        count("local_hit_tokens"), count("pool_hit_tokens"), count("preemptions"), count("pulls"),
        drafts_right(report))


def drafts_right(report: Mapping[str, float]) -> list[float]:
    """How often a draft became a token, for each position of a step at which there were drafts."""
    shares: list[float] = []
    while drafted := report.get(f"drafted_tokens:position={len(shares) + 1}"):
        shares.append(report.get(f"accepted_tokens:position={len(shares) + 1}", 0) / drafted)
    return shares


def _expert_row(member: str, report: Mapping[str, float], old: Mapping[str, float], seconds: float) -> ExpertRow:
    ranks = int(report["num_ranks"])
    waits = {name: value for name, value in report.items() if name.startswith("exchange_wait_seconds:")}
    wait_ms, bytes_rate = None, None
    if waits:
        steps = _rate(report, old, "steps", seconds)
        if steps > 0:
            wait_ms = sum(_rate(report, old, name, seconds) for name in waits) / len(waits) / steps * 1e3
        bytes_rate = sum(_rate(report, old, name, seconds) for name in report
                         if name.startswith("exchange_sent_bytes:"))
    return ExpertRow(member, int(report["expert_map_version"]), report.get("expert_load_max_over_mean"),
                     report.get("expert_load_max_over_mean_before"), ranks, ranks - int(report["num_live_ranks"]),
                     int(report.get("expert_moves", 0)), wait_ms, bytes_rate)


def _cache_row(name: str, values: Mapping[str, float]) -> CacheRow:
    def count(name: str) -> int:
        return int(values.get(name, 0))

    return CacheRow(name, bool(count("up")), count("blocks"), count("used_bytes"), count("capacity_bytes"),
                    count("hits"), count("misses"))


def _rate(now: Mapping[str, Any], before: Mapping[str, Any], name: str, seconds: float) -> float:
    """A counter's growth; a process that began anew begins at nothing."""
    value, old = float(now.get(name, 0)), float(before.get(name, 0))
    return (value - old if value >= old else value) / seconds


def _median_ms(before: Mapping[str, float], now: Mapping[str, float], name: str) -> float | None:
    """The median of a histogram: of what is new since `before`, or of all if nothing is."""
    buckets = histogram(now, name)
    old = dict(histogram(before, name))
    recent = [(edge, count - old.get(edge, 0)) for edge, count in buckets]
    if recent and recent[-1][1] > 0:
        buckets = recent
    median = quantile(buckets, 0.5)
    return None if median is None else median * 1e3


def histogram(samples: Mapping[str, float], name: str) -> list[tuple[float, float]]:
    """(upper edge, count up to it) of a histogram, all label sets together."""
    counts: dict[float, float] = {}
    for sample, value in samples.items():
        if sample.startswith(f"{name}_bucket{{"):
            found = re.search(r'le="([^"]+)"', sample)
            assert found is not None, f"{sample} is a bucket without an edge"
            edge = float(found.group(1))
            counts[edge] = counts.get(edge, 0) + value
    return sorted(counts.items())


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """A quantile of a histogram, linear within its bucket; None of an empty one."""
    if not buckets or buckets[-1][1] <= 0:
        return None
    wanted, low, below = share * buckets[-1][1], 0.0, 0.0
    for edge, count in buckets:
        if count >= wanted:
            if math.isinf(edge) or count == below:
                return low
            return low + (edge - low) * (wanted - below) / (count - below)
        low, below = edge, count
    return low


# ------------------------------------------------------------------------------- showing


def render(view: View) -> RenderableType:
    """The view, for a terminal."""
    hits = f"{view.cached_tokens / view.prompt_tokens:.0%}" if view.prompt_tokens else "-"
    head = Text.assemble((view.model, "bold"), "  ", (view.status, "green" if view.status == "ready" else "yellow"))
    words = Text(f"{view.running} running, {view.waiting} waiting, {view.finished} finished, {view.failed} failed, "
                 f"{view.retried} retried\n{view.tokens_rate:.0f} tokens/s, TTFT p50 {_ms(view.ttft_ms_p50)}, "
                 f"ITL p50 {_ms(view.itl_ms_p50)}, prompt tokens reused {hits}", style="dim")
    parts: list[RenderableType] = [head, words]
    for role in ROLES:
        rows = [row for row in view.members if row.role == role]
        if rows:
            parts += [Text(), _members_table(role, rows)]
    if any(row.ranks > 1 for row in view.experts):
        parts += [Text(), _experts_table([row for row in view.experts if row.ranks > 1])]
    if view.caches:
        parts += [Text(), _caches_table(view.caches)]
    parts += [Text(f"{row.member} is {row.state}: {row.cause}", style=COLOURS.get(row.state, ""))
              for row in view.members if row.cause and row.state != "up"]
    return Group(*parts)


def _members_table(role: str, rows: Sequence[MemberRow]) -> Table:
    """One pool. What a role never does has no column, so that it fits a narrow terminal."""
    columns: dict[str, Callable[[MemberRow], str | Text]] = {
        "state": lambda row: Text(row.state, style=COLOURS.get(row.state, "")),
        "run": lambda row: str(row.running), "wait": lambda row: str(row.waiting), "blocks": _bar,
        "free": lambda row: str(row.blocks_free), "held": lambda row: str(row.blocks_held),
        "cached": lambda row: str(row.blocks_cached),
    }
    if role != "decode":
        columns |= {"in/s": lambda row: f"{row.prefill_rate:.0f}",
                    "hits": lambda row: f"{row.local_hit_tokens}+{row.pool_hit_tokens}"}
    if role != "prefill":
        columns |= {"out/s": lambda row: f"{row.tokens_rate:.0f}", "back": lambda row: str(row.preemptions)}
    if any(row.drafts_right for row in rows):
        columns |= {"drafts": lambda row: " ".join(f"{share:.0%}" for share in row.drafts_right) or "-"}
    if role == "decode":
        columns |= {"pulls": lambda row: str(row.pulls)}
    table = _table(role, *columns)
    for row in rows:
        table.add_row(row.member, *(cell(row) for cell in columns.values()))
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column(first, min_width=10, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column in ("state", "blocks") else "right", no_wrap=True)
    return table


def _caches_table(rows: Sequence[CacheRow]) -> Table:
    table = _table("cache", "state", "holds", "used", "of", "hits", "misses")
    for row in rows:
        table.add_row(row.member, Text("up", style="green") if row.up else Text("down", style="red"), str(row.blocks),
                      show_bytes(row.used_bytes), show_bytes(row.capacity_bytes), str(row.hits), str(row.misses))
    return table


def _experts_table(rows: Sequence[ExpertRow]) -> Table:
    table = _table("experts", "map", "max/mean", "before", "ranks", "lost", "moved", "wait/step", "exchanged/s")
    for row in rows:
        table.add_row(row.member, str(row.map_version), _ratio(row.max_over_mean), _ratio(row.max_over_mean_before),
                      str(row.ranks), Text(str(row.lost_ranks), style="red" if row.lost_ranks else ""),
                      str(row.moved_experts), _ms(row.wait_ms_per_step),
                      "-" if row.bytes_rate is None else show_bytes(row.bytes_rate))
    return table


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _bar(row: MemberRow) -> Text:
    """Blocks held and cached as a bar."""
    total = max(1, row.blocks)
    held = math.ceil(BAR_WIDTH * row.blocks_held / total)
    cached = min(BAR_WIDTH - held, math.ceil(BAR_WIDTH * row.blocks_cached / total))
    return Text.assemble(("█" * held, "green"), ("▒" * cached, "cyan"), ("·" * (BAR_WIDTH - held - cached), "dim"))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"
