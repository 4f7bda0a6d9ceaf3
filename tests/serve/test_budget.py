"""One place divides cores and memory."""

import pytest

from tests.core.test_shape import V3
from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.errors import ConfigError
from tripool.core.shape import model_shape
from tripool.serve.budget import blocks_per_rank, threads_per_rank

SHAPE = model_shape(V3)
BLOCK_BYTES = SHAPE.block_elements(64) * 2


def deployment(**hybrid) -> Deployment:
    return Deployment(hybrid=InstanceConfig(**{"count": 1, **hybrid}))


@pytest.mark.parametrize(("cores", "count", "threads"), [(1, 1, 1), (2, 1, 1), (4, 1, 3), (16, 2, 7), (2, 4, 1)])
def test_ranks_share_the_cores_but_one(cores, count, threads):
    wanted = deployment(count=count)
    assert threads_per_rank(wanted, wanted.hybrid, cores) == threads


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(1, 1, 1), (2, 1, 2), (16, 2, 8), (2, 4, 1)])
def test_without_event_loops_ranks_share_all_cores(cores, ranks, threads):
    wanted = deployment(ranks=ranks)
    assert threads_per_rank(wanted, wanted.hybrid, cores, event_loops=False) == threads


def test_what_is_configured_is_taken():
    wanted = deployment(threads=5)
    assert threads_per_rank(wanted, wanted.hybrid, 2) == 5


def test_a_cache_holds_at_least_one_request_of_the_longest_length():
    wanted = deployment(cache_bytes=100 * BLOCK_BYTES)
    assert blocks_per_rank(SHAPE, wanted, wanted.hybrid, BLOCK_BYTES, 64 * 99, 1 << 50) == 100
    with pytest.raises(ConfigError, match=str(101 * BLOCK_BYTES)):
        blocks_per_rank(SHAPE, wanted, wanted.hybrid, BLOCK_BYTES, 64 * 100, 1 << 50)


def test_a_cache_may_be_sized_in_tokens():
    wanted = deployment(cache_tokens=64 * 99 + 1)
    assert blocks_per_rank(SHAPE, wanted, wanted.hybrid, BLOCK_BYTES, 64, 1 << 50) == 100
    with pytest.raises(ConfigError, match="cache_tokens is 6337"):
        blocks_per_rank(SHAPE, wanted, wanted.hybrid, BLOCK_BYTES, 64 * 100, 1 << 50)


def test_a_cache_takes_no_more_than_its_share_of_the_memory():
    wanted = deployment(count=2)
    free = 1000 * BLOCK_BYTES
    assert blocks_per_rank(SHAPE, wanted, wanted.hybrid, BLOCK_BYTES, 64, free) * BLOCK_BYTES * 2 <= free / 4
    with pytest.raises(ConfigError, match="free"):
        blocks_per_rank(SHAPE, wanted, wanted.hybrid, BLOCK_BYTES, 64 * 1000, free)
