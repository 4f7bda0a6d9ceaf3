"""Makes the README's tables of figures from the files in `bench/results`, so that no number is typed by hand.

    python bench/tables.py            rewrite README.md and README.zh-CN.md
    python bench/tables.py --check    say whether they are as they should be (exit 1 if not)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from common import ROOT

RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- figures: made by bench/tables.py -->", "<!-- end of figures -->"
PAGES = {"README.md": ("figure", "value", "bar", "kind", "samples", "measured on"),
         "README.zh-CN.md": ("指标", "值", "目标", "性质", "样本数", "测量环境")}


def figures_table(heads: tuple[str, ...]) -> str:
    """One row for each figure that has a bar, then a line about where each file comes from."""
    rows, notes = [], []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        for figure in result["figures"]:
            if "bar" in figure:
                samples = len(result["samples"].get(figure["name"], ()))
                bar = figure["bar"].replace("<=", "≤").replace(">=", "≥")
                rows.append(f"| `{figure['name']}` | {_value(figure)} | {bar} | {figure['kind']} | {samples} |")
        machine = result["machine"]
        notes.append(f"- `bench/{path.stem}.py`: {result['question']} {heads[5]}: {machine['cpu']}, {machine['cores']} "
                     f"cores, load {machine['load_1min']} at the end, torch {machine['packages']['torch']}, "
                     f"transformers {machine['packages']['transformers']}, commit `{result['commit']}`.")
    head = "| " + " | ".join(heads[:5]) + " |\n|---|---|---|---|---|"
    return "\n".join([head, *rows, "", *notes])


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
