"""Which bytes of an arena are free: extents of any size, joined again when their neighbours are freed.

Blocks of several sizes live side by side, so there are no size classes to starve one another. The
smallest extent that fits is used, the lowest of equals, which keeps large ones whole. With blocks of
one size every hole fits the next block exactly. It knows numbers only: no memory, keys or blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


class ExtentAllocator:
    """Free and used extents of `num_bytes` bytes; sizes are rounded up to whole granules."""

    def __init__(self, num_bytes: int, granule_bytes: int = 4096) -> None:
        self.granule_bytes = granule_bytes
        self.num_bytes = num_bytes // granule_bytes * granule_bytes
        self._used: dict[int, int] = {}              # start -> size
        self._free: dict[int, int] = {}              # start -> size
        self._free_ends: dict[int, int] = {}         # end -> start
        self._free_sizes: list[tuple[int, int]] = []  # (size, start), sorted
        self.free_bytes = 0
        if self.num_bytes:
            self._add_free(0, self.num_bytes)

    @property
    def used_bytes(self) -> int:
        return self.num_bytes - self.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        return self._free_sizes[-1][0] if self._free_sizes else 0

    def rounded(self, num_bytes: int) -> int:
        """What an extent for `num_bytes` takes."""
        return -(-num_bytes // self.granule_bytes) * self.granule_bytes

    def size_of(self, start: int) -> int:
        """Bytes of the used extent at `start`."""
        return self._used[start]

    def allocate(self, num_bytes: int) -> int | None:
        """Start of a new extent of at least `num_bytes`, or None when no free one is large enough."""
        assert num_bytes > 0, f"an extent of {num_bytes} bytes"
        size = self.rounded(num_bytes)
        at = bisect_left(self._free_sizes, (size, 0))
        if at == len(self._free_sizes):
            return None
        found, start = self._free_sizes[at]
        self._remove_free(start)
        if found > size:
            self._add_free(start + size, found - size)
        self._used[start] = size
        return start

    def free(self, start: int) -> None:
        """Give back the extent at `start`; it joins its free neighbours."""
        size = self._used.pop(start, None)
        assert size is not None, f"the extent at {start} is not in use"
        before = self._free_ends.get(start)
        if before is not None:
            size += self._remove_free(before)
            start = before
        if start + size in self._free:
            size += self._remove_free(start + size)
        self._add_free(start, size)

    def could_fit(self, num_bytes: int, starts: Iterable[int]) -> bool:
        """Whether `num_bytes` would fit if the used extents at `starts` were free as well."""
        size = self.rounded(num_bytes)
        loose = [*self._free.items(), *((start, self._used[start]) for start in starts)]
        run, end = 0, -1
        for start, length in sorted(loose):
            run = run + length if start == end else length
            end = start + length
            if run >= size:
                return True
        return False

    def _add_free(self, start: int, size: int) -> None:
        self._free[start] = size
        self.free_bytes += size
        self._free_ends[start + size] = start
        insort(self._free_sizes, (size, start))

    def _remove_free(self, start: int) -> int:
        size = self._free.pop(start)
        self.free_bytes -= size
        del self._free_ends[start + size]
        del self._free_sizes[bisect_left(self._free_sizes, (size, start))]
        return size
