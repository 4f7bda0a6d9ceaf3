"""What all instances of a simulation share: planes, cache servers, answers, the memory others may read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tripool.core.machine import Address, Message
from tripool.core.request import RequestId
from tripool.sim.fabric import Fabric
from tripool.sim.measures import GapHistogram
from tripool.sim.servers import CacheServers

SUM = 1
"""Every block's checksum: there are no contents to sum."""

Generations = list[int]


class Watcher(Protocol):
    """Whoever draws what happened."""

    def step(self, member: Address, begun_s: float, ended_s: float, num_rows: int, num_chunk_tokens: int,
             num_steps: int) -> None: ...

    def copy(self, kind: str, member: Address, plane: str, begun_s: float, ended_s: float, num_bytes: float,
             cause: str) -> None: ...


@dataclass(slots=True)
class World:
    """What all instances of a simulation share."""

    fabric: Fabric
    servers: CacheServers
    outputs: dict[RequestId, int]                      # how many tokens each request will be answered with
    post: Callable[[Address, Message, float], object]
    block_bytes: int
    tell_every_s: float                                # tokens are told at least so often; 0: with every step
    every_step: bool = False
    acceptance: tuple[float, ...] = ()                 # how likely a draft is right, by position
    seed: int = 0
    computing: dict[Address, None] = field(default_factory=dict)        # who is in a step with rows
    arenas: dict[tuple[Address, str], list[Generations]] = field(default_factory=dict)
    emitted_s: dict[RequestId, float] = field(default_factory=dict)     # last tokens of requests between two rows
    gaps: GapHistogram = field(default_factory=GapHistogram)
    wrongs: list[str] = field(default_factory=list)    # what no right scheduler lets happen
    watcher: Watcher | None = None
