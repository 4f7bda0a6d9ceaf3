"""What comes out of three real pools is what one plain forward pass says."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.fleet import Served, served

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def pools():
    with served(prefill=2, decode=1, cache=1, model_fields={"max_model_len": 512}) as running:
        yield running


def cached(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def whole_blocks(prompt) -> int:
    """Tokens that a cached prefix can stand in for: whole blocks, and the last token is always computed."""
    return (len(prompt) - 1) // 64 * 64


def ask_all(pools: Served, prompts, num_tokens=NUM_TOKENS, workers=16):
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda prompt: pools.token_ids(prompt, num_tokens), prompts))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_prompts", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_greedy_tokens_equal_a_plain_forward_pass_on_a_miss_and_on_a_hit(pools, oracle, prompts, num_prompts):
    asked = prompts(num_prompts, seed=num_prompts)
    cold = ask_all(pools, asked)
    for prompt, answer in zip(asked, cold, strict=True):
        assert len(answer) == NUM_TOKENS
        oracle.check(prompt, answer)
    warm = ask_all(pools, asked)
    assert warm == cold
    pools.assert_conserved()
    values = pools.reports()
    assert sum(values[each]["local_hit_tokens"] for each in ("prefill-0", "prefill-1")) > 0


@pytest.mark.timeout(120)
def test_pools_that_draft_give_the_tokens_of_a_plain_forward_pass_and_count_their_drafts(oracle, prompts):
    """C12, on one prefill and one decode instance: drafts start from the hidden state that came with the blocks."""
    with served(prefill=1, decode=1, instance={"num_speculative_tokens": 2},
                model_fields={"max_model_len": 512}) as pools:
        asked = prompts(12, seed=9)
        for prompt, answer in zip(asked, ask_all(pools, asked, 24, workers=8), strict=True):
            assert len(answer) == 24
            oracle.check(prompt, answer)
        pools.wait_for(lambda: pools.reports()["decode-0"]["finished"] == 12)
        values = pools.reports()["decode-0"]
        assert 0 < values["accepted_tokens:position=1"] < values["drafted_tokens:position=1"]
        assert values["draft_alarm"] == 0 and "drafted_tokens:position=1" not in pools.reports()["prefill-0"]
        pools.assert_conserved()


def test_a_prefix_that_one_instance_computed_is_a_hit_on_another(pools, prompts):
    """Stateless scheduling: any instance can serve any request, because context lives in the pool."""
    prompt = prompts(1, seed=2, shortest=190)[0]
    first = pools.complete(prompt)
    assert cached(first) == 0
    pools.wait_for(lambda: pools.reports()["prefill-0"]["stored_blocks"] > 0)
    before = pools.reports()["prefill-1"]["pool_hit_tokens"]
    pools.pause("prefill-0")
    try:
        pools.wait_for(lambda: pools.state("prefill-0") == "down")
        again = pools.complete(prompt)
        assert cached(again) == whole_blocks(prompt)
        assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        pools.wait_for(lambda: pools.reports()["prefill-1"]["pool_hit_tokens"] - before == whole_blocks(prompt))
    finally:
        pools.resume("prefill-0")
    pools.wait_for(lambda: pools.state("prefill-0") == "up")


def test_a_flushed_cache_is_a_miss(pools, prompts):
    prompt = prompts(1, seed=3, shortest=190)[0]
    expected = pools.token_ids(prompt)
    assert pools.http.post("/flush_cache").status_code == 200
    answer = pools.complete(prompt)
    assert cached(answer) == 0
    assert answer["choices"][0]["token_ids"] == expected


def test_cached_tokens_are_reported_the_same_streamed_or_not(pools, prompts):
    prompt = prompts(1, seed=4, shortest=190)[0]
    pools.complete(prompt)
    whole = pools.complete(prompt)["usage"]
    events = list(pools.stream(prompt, stream_options={"include_usage": True}))
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole
    assert whole["prompt_tokens_details"]["cached_tokens"] == whole_blocks(prompt)


def test_tenants_do_not_see_each_others_prefixes(pools, prompts):
    prompt = prompts(1, seed=5, shortest=190)[0]
    pools.complete(prompt, cache_salt="one")
    other = pools.complete(prompt, cache_salt="two")
    same = pools.complete(prompt, cache_salt="one")
    assert cached(other) == 0
    assert cached(same) == whole_blocks(prompt)


def test_a_streamed_answer_equals_the_whole_one(pools, prompts):
    prompt = prompts(1, seed=6)[0]
    assert list(pools.stream_ids(prompt)) == pools.token_ids(prompt)


def test_a_seed_gives_the_same_tokens_whatever_else_runs(pools, prompts):
    prompt = prompts(1, seed=7, shortest=30)[0]
    alone = pools.token_ids(prompt, temperature=1.0, seed=5)
    with ThreadPoolExecutor(8) as pool:
        crowd = [pool.submit(pools.token_ids, each) for each in prompts(8, seed=8)]
        crowded = pools.token_ids(prompt, temperature=1.0, seed=5)
        for each in crowd:
            each.result()
    assert crowded == alone
    assert pools.token_ids(prompt, temperature=1.0, seed=6) != alone


def test_choices_differ_and_repeat_with_the_seed(pools, prompts):
    prompt = prompts(1, seed=9)[0]
    first = pools.complete(prompt, n=3, temperature=1.0, seed=7)
    again = pools.complete(prompt, n=3, temperature=1.0, seed=7)
    texts = [tuple(choice["token_ids"]) for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [tuple(choice["token_ids"]) for choice in again["choices"]]
    assert first["usage"]["prompt_tokens"] == len(prompt)
    assert first["usage"]["completion_tokens"] == 3 * 16


def test_log_probabilities_are_those_of_the_chosen_tokens(pools, prompts):
    prompt = prompts(1, seed=10)[0]
    choice = pools.complete(prompt, 4, logprobs=3)["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    for chosen, best in zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
        assert chosen == pytest.approx(max(best.values()), abs=1e-5)
        assert chosen < 0


def test_a_prompt_can_be_scored(pools):
    prompt = [20, 30, 40, 50]
    choice = pools.complete(prompt, 1, echo=True, logprobs=1)["choices"][0]
    scores = choice["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert len(scores) == 5
    assert all(score < 0 for score in scores[1:])


def test_the_window_is_enforced_to_the_token(pools):
    window = pools.info()["max_model_len"]
    body = {"model": "tripool-tiny", "temperature": 0}
    fits = pools.http.post("/v1/completions", json={**body, "prompt": [20] * (window - 1)}).json()
    assert fits["usage"]["completion_tokens"] == 1
    assert fits["choices"][0]["finish_reason"] == "length"
    over = pools.http.post("/v1/completions", json={**body, "prompt": [20] * window})
    assert over.status_code == 400
    assert over.json()["error"]["code"] == "context_length_exceeded"


def test_after_everything_nothing_is_held(pools):
    pools.assert_conserved()


def test_every_process_has_metrics(pools, prompts):
    pools.complete(prompts(1, seed=11)[0])
    page = pools.http.get("/metrics").text
    for name in ("tripool:time_to_first_token_seconds", "tripool:member_up", "tripool:member_num_free_blocks",
                 "tripool:member_weight_bytes", "tripool:member_resident_bytes"):
        assert name in page, name
    for member in ("prefill-0", "decode-0"):
        port = int(pools.reports()[member]["metrics_port"])
        own = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert f'tripool:steps_total{{member="{member}"' in own
        assert "process_resident_memory_bytes" in own


@pytest.mark.timeout(240)
def test_a_hybrid_instance_gives_the_same_tokens(pools, prompts):
    asked = prompts(12, seed=12)
    expected = ask_all(pools, asked)
    with served(hybrid=1) as hybrid:
        assert ask_all(hybrid, asked) == expected
        hybrid.assert_conserved()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("instance", [
    pytest.param({"ranks": 2, "exchange": "collective", "redundant_experts": 2}, marks=pytest.mark.slow),
    pytest.param({"ranks": 3, "exchange": "direct", "redundant_experts": 3, "exchange_tokens": 16, "max_num_seqs": 16},
                 marks=pytest.mark.slow),
    {"ranks": 4, "exchange": "direct", "redundant_experts": 2, "shared_expert_copies": 2},
], ids=["collective", "direct in rounds, uneven", "direct with copies of the shared expert"])
def test_several_ranks_give_the_tokens_of_one(pools, prompts, instance):
    asked = prompts(6, seed=13, longest=60)
    expected = ask_all(pools, asked)
    with served(hybrid=1, instance=instance) as ranks:
        assert ask_all(ranks, asked) == expected
        ranks.assert_conserved()
