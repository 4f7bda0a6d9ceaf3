"""Which of the paper's techniques (4.5) take part in a conversion."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """One switch for each technique; the arithmetic itself, per token and per channel, is not a choice."""

    mixed_precision: bool = True       # of matrix products, those of the policy's table stay as they are
    rotation: bool = True              # outliers: another basis, in which none stands out
    absorption: bool = True            # outliers: scales move from activations into norms and weights
    scale_search: bool = True          # how far they move, and where each channel is clipped, by trying
    clipping: bool = True              # one clip ratio for each block, by the block's output
    compensation: bool = True          # a column's rounding error is made up for by the columns after it


PLAIN = Recipe(rotation=False, absorption=False, scale_search=False, clipping=False, compensation=False)
"""Round to nearest, of the tensors that the policy names."""

STEPS: tuple[tuple[str, Recipe], ...] = (
    ("everything rounded", Recipe(False, False, False, False, False, False)),
    ("+ mixed precision", PLAIN),
    ("+ rotation", Recipe(True, True, False, False, False, False)),
    ("+ absorption", Recipe(True, True, True, False, False, False)),
    ("+ scale search", Recipe(True, True, True, True, False, False)),
    ("+ block clipping", Recipe(True, True, True, True, True, False)),
    ("+ compensation", Recipe()),
)
"""One technique more at a time."""
