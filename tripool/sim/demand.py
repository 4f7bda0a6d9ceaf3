"""What tokens ask of the experts of a described model, and how evenly that falls on the ranks of an instance.

Two things make experts uneven. What *lasts*: some are asked more often than others in every step, because of what
people write about; which ones drifts. And what *one request* asks, which is even only over many (`costs/loads.py`).
What lasts is drawn here, under a seed, and is the same for all instances of a deployment. Each instance reports what
its tokens chose, its rebalancer learns from that alone, and steps wait for the rank that is busiest with the experts
where they are by then, never having moved or not.

L layers with experts · E experts · S slots · R ranks
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tripool.core.errors import ConfigError
from tripool.core.machine import Address
from tripool.core.messages import ExpertFacts
from tripool.core.placement import EMPTY, Geometry, Placement, SlotId
from tripool.sim.costs.loads import asked_by, on_grid
from tripool.sim.experts import ExpertSlots

Reals = npt.NDArray[np.float64]

TICKS = 64
"""Looks at the drift in the time in which it turns over."""


@dataclass(frozen=True, slots=True)
class Popularity:
    """How unevenly experts are asked."""

    spread: float = 0.0                    # of the logarithm of what lasts; 0: all alike
    drift_s: float = 600.0                 # after so long popularities agree with those of before by 1/e
    skew: float = 0.0                      # the same spread, of what one request asks

    def __post_init__(self) -> None:
        for name in ("spread", "skew"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative")
        if not self.drift_s > 0:
            raise ConfigError(f"drift_s is {self.drift_s}; it must be positive")


@dataclass(frozen=True, slots=True)
class ExpertModel:
    """The experts of the instances of one role."""

    geometry: Geometry
    num_layers: int
    num_picks: int                         # routed ones that a token chooses
    expert_bytes: int
    seconds_per_token: float               # a layer lasts so much longer per token more on its busiest rank
    room_tokens: int                       # of a rank, in one exchange
    move_bytes_per_s: float                # into or out of one rank, beside everything else
    plane: str                             # over which ranks exchange


class Demand:
    """What lasts, at each time. Time goes forward only."""

    def __init__(self, model: ExpertModel, popularity: Popularity, seed: int) -> None:
        self.popularity = popularity
        self.tick = 0
        self._model = model
        self._generator = np.random.default_rng([seed, 0x4570])
        self._shape = model.num_layers, model.geometry.num_routed
        self._state_LE = self._generator.standard_normal(self._shape)
        self._keep = math.exp(-1.0 / TICKS)
        self.lasting_LE = self._lasting()

    def at(self, now: float) -> int:
        """Go on to this moment. Returns the number of the drift's steps so far, to see whether anything changed."""
        if not self.popularity.spread:
            return 0
        tick = int(now * TICKS / self.popularity.drift_s)
        if tick > self.tick:
            fresh = math.sqrt(1.0 - self._keep**2)
            for _ in range(tick - self.tick):
                self._state_LE = self._keep * self._state_LE + fresh * self._generator.standard_normal(self._shape)
            self.tick = tick
            self.lasting_LE = self._lasting()
        return self.tick

    def _lasting(self) -> Reals:
        """Of each expert over the mean. A token goes to an expert once, so that none has more than that."""
        lasting_LE: Reals = np.exp(self.popularity.spread * self._state_LE)
        lasting_LE /= lasting_LE.mean(1, keepdims=True)
        return np.minimum(lasting_LE, self._model.geometry.num_routed / self._model.num_picks)


