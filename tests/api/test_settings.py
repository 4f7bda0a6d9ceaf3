"""Settings from a checkpoint's text files, and the embedded model's own."""

import json
from pathlib import Path

import pytest

import tripool
from tests.api.builders import BOS, EOS, THINKING_TEMPLATE, token, tokenizer
from tripool.api.metrics import Histogram
from tripool.api.settings import load_settings
from tripool.core.deployment import GatewayConfig
from tripool.core.errors import CheckpointError

EMBEDDED = Path(tripool.__file__).parent / "models" / "tiny"


def folder_with(path, **files):
    """A checkpoint's text files: `generation_config={...}` and the like."""
    tokenizer().inner.save(str(path / "tokenizer.json"))
    values = {"tokenizer_config": {"bos_token": BOS, "eos_token": EOS, "chat_template": THINKING_TEMPLATE}, **files}
    for name, value in values.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def load(path, vocab_size=1000, **gateway):
    return load_settings(path, GatewayConfig(api_keys=("k",), max_attempts=2, **gateway), model_name="m",
                         vocab_size=vocab_size, max_model_len=99, version="1")


def test_a_checkpoints_generation_settings_are_the_defaults(tmp_path):
    folder = folder_with(
        tmp_path, generation_config={"temperature": 0.6, "top_p": 0.95, "top_k": 50, "eos_token_id": [7, 8]}
    )
    settings = load(folder)
    assert (settings.default_sampling.temperature, settings.default_sampling.top_k) == (0.6, 50)
    assert settings.eos_token_ids == (7, 8, token(EOS)) and settings.api_keys == ("k",)
    assert load(folder, sampling_defaults="openai").default_sampling.temperature == 1.0
    assert settings.template.render([{"role": "user", "content": "a"}]).opening == "thinking"


def test_greedy_checkpoints_and_those_without_settings(tmp_path):
    folder = folder_with(
        tmp_path, generation_config={"do_sample": False, "temperature": 0.6}, config={"eos_token_id": 5}
    )
    assert load(folder).default_sampling.temperature == 0.0
    assert load(folder).eos_token_ids == (5, token(EOS))


@pytest.mark.parametrize(("files", "vocab_size", "complaint"), [
    (dict(generation_config={"temperature": "hot"}), 1000, "temperature is 'hot'"),
    ({}, 10, "the tokenizer of another model"),
    (dict(tokenizer_config={"chat_template": "{% for %}"}), 1000, "does not compile"),
])
def test_what_cannot_work_is_said_at_start(tmp_path, files, vocab_size, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        load(folder_with(tmp_path, **files), vocab_size)


def test_a_histogram_counts_what_is_not_larger_than_each_bound():
    histogram = Histogram("x", "about x", {"model_name": "m"}, (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 99.0):
        histogram.observe(value)
    samples = {
        (sample.name, sample.labels.get("le")): sample.value for sample in next(iter(histogram.collect())).samples
    }
    assert samples == {("x_bucket", "1.0"): 2, ("x_bucket", "2.0"): 3, ("x_bucket", "+Inf"): 4, ("x_count", None): 4,
                       ("x_sum", None): 102.0}


@pytest.mark.skipif(not (EMBEDDED / "tokenizer.json").exists(), reason="the embedded model is not here")
class TestEmbeddedModel:
    def settings(self):
        config = json.loads((EMBEDDED / "config.json").read_text())
        return load_settings(EMBEDDED, GatewayConfig(), model_name="tripool-tiny", vocab_size=config["vocab_size"],
                             max_model_len=config["max_position_embeddings"], version="1")

    def test_it_can_chat_with_thinking_on_and_off(self):
        template = self.settings().template
        assert template.render([{"role": "user", "content": "hi"}], arguments={"thinking": True}).opening == "thinking"
        assert template.render([{"role": "user", "content": "hi"}]).opening == "answering"

    @pytest.mark.slow
    def test_prompts_and_texts_are_those_of_transformers(self):
        transformers = pytest.importorskip("transformers")
        theirs, ours = transformers.AutoTokenizer.from_pretrained(str(EMBEDDED)), self.settings()
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "你好"},
                    {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
        tools = [
            {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
        ]
        for more in ({}, {"tools": tools}):
            rendered = ours.template.render(messages, **more).text
            assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)
            assert ours.tokenizer.encode(rendered, add_special_tokens=False) == theirs.encode(
                rendered, add_special_tokens=False
            )
        begun = [*messages[:2], {"role": "assistant", "content": "The answer "}]
        assert ours.template.render(begun, continue_final_message=True).text == theirs.apply_chat_template(
            begun, tokenize=False, continue_final_message=True)
        assert ours.tokenizer.encode("hello world", add_special_tokens=True) == theirs.encode("hello world")
        for start in range(0, ours.tokenizer.vocab_size, 37):
            sequence = [(start * 31 + at * 997) % ours.tokenizer.vocab_size for at in range(40)]
            for skip in (True, False):
                assert ours.tokenizer.decode(sequence, skip_special_tokens=skip) == theirs.decode(
                    sequence, skip_special_tokens=skip)
