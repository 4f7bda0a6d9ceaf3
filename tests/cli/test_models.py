"""A model has one shape by all its names, and a deployment calls it what `serve` and `simulate` both understand."""

import shutil

import pytest

from tripool.cli.models import SERVED, path_of, shape_of
from tripool.core.errors import ConfigError
from tripool.serve.models import EMBEDDED, folder_of
from tripool.sim.costs.models import known_models


def test_each_known_shape_has_a_name_to_be_served_by():
    assert sorted(SERVED) == known_models()
    for name in known_models():
        assert shape_of(path_of(name)) == shape_of(name)
    assert folder_of(path_of("tiny")) == EMBEDDED


@pytest.mark.parametrize(("name", "path"), [
    ("deepseek-r1", "deepseek-ai/DeepSeek-R1"), ("DeepSeek-R1", "deepseek-ai/DeepSeek-R1"),
    ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1"), ("tripool-tiny", "tripool-tiny"),
])
def test_a_known_model_is_served_by_its_hub_id(name, path):
    assert path_of(name) == path
    assert shape_of(name) == shape_of(path)


def test_a_folder_is_taken_before_a_known_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "deepseek-r1"
    folder.mkdir()
    shutil.copy(EMBEDDED / "config.json", folder)

    assert path_of("deepseek-r1") == path_of("deepseek-r1/config.json") == "deepseek-r1"
    assert shape_of("deepseek-r1") == shape_of("tiny")


def test_an_unknown_model_is_named():
    with pytest.raises(ConfigError, match="there is no model 'none': known are deepseek-r1, tiny"):
        shape_of("none")
