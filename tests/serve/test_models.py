import pytest

from tests.checkpoints import tiny_config, write_checkpoint
from tripool.core.deployment import Deployment, InstanceConfig, ModelConfig
from tripool.core.errors import ConfigError
from tripool.serve.models import EMBEDDED, folder_of, resolve, resolve_model


def test_no_name_and_the_embedded_models_own_name_are_the_embedded_model():
    assert folder_of("") == folder_of("tripool-tiny") == EMBEDDED
    model, checkpoint = resolve_model(ModelConfig(path="tripool-tiny"))
    assert (model.served_name, checkpoint.folder) == ("tripool-tiny", EMBEDDED)


def test_a_folder_of_that_name_goes_first(tmp_path, monkeypatch):
    (tmp_path / "tripool-tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert folder_of("tripool-tiny").resolve() == tmp_path / "tripool-tiny"


def test_other_names_are_folders_or_hub_ids():
    with pytest.raises(ConfigError, match="there is no such folder"):
        folder_of("tripool-tin")


def test_drafting_with_a_model_that_has_no_layer_for_it_is_refused_before_anything_starts(tmp_path):
    write_checkpoint(tmp_path, tiny_config("v2"))
    deployment = Deployment(ModelConfig(path=str(tmp_path)), hybrid=InstanceConfig(1, num_speculative_tokens=1))
    with pytest.raises(ConfigError, match=r"^hybrid: num_speculative_tokens asks .* has no MTP layer"):
        resolve(deployment)
