"""A block's bytes, where they lie and how they are proved."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import xxhash

from tests.checkpoints import tiny_config
from tripool.core.plan import BlockRef
from tripool.core.shape import model_shape
from tripool.engine.cache import BlockCache, block_bytes, layout_digest

SHAPE = model_shape(tiny_config("v3", mtp=1))


def test_a_block_is_one_extent_of_layers_tokens_and_width_and_then_the_hidden_state():
    cache = BlockCache(SHAPE, num_blocks=3, block_tokens=4, dtype=torch.float32)
    width, layers = SHAPE.entry_width, SHAPE.num_cached_layers

    cache.entries(2)[1, 3, 5] = 7.0
    cache.hidden[1, 6] = 9.0

    flat = torch.frombuffer(bytearray(cache.read_block(1)), dtype=torch.float32)
    assert flat[(2 * 4 + 3) * width + 5] == 7.0
    assert flat[layers * 4 * width + 6] == 9.0
    assert flat.count_nonzero() == 2
    assert len(flat) == layers * 4 * width + SHAPE.hidden_size


def test_a_cache_in_given_memory_is_seen_by_whoever_else_maps_it():
    size = block_bytes(SHAPE, 4, torch.bfloat16)
    memory, table = bytearray(5 * size), memoryview(bytearray(5 * 8)).cast("Q")
    cache = BlockCache(SHAPE, 5, 4, torch.bfloat16, memory=memoryview(memory), generations=table)

    cache.publish(BlockRef(block=3, generation=2**40))
    cache.entries(0)[3] = 1.0

    assert table.tolist() == [0, 0, 0, 2**40, 0]
    assert memory[3 * size:3 * size + 2] == torch.ones(1, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert memory[:3 * size].count(0) == 3 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copied_block_has_the_same_contents_and_the_same_sum(dtype):
    source, copy = (BlockCache(SHAPE, 3, 8, dtype) for _ in range(2))
    source.data.normal_()

    copy.write_block(2, source.read_block(1))

    assert torch.equal(copy.data[2], source.data[1])
    assert copy.sum_block(2) == source.sum_block(1) == xxhash.xxh3_64_intdigest(bytes(source.read_block(1)))
    copy.hidden[2, 0] += 1
    assert copy.sum_block(2) != source.sum_block(1)


def test_the_layout_digest_changes_with_everything_that_changes_what_bytes_mean():
    other_shapes = [dataclasses.replace(SHAPE, **change) for change in (
        {"num_layers": 4}, {"num_mtp_layers": 0}, {"kv_lora_rank": 48}, {"qk_rope_head_dim": 32}, {"hidden_size": 65})]
    digests = [layout_digest(SHAPE, 64, torch.float32), layout_digest(SHAPE, 32, torch.float32),
               layout_digest(SHAPE, 64, torch.bfloat16), *(layout_digest(s, 64, torch.float32) for s in other_shapes)]

    assert len(set(digests)) == len(digests)
    assert layout_digest(SHAPE, 64, torch.float32) == digests[0]
