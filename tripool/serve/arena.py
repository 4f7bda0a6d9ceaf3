"""A cache arena: the memory behind one rank's block cache, and how others read it.

An arena is a memfd: reserved at once (so that a full machine is an error at start, not a bus error
later), sealed against change of size, handed out for reading only, and pre-faulted. It has no name
to leak and lives as long as anyone maps it, so blocks can be pulled even from a process that has died.
Only the owner writes. It publishes a block's generation before the first write of new contents; a
reader compares generations before and after its copy, and the checksum of what it copied, so that a
block reused under its hands is noticed, never believed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash
from numpy.typing import NDArray

from tripool.core.errors import ConfigError, StaleBlockError, WireError
from tripool.core.messages import Part
from tripool.pool.arena import available_memory_bytes

MAGIC = b"tripool arena 1\0"
HEADER = struct.Struct("<16sQQ64s")        # magic, blocks, bytes of a block, layout digest
PAGE = mmap.PAGESIZE
F_SEAL_FUTURE_WRITE = 0x0010               # linux/fcntl.h; Python 3.11 lacks the name


@dataclass(frozen=True, slots=True)
class Geometry:
    """How an arena is laid out: header page(s) with the generation table, then the blocks."""

    num_blocks: int
    block_bytes: int

    @property
    def payload_offset(self) -> int:
        table_end = HEADER.size + 8 * (self.num_blocks + 1)
        return -(-table_end // PAGE) * PAGE

    @property
    def total_bytes(self) -> int:
        return self.payload_offset + self.num_blocks * self.block_bytes


class Arena:
    """The owner's side."""

    def __init__(self, name: str, num_blocks: int, block_bytes: int, layout: str) -> None:
        """Reserve the memory.

        Raises:
            ConfigError: the machine does not have it.
        """
        self.geometry = Geometry(num_blocks, block_bytes)
        total, free = self.geometry.total_bytes, available_memory_bytes()
        if total > free:        # asked first, because the kernel would take all there is before it says no
            raise ConfigError(f"the block cache needs {total} bytes of shared memory and this machine has {free} free; "
                              "lower cache_bytes, max_num_seqs or max_model_len")
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, total)
            self.map = mmap.mmap(self.fd, total, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(f"the block cache needs {total} bytes of shared memory, which this machine does not give "
                              f"({error.strerror}); lower cache_bytes, max_num_seqs or max_model_len") from error
        HEADER.pack_into(self.map, 0, MAGIC, num_blocks, block_bytes, layout.encode()[:64])
        whole = memoryview(self.map)
        at = _table_offset()
        self.generations = whole[at:at + 8 * num_blocks].cast("Q")
        self.payload = whole[self.geometry.payload_offset:]
        self._whole = whole

    def seal(self, *, for_good: bool = True) -> None:
        """After all writers have mapped it: nobody can grow, shrink or write-map it any more.

        Not `for_good`: another writer may come, in place of one that is gone. Hand out `reader_fd` alone.
        """
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if for_good:
            seals |= F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    @cached_property
    def reader_fd(self) -> int:
        """A descriptor that can be mapped for reading only."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def block(self, block: int) -> memoryview:
        size = self.geometry.block_bytes
        return self.payload[block * size:(block + 1) * size]


def map_arena(fd: int, geometry: Geometry) -> tuple[memoryview, memoryview]:
    """Payload and generation table of an arena, writable: for the rank that computes in it, before it is sealed."""
    whole = memoryview(mmap.mmap(fd, geometry.total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    os.close(fd)
    at = _table_offset()
    return whole[geometry.payload_offset:], whole[at:at + 8 * geometry.num_blocks].cast("Q")


class PeerArena:
    """The reader's side: another process's arena, mapped read-only and pre-faulted."""

    def __init__(self, fd: int) -> None:
        """Map it; the descriptor is closed.

        Raises:
            WireError: it is not an arena, or its size does not match its header.
        """
        try:
            size = os.fstat(fd).st_size
            if size < HEADER.size:
                raise WireError(f"a peer's arena has only {size} bytes")
            self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        magic, num_blocks, block_bytes, layout = HEADER.unpack_from(self._map, 0)
        self.geometry = Geometry(num_blocks, block_bytes)
        if magic != MAGIC or self.geometry.total_bytes != size:
            raise WireError("a peer's arena has a header that does not match its size")
        self.layout = layout.rstrip(b"\0").decode()
        whole = np.frombuffer(self._map, dtype=np.uint8)
        at = _table_offset()
        self._generations = whole[at:at + 8 * num_blocks].view(np.uint64)
        self._payload = whole[self.geometry.payload_offset:].reshape(num_blocks, block_bytes)

    def copy_block(self, part: Part, into: memoryview, *, verify: bool) -> None:
        """Copy one granted block.

        Raises:
            StaleBlockError: the block was given new contents meanwhile, or the bytes are not the granted ones.
        """
        if not 0 <= part.block < self.geometry.num_blocks or len(into) != self.geometry.block_bytes:
            raise StaleBlockError(f"block {part.block} is not a block of this arena")
        prove_generation(self._generations, part)
        np.copyto(np.frombuffer(into, dtype=np.uint8), self._payload[part.block])
        prove_generation(self._generations, part)
        if verify:
            prove_bytes(into, part)


def prove_generation(generations: NDArray[np.uint64] | memoryview, part: Part) -> None:
    """Raise StaleBlockError unless the block is still in the life that was granted."""
    found = int(generations[part.block])
    if found != part.generation:
        raise StaleBlockError(f"block {part.block} is in generation {found}, not {part.generation} as granted")


def prove_bytes(data: memoryview | bytes, part: Part) -> None:
    """Raise StaleBlockError unless the bytes have the granted checksum."""
    found = xxhash.xxh3_64_intdigest(data)
    if found != part.checksum:
        raise StaleBlockError(f"block {part.block} has checksum {found:016x}, not {part.checksum:016x} as granted")


def _table_offset() -> int:
    return -(-HEADER.size // 8) * 8
