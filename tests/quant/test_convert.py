"""From a folder to an INT8 folder: whole, resumable, or not there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny_config, write_checkpoint
from tests.engine.model.builders import random_tokens
from tripool.core.errors import CheckpointError, ConfigError
from tripool.engine.checkpoint import open_checkpoint
from tripool.engine.model.layout import weight_plan
from tripool.engine.weights import load_weights
from tripool.quant import convert as conversion
from tripool.quant.convert import Options, convert
from tripool.quant.forward import Model
from tripool.quant.policy import becomes_int8
from tripool.quant.recipe import PLAIN, STEPS, Recipe
from tripool.quant.scales import relative

TEXTS = [random_tokens(60, seed=seed) for seed in range(4)]
SMALL_FILES = Options(shard_bytes=40_000)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    write_checkpoint(folder, tiny_config("v3", mtp=1, num_hidden_layers=2))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("the source's card")
    return folder


def work_of(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.partial"


def left_over(folder: Path) -> list[str]:
    """What lies beside the source, but for it."""
    return sorted(path.name for path in folder.parent.iterdir() if path.name != "source")


# --- what is written


@pytest.mark.parametrize("family", ["v3", "v2", "v2-lite"])
@pytest.mark.parametrize("stored", ["bfloat16", "float32", "float16", "float8"])
def test_every_family_and_element_type_comes_out_as_a_sound_folder(tmp_path, family, stored):
    config = tiny_config(family, mtp=1 if family == "v3" else 0)
    tensors = write_checkpoint(tmp_path / "source", config, dtype=stored)

    done = convert(tmp_path / "source", tmp_path / "int8", replace(SMALL_FILES, recipe=PLAIN))

    written = open_checkpoint(tmp_path / "int8")
    assert written.warnings == ()
    for name in tensors:
        assert (written.tensors[name].dtype == "I8") == becomes_int8(name), name
        assert (f"{name}_scale" in written.tensors) == becomes_int8(name), name
    assert written.stored_bytes == done.written_bytes
    assert done.dropped == ()


def test_what_is_loaded_is_close_to_what_was_given(source, tmp_path):
    convert(source, tmp_path / "int8", Options(PLAIN))

    before, after = (load_weights(checkpoint, weight_plan(checkpoint.shape), torch.float32).tensors
                     for checkpoint in map(open_checkpoint, (source, tmp_path / "int8")))

    attention = "layers.1.attention"
    for rounded in (f"{attention}.in", f"{attention}.latent"):
        assert 0 < relative(after[rounded], before[rounded]) < 0.01
    for kept in ("layers.1.router.gate", "head"):
        assert torch.equal(after[kept], before[kept])


@pytest.mark.parametrize("step", range(len(STEPS)), ids=[name for name, _ in STEPS])
@pytest.mark.parametrize("texts", [TEXTS, []], ids=["calibrated", "not calibrated"])
def test_every_recipe_gives_a_model_that_computes_nearly_the_same(source, tmp_path, step, texts):
    convert(source, tmp_path / "int8", Options(STEPS[step][1]), texts=texts)

    before, after = (Model(open_checkpoint(folder)).hidden(TEXTS) for folder in (source, tmp_path / "int8"))

    assert relative(after, before) < 0.25         # a random model; now and then another expert is chosen


def test_absorbed_outliers_leave_the_float_model_as_it_was(tmp_path):
    """But for rounding, weights times scales are the source's, with factors that cancel."""
    def add_outliers(name, value):
        if name.endswith("post_attention_layernorm.weight"):
            value[5] *= 64
        elif name.endswith(("gate_proj.weight", "up_proj.weight", "mlp.gate.weight")):
            value[:, 5] /= 64
        return value

    source = tmp_path / "source"
    write_checkpoint(source, tiny_config("v3"), num_shards=1, change=add_outliers)
    convert(source, tmp_path / "int8", Options(replace(PLAIN, absorption=True)), texts=TEXTS)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "int8"))

    for layer in (1, 2):
        prefix = f"model.layers.{layer}"
        norm = f"{prefix}.post_attention_layernorm.weight"
        factor = before[norm].float() / after[norm].float()
        assert torch.equal(factor.log2(), factor.log2().round())
        assert factor[5] >= 16
        gate = f"{prefix}.mlp.gate.weight"
        assert torch.equal(after[gate].float(), before[gate].float() * factor)      # not one bit of the router is lost
        for expert in ("experts.0", "experts.7", "shared_experts"):
            name = f"{prefix}.mlp.{expert}.gate_proj.weight"
            assert relative(after[name].float() * after[f"{name}_scale"] / factor, before[name].float()) < 0.02


