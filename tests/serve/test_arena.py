"""Arenas: only the owner writes, and a reader proves what it read."""

import mmap
import os

import pytest
import xxhash

from tripool.core.errors import ConfigError, StaleBlockError, WireError
from tripool.core.messages import Part
from tripool.serve.arena import Arena, PeerArena

BLOCK_BYTES = 1000


@pytest.fixture
def arena():
    arena = Arena("test", 8, BLOCK_BYTES, "layout-digest")
    arena.seal()
    return arena


def write(arena: Arena, block: int, generation: int, byte: int) -> Part:
    arena.generations[block] = generation
    arena.block(block)[:] = bytes([byte]) * BLOCK_BYTES
    return Part(0, block, generation, xxhash.xxh3_64_intdigest(arena.block(block)))


def test_a_peer_reads_what_the_owner_wrote(arena):
    part = write(arena, 3, 1, 7)
    peer, into = PeerArena(os.dup(arena.fd)), bytearray(BLOCK_BYTES)
    peer.copy_block(part, memoryview(into), verify=True)
    assert into == bytes([7]) * BLOCK_BYTES
    assert peer.layout == "layout-digest"


def test_a_block_given_new_contents_is_noticed(arena):
    part = write(arena, 3, 1, 7)
    peer = PeerArena(os.dup(arena.fd))
    write(arena, 3, 2, 8)
    with pytest.raises(StaleBlockError, match="generation 2, not 1"):
        peer.copy_block(part, memoryview(bytearray(BLOCK_BYTES)), verify=False)


def test_a_flipped_byte_is_noticed(arena):
    part = write(arena, 3, 1, 7)
    arena.block(3)[500] = 8
    with pytest.raises(StaleBlockError, match="checksum"):
        PeerArena(os.dup(arena.fd)).copy_block(part, memoryview(bytearray(BLOCK_BYTES)), verify=True)


@pytest.mark.parametrize("block", [-1, 8, 1 << 40])
def test_a_block_that_does_not_exist_is_never_touched(arena, block):
    with pytest.raises(StaleBlockError, match="not a block"):
        PeerArena(os.dup(arena.fd)).copy_block(Part(0, block, 1, 0), memoryview(bytearray(BLOCK_BYTES)), verify=False)


def test_nobody_else_can_write_or_resize_it(arena):
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 10)
    with pytest.raises(PermissionError):
        os.write(arena.fd, b"x")


def test_a_mapping_outlives_its_owner():
    arena = Arena("test", 2, BLOCK_BYTES, "")
    part = write(arena, 1, 5, 9)
    peer = PeerArena(os.dup(arena.fd))
    os.close(arena.fd)
    into = bytearray(BLOCK_BYTES)
    peer.copy_block(part, memoryview(into), verify=True)
    assert into[0] == 9


def test_a_file_that_is_no_arena_is_refused():
    fd = os.memfd_create("other")
    os.write(fd, b"x" * 5000)
    with pytest.raises(WireError, match="does not match"):
        PeerArena(fd)


def test_too_much_memory_is_an_error_that_names_the_bytes():
    with pytest.raises(ConfigError, match="bytes of shared memory"):
        Arena("huge", 1 << 30, 1 << 30, "")
