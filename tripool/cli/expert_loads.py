"""Loads of experts and ranks as people look at them: against a mean, folded to the room there is, and their shades."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tripool.api.schema import LayerExperts, MemberExperts

EDGES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Where the shades change: load of an expert as a multiple of its layer's mean."""

COLOURS = ("#1b2a49", "#2b5c8a", "#3c9d9b", "#f2c14e", "#f78154", "#d7263d")
SHADES = " ·░▒▓█"
"""The same without colours."""


def relative_loads(member: MemberExperts, layer: LayerExperts) -> list[float]:
    """Loads of a layer's experts as multiples of the mean of its routed ones; every token chooses the shared one."""
    mean = sum(layer.loads[:member.num_routed]) / member.num_routed
    return [load / mean if mean else 0.0 for load in layer.loads]


def fold(values: Sequence[float], num_columns: int) -> list[float]:
    """At most so many columns: the highest of as many neighbours as each has to stand for."""
    step = -(-len(values) // num_columns)
    return [max(values[at:at + step]) for at in range(0, len(values), step)]


def rank_shares(member: MemberExperts, loads: Iterable[Sequence[float]]) -> list[float]:
    """Load of each rank over all layers, as a multiple of the living ranks' mean."""
    totals = [sum(column) for column in zip(*loads, strict=True)]
    living = [total for rank, total in enumerate(totals) if rank not in member.lost_ranks]
    mean = sum(living) / len(living) if living else 0.0
    return [total / mean if mean else 0.0 for total in totals]


def max_over_mean_first(layer: LayerExperts) -> float | None:
    """Of the ranks' loads, had no expert ever moved; None without load."""
    total = sum(layer.first_rank_loads)
    return max(layer.first_rank_loads) * len(layer.first_rank_loads) / total if total else None


def worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
