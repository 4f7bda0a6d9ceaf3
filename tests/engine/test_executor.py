"""Sections go in, tokens come out, and they are those of a plain forward pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import xxhash

from tests.checkpoints import tiny_config, write_checkpoint
from tests.engine.driver import BLOCK_TOKENS, GREEDY, Driver
from tests.engine.model.builders import build_model, random_tokens
from tests.engine.model.reference import build_reference, reference_logits
from tripool.core.plan import BlockRef, Grow, RankResult
from tripool.core.request import Sampling, unpack_tokens
from tripool.engine.executor import PROMPT_LOGPROB_ROWS
from tripool.engine.load import load_model
from tripool.engine.parallel.exchange import LocalExchange

CONFIG = tiny_config("v3", mtp=1)
SAMPLED = Sampling(temperature=0.8, top_p=0.95, presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.1,
                   seed=42)


@pytest.fixture(scope="module")
def model():
    return build_model(CONFIG)


@pytest.fixture(scope="module")
def exact_model():
    return build_model(CONFIG, deterministic=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return build_reference(CONFIG, tmp_path_factory.mktemp("reference"))[0]


def greedy(reference: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers generates."""
    with torch.inference_mode():
        found = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count, min_new_tokens=count,
                                   eos_token_id=None, pad_token_id=0)
    return found[0, len(prompt):].tolist()


