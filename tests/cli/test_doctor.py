import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import compressed_tensors, tiny_config, write_checkpoint
from tests.cli.fake_server import tripool
from tests.cli.published import V2, V2_LITE, V3
from tripool.cli import doctor
from tripool.cli.doctor import accelerators, examine, packed_weights, read_cpu, reckon, show_count
from tripool.cli.flags import read_deployment, show_bytes
from tripool.core.shape import model_shape
from tripool.engine import element_type
from tripool.engine.load import load_model
from tripool.engine.ops import levels, native

GIB = 1 << 30
LOW_V3 = V3 | {"num_hidden_layers": 5}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def multiplies_every_type(monkeypatch):
    """As a processor with bfloat16 products; others compute in float32."""
    monkeypatch.setattr(element_type, "multiplies", lambda dtype: True)


@pytest.fixture
def config_of(tmp_path):
    """Writes a configuration and returns its path."""
    def write(config: dict) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path / "config.json")
    return write


def fit(model: str, free_bytes: int, **given):
    return reckon(read_deployment(None, {"model": model, "hybrid": 1, "weights_cache": "none", **given}, 2), free_bytes)


def test_published_shapes_have_their_published_sizes():
    assert model_shape(V2_LITE).params() == pytest.approx(15.7e9, rel=0.003)
    assert model_shape(V2).params() == pytest.approx(236e9, rel=0.003)
    assert model_shape(V3).params() == pytest.approx(671e9, rel=0.001)
    assert model_shape(V3).params(active=True) == pytest.approx(37e9, rel=0.02)


def test_a_model_that_fits_is_said_to_fit_with_its_sums(config_of):
    found = fit(config_of(V2_LITE), 64 * GIB, max_model_len=4096, dtype="bfloat16")

    assert found.problems == []
    assert found.needs[0].weight_bytes == pytest.approx(2 * model_shape(V2_LITE).params(mtp=True), rel=1e-3)
    assert found.token_cache_bytes == 27 * 576 * 2
    assert found.needed_bytes == sum(need.all_bytes for need in found.needs) < 64 * GIB


def test_weights_that_are_too_large_are_named_with_the_remedy(config_of, monkeypatch):
    path = config_of(V2_LITE)
    small = fit(path, 20 * GIB, max_model_len=4096).problems[-1]
    assert "its weights alone take 29.3 GiB; it needs a larger machine" in small      # they have two bytes already
    twice = fit(path, 50 * GIB, max_model_len=4096, hybrid=None, prefill=1, decode=1)
    assert "--hybrid 1 needs them once" in twice.problems[-1]
    monkeypatch.setattr(doctor, "level_here", lambda: -1)                     # without kernels for what is stored
    assert "--dtype bfloat16 halves them" in fit(path, 40 * GIB, max_model_len=4096, dtype="float32").problems[-1]


def test_a_window_that_no_cache_can_hold_is_a_problem_of_its_own(config_of):
    found = fit(config_of(V2_LITE), 64 * GIB, kv_cache_memory_bytes=10 << 20)
    assert any("max_model_len 163840" in problem for problem in found.problems)


def test_a_window_beyond_the_models_positions_is_refused(config_of):
    assert "163840 positions" in fit(config_of(V2_LITE), 64 * GIB, max_model_len=200000).problems[0]


def weight_bytes(model: str, **given) -> int:
    return fit(model, 1 << 60, **{"max_model_len": 512, **given}).needs[0].weight_bytes


def test_ranks_share_the_routed_experts_only(config_of):
    path, shape = config_of(LOW_V3), model_shape(LOW_V3)
    experts = 3 * 256 * shape.expert_params()                         # 2 MoE layers and the MTP layer
    alone = weight_bytes(path, dtype="bfloat16")
    assert weight_bytes(path, dtype="bfloat16", dp_size=4) == 4 * (alone - 2 * experts) + 2 * experts


