"""The plan of weights: every checkpoint tensor has one place, and ranks share out the experts."""

from collections import Counter

import pytest
import torch

from tests.checkpoints import tensor_shapes, tiny_config
from tripool.core.shape import model_shape
from tripool.engine.model.layout import expert_range, shared_tensors, weight_plan

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


def test_ranks_share_out_the_experts_and_repeat_the_rest():
    shape = model_shape(tiny_config("v3", mtp=1))
    ranks = [{source.tensor for spec in weight_plan(shape, rank, 2) for source in spec.sources} for rank in (0, 1)]
    routed = [{name for name in names if ".mlp.experts." in name} for names in ranks]
    assert not routed[0] & routed[1]
    assert ranks[0] - routed[0] == ranks[1] - routed[1]
    assert ranks[0] | ranks[1] == {source.tensor for spec in weight_plan(shape) for source in spec.sources}
    assert [expert_range(shape, rank, 4) for rank in (0, 3)] == [range(2), range(6, 8)]


def test_gate_and_bias_are_float32_and_nothing_else_is():
    plan = weight_plan(model_shape(tiny_config("v3", mtp=1)))
    assert all((spec.dtype == "float32") == (".router." in spec.name) for spec in plan)


def test_layers_without_experts_stand_where_the_config_says():
    shape = model_shape(tiny_config("v3", first_k_dense_replace=1, moe_layer_freq=2))
    names = {spec.name for spec in weight_plan(shape)}
    assert {"layers.0.dense.down", "layers.1.dense.down", "layers.2.experts.down"} <= names
