"""The shared memory of one server: a sealed memfd, mapped by its owner and by clients of the same host.

The memory has no name, so a killed process leaves no file behind: it is gone with its last mapping. Its
pages are reserved before anyone uses them, so that a machine too small says so at the start, and it can
neither shrink nor grow, so that no reader is ever ended by SIGBUS. Mappings are pre-faulted: writing
into untouched pages costs three times as much.

Every block begins with a header that its owner writes when the block becomes visible and wipes before
the bytes are given away. A reader that finds the same header after a copy has copied that block.

It knows bytes and file descriptors; it does not know which blocks exist.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from tripool.core.errors import ConfigError, PoolError

Bytes = npt.NDArray[np.uint8]

HEADER = struct.Struct("<8sQQQ32s")
"""Magic, generation, length, xxh3_64 of the data, key."""
HEADER_BYTES = HEADER.size
MAGIC = b"tripool1"

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def block_header(key: bytes, generation: int, num_bytes: int, checksum: int) -> bytes:
    """What stands before the data of a sealed block."""
    return HEADER.pack(MAGIC, generation, num_bytes, checksum, key)


def checksum_of(data: Bytes | memoryview) -> int:
    """xxh3_64 of a whole block."""
    return xxh3_64_intdigest(data.data if isinstance(data, np.ndarray) else data)


def create_arena(name: str, num_bytes: int) -> int:
    """A new memfd of exactly `num_bytes`, all of it reserved, that can neither shrink nor grow.

    Raises:
        ConfigError: the machine or its limits do not allow that much; the message says how much is needed.
    """
    available_bytes = available_memory_bytes()
    if num_bytes > available_bytes:
        raise ConfigError(f"{name} needs {num_bytes} bytes of memory for its blocks, but only {available_bytes} are "
                          "available; make cache.bytes smaller, or raise the memory limit")
    fd = os.memfd_create(f"tripool-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"{name} needs {num_bytes} bytes of shared memory for blocks, which could not be reserved "
                          f"({error.strerror}); make cache.bytes smaller, or raise the limit") from error
    return fd


def read_only(fd: int) -> int:
    """A second descriptor of the same memory through which nothing can be written."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class Mapping:
    """A pre-faulted mapping of a whole arena. It lasts as long as anything refers to its bytes.

    A forked child does not inherit the pages: it would go on reading after its parent's leases have ended.
    """

    def __init__(self, fd: int, num_bytes: int, *, writable: bool) -> None:
        if os.fstat(fd).st_size != num_bytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise PoolError(f"an arena of {num_bytes} bytes is of another size, or may still shrink")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, num_bytes, protection, mmap.MAP_SHARED | mmap.MAP_POPULATE, fd, 0)
        if address == _MAP_FAILED:
            raise PoolError(f"cannot map {num_bytes} bytes of shared memory: {os.strerror(ctypes.get_errno())}")
        _libc.madvise(address, num_bytes, mmap.MADV_DONTFORK)
        # Python's own mmap objects would unmap this address in a forked child, where something else may live by then.
        extent = (ctypes.c_ubyte * num_bytes).from_address(address)
        weakref.finalize(extent, _unmap, address, num_bytes, os.getpid()).atexit = False
        self.num_bytes = num_bytes
        self.bytes_N: Bytes = np.frombuffer(memoryview(extent), np.uint8)
        self.bytes_N.flags.writeable = writable

    def header(self, offset: int) -> bytes:
        """The header of the block at `offset`, as it stands now."""
        return bytes(self.bytes_N[offset:offset + HEADER_BYTES])

    def write_header(self, offset: int, header: bytes) -> None:
        self.bytes_N[offset:offset + HEADER_BYTES] = np.frombuffer(header, np.uint8)

    def wipe_header(self, offset: int) -> None:
        self.bytes_N[offset:offset + HEADER_BYTES] = 0

    def data(self, offset: int, num_bytes: int) -> Bytes:
        """The data of the block at `offset`: an array of its own, which others may watch for its end."""
        return self.bytes_N[offset + HEADER_BYTES:offset + HEADER_BYTES + num_bytes]


def _unmap(address: int, num_bytes: int, pid: int) -> None:
    if os.getpid() == pid:
        _libc.munmap(address, num_bytes)


def available_memory_bytes() -> int:
    """What this process may still use: of the machine, and of every control group above it."""
    return min([_machine_bytes(), *_group_bytes()])


def _machine_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is available")


def _group_bytes() -> list[int]:
    """Limit less use, for each control group (version 1 or 2) that holds this process and has a limit."""
    rooms = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / group.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(root):
                rooms += _room(each, *names)
    return rooms


def _room(folder: Path, limit_name: str, used_name: str) -> list[int]:
    try:
        limit, used = (folder / limit_name).read_text().strip(), int((folder / used_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []                                   # not visible from here, or no limit at this level
    if limit == "max":
        return []
    reclaimable = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
    return [max(0, int(limit) - used + reclaimable)]
