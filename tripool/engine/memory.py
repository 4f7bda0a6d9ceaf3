"""Memory of processes as the kernel counts it, and large pages.

Weights are read from end to end for every token, so their pages should be large ones: a processor's table of pages
covers few megabytes in small ones. The kernel gives large pages to anonymous memory that asks for them, where its
setting lets it and where it finds some in one piece; whether it did is only seen afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from pathlib import Path

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of a process that are in memory; a cache or an exchange counts as far as it has been touched."""

    resident: int
    shared: int                         # of them, in caches and exchanges


def large_pages(num_bytes: int) -> mmap.mmap:
    """Anonymous memory that asks for large pages."""
    arena = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        arena.madvise(mmap.MADV_HUGEPAGE)
    return arena


def mapped_file(descriptor: int, num_bytes: int) -> mmap.mmap:
    """A file in memory, once for all who map it; who writes there gets a copy of the page for himself.

    Where the file system keeps files in large pages (ext4 does, in newer kernels), they are mapped as such.
    """
    mapped = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def setting() -> str:
    """When the kernel gives large pages: always, madvise (to who asks) or never; empty where it does not say."""
    return SETTING.read_text().partition("[")[2].partition("]")[0] if SETTING.exists() else ""


def share_in_large_pages(num_bytes: int) -> float:
    """Try it: of so much new memory, the share that came in large pages."""
    arena = large_pages(num_bytes)
    for at in range(0, num_bytes, mmap.PAGESIZE):
        arena[at] = 1
    held = ctypes.c_char.from_buffer(arena)
    address = ctypes.addressof(held)
    found, inside = 0, False
    for line in (PROC / "self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.partition(" ")[0]:                       # a mapping begins: its first and last address
            first, last = (int(each, 16) for each in line.split()[0].split("-"))
            inside = first < address + num_bytes and address < last
        elif inside and name == "AnonHugePages":
            found += 1024 * int(value.split()[0])
    del held
    arena.close()
    return min(1.0, found / num_bytes)


def process_memory(pid: int) -> ProcessMemory | None:
    """What a process has in memory; None if it is gone, or the kernel does not say."""
    counts = _counts(PROC / str(pid) / "status")
    if "VmRSS" not in counts:
        return None
    return ProcessMemory(counts["VmRSS"], counts.get("RssShmem", 0))


def large_page_bytes(pid: int) -> int:
    """Bytes that a process has in large pages. Looks at all of its pages, which takes a moment."""
    counts = _counts(PROC / str(pid) / "smaps_rollup")
    return sum(counts.get(name, 0) for name in ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"))


def _counts(file: Path) -> dict[str, int]:
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].removesuffix(":"): 1024 * int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}
