"""The options that say what the machine does, the same wherever something is simulated.

A plan is simulated with what it was planned with: its file says the options with which `tripool simulate` does so.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import typer

from tripool.core.errors import ConfigError
from tripool.sim.costs.deployment import PAPER
from tripool.sim.costs.rates import OperatorLevel
from tripool.sim.costs.residuals import NONE, fitted_residuals
from tripool.sim.costs.transfers import PlaneKind
from tripool.sim.machine import EXPERT_DRIFT_S

MACHINE = "What the machine does"

Acceptance = Annotated[list[float] | None, typer.Option(min=0.0, max=1.0, metavar="SHARE", help="How likely the first "
                                                        "draft of a step is right; again for the second, ... "
                                                        "Without it a plan drafts nothing.",
                                                        show_default=False, rich_help_panel=MACHINE)]
PullPlane = Annotated[PlaneKind, typer.Option(help="Over which the cache goes from prefill to decode.",
                                              rich_help_panel=MACHINE)]
PoolPlane = Annotated[PlaneKind, typer.Option(help="Over which the pool is read and written.",
                                              rich_help_panel=MACHINE)]
Level = Annotated[OperatorLevel | None, typer.Option(help="Operators at the efficiency measured of each, or at their "
                                                     "peaks; if not given, the steps that the hardware file has "
                                                     "measured, and else the efficiency.", show_default=False,
                                                     rich_help_panel=MACHINE)]
Corrections = Annotated[bool, typer.Option("--corrections/--no-corrections", help="Correct what operators do not "
                                           "explain by the four fitted numbers that `tripool reproduce` shows.",
                                           rich_help_panel=MACHINE)]
ExpertSpread = Annotated[float, typer.Option(min=0.0, max=5.0, help="How unevenly experts are asked for long: "
                                             "deviation of the logarithm. With 0.3 the hottest of 256 has twice the "
                                             "mean; production has seen 30 times (1.7, arXiv 2508.02520).",
                                             rich_help_panel=MACHINE)]
ExpertDrift = Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="Until others are the popular ones.",
                                            rich_help_panel=MACHINE)]
PerfectBalance = Annotated[bool, typer.Option("--perfect-balance", help="Tokens ask of all experts alike.",
                                              rich_help_panel=MACHINE)]
NpuHourPrice = Annotated[float | None, typer.Option(min=0.0, max=1e9, metavar="PRICE", help="Of one NPU for one hour; "
                                                    "the hardware's own if not given.", show_default=False,
                                                    rich_help_panel=MACHINE)]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Their values. Each field is the option of its name."""

    acceptance: tuple[float, ...] = ()
    pull_plane: PlaneKind = "scale_out"
    pool_plane: PlaneKind = "scale_up"
    level: OperatorLevel | None = None
    corrections: bool = True
    expert_spread: float = 0.0
    expert_drift: float = EXPERT_DRIFT_S
    perfect_balance: bool = False
    npu_hour_price: float | None = None

    def __post_init__(self) -> None:
        if self.perfect_balance and self.expert_spread:
            raise ConfigError(f"--expert-spread is {self.expert_spread:g}, but with --perfect-balance all experts are "
                              "asked alike; leave one of them out")
        if self.expert_drift != EXPERT_DRIFT_S and not self.expert_spread:
            raise ConfigError(f"--expert-drift is {self.expert_drift:g}, but --expert-spread is 0: no expert is more "
                              "popular than another for long; give --expert-spread, too")

    def settings(self) -> dict[str, Any]:
        """As `rig_of` takes them."""
        return {"style": replace(PAPER, perfect_balance=self.perfect_balance),
                "residuals": fitted_residuals() if self.corrections else NONE, "level": self.level,
                "acceptance": self.acceptance, "pull_plane": self.pull_plane, "pool_plane": self.pool_plane,
                "expert_spread": self.expert_spread, "expert_drift_s": self.expert_drift,
                "npu_hour_price": self.npu_hour_price}

    def options(self) -> list[str]:
        """As they are typed, those that are not so by default."""
        typed: list[str] = []
        for each in fields(self):
            value, name = getattr(self, each.name), each.name.replace("_", "-")
            if value == each.default:
                continue
            if isinstance(value, bool):
                typed.append(f"--{name}" if value else f"--no-{name}")
            else:
                for one in value if isinstance(value, tuple) else (value,):
                    typed += [f"--{name}", str(one)]
        return typed
