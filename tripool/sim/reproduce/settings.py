"""The deployments that the published numbers were measured on, as instances and steps of the simulator.

Each function is one set-up; what its source does not say is said here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from tripool.core.placement import even_geometry
from tripool.sim.costs.instance import Instance
from tripool.sim.costs.models import read_shape
from tripool.sim.costs.state import StepState
from tripool.sim.costs.states import decode_state
from tripool.sim.costs.work import Numbers
from tripool.sim.hardware.description import Hardware, read_hardware

DIES = 2                                   # of an NPU: batches and throughputs of the paper are those of NPUs
INT8_CACHE = Numbers(latent_bytes=1)        # arXiv 2508.02520, 4.7, and the "C8" of CANN: all but the rotary part
FP8 = Numbers(scale_bytes=224)             # a scale in FP32 for every 128 elements, as DeepEP sends them


@lru_cache
def machine(name: str) -> Hardware:
    return read_hardware(name)


def cm384_decode(num_dies: int = 320) -> Instance:
    """Section 5.1: one expert for each die, 32 redundant ones and 32 copies of the shared one."""
    geometry = even_geometry(num_dies, 256, num_redundant=32, num_shared_copies=32)
    return Instance(read_shape("deepseek-r1"), machine("cloudmatrix384"), num_dies, geometry)


def cm384_prefill(*, perfect: bool = False) -> Instance:
    """Section 5.1: 32 dies on 2 nodes, 8 routed and 1 redundant expert on each and the shared one; SP-TP-SP, and the
    pipeline of section 4.3.2: matrix cores, vector cores and SDMA beside one another."""
    geometry = even_geometry(32, 256, num_redundant=32, num_groups=8, num_nodes=2)
    return Instance(read_shape("deepseek-r1"), machine("cloudmatrix384"), 32, geometry, sequence_parallel=True,
                    perfect_balance=perfect, vector_routing=True)


def cann_decode() -> Instance:
    """64 chips, EP128 and DP128, perfect EPLB, INT8 cache; nothing is said of redundant experts or microbatches."""
    return Instance(read_shape("deepseek-r1"), machine("cloudmatrix384"), 128, even_geometry(128, 256),
                    INT8_CACHE, perfect_balance=True)


def cann_prefill() -> Instance:
    """16 chips, DP32 and EP32, 64 prompts of 4,096 tokens, balanced experts; all computing in one stream."""
    return Instance(read_shape("deepseek-r1"), machine("cloudmatrix384"), 32, even_geometry(32, 256),
                    perfect_balance=True)


def xdeepserve() -> Instance:
    """288 dies with two experts each: a routed and a redundant one, or, on 32, the shared and a redundant one."""
    geometry = even_geometry(288, 256, num_redundant=288, num_shared_copies=32)
    return Instance(read_shape("deepseek-r1"), machine("cloudmatrix384"), 288, geometry, INT8_CACHE)


def xdeepserve_state() -> StepState:
    """60 requests on each die with 2,048 tokens in and 2,048 out: somewhere between the two, at random."""
    even = decode_state(288, 60, 0, drafts=1)
    contexts = np.random.default_rng(0).integers(2048, 4096, (288, 60)).sum(1)
    return replace(even, context_R=contexts)


def gpu_prefill(name: str, *, perfect: bool) -> Instance:
    """EP32 on 4 nodes with 32 redundant experts; DP attention; the shared expert on each GPU."""
    geometry = even_geometry(32, 256, num_redundant=32, num_groups=8, num_nodes=4)
    return Instance(read_shape("deepseek-r1"), machine(name), 32, geometry, FP8, perfect_balance=perfect)


def h800_decode() -> Instance:
    """profile-data: EP128, balanced."""
    return Instance(read_shape("deepseek-r1"), machine("h800"), 128, even_geometry(128, 256), FP8,
                    perfect_balance=True)


def sglang_decode() -> Instance:
    """9 nodes, EP72, 32 redundant experts."""
    return Instance(read_shape("deepseek-r1"), machine("h100"), 72, even_geometry(72, 256, num_redundant=32), FP8)
