"""`tripool generate` with the embedded model, in this process."""

import json

from tests.cli.fake_server import tripool
from tripool.core.errors import ConfigError

FAST = ("--threads", "1", "--temperature", "0")


def test_a_prompt_is_gone_on_from_and_timed():
    done = tripool("generate", "Once upon a time", "--max-tokens", "6", *FAST)

    assert done.exit_code == 0, done.output
    assert len(done.stdout.strip()) > 5
    assert "first token" in done.stderr
    assert "length" in done.stderr


def test_prompts_of_a_file_run_together_and_give_what_each_gives_alone(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Once upon a time"}, {"messages": [{"role": "user", "content": "Hello!"}]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    words = ("--max-tokens", "6", "--no-timing", "--enable-deterministic-inference", *FAST)

    together = tripool("generate", "--prompt-file", str(file), *words)
    alone = tripool("generate", "Once upon a time", *words)

    assert together.exit_code == 0, together.output
    assert alone.stdout.strip() in together.stdout
    assert "'Hello!'" in together.stdout


def test_standard_input_is_a_prompt_too_and_a_seed_repeats_itself():
    words = ("generate", "--max-tokens", "5", "--threads", "1", "--temperature", "1", "--seed", "3", "--no-timing")
    assert tripool(*words, stdin="Once\n").stdout == tripool(*words, stdin="Once\n").stdout != ""


def test_a_prompt_that_is_too_long_is_refused_with_the_counts():
    done = tripool("generate", "word " * 50, "--max-model-len", "32", "--threads", "1")
    assert isinstance(done.exception, ConfigError)
    assert "room for 32 with the answer; shorten it, or raise --max-model-len" in str(done.exception)
