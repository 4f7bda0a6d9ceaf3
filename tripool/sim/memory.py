"""What blocks hold in a simulation, and the memory that outlives a process.

In place of latent entries a block keeps a digest of all tokens from the first of the sequence to the last one written,
and how many of its places are filled. Contents of all instances are in this one process: pulls read the arena of
another, fetches and stores a pool that all share. An arena outlives its process, as a sealed memory file does.
"""

from __future__ import annotations

from dataclasses import dataclass

from tripool.core.machine import Address
from tripool.core.messages import Part


@dataclass(frozen=True, slots=True)
class Content:
    """What a block holds: a digest of every token up to its last filled place, and how many places are filled."""

    digest: int = 0
    num_filled: int = 0

    @property
    def checksum(self) -> int:
        return self.digest << 16 | self.num_filled


EMPTY = Content()


class SimArena:
    """The blocks of one rank in one life of a process."""

    def __init__(self, num_blocks: int) -> None:
        self.generations = [0] * num_blocks
        self.contents = [EMPTY] * num_blocks

    def proves(self, part: Part) -> bool:
        """Whether a block is still the one that was granted."""
        return (self.generations[part.block] == part.generation
                and self.contents[part.block].checksum == part.checksum)


class SimMemory:
    """What lies outside of any one process: the arenas of all lives, and the pool."""

    def __init__(self, pool_blocks: int = 1 << 30) -> None:
        self.arenas: dict[tuple[Address, str], list[SimArena]] = {}
        self.pool: dict[bytes, Content] = {}
        self.wrongs: list[str] = []        # what no right scheduler and no right data plane lets happen
        self.pool_blocks = pool_blocks

    def put(self, key: bytes, content: Content) -> bool:
        """Keep a block; the one that was stored longest ago gives way. False: it was there already."""
        if key in self.pool:
            return False
        if len(self.pool) >= self.pool_blocks:
            del self.pool[next(iter(self.pool))]
        self.pool[key] = content
        return True
