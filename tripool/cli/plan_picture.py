"""The picture of `tripool plan --png`: tokens of an NPU for each speed that users may be given, split and not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tripool.planner.frontier import Point, frontier

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 980, 620, 84, 28, 84, 64
INK, DIM, GRID, PAPER = "#1c1c1c", "#6f6f6f", "#e4e4e4", "#ffffff"
SPLIT, WHOLE, CHOSEN, GOAL = "#4c72b0", "#dd8452", "#c44e52", "#55a868"
FONT, TITLE_FONT = ImageFont.load_default(13), ImageFont.load_default(17)


def draw(points: Sequence[Point], chosen: Sequence[tuple[float, float]], goal_tpot_s: float, npu: str,
         path: Path) -> None:
    """Points in closed form, the best of each kind joined; simulated plans as (tokens/s of a user, of an NPU)."""
    image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    pen = ImageDraw.Draw(image)
    users = [point.tokens_per_s_per_user for point in points] + [x for x, _ in chosen] + [1.0 / goal_tpot_s]
    rates = [point.tokens_per_s_per_npu for point in points] + [y for _, y in chosen]
    most_x, most_y = _round_up(max(users)), _round_up(max(rates, default=1.0))

    def at(x: float, y: float) -> tuple[float, float]:
        return (LEFT + (WIDTH - LEFT - RIGHT) * x / most_x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / most_y)

    for part in range(6):
        x, y = most_x * part / 5, most_y * part / 5
        pen.line([at(x, 0), at(x, most_y)], GRID)
        pen.line([at(0, y), at(most_x, y)], GRID)
        pen.text((at(x, 0)[0], HEIGHT - BOTTOM + 8), f"{x:g}", DIM, FONT, anchor="ma")
        pen.text((LEFT - 8, at(0, y)[1]), f"{y:,.4g}", DIM, FONT, anchor="rm")
    pen.line([at(1.0 / goal_tpot_s, 0), at(1.0 / goal_tpot_s, most_y)], GOAL, 2)
    for is_split, colour in ((False, WHOLE), (True, SPLIT)):
        own = [point for point in points if point.is_split == is_split]
        for point in own:
            _dot(pen, at(point.tokens_per_s_per_user, point.tokens_per_s_per_npu), 1.5, colour)
        line = [at(point.tokens_per_s_per_user, point.tokens_per_s_per_npu) for point in frontier(own)]
        if len(line) > 1:
            pen.line(line, colour, 3)
    for place in chosen:
        _dot(pen, at(*place), 6, CHOSEN)
    pen.text((LEFT, 14), f"Output tokens/s per {npu} (those for prefill too) and of a user", INK, TITLE_FONT)
    legend = ((SPLIT, "split, closed form"), (WHOLE, "not split, closed form"), (CHOSEN, "simulated plans"),
              (GOAL, f"TPOT goal {goal_tpot_s * 1e3:g} ms"))
    for number, (colour, words) in enumerate(legend):
        x = LEFT + 200 * number
        pen.rectangle((x, 50, x + 12, 62), colour)
        pen.text((x + 18, 49), words, DIM, FONT)
    pen.text(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 24), "tokens/s of a user (1 / TPOT)", DIM, FONT, anchor="ma")
    image.save(path, "PNG", optimize=True)


def _dot(pen: ImageDraw.ImageDraw, at: tuple[float, float], radius: float, colour: str) -> None:
    x, y = at
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), colour)


def _round_up(value: float) -> float:
    """To a number of which a fifth is round."""
    unit = 10.0 ** math.floor(math.log10(max(value, 1e-12)))
    return next(step * unit for step in (1.0, 1.5, 2.0, 2.5, 4.0, 5.0, 7.5, 10.0) if step * unit >= value * (1 - 1e-9))
