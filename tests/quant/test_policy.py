"""Which tensors become INT8, by name."""

from __future__ import annotations

import pytest

from tests.checkpoints import tensor_shapes, tiny_config
from tripool.engine.quantisation import read_quantisation
from tripool.quant.policy import RULES, becomes_int8, quantization_config, rule_of

LAYER = "model.layers.3"


@pytest.mark.parametrize(("tensor", "rule"), [
    (f"{LAYER}.input_layernorm.weight", "norms and biases"),
    (f"{LAYER}.self_attn.q_a_layernorm.weight", "norms and biases"),
    (f"{LAYER}.self_attn.o_proj.bias", "norms and biases"),
    (f"{LAYER}.mlp.gate.e_score_correction_bias", "norms and biases"),
    (f"{LAYER}.shared_head.norm.weight", "norms and biases"),
    ("model.embed_tokens.weight", "embeddings"),
    (f"{LAYER}.mlp.gate.weight", "router"),
    ("lm_head.weight", "head"),
    (f"{LAYER}.shared_head.head.weight", "head"),
    (f"{LAYER}.eh_proj.weight", "MTP join"),
])
def test_what_is_sensitive_stays_as_it_is(tensor, rule):
    assert rule_of(tensor).name == rule
    assert not becomes_int8(tensor)


@pytest.mark.parametrize(("tensor", "rule"), [
    (f"{LAYER}.self_attn.q_a_proj.weight", "attention"),
    (f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight", "attention"),
    (f"{LAYER}.self_attn.o_proj.weight", "attention"),
    (f"{LAYER}.self_attn.kv_b_proj.weight", "latent expansion"),
    (f"{LAYER}.mlp.experts.7.gate_proj.weight", "experts"),
    (f"{LAYER}.mlp.shared_experts.down_proj.weight", "shared expert"),
    (f"{LAYER}.mlp.up_proj.weight", "dense feed-forward"),
])
def test_large_products_become_int8(tensor, rule):
    assert rule_of(tensor).name == rule
    assert becomes_int8(tensor)


def test_without_mixed_precision_every_product_is_int8_and_nothing_else():
    kept = [name for name in tensor_shapes(tiny_config("v3", mtp=1)) if not becomes_int8(name, mixed_precision=False)]

    assert all(rule_of(name).name in ("norms and biases", "embeddings") for name in kept)
    assert becomes_int8("lm_head.weight", mixed_precision=False)


def test_a_name_that_is_not_known_is_kept():
    assert not becomes_int8("model.layers.0.something_new.weight", mixed_precision=False)


def test_every_rule_gives_its_reason():
    assert all(rule.reason for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_what_other_engines_are_told_is_what_we_read():
    names = list(tensor_shapes(tiny_config("v3", mtp=1)))
    written = quantization_config(name for name in names if not becomes_int8(name))

    read = read_quantisation({"quantization_config": written})

    assert read.method == "compressed-tensors"
    assert "lm_head" in written["ignore"]
    assert "model.layers.1.mlp.gate" in written["ignore"]
    assert not any("norm" in each or "bias" in each for each in written["ignore"])
    assert {name for name in names if read.covers(name)} == {name for name in names if becomes_int8(name)}