class LiveExperts(ExpertSlots):
    """The experts of one life of one instance: where they are, what is asked of them, what is reported."""

    def __init__(self, member: Address, model: ExpertModel, demand: Demand, wrongs: list[str], seed: int) -> None:
        super().__init__(member, model.geometry, model.num_layers, wrongs)
        self.model, self.demand = model, demand
        self.sum_busiest = 0.0                         # over all that was priced: what `busiest` said
        self.num_priced = 0
        self._generator = np.random.default_rng([seed, 0x4571])
        self._asked_GLE = asked_by(model.geometry.num_routed, model.num_picks, demand.popularity.skew)
        self._starts_R = np.cumsum([0, *model.geometry.slots_per_rank])
        self._map_LS = np.array(self._named)
        self._tick = -1
        self._known: dict[int, float] = {}             # the busiest rank at a number of the grid
        self._num_tokens = 0                           # since the last report
        self._num_requests = 0.0

    @property
    def facts(self) -> ExpertFacts:
        """What the scheduler is told when the model is loaded."""
        model = self.model
        return ExpertFacts(model.geometry, self.first.pack(), model.expert_bytes, model.seconds_per_token,
                           model.room_tokens)

    @property
    def state(self) -> tuple[str, int, int]:
        """Whatever `busiest` depends on besides its argument."""
        return self._member, self.version, self._tick

    def at(self, now: float) -> None:
        """Ask as at this moment from now on."""
        tick = self.demand.at(now)
        if tick != self._tick:
            self._tick = tick
            self._known.clear()

    def busiest(self, num_requests: float) -> float:
        """The busiest rank's tokens over the mean of all ranks, averaged over layers. A lost rank has none."""
        below, part = on_grid(num_requests)
        found = (1.0 - part) * self._busiest_at(below) + part * self._busiest_at(below + 1)
        self.sum_busiest += found
        self.num_priced += 1
        return found

    def count(self, num_tokens: int, num_requests: int) -> None:
        """Tokens of so many requests went through all layers."""
        self._num_tokens += num_tokens
        self._num_requests = max(self._num_requests, num_requests)

    def report(self) -> bytes:
        """How often each expert was chosen since the last report, packed as it travels."""
        asked_LE = self.demand.lasting_LE
        one_request = float(self._asked_GLE[0].std())
        if one_request and self._num_requests:
            noise_LE = self._generator.standard_normal(asked_LE.shape) * (one_request / math.sqrt(self._num_requests))
            asked_LE = asked_LE * np.maximum(1.0 + noise_LE, 0.0)
        per_expert = self._num_tokens * self.model.num_picks / self.model.geometry.num_routed
        counts_LE = asked_LE / asked_LE.mean(1, keepdims=True) * per_expert
        if self.geometry.shared_slots:
            counts_LE = np.concatenate([counts_LE, np.full((len(counts_LE), 1), float(self._num_tokens))], 1)
        self._num_tokens, self._num_requests = 0, 0.0
        packed: bytes = np.rint(counts_LE).astype(np.int32).tobytes()
        return packed

    def imbalance(self, placement: Placement | None = None) -> list[float]:
        """Of each layer the busiest rank over the mean with what lasts alone; with the map of now, or another."""
        experts_LS = self._map_LS if placement is None else np.array(placement.layers)
        return [float(each) for each in self._max_over_mean(experts_LS, self.demand.lasting_LE)]

    def _busiest_at(self, index: int) -> float:
        found = self._known.get(index)
        if found is None:
            asked_LE = self._asked_GLE[index][np.arange(self.model.num_layers) % self._asked_GLE.shape[1]]
            found = float(self._max_over_mean(self._map_LS, self.demand.lasting_LE * asked_LE).mean())
            self._known[index] = found
        return found

    def _max_over_mean(self, experts_LS: npt.NDArray[np.int64], loads_LE: Reals) -> Reals:
        """Each copy of an expert takes an equal share of its load."""
        num_layers, num_experts = len(experts_LS), self.geometry.num_experts
        if self.geometry.shared_slots:                 # every token goes to the shared expert
            loads_LE = np.concatenate([loads_LE, loads_LE.sum(1, keepdims=True) / self.model.num_picks], 1)
        held_LS = experts_LS != EMPTY
        at_LS = np.arange(num_layers)[:, None] * num_experts + np.maximum(experts_LS, 0)
        copies = np.bincount(at_LS[held_LS], minlength=num_layers * num_experts)
        share_LS = np.where(held_LS, loads_LE.ravel()[at_LS] / np.maximum(copies, 1)[at_LS], 0.0)
        sums_LS = np.concatenate([np.zeros((num_layers, 1)), np.cumsum(share_LS, 1)], 1)
        totals_LR = np.diff(sums_LS[:, self._starts_R], axis=1)
        result: Reals = totals_LR.max(1) / totals_LR.mean(1)
        return result

    def _name(self, layer: int, slot: SlotId, expert: int) -> None:
        super()._name(layer, slot, expert)
        self._map_LS[layer, slot] = expert
        self._known.clear()
