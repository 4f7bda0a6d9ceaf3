"""Weights come out as they were written, and their fingerprint names their contents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import FP8_BLOCK, random_tensors, tiny_config, write_checkpoint
from tests.engine.model.builders import even_placement
from tripool.core.errors import CheckpointError, ConfigError
from tripool.core.shape import model_shape
from tripool.engine import element_type, weights
from tripool.engine.checkpoint import open_checkpoint
from tripool.engine.load import check_device, compute_dtype, load_model
from tripool.engine.model.layout import weight_plan
from tripool.engine.model.products import packed
from tripool.engine.weights import dummy_weights, fingerprint, load_weights


def loaded(folder: Path, dtype: torch.dtype = torch.float32, rank: int = 0, num_ranks: int = 1, **kwargs):
    checkpoint = open_checkpoint(folder)
    plan = weight_plan(checkpoint.shape, even_placement(checkpoint.shape, num_ranks), rank)
    return load_weights(checkpoint, plan, dtype, **kwargs)


def fingerprint_of(folder: Path, num_ranks: int = 1) -> str:
    digests = [loaded(folder, rank=rank, num_ranks=num_ranks).digest for rank in range(num_ranks)]
    return fingerprint(open_checkpoint(folder).shape, digests)


def expected_weights(config: dict, tensors: dict[str, torch.Tensor], rank: int = 0, num_ranks: int = 1):
    """The plan filled in the slow and obvious way."""
    shape = model_shape(config)
    for spec in weight_plan(shape, even_placement(shape, num_ranks), rank):
        value = torch.empty(spec.shape)
        for source in spec.sources:
            value[source.into] = tensors[source.tensor]
        yield spec, value


@pytest.mark.parametrize("family", ["v3", "v2", "v2-lite"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float8", "int8"])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_weights_land_in_their_place_in_any_element_type(tmp_path, family, stored, computed):
    config = tiny_config(family, mtp=1 if family == "v3" else 0)
    tensors = write_checkpoint(tmp_path, config, dtype=stored)

    found = loaded(tmp_path, computed).tensors

    for spec, value in expected_weights(config, tensors):
        dtype = torch.float32 if spec.dtype == "float32" else computed
        if stored == "float16":                    # not every value is exact in float16
            value = torch.empty(spec.shape)
            for source in spec.sources:
                value[source.into] = tensors[source.tensor].half().float() if "bias" not in source.tensor \
                    else tensors[source.tensor]
        assert found[spec.name].dtype == dtype
        assert torch.equal(found[spec.name], value.to(dtype)), spec.name


def test_fp8_blocks_that_do_not_divide_the_matrix_have_their_own_scales(tmp_path):
    config = tiny_config("v3", hidden_size=FP8_BLOCK + 32, intermediate_size=2 * FP8_BLOCK + 16)
    tensors = write_checkpoint(tmp_path, config, dtype="float8")

    found = loaded(tmp_path).tensors

    for spec, value in expected_weights(config, tensors):
        assert torch.equal(found[spec.name], value), spec.name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_own_experts_and_all_else(tmp_path, rank):
    config = tiny_config("v3")
    tensors = write_checkpoint(tmp_path, config)

    found = loaded(tmp_path, rank=rank, num_ranks=2).tensors

    for spec, value in expected_weights(config, tensors, rank, 2):
        assert torch.equal(found[spec.name], value), spec.name


def test_large_tensors_are_read_in_pieces_by_several_threads(tmp_path, monkeypatch):
    config = tiny_config("v3")
    tensors = write_checkpoint(tmp_path, config)
    monkeypatch.setattr(weights, "BATCH_BYTES", 1024)
    monkeypatch.setattr(weights, "STRIDE_BYTES", 256)

    for dtype in (torch.float32, torch.bfloat16):
        found = loaded(tmp_path, dtype, threads=4).tensors
        for spec, value in expected_weights(config, tensors):
            assert torch.equal(found[spec.name], value.to(found[spec.name].dtype)), spec.name


def test_each_byte_is_read_once_and_progress_says_so(tmp_path):
    write_checkpoint(tmp_path, tiny_config("v3"))
    calls: list[tuple[int, int]] = []

    result = loaded(tmp_path, progress=lambda done, total: calls.append((done, total)))

    assert calls[-1] == (result.num_bytes, result.num_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert result.num_bytes == open_checkpoint(tmp_path).stored_bytes


def test_the_fingerprint_does_not_depend_on_files_ranks_or_the_element_type_computed_in(tmp_path):
    config = tiny_config("v3", mtp=1)
    for num_shards in (1, 3):
        write_checkpoint(tmp_path / str(num_shards), config, num_shards=num_shards)

    assert fingerprint_of(tmp_path / "1") == fingerprint_of(tmp_path / "3")
    assert fingerprint_of(tmp_path / "1") == fingerprint_of(tmp_path / "3", num_ranks=2)
    assert loaded(tmp_path / "1", torch.bfloat16).digest == loaded(tmp_path / "3", torch.float32, threads=5).digest


@pytest.mark.parametrize("name", [
    "model.layers.2.mlp.experts.7.down_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias",
    "model.norm.weight", "model.layers.3.eh_proj.weight"])
def test_the_fingerprint_changes_with_one_bit_of_any_weight(tmp_path, name):
    write_checkpoint(tmp_path, tiny_config("v3", mtp=1), num_shards=1)
    before = fingerprint_of(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name].view(-1)[-1:].view(torch.uint8)[0] ^= 1
    save_file(tensors, tmp_path / "model.safetensors")

    assert fingerprint_of(tmp_path) != before


def test_the_fingerprint_changes_when_two_tensors_swap_places(tmp_path):
    write_checkpoint(tmp_path, tiny_config("v3"), num_shards=1)
    before = fingerprint_of(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    one, other = (f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (0, 1))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    save_file(tensors, tmp_path / "model.safetensors")

    assert fingerprint_of(tmp_path) != before


def test_the_fingerprint_changes_with_the_configuration(tmp_path):
    config = tiny_config("v3")
    for name, change in (("as it was", {}), ("changed", {"routed_scaling_factor": 2.0})):
        write_checkpoint(tmp_path / name, config | change)

    assert fingerprint_of(tmp_path / "as it was") != fingerprint_of(tmp_path / "changed")


def test_a_file_that_shrinks_after_the_check_is_named(tmp_path):
    write_checkpoint(tmp_path, tiny_config("v3"), num_shards=1)
    checkpoint = open_checkpoint(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-5000])

    with pytest.raises(CheckpointError, match="ended within"):
        load_weights(checkpoint, weight_plan(checkpoint.shape), torch.float32)


def test_dummy_weights_fill_the_plan_with_small_numbers():
    plan = weight_plan(model_shape(tiny_config("v3", mtp=1)))

    tensors = dummy_weights(plan, torch.bfloat16).tensors

    assert all(tensors[spec.name].shape == spec.shape for spec in plan)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert torch.equal(tensors["norm"], torch.ones_like(tensors["norm"])) and tensors["embed"].float().std() < 0.1


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float8"])
def test_a_model_is_computed_in_the_type_of_its_checkpoint_unless_told(tmp_path, monkeypatch, stored):
    write_checkpoint(tmp_path, tiny_config("v3"), dtype=stored)
    checkpoint = open_checkpoint(tmp_path)
    monkeypatch.setattr(element_type, "multiplies", lambda dtype: True)
    monkeypatch.setattr(element_type, "find_spec", lambda name: None)
    own = torch.float16 if stored == "float16" else torch.bfloat16

    assert compute_dtype(checkpoint) == own
    assert compute_dtype(checkpoint, "float32") == torch.float32
    assert compute_dtype(checkpoint, deterministic=True) == torch.float32


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float8"])
def test_rows_of_weights_that_stay_bfloat16_are_float32(tmp_path, monkeypatch, stored):
    write_checkpoint(tmp_path, tiny_config("v3"), dtype=stored)
    checkpoint = open_checkpoint(tmp_path)
    monkeypatch.setattr(element_type, "multiplies", lambda dtype: True)
    monkeypatch.setattr(element_type, "find_spec", lambda name: "compiled")
    own = {"float16": torch.float16, "bfloat16": torch.float32, "float8": torch.bfloat16}[stored]

    assert compute_dtype(checkpoint) == own
    assert compute_dtype(checkpoint, "bfloat16") == torch.bfloat16
    assert compute_dtype(checkpoint, device="cuda") == (torch.float16 if stored == "float16" else torch.bfloat16)


@pytest.mark.parametrize("features", [set(), {"avx512f"}, {"avx512f", "avx512_bf16"}, {"avx512f", "amx_bf16"}])
def test_rows_are_rounded_where_the_processor_is_faster_for_it_and_nobody_asked_for_more(monkeypatch, features):
    monkeypatch.setattr(element_type, "processor_flags", lambda: features)
    rounds = element_type.rounds_rows

    assert rounds("bfloat16") == (len(features) == 2)
    assert not rounds("bfloat16", "float32") and not rounds("bfloat16", deterministic=True)
    assert not rounds("bfloat16", device="cuda") and not rounds("float32") and not rounds("float16")


def test_a_loaded_model_rounds_rows_of_all_but_what_is_exact(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, tiny_config("v3"))
    monkeypatch.setattr(element_type, "processor_flags", lambda: {"avx512_bf16"})
    asked = {dtype: load_model(tmp_path, dtype=dtype).model for dtype in ("auto", "float32")}
    assert not load_model(tmp_path, deterministic=True).model.layers[0].attention.rounds

    for dtype, model in asked.items():
        assert model.dtype == torch.float32
        layer, dense = model.layers[-1], model.layers[0].dense.stack
        head, _ = packed(model.head)
        found = [head.rounds, dense.down.rounds, dense.gate_up.rounds, layer.feed_forward.experts.stack.down.rounds,
                 layer.attention.expansion.key.rounds, layer.attention.rounds]
        assert found == [dtype == "auto"] * 6
        gate, _ = packed(layer.feed_forward.router.gate)
        assert not gate.rounds


def test_a_small_model_is_computed_in_float32_where_its_own_type_is_slow(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, tiny_config("v3"))
    checkpoint = open_checkpoint(tmp_path)
    monkeypatch.setattr(element_type, "multiplies", lambda dtype: dtype == "float32")

    assert compute_dtype(checkpoint) == torch.float32
    assert compute_dtype(checkpoint, "bfloat16") == torch.bfloat16
    assert compute_dtype(checkpoint, device="cuda") == torch.bfloat16
    monkeypatch.setattr(element_type, "WIDENED_BYTES", 1000)
    monkeypatch.setattr(element_type, "find_spec", lambda name: "compiled")
    assert compute_dtype(checkpoint) == torch.float32            # weights stay as they are
    monkeypatch.setattr(element_type, "find_spec", lambda name: None)
    assert compute_dtype(checkpoint) == torch.bfloat16


def test_the_processor_is_asked_what_torch_asks_it():
    assert element_type.multiplies("float32")
    assert element_type.multiplies("bfloat16") == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert element_type.multiplies("float16") == torch.ops.mkldnn._is_mkldnn_fp16_supported()


def test_a_device_that_torch_cannot_use_is_named():
    check_device("cpu")
    with pytest.raises(ConfigError, match=r"model\.device is abacus"):
        check_device("abacus")


def test_loading_says_so_when_the_processor_has_no_products_of_a_type(tmp_path, monkeypatch, caplog):
    write_checkpoint(tmp_path, tiny_config("v3"))
    monkeypatch.setattr(element_type, "processor_flags", lambda: {"avx2"})
    monkeypatch.setattr(element_type, "find_spec", lambda name: None)
    load_model(tmp_path, dtype="float32")
    assert not caplog.records
    load_model(tmp_path, dtype="bfloat16")
    assert ["no instructions for products of bfloat16" in record.message for record in caplog.records] == [True]


def test_loading_says_so_when_kernels_do_not_take_rows_of_a_type(tmp_path, monkeypatch, caplog):
    write_checkpoint(tmp_path, tiny_config("v3"))
    monkeypatch.setattr(element_type, "multiplies", lambda dtype: True)
    monkeypatch.setattr(element_type, "find_spec", lambda name: "compiled")
    load_model(tmp_path, dtype="float32")
    assert not caplog.records
    load_model(tmp_path, dtype="bfloat16")
    assert ["--dtype auto" in record.message for record in caplog.records] == [True]


def test_a_model_is_built_in_the_type_asked_for(tmp_path):
    write_checkpoint(tmp_path, tiny_config("v3"))

    assert load_model(tmp_path, dtype="bfloat16").model.dtype == torch.bfloat16
    assert load_model(tmp_path, deterministic=True).model.dtype == torch.float32
    assert load_model(tmp_path, load_format="dummy").loaded_bytes == 0


def test_random_tensors_are_the_same_for_one_seed():
    config = tiny_config("v3", mtp=1)
    one, same, other = (random_tensors(config, seed=seed) for seed in (0, 0, 1))

    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
