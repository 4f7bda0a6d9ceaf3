"""Consistent hashing: which server keeps which block.

Each server owns many small arcs of a circle of 64-bit points, so that adding a server moves only its
share of the keys, all of them to itself, and removing one moves only what it had. Points are xxh3_64 of
names and keys, the same in every process and release. The ring knows keys and server names; it knows
nothing of blocks, tiers or the network.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence

from xxhash import xxh3_64_intdigest

NUM_ARCS = 160
"""Per server. The busiest of 16 servers then has about 1.2 times the mean; the table stays a few thousand points."""


class Ring:
    """An unchanging circle of servers. A change of membership is a new ring."""

    def __init__(self, names: Iterable[str], num_arcs: int = NUM_ARCS) -> None:
        self.names = tuple(sorted(set(names)))
        arcs = sorted(
            (xxh3_64_intdigest(f"{name}#{arc}".encode()), name) for name in self.names for arc in range(num_arcs)
        )
        self._points = [point for point, _ in arcs]
        self._owners = [name for _, name in arcs + arcs[:1]]         # behind the last point comes the first again

    def server(self, key: bytes) -> str | None:
        """The server that keeps `key`; None when the ring is empty."""
        return self.servers([key])[0]

    def servers(self, keys: Sequence[bytes]) -> list[str] | list[None]:
        """The server of each key."""
        points, owners, place = self._points, self._owners, xxh3_64_intdigest
        if not points:
            return [None] * len(keys)
        return [owners[bisect(points, place(key))] for key in keys]