def alone(model: Any, prompt: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    """The first tokens of a request that has the executor to itself."""
    driver = Driver(model)
    request = driver.join(0, prompt, sampling=sampling)
    driver.prefill(0)
    driver.decode(count - 1)
    return driver.output[request]


@pytest.mark.parametrize("family", ["v3", "v2", "v2-lite"])
def test_a_loaded_checkpoint_generates_what_transformers_does(tmp_path, family):
    config = tiny_config(family, yarn=True)
    reference, _ = build_reference(config, tmp_path / "reference")
    write_checkpoint(tmp_path / "ours", config, dtype="float32", num_shards=3)
    loaded = load_model(tmp_path / "ours")
    prompt = random_tokens(37)

    assert alone(loaded.model, prompt, 20) == greedy(reference, prompt, 20)


def test_rows_that_join_chunk_grow_and_leave_at_different_times_do_not_disturb_each_other(model, reference):
    prompts = {slot: random_tokens(length, seed=slot) for slot, length in enumerate((29, 5, 64, 1, 17))}
    driver = Driver(model)
    driver.join(0, prompts[0])
    driver.run({0: 10})
    driver.join(1, prompts[1])
    driver.join(2, prompts[2])
    driver.run({0: 10, 1: 5, 2: 3})
    driver.run({0: 9, 2: 30})
    result = driver.decode(4)
    driver.join(3, prompts[3])
    result = driver.run({2: 31, 3: 1}, grows=driver.grow(result))
    result = driver.run(leaves=[1], grows=driver.grow(result))
    driver.join(4, prompts[4])
    result = driver.run({4: 1}, grows=driver.grow(result))
    result = driver.run({4: 16}, grows=driver.grow(result))
    for _ in range(9):
        result = driver.run(grows=driver.grow(result))

    for slot, prompt in prompts.items():
        output = driver.output[100 + slot]
        assert len(output) >= 7
        assert output == greedy(reference, prompt, len(output)), f"slot {slot}"


def test_blocks_of_a_cached_prefix_serve_another_slot(model, reference):
    prefix, driver = random_tokens(3 * BLOCK_TOKENS), Driver(model)
    first, second = prefix + random_tokens(5, seed=1), prefix + random_tokens(9, seed=2)
    driver.join(0, first)
    driver.prefill(0, [11, 1000])

    driver.join(1, second, blocks=driver.blocks[0][:3], num_computed=len(prefix))
    result = driver.run({1: 4})
    result = driver.run({1: 5}, grows=driver.grow(result))
    for _ in range(9):
        result = driver.run(grows=driver.grow(result))

    for request, prompt in ((100, first), (101, second)):
        assert driver.output[request] == greedy(reference, prompt, len(driver.output[request]))


@pytest.mark.parametrize("length", [2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, 21])
def test_a_row_handed_over_by_its_blocks_goes_on_in_another_executor(model, reference, length):
    prompt = random_tokens(length)
    prefill, decode = Driver(model), Driver(model)
    prefill.join(0, prompt, decodes=False, room_to_decode=False)
    (left,) = prefill.prefill(0, [6, 1000]).left
    assert (left.slot, left.reason, left.num_computed) == (0, None, length)
    after = prefill.run()                             # it is gone, though it has a token to go on from
    assert after.num_decode_tokens == 0 and after.need == () and len(prefill.output[100]) == 1

    request = decode.join(3, prompt, output=prefill.output[100], num_computed=length, request_id=100)
    for source, target in zip(prefill.blocks[0], decode.blocks[3], strict=False):
        decode.cache.write_block(target, prefill.cache.read_block(source))
    decode.decode(12)

    assert decode.output[request] == greedy(reference, prompt, 13)


@pytest.mark.parametrize("decodes", [True, False])
def test_a_row_whose_chunk_left_one_token_computes_it_in_the_next_step_without_being_named(model, reference, decodes):
    prompt, driver = random_tokens(9), Driver(model)
    request = driver.join(0, prompt, decodes=decodes)
    driver.run({0: 8})
    driver.run()

    assert driver.output[request] == greedy(reference, prompt, 1)


def test_mtp_state_handed_over_is_that_of_a_row_that_never_moved(exact_model):
    prompt = random_tokens(19)
    stayed, prefill, decode = Driver(exact_model), Driver(exact_model), Driver(exact_model)
    stayed.join(0, prompt)
    stayed.prefill(0)
    stayed.decode(10)
    prefill.join(0, prompt, decodes=False)
    prefill.prefill(0, [3, 9, 1000])
    decode.join(0, prompt, output=prefill.output[100], num_computed=19)
    for source, target in zip(prefill.blocks[0], decode.blocks[0], strict=True):
        decode.cache.write_block(target, prefill.cache.read_block(source))
    decode.decode(10)

    assert decode.output[100] == stayed.output[100]
    for ours, theirs in zip(decode.blocks[0], stayed.blocks[0], strict=True):
        assert decode.cache.sum_block(ours) == stayed.cache.sum_block(theirs)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_second_attempt_goes_on_with_the_same_tokens(exact_model, sampling):
    prompt = random_tokens(20)
    whole = alone(exact_model, prompt, 30, sampling)

    driver = Driver(exact_model)
    driver.join(5, random_tokens(9, seed=7))
    driver.prefill(5)
    request = driver.join(2, prompt, output=whole[:11], sampling=sampling, attempt=2)
    driver.run({2: 7})
    result = driver.run({2: 1000})
    for _ in range(18):
        result = driver.run(grows=driver.grow(result))

    assert driver.output[request] == whole


def test_deterministic_results_are_the_same_bits_in_any_company(exact_model):
    sampling = Sampling(temperature=1.0, seed=9, num_logprobs=20)
    prompt = random_tokens(23)

    def logprobs(driver: Driver, result: RankResult) -> list[tuple]:
        found = [entry for emitted in result.emitted for entry in emitted.logprobs if entry.request_id == 7]
        return [(entry.start, entry.chosen, entry.top_ids, entry.top_values) for entry in found]

    quiet, busy = Driver(exact_model), Driver(exact_model)
    quiet.join(0, prompt, request_id=7, sampling=sampling)
    expected = logprobs(quiet, quiet.prefill(0))
    for _ in range(6):
        expected += logprobs(quiet, quiet.decode(1))
    for slot in (0, 1, 2):
        busy.join(slot, random_tokens(40 + slot, seed=slot), sampling=SAMPLED)
    busy.run({0: 40, 1: 13, 2: 20})
    busy.join(6, prompt, request_id=7, sampling=sampling)
    result = busy.run({1: 28, 6: 22})
    found = []
    for chunks in ({6: 1, 2: 5}, {2: 3}, {}, {2: 14}, {}, {}, {}):
        result = busy.run(chunks, grows=busy.grow(result))
        found += logprobs(busy, result)

    assert len(found) == 7
    assert found == expected


def test_a_stop_token_ends_a_row_and_is_the_last_it_emits(model):
    prompt = random_tokens(10)
    tokens = alone(model, prompt, 12)
    stop = tokens[5]
    end = tokens.index(stop)
    driver = Driver(model)
    request = driver.join(0, prompt, stops=[319, stop, 5, 6])
    driver.prefill(0)

    result = driver.decode(end)

    left = driver.left[request]
    assert driver.output[request] == tokens[:end + 1]
    assert (left.reason, left.stop_token) == ("stop", stop)
    assert unpack_tokens(left.tokens) == prompt + tokens[:end + 1]
    assert left.num_computed == len(prompt) + end
    assert result.need == () and driver.run().emitted == ()


def test_stop_tokens_are_not_chosen_below_the_minimum_length(model):
    prompt = random_tokens(10)
    stop = alone(model, prompt, 1)[0]
    driver = Driver(model)
    request = driver.join(0, prompt, stops=[stop], min_tokens=3)
    driver.prefill(0)
    driver.decode(40)

    assert stop not in driver.output[request][:3]


@pytest.mark.parametrize(("max_tokens", "max_model_len", "expected"), [(1, 256, 1), (6, 256, 6), (100, 31, 11)])
def test_a_row_ends_by_length(model, max_tokens, max_model_len, expected):
    prompt = random_tokens(20)
    driver = Driver(model, max_model_len=max_model_len)
    request = driver.join(0, prompt, max_tokens=max_tokens)
    driver.prefill(0)
    driver.decode(expected + 3)

    assert len(driver.output[request]) == expected
    assert driver.left[request].reason == "length"


def test_the_length_counts_what_an_earlier_attempt_emitted(model):
    prompt = random_tokens(10)
    driver = Driver(model)
    request = driver.join(0, prompt, output=random_tokens(4, seed=1), max_tokens=6)
    driver.prefill(0)
    driver.decode(5)

    assert len(driver.output[request]) == 6


def test_a_row_without_a_block_to_write_to_waits_until_it_gets_one(model):
    prompt = random_tokens(BLOCK_TOKENS)
    expected = alone(model, prompt, 4)
    driver = Driver(model)
    driver.join(0, prompt, room_to_decode=False)
    driver.join(1, random_tokens(3))
    result = driver.run({0: 1000, 1: 1000})
    assert result.need == (0,)

    result = driver.run()
    assert result.need == (0,) and result.num_decode_tokens == 1 and len(driver.output[100]) == 1
    driver.run(grows=driver.grow(result))
    driver.decode(2)

    assert driver.output[100] == expected


def test_a_row_may_get_more_blocks_than_its_table_was_made_for(model):
    driver = Driver(model, max_model_len=40)
    driver.join(0, random_tokens(10))
    driver.run({0: 1000}, grows=[Grow(0, tuple(driver.free.pop(0) for _ in range(20)))])

    assert driver.decode(3).num_decode_tokens == 1


def test_nothing_to_do_is_a_step_all_the_same(model):
    calls: list[int] = []

    class Counting(LocalExchange):
        def begin_dispatch(self, x_TD, slot_TK):
            calls.append(len(x_TD))
            return super().begin_dispatch(x_TD, slot_TK)

    driver = Driver(build_model(CONFIG, exchange=Counting()))

    assert driver.run() == RankResult()
    assert calls == [0, 0]                            # both layers with experts met the other ranks


def test_fresh_blocks_have_their_generation_published_before_they_are_written(model):
    driver = Driver(model)
    seen = []
    forward = model.forward

    class Spy:
        shape, dtype, logits = model.shape, model.dtype, model.logits

        def forward(self, batch, cache):
            seen.append(list(cache.generations))
            return forward(batch, cache)

    driver.executor.model = Spy()
    driver.join(0, random_tokens(5))
    block = driver.blocks[0][0]
    driver.run({0: 5}, fresh=[BlockRef(block, 77)])

    assert seen[0][block] == 77 and sum(seen[0]) == 77


def test_sealed_blocks_are_summed_after_the_step_hidden_state_included(model):
    driver = Driver(model)
    driver.join(0, random_tokens(2 * BLOCK_TOKENS))
    first, second = driver.blocks[0][:2]
    before = driver.run({0: BLOCK_TOKENS}, seals=[first]).sums
    result = driver.run({0: BLOCK_TOKENS}, seals=[second, first])

    assert before == ((first, xxhash.xxh3_64_intdigest(bytes(driver.cache.read_block(first)))),)
    assert result.sums == ((second, driver.cache.sum_block(second)), before[0])
    assert torch.isfinite(driver.cache.data[[first, second]]).all()
    driver.cache.hidden[first, 0] += 1
    assert driver.cache.sum_block(first) != before[0][1]


def test_each_gateway_gets_its_own_columns(model):
    driver = Driver(model)
    for slot, reply_to in ((0, "gateway"), (1, "other"), (2, "gateway")):
        driver.join(slot, random_tokens(4, seed=slot), reply_to=reply_to, attempt=slot + 1)
    result = driver.run({0: 4, 1: 4, 2: 4})

    rows = {emitted.reply_to: [row[:3] for row in emitted.columns.rows()] for emitted in result.emitted}
    assert rows == {"gateway": [(100, 1, 0), (102, 3, 0)], "other": [(101, 2, 0)]}
    assert result.num_chunk_tokens == 12 and result.num_decode_tokens == 0


def test_logprobs_are_those_of_the_model_whatever_is_sampled(model, reference):
    prompt = random_tokens(12)
    driver = Driver(model)
    driver.join(0, prompt, sampling=Sampling(temperature=2.0, seed=1, num_logprobs=4, logit_bias=((3, 50.0),)))
    driver.join(1, prompt, sampling=Sampling(seed=1))
    driver.join(2, prompt, sampling=Sampling(seed=1, num_logprobs=0))
    result = driver.run({0: 12, 1: 12, 2: 12})
    expected = reference_logits(reference, prompt)[-1].log_softmax(-1)

    with_top, chosen_only = result.emitted[0].logprobs
    assert (with_top.request_id, chosen_only.request_id) == (100, 102)
    assert driver.output[100] == [3]
    assert with_top.chosen[0] == pytest.approx(float(expected[3]), abs=1e-3)
    assert with_top.top_ids == (tuple(expected.topk(4).indices.tolist()),)
    assert with_top.top_values[0] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-3)
    assert chosen_only.chosen[0] == pytest.approx(float(expected[driver.output[102][0]]), abs=1e-3)
    assert chosen_only.top_ids == ((),)


