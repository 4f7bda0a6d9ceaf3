"""The picture that `tripool experts --png` writes: load of each expert, and of each rank with the first map and now.

Colours are those of the terminal,
without steps between them: a load twice the mean of its layer is as far from the mean as one of half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont

from tripool.api.schema import MemberExperts
from tripool.cli.expert_loads import COLOURS, max_over_mean_first, relative_loads, worst
from tripool.cli.flags import show_bytes

SPAN = 2.0                 # octaves to each side of the mean, from a quarter of it to four times as much
MARGIN, GAP, LABEL = 24, 56, 44
MAP_WIDTH, MAP_HEIGHT = 1100, 640
RANKS_WIDTH = 260
INK, DIM, PAPER = "#1c1c1c", "#6f6f6f", "#ffffff"
FONT, TITLE_FONT = ImageFont.load_default(13), ImageFont.load_default(17)

_RAMP = np.array([ImageColor.getrgb(colour) for colour in COLOURS], np.float64)
_STOPS = np.linspace(-SPAN, SPAN, len(COLOURS))


def draw(members: Sequence[MemberExperts], path: Path) -> None:
    """One panel below the other, for each instance."""
    panels = [_panel(member) for member in members]
    whole = Image.new("RGB", (max(panel.width for panel in panels), sum(panel.height for panel in panels)), PAPER)
    at = 0
    for panel in panels:
        whole.paste(panel, (0, at))
        at += panel.height
    whole.save(path, "PNG", optimize=True)


def colours_of(ratios: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Red, green and blue for loads over the mean."""
    octaves = np.log2(np.maximum(ratios, 2.0 ** -SPAN))
    return np.stack([np.interp(octaves, _STOPS, _RAMP[:, i]) for i in range(3)], -1).round().astype(np.uint8)


def _panel(member: MemberExperts) -> Image.Image:
    loads = np.array([relative_loads(member, layer) for layer in member.layers])
    first = _rank_ratios(member, [layer.first_rank_loads for layer in member.layers], ())
    now = _rank_ratios(member, [layer.rank_loads for layer in member.layers], member.lost_ranks)
    several = len(member.slots_per_rank) > 1
    column = max(1, MAP_WIDTH // loads.shape[1])
    row = max(3, min(24, MAP_HEIGHT // loads.shape[0]))
    width, height = column * loads.shape[1], row * loads.shape[0]
    rank_column = max(2, min(40, RANKS_WIDTH // now.shape[1]))
    ranks_width = rank_column * now.shape[1]
    top, left = MARGIN + 70, MARGIN + LABEL
    total = left + width + MARGIN + (2 * (ranks_width + GAP) + 90 if several else 0)
    image = Image.new("RGB", (max(total, 820), top + height + 76), PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((MARGIN, MARGIN - 6), f"{member.member}: load of experts, tokens per step over the mean of the layer",
             INK, TITLE_FONT)
    pen.text((MARGIN, MARGIN + 20), _words(member), DIM, FONT)
    _map(image, loads, (left, top), column, row, "experts of each layer")
    _ticks(pen, (left, top + height), loads.shape[1], column)
    for layer in range(0, loads.shape[0], max(1, -(-18 // row))):
        pen.text((left - 8, top + layer * row + row / 2), str(layer), DIM, FONT, anchor="rm")
    if several:
        at = left + width + GAP
        for ratios, title in ((first, "ranks, first map"), (now, "ranks, now")):
            _map(image, ratios, (at, top), rank_column, row, title)
            _ticks(pen, (at, top + height), ratios.shape[1], rank_column)
            at += ranks_width + GAP
        _peaks(pen, member, (at - GAP + 12, top), row)
    _legend(image, (left, top + height + 36))
    return image


def _words(member: MemberExperts) -> str:
    now = worst(layer.max_over_mean for layer in member.layers)
    first = worst(max_over_mean_first(layer) for layer in member.layers)
    words = [f"map {member.map_version}", f"{member.num_steps} steps counted",
             f"{member.num_moves} experts moved ({show_bytes(member.moved_bytes)})"]
    if len(member.slots_per_rank) > 1:
        words.append("busiest rank over the mean, in the worst layer: "
                     f"{'-' if first is None else f'{first:.2f}'} with the first map, "
                     f"{'-' if now is None else f'{now:.2f}'} now")
    if member.lost_ranks:
        words.append(f"lost: rank {', '.join(map(str, member.lost_ranks))}")
    return "; ".join(words)


def _rank_ratios(member: MemberExperts, loads: Sequence[Sequence[float]], lost: Sequence[int]) -> NDArray[np.float64]:
    """Load of each rank over the mean of the living ones, by layer."""
    totals = np.array(loads, np.float64)
    living = [rank for rank in range(totals.shape[1]) if rank not in lost]
    mean = totals[:, living].mean(1, keepdims=True) if living else np.zeros((len(totals), 1))
    return totals / np.where(mean > 0, mean, 1.0)


def _map(image: Image.Image, ratios: NDArray[np.float64], at: tuple[int, int], column: int, row: int,
         title: str) -> None:
    pixels = colours_of(ratios).repeat(row, 0).repeat(column, 1)
    image.paste(Image.fromarray(pixels), at)
    ImageDraw.Draw(image).text((at[0], at[1] - 6), title, INK, FONT, anchor="ls")


def _ticks(pen: ImageDraw.ImageDraw, at: tuple[int, int], count: int, column: int) -> None:
    """Numbers below a map, as many as there is room for."""
    step = next(each for power in range(6) for each in (10**power, 2 * 10**power, 5 * 10**power) if each * column >= 30)
    for index in range(0, count, step):
        pen.text((at[0] + (index + 0.5) * column, at[1] + 4), str(index), DIM, FONT, anchor="ma")


def _peaks(pen: ImageDraw.ImageDraw, member: MemberExperts, at: tuple[int, int], row: int) -> None:
    """Beside the ranks: how much the busiest has over the mean."""
    pen.text((at[0], at[1] - 6), "max/mean", INK, FONT, anchor="ls")
    for layer in range(0, len(member.layers), max(1, -(-18 // row))):
        value = member.layers[layer].max_over_mean
        pen.text((at[0], at[1] + layer * row + row / 2), "-" if value is None else f"{value:.2f}", DIM, FONT,
                 anchor="lm")


def _legend(image: Image.Image, at: tuple[int, int]) -> None:
    """What a colour says."""
    width = 520
    ratios = 2.0 ** np.linspace(-SPAN, SPAN, width)[None, :]
    image.paste(Image.fromarray(colours_of(ratios).repeat(10, 0)), at)
    pen = ImageDraw.Draw(image)
    words = ((-2, "a quarter or less"), (-1, "half"), (0, "the mean"), (1, "twice"), (2, "4 times or more"))
    for octave, text in words:
        pen.text((at[0] + (octave + SPAN) / (2 * SPAN) * width, at[1] + 14), text, DIM, FONT,
                 anchor={-2: "la", 2: "ra"}.get(octave, "ma"))
