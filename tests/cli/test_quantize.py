import json

import pytest
from PIL import Image, ImageColor

from tests.checkpoints import tiny_config, write_checkpoint
from tests.cli.fake_server import tripool
from tripool.cli.quantize_picture import COLOURS, draw
from tripool.core.errors import ConfigError
from tripool.engine.checkpoint import open_checkpoint
from tripool.quant.evaluate import Outcome
from tripool.quant.recipe import STEPS
from tripool.serve.models import EMBEDDED

WITHOUT_TEXTS = ("--calibration", "none", "--evaluation", "none")


@pytest.fixture
def source(tmp_path):
    write_checkpoint(tmp_path / "source", tiny_config("v3"))
    return tmp_path / "source"


def test_a_folder_is_converted_and_its_figures_are_written(source, tmp_path):
    report = tmp_path / "report.json"

    done = tripool("quantize", str(source), str(tmp_path / "int8"), "--plain", "--report", str(report), *WITHOUT_TEXTS)

    assert done.exit_code == 0, done.output
    assert "error of products" in done.stdout and "worst: model.layers" in done.stdout
    assert open_checkpoint(tmp_path / "int8").quantisation.method == "compressed-tensors"
    found = json.loads(report.read_text())
    assert found["recipe"] == {"mixed_precision": True, "rotation": False, "absorption": False, "scale_search": False,
                               "clipping": False, "compensation": False}
    assert {figure["tensor"] for figure in found["figures"]} == {
        name for name, tensor in open_checkpoint(tmp_path / "int8").tensors.items() if tensor.dtype == "I8"}
    assert f"all figures: {report}, a picture: {tmp_path / 'report.png'}" in done.stdout.replace("\n", "")
    with Image.open(tmp_path / "report.png") as picture:
        assert picture.size[0] > 800


def test_what_became_of_the_rotation_is_said(source, tmp_path):
    words = ("--no-absorption", "--no-scale-search", "--no-clipping", "--no-compensation")

    done = tripool("quantize", str(source), str(tmp_path / "int8"), *words, *WITHOUT_TEXTS)

    assert "rotation: residual stream as it was, it brings too little (products that read it:" in done.stdout


def test_the_picture_has_a_line_and_a_bar_for_each_technique(tmp_path):
    outcomes = [Outcome(name, recipe, 0.01, {0: 0.01, 1: 0.02 / (1 + number)}, 3.0, 0.001 * number, None)
                for number, (name, recipe) in enumerate(STEPS)]

    draw([], outcomes, tmp_path / "report.png")

    with Image.open(tmp_path / "report.png") as picture:
        seen = {colour for _, colour in picture.getcolors(1 << 20)}
    assert {ImageColor.getrgb(colour) for colour in COLOURS} <= seen


@pytest.mark.slow      # half a minute of the embedded model
def test_perplexity_is_told_and_each_techniques_part_in_it(tmp_path):
    report = tmp_path / "report.json"

    done = tripool("quantize", str(EMBEDDED), str(tmp_path / "int8"), "--compare", "--calibration-tokens", "256",
                   "--report", str(report))

    assert done.exit_code == 0, done.output
    assert "one technique more at a time" in done.stdout
    found = json.loads(report.read_text())
    assert abs(found["perplexity"]["increase"]) < 0.01
    assert [each["name"] for each in found["techniques"]][1:3] == ["+ mixed precision", "+ rotation"]


def test_the_policy_is_shown_with_what_it_means_for_a_model():
    alone, for_model = tripool("quantize", "--show-policy"), tripool("quantize", str(EMBEDDED), "--show-policy")

    assert alone.exit_code == for_model.exit_code == 0
    assert "router" in alone.stdout and "as they are" in alone.stdout and "INT8" in alone.stdout
    assert "288" in for_model.stdout            # experts' matrices of six layers


@pytest.mark.parametrize(("words", "said"), [
    ((), "give a folder to convert and a folder to write"),
    (("{source}",), "give a folder to convert and a folder to write"),
    (("{source}", "{place}/int8"), "has no tokenizer.json"),
    (("{source}", "{source}", *WITHOUT_TEXTS), "is there already"),
    (("{source}", "{place}/int8", *WITHOUT_TEXTS, "--memory", "1MiB"), "raise --memory"),
    (("{source}", "{place}/int8", *WITHOUT_TEXTS, "--report", "{place}/no/report.json"), "--report is"),
])
def test_a_mistake_is_named(source, tmp_path, words, said):
    done = tripool("quantize", *(word.format(source=source, place=tmp_path) for word in words))

    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)
    assert not (tmp_path / "int8").exists()
