"""Makes the README's tables of figures from the files in `bench/results`, so that no number is typed by hand.

    python bench/tables.py            rewrite README.md and README.zh-CN.md
    python bench/tables.py --check    say whether they are as they should be (exit 1 if not)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from common import ROOT

RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- figures: made by bench/tables.py -->", "<!-- end of figures -->"
PAGES = {
    "README.md": {
        "heads": ("figure", "value", "bar", "kind", "samples"), "measured": "measured on", "engine": "tokens/s",
        "of": "checkpoint `{model}`, threads: {threads}", "not_run": "Did not run", "single": "Read once"},
    "README.zh-CN.md": {
        "heads": ("指标", "值", "目标", "性质", "样本数"), "measured": "测量环境", "engine": "tokens/s",
        "of": "检查点 `{model}`，线程数 {threads}", "not_run": "未运行", "single": "只测一次"},
}
RATE = re.compile(r"engine\.(prefill_\d+|decode_b\d+)_(.+)")


def figures_table(words: dict[str, Any]) -> str:
    """One row for each figure that has a bar, a table for each comparison of engines, then a line about where each file
    comes from. `NAME-CHECKPOINT.json` is of `bench/NAME.py` too."""
    rows, speeds, notes = [], [], []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        bench, _, checkpoint = path.stem.partition("-")
        for figure in result["figures"]:
            if "bar" in figure:
                samples = len(result["samples"].get(figure["name"], ()))
                bar = figure["bar"].replace("<=", "≤").replace(">=", "≥")
                name = f"`{figure['name']}`" + (f" ({checkpoint})" if checkpoint else "")
                against = f" ({figure['peer']})" if "peer" in figure else ""
                rows.append(f"| {name} | {_value(figure)}{against} | {bar} | {figure['kind']} | {samples} |")
        if bench == "engine":
            speeds += ["", *speed_table(result, words)]
        machine = result["machine"]
        notes.append(f"- `bench/{bench}.py`{f' ({checkpoint})' if checkpoint else ''}: {result['question']} "
                     f"{words['measured']}: {machine['cpu']}, {machine['cores']} "
                     f"cores, load {machine['load_1min']} at the end, torch {machine['packages']['torch']}, "
                     f"transformers {machine['packages']['transformers']}, commit `{result['commit']}`.")
    head = "| " + " | ".join(words["heads"]) + " |\n|---|---|---|---|---|"
    return "\n".join([head, *rows, *speeds, "", *notes])


def speed_table(result: dict[str, Any], words: dict[str, Any]) -> list[str]:
    """Tokens per second of each engine in each cell, and who is not there."""
    rates: dict[str, dict[str, str]] = {}
    cells: dict[str, None] = {}
    for figure in result["figures"]:
        if figure["unit"] == "tokens/s" and (match := RATE.fullmatch(figure["name"])):
            cells[match[1]] = None
            rates.setdefault(match[2], {})[match[1]] = _short(figure["value"])
    parameters = result["parameters"]
    heads = [f"{words['engine']}, {words['of'].format(**parameters)}", *(cell.replace("_", " ") for cell in cells)]
    lines = [f"| {' | '.join(heads)} |", "|---" + "|--:" * len(cells) + "|"]
    for name, by_cell in rates.items():
        about = parameters.get("engines", {}).get(name, {})
        what = f" ({about['engine']} {about['version']}, {about['weights']})" if about else ""
        lines.append(f"| {name}{what} | " + " | ".join(by_cell.get(cell, "-") for cell in cells) + " |")
    missing = [f"{name}: {why}" for name, why in parameters.get("not_run", {}).items()]
    missing += [f"{name}: {why}" for name, why in parameters.get("failed", {}).items()]
    lines += ["", f"{words['not_run']}: {'; '.join(missing)}."] if missing else []
    single = parameters.get("single_readings", [])
    lines += ["", f"{words['single']}: {', '.join(single)}."] if single else []
    return lines


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _value(figure: dict[str, Any]) -> str:
    unit = "×" if figure["unit"] == "ratio" else f" {figure['unit']}"
    return f"{figure['value']:.3g}{unit}"


def rewritten(page: str) -> str:
    """A page with its table made anew."""
    text = (ROOT / page).read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no place for figures: put {BEGIN!r} and {END!r} in it")
    return f"{before}{BEGIN}\n\n{figures_table(PAGES[page])}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is out of date")
    check = parser.parse_args().check
    stale = [page for page in PAGES if rewritten(page) != (ROOT / page).read_text()]
    for page in stale:
        if check:
            print(f"{page} does not show the figures of bench/results; run `make tables`", file=sys.stderr)
        else:
            Path(ROOT / page).write_text(rewritten(page))
    if check and stale:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
