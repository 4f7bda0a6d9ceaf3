"""Designs of instances: sizes that the machine has, experts that have a place."""

from dataclasses import replace

from tests.planner.builders import CLUSTER
from tripool.core.placement import even_geometry
from tripool.planner.space import Layout, instance, layouts, rank_counts
from tripool.sim.costs.models import read_shape
from tripool.sim.hardware.description import read_hardware

R1, TINY = read_shape("deepseek-r1"), read_shape("tiny")
SUPERNODE = read_hardware("cloudmatrix384")


def test_the_papers_instances_are_among_the_designs():
    assert Layout(320, 32, 32) in layouts(R1, SUPERNODE, 768, "decode")
    assert Layout(32, 32, 0, expert_nodes=2) in layouts(R1, SUPERNODE, 768, "prefill")


def test_every_design_can_be_built_and_has_equal_ranks():
    for role in ("prefill", "decode", "hybrid"):
        for layout in layouts(R1, SUPERNODE, 768, role):
            geometry = even_geometry(layout.ranks, 256, num_redundant=layout.redundant_experts,
                                     num_shared_copies=layout.shared_expert_copies,
                                     num_groups=8 if layout.expert_nodes > 1 else 1, num_nodes=layout.expert_nodes)
            assert len(set(geometry.slots_per_rank)) == 1


def test_sizes_are_powers_of_two_within_a_node_and_whole_nodes_beyond():
    assert rank_counts(SUPERNODE, 64) == [1, 2, 4, 8, 16, 32, 48, 64]
    assert rank_counts(CLUSTER, 4) == [1, 2, 3, 4]
    assert max(rank_counts(replace(SUPERNODE, nodes=2), 10_000)) == 32


def test_a_model_without_experts_has_one_rank():
    assert layouts(replace(TINY, num_routed_experts=0), SUPERNODE, 768, "decode") == [Layout(1)]


def test_a_shared_expert_wider_than_a_slot_gets_no_copies():
    assert any(layout.shared_expert_copies for layout in layouts(R1, SUPERNODE, 768, "decode"))
    wide = layouts(replace(R1, num_shared_experts=2), SUPERNODE, 768, "decode")
    assert wide and not any(layout.shared_expert_copies for layout in wide)


def test_a_step_has_room_for_all_rows_and_their_drafts():
    config = instance(Layout(16), rows=100, drafts=2, step_tokens=64)

    assert config.max_num_batched_tokens == 300 and config.count == 1
