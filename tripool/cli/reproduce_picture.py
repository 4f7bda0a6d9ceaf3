"""The pictures of `tripool reproduce --pictures`: for one table, published numbers and ours as bars.

Each number has its own scale, because a table mixes milliseconds and tokens a second: the longer of its two bars is
full.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tripool.sim.reproduce.score import Scored
from tripool.sim.reproduce.tables import PaperTable

LABEL, BAR, MARGIN, TOP, ROW = 520, 380, 24, 84, 44
INK, DIM, PAPER, PUBLISHED, OURS, MISSED = "#1c1c1c", "#6f6f6f", "#ffffff", "#9a9a9a", "#4c72b0", "#c44e52"
FONT, TITLE_FONT = ImageFont.load_default(13), ImageFont.load_default(17)


def draw(table: PaperTable, shown: Sequence[Scored], path: Path) -> None:
    """Write the picture of a table."""
    image = Image.new("RGB", (LABEL + BAR + 260, TOP + ROW * len(shown) + MARGIN), PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((MARGIN, MARGIN - 6), table.title, INK, TITLE_FONT)
    legend = ((0, PUBLISHED, "published"), (120, OURS, "simulated"), (240, MISSED, "simulated, missed"))
    for at, colour, words in legend:
        pen.rectangle((MARGIN + at, MARGIN + 26, MARGIN + at + 12, MARGIN + 38), colour)
        pen.text((MARGIN + at + 18, MARGIN + 25), words, DIM, FONT)
    for number, each in enumerate(shown):
        assert each.ours is not None
        y = TOP + ROW * number
        published = float(each.cell.value)
        most = max(abs(published), abs(each.ours), 1e-12)
        pen.text((LABEL - 12, y + 14), f"{each.cell.label}, {each.cell.column}"[:78], INK, FONT, anchor="rm")
        colour = MISSED if each.is_met is False else OURS
        for row, (value, shade) in enumerate(((published, PUBLISHED), (each.ours, colour))):
            length = max(1.0, BAR * abs(value) / most)
            pen.rectangle((LABEL, y + 15 * row, LABEL + length, y + 15 * row + 12), shade)
            pen.text((LABEL + length + 8, y + 15 * row - 1), f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}",
                     INK, FONT)
        words = each.cell.role if each.error is None else f"{each.cell.role}, {100 * each.error:+.1f} %"
        pen.text((LABEL + BAR + 90, y + 14), words, DIM, FONT, anchor="lm")
    image.save(path, "PNG", optimize=True)
