"""Halves of a layer, forward passes and drafts in one call give, to the bit, what their operations give one by one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.checkpoints import tiny_config, write_checkpoint
from tests.engine.model.builders import new_cache, new_row, random_tokens, step
from tests.engine.ops.builders import LEVELS
from tripool.core.shape import model_shape
from tripool.engine import element_type
from tripool.engine.load import load_model
from tripool.engine.model.moe import ONE_CALL_ROWS
from tripool.engine.ops import native
from tripool.engine.parallel.exchange import LocalExchange


@pytest.fixture(scope="module", params=["v3-int8", "v3-bfloat16", "v2-lite-float32", "v2-lite-int8", "biased-float32"])
def folder(request, tmp_path_factory):
    kind, _, stored = request.param.rpartition("-")
    config = tiny_config("v3" if kind == "biased" else kind, mtp=1 if kind == "v3" else 0)
    made = tmp_path_factory.mktemp(stored)
    write_checkpoint(made, config | {"attention_bias": kind == "biased"}, dtype=stored)
    return made


def loaded(folder, how, monkeypatch, *, drafts=False):
    """A model whose rows are float32; with rounded ones, unless weights are float32, as on a processor that multiplies
    bfloat16."""
    if how == "rounded":
        monkeypatch.setattr(element_type, "processor_flags", lambda: set(element_type.BF16_PRODUCTS))
    model = load_model(folder, dtype="auto" if how == "rounded" else "float32", deterministic=how == "deterministic",
                       drafts=drafts).model
    rounds = how == "rounded" and not folder.name.startswith("float32")
    assert model.dtype == torch.float32 and model.layers[0].attention.rounds == rounds
    return model


def in_halves(model):
    """The same model without calls that do whole layers."""
    model.one_call = None
    return model


def one_by_one(model):
    """The same model without calls that do several operations."""
    model.one_call = None
    for layer in [*model.layers, *([model.mtp_layer.layer] if model.mtp_layer else [])]:
        layer.attention_call = None
    for block in model.moe_blocks:
        if block is not None:
            block.one_call = None
    return model


def run(model):
    """Prompts, decode steps of several rows, several tokens of a row: hidden states, experts and the whole cache."""
    cache = new_cache(model, garbage=False)
    rows = [new_row(random_tokens(60, seed=seed), start_block=10 * seed) for seed in range(4)]
    for block in model.moe_blocks:
        if block is not None:
            block.chosen = []
    states = [model.forward(step(rows[:3], (30, 17, 1)), cache)]
    states += [model.forward(step(rows, counts, num_decode_rows=decoding), cache)
               for counts, decoding in (((1, 1, 1, 0), 4), ((1, 1, 1, 1), 4), ((2, 3, 1, 1), 4), ((1, 1, 1, 9), 3),
                                        ((1, 0, 0, 0), 4), ((0, 0, 0, 0), 0))]
    if model.mtp_layer is not None:
        for _ in range(3):                       # positions in the midst of a block, and where one begins
            states.append(model.draft(ahead := step(rows, (1, 1, 1, 1), num_decode_rows=4), cache))
            states.append(model.draft(replace(ahead, token_T=ahead.token_T + 1), cache, states[-1]))
    chosen = [torch.cat(block.chosen) for block in model.moe_blocks if block is not None and block.chosen]
    return [*states, *chosen, cache.data]


@pytest.mark.parametrize("level", [level for level in LEVELS if level.values != (-1,)])
@pytest.mark.parametrize("how", ["float32", "rounded", "deterministic"])
def test_one_call_gives_the_bits_of_its_operations(folder, level, how, monkeypatch):
    monkeypatch.setattr(native, "chosen_level", lambda: level)
    model = in_halves(loaded(folder, how, monkeypatch))
    calls = {"attention": 0, "experts": 0}

    def counted(name, call):
        def count(*given, **named):
            calls[name] += 1
            return call(*given, **named)
        return count

    for layer in model.layers:
        layer.attention_call = counted("attention", layer.attention_call)
    for block in model.moe_blocks:
        if block is not None:
            block.one_call = counted("experts", block.one_call)
    found = run(model)
    assert calls["attention"] >= 4 * len(model.layers) and calls["experts"] >= 5, "nothing was done in one call"
    wanted = run(one_by_one(loaded(folder, how, monkeypatch)))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("level", [level for level in LEVELS if level.values != (-1,)])
@pytest.mark.parametrize("how", ["float32", "rounded", "deterministic"])
def test_a_forward_pass_in_one_call_gives_the_bits_of_its_operations(folder, level, how, monkeypatch):
    monkeypatch.setattr(native, "chosen_level", lambda: level)
    deterministic = how == "deterministic"
    has_mtp = model_shape(json.loads((folder / "config.json").read_text())).num_mtp_layers > 0
    drafts = has_mtp and not deterministic       # else the MTP layer's entries are written, and it is not run

    model = loaded(folder, how, monkeypatch, drafts=drafts)
    calls, whole = [], model.one_call
    model.one_call = lambda *given: calls.append(given) or whole(*given)
    model.one_call.draft = lambda *given: calls.append(given) or whole.draft(*given)
    found = run(model)
    assert len(calls) == (10 if drafts else 4) + (2 if deterministic else 0), "not all was done in one call"
    wanted = run(one_by_one(loaded(folder, how, monkeypatch, drafts=drafts)))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.skipif(not native.is_built(), reason="the native module is not built")
def test_what_one_call_cannot_do_goes_the_other_way(folder):
    quantised = load_model(folder, dtype="float32", exchange=LocalExchange(quantised=True)).model
    assert all(block.one_call is None for block in quantised.moe_blocks if block is not None)
    model = load_model(folder, dtype="float32").model
    cache, row = new_cache(model, num_blocks=80), new_row(random_tokens(ONE_CALL_ROWS + 1))
    model.one_call = refuse
    model.layers[0].attention_call = None
    for block in model.moe_blocks:
        if block is not None:
            block.one_call = None if block.one_call is None else refuse
    assert len(model.forward(step([row], [ONE_CALL_ROWS + 1]), cache)) == ONE_CALL_ROWS + 1


def refuse(*_):
    raise AssertionError("too many rows for one call")


@pytest.mark.skipif(not native.is_built(), reason="the native module is not built")
@pytest.mark.parametrize("halves", [False, True])
def test_a_block_that_is_not_there_is_an_error(folder, halves):
    model = load_model(folder, dtype="float32").model
    if halves:
        in_halves(model)
    cache, row = new_cache(model), new_row([5, 6, 7])
    row.blocks[0] = 1000
    batch = step([row], [1], num_decode_rows=1)
    with pytest.raises(IndexError):
        model.forward(batch, cache)


@pytest.mark.skipif(not native.is_built(), reason="the native module is not built")
@pytest.mark.parametrize("token", [-1, 320])
def test_a_token_that_is_not_in_the_vocabulary_is_an_error(folder, token):
    model = load_model(folder, dtype="float32").model
    cache = new_cache(model, garbage=False)
    with pytest.raises(IndexError):
        model.forward(step([new_row([token])], [1], num_decode_rows=1), cache)
    assert not cache.data.any(), "nothing has been written"
