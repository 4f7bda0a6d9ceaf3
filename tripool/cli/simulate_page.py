"""The outcome of a simulation as one page: plots and all figures in a single HTML file that needs nothing else.

Plots are SVG, drawn here: lines over time, and distributions as the part of requests that a value is enough for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 250, 56, 24, 34, 50       # of a plot, in pixels
COLOURS = ("#1f5fa8", "#c2571a", "#2a7f3f", "#8a3ea8", "#a8862b", "#5b6470", "#b5304f")
MOST_POINTS = 600
PHASES = {"placing": "waiting for a prefill", "prefill": "prefill", "handover": "waiting for a decode",
          "decode": "decode", "retrying": "tried again"}

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1b1f24; max-width: 1180px; margin: 24px auto; padding: 0 16px }
h1 { font-size: 22px; margin: 0 0 4px } h2 { font-size: 16px; margin: 28px 0 8px }
p { margin: 4px 0; color: #444c56 } .plots { display: flex; flex-wrap: wrap; gap: 12px }
svg { border: 1px solid #d8dde3; border-radius: 4px; background: #fff } table { border-collapse: collapse }
td, th { padding: 3px 14px 3px 0; text-align: left; border-bottom: 1px solid #e6e9ed; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums } summary { cursor: pointer; margin: 8px 0 }
"""

Points = Sequence[tuple[float, float]]


def page_of(figures: Mapping[str, Any]) -> str:
    """The whole page."""
    work, timeline = figures["workload"], figures["timeline"]
    at_s = timeline["at_s"]

    def over_time(title: str, lines: Mapping[str, Sequence[float]], unit: str, most: float | None = None) -> str:
        return plot(title, {name: list(zip(at_s, values, strict=True)) for name, values in lines.items()},
                    "seconds", unit, most=most)

    roles = list(figures["pools"])
    pools = [over_time("Pools: time in steps", {role: timeline[f"{role}_utilisation"] for role in roles}, "part", 1.0),
             over_time("Rows in the engines", {role: timeline[f"{role}_rows"] for role in roles}, "rows"),
             over_time("Requests on their way", {words: timeline[f"requests_{phase}"] for phase, words in PHASES.items()
                                                 if any(timeline[f"requests_{phase}"])}, "requests"),
             over_time("Blocks in the pool", {"blocks": timeline["pool_blocks"]}, "blocks")]
    if "roles" in figures:
        pools.append(over_time("Instances in each role", {role: timeline[f"{role}_instances"] for role in roles},
                               "instances"))
    experts = {role: timeline[f"{role}_busiest"] for role in roles if f"{role}_busiest" in timeline}
    if experts:
        pools.append(over_time("Experts: the busiest rank's tokens", experts, "times the mean", 1.0))
    planes = [over_time("Planes: bandwidth in use", {name: timeline[f"plane_{name}_utilisation"]
                                                    for name in figures["planes"]}, "part")]
    spreads = [plot(title, {title: [(value, part) for part, value in enumerate(figures["distribution"][name])]},
                    "seconds", "% of " + ("gaps" if name == "itl_s" else "requests"), most=100.0, logarithmic=True)
               for name, title in (("ttft_s", "TTFT: time to the first token"), ("tpot_s", "TPOT: mean time per token"),
                                   ("itl_s", "ITL: gaps between outputs"), ("e2e_s", "E2E: time to the end"))
               if figures["distribution"].get(name)]
    failures = ", ".join(figures["failures"]) or "none"
    return "\n".join([
        "<!doctype html>", '<html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<title>tripool simulate</title>", f"<style>{STYLE}</style>",
        "<h1>tripool simulate</h1>",
        f"<p>{escape(work['source'])}: {work['requests']:,} requests, {work['prompt_tokens']:,} + "
        f"{work['output_tokens']:,} tokens; seed {figures['seed']}; failures: {escape(failures)}.</p>",
        "<p>Every figure here is simulated: the production control plane in virtual time, with priced steps and "
        "copies.</p>",
        "<h2>Latencies and goodput</h2>", _summary(figures),
        "<h2>Distributions</h2>", _row(spreads), "<h2>Pools</h2>", _row(pools), "<h2>Planes</h2>", _row(planes),
        "<h2>What steps consist of</h2>", _parts(figures),
        "<h2>All figures</h2>", _details(figures), "</html>"]) + "\n"