def test_everything_but_weights_is_copied(source, tmp_path):
    convert(source, tmp_path / "int8", Options(PLAIN))

    assert (tmp_path / "int8" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "int8" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "int8" / "generation_config.json").exists()
    assert not (tmp_path / "int8" / "README.md").exists()
    assert left_over(source) == ["int8"]


def test_the_configuration_is_the_sources_with_the_format_named(source, tmp_path):
    convert(source, tmp_path / "int8", Options(PLAIN))

    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "int8"))
    quantisation = after.pop("quantization_config")

    assert after == before
    assert quantisation["quant_method"] == "compressed-tensors" and quantisation["format"] == "int-quantized"
    assert "model.layers.1.mlp.gate" in quantisation["ignore"]
    assert "model.layers.1.self_attn.kv_b_proj" not in quantisation["ignore"]


def test_files_are_no_larger_than_asked_for(source, tmp_path):
    convert(source, tmp_path / "int8", replace(SMALL_FILES, recipe=PLAIN))

    shards = sorted((tmp_path / "int8").glob("*.safetensors"))
    largest_unit = 2 * 320 * 64                    # the embedding table
    assert len(shards) > 5
    assert max(path.stat().st_size for path in shards) < largest_unit + 20_000
    assert len(load_file(shards[0])) > 0           # the published library reads them


def test_the_same_input_gives_the_same_bytes(source, tmp_path):
    for name in ("one", "two"):
        convert(source, tmp_path / name, Options(), texts=TEXTS)

    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_progress_grows_to_the_end(source, tmp_path):
    seen: list[float] = []
    convert(source, tmp_path / "int8", Options(PLAIN), progress=lambda words, part: seen.append(part))

    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) > 20


# --- interruptions


def interrupt(num_files: int, monkeypatch: pytest.MonkeyPatch, source: Path, folder: Path, *,
              texts: Sequence[Sequence[int]] = ()) -> None:
    """A conversion into small files that ends in the middle of the file after so many."""
    begun: list[str] = []
    put = conversion.ShardFile.put

    def failing(self, name, parts):
        if self.path.name not in begun:
            begun.append(self.path.name)
        if len(begun) > num_files:
            raise KeyboardInterrupt
        put(self, name, parts)

    with monkeypatch.context() as patch:
        patch.setattr(conversion.ShardFile, "put", failing)
        with pytest.raises(KeyboardInterrupt):
            convert(source, folder, SMALL_FILES, texts=texts)


def test_a_conversion_goes_on_where_it_was_interrupted(source, tmp_path, monkeypatch):
    convert(source, tmp_path / "whole", SMALL_FILES, texts=TEXTS)
    interrupt(4, monkeypatch, source, tmp_path / "int8", texts=TEXTS)
    assert not (tmp_path / "int8").exists()
    assert not (work_of(tmp_path / "int8") / "model" / "config.json").exists()       # nothing that looks finished

    done = convert(source, tmp_path / "int8", SMALL_FILES, texts=TEXTS)

    assert done.resumed_files == 4
    assert left_over(source) == ["int8", "whole"]
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "int8" / path.name).read_bytes(), path.name
    assert len(done.figures) == len({figure.tensor for figure in done.figures}) > 50


