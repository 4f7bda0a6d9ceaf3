import json

import pytest
import torch
from safetensors.torch import load_file

import int8
from tests.checkpoints import tiny_config, write_checkpoint
from tests.engine.model.builders import random_tokens
from tripool.engine.checkpoint import open_checkpoint
from tripool.quant.forward import Model


def test_the_outlier_ridden_copy_is_the_same_float_model(tmp_path):
    write_checkpoint(tmp_path / "source", tiny_config("v3"), num_shards=1)
    int8.write_outlier_ridden(tmp_path / "source", tmp_path / "ridden")

    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "ridden"))
    texts = [random_tokens(30)]
    hidden, ridden = (Model(open_checkpoint(tmp_path / name)).hidden(texts) for name in ("source", "ridden"))

    assert after["model.layers.1.input_layernorm.weight"].max() > 8 * before[
        "model.layers.1.input_layernorm.weight"].max()
    assert torch.allclose(ridden, hidden, rtol=1e-4, atol=1e-4)      # powers of two; sums come in another order


@pytest.mark.slow
@pytest.mark.bench
def test_the_bench_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["int8.py", "--quick", "--tokens", "500", "--json", str(tmp_path / "int8.json")])

    int8.main()

    names = {figure["name"] for figure in json.loads((tmp_path / "int8.json").read_text())["figures"]}
    assert {"int8.perplexity_increase", "int8.exact_match_drop", "int8.outlier_rtn_increase",
            "int8.outlier_full_increase"} <= names
