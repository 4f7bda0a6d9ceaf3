"""The one place that divides a machine's cores and memory among the processes of a deployment.

Kernel threads of a rank, event loops and copies share the same few cores. Threads beyond the cores that there
are only take turns, and with torch's a rank is then slower than with one: each parallel region waits for a thread
that is not running. So ranks get whole cores, and never more than there are. What a rank does with the threads it is
given is in `engine/threads.py`: its kernels' pool takes them (`engine/ops/csrc/threads.h`), torch keeps to one. Every
other process computes on one thread: gateways, cache servers, the launcher.
"""

from __future__ import annotations

import os

from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.errors import ConfigError
from tripool.core.shape import ModelShape

MAX_MEMORY_SHARE = 0.25          # of the memory that is free at start, for all block caches together
DEFAULT_TOKENS_PER_ROW = 1024    # of cache, when cache_bytes is not given


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def num_ranks(deployment: Deployment) -> int:
    """Ranks of all instances together."""
    return sum(each.count * each.ranks for each in (deployment.prefill, deployment.decode, deployment.hybrid))


def threads_per_rank(deployment: Deployment, config: InstanceConfig, cores: int, *, event_loops: bool = True) -> int:
    """Threads that each rank computes with: as configured, or an equal share of the cores; where there are event loops,
    of all cores but one.

    On 2 busy cores a decode step of the embedded model took 655 ms with two threads and 48 ms with one (measured).
    """
    return config.threads or max(1, (cores - event_loops) // num_ranks(deployment))


def blocks_per_rank(shape: ModelShape, deployment: Deployment, config: InstanceConfig, block_bytes: int,
                    max_model_len: int, free_bytes: int) -> int:
    """Cache blocks of one rank: as configured, or a modest number for its rows, within a share of the memory.

    Raises:
        ConfigError: not even one request of the longest length fits.
    """
    block_tokens = deployment.block_tokens
    least = -(-max_model_len // block_tokens) + 1
    if config.cache_tokens:
        num_blocks = -(-config.cache_tokens // block_tokens)
        source = f"cache_tokens is {config.cache_tokens}"
    elif config.cache_bytes:
        num_blocks = config.cache_bytes // block_bytes
        source = f"cache_bytes is {config.cache_bytes}"
    else:
        tokens = max(2 * max_model_len, config.max_num_seqs * min(max_model_len, DEFAULT_TOKENS_PER_ROW))
        share = int(free_bytes * MAX_MEMORY_SHARE / num_ranks(deployment))
        num_blocks = min(-(-tokens // block_tokens) + 1, share // block_bytes)
        source = f"this machine has {free_bytes} bytes free, of which a rank's cache may take {share}"
    if num_blocks < least:
        raise ConfigError(f"{source}, but one request of max_model_len {max_model_len} "
                          f"needs {least * block_bytes} bytes ({least} blocks of {block_bytes}); "
                          f"lower max_model_len or raise {'cache_tokens' if config.cache_tokens else 'cache_bytes'}")
    return num_blocks
