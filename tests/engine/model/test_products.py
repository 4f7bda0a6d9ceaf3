"""A checkpoint in INT8 is computed in INT8: what comes out is what the definition of its products gives."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.checkpoints import tiny_config, write_checkpoint
from tests.engine.model.builders import hidden_in_chunks, new_cache, new_row, random_tokens, relative_error, step
from tripool.core.errors import ConfigError
from tripool.core.placement import Placement
from tripool.engine import load, memory, weights
from tripool.engine.checkpoint import open_checkpoint
from tripool.engine.load import load_model
from tripool.engine.model.deepseek import DeepseekModel
from tripool.engine.model.layout import SCALE
from tripool.engine.model.products import Int8Matrix, PackedExperts, PackedGated, Weights, packed_ahead
from tripool.engine.ops import native
from tripool.engine.ops.float_experts import FloatExperts
from tripool.engine.ops.float_linear import ScaledWeight
from tripool.engine.ops.int8_linear import Int8Weight
from tripool.quant.forward import Model

TOKENS = random_tokens(70)


@pytest.fixture(scope="module", params=["v3", "v2-lite"])
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("int8")
    write_checkpoint(made, tiny_config(request.param, mtp=1 if request.param == "v3" else 0), dtype="int8")
    return made


@pytest.fixture(params=[level for level in native.LEVELS if level in (-1, native.best_level())])
def level(request, monkeypatch):
    monkeypatch.setattr(native, "chosen_level", lambda: request.param)
    return request.param


def hidden(model, chunks=(70,), num_decoded=0):
    return hidden_in_chunks(model, new_cache(model), new_row(TOKENS), chunks, num_decoded)


def test_int8_weights_stay_int8_and_give_what_their_definition_gives(folder, level):
    model = load_model(folder, dtype="float32").model
    layer = model.layers[-1]
    assert isinstance(layer.attention.out, Int8Matrix) and isinstance(layer.feed_forward.experts, PackedExperts)
    assert isinstance(layer.feed_forward.shared, PackedGated)

    # Floats before a product differ in their last bits: sooner or later by a step of a quantised number, or an expert.
    wanted_TD = Model(open_checkpoint(folder)).hidden([TOKENS])
    error_T = (hidden(model) - wanted_TD).abs().amax(-1) / wanted_TD.abs().amax(-1)
    assert error_T[:5].max() < 1e-5 and error_T.median() < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_int8_latent_expansion_takes_a_byte_for_each_element_and_rows_stay_floats(tmp_path, level, dtype):
    """What it gives differs from a product with the numbers it stands for by rounding alone."""
    config = tiny_config("v3")
    tensors = write_checkpoint(tmp_path, config, dtype="int8")
    loaded = load_model(tmp_path, dtype=dtype)
    heads, n, v, latent = (config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim",
                                                     "kv_lora_rank"))
    expansion = loaded.model.layers[1].attention.expansion
    for weight, outputs in ((expansion.latent_of_key, latent), (expansion.key, n), (expansion.value, v)):
        elements = heads * weight.num_inputs * -(-outputs // 16) * 16
        assert weight.data.dtype == torch.int8 and weight.data.nbytes == elements and weight.num_outputs == outputs

    weight_HxL = tensors["model.layers.1.self_attn.kv_b_proj.weight"].view(heads, n + v, latent)
    chance = torch.Generator().manual_seed(0)
    latent_TL, latent_THL, query_THn = (torch.randn(*shape, generator=chance).to(loaded.dtype)
                                        for shape in ((9, latent), (9, heads, latent), (9, heads, n)))
    absorbed_THL = torch.empty_like(latent_THL)
    expansion.absorb(query_THn, absorbed_THL)
    keys_THn, values_THv = expansion.keys_and_values(latent_TL)
    both_THx = torch.einsum("tl,hxl->thx", latent_TL.float(), weight_HxL)
    near = 1e-5 if dtype == "float32" else 1e-2
    for found, wanted in (
        (absorbed_THL, torch.einsum("thn,hnl->thl", query_THn.float(), weight_HxL[:, :n])),
        (keys_THn, both_THx[..., :n]), (values_THv, both_THx[..., n:]),
        (expansion.values(latent_THL), torch.einsum("thl,hvl->thv", latent_THL.float(), weight_HxL[:, n:])),
    ):
        assert found.dtype == loaded.dtype and relative_error(found.float(), wanted) < near


@pytest.mark.skipif(not native.is_built(), reason="the native module is not built")
@pytest.mark.parametrize(("family", "tied"), [("v3", False), ("v2-lite", True)])
def test_a_head_rounded_to_eight_bits_multiplies_rows_of_floats(tmp_path, family, tied):
    stored = write_checkpoint(tmp_path, tiny_config(family, tie_word_embeddings=tied))
    plain, rounded = (load_model(tmp_path, dtype="float32", int8_head=int8).model for int8 in (False, True))
    weight = rounded.head.weight
    assert isinstance(weight, ScaledWeight) and weight.data.dtype == torch.int8
    weight_VD = stored["model.embed_tokens.weight" if tied else "lm_head.weight"].float()
    assert ((weight.unpacked()[0] - weight_VD).abs().amax(-1) <= weight_VD.abs().amax(-1) / 253.9).all()
    hidden_TD = hidden(plain)
    assert torch.equal(hidden(rounded), hidden_TD), "nothing but the head is rounded"
    logits_TV = rounded.logits(hidden_TD)
    assert relative_error(logits_TV, (hidden_TD.double() @ weight.unpacked()[0].T).float()) < 1e-6
    assert 0 < relative_error(logits_TV, plain.logits(hidden_TD)) < 0.01


@pytest.mark.skipif(not native.is_built(), reason="the native module is not built")
def test_a_head_that_is_stored_in_eight_bits_is_not_rounded_again():
    chance = torch.Generator().manual_seed(0)
    q_VD, scale_V = (torch.randint(-128, 128, (40, 24), dtype=torch.int8, generator=chance),
                     torch.rand(40, generator=chance) + 0.1)

    def stored():
        return {"norm": torch.ones(24), "head": q_VD.clone(), "head" + SCALE: scale_V}

    head = Weights(stored(), int8_head=True).matrix("head").weight
    ahead = packed_ahead(stored(), ["head"], floats=True, int8_head=True, num_heads=1, key_width=1)["head"]
    for weight in (head, ahead):
        assert isinstance(weight, Int8Weight)
        assert torch.equal(weight.unpacked()[0][0], q_VD) and torch.equal(weight.unpacked()[1][0], scale_V)


def test_a_head_can_be_rounded_only_where_kernels_multiply_it(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, tiny_config("v3"))
    with pytest.raises(ConfigError, match=r"head_dtype is int8.*bfloat16 on cpu"):
        load_model(tmp_path, dtype="bfloat16", int8_head=True)
    monkeypatch.setattr(native, "chosen_level", lambda: -1)
    with pytest.raises(ConfigError, match="kernels' level is -1"):
        load_model(tmp_path, dtype="float32", int8_head=True)


def test_a_prompt_may_be_cut_anyhow(folder):
    model = load_model(folder, dtype="float32").model
    assert relative_error(hidden(model, (3, 40, 20), 7), hidden(model)) < 0.02


def test_in_deterministic_mode_int8_bits_depend_on_no_other_row(folder):
    model = load_model(folder, deterministic=True).model
    alone = hidden(model)
    cache, row, other = new_cache(model), new_row(TOKENS), new_row(random_tokens(50, seed=1), start_block=20)
    parts = [model.forward(step([row, other], counts), cache)[:counts[0]] for counts in ((30, 5), (1, 40), (39, 1))]
    assert torch.equal(torch.cat(parts), alone)


def test_one_tensor_of_experts_that_is_not_int8_widens_those_of_its_layer_on_every_rank(tmp_path):
    """Any expert may move into any slot, so all of a stack are of one kind, wherever the odd one is."""
    config = tiny_config("v3")
    odd = "model.layers.1.mlp.experts.5.down_proj"
    write_checkpoint(tmp_path, config, dtype="int8", ignore=("lm_head", odd))
    whole = load_model(tmp_path, dtype="float32").model
    assert isinstance(whole.layers[1].feed_forward.experts.stack, FloatExperts)
    halves = Placement(1, 8, (4, 4), (tuple(range(8)),) * len(whole.moe_blocks))
    first = load_model(tmp_path, dtype="float32", placement=halves, rank=0).model
    assert isinstance(first.layers[1].feed_forward.experts.stack, FloatExperts)
    assert isinstance(first.layers[1].attention.out, Int8Matrix)


@pytest.mark.parametrize("stored", ["int8", "bfloat16", "float32"])
def test_what_was_packed_is_not_held_twice(tmp_path, monkeypatch, stored):
    """Of the memory into which a checkpoint was read, only what is used as it lies stays."""
    write_checkpoint(tmp_path, tiny_config("v3"), dtype=stored)
    arenas, sizes = [], []

    def seen(num_bytes):
        arena = memory.large_pages(num_bytes)
        arenas.append(weakref.ref(arena))
        sizes.append(num_bytes)
        return arena

    def built(*args, **kwargs):
        model = DeepseekModel(*args, **kwargs)
        gc.collect()
        held.append(sum(size for size, arena in zip(sizes, arenas, strict=True) if arena() is not None))
        return model

    held: list[int] = []
    monkeypatch.setattr(weights, "large_pages", seen)
    monkeypatch.setattr(load, "DeepseekModel", built)
    assert load_model(tmp_path, dtype="float32").model.layers
    assert len(held) == 1 and held[0] < sum(sizes) / 2