def test_redundant_experts_take_memory_too(config_of):
    path, shape = config_of(LOW_V3), model_shape(LOW_V3)
    four = weight_bytes(path, dtype="bfloat16", dp_size=4)
    more = weight_bytes(path, dtype="bfloat16", dp_size=4, redundant_experts=32)
    assert more - four == 2 * 3 * 32 * shape.expert_params()
    assert weight_bytes(path, dtype="bfloat16", dp_size=4, shared_expert_copies=4) == four    # each rank has one anyway
    fewer = weight_bytes(path, dtype="bfloat16", dp_size=4, shared_expert_copies=1)
    assert four - fewer == 2 * 3 * 3 * shape.expert_params()


@pytest.mark.parametrize("level", [-1, 1])
@pytest.mark.parametrize("stored", ["bfloat16", "float32", "float16", "int8", "float8", "mixed"])
def test_weights_are_counted_in_the_bytes_in_which_they_are_loaded(tmp_path, monkeypatch, stored, level):
    """From headers, and as far as that goes from the configuration alone."""
    config = tiny_config("v3", mtp=1)
    ignored = ("lm_head", "model.layers.1.mlp.experts.5.down_proj") if stored == "mixed" else ("lm_head",)
    write_checkpoint(tmp_path, config, dtype="int8" if stored == "mixed" else stored, ignore=ignored)
    monkeypatch.setattr(native, "chosen_level", lambda: level)
    monkeypatch.setattr(doctor, "level_here", lambda: level)
    for dtype in ("float32", "bfloat16"):
        if level <= native.best_level():
            loaded = load_model(tmp_path, dtype=dtype).weight_bytes
            assert weight_bytes(str(tmp_path), dtype=dtype) == loaded
            assert weight_bytes(str(tmp_path / "config.json"), dtype=dtype) == loaded


def test_an_int8_checkpoint_takes_about_a_byte_for_each_weight(config_of):
    path = config_of(LOW_V3 | {"quantization_config": compressed_tensors()})
    num_params = model_shape(LOW_V3).params(mtp=True)
    tables = 2 * LOW_V3["vocab_size"] * LOW_V3["hidden_size"]                            # are no projections
    assert 1.0 < (weight_bytes(path) - 2 * tables) / (num_params - tables) < 1.05
    assert weight_bytes(path, device="cuda") > 2 * num_params                            # there all is widened


def mapped_and_own(found) -> tuple[int, list[int]]:
    assert found.needed_bytes == found.mapped_bytes + sum(need.all_bytes for need in found.needs)
    return found.mapped_bytes, [need.weight_bytes for need in found.needs]


@pytest.mark.parametrize("stored", ["int8", "bfloat16"])
def test_weights_that_are_mapped_are_counted_once_for_the_host(tmp_path, monkeypatch, stored):
    """However many ranks and instances; what is in the files is what was reckoned."""
    monkeypatch.setattr(doctor, "level_here", lambda: max(0, native.best_level()))
    write_checkpoint(tmp_path, tiny_config("v3", mtp=1), dtype=stored)
    given = {"dtype": "float32", "max_model_len": 512}
    alone = weight_bytes(str(tmp_path), **given)
    kept = given | {"weights_cache": str(tmp_path / "kept")}
    for members in ({"hybrid": 1}, {"hybrid": 2}, {"hybrid": 1, "dp_size": 2}, {"hybrid": 2, "dp_size": 2},
                    {"hybrid": None, "prefill": 1, "decode": 2, "dp_size": 2}):
        mapped, own = mapped_and_own(fit(str(tmp_path), GIB, **kept, **members))
        assert mapped == alone and not any(own), members
    assert mapped_and_own(fit(str(tmp_path), GIB, **given, hybrid=2, dp_size=2))[0] == 0
    if native.best_level() >= 0:
        load_model(tmp_path, dtype="float32", packed_root=tmp_path / "kept")
        assert packed_weights(tmp_path / "kept").kept_bytes == pytest.approx(alone, rel=0.25)    # and filled up


