"""How much more than the mean the busiest rank of a layer has to do. Everybody waits for it.

A load vector goes through the placement that really runs (`control.balance`): copies of hot experts, packing, groups on
nodes. Two load vectors take part: what the placement knew, and what a step then asks. *Perfect EPLB* is the even vector
for both; what is left is the grain, because 288 slots hold 256 experts and 32 slots the shared one.

What a step asks is the sum over its requests. One request asks much more of a few experts than of the others, and
which they are depends on what it is about; many requests together are even. The logarithm of what one request asks is
taken to be normal with the spread `skew`. So a prefill step of some tens of prompts is uneven, and a decode step of
thousands of requests is nearly even, with one number for both. (In production 20 % of experts are above the mean and
the hottest has 30 times the mean, arXiv 2508.02520: a log-normal with a spread of 1.7 has both.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from tripool.control.balance import place
from tripool.core.placement import EMPTY, Geometry

Reals = npt.NDArray[np.float64]

NUM_LAYERS = 32
"""Layers that are drawn: the mean of so many maxima is known to about two percent."""

NUM_DRAWN = 256
"""Requests that are drawn one by one. Deviations of more requests are those of these, shrunk with the square root."""

GRID = tuple(2**power for power in range(17))
SEED = 20250619                            # of the paper's third version


@lru_cache(maxsize=16)
def asked_by(num_routed: int, num_picks: int, skew: float) -> Reals:
    """What so many requests as the grid says ask of each expert, over the mean: [numbers of requests, layers, experts].
    """
    generator = np.random.default_rng(SEED)
    asked_LNE = np.exp(skew * generator.standard_normal((NUM_LAYERS, NUM_DRAWN, num_routed), np.float32))
    asked_LNE *= num_routed / asked_LNE.sum(2, keepdims=True)
    np.minimum(asked_LNE, num_routed / num_picks, out=asked_LNE)        # a token goes to an expert once
    grid = []
    for count in GRID:
        loads_LE = asked_LNE[:, :count].mean(1, dtype=np.float64)
        mean = loads_LE.mean(1, keepdims=True)
        grid.append(1.0 + (loads_LE / mean - 1.0) * min(1.0, np.sqrt(NUM_DRAWN / count)))
    return np.array(grid)


def on_grid(num_requests: float) -> tuple[int, float]:
    """The number of the grid below, and which part of the way to the next one, by logarithm."""
    at = min(np.log2(max(num_requests, 1.0)), len(GRID) - 1.0)
    below = min(int(at), len(GRID) - 2)
    return below, float(at - below)


class ExpertBalance:
    """Of one instance: busiest rank over the mean of all ranks, by the number of requests of a step."""

    def __init__(self, geometry: Geometry, num_picks: int, skew: float,
                 popularity: Sequence[float] | None = None) -> None:
        """`popularity`: what lasts of each routed expert's load, which the placement knows; even if not given."""
        self.geometry, self.skew = geometry, skew
        self._num_picks = num_picks
        lasting = np.ones(geometry.num_routed) if popularity is None else np.asarray(popularity, np.float64)
        assert lasting.shape == (geometry.num_routed,), f"{lasting.shape} popularities of {geometry.num_routed} experts"
        self._lasting = lasting / lasting.mean()
        known = self._with_shared(self._lasting[None, :])
        (self._slots,) = place([list(known[0])], geometry).layers
        self._rank_of = np.array(geometry.rank_of_slots())
        copies = np.bincount([expert for expert in self._slots if expert != EMPTY], minlength=geometry.num_experts)
        self._held = np.array([expert != EMPTY for expert in self._slots])
        self._experts = np.array([expert for expert in self._slots if expert != EMPTY])
        self._copies = copies[self._experts]
        self._grid: Reals | None = None

    def busiest(self, num_requests: float) -> float:
        """The busiest rank's tokens over the mean, averaged over layers."""
        if self.skew == 0.0:
            return self.even
        if self._grid is None:
            self._grid = self._drawn()
        return float(np.interp(np.log2(max(num_requests, 1.0)), np.arange(len(GRID)), self._grid))

    @cached_property
    def even(self) -> float:
        """The same when a step asks exactly what the placement knew: the grain."""
        return float(self.max_over_mean(self._lasting[None, :])[0])

    @cached_property
    def slots_per_rank(self) -> float:
        """Experts whose weights a rank reads."""
        return len(self._experts) / self.geometry.num_ranks

    def max_over_mean(self, loads_LE: Reals) -> Reals:
        """For loads of routed experts, of each layer: busiest rank over the mean."""
        loads = self._with_shared(loads_LE)
        shares = loads[:, self._experts] / self._copies
        ranks = self._rank_of[self._held]
        totals = np.zeros((len(loads), self.geometry.num_ranks))
        for rank_loads, share in zip(totals, shares, strict=True):
            np.add.at(rank_loads, ranks, share)
        result: Reals = totals.max(1) / totals.mean(1)
        return result

    def _with_shared(self, loads_LE: Reals) -> Reals:
        """Every token goes to the shared expert, and to `num_picks` of the others."""
        if not self.geometry.shared_slots:
            return loads_LE
        shared = loads_LE.sum(1, keepdims=True) / self._num_picks
        return np.concatenate([loads_LE, shared], 1)

    def _drawn(self) -> Reals:
        """The busiest rank over the mean for each number of requests of the grid."""
        asked_GLE = asked_by(self.geometry.num_routed, self._num_picks, self.skew)
        return np.array([self.max_over_mean(loads_LE * self._lasting).mean() for loads_LE in asked_GLE])


@lru_cache(maxsize=64)
def balance_of(geometry: Geometry, num_picks: int, skew: float) -> ExpertBalance:
    """The balance of an instance, reckoned once."""
    return ExpertBalance(geometry, num_picks, skew)
