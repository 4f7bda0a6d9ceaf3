"""The picture beside the report of `tripool quantize`: errors of each layer, and what each technique brings.

Errors are drawn on a logarithmic scale, as a technique takes a part of them away. A layer's error is the mean over the
products of its INT8 tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tripool.quant.blocks import Figure
from tripool.quant.evaluate import Outcome, layer_errors, plain_errors

WIDTH, HEIGHT = 900, 300           # of the lines; bars take a row for each technique
LEFT, TOP, GAP, ROW, LEGEND = 90, 60, 70, 26, 190
BAR_WIDTH = 240
INK, DIM, GRID, PAPER = "#1c1c1c", "#6f6f6f", "#dddddd", "#ffffff"
COLOURS = ("#9a9a9a", "#c44e52", "#dd8452", "#ccb974", "#55a868", "#4c72b0", "#8172b3")
FONT, TITLE_FONT = ImageFont.load_default(13), ImageFont.load_default(17)

Line = tuple[str, Mapping[int, float]]


def draw(figures: Sequence[Figure], outcomes: Sequence[Outcome], path: Path) -> None:
    """Lines for each technique if they were compared, else for this conversion and for plain rounding; then bars."""
    lines: list[Line] = [(each.name, each.layer_errors) for each in outcomes]
    lines = lines or [("rounded plainly", plain_errors(figures)), ("this conversion", layer_errors(figures))]
    height = TOP + HEIGHT + GAP + (TOP + ROW * len(outcomes) if outcomes else 0)
    image = Image.new("RGB", (LEFT + WIDTH + LEGEND, height), PAPER)
    pen = ImageDraw.Draw(image)
    _lines(pen, lines)
    if outcomes:
        _bars(pen, outcomes, TOP + HEIGHT + GAP)
    image.save(path, "PNG", optimize=True)


def _lines(pen: ImageDraw.ImageDraw, lines: Sequence[Line]) -> None:
    pen.text((LEFT, 20), "error of products by layer, a part of their norm", INK, TITLE_FONT)
    values = [value for _, errors in lines for value in errors.values() if value > 0] or [1e-3, 1e-2]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    high = max(high, low + 1)
    layers = sorted({layer for _, errors in lines for layer in errors})
    step = WIDTH / max(1, len(layers) - 1)
    across = {layer: LEFT + step * index for index, layer in enumerate(layers)}

    def up(value: float) -> float:
        return TOP + HEIGHT * (high - math.log10(max(value, 10.0**low))) / (high - low)

    for power in range(low, high + 1):
        pen.line((LEFT, up(10.0**power), LEFT + WIDTH, up(10.0**power)), GRID)
        pen.text((LEFT - 8, up(10.0**power)), f"{10.0**power:.{max(0, -power - 2)}%}", DIM, FONT, anchor="rm")
    for index in range(0, len(layers), max(1, math.ceil(30 / max(step, 1e-9)))):
        pen.text((LEFT + step * index, TOP + HEIGHT + 6), str(layers[index]), DIM, FONT, anchor="ma")
    pen.text((LEFT + WIDTH / 2, TOP + HEIGHT + 24), "layer", DIM, FONT, anchor="ma")
    for number, (name, errors) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        points = [(across[layer], up(value)) for layer, value in errors.items()]
        pen.line(points, colour, 2)
        for x, y in points:
            pen.ellipse((x - 3, y - 3, x + 3, y + 3), colour)
        pen.text((LEFT + WIDTH + 16, TOP + ROW * number), name, colour, FONT)


def _bars(pen: ImageDraw.ImageDraw, outcomes: Sequence[Outcome], top: float) -> None:
    """Mean error, and by how much perplexity grows."""
    for place, title, values in ((260, "mean error of products", [each.error for each in outcomes]),
                                 (660, "perplexity, against the float model", [each.increase for each in outcomes])):
        pen.text((place, top), title, INK, FONT)
        most = max(1e-12, *(abs(value) for value in values))
        for number, value in enumerate(values):
            y = top + 30 + ROW * number
            length = max(1.0, BAR_WIDTH * abs(value) / most)
            pen.rectangle((place, y, place + length, y + ROW - 10), COLOURS[number % len(COLOURS)])
            pen.text((place + length + 8, y - 1), f"{value:+.3%}" if place > 300 else f"{value:.3%}", INK, FONT)
    for number, each in enumerate(outcomes):
        pen.text((LEFT, top + 29 + ROW * number), each.name, INK, FONT)
