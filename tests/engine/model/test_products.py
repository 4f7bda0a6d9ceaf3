"""A checkpoint in INT8 is computed in INT8: what comes out is what the definition of its products gives."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.checkpoints import tiny_config, write_checkpoint
from tests.engine.model.builders import hidden_in_chunks, new_cache, new_row, random_tokens, relative_error, step
from tripool.core.placement import Placement
from tripool.engine import load, memory, weights
from tripool.engine.checkpoint import open_checkpoint
from tripool.engine.load import load_model
from tripool.engine.model.deepseek import DeepseekModel
from tripool.engine.model.products import Int8Matrix, PackedExperts, PackedGated
from tripool.engine.ops import native
from tripool.engine.ops.float_experts import FloatExperts
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
