"""`tripool replay`: play a recording to fresh machines, and show one request's way through the pools.

`tripool serve --record FOLDER` writes every message that a machine took and what it said. Here they are read
back: decided again, compared, and, for one request, told in order as a table or drawn as a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from xml.sax.saxutils import escape

import typer
from rich.table import Table

from tripool.cli.files import check_writable
from tripool.cli.screen import out
from tripool.core import messages as m
from tripool.core.errors import ConfigError
from tripool.core.request import num_tokens
from tripool.core.timeline import Record
from tripool.serve.recording import read_recording, replay_recording

SHOWN_STEPS = 2                 # of a decode instance, before "and so on"
ROW, LEFT, COLUMN, TOP = 26, 110, 150, 50     # of the picture, in pixels


@dataclass(frozen=True, slots=True)
class Hop:
    """One message on its way."""

    now: float
    source: str
    to: str
    message: Any


def replay(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `tripool serve --record FOLDER` wrote.")],
    request: Annotated[int | None, typer.Option(help="Show this request's way; the last one by default.",
                                                show_default=False)] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it as well.", show_default=False)] = None,
) -> None:
    """Decide everything in a recording again, and show one request's way through the pools.

        tripool serve --prefill 1 --decode 1 --cache 1 --record out/run
        tripool replay out/run --svg out/request.svg
    """
    if svg is not None:
        check_writable(svg, "--svg")
    paths = sorted(path for path in folder.glob("*") if path.is_file()) if folder.is_dir() else []
    if not paths:
        raise ConfigError(f"{folder} holds no recording; make one with `tripool serve --record {folder}`")
    total, mismatches = 0, []
    for path in paths:
        decisions, wrong = replay_recording(path)
        total += decisions
        mismatches += [f"{path.name}: {each}" for each in wrong]
    for line in mismatches[:10]:
        out.print(line, markup=False)
    out.print(f"{total} decisions of {len(paths)} processes replayed, {len(mismatches)} came out otherwise")
    hops = sorted(every_hop(paths), key=lambda hop: hop.now)
    chosen = request if request is not None else last_request(hops)
    if chosen is not None:
        way = way_of(hops, chosen)
        out.print(table_of(way, chosen))
        if svg is not None:
            svg.write_text(picture_of(way, chosen))
            out.print(f"drawn in {svg}")
    if mismatches:
        raise typer.Exit(1)


def every_hop(paths: Iterable[Path]) -> Iterator[Hop]:
    """All messages that machines sent, and the answers that their data planes gave."""
    for path in paths:
        for record in read_recording(path)[1]:
            yield from hops_of(record)


def hops_of(record: Record) -> Iterator[Hop]:
    if isinstance(record.message, m.Fetched | m.Pulled | m.Stored | m.Ran | m.Failed):
        yield Hop(record.now, f"{record.address}/data", record.address, record.message)
    elif isinstance(record.message, m.Submit | m.Cancel):
        yield Hop(record.now, "gateway/api", record.address, record.message)
    for send in record.sends:
        if not send.delay_s and send.to != record.address:
            yield Hop(record.now, record.address, send.to, send.message)


def requests_in(message: Any) -> set[int]:
    """The requests that a message names."""
    match message:
        case m.Submit() | m.Prefill() | m.Admit():
            return {message.request.request_id}
        case m.Tokens():
            return {row[0] for emitted in message.emitted for row in emitted.columns.rows()} \
                | {done.request_id for done in message.done}
        case m.Run():
            return {join.request_id for section in message.plan.sections for join in section.joins}
        case m.MemberChanged() | m.Heartbeat():
            return set()
        case _:
            return {message.request_id} if hasattr(message, "request_id") else set()


def last_request(hops: Iterable[Hop]) -> int | None:
    return next((hop.message.request.request_id for hop in reversed(list(hops)) if isinstance(hop.message, m.Submit)),
                None)


def way_of(hops: list[Hop], request_id: int) -> list[Hop]:
    """A request's way. Copies and steps name no request; those of its members in its time are taken."""
    named = [hop for hop in hops if request_id in requests_in(hop.message)]
    if not named:
        raise ConfigError(f"request {request_id} is not in this recording")
    begun = named[0].now
    ended = next((hop.now for hop in named if isinstance(hop.message, m.Output)
                  and (hop.message.finish or hop.message.error)), named[-1].now)
    members = {hop.to for hop in named if isinstance(hop.message, m.Prefill | m.Admit)}
    verbs = (m.Fetch, m.Fetched, m.Pull, m.Pulled, m.Run, m.Ran, m.Store, m.Stored)
    way, steps = [], dict.fromkeys(members, 0)
    for hop in hops:
        mine = request_id in requests_in(hop.message)
        copies = isinstance(hop.message, verbs) and hop.source.partition("/")[0] in members
        if not begun <= hop.now <= ended + 0.05 or not (mine or copies):
            continue
        if isinstance(hop.message, m.Run):
            steps[hop.source] += 1
        member = hop.source.partition("/")[0]
        repeated = isinstance(hop.message, m.Run | m.Ran | m.Tokens | m.Output) and \
            max(steps.get(member, 0), *(steps[each] for each in members)) > SHOWN_STEPS
        last = isinstance(hop.message, m.Output) and bool(hop.message.finish or hop.message.error)
        if not repeated or last or (isinstance(hop.message, m.Tokens) and hop.message.done):
            way.append(hop)
    return way