def test_what_a_rank_has_for_itself_is_counted_for_each(tmp_path, monkeypatch):
    """Experts that do not lie side by side or move, random weights, and what no kernel multiplies as it is stored."""
    monkeypatch.setattr(doctor, "level_here", lambda: 1)
    write_checkpoint(tmp_path, tiny_config("v3", mtp=1), dtype="bfloat16")
    path, given = str(tmp_path), {"max_model_len": 512, "dtype": "float32", "weights_cache": str(tmp_path / "kept")}

    def reckoned(**more):
        return mapped_and_own(fit(path, GIB, **given | {"dp_size": 2} | more))

    def never_mapped(**more):
        return weight_bytes(path, **given | {"dp_size": 2, "weights_cache": "none"} | more)

    whole, _ = reckoned()
    alone, redundant = never_mapped(), never_mapped(redundant_experts=2)
    rest = alone - whole                                       # what is not experts is there twice without files
    assert reckoned(redundant_experts=2) == (rest, [redundant - 2 * rest])
    mapped, (own,) = reckoned(shared_expert_copies=1)          # the first rank has it before its other experts
    assert mapped + own == whole and 0 < own < whole - rest
    for otherwise in ({"load_format": "dummy"}, {"dtype": "bfloat16"}, {"device": "cuda", "dp_size": 1}):
        assert reckoned(**otherwise) == (0, [never_mapped(**otherwise)])
    monkeypatch.setattr(doctor, "level_here", lambda: -1)
    assert reckoned() == (0, [never_mapped()])


def test_the_command_tells_what_is_mapped(monkeypatch):
    monkeypatch.setattr(doctor, "level_here", lambda: 1)
    words = ("doctor", "--hybrid", "2", "--dtype", "float32")
    assert "mapped, once" in tripool(*words).stdout
    assert "mapped, once" not in tripool(*words, "--weights-cache", "none").stdout


def test_the_memory_of_the_exchange_is_reckoned(config_of):
    found = fit(config_of(V2_LITE), 100 * GIB, max_model_len=4096, dtype="bfloat16", dp_size=4,
                exchange_tokens=128).needs[0].exchange
    packet = 4096 + 512                               # a row of 2048 in bfloat16, its scale and metadata
    assert found.dispatch_bytes == 4 * 128 * packet
    assert found.combine_bytes == 4 * 128 * 6 * 4096  # six experts for each token
    assert 4 * found.rank_bytes <= found.total_bytes < 4 * found.rank_bytes + (1 << 16)
    assert fit(config_of(V2_LITE), 100 * GIB, max_model_len=4096).needs[0].exchange is None


def test_an_exchange_that_does_not_fit_is_named_with_the_remedy(config_of):
    found = fit(config_of(V2_LITE), 100 * GIB, max_model_len=4096, dp_size=8, exchange_tokens=1 << 18)
    assert any("lower --exchange-tokens (now 262144)" in problem for problem in found.problems)
    assert any("hybrid: a direct exchange takes 1 to 64 ranks" in problem
               for problem in fit(config_of(V2_LITE), 100 * GIB, max_model_len=4096, dp_size=65).problems)


def test_drafting_with_a_model_that_has_no_layer_for_it_is_a_problem(config_of):
    assert any("hybrid: num_speculative_tokens asks" in problem
               for problem in fit(config_of(V2_LITE), 100 * GIB, max_model_len=4096, num_speculative_tokens=1).problems)
    assert fit(config_of(V3), 2000 * GIB, max_model_len=4096, num_speculative_tokens=1).problems == []


def test_the_command_tells_the_exchange_of_several_ranks():
    done = tripool("doctor", "--hybrid", "1", "--dp-size", "2", "--redundant-experts", "2", "--max-model-len", "512")
    assert done.exit_code == 0, done.output
    assert "buffers of each of 2 ranks" in done.stdout and "of shared memory in all" in done.stdout


