"""The plan of weights: every checkpoint tensor has one place, and ranks share out the experts."""

from collections import Counter

import pytest
import torch

from tests.checkpoints import tensor_shapes, tiny_config
from tests.engine.model.builders import even_placement
from tripool.core.placement import EMPTY, Placement, even_geometry, initial_placement
from tripool.core.shape import model_shape
from tripool.engine.model.layout import moe_layers, shared_tensors, weight_plan

CONFIGS = [tiny_config("v3"), tiny_config("v3", mtp=1), tiny_config("v2"), tiny_config("v2-lite"),
           tiny_config("v3", attention_bias=True), tiny_config("v3", tie_word_embeddings=True),
           tiny_config("v2-lite", attention_bias=True), tiny_config("v3", moe_layer_freq=2, first_k_dense_replace=0)]


@pytest.mark.parametrize("config", CONFIGS[:-1])
def test_every_checkpoint_tensor_has_exactly_one_place(config):
    shape = model_shape(config)
    sources = [source for spec in weight_plan(shape) for source in spec.sources] + shared_tensors(shape)
    placed = {source.tensor: source.shape for source in sources}
    stored = tensor_shapes(config)
    if shape.tie_embeddings:
        stored["lm_head.weight"] = (shape.vocab_size, shape.hidden_size)
    assert placed == stored
    assert max(Counter(source.tensor for source in sources).values()) == 1


@pytest.mark.parametrize("config", CONFIGS)
def test_sources_fill_each_weight_without_gap_or_overlap(config):
    for spec in weight_plan(model_shape(config)):
        filled = torch.zeros(spec.shape)
        for source in spec.sources:
            region = filled[source.into]
            assert region.shape == source.shape and region.is_contiguous()
            region += 1
        assert (filled == 1).all(), spec.name


def sources_of(shape, placement, rank):
    return [source for spec in weight_plan(shape, placement, rank) for source in spec.sources]


def test_ranks_share_out_the_experts_and_repeat_the_rest():
    shape = model_shape(tiny_config("v3", mtp=1))
    ranks = [{source.tensor for source in sources_of(shape, even_placement(shape, 2), rank)} for rank in (0, 1)]
    routed = [{name for name in names if ".mlp.experts." in name} for names in ranks]
    assert not routed[0] & routed[1]
    assert ranks[0] - routed[0] == ranks[1] - routed[1]
    assert ranks[0] | ranks[1] == {source.tensor for spec in weight_plan(shape) for source in spec.sources}


def test_a_rank_holds_what_its_slots_name_and_each_tensor_counts_once():
    shape = model_shape(tiny_config("v3", mtp=1))
    num_layers = len(moe_layers(shape))
    # 8 experts in 11 slots of 3 ranks; the first two ranks have copies of expert 3, one slot is empty.
    layer = (3, 0, 1, 2, 7, 4, 5, EMPTY, 3, 6, 0)
    placement = Placement(5, 8, (5, 3, 3), (layer,) * num_layers)
    plans = [weight_plan(shape, placement, rank) for rank in range(3)]
    name = f"layers.{moe_layers(shape)[0]}.experts"

    stacks = [next(spec for spec in plan if spec.name == f"{name}.down") for plan in plans]

    held = [[(source.tensor.split(".")[5], source.into) for source in stack.sources] for stack in stacks]
    assert held == [[("3", (0,)), ("0", (1,)), ("1", (2,)), ("2", (3,)), ("7", (4,))], [("4", (0,)), ("5", (1,))],
                    [("3", (0,)), ("6", (1,)), ("0", (2,))]]
    assert [stack.shape[0] for stack in stacks] == [5, 3, 3]
    counted = Counter(source.tensor for plan in plans for spec in plan for source in spec.sources if source.counted)
    assert set(counted.values()) == {1}
    assert set(counted) == {source.tensor for source in sources_of(shape, None, 0)}


def test_the_shared_expert_may_have_slots_of_its_own():
    shape = model_shape(tiny_config("v3", n_shared_experts=1))
    placement = initial_placement(even_geometry(10, 8, num_shared_copies=2), len(moe_layers(shape)))
    plans = [weight_plan(shape, placement, rank) for rank in range(10)]
    assert not any(".shared." in spec.name for plan in plans for spec in plan)
    names = [source.tensor for plan in plans for spec in plan for source in spec.sources
             if source.tensor.endswith("shared_experts.down_proj.weight")]
    assert Counter(Counter(names).values()) == {2: len(moe_layers(shape))}


def test_gate_and_bias_are_float32_and_nothing_else_is():
    plan = weight_plan(model_shape(tiny_config("v3", mtp=1)))
    assert all((spec.dtype == "float32") == (".router." in spec.name) for spec in plan)


def test_layers_without_experts_stand_where_the_config_says():
    shape = model_shape(tiny_config("v3", first_k_dense_replace=1, moe_layer_freq=2))
    names = {spec.name for spec in weight_plan(shape)}
    assert {"layers.0.dense.down", "layers.1.dense.down", "layers.2.experts.down"} <= names
