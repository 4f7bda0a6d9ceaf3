"""What is counted while a simulation runs: gaps between tokens, in a histogram that never grows."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

BINS_PER_E_FOLD = 200
"""Bins are half a percent wide."""

LEAST_S = 1e-6
NUM_BINS = int(BINS_PER_E_FOLD * math.log(1e10)) + 1       # up to some hours


class GapHistogram:
    """How often which time passed between two outputs of a request."""

    def __init__(self) -> None:
        self.counts = [0] * NUM_BINS
        self.num_gaps = 0
        self._total_ns = 0                       # whole ones: a sum that does not depend on the order

    def add(self, gap_s: float, count: int) -> None:
        """So many gaps, all of one length."""
        self.counts[_bin(gap_s)] += count
        self.num_gaps += count
        self._total_ns += round(gap_s * 1e9) * count

    def add_all(self, gaps: npt.NDArray[np.float64]) -> None:
        """Gaps one by one."""
        for gap_s in gaps.tolist():
            self.add(gap_s, 1)

    @property
    def mean_s(self) -> float:
        return self._total_ns / 1e9 / self.num_gaps if self.num_gaps else 0.0

    def quantile_s(self, part: float) -> float:
        """The length that this part of the gaps does not exceed, to half a percent; 0 without gaps."""
        wanted, seen = part * self.num_gaps, 0
        for index, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return LEAST_S * math.exp((index + 0.5) / BINS_PER_E_FOLD)
        return 0.0

    def bins(self) -> list[tuple[float, int]]:
        """Lengths and counts, of those that occurred."""
        return [(LEAST_S * math.exp((index + 0.5) / BINS_PER_E_FOLD), count)
                for index, count in enumerate(self.counts) if count]


def _bin(gap_s: float) -> int:
    if gap_s <= LEAST_S:
        return 0
    return min(int(BINS_PER_E_FOLD * math.log(gap_s / LEAST_S)), NUM_BINS - 1)
