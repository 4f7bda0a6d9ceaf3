"""The options with which a workload is given, the same wherever one is: a trace, or one that is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tripool.core.errors import ConfigError
from tripool.sim.requests import Workload
from tripool.sim.synthetic import SyntheticWork
from tripool.sim.traces import read_workload

DURATION_S = 60.0                # of a made-up workload, if nobody says
TRACE, SYNTHETIC = "A trace", "A made-up workload"

TraceFile = Annotated[Path | None, typer.Option("--workload", metavar="FILE", help="Requests: Mooncake JSONL, Azure or "
                                                "BurstGPT CSV; which one is seen from its first line.",
                                                show_default=False, rich_help_panel=TRACE)]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first requests of it.", show_default=False,
                                           rich_help_panel=TRACE)]
SpeedUp = Annotated[float, typer.Option(min=0.001, help="Let them come so many times as fast.", rich_help_panel=TRACE)]
Rate = Annotated[float | None, typer.Option(min=0.0, help="Requests per second, on average.", show_default=False,
                                            rich_help_panel=SYNTHETIC)]
Duration = Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="How long they come.",
                                         rich_help_panel=SYNTHETIC)]
PromptTokens = Annotated[int, typer.Option(min=1, help="Mean length of a prompt.", rich_help_panel=SYNTHETIC)]
OutputTokens = Annotated[int, typer.Option(min=1, help="Mean length of an answer.", rich_help_panel=SYNTHETIC)]
Spread = Annotated[float, typer.Option(min=0.0, help="Of both lengths: the deviation of their logarithm; 0: all alike.",
                                       rich_help_panel=SYNTHETIC)]
Prefixes = Annotated[int, typer.Option(min=0, help="So many shared prefixes there are.", rich_help_panel=SYNTHETIC)]
PrefixTokens = Annotated[int, typer.Option(min=0, help="Tokens of each.", rich_help_panel=SYNTHETIC)]
Share = Annotated[float, typer.Option(min=0.0, max=1.0, help="Part of the prompts that begin with one.",
                                      rich_help_panel=SYNTHETIC)]
BurstEvery = Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="A burst begins so often; 0: never.",
                                           rich_help_panel=SYNTHETIC)]
BurstSeconds = Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="How long it lasts.",
                                             rich_help_panel=SYNTHETIC)]
BurstTimes = Annotated[float, typer.Option(min=1.0, help="The rate meanwhile, as a multiple of the mean.",
                                           rich_help_panel=SYNTHETIC)]


def workload_of(trace: Path | None, limit: int | None, speed_up: float, rate: float | None,
                made_up: SyntheticWork) -> Workload | SyntheticWork:
    """The trace, at its pace, or what is to be drawn.

    Raises:
        ConfigError: both were given or neither, or something of the other one; or the trace is wrong.
    """
    if (trace is None) == (rate is None):
        raise ConfigError("give --workload FILE or, for a made-up workload, --rate REQUESTS_PER_SECOND")
    if trace is None:
        if speed_up != 1.0:
            raise ConfigError(f"--speed-up is {speed_up:g}, but there is no trace; give a higher --rate")
        if limit is not None:
            raise ConfigError(f"--limit is {limit}, but there is no trace; give a shorter --duration")
        return made_up
    if made_up != SyntheticWork(DURATION_S, 0.0):
        raise ConfigError(f"{trace} says when requests come and how long they are; leave out the options of a made-up "
                          "workload (--duration, --prompt-tokens, --prefixes, --burst-every, ...)")
    work = read_workload(trace, limit=limit)
    return work.faster(speed_up) if speed_up != 1.0 else work
