"""`tripool experts`: which experts of a running server are busy, layer by layer, and how evenly its ranks are loaded.

All figures are the server's own (`GET /experts`): tokens per step that each expert got, smoothed over many steps, and
the map of experts in force. A load is shown against the mean of its layer, because tokens per step say how busy a
server is and not how uneven. What is not known yet is a dash.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tripool.api.schema import ExpertsResponse, LayerExperts, MemberExperts, RebalanceResponse
from tripool.cli.client import Client, parse_server
from tripool.cli.expert_loads import (
    COLOURS,
    EDGES,
    SHADES,
    fold,
    max_over_mean_first,
    rank_shares,
    relative_loads,
    worst,
)
from tripool.cli.files import check_writable
from tripool.cli.flags import DEFAULT_URL, Url, show_bytes
from tripool.cli.picture import draw
from tripool.cli.screen import err, out
from tripool.core.errors import ConfigError, RequestError
from tripool.core.placement import EMPTY

DASH = "-"
MAX_RANK_ROWS = 32
NUM_HOT = 12               # experts that --layer lists
BAR_WIDTH = 30
FIGURES_WIDTH = 29         # of what stands beside the heat map

AdminKey = Annotated[str, typer.Option("--api-key", "--admin-api-key", envvar="TRIPOOL_ADMIN_API_KEY",
                                       show_envvar=False, help="The server's admin key.")]


def experts(
    url: Url = DEFAULT_URL,
    admin_api_key: AdminKey = "",
    member: Annotated[str, typer.Option(help="Only this instance.", show_default=False)] = "",
    layer: Annotated[int | None, typer.Option(min=0, help="Show one layer closely: its ranks and its busiest experts. "
                                              "Layers with experts are counted from 0.", show_default=False)] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture too.", show_default=False)] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    rebalance: Annotated[bool, typer.Option("--rebalance", help="First have the experts spread over the ranks anew, "
                                            "whether or not it pays for the copies.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The server's own figures, for other programs.")] = False,
) -> None:
    """See how busy each expert is, and how evenly the ranks of an instance share the work.

    A row is a layer, a column an expert (or a few, of which the busiest is shown, where the terminal is narrow); the
    shade is its load as a multiple of the layer's mean. Beside it: load of the busiest rank over the mean of all
    ranks, now, when the layer was last looked at (before the moves that followed), and as it would be with the map
    that the instance started with. 1.00 is perfect; a step waits for the busiest rank.

        tripool experts
        tripool experts --layer 12              one layer: ranks, busiest experts and their copies
        tripool experts --png experts.png       a picture, also of what each rank has and would have without moves
        tripool experts --watch
        tripool experts --rebalance             spread them anew now

    An operator's command: without an admin key it works on the server's own machine alone.
    """
    if png is not None:
        check_writable(png, "--png")
    if watch and (as_json or png is not None):
        raise ConfigError("--watch is for the terminal; leave out --json and --png")
    try:
        asyncio.run(_show(url, admin_api_key, member, layer, png, interval if watch else None, rebalance, as_json))
    except ConnectionError as error:
        raise ConfigError(f"the connection to {url} was lost: {error}") from error


async def _show(url: str, key: str, member: str, layer: int | None, png: Path | None, interval_s: float | None,
                rebalance: bool, as_json: bool) -> None:
    async with Client(parse_server(url, key)) as client:
        if rebalance:
            body = {"member": member} if member else {}
            answer = (await client.ask("POST", "/rebalance", body, timeout_s=30.0)).json()
            told = msgspec.convert(answer, RebalanceResponse).members
            err.print(f"told to spread their experts anew: {', '.join(told) or 'nobody, since nobody has any'}",
                      markup=False)
        page = await _look(client, member)
        if as_json:
            out.print(msgspec.json.encode(page).decode(), markup=False)
        elif interval_s is None:
            out.print(render(page, layer, out.width, coloured=_is_coloured()))
        else:
            await _watch(client, member, layer, page, interval_s)
        if png is not None:
            write_png(page, png)
            err.print(f"{png} is written", markup=False)


async def _watch(client: Client, member: str, layer: int | None, page: ExpertsResponse, interval_s: float) -> None:
    view = render(page, layer, out.width, coloured=_is_coloured())
    with Live(view, console=out, refresh_per_second=4, screen=out.is_terminal) as live:
        while True:
            await asyncio.sleep(interval_s)
            try:
                page = await _look(client, member)
            except (ConfigError, RequestError, ConnectionError) as error:
                live.update(Text(f"no answer from {client.server.url}: {error}", style="red"))
                continue
            live.update(render(page, layer, out.width, coloured=_is_coloured()))


async def _look(client: Client, member: str) -> ExpertsResponse:
    page = msgspec.convert(await client.get("/experts"), ExpertsResponse)
    if not member:
        return page
    known = [*(each.member for each in page.members), *page.without]
    if member not in known:
        raise ConfigError(f"--member is {member}, but there is no such instance; there are {', '.join(known)}")
    return ExpertsResponse([each for each in page.members if each.member == member],
                           {name: why for name, why in page.without.items() if name == member})


def _is_coloured() -> bool:
    return out.color_system is not None and not out.no_color


def write_png(page: ExpertsResponse, path: Path) -> None:
    """The picture.

    Raises:
        ConfigError: there is nothing to draw.
    """
    shown = [each for each in page.members if each.num_steps]
    if not shown:
        raise ConfigError(f"--png {path}: no instance has counted the tokens of its experts yet; send it some requests")
    draw(shown, path)


# ------------------------------------------------------------------------------- showing


def render(page: ExpertsResponse, layer: int | None, width: int, *, coloured: bool) -> RenderableType:
    """All of it, for a terminal."""
    parts: list[RenderableType] = []
    for member in page.members:
        parts += [_head(member), *_body(member, layer, width, coloured=coloured), Text()]
    parts += [Text(f"{name}: {why}", style="yellow") for name, why in page.without.items()]
    if not page.members and not page.without:
        parts.append(Text("no instance has joined yet", style="yellow"))
    return Group(*parts)


def _head(member: MemberExperts) -> Text:
    num_ranks = len(member.slots_per_rank)
    words = [f"map {member.map_version}", f"{num_ranks} rank{'s' * (num_ranks != 1)}",
             f"{member.num_routed} experts in {sum(member.slots_per_rank)} slots, {len(member.layers)} layers",
             f"{member.num_steps} steps counted",
             f"{member.num_moves} experts moved ({show_bytes(member.moved_bytes)})"]
    text = Text.assemble((member.member, "bold"), "  ", ", ".join(words))
    if member.layers_planned:
        text.append(f"\nof {member.layers_planned} looks at a layer {member.layers_changed} led to another placement, "
                    f"{member.layers_gated} to one that was not worth its moves, {member.layers_blocked} to one with "
                    f"no slot to spare", style="dim")
    if member.lost_ranks:
        text.append(f"\nlost: rank {', '.join(map(str, member.lost_ranks))}", style="red")
    if not member.runnable:
        text.append("\nsome experts are in no slot: no step can run until they are loaded again", style="red")
    if member.cause:
        text.append(f"\nlast failure ({member.num_failures} in all): {member.cause}", style="yellow")
    return text


def _body(member: MemberExperts, layer: int | None, width: int, *, coloured: bool) -> list[RenderableType]:
    if not member.num_steps:
        return [Text("no step has been counted yet; send it some requests", style="yellow")]
    if layer is not None:
        if layer >= len(member.layers):
            raise ConfigError(f"--layer is {layer}; {member.member} has layers 0 to {len(member.layers) - 1}")
        return [Text(), _layer_ranks(member, member.layers[layer]), Text(), _hot_experts(member, member.layers[layer])]
    return [*_heat_map(member, width, coloured=coloured), Text(), _ranks(member)]


def _heat_map(member: MemberExperts, width: int, *, coloured: bool) -> list[RenderableType]:
    several = len(member.slots_per_rank) > 1
    has_shared = member.num_experts > member.num_routed
    room = max(8, width - 7 - 2 * has_shared - (FIGURES_WIDTH if several else 0))
    rows = [relative_loads(member, layer) for layer in member.layers]
    step = -(-member.num_routed // room)
    area = max(-(-member.num_routed // step) + 2 * has_shared, len("experts"))
    what = "" if step == 1 else f"; a column is {step} experts, shown as the busiest of them"
    legend = Text("load over the layer's mean: ", style="dim")
    for level, edge in enumerate((0, *EDGES)):
        legend.append_text(_cells([level], coloured=coloured)).append(f" {edge:g}+  ")
    legend.append(f"(shared expert apart){what}" if has_shared else what.removeprefix("; "))
    title = Text(f"layer  {'experts':<{area}}", style="dim")
    if several:
        title.append("  max/mean  before  first map")
    lines: list[RenderableType] = [legend, title]
    for index, (layer, row) in enumerate(zip(member.layers, rows, strict=True)):
        levels = [bisect_right(EDGES, value) for value in fold(row[:member.num_routed], room)]
        line = Text.assemble(f"{index:>5}  ", _cells(levels, coloured=coloured))
        if has_shared:
            line.append(" ").append_text(_cells([bisect_right(EDGES, row[-1])], coloured=coloured))
        if several:
            line.append(" " * (7 + area - len(line)))
            line.append(_balance(layer.max_over_mean, layer.max_over_mean_before, max_over_mean_first(layer)))
        lines.append(line)
    if several:
        figures = [worst(each(layer) for layer in member.layers) for each in (
            lambda layer: layer.max_over_mean, lambda layer: layer.max_over_mean_before, max_over_mean_first)]
        lines.append(Text(f"worst  {'':<{area}}{_balance(*figures)}", style="bold"))
    else:
        lines.append(Text("one rank: there is nothing to balance", style="dim"))
    return lines


def _balance(now: float | None, before: float | None, first: float | None) -> str:
    return f"{_figure(now):>10}{_figure(before):>8}{_figure(first):>11}"


def _cells(levels: Sequence[int], *, coloured: bool) -> Text:
    text = Text()
    for level, run in groupby(levels):
        count = len(list(run))
        if coloured:
            text.append(" " * count, style=f"on {COLOURS[level]}")
        else:
            text.append(SHADES[level] * count)
    return text


def _ranks(member: MemberExperts) -> RenderableType:
    """Each rank over all layers. Loads with the first map are reckoned from the same counts."""
    now = rank_shares(member, (layer.rank_loads for layer in member.layers))
    first = rank_shares(member, (layer.first_rank_loads for layer in member.layers))
    table = _table("rank", "slots", "load/mean", "with the first map", "waited", "sent")
    for rank, num_slots in enumerate(member.slots_per_rank[:MAX_RANK_ROWS]):
        counts = member.exchange[rank] if rank < len(member.exchange) else None
        lost = rank in member.lost_ranks
        table.add_row(f"{rank} lost" if lost else str(rank), str(num_slots), DASH if lost else f"{now[rank]:.2f}",
                      f"{first[rank]:.2f}", DASH if counts is None else f"{counts.wait_seconds:.1f} s",
                      DASH if counts is None else show_bytes(counts.sent_bytes), style="red" if lost else "")
    if len(member.slots_per_rank) > MAX_RANK_ROWS:
        return Group(table, Text(f"and {len(member.slots_per_rank) - MAX_RANK_ROWS} more ranks (--json has them)",
                                 style="dim"))
    return table


def _layer_ranks(member: MemberExperts, layer: LayerExperts) -> Table:
    """One layer's load of each rank, as bars."""
    top = max(*layer.rank_loads, *layer.first_rank_loads, 1e-9)
    table = _table("rank", "tokens/step", "with the first map")
    table.add_column("", justify="left", no_wrap=True)
    for rank, (now, first) in enumerate(zip(layer.rank_loads, layer.first_rank_loads, strict=True)):
        bar, mark = round(BAR_WIDTH * now / top), round(BAR_WIDTH * first / top)
        line = "█" * bar + "·" * max(0, mark - bar)
        lost = rank in member.lost_ranks
        table.add_row(f"{rank} lost" if lost else str(rank), f"{now:.2f}", f"{first:.2f}", line,
                      style="red" if lost else "")
    return table


def _hot_experts(member: MemberExperts, layer: LayerExperts) -> Table:
    """The busiest experts of a layer and where their copies are."""
    rank_of = [rank for rank, count in enumerate(member.slots_per_rank) for _ in range(count)]
    relative = relative_loads(member, layer)
    table = _table("expert", "tokens/step", "load/mean", "ranks")
    order = sorted(range(member.num_experts), key=lambda expert: (-layer.loads[expert], expert))
    for expert in order[:NUM_HOT]:
        places = [str(rank_of[slot]) for slot, held in enumerate(layer.slots) if held == expert]
        name = f"{expert} shared" if expert >= member.num_routed else str(expert)
        table.add_row(name, f"{layer.loads[expert]:.2f}", f"{relative[expert]:.2f}", ", ".join(places) or DASH)
    empty = sum(held == EMPTY for held in layer.slots)
    if empty:
        table.caption = f"{empty} slots are empty"
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _figure(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"