@pytest.mark.parametrize("sizes", [[1000], [1, 1000], [70, 3, 1, 26], [99, 1]])
def test_prompt_logprobs_go_on_across_chunks(model, reference, sizes):
    prompt = random_tokens(100)
    assert len(prompt) > PROMPT_LOGPROB_ROWS
    driver = Driver(model)
    driver.join(0, prompt, sampling=Sampling(temperature=0.0, num_prompt_logprobs=2))
    expected = reference_logits(reference, prompt).log_softmax(-1)
    found = []
    for size in sizes:
        result = driver.run({0: size})
        found += [entry for emitted in result.emitted for entry in emitted.prompt_logprobs]
    after = driver.decode(1)

    chosen, top_ids = [], []
    for entry in found:
        assert entry.start == len(chosen) + 1
        chosen += entry.chosen
        top_ids += entry.top_ids
    assert chosen == pytest.approx([float(expected[i, prompt[i + 1]]) for i in range(99)], abs=1e-3)
    assert top_ids == [tuple(expected[i].topk(2).indices.tolist()) for i in range(99)]
    assert all(math.isfinite(value) for entry in found for row in entry.top_values for value in row)
    assert after.emitted[0].prompt_logprobs == ()


def test_after_a_reset_the_slots_are_free_again(model):
    driver = Driver(model)
    driver.join(0, random_tokens(10))
    driver.prefill(0)
    driver.executor.reset()

    assert driver.run() == RankResult()
    request = driver.join(0, random_tokens(11, seed=3), request_id=555)
    driver.prefill(0)
    assert driver.output[request] == alone(model, random_tokens(11, seed=3), 1)
