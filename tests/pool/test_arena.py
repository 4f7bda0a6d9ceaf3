"""The shared memory: sealed, reserved, proved by headers, and gone with its last mapping."""

import errno
import fcntl
import gc
import mmap
import os

import numpy as np
import pytest

from tests.pool.builders import arena_mappings, key
from tripool.core.errors import ConfigError, PoolError
from tripool.pool.arena import (
    HEADER_BYTES,
    Mapping,
    _room,
    available_memory_bytes,
    block_header,
    create_arena,
    read_only,
)

NUM_BYTES = 1 << 16


@pytest.fixture
def arena_fd():
    fd = create_arena("test", NUM_BYTES)
    yield fd
    os.close(fd)


def test_an_arena_can_neither_shrink_nor_grow(arena_fd):
    for size in (NUM_BYTES - 4096, NUM_BYTES + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(arena_fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_every_page_of_an_arena_is_reserved(arena_fd):
    assert os.fstat(arena_fd).st_blocks * 512 == NUM_BYTES


def test_nothing_can_be_written_through_a_readers_descriptor(arena_fd):
    fd = read_only(arena_fd)
    try:
        with pytest.raises(OSError) as refused:
            os.pwrite(fd, b"x", 0)
        assert refused.value.errno == errno.EBADF
        with pytest.raises(PermissionError):
            mmap.mmap(fd, NUM_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PoolError, match="cannot map"):
            Mapping(fd, NUM_BYTES, writable=True)
    finally:
        os.close(fd)


def test_a_read_only_mapping_sees_what_is_written_and_cannot_write(arena_fd):
    writing, reading = Mapping(arena_fd, NUM_BYTES, writable=True), Mapping(arena_fd, NUM_BYTES, writable=False)
    writing.bytes_N[100] = 7
    assert reading.bytes_N[100] == 7
    assert reading.data(0, 10).data.readonly
    with pytest.raises(ValueError, match="read-only"):
        reading.bytes_N[100] = 8


def test_a_mapping_lasts_as_long_as_anything_refers_to_its_bytes(arena_fd):
    gc.collect()
    before = len(arena_mappings())
    mapping = Mapping(arena_fd, NUM_BYTES, writable=True)
    mapping.bytes_N[HEADER_BYTES + 5] = 9
    part = np.frombuffer(mapping.data(0, 10).data[5:6], np.uint8)
    del mapping
    assert part[0] == 9
    assert len(arena_mappings()) == before + 1
    del part
    assert len(arena_mappings()) == before


def test_a_header_comes_and_goes(arena_fd):
    mapping = Mapping(arena_fd, NUM_BYTES, writable=True)
    header = block_header(key(1), 3, 100, 2**64 - 1)
    mapping.write_header(4096, header)
    assert mapping.header(4096) == header
    assert block_header(key(1), 4, 100, 2**64 - 1) != header
    mapping.wipe_header(4096)
    assert mapping.header(4096) == bytes(HEADER_BYTES)


def test_memory_that_is_not_sealed_or_of_another_size_is_not_mapped(arena_fd):
    with pytest.raises(PoolError, match="another size"):
        Mapping(arena_fd, NUM_BYTES // 2, writable=False)
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, NUM_BYTES)
        with pytest.raises(PoolError, match="may still shrink"):
            Mapping(fd, NUM_BYTES, writable=False)
    finally:
        os.close(fd)


def test_more_than_the_machine_has_is_refused_before_anything_is_taken():
    available_bytes = available_memory_bytes()
    assert 0 < available_bytes < 1 << 50
    with pytest.raises(ConfigError, match=r"needs \d+ bytes of memory .* only \d+ are available"):
        create_arena("test", 1 << 50)


def test_the_limits_of_control_groups_count(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 50\n")
    assert _room(tmp_path, "memory.max", "memory.current") == [350]
    (tmp_path / "memory.max").write_text("max\n")
    assert _room(tmp_path, "memory.max", "memory.current") == []
    assert _room(tmp_path / "absent", "memory.max", "memory.current") == []
