"""Shapes: the published configurations give the published numbers, and impossible ones are refused by field."""

import pytest

from tripool.core.errors import ConfigError
from tripool.core.shape import model_shape

V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1, "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "max_position_embeddings": 163840, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
    "eos_token_id": 1,
}


def test_deepseek_v3_has_the_published_number_of_parameters():
    shape = model_shape(V3)
    assert shape.params() == pytest.approx(671.03e9, rel=1e-4)          # the paper's fact sheet, by layer sums
    assert shape.params(active=True) == pytest.approx(36.6e9, rel=0.01)
    assert shape.attention_params() == pytest.approx(187.1e6, rel=1e-3)
    assert shape.expert_params() == pytest.approx(44.04e6, rel=1e-3)


def test_a_token_of_deepseek_v3_takes_70272_bytes_of_cache_in_bf16():
    shape = model_shape({**V3, "num_nextn_predict_layers": 0})
    assert shape.block_elements(128) * 2 == 128 * 70272


def test_a_block_of_a_model_with_mtp_ends_with_a_hidden_state():
    with_mtp, without = model_shape(V3), model_shape({**V3, "num_nextn_predict_layers": 0})
    assert with_mtp.block_elements(1) - without.block_elements(1) == with_mtp.entry_width + with_mtp.hidden_size


@pytest.mark.parametrize(("change", "named"), [
    ({"model_type": "llama"}, "model_type"), ({"hidden_size": None}, "hidden_size"),
    ({"n_group": 7}, "n_group"), ({"topk_group": 9}, "topk_group"),
    ({"num_experts_per_tok": 200}, "num_experts_per_tok"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"), ({"scoring_func": "tanh"}, "scoring_func"),
    ({"topk_method": "magic"}, "topk_method"), ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
    ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
])
def test_what_is_wrong_is_named(change, named):
    with pytest.raises(ConfigError, match=named):
        model_shape({**V3, **change})
