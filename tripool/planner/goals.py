"""What a plan has to reach, and what it may spend."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tripool.core.errors import ConfigError
from tripool.sim.hardware.description import Hardware
from tripool.sim.outcome import Slo

MOST_S = 600.0
"""Of a goal: a trial waits as long for its last request, while its instances tell one another that they are there."""


@dataclass(frozen=True, slots=True)
class Goals:
    """So many of all requests have their first token in time, and their tokens fast enough after it."""

    ttft_s: float
    tpot_s: float
    share: float = 0.9

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not 0 < getattr(self, name) <= MOST_S:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a positive number of seconds, at most "
                                  f"{MOST_S:g}")
        if not 0 < self.share < 1:
            raise ConfigError(f"share is {self.share}; it is a part of all requests, above 0 and below 1")

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_s, self.tpot_s)

    @property
    def share_of_each(self) -> float:
        """The share that must keep each of two goals for this share to keep both, if they are missed independently."""
        return math.sqrt(self.share)


@dataclass(frozen=True, slots=True)
class Budget:
    """What there is to spend: dies, and of each node so much memory for the pool."""

    num_dies: int
    node_cache_bytes: float = math.inf

    def __post_init__(self) -> None:
        if self.num_dies < 1:
            raise ConfigError(f"num_dies is {self.num_dies}; a deployment needs at least 1")


def budget_of(hardware: Hardware, npus: int | None = None, price_per_hour: float | None = None,
              npu_hour_price: float | None = None, node_cache_bytes: float | None = None) -> Budget:
    """So many NPUs, or as many as a price per hour pays for; without either the whole machine.

    Raises:
        ConfigError: the machine has fewer, or nobody knows what one costs.
    """
    if npus is not None and price_per_hour is not None:
        raise ConfigError("a number of NPUs and a price per hour are two budgets; give one of them")
    most = npus if npus is not None else hardware.num_packages
    if price_per_hour is not None:
        each = npu_hour_price if npu_hour_price is not None else hardware.package.usd_per_hour
        if not each:
            raise ConfigError(f"the budget is {price_per_hour:g} per hour, but {hardware.name} does not say what one "
                              f"{hardware.package.name} costs; give its price, too")
        most = min(int(price_per_hour / each + 1e-9), hardware.num_packages)
        if most < 1:
            raise ConfigError(f"the budget is {price_per_hour:g} per hour, and one {hardware.package.name} costs "
                              f"{each:g}")
    if not 0 < most <= hardware.num_packages:
        raise ConfigError(f"the budget is {most} {hardware.package.name}s, and {hardware.name} has "
                          f"{hardware.num_packages}")
    if node_cache_bytes is None:
        memory = hardware.node.host_memory_gb
        node_cache_bytes = math.inf if memory is None else memory * 1e9 * HOST_SHARE
    return Budget(most * hardware.package.dies, node_cache_bytes)


HOST_SHARE = 0.5
"""Of a node's memory, for the pool, where nobody says how much."""