def test_a_file_that_was_damaged_meanwhile_is_written_again(source, tmp_path, monkeypatch):
    interrupt(3, monkeypatch, source, tmp_path / "int8")
    damaged = sorted((work_of(tmp_path / "int8") / "model").glob("*.safetensors"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")

    assert convert(source, tmp_path / "int8", SMALL_FILES).resumed_files == 2
    open_checkpoint(tmp_path / "int8")


def test_other_settings_do_not_go_on_with_an_interrupted_conversion(source, tmp_path, monkeypatch):
    interrupt(3, monkeypatch, source, tmp_path / "int8")
    other = replace(SMALL_FILES, recipe=Recipe(compensation=False))

    with pytest.raises(ConfigError, match="differs in recipe; give --restart"):
        convert(source, tmp_path / "int8", other)
    assert convert(source, tmp_path / "int8", replace(other, restart=True)).resumed_files == 0


def test_a_killed_conversion_goes_on(source, tmp_path):
    script = ("import sys; from pathlib import Path; from tripool.quant.convert import Options, convert; import time\n"
              f"convert(Path({str(source)!r}), Path({str(tmp_path / 'int8')!r}), Options(shard_bytes=40_000), "
              "progress=lambda words, part: time.sleep(0.05))")
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    notes = work_of(tmp_path / "int8")
    deadline = time.monotonic() + 60
    while len(list(notes.glob("*.safetensors.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "int8").exists()

    assert convert(source, tmp_path / "int8", SMALL_FILES).resumed_files >= 2
    open_checkpoint(tmp_path / "int8")


# --- memory


def test_memory_stays_under_the_cap_whatever_the_models_size(tmp_path):
    config = tiny_config("v3", hidden_size=512, moe_intermediate_size=512, n_routed_experts=40, num_hidden_layers=2,
                         vocab_size=4096)
    def add_outliers(name, value):
        if name.endswith("layernorm.weight"):
            value[5] = 64                        # so that the residual stream is turned
        return value

    write_checkpoint(tmp_path / "source", config, num_shards=2, change=add_outliers)
    assert open_checkpoint(tmp_path / "source").stored_bytes > 64 << 20
    script = f"""
import resource, torch
from pathlib import Path
from tripool.quant.convert import Options, convert
from tripool.quant.recipe import Recipe
torch.set_num_threads(1)
recipe = Recipe(absorption=False, scale_search=False, clipping=False)
torch.linalg.cholesky(torch.eye(64)) @ torch.randn(64, 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
done = convert(Path({str(tmp_path / "source")!r}), Path({str(tmp_path / "int8")!r}), Options(recipe, 128 << 20))
assert done.rotation.used
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)

    assert int(done.stdout) < 128


def test_a_piece_that_does_not_fit_is_named_before_anything_is_read(source, tmp_path):
    with pytest.raises(ConfigError, match=r"converting \S+ takes about 9\d MiB.*raise --memory"):
        convert(source, tmp_path / "int8", Options(memory_bytes=64 << 20))
    assert left_over(source) == []


def test_calibration_that_does_not_fit_says_what_to_do(source, tmp_path):
    with pytest.raises(ConfigError, match="convert with --calibration none"):
        convert(source, tmp_path / "int8", Options(PLAIN, memory_bytes=97 << 20), texts=TEXTS)
    convert(source, tmp_path / "int8", Options(PLAIN, memory_bytes=97 << 20))


# --- refusals


def test_int8_is_not_quantised_again(source, tmp_path):
    convert(source, tmp_path / "int8", Options(PLAIN))

    with pytest.raises(ConfigError, match=r"is INT8 already \(\d+ tensors, first model"):
        convert(tmp_path / "int8", tmp_path / "twice")


def test_a_folder_that_is_there_is_not_touched(source, tmp_path):
    (tmp_path / "int8").mkdir()

    with pytest.raises(ConfigError, match="is there already"):
        convert(source, tmp_path / "int8")
    assert left_over(source) == ["int8"]


def test_a_place_that_is_not_there_is_named(source, tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        convert(source, tmp_path / "no" / "int8")


def test_a_damaged_source_is_refused(source, tmp_path):
    (source / "model-00001-of-00002.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is missing"):
        convert(source, tmp_path / "int8")
    assert left_over(source) == []


def spoil_file(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def float8(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "source", tiny_config("v3"), dtype="float8", num_shards=1)
    return tmp_path / "source"


def test_a_source_without_one_of_its_scales_is_refused(float8, tmp_path):
    missing = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    spoil_file(float8 / "model.safetensors", lambda tensors: tensors.pop(missing))

    with pytest.raises(CheckpointError, match=rf"its scales {re.escape(missing)} are in no file"):
        convert(float8, tmp_path / "int8", Options(PLAIN))
    assert left_over(float8) == []


def test_a_source_with_scales_that_are_not_numbers_is_refused(float8, tmp_path):
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    spoil_file(float8 / "model.safetensors", lambda tensors: tensors[name].fill_(torch.nan))

    with pytest.raises(CheckpointError, match=re.escape(name)):
        convert(float8, tmp_path / "int8", Options(PLAIN))
    assert not (tmp_path / "int8").exists()


def test_a_source_quantised_in_a_way_that_is_not_known_is_refused(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (source / "config.json").write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match=r"quantization_config\.quant_method is 'gptq'"):
        convert(source, tmp_path / "int8", Options(PLAIN))
    assert left_over(source) == []


def test_what_was_written_is_held_against_what_was_planned(source, tmp_path, monkeypatch):
    def forgetful(folder, **options):
        found = open_checkpoint(folder, **options)
        return replace(found, tensors={name: tensor for name, tensor in found.tensors.items()
                                       if folder == source or name != "lm_head.weight"})

    monkeypatch.setattr(conversion, "open_checkpoint", forgetful)

    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not what was planned"):
        convert(source, tmp_path / "int8", Options(PLAIN))
    assert not (tmp_path / "int8").exists()


def test_a_disk_that_fills_up_at_the_very_end_leaves_nothing_that_looks_finished(source, tmp_path, monkeypatch):
    def full(path, *args):
        if path.name == "config.json":
            raise OSError(28, "No space left on device")
        write_json(path, *args)

    write_json = conversion.write_json
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_json", full)
        with pytest.raises(ConfigError, match="is full"):
            convert(source, tmp_path / "int8", replace(SMALL_FILES, recipe=PLAIN))
    assert left_over(source) == [".int8.partial"]
    assert not (work_of(tmp_path / "int8") / "model" / "config.json").exists()

    assert convert(source, tmp_path / "int8", replace(SMALL_FILES, recipe=PLAIN)).resumed_files > 5
    open_checkpoint(tmp_path / "int8")


def test_the_routed_scale_stays_in_the_configuration_alone(tmp_path):
    for name, factor in (("one", 1.0), ("more", 2.5)):
        write_checkpoint(tmp_path / name, tiny_config("v3", routed_scaling_factor=factor), num_shards=1)
        convert(tmp_path / name, tmp_path / f"{name}-int8", Options())

    one, more = (tmp_path / f"{name}-int8" for name in ("one", "more"))
    assert (one / "model.safetensors").read_bytes() == (more / "model.safetensors").read_bytes()
    assert json.loads((more / "config.json").read_text())["routed_scaling_factor"] == 2.5


def test_too_little_disk_space_is_said_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(1 << 30, 0, 1000))

    with pytest.raises(ConfigError, match="MiB of disk space and 0 MiB are free there"):
        convert(source, tmp_path / "int8")
    assert left_over(source) == []


def test_a_disk_that_fills_up_keeps_what_is_done(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        begun: list[str] = []
        fallocate = os.posix_fallocate

        def full(*args):
            begun.append("file")
            if len(begun) > 3:
                raise OSError(28, "No space left on device")
            fallocate(*args)

        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError, match=r"is full; make room and run the same command again"):
            convert(source, tmp_path / "int8", SMALL_FILES)
    assert not (tmp_path / "int8").exists()

    assert convert(source, tmp_path / "int8", SMALL_FILES).resumed_files == 3


def test_two_conversions_do_not_write_one_folder(source, tmp_path):
    work = work_of(tmp_path / "int8")

    def another(words, part):
        if not seen:
            seen.append(words)
            with pytest.raises(ConfigError, match="another conversion is writing"):
                convert(source, tmp_path / "int8", Options(PLAIN))
            assert work.exists()

    seen: list[str] = []
    convert(source, tmp_path / "int8", Options(PLAIN), progress=another)
    assert seen


def test_a_source_that_changes_meanwhile_is_noticed(source, tmp_path):
    def touch(words, part):
        os.utime(source / "model-00002-of-00002.safetensors", ns=(1, 1))

    with pytest.raises((CheckpointError, ConfigError)):
        convert(source, tmp_path / "int8", Options(PLAIN), progress=touch)
    assert not (tmp_path / "int8").exists()


def test_numbers_that_are_not_finite_are_named(tmp_path):
    def spoil(name, value):
        if name == "model.layers.1.mlp.gate.weight":
            value[0, 0] = torch.inf
        return value

    write_checkpoint(tmp_path / "source", tiny_config("v3"), change=spoil)

    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.gate\.weight has numbers that are not finite"):
        convert(tmp_path / "source", tmp_path / "int8", Options(Recipe()))
