"""Traces are read for what they say, and what is wrong with one is told with its line and field."""

from itertools import pairwise
from pathlib import Path

import pytest

from tripool.core.errors import ConfigError
from tripool.core.keys import block_keys, root_key
from tripool.core.request import num_tokens
from tripool.sim.requests import prompt_tokens
from tripool.sim.traces import read_workload

DATA = Path(__file__).parent / "data"
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
"""
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


def mooncake(timestamp=0, input_length=600, output_length=5, hash_ids="[1, 2]") -> str:
    return (f'{{"timestamp": {timestamp}, "input_length": {input_length}, "output_length": {output_length}, '
            f'"hash_ids": {hash_ids}}}\n')


def read(tmp_path, text, **more):
    path = tmp_path / "trace"
    path.write_text(text)
    return read_workload(path, **more)


def test_a_mooncake_trace_has_its_times_its_lengths_and_its_shared_blocks():
    workload = read_workload(DATA / "mooncake_excerpt.jsonl")

    first = workload.requests[0]
    assert (first.at_s, first.num_prompt, first.num_output) == (0.0, 6758, 500)
    assert first.parts[:2] == ((0, 512), (1, 512)) and first.parts[-1] == (13, 6758 - 13 * 512)
    assert len(workload.requests) == 9 and workload.span_s == 111.0


@pytest.mark.parametrize("block_tokens", [512, 128, 100])
def test_prompts_share_the_leading_tokens_that_the_trace_says_and_no_more(block_tokens):
    requests = read_workload(DATA / "mooncake_excerpt.jsonl").requests

    for one, other in pairwise(requests):
        shared = 0
        for mine, theirs in zip(one.parts, other.parts, strict=False):
            if mine != theirs:
                break
            shared += mine[1]
        keys = [block_keys(root_key(b"", b""), prompt_tokens(each.parts), block_tokens) for each in (one, other)]
        assert sum(mine == theirs for mine, theirs in zip(*keys, strict=False)) == shared // block_tokens
        assert num_tokens(prompt_tokens(one.parts)) == one.num_prompt


def test_times_of_an_azure_trace_are_seconds_since_its_first_request():
    requests = read_workload(DATA / "azure_excerpt.csv").requests

    assert [(each.num_prompt, each.num_output) for each in requests[:2]] == [(374, 44), (396, 109)]
    assert requests[1].at_s == pytest.approx(4.314579)
    assert len({each.parts[0][0] for each in requests}) == len(requests)         # nobody shares anything


def test_a_burstgpt_trace_is_read_with_columns_of_later_releases_too(tmp_path):
    assert [(each.at_s, each.num_prompt, each.num_output) for each in read(tmp_path, BURSTGPT).requests] == \
        [(0.0, 472, 18), (40.0, 1087, 230)]
    later = "Session ID,Timestamp,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n" \
        "1,5,3,ChatGPT,472,18,490,Conversation log\n"
    assert read(tmp_path, later).requests[0].num_prompt == 472


def test_the_first_requests_of_a_trace_can_be_had_and_at_another_pace(tmp_path):
    assert len(read(tmp_path, BURSTGPT, limit=1).requests) == 1
    assert read(tmp_path, BURSTGPT).faster(4.0).span_s == 10.0


@pytest.mark.parametrize(("text", "told"), [
    (mooncake() + mooncake(hash_ids="[1]"), "line 2: hash_ids has 1 blocks, but input_length 600 makes 2"),
    (mooncake(timestamp=9) + mooncake(timestamp=5), "line 2: timestamp runs backwards, by 0.004 s"),
    (mooncake(input_length=0), "line 1: input_length is 0"),
    (mooncake(output_length=0), "line 1: output_length is 0"),
    (mooncake(timestamp=-1), "line 1: timestamp is -0.001"),
    (mooncake() + '{"timestamp": 3}\n', "line 2: Object missing required field `input_length`"),
    (mooncake() + "{\n", "line 2: "),
    (mooncake(hash_ids="[-1, 2]"), "line 1: hash_ids go from -1 to 2"),
    (BURSTGPT + "50,GPT-4,5,0,5,API log\n", "line 4: Response tokens is 0"),
    (BURSTGPT + "50,GPT-4,many,1,5,API log\n", "line 4: Request tokens is 'many'"),
    (BURSTGPT + "40,GPT-4,5,1,5,API log\n", "line 4: Timestamp runs backwards"),
    (BURSTGPT.replace("Response tokens", "Answer"), "the column 'Response tokens' is missing"),
    (AZURE + "2023-11-16 18:15:47.0,374\n", "line 3: GeneratedTokens is empty"),
    (AZURE + "yesterday,374,5\n", "line 3: TIMESTAMP is 'yesterday', which is no time"),
    ("a,b\n1,2\n", "line 1: the columns a, b are of no known trace"),
    ("", " is empty"),
    ("\n", "line 1: the columns (none) are of no known trace"),
    (AZURE + "9" * 200_000 + ",374,5\n", "is no proper CSV file: field larger than field limit"),
    (AZURE.splitlines()[0] + "\n", "holds no request"),
])
def test_what_is_wrong_with_a_trace_is_told_with_its_line_and_field(tmp_path, text, told):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert told in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_trace_that_is_not_there_is_told():
    with pytest.raises(ConfigError, match="cannot read"):
        read_workload(Path("nowhere.jsonl"))