def test_a_machine_is_looked_at_without_loading_torch():
    code = "import sys, tripool.cli.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_deterministic_inference_is_reckoned_in_float32(config_of):
    path = config_of(V2_LITE)
    exact = fit(path, 80 * GIB, max_model_len=4096, enable_deterministic_inference=True)
    assert exact.dtype == "float32"
    usual = fit(path, 80 * GIB, max_model_len=4096, dtype="bfloat16")
    assert exact.needs[0].cache_bytes > 1.9 * usual.needs[0].cache_bytes
    assert exact.needs[0].weight_bytes == pytest.approx(
        usual.needs[0].weight_bytes * (1 if native.is_built() else 2), rel=0.01)


def test_the_command_ends_with_one_if_the_model_does_not_fit(config_of):
    done = tripool("doctor", "--model", config_of(V3))
    assert done.exit_code == 1
    assert "682.6 B parameters" in done.stdout
    assert "does not fit" in done.stdout


def test_the_command_speaks_json(config_of):
    done = tripool("doctor", "--model", config_of(V3), "--json")
    page = json.loads(done.stdout)
    assert page["fit"]["problems"]
    assert page["machine"]["cores"] >= 1


def test_a_folder_that_cannot_be_used_is_told_with_all_its_problems(tmp_path):
    done = tripool("doctor", "--model", str(tmp_path))
    assert done.exit_code == 1
    assert "config.json" in done.stdout


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"model_type": "llama"})])
def test_what_is_no_configuration_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    done = tripool("doctor", "--model", str(tmp_path / "config.json"))
    assert done.exit_code == 1
    assert done.exception is None or isinstance(done.exception, SystemExit)


def test_the_embedded_model_fits_this_machine():
    done = tripool("doctor", "--prefill", "1", "--decode", "1", "--cache", "1")
    assert done.exit_code == 0, done.output
    assert "tripool-tiny" in done.stdout
    assert "would be started: 1 prefill, 1 thread(s) per rank; 1 decode" in done.stdout


def test_the_folder_of_packed_weights_is_told_of(tmp_path):
    root = tmp_path / "weights"
    words = ("--max-tokens", "1", "--dtype", "float32", "--weights-cache", str(root))
    assert tripool("generate", "Once", *words).exit_code == 0
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    found = json.loads(tripool("doctor", "--weights-cache", str(root), "--json").stdout)["packed_weights"]
    assert found["folder"] == str(root) and found["free_bytes"] > 0
    assert found["kept_bytes"] == size and (size > 0) == (native.chosen_level() >= 0)
    absent = packed_weights(tmp_path / "not" / "yet")
    assert absent.kept_bytes == 0 and absent.free_bytes > 0
    assert "packed weights: not kept" in tripool("doctor", "--weights-cache", "none").stdout


def test_the_machine_is_looked_at():
    machine = examine()
    assert 0 < machine.free_bytes <= machine.memory_bytes
    assert {"tripool", "python", "torch"} <= set(machine.versions)
    assert 0.0 <= machine.large_page_share <= 1.0


def test_the_level_of_operations_is_told_and_a_low_one_noted(monkeypatch):
    assert examine().operations == levels.explained(native.best_level())
    assert f"operations     {examine().operations}" in tripool("doctor").stdout
    monkeypatch.setattr(doctor, "level_here", lambda: 0)
    monkeypatch.setattr(levels, "processor_flags", lambda: {"sse2"})
    assert examine().operations == "plain (no AVX2 on this processor)"
    assert ["no AVX2" in note for note in examine().notes if "native operations" in note] == [True]


def test_rows_that_are_rounded_are_noted_with_the_remedy(config_of, monkeypatch):
    path = config_of(V2_LITE)
    monkeypatch.setattr(element_type, "processor_flags", lambda: {"avx512_bf16"})
    monkeypatch.setattr(element_type, "find_spec", lambda name: "compiled")
    assert ["--dtype float32 leaves them" in note for note in fit(path, 80 * GIB).notes] == [True]
    assert fit(path, 80 * GIB, dtype="float32").notes == []
    assert fit(path, 80 * GIB, enable_deterministic_inference=True).notes == []