DETAILS: dict[type, Callable[[Any], str]] = {      # a few words about a message
    m.Submit: lambda message: (f"{message.request.num_prompt_tokens} prompt tokens, "
                               f"up to {message.request.limits.max_tokens} more"),
    m.Route: lambda message: f"{message.num_tokens} tokens",
    m.Prefilled: lambda message: f"{message.num_tokens} tokens",
    m.Placed: lambda message: f"{message.stage} on {message.member}",
    m.Fetch: lambda message: f"{len(message.keys)} blocks wanted from the pool",
    m.Fetched: lambda message: f"{message.num_blocks} blocks found",
    m.Store: lambda message: f"{len(message.keys)} blocks offered to the pool",
    m.Stored: lambda message: f"{message.num_new} were new",
    m.Admit: lambda message: f"{len(message.grant.parts)} blocks granted by {message.grant.source}",
    m.Pull: lambda message: f"{len(message.into)} blocks from {message.grant.source}",
    m.Ran: lambda message: f"{message.result.seconds * 1e3:.1f} ms in the engine",
    m.Output: lambda message: message.finish or message.error or f"{num_tokens(message.tokens)} token(s)",
}


def detail_of(message: Any) -> str:
    """A few words about a message; none about most."""
    match message:
        case m.Run():
            chunk = sum(each.num_tokens for each in message.plan.sections[0].chunks)
            return f"step {message.plan.step}" + (f", {chunk} known tokens" if chunk else "")
        case m.Tokens():
            count = sum(num_tokens(emitted.columns.tokens) for emitted in message.emitted)
            return f"{count} token(s)" + (", the last" if message.done else "")
        case _:
            describe = DETAILS.get(type(message))
            return describe(message) if describe else ""


def table_of(way: list[Hop], request_id: int) -> Table:
    table = Table(title=f"request {request_id}", title_justify="left")
    for name in ("ms", "from", "to", "message", ""):
        table.add_column(name, justify="right" if name == "ms" else "left")
    for hop in way:
        table.add_row(f"{(hop.now - way[0].now) * 1e3:.1f}", hop.source, hop.to, type(hop.message).__name__,
                      detail_of(hop.message))
    return table


def picture_of(way: list[Hop], request_id: int) -> str:
    """A sequence diagram as SVG: one line down for each part, one arrow for each message."""
    parts = list(dict.fromkeys(part for hop in way for part in (hop.source, hop.to)))
    order = {"gateway/api": 0, "gateway": 1, "gateway/router": 2, "gateway/health": 3}
    parts.sort(key=lambda part: (order.get(part, 4), part.startswith("decode"), part))
    at = {part: LEFT + COLUMN * i for i, part in enumerate(parts)}
    width, height = LEFT + COLUMN * len(parts), TOP + ROW * (len(way) + 1)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
             'font-size="11">', f'<rect width="{width}" height="{height}" fill="white"/>',
             f"<title>The way of request {request_id}</title>",
             '<defs><marker id="a" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">'
             '<path d="M0,0 L6,3 L0,6 z" fill="#246"/></marker></defs>']
    for part, x in at.items():
        lines.append(f'<text x="{x}" y="24" text-anchor="middle" font-weight="bold">{escape(part)}</text>')
        lines.append(f'<line x1="{x}" y1="32" x2="{x}" y2="{height - 8}" stroke="#ccc"/>')
    for i, hop in enumerate(way):
        y = TOP + ROW * i + 10
        x1, x2 = at[hop.source], at[hop.to]
        label = f"{type(hop.message).__name__}"
        lines.append(f'<text x="6" y="{y + 4}" fill="#777">{(hop.now - way[0].now) * 1e3:.1f} ms</text>')
        lines.append(f'<line x1="{x1}" y1="{y}" x2="{x2}" y2="{y}" stroke="#246" marker-end="url(#a)"/>')
        lines.append(f'<text x="{(x1 + x2) / 2}" y="{y - 3}" text-anchor="middle">{label}'
                     f'<title>{escape(detail_of(hop.message))}</title></text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
