"""The model run from outside the engine: its rows are seen, its products are INT8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import tiny_config, write_checkpoint
from tests.engine.model.builders import build_model, hidden_in_chunks, new_cache, new_row, random_tokens
from tripool.engine.checkpoint import open_checkpoint
from tripool.quant.calibrate import Calibration, calibrate
from tripool.quant.convert import convert
from tripool.quant.forward import Model
from tripool.quant.scales import relative

TEXTS = [random_tokens(40, seed=1), random_tokens(25, seed=2)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "source", tiny_config("v3", mtp=1))
    return tmp_path / "source"


def test_without_int8_weights_it_is_the_engines_model(folder):
    tensors = write_checkpoint(folder, tiny_config("v3", mtp=1))
    model = build_model(tiny_config("v3", mtp=1), tensors=tensors)

    ours = Model(open_checkpoint(folder)).hidden(TEXTS)

    for text, part in zip(TEXTS, ours.split([40, 25]), strict=True):
        theirs = hidden_in_chunks(model, new_cache(model), new_row(text), [len(text)])
        assert relative(part, theirs) < 1e-5         # another order of summation


def test_perplexity_is_that_of_the_logits(folder):
    model = Model(open_checkpoint(folder))
    total = 0.0
    for text in TEXTS:
        chosen = model.logits(model.hidden([text]))[:-1].log_softmax(-1)
        total -= float(chosen.gather(1, torch.tensor(text[1:]).unsqueeze(-1)).sum())

    assert model.perplexity(TEXTS) == pytest.approx(float(torch.tensor(total / 63).exp()), rel=1e-4)


def test_every_products_rows_are_quantised_and_no_others(folder, tmp_path):
    convert(folder, tmp_path / "int8")
    model = Model(open_checkpoint(tmp_path / "int8"))
    exact = Model(open_checkpoint(tmp_path / "int8"))
    exact.storages = frozenset()                     # the same weights, rows as they are

    assert len(model.storages) == 4 * 3 + 2 + 3 * 4        # attention; dense; experts and the shared one
    quantised, plain = model.hidden(TEXTS), exact.hidden(TEXTS)
    assert 1e-3 < relative(quantised, plain) < 0.3       # of a random model, which now and then chooses other experts


def test_the_rows_of_an_int8_latent_expansion_stay_floats(folder, tmp_path):
    """As the engine computes it."""
    convert(folder, tmp_path / "int8")
    model = Model(open_checkpoint(tmp_path / "int8"))

    assert open_checkpoint(tmp_path / "int8").dtype_of("model.layers.1.self_attn.kv_b_proj.weight") == "I8"
    assert all(layer.attention.expansion.weight.untyped_storage().data_ptr() not in model.storages
               for layer in model.engine.layers)


def test_calibration_keeps_what_every_layer_sees(folder):
    rows = calibrate(Model(open_checkpoint(folder)), TEXTS)

    assert set(rows) == {f"{layer}.{kind}" for layer in range(3) for kind in ("attention", "value", "feed_forward")
                         } | {"1.expert", "2.expert"}
    assert rows["0.attention"].shape == (65, 64)
    assert rows["1.value"].shape == (65, 4 * 16)
    assert rows["2.expert"].shape == (65, 3)


def test_looking_leaves_the_model_as_it_was(folder):
    model = Model(open_checkpoint(folder))
    run = model.engine.layers[0].run
    before = model.hidden(TEXTS)

    calibrate(model, TEXTS)

    assert model.engine.layers[0].run is run
    assert torch.equal(model.hidden(TEXTS), before)


def test_an_expert_sees_its_own_rows_and_others_if_they_are_few(folder, tmp_path):
    rows = calibrate(Model(open_checkpoint(folder)), TEXTS)
    layer = Calibration.write(tmp_path / "rows.safetensors", rows).layer(1, torch.ones(64), torch.ones(64))

    own = set((layer.expert_NK == 5).any(-1).nonzero().flatten().tolist())

    seen = layer.rows_of(5).tolist()
    assert own <= set(seen[:len(own)])
    assert len(seen) == 64 and len(set(seen)) == 64


def test_rows_are_imagined_where_there_are_none():
    norm = torch.ones(64)
    norm[3] = 100

    layer = Calibration(None).layer(7, norm, norm)

    assert layer.imagined
    assert layer.attention_ND[:, 3].abs().mean() > 20 * layer.attention_ND[:, 4].abs().mean()
