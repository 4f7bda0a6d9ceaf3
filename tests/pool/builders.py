"""Blocks whose bytes are a function of their key, so that any reader can tell whether it got the right ones."""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

BLOCK_BYTES = 60_000
EXTENT_BYTES = 61_440                 # of a block with its header, in whole pages


def key(number: int | str) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=32).digest()


def contents(number: int | str, num_bytes: int = BLOCK_BYTES) -> bytes:
    return hashlib.shake_128(key(number)).digest(num_bytes)


def item(number: int | str, num_bytes: int = BLOCK_BYTES) -> tuple[bytes, memoryview, None]:
    return key(number), memoryview(contents(number, num_bytes)), None


def items(*numbers: int | str, num_bytes: int = BLOCK_BYTES) -> list[tuple[bytes, memoryview, None]]:
    return [item(number, num_bytes) for number in numbers]


def keys(*numbers: int | str) -> list[bytes]:
    return [key(number) for number in numbers]


def places(count: int, num_bytes: int = BLOCK_BYTES) -> list[memoryview]:
    """Room to fetch into."""
    return [memoryview(bytearray(num_bytes)) for _ in range(count)]


def eventually(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.002)


def open_files() -> list[str]:
    """What the descriptors of this process refer to."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(fd))
        except FileNotFoundError:
            pass                      # the one that lists the folder
    return sorted(found)


def arena_mappings(pid: int | str = "self") -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:tripool-" in line]
