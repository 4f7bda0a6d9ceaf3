"""The cache servers of a simulation: which blocks each holds, by key. A full one drops what was used longest ago.

Keys are placed by the same ring as real ones. The servers know keys and how many blocks fit; bytes travel in `fabric`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tripool.pool.ring import Ring

MOST_HOMES = 1 << 17


class CacheServers:
    """All servers of the pool."""

    def __init__(self, count: int, server_blocks: int) -> None:
        self.server_blocks = server_blocks
        self.num_evicted = 0
        self._held: dict[str, OrderedDict[bytes, None]] = {f"cache-{index}": OrderedDict() for index in range(count)}
        self._ring = Ring(self._held)
        self._homes: dict[bytes, str | None] = {}         # of keys, as the ring says

    @property
    def names(self) -> list[str]:
        """Of those that live."""
        return list(self._held)

    @property
    def num_blocks(self) -> int:
        return sum(len(held) for held in self._held.values())

    def find(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many of the leading blocks that are there each server has; they count as used."""
        counts: dict[str, int] = {}
        for key, server in zip(keys, self._homes_of(keys), strict=True):
            if server is None or key not in self._held[server]:
                break
            self._held[server].move_to_end(key)
            counts[server] = counts.get(server, 0) + 1
        return counts

    def missing(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many blocks each server would have to take."""
        counts: dict[str, int] = {}
        all_held = self._held
        for key, server in zip(keys, self._homes_of(keys), strict=True):
            if server is not None and key not in all_held[server]:
                counts[server] = counts.get(server, 0) + 1
        return counts

    def put(self, keys: Sequence[bytes]) -> int:
        """Keep blocks. Returns how many were new."""
        num_new, most, all_held = 0, self.server_blocks, self._held
        for key, server in zip(keys, self._homes_of(keys), strict=True) if most else ():
            if server is None or key in all_held[server]:
                continue
            held = all_held[server]
            if len(held) >= most:
                held.popitem(last=False)
                self.num_evicted += 1
            held[key] = None
            num_new += 1
        return num_new

    def lose(self, name: str) -> None:
        """A server is gone, with what it held; others take its keys from now on."""
        del self._held[name]
        self._change_ring()

    def restore(self, name: str) -> None:
        """It comes back, empty."""
        self._held[name] = OrderedDict()
        self._change_ring()

    def _change_ring(self) -> None:
        self._ring = Ring(self._held)
        self._homes.clear()

    def _homes_of(self, keys: Sequence[bytes]) -> list[str | None]:
        """The server that keeps each key, as the ring says, and noted: they are asked for again and again."""
        homes = self._homes
        try:
            return [homes[key] for key in keys]
        except KeyError:                                   # of some that are new
            if len(homes) >= MOST_HOMES:
                homes.clear()
            new = [key for key in keys if key not in homes]
            homes.update(zip(new, self._ring.servers(new), strict=True))
            return [homes[key] for key in keys]
