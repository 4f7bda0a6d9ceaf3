import json
import random

import pytest

from tests.cli.fake_server import Script, fake_server_beside, tokens, tripool
from tripool.cli.bench import Sizes, parse_limits, read_prompts
from tripool.cli.load import Limits
from tripool.core.errors import ConfigError


def server(path, body):
    match path:
        case "/v1/models":
            return Script(body={"data": [{"id": "tiny"}]})
        case "/tokenize":
            return Script(body={"tokens": list(range(100, 150))})
        case "/detokenize":
            return Script(body={"prompt": " ".join(map(str, body["tokens"]))})
        case "/flush_cache":
            return Script(body={"success": True})
        case _:
            return Script(tokens(0.001, 0.0005, body["max_tokens"]))


def bench(*words: str):
    """Figures of a run against a server that answers at once, and the generating requests it saw."""
    with fake_server_beside(server) as (url, seen):
        done = tripool("bench", "serve", "--url", url, "--json", "-", *words)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), [(path, body) for path, body in seen.requests if path.startswith("/v1/c")], seen


def test_a_closed_loop_of_random_prompts():
    result, asked, _ = bench("--num-prompts", "6", "--max-concurrency", "2", "--input-len", "12", "--output-len", "5")

    assert result["figures"]["completed"] == 6
    assert result["figures"]["output_tokens"] == 30
    assert result["parameters"]["max_concurrency"] == 2
    counted = asked[1:]                                    # the first warms up
    assert [path for path, _ in counted] == ["/v1/completions"] * 6
    assert all(len(body["prompt"]) == 12 and set(body["prompt"]) <= set(range(100, 150)) for _, body in counted)
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for _, body in counted)
    assert len({tuple(body["prompt"]) for _, body in asked}) == 7


def test_prompts_may_share_their_beginnings():
    _, asked, _ = bench("--dataset", "shared-prefix", "--prefix-len", "20", "--num-prefixes", "2", "--num-prompts", "4",
                        "--input-len", "3", "--warmup-requests", "0", "--output-len", "2", "--request-rate", "1000",
                        "--burstiness", "1000")
    starts = [tuple(body["prompt"][:20]) for _, body in asked]
    assert len(set(starts)) == 2
    assert all(len(body["prompt"]) == 23 for _, body in asked)


def test_chat_prompts_are_text_and_the_cache_is_emptied_when_asked():
    _, asked, seen = bench("--endpoint", "chat", "--num-prompts", "2", "--input-len", "3", "--output-len", "2",
                           "--flush-cache")
    assert [path for path, _ in asked] == ["/v1/chat/completions"] * 3
    assert len(asked[0][1]["messages"][0]["content"].split()) == 3
    paths = [path for path, _ in seen.requests]
    assert paths.index("/flush_cache") == len(paths) - 3   # after the warm-up, before what is counted


def test_own_prompts_are_sent_as_they_are(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt": "ho"}\n')
    _, asked, _ = bench("--endpoint", "chat", "--dataset", "prompts", "--dataset-path", str(file), "--num-prompts", "2",
                        "--warmup-requests", "0", "--max-concurrency", "1", "--output-len", "1")
    assert [body["messages"][0]["content"] for _, body in asked] == ["hi", "ho"]


def test_the_same_seed_sends_the_same_load():
    words = ("--num-prompts", "3", "--range-ratio", "0.5", "--output-len", "4", "--max-concurrency", "1", "--seed", "9")
    assert bench(*words)[1] == bench(*words)[1]


def test_a_table_is_shown_and_a_file_written(tmp_path):
    file = tmp_path / "result.json"
    with fake_server_beside(server) as (url, _):
        done = tripool("bench", "serve", "--url", url, "--num-prompts", "2", "--output-len", "3", "--json", str(file),
                       "--goodput", "ttft:10000")
    assert done.exit_code == 0, done.output
    assert "2 of 2 requests completed" in done.stdout
    assert "ttft" in done.stdout
    assert json.loads(file.read_text())["figures"]["goodput"]["share"] == 1


def test_a_run_in_which_everything_failed_ends_with_one():
    def refusing(path, body):
        if path.startswith("/v1/c"):
            return Script(status=503, body={"error": {"message": "loading"}})
        return server(path, body)

    with fake_server_beside(refusing) as (url, _):
        done = tripool("bench", "serve", "--url", url, "--num-prompts", "2", "--warmup-requests", "0")
    assert done.exit_code == 1
    assert "failed: 2 x the server answered 503" in done.stdout


def test_prompt_files_are_read_line_by_line(tmp_path):
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("one\n\ntwo\n")
    lines.write_text('{"prompt": "x"}\n')
    assert read_prompts(text) == [{"prompt": "one"}, {"prompt": "two"}]
    assert read_prompts(lines) == [{"prompt": "x"}]


@pytest.mark.parametrize(("text", "complaint"), [("", "no prompt"), ("{", "line 1 is not JSON"), ("[]", "neither")])
def test_a_wrong_prompt_file_is_refused_with_its_line(tmp_path, text, complaint):
    file = tmp_path / "b.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_prompts(file)


def test_limits_are_read():
    assert parse_limits(["ttft:500", "tpot:50", "e2el:2000"]) == Limits(500, 50, 2000)
    assert parse_limits([]) is None


@pytest.mark.parametrize("word", ["ttft", "ttft:soon", "speed:3"])
def test_what_is_no_limit_is_refused(word):
    with pytest.raises(ConfigError, match="--goodput"):
        parse_limits([word])


def test_lengths_vary_within_their_ratio():
    sizes = Sizes(100, 10, range_ratio=0.25)
    drawn = [sizes.draw(100, random.Random(seed)) for seed in range(200)]
    assert min(drawn) >= 75
    assert max(drawn) <= 125
    assert len(set(drawn)) > 20
    assert Sizes(100, 10).draw(100, random.Random(0)) == 100


@pytest.mark.parametrize("words", [
    ("--dataset", "novels"), ("--endpoint", "telepathy"), ("--dataset", "prompts"), ("--request-rate", "0"),
])
def test_impossible_settings_are_refused_before_anything_is_sent(words):
    done = tripool("bench", "serve", *words)
    assert isinstance(done.exception, ConfigError)
