import pytest

import checkpoint
from tripool.engine.checkpoint import open_checkpoint


@pytest.mark.parametrize("preset", list(checkpoint.PRESETS))
def test_the_configuration_and_the_tensors_fit_each_other(preset):
    config = checkpoint.configuration(preset)
    files = list(checkpoint.shards(config))
    assert len(files) == config["num_hidden_layers"] + 1
    names = [name for shapes in files for name in shapes]
    assert len(names) == len(set(names))


def test_a_written_checkpoint_can_be_opened_by_the_engine(tmp_path, monkeypatch):
    tiny = checkpoint.PRESETS["small"] | dict(num_hidden_layers=2, n_routed_experts=8, vocab_size=300)
    monkeypatch.setitem(checkpoint.PRESETS, "tiny", tiny)
    checkpoint.write_checkpoint("tiny", tmp_path / "tiny")

    shape = open_checkpoint(tmp_path / "tiny").shape

    assert (shape.num_layers, shape.num_routed_experts, shape.vocab_size) == (2, 8, 300)
