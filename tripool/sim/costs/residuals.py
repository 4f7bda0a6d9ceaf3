"""The four numbers that operators and wires alone do not give. Each is fitted on one published cell, on nothing else.

What is known of operators alone gives 612 us for a decode layer that was measured as 874 (section 5.4.2). The four are
named, each has one meaning, and each cell that fitted one leaves the set on which the model is judged (the split:
`sim/reproduce/split.toml`). Values are in `residuals.toml`, and a test fits them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tripool.core.deployment import build, read_table
from tripool.core.errors import ConfigError

FITTED = Path(__file__).with_name("residuals.toml")


@dataclass(frozen=True, slots=True)
class Residuals:
    """Corrections by name. The default is none at all."""

    layer_overhead: float = 0.0            # share by which what cores do takes longer in a layer than alone: launches,
    #                                        waiting for one another, caches that others have filled. A share and not
    #                                        microseconds, so that it means something for prefill and other machines.
    step_overhead_ms: float = 0.0          # of a step outside its layers: scheduling, launches, sampling on the host
    expert_skew: float = 0.0               # spread (of the logarithm) of what one request asks of the experts
    pool_gbps: float = math.inf            # at which the pool's software handles bytes, per die

    def __post_init__(self) -> None:
        for name in ("layer_overhead", "step_overhead_ms", "expert_skew"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative")
        if not self.pool_gbps > 0:
            raise ConfigError(f"pool_gbps is {self.pool_gbps}; it must be positive")


NONE = Residuals()
"""Operators and wires as they are alone."""


def fitted_residuals() -> Residuals:
    """Those that were fitted on the four cells."""
    return build(Residuals, read_table(FITTED), str(FITTED))