def plot(title: str, lines: Mapping[str, Points], x_name: str, y_name: str, *, most: float | None = None,
         logarithmic: bool = False) -> str:
    """Lines in one picture; `most` is the least upper end of the y axis. Positive x can be logarithmic."""
    lines = {name: _thinned(points) for name, points in lines.items()}
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    if not xs:
        return ""
    low = min([x for x in xs if x > 0], default=1e-6) if logarithmic else min(xs + [0.0])
    high = max(max(xs), low * 1.01 if logarithmic else low + 1e-9)
    top = max(ys + [most or 0.0]) or 1.0
    scale: Callable[[float], float] = (lambda x: math.log10(max(x, low))) if logarithmic else (lambda x: x)
    span = scale(high) - scale(low) or 1.0
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> str:
        return f"{LEFT + (scale(x) - scale(low)) / span * inner_width:.1f},{TOP + (1 - y / top) * inner_height:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
             ' font-family="sans-serif" font-size="11">',
             f'<text x="{LEFT}" y="15" font-weight="bold">{escape(title)}</text>']
    for value in _ticks(0.0, top):
        y = TOP + (1 - value / top) * inner_height
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e6e9ed"/>'
                     f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#5b6470">{_short(value)}</text>')
    for value in _decades(low, high) if logarithmic else _ticks(low, high):
        x = LEFT + (scale(value) - scale(low)) / span * inner_width
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + inner_height}" stroke="#f0f2f4"/>'
                     f'<text x="{x:.1f}" y="{TOP + inner_height + 14}" text-anchor="middle" fill="#5b6470">'
                     f'{_short(value)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 22}" text-anchor="end" fill="#5b6470">{escape(x_name)}</text>'
                 f'<text x="4" y="{TOP - 6}" fill="#5b6470">{escape(y_name)}</text>')
    legend_x = LEFT + 8
    for (name, points), colour in zip(lines.items(), COLOURS * (len(lines) // len(COLOURS) + 1), strict=False):
        path = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        if len(lines) > 1:
            parts.append(f'<text x="{legend_x}" y="{HEIGHT - 6}" fill="{colour}">{escape(name)}</text>')
            legend_x += 7 * len(name) + 12
    return "".join([*parts, "</svg>"])


def _thinned(points: Points) -> Points:
    """As many as can be seen."""
    every = -(-len(points) // MOST_POINTS)
    return points if every <= 1 else [*points[::every], points[-1]]


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    if high <= low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / 5))
    step *= next(each for each in (1, 2, 5, 10) if (high - low) / (step * each) <= 6)
    return [step * index for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Round numbers on a logarithmic axis."""
    marks = [each * 10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
             for each in (1, 2, 5)]
    inside = [mark for mark in marks if low <= mark <= high]
    if len(inside) < 3:
        return _ticks(low, high)
    return inside if len(inside) <= 8 else [mark for mark in inside if f"{mark:.0e}".startswith("1")] or inside[:8]


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _row(plots: Sequence[str]) -> str:
    return f'<div class="plots">{"".join(plots)}</div>'


def _summary(figures: Mapping[str, Any]) -> str:
    rows = ["<tr><th></th><th>p50</th><th>p90</th><th>p99</th><th>mean</th></tr>"]
    for name, title in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("itl_s", "ITL"), ("e2e_s", "E2E")):
        spread = figures["latency"][name]
        cells = "".join(f'<td class="n">{spread[each] * 1e3:,.1f} ms</td>' if spread["count"] else "<td>-</td>"
                        for each in ("p50", "p90", "p99", "mean"))
        rows.append(f"<tr><td>{title}</td>{cells}</tr>")
    goodput, requests = figures["goodput"], figures["requests"]
    share = f"{100 * goodput['share']:.1f} % of all" if goodput["share"] is not None else "no request came"
    slo = ", ".join(f"{name} ≤ {goodput[key] * 1e3:g} ms" for key, name in (("slo_ttft_s", "TTFT"),
                                                                            ("slo_tpot_s", "TPOT"))
                    if goodput[key] is not None) or "any latency"
    return (f"<table>{''.join(rows)}</table><p>{requests['served']:,} of {requests['sent']:,} requests served; goodput "
            f"({slo}): {goodput['requests_per_s']:.3g} requests/s, {share}.</p>")


def _parts(figures: Mapping[str, Any]) -> str:
    rows = ["<tr><th>pool</th><th>part</th><th>level</th><th>seconds</th><th>share</th></tr>"]
    for role, parts in figures["step_parts"].items():
        total = sum(part["seconds"] for part in parts) or 1.0
        rows += [f'<tr><td>{role}</td><td>{escape(part["part"])}</td><td>{escape(part["level"])}</td>'
                 f'<td class="n">{part["seconds"]:,.1f}</td>'
                 f'<td class="n">{100 * part["seconds"] / total:.1f} %</td></tr>'
                 for part in parts]
    return f"<table>{''.join(rows)}</table>"


def _details(figures: Mapping[str, Any]) -> str:
    """Everything but what is drawn, as folding tables."""
    parts = []
    for name, value in figures.items():
        if isinstance(value, Mapping) and name == "experts":
            value = {member: {key: part for key, part in each.items() if key != "layers"}
                     for member, each in value.items()}
        if name in ("timeline", "distribution", "step_parts"):
            continue
        rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(each)}</td></tr>" for key, each in _flat(value, name))
        parts.append(f"<details><summary>{escape(name)}</summary><table>{rows}</table></details>")
    return "".join(parts)


def _flat(value: Any, name: str) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [pair for key, each in value.items() for pair in _flat(each, f"{name}.{key}")]
    return [(name, "-" if value is None else f"{value:,.6g}" if isinstance(value, float) else str(value))]
