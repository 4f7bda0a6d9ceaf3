"""Memory as the kernel counts it."""

import mmap
import os
import subprocess
import sys

from tripool.engine import memory

MIB = 1 << 20


def test_what_a_process_touches_is_resident():
    before = memory.process_memory(os.getpid())
    arena = memory.large_pages(40 * MIB)
    untouched = memory.process_memory(os.getpid())
    for at in range(0, len(arena), mmap.PAGESIZE):
        arena[at] = 1
    touched = memory.process_memory(os.getpid())
    assert untouched.resident - before.resident < 20 * MIB <= 30 * MIB < touched.resident - before.resident


def test_another_process_can_be_looked_at():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert 0 < memory.process_memory(other.pid).resident < memory.process_memory(os.getpid()).resident
        other.stdin.close()
    assert memory.process_memory(other.pid) is None
    assert memory.large_page_bytes(other.pid) == 0


def test_large_pages_are_counted_where_there_are_any(tmp_path, monkeypatch):
    (tmp_path / "7").mkdir()
    (tmp_path / "7/smaps_rollup").write_text(
        "558c3720d000-7fff4bc94000 ---p 00000000 00:00 0  [rollup]\nRss:     1628 kB\nAnonHugePages:     4096 kB\n"
        "ShmemPmdMapped:     2048 kB\nFilePmdMapped:      0 kB\n")
    monkeypatch.setattr(memory, "PROC", tmp_path)
    assert memory.large_page_bytes(7) == 6 * MIB


def test_the_share_in_large_pages_is_what_the_kernel_gave(tmp_path, monkeypatch):
    """Here it may give all or none; a setting of `never` gives none."""
    assert 0.0 <= memory.share_in_large_pages(8 * MIB) <= 1.0
    if memory.setting() == "never":
        assert memory.share_in_large_pages(8 * MIB) == 0.0
    monkeypatch.setattr(memory, "SETTING", tmp_path / "enabled")
    assert memory.setting() == ""
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert memory.setting() == "never"
