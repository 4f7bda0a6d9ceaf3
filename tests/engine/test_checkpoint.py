"""Damaged and odd model folders: every problem is found before anything is allocated, and named."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.checkpoints import compressed_tensors, tiny_config, write_checkpoint
from tripool.core.errors import CheckpointError
from tripool.engine.checkpoint import CHECKSUM_FILE, INDEX_FILE, describe_checkpoint, open_checkpoint
from tripool.engine.load import load_model

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config("v3", mtp=1))
    return tmp_path


def problems_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)
    return caught.value.problems


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def rewrite_header(path: Path, change: Callable[[dict[str, dict]], None]) -> None:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])
    change(header)
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + content[8 + length:])


def first_name(path: Path) -> str:
    with safe_open(path, "pt") as file:
        return sorted(file.keys())[0]


def last_name(path: Path) -> str:
    header = json.loads(path.read_bytes()[8:8 + struct.unpack("<Q", path.read_bytes()[:8])[0]])
    header.pop("__metadata__")
    return max(header, key=lambda name: header[name]["data_offsets"][1])


@pytest.mark.parametrize("family", ["v3", "v2", "v2-lite"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_sound_folder_is_described_without_a_warning(tmp_path, family, num_shards):
    tensors = write_checkpoint(tmp_path, tiny_config(family), num_shards=num_shards)

    checkpoint = describe_checkpoint(tmp_path)

    assert checkpoint.warnings == ()
    assert checkpoint.tensors.keys() == tensors.keys()
    assert sum(checkpoint.bytes_by_dtype.values()) == checkpoint.stored_bytes
    assert checkpoint.stored_bytes == sum(
        value.numel() * (4 if name.endswith("bias") else 2) for name, value in tensors.items())
    assert checkpoint.dtype == "bfloat16"


def test_a_folder_that_is_not_there_is_said_to_be_so(tmp_path):
    assert problems_of(tmp_path / "nowhere") == ("there is no such folder",)


def test_a_cut_shard_is_named_with_the_tensors_it_lost(folder):
    lost = last_name(folder / SECOND)
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(content[:-1000])

    (problem,) = problems_of(folder)

    assert problem.startswith(f"{SECOND} is truncated") and lost in problem


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_a_shard_cut_within_its_header_is_named(folder, size):
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:size])

    assert any(problem.startswith(FIRST) for problem in problems_of(folder))


def test_a_missing_shard_is_named(folder):
    (folder / FIRST).unlink()

    assert any(problem.startswith(f"{FIRST} is missing") for problem in problems_of(folder))


def test_a_shard_that_the_index_does_not_name_is_a_problem_when_it_is_needed(folder):
    rewrite_index(folder, lambda index: [index.pop(name) for name in list(index) if index[name] == SECOND])

    problems = problems_of(folder)

    assert any(problem.startswith(f"{SECOND} is not in the index") for problem in problems)


def test_a_missing_tensor_is_named(folder):
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    for shard in (FIRST, SECOND):
        rewrite(folder / shard, lambda tensors: tensors.pop(name, None))
    rewrite_index(folder, lambda index: index.pop(name))

    assert problems_of(folder) == (f"1 tensor(s) are missing: {name}",)


def test_a_tensor_that_only_the_index_knows_is_named(folder):
    name = first_name(folder / FIRST)
    rewrite(folder / FIRST, lambda tensors: tensors.pop(name))

    assert problems_of(folder)[0] == f"{FIRST}: {name} is not in this file, though the index says so"


def test_an_extra_tensor_is_a_warning(folder):
    rewrite(folder / FIRST, lambda tensors: tensors.update({"model.layers.0.rotary": torch.zeros(3)}))
    rewrite_index(folder, lambda index: index.update({"model.layers.0.rotary": FIRST}))

    (warning,) = open_checkpoint(folder).warnings

    assert FIRST in warning and "model.layers.0.rotary" in warning


def test_a_wrong_shape_is_named_with_both_shapes(folder):
    name = first_name(folder / SECOND)
    rewrite(folder / SECOND, lambda tensors: tensors.update({name: torch.zeros(3, 7, dtype=torch.bfloat16)}))

    (problem,) = problems_of(folder)

    assert problem.startswith(f"{SECOND}: {name} has shape [3, 7], the configuration needs [")


def test_an_element_type_that_cannot_be_read_is_named(folder):
    name = first_name(folder / FIRST)
    rewrite(folder / FIRST, lambda tensors: tensors.update({name: tensors[name].to(torch.int16)}))

    (problem,) = problems_of(folder)

    assert problem.startswith(f"{FIRST}: {name} has element type I16")


def test_overlapping_tensors_are_named(folder):
    def overlap(header):
        names = sorted(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"])
        end = header[names[0]]["data_offsets"][1]
        size = header[names[1]]["data_offsets"][1] - header[names[1]]["data_offsets"][0]
        header[names[1]]["data_offsets"] = [end - 2, end - 2 + size]

    rewrite_header(folder / FIRST, overlap)

    assert any("overlaps" in problem and FIRST in problem for problem in problems_of(folder))


def test_bytes_after_the_last_tensor_are_a_problem(folder):
    with (folder / FIRST).open("ab") as file:
        file.write(b"?" * 10)

    (problem,) = problems_of(folder)

    assert problem.startswith(f"{FIRST} has 10 bytes after its last tensor")


def test_offsets_that_do_not_fit_the_shape_are_named(folder):
    name = first_name(folder / FIRST)
    rewrite_header(folder / FIRST, lambda header: header[name].update(shape=[1, 2, 3]))

    assert any(problem.startswith(f"{FIRST}: {name} has a malformed entry") for problem in problems_of(folder))


def test_all_problems_are_listed_at_once(folder):
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-1000])
    wrong = first_name(folder / SECOND)
    rewrite(folder / SECOND, lambda tensors: tensors.update({wrong: torch.zeros(1)}))
    missing = last_name(folder / SECOND)
    rewrite(folder / SECOND, lambda tensors: tensors.pop(missing))

    text = "\n".join(problems_of(folder))

    assert "is truncated" in text and wrong in text and missing in text


def test_a_flipped_byte_is_found_by_the_checksum_list(folder):
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (FIRST, SECOND)}
    (folder / CHECKSUM_FILE).write_text(json.dumps(digests))
    open_checkpoint(folder)
    content = bytearray((folder / SECOND).read_bytes())
    content[-100] ^= 1
    (folder / SECOND).write_bytes(content)

    (problem,) = problems_of(folder)

    assert problem.startswith(f"{SECOND} is damaged")
    assert describe_checkpoint(folder).shape.num_layers == 3          # only a look: nothing is summed


def test_scales_of_fp8_weights_may_lie_in_another_shard_but_not_be_missing(tmp_path):
    write_checkpoint(tmp_path, tiny_config("v3"), dtype="float8")
    checkpoint = open_checkpoint(tmp_path)
    name = "model.layers.0.self_attn.o_proj.weight"
    scale = f"{name}_scale_inv"
    assert checkpoint.tensors[name].file != checkpoint.tensors[scale].file
    rewrite(checkpoint.tensors[scale].file, lambda tensors: tensors.pop(scale))
    rewrite_index(tmp_path, lambda index: index.pop(scale))

    (problem,) = problems_of(tmp_path)

    assert f"{name} is FP8, but its scales {scale} are in no file" in problem


@pytest.mark.parametrize(("change", "said"), [
    ({"model_type": "llama"}, "model_type is 'llama'"),
    ({"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
    ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'"),
])
def test_a_configuration_of_another_family_is_refused(folder, change, said):
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))

    assert any(said in problem for problem in problems_of(folder))


def test_broken_json_is_named(folder):
    (folder / "config.json").write_text("{")
    (folder / INDEX_FILE).write_text("[]")

    problems = problems_of(folder)

    assert problems[0].startswith("config.json cannot be read")
    assert f"{INDEX_FILE} is not a JSON object" in problems


def test_pickled_weights_are_not_opened_but_mentioned(tmp_path):
    write_checkpoint(tmp_path, tiny_config("v3"), num_shards=1)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")

    assert any("pytorch_model.bin would have to be converted" in problem for problem in problems_of(tmp_path))


def test_an_index_cannot_name_a_file_outside_the_folder(folder):
    rewrite_index(folder, lambda index: index.update({"model.norm.weight": "../elsewhere.safetensors"}))

    assert any("has no weight_map" in problem for problem in problems_of(folder))


def test_a_checkpoint_saved_without_its_mtp_layer_is_served_without_drafting(folder):
    for shard in (FIRST, SECOND):
        rewrite(folder / shard, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.3." in name])
    rewrite_index(folder, lambda index: [index.pop(name) for name in list(index) if ".layers.3." in name])

    checkpoint = open_checkpoint(folder)

    assert checkpoint.shape.num_mtp_layers == 0
    assert "no drafting" in checkpoint.warnings[0]


def test_an_mtp_layer_may_share_embedding_and_head_without_repeating_them(folder):
    repeated = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")
    for shard in (FIRST, SECOND):
        rewrite(folder / shard, lambda tensors: [tensors.pop(name, None) for name in repeated])
    rewrite_index(folder, lambda index: [index.pop(name) for name in repeated])

    checkpoint = open_checkpoint(folder)

    assert checkpoint.shape.num_mtp_layers == 1
    assert checkpoint.warnings == ()
    assert "shared with the main embedding and head" in checkpoint.notes[0]


# --- INT8 of compressed-tensors ------------------------------------------------------------------------------------

PROJECTION = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture
def int8_folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config("v3", mtp=1), dtype="int8", num_shards=1)
    return tmp_path


def rewrite_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_an_int8_folder_is_described_without_a_warning(int8_folder):
    checkpoint = describe_checkpoint(int8_folder)

    assert checkpoint.warnings == ()
    assert checkpoint.quantisation.method == "compressed-tensors"
    assert checkpoint.dtype == "bfloat16"
    assert {"BF16", "F32", "I8"} == set(checkpoint.bytes_by_dtype)


def test_missing_int8_scales_are_an_error_that_names_the_tensor(int8_folder):
    rewrite(int8_folder / "model.safetensors", lambda tensors: tensors.pop(f"{PROJECTION}_scale"))

    (problem,) = problems_of(int8_folder)

    assert f"{PROJECTION} is INT8, but its scales {PROJECTION}_scale are in no file" in problem


def test_int8_scales_have_one_number_for_each_row(int8_folder):
    rewrite(int8_folder / "model.safetensors", lambda tensors: tensors.update({f"{PROJECTION}_scale": torch.ones(1)}))

    (problem,) = problems_of(int8_folder)

    assert f"{PROJECTION}_scale has shape [1], a scale for each row needs [32, 1]" in problem


def test_scales_of_a_tensor_that_is_not_int8_are_quantisation_by_halves(int8_folder):
    def widen(tensors):
        tensors[PROJECTION] = tensors[PROJECTION].bfloat16()

    rewrite(int8_folder / "model.safetensors", widen)

    problems = problems_of(int8_folder)

    assert any(f"{PROJECTION} is BF16 and has none: the folder is quantised by halves" in each for each in problems)
    assert any(f"not INT8 in the files (nor in its ignore list): {PROJECTION}" in each for each in problems)


def test_int8_weights_of_which_the_configuration_says_nothing_are_refused(int8_folder):
    rewrite_config(int8_folder, quantization_config=None)

    (problem,) = problems_of(int8_folder)

    assert "are INT8, but config.json has no quantization_config that says how" in problem


def test_an_int8_configuration_over_float_weights_is_refused(folder):
    rewrite_config(folder, quantization_config=compressed_tensors())

    (problem,) = problems_of(folder)

    assert "quantization_config names" in problem and "not INT8 in the files" in problem


def test_what_is_ignored_may_be_a_float(int8_folder):
    def widen(tensors):
        scale = tensors.pop(f"{PROJECTION}_scale")
        tensors[PROJECTION] = (tensors[PROJECTION].float() * scale).bfloat16()

    rewrite(int8_folder / "model.safetensors", widen)
    ignored = ("lm_head", r"re:.*experts\.3\.up_proj$")
    rewrite_config(int8_folder, quantization_config=compressed_tensors(ignore=ignored))

    assert describe_checkpoint(int8_folder).warnings == ()


def scheme_with(part: str, **changes: object) -> dict:
    config = compressed_tensors()
    config["config_groups"]["group_0"][part].update(changes)
    return config


@pytest.mark.parametrize(("quantisation", "said"), [
    (compressed_tensors(format="pack-quantized"), "format is 'pack-quantized'"),
    (compressed_tensors(config_groups={}), "config_groups is {}"),
    (compressed_tensors(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is given"),
    (compressed_tensors(ignore=("re:(",)), "which is no pattern"),
    (scheme_with("weights", num_bits=4), "weights.num_bits is 4, not 8"),
    (scheme_with("weights", strategy="tensor"), "weights.strategy is 'tensor', not 'channel'"),
    (scheme_with("weights", symmetric=False), "weights.symmetric is False, not True"),
    (scheme_with("weights", type="float"), "weights.type is 'float', not 'int'"),
    (scheme_with("input_activations", dynamic=False), "input_activations.dynamic is False, not True"),
    ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
])
def test_a_way_of_quantising_that_is_not_known_is_refused_with_one_message(int8_folder, quantisation, said):
    rewrite_config(int8_folder, quantization_config=quantisation)

    (problem,) = problems_of(int8_folder)

    assert said in problem
    assert problem.startswith("config.json: quantization_config")


def test_scales_that_are_not_numbers_are_found_when_they_are_read(int8_folder):
    def spoil(tensors):
        tensors[f"{PROJECTION}_scale"][3] = torch.nan

    rewrite(int8_folder / "model.safetensors", spoil)

    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale is not finite everywhere"):
        load_model(int8_folder)
