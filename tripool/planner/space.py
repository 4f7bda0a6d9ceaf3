"""What an instance may be: how many ranks, which experts twice, how many tokens a step, drafts, two microbatches.

Sizes follow the machine: within a node powers of two, beyond it whole nodes. Expert slots are the same on all ranks,
so that no rank has more to read than another; copies of the shared expert get slots where there are more ranks than
routed experts. What cannot be built is left out here; what does not fit a die's memory is found when it is priced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tripool.core.deployment import InstanceConfig
from tripool.core.errors import ConfigError
from tripool.core.messages import Role
from tripool.core.placement import even_geometry
from tripool.core.shape import ModelShape
from tripool.sim.hardware.description import Hardware

NODE_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20, 24, 32, 48)
STEP_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Budgets of a step, per rank."""

MOST_REDUNDANT = 4
"""One redundant expert for so many routed ones, at the most: the paper has one for eight."""

ROUTED_FOR_SHARED = 8
"""Slots of routed experts for one of the shared one: tokens choose about as many of them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of an instance and the experts on them."""

    ranks: int
    redundant_experts: int = 0
    shared_expert_copies: int = 0
    expert_nodes: int = 1


def rank_counts(hardware: Hardware, most: int) -> list[int]:
    """Numbers of ranks to try."""
    inside, counts = hardware.dies_per_node, []
    size = 1
    while size < inside:
        counts.append(size)
        size *= 2
    counts += [inside * nodes for nodes in NODE_COUNTS if nodes <= hardware.nodes]
    return [count for count in dict.fromkeys(counts) if count <= most]


def layouts(shape: ModelShape, hardware: Hardware, most_ranks: int, role: Role) -> list[Layout]:
    """Layouts that can be built with at most so many ranks."""
    routed = shape.num_routed_experts
    if not routed:
        return [Layout(1)]
    found = []
    for ranks in rank_counts(hardware, most_ranks):
        for layout in _expert_layouts(shape, hardware, ranks, role):
            try:
                even_geometry(ranks, routed, num_redundant=layout.redundant_experts,
                              num_shared_copies=layout.shared_expert_copies,
                              num_groups=shape.num_groups if layout.expert_nodes > 1 else 1,
                              num_nodes=layout.expert_nodes)
            except ConfigError:
                continue
            found.append(layout)
    return found


def _expert_layouts(shape: ModelShape, hardware: Hardware, ranks: int, role: Role) -> Iterator[Layout]:
    routed = shape.num_routed_experts
    if ranks == 1:
        yield Layout(1)
        return
    nodes = -(-ranks // hardware.dies_per_node)
    if role == "decode" or shape.num_groups % nodes or ranks % nodes:
        nodes = 1                          # a prefill's groups stay on a node; a decode instance places all over
    least = -(-routed // ranks)
    for slots in (least, least + 1):
        redundant = slots * ranks - routed
        if redundant * MOST_REDUNDANT <= routed:
            yield Layout(ranks, redundant, 0, nodes if redundant else 1)
    if role != "prefill" and shape.num_shared_experts == 1 and ranks > routed:      # a slot holds one, `serve` says
        for redundant in (0, routed // ROUTED_FOR_SHARED):
            shared = ranks - routed - redundant
            if shared > 0:
                yield Layout(ranks, redundant, shared)


def instance(layout: Layout, *, rows: int = 1, step_tokens: int | None = None, drafts: int = 0,
             microbatches: bool = False) -> InstanceConfig:
    """A layout as a deployment file has it. Without `step_tokens` a step has room for the rows alone.

    A workload says nothing of what asks for answers again, so nothing of them is kept.
    """
    least = rows * (1 + drafts)
    return InstanceConfig(
        count=1, ranks=layout.ranks, redundant_experts=layout.redundant_experts,
        shared_expert_copies=layout.shared_expert_copies, expert_nodes=layout.expert_nodes,
        num_speculative_tokens=drafts, microbatches=microbatches, max_num_seqs=rows,
        max_num_batched_tokens=max(step_tokens or 0, least, 64),
        enable_prefix_caching=step_tokens is not None, store_generated=False)
