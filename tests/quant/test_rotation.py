"""Another basis spreads outliers; the float model stays the same, and the MTP layer's guesses nearly so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.engine.model.builders import build_model, hidden_in_chunks, new_cache, new_row, random_tokens
from tripool.core.shape import model_shape
from tripool.engine.batch import Batch
from tripool.engine.checkpoint import open_checkpoint
from tripool.quant.convert import Options, convert
from tripool.quant.forward import Model
from tripool.quant.recipe import PLAIN
from tripool.quant.rotation import ResidualRotation, Rotation
from tripool.quant.scales import relative

TEXT = random_tokens(40, seed=3)
ROTATING = replace(PLAIN, rotation=True)


def turned(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    residual = ResidualRotation(model_shape(config), lambda name: tensors[name])
    return {name: residual.tensor(name, value) for name, value in tensors.items()}


def logits(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    model = build_model(config, tensors=tensors)
    return model.logits(hidden_in_chunks(model, new_cache(model), new_row(TEXT), [len(TEXT)]))


def draft_logits(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """What the MTP layer guesses after every token of the text but the first."""
    model = build_model(config, tensors=tensors, drafts=True)
    cache, row = new_cache(model), new_row(TEXT)
    hidden_TD = hidden_in_chunks(model, cache, row, [len(TEXT)])
    count = len(TEXT) - 1
    batch = Batch(torch.tensor(TEXT[1:]), [1], [count], 0, torch.tensor([row.blocks]))
    return model.logits(model.draft(batch, cache, hidden_TD[:-1]))


def write_ridden(folder, *, exponent: int = 6, **changes: Any) -> None:
    """A checkpoint with an outlier channel before attention and feed-forward of every layer."""
    def change(name: str, value: Tensor) -> Tensor:
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            value[5] *= 2**exponent
        elif name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "gate_proj.weight", "up_proj.weight",
                            "mlp.gate.weight")):
            value[:, 5] /= 2**exponent
        return value

    write_checkpoint(folder, tiny_config("v3", **changes), num_shards=1, change=change)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 24, 64, 96, 256, 768, 7168])
def test_every_width_has_an_orthogonal_matrix_without_large_entries(width):
    turn, rows = Rotation.of(width), torch.eye(width, dtype=torch.float64)[:64]

    matrix = turn(rows)

    assert torch.allclose(matrix @ matrix.T, rows[:, :rows.shape[0]], atol=1e-12)
    assert matrix.abs().max() <= 2**0.5 / width**0.5 + 1e-12
    assert torch.allclose(turn.rows(rows.T), matrix.T)


def test_an_outlier_is_spread_over_all_channels():
    x = torch.ones(4, 96)
    x[:, 7] = 100

    assert Rotation.of(96)(x).abs().max() < 25


@pytest.mark.parametrize("config", [
    tiny_config("v3"), tiny_config("v3", mtp=1, hidden_size=96), tiny_config("v2"), tiny_config("v2-lite"),
    tiny_config("v3", attention_bias=True)], ids=["v3", "v3 with MTP", "v2", "v2-lite", "with biases"])
def test_the_turned_model_has_the_same_logits(config):
    tensors = random_tensors(config)
    other = turned(config, tensors)

    assert relative(logits(config, other), logits(config, tensors)) < 1e-5          # what float32 rounds
    assert not torch.allclose(other["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"], atol=0.05)
    assert (other["model.norm.weight"] == 1).all()


def test_the_mtp_layer_is_the_same_where_both_final_norms_are_even():
    config = tiny_config("v3", mtp=1)
    tensors = random_tensors(config)
    tensors["model.norm.weight"].fill_(1.5)
    tensors["model.layers.3.shared_head.norm.weight"].fill_(0.75)

    ours, theirs = draft_logits(config, turned(config, tensors)), draft_logits(config, tensors)

    assert relative(ours * float(theirs.norm() / ours.norm()), theirs) < 1e-5       # but for one factor


def test_the_mtp_layers_logits_point_where_they_did():
    config = tiny_config("v3", mtp=1)
    tensors = random_tensors(config)         # norms' weights are a fifth apart

    ours, theirs = draft_logits(config, turned(config, tensors)), draft_logits(config, tensors)

    assert torch.cosine_similarity(ours, theirs, dim=-1).min() > 0.95


def test_a_conversion_turns_a_model_with_outliers_and_loses_less(tmp_path):
    write_ridden(tmp_path / "source", num_nextn_predict_layers=1)
    for name, recipe in (("plain", PLAIN), ("turned", ROTATING)):
        done = convert(tmp_path / "source", tmp_path / name, Options(recipe), texts=[TEXT, TEXT[::-1]])
        assert done.rotation.used == (name == "turned")

    assert done.rotation.error_turned < 0.5 * done.rotation.error_as_it_was
    weights = load_file(tmp_path / "turned" / "model.safetensors")
    assert (weights["model.layers.2.input_layernorm.weight"] == 1).all()
    assert weights["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    before, plain, ours = (Model(open_checkpoint(tmp_path / name)) for name in ("source", "plain", "turned"))
    wanted, rounded, turned_ = (model.logits(model.hidden([TEXT])) for model in (before, plain, ours))
    assert relative(turned_, wanted) < 0.5 * relative(rounded, wanted)


def test_an_interrupted_conversion_keeps_its_basis(tmp_path):
    write_ridden(tmp_path / "source")
    options = Options(ROTATING, shard_bytes=40_000)
    convert(tmp_path / "source", tmp_path / "whole", options)

    def stop(words: str, part: float) -> None:
        if part > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "source", tmp_path / "parts", options, progress=stop)
    assert json.loads((tmp_path / ".parts.partial" / "rotation.json").read_text())["used"]
    assert convert(tmp_path / "source", tmp_path / "parts", options).resumed_files > 1

    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes()


def test_a_model_without_outliers_stays_in_its_basis(tmp_path):
    write_checkpoint(tmp_path / "source", tiny_config("v3"))

    done = convert(tmp_path / "source", tmp_path / "int8", Options(ROTATING))

    assert not done.rotation.used and done.rotation.reason == "it brings too little"
    assert open_checkpoint(tmp_path / "int8").tensors["model.norm.weight"].dtype == "BF16"


def test_a_tied_head_keeps_the_residual_stream_as_it_is(tmp_path):
    write_ridden(tmp_path / "source", tie_word_embeddings=True)

    done = convert(tmp_path / "source", tmp_path / "int8", Options(ROTATING))

    assert not done.rotation.used and "the head is the embedding table" in done.rotation.reason