def test_a_type_that_the_processor_has_no_products_for_is_noted(config_of, monkeypatch):
    path = config_of(V2_LITE)
    monkeypatch.setattr(element_type, "find_spec", lambda name: None)
    monkeypatch.setattr(element_type, "multiplies", lambda dtype: True)
    assert fit(path, 80 * GIB, dtype="bfloat16").notes == []
    monkeypatch.setattr(element_type, "multiplies", lambda dtype: dtype == "float32")
    monkeypatch.setattr(element_type, "processor_flags", lambda: {"avx2", "avx512vl"})
    assert ["it lacks avx512bw, avx512dq" in note for note in fit(path, 80 * GIB, dtype="bfloat16").notes] == [True]
    assert fit(path, 80 * GIB, dtype="float32").notes == []
    assert fit(path, 80 * GIB, dtype="bfloat16", device="cuda").notes == []


def test_a_type_that_kernels_do_not_take_is_noted_with_the_remedy(config_of, monkeypatch):
    path = config_of(V2_LITE)
    monkeypatch.setattr(element_type, "processor_flags", lambda: {"avx512_bf16", *element_type._FLAGS["bfloat16"][0]})
    monkeypatch.setattr(element_type, "find_spec", lambda name: "compiled")
    assert ["--dtype auto" in note for note in fit(path, 80 * GIB, dtype="bfloat16").notes] == [True]
    assert not any("PyTorch" in note for note in fit(path, 80 * GIB).notes)
    assert fit(path, 80 * GIB, dtype="bfloat16", device="cuda").notes == []


@pytest.mark.parametrize(("given", "words"), [
    ("madvise", "no memory in one piece"), ("never", "echo madvise >"), ("", "echo madvise >")])
def test_where_memory_comes_in_small_pages_doctor_says_why(monkeypatch, given, words):
    monkeypatch.setattr("tripool.cli.doctor.share_in_large_pages", lambda num_bytes: 0.0)
    monkeypatch.setattr("tripool.cli.doctor.setting", lambda: given)
    assert [words in note for note in examine().notes if "small pages" in note] == [True]


def test_processor_and_devices_are_read_as_the_kernel_tells_them(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 2\nflags\t\t: fpu avx2 amx_int8\n\n")
    assert read_cpu(tmp_path / "cpuinfo") == ("Some CPU @ 2", {"fpu", "avx2", "amx_int8"})
    for name in ("nvidia0", "nvidiactl", "davinci3"):
        (tmp_path / name).touch()
    assert accelerators(tmp_path) == ["nvidia0", "davinci3"]


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
@pytest.mark.parametrize(("name", "config"), [("DeepSeek-V2-Lite", V2_LITE), ("DeepSeek-V2", V2), ("DeepSeek-V3", V3)])
def test_the_table_of_models_in_the_readme_is_what_is_reckoned(page, name, config):
    shape = model_shape(config)
    line = next(line for line in (ROOT / page).read_text().splitlines() if re.match(rf"\| {name}\b(?!-)", line))
    gib = [f"{size * shape.params(mtp=True) / GIB:.1f} GiB" for size in (2, 4)]
    for figure in (show_count(shape.params(mtp=True)), show_count(shape.params(active=True)), *gib,
                   show_bytes(shape.num_cached_layers * shape.entry_width * 2)):
        assert figure in line, f"{figure} is not in {line}"


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_tells_the_embedded_models_size(page):
    shape = model_shape(json.loads((ROOT / "tripool" / "models" / "tiny" / "config.json").read_text()))
    line = next(line for line in (ROOT / page).read_text().splitlines() if line.startswith("| `tripool-tiny`"))
    for figure in (show_count(shape.params(mtp=True)), show_count(shape.params(active=True)),
                   show_bytes(2 * shape.params(mtp=True)), show_bytes(4 * shape.params(mtp=True)),
                   show_bytes(shape.num_cached_layers * shape.entry_width * 2)):
        assert figure in line, f"{figure} is not in {line}"
