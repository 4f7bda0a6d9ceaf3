"""Drafts decide how many tokens a step brings, never which: whatever is guessed, tokens are those of plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.engine.driver import GREEDY, Driver
from tests.engine.model.builders import build_model, new_cache, new_row, pack_batch, random_tokens, relative_error, step
from tests.engine.model.reference import build_reference
from tests.engine.test_microbatches import Failing
from tripool.api.tokenizer import load_tokenizer
from tripool.core.errors import ConfigError
from tripool.core.request import Sampling
from tripool.engine.load import load_model
from tripool.engine.model.deepseek import DeepseekModel
from tripool.engine.ops import native
from tripool.engine.parallel.exchange import LocalExchange
from tripool.quant.calibrate import HELD_OUT, read_texts
from tripool.serve.models import EMBEDDED

CONFIG = tiny_config("v3", mtp=1)
VOCAB = 320
WARM = Sampling(temperature=0.8, top_p=0.95, seed=42, num_logprobs=3)
PENALISED = replace(WARM, presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.1)
BIASED = replace(WARM, logit_bias=((7, 4.0), (9, -100.0)), num_prompt_logprobs=1)
KINDS = (replace(GREEDY, num_logprobs=5), WARM, PENALISED, BIASED)


@pytest.fixture(scope="module")
def exact_model():
    return build_model(CONFIG, deterministic=True, exchange=Failing(), drafts=True)


@pytest.fixture(scope="module")
def alone_model():
    """The same on a rank that is alone: forward passes, drafts and choices are one call each."""
    return build_model(CONFIG, deterministic=True, drafts=True)


@pytest.fixture(scope="module")
def embedded():
    return load_model(EMBEDDED, deterministic=True, drafts=True).model


# ---- the layer


def test_the_layer_is_one_of_transformers_on_joined_inputs(tmp_path):
    """Its weights in a model of one layer, whose input is what the definition joins; position 0 is not there."""
    tensors, last = random_tensors(CONFIG), f"model.layers.{CONFIG['num_hidden_layers']}."
    alone = tiny_config("v3", num_hidden_layers=1, first_k_dense_replace=0)
    reference, _ = build_reference(alone, tmp_path)
    renamed = {"model.layers.0." + name.removeprefix(last): value for name, value in tensors.items()
               if name.startswith(last)}
    renamed["model.norm.weight"] = tensors[last + "shared_head.norm.weight"]
    write_checkpoint(tmp_path / "alone", alone, dtype="float32", num_shards=1, change=renamed.get)
    reference = type(reference).from_pretrained(tmp_path / "alone", dtype=torch.float32, attn_implementation="eager")
    model, tokens = build_model(CONFIG, tensors=tensors, drafts=True), random_tokens(45)
    cache, row = new_cache(model), new_row(tokens)
    hidden = model.forward(step([row], [44]), cache)

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * tensors[last + weight]

    joined = torch.cat([norm(tensors["model.embed_tokens.weight"][tokens[1:]], "enorm.weight"),
                        norm(hidden, "hnorm.weight")], -1) @ tensors[last + "eh_proj.weight"].T
    with torch.inference_mode():
        found = reference.model(inputs_embeds=joined.unsqueeze(0), position_ids=torch.arange(1, 45).unsqueeze(0),
                                use_cache=False).last_hidden_state[0]

    for position in (5, 16, 31, 32, 44):
        cache, row = new_cache(model), new_row(tokens)
        model.forward(step([row], [position]), cache)
        batch = pack_batch([([tokens[position]], position, row.blocks[:position // 16 + 1])], num_decode_rows=1)
        ours = model.draft(batch, cache, hidden[position - 1:position])
        assert relative_error(ours[0], found[position - 1]) < 2e-4, f"position {position}"


def test_a_model_without_the_layer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"num_speculative_tokens .* has no MTP layer"):
        build_model(tiny_config("v3"), drafts=True)
    write_checkpoint(tmp_path, tiny_config("v2"))
    with pytest.raises(ConfigError, match="has no MTP layer"):
        load_model(tmp_path, drafts=True)


def counting(calls, *, is_alone):
    """An exchange that writes down how many tokens each call brings."""
    class Counting(LocalExchange):
        def begin_dispatch(self, x_TD, slot_TK):
            calls.append(len(x_TD))
            return super().begin_dispatch(x_TD, slot_TK)

    exchange = Counting()
    exchange.is_alone = is_alone
    return exchange


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_rank_without_rows_meets_the_others_in_every_draft(num_drafts):
    calls: list[int] = []
    driver = Driver(build_model(CONFIG, exchange=counting(calls, is_alone=False), drafts=True), num_drafts=num_drafts)
    driver.run()
    assert calls == [0] * (num_drafts + 2)
    driver.join(0, random_tokens(10))
    driver.run({0: 10})
    del calls[:]
    driver.run(grows=driver.grow(driver.last))
    assert calls == [1] * num_drafts + [1 + num_drafts] * 2


def test_a_rank_that_is_alone_runs_the_layer_for_rows_only():
    calls: list[int] = []
    driver = Driver(build_model(CONFIG, exchange=counting(calls, is_alone=True), drafts=True), num_drafts=3)
    driver.join(0, random_tokens(10), max_tokens=3)
    driver.run({0: 10})
    assert calls == [10, 10], "a prompt, and nobody to draft for"
    del calls[:]
    driver.run(grows=driver.grow(driver.last))
    assert calls == [1, 2, 2], "one token and one draft are all that is left"


@pytest.mark.skipif(not native.is_built(), reason="the native module is not built")
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_drafts_guessed_in_one_call_are_those_guessed_one_by_one(alone_model, monkeypatch, sampling):
    """Rows of different lengths, with fewer and fewer drafts, some across the end of a block."""
    driver, seen = Driver(alone_model, num_drafts=4), []
    driver.executor._decode_at_once = lambda: None
    drafter, draft, calls = driver.executor._drafter, DeepseekModel.draft, []
    guess = drafter.guess
    monkeypatch.setattr(DeepseekModel, "draft", lambda *each: calls.append(each) or draft(*each))

    def both(slots_R, first_R, num_drafts_R, token_R, block_RB):
        given = (slots_R, first_R, num_drafts_R, token_R, block_RB)
        found, num_calls = guess(*given), len(calls)
        with monkeypatch.context() as patch:
            patch.setattr(DeepseekModel, "guess", lambda *_: None)
            assert np.array_equal(found, guess(*given))
        assert num_calls == 0 and len(calls) == num_drafts_R.max(initial=0), "not in one call"
        calls.clear()
        seen.append(tuple(num_drafts_R.tolist()))
        return found

    monkeypatch.setattr(drafter, "guess", both)
    for slot, length in enumerate((21, 7, 16, 1)):
        driver.join(slot, random_tokens(length, seed=slot), sampling=replace(sampling, seed=slot),
                    max_tokens=14 - 3 * slot)
        driver.prefill(slot)
    while len(driver.left) < 4:
        driver.run(grows=driver.grow(driver.last))
    assert any(len(set(each)) > 2 for each in seen) and (4, 4, 4, 3) in seen, "too few kinds of steps"


# ---- any mix of rows


def mend(driver, answers, share, rng):
    """Have guesses right in a share of cases: the layer runs, then what it guessed is replaced."""
    drafter = driver.executor._drafter
    guess = drafter.guess

    def mended(slots_R, first_R, num_drafts_R, token_R, block_RB):
        draft_RJ = guess(slots_R, first_R, num_drafts_R, token_R, block_RB)
        for row, slot in enumerate(slots_R.tolist()):
            for draft in range(num_drafts_R[row]):
                known = answers[driver.joins[slot].request_id]
                position = int(first_R[row]) + 1 + draft
                right = known[position] if position < len(known) else 0
                draft_RJ[row, draft] = right if rng.random() < share else (right + 1) % VOCAB
        return draft_RJ

    drafter.guess = mended
    driver.executor._decode_at_once = lambda: None         # there nobody but the layer guesses


def wishes(seed, kinds):
    """Some requests: prompt, and what they ask for."""
    rng = random.Random(seed)
    found = []
    for number in range(6):
        prompt = random_tokens(rng.choice((1, 5, 8, 17, 30)), seed=100 * seed + number)
        options = dict(sampling=replace(kinds[number % len(kinds)], seed=seed + number),
                       max_tokens=rng.randint(1, 24), stops=rng.sample(range(VOCAB), 12) if number % 2 else (),
                       min_tokens=rng.choice((0, 0, 6)))
        found.append((prompt, options))
    return found


def plain(model, prompt, options):
    """A request that has the engine to itself, without drafting."""
    driver = Driver(model)
    request = driver.join(0, prompt, **options)
    driver.prefill(0)
    said = {}
    hear(driver.last, said)
    while request not in driver.left:
        hear(driver.run(grows=driver.grow(driver.last)), said)
    return driver, request, said


def hear(result, said):
    """Log-probabilities by request, kind and place."""
    for emitted in result.emitted:
        for kind in ("logprobs", "prompt_logprobs"):
            for each in getattr(emitted, kind):
                for at, value in enumerate(zip(each.chosen, each.top_ids, each.top_values, strict=True)):
                    place = (each.request_id, kind, each.start + at)
                    assert place not in said, "told twice"
                    said[place] = value


def computed(driver, blocks, num_computed):
    """All that a row has left in the cache."""
    width, entries = driver.cache.block_tokens, []
    for layer in range(driver.cache.shape.num_cached_layers):
        entries.append(driver.cache.entries(layer)[blocks].flatten(0, 1)[:num_computed].flatten())
    entries.append(driver.cache.hidden[blocks[:-(-num_computed // width)]].flatten())
    return torch.cat(entries)


@pytest.mark.parametrize(("seed", "num_drafts", "share", "num_microbatches", "fails"), [
    (0, 1, 0.7, 1, 0.0), (1, 3, 0.8, 1, 0.0), (2, 2, 0.5, 2, 0.0), (3, 3, 0.9, 1, 0.25), (4, 2, 0.8, 2, 0.25),
    (5, 8, 0.95, 1, 0.1), (6, 1, 0.0, 1, 0.0), (7, 4, 1.0, 1, 0.0), (8, 3, 0.8, 1, 0.0), (9, 1, 0.5, 1, 0.0)])
def test_any_mix_of_rows_gets_the_tokens_logprobs_and_entries_of_plain_decoding(
        exact_model, alone_model, seed, num_drafts, share, num_microbatches, fails):
    rng = random.Random(seed)
    asked = wishes(seed, KINDS if seed < 7 else KINDS[:2])         # with the last two, tokens come one after the other
    alone = [plain(exact_model, prompt, options) for prompt, options in asked]
    model = alone_model if num_microbatches == 1 and not fails else exact_model
    answers = {100 + slot: [*asked[slot][0], *driver.output[request]]
               for slot, (driver, request, _) in enumerate(alone)}
    driver = Driver(model, num_drafts=num_drafts, num_microbatches=num_microbatches)
    mend(driver, answers, share, rng)
    waiting, missing, said, blocks = list(range(6)), {}, {}, {}
    while len(driver.left) < 6 or any(left.reason is None for left in driver.left.values()):
        for slot in [each for each in waiting if rng.random() < 0.4]:
            waiting.remove(slot)
            prompt, options = asked[slot]
            driver.join(slot, prompt, **options)
            missing[slot] = len(prompt)
        chunks = {}
        for slot in list(missing):
            size = min(missing[slot], rng.randint(1, 12))
            if missing[slot] > 1 and rng.random() < 0.8:
                chunks[slot], missing[slot] = size, missing[slot] - size
            if missing.get(slot) in (0, 1):
                del missing[slot]                        # one token left: it computes it without being named
        last = driver.last if rng.random() < 0.8 else replace(driver.last, want=())
        grows = driver.grow(last)
        exact_model.moe_blocks[0].exchange.countdown = rng.randint(1, 30) if rng.random() < fails else 1 << 40
        result = driver.run(chunks, grows=grows)         # nothing of another model fails
        exact_model.moe_blocks[0].exchange.countdown = 1 << 40
        if result.aborted:
            assert not result.emitted
            result = driver.run(chunks)
        hear(result, said)
        blocks |= {slot: list(driver.blocks[slot]) for slot in driver.blocks}
    for slot, (solo, request, told) in enumerate(alone):
        left, expected = driver.left[100 + slot], solo.left[request]
        assert driver.output[100 + slot] == solo.output[request], f"slot {slot}"
        assert (left.reason, left.stop_token, left.tokens, left.num_computed) == (
            expected.reason, expected.stop_token, expected.tokens, expected.num_computed)
        assert {place[1:]: value for place, value in said.items() if place[0] == 100 + slot} == {
            place[1:]: value for place, value in told.items()}
        assert torch.equal(computed(driver, blocks[slot], left.num_computed),
                           computed(solo, solo.blocks[0], left.num_computed)), f"slot {slot}"


def test_right_guesses_save_steps_and_are_counted():
    model = build_model(CONFIG, drafts=True)
    driver, prompt = Driver(model, num_drafts=3), random_tokens(10)
    solo = Driver(model)
    solo.join(0, prompt)
    solo.prefill(0)
    solo.decode(20)
    mend(driver, {100: [*prompt, *solo.output[100]]}, 1.0, random.Random(0))
    driver.join(0, prompt, max_tokens=14)
    driver.prefill(0)
    results = []
    while 100 not in driver.left:
        results.append(driver.run(grows=driver.grow(driver.last)))

    assert driver.output[100] == solo.output[100][:14]
    assert [result.num_decode_tokens for result in results] == [4, 4, 4, 1]
    assert [result.num_drafted for result in results] == [(1, 1, 1)] * 3 + [(0, 0, 0)]
    assert [result.num_accepted for result in results] == [(1, 1, 1)] * 3 + [(0, 0, 0)]


def test_a_row_drafts_as_far_as_it_has_blocks_and_asks_for_more():
    model = build_model(CONFIG, drafts=True)
    driver = Driver(model, num_drafts=3)
    driver.join(0, random_tokens(13))                    # two blocks of 8: positions 13, 14 and 15 are free
    result = driver.run({0: 13})
    assert (result.need, result.want) == ((), (0,))
    result = driver.run()
    assert result.num_drafted == (1, 1, 0)
    result = driver.run(grows=driver.grow(result))
    assert result.num_drafted == (1, 1, 1) and result.want == ()


def test_a_request_may_go_without_drafts():
    driver = Driver(build_model(CONFIG, drafts=True), num_drafts=2)
    driver.join(0, random_tokens(9), sampling=replace(GREEDY, drafts=False))
    driver.join(1, random_tokens(9))
    driver.run({0: 9, 1: 9})
    result = driver.run(grows=driver.grow(driver.last))
    assert result.num_drafted == (1, 1) and len(driver.output[100]) == 2


def test_a_row_that_leaves_with_its_token_is_not_drafted_for():
    driver = Driver(build_model(CONFIG, drafts=True), num_drafts=2)
    driver.join(0, random_tokens(9), decodes=False)
    driver.run({0: 8})
    result = driver.run()
    assert result.num_drafted == (0, 0) and len(driver.output[100]) == 1 and result.want == ()


# ---- distribution


@pytest.mark.parametrize("num_samples", [4000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_sampled_tokens_have_the_distribution_of_the_model(num_samples):
    """C12: three tokens of a vocabulary of five, the drafted ones among them; 125 cells."""
    config, count, prompt = tiny_config("v3", mtp=1, vocab_size=5), 250, [3, 4, 3]
    model = build_model(config, tensors=random_tensors(config, std=0.15), drafts=True)
    seen, accepted, drafted = np.zeros((5, 5, 5)), 0, 0
    for start in range(0, num_samples, count):
        driver = Driver(model, num_drafts=2, max_num_seqs=count, num_blocks=2 * count, max_model_len=16)
        for slot in range(count):
            driver.join(slot, prompt, sampling=Sampling(temperature=0.8, seed=start + slot), max_tokens=3)
        driver.run(dict.fromkeys(range(count), 3))
        while len(driver.left) < count:
            result = driver.run(grows=driver.grow(driver.last))
            accepted, drafted = accepted + sum(result.num_accepted), drafted + sum(result.num_drafted)
        for output in driver.output.values():
            seen[tuple(output)] += 1
    expected = np.zeros((5, 5, 5))

    def follow(tokens, share):
        if len(tokens) == 3:
            expected[tuple(tokens)] = share
            return
        cache, row = new_cache(model), new_row([*prompt, *tokens])
        logits = model.logits(model.forward(step([row], [len(row.tokens)]), cache)[-1:])[0]
        for token, each in enumerate((logits / 0.8).softmax(-1).tolist()):
            follow([*tokens, token], share * each)

    follow([], float(num_samples))
    large = expected >= 5
    statistic = ((seen - expected)[large] ** 2 / expected[large]).sum()
    freedom = int(large.sum()) - 1
    assert freedom > 40 and 0.1 < accepted / drafted < 0.95
    assert statistic < freedom + 3.1 * (2 * freedom) ** 0.5, "beyond the 99.9th percentile"


# ---- the embedded model


STORIES = ("Once upon a time", "Once upon a time there was a small", "One day a girl", "The cat and the dog",
           "Once there was a boy who", "Long ago", "A little bird", "In the morning")


@pytest.fixture(scope="module")
def prompts(embedded):
    tokenizer = load_tokenizer(EMBEDDED)
    return [[embedded.shape.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)] for text in STORIES]


def continue_all(model, prompts, num_drafts, *, sampling=GREEDY, count=40):
    """Tokens, log-probabilities, and by position how many drafts there were and were right."""
    driver, said, counted = Driver(model, num_drafts=num_drafts, num_blocks=96), {}, np.zeros((2, num_drafts), int)
    for slot, prompt in enumerate(prompts):
        driver.join(slot, prompt, sampling=replace(sampling, seed=slot), max_tokens=count)
    hear(driver.run({slot: len(prompt) for slot, prompt in enumerate(prompts)}), said)
    while len(driver.left) < len(prompts):
        result = driver.run(grows=driver.grow(driver.last))
        hear(result, said)
        counted += np.array([result.num_drafted, result.num_accepted])
    return driver.output, said, counted


def continue_plainly(model, prompts, **options):
    driver, said = Driver(model, num_blocks=96), {}
    sampling = options.pop("sampling", GREEDY)
    for slot, prompt in enumerate(prompts):
        driver.join(slot, prompt, sampling=replace(sampling, seed=slot), max_tokens=40)
    hear(driver.run({slot: len(prompt) for slot, prompt in enumerate(prompts)}), said)
    while len(driver.left) < len(prompts):
        hear(driver.run(grows=driver.grow(driver.last)), said)
    return driver.output, said


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_the_embedded_model_accepts_most_drafts_of_its_own_text(embedded, prompts, batch, num_drafts):
    """C12: tokens as without, log-probabilities within 1e-4; C11: acceptance above a floor."""
    asked = replace(GREEDY, num_logprobs=5)
    expected, told = continue_plainly(embedded, prompts[:batch], sampling=asked)
    output, said, (drafted, accepted) = continue_all(embedded, prompts[:batch], num_drafts, sampling=asked)

    assert output == expected
    assert said.keys() == told.keys()
    for place, (chosen, ids, values) in said.items():
        assert chosen == pytest.approx(told[place][0], abs=1e-4) and chosen != 0.0
        assert ids == told[place][1] and values == pytest.approx(told[place][2], abs=1e-4)
    assert accepted[0] > 0.6 * drafted[0]


def test_drafts_are_right_at_temperature_too(embedded, prompts):
    output, _, (drafted, accepted) = continue_all(embedded, prompts, 1, sampling=Sampling(temperature=1.0))

    assert output == continue_plainly(embedded, prompts, sampling=Sampling(temperature=1.0))[0]
    assert accepted[0] > 0.4 * drafted[0]


def test_a_row_handed_over_drafts_at_once_like_one_that_never_moved(embedded, prompts):
    """C12: the hidden state came with the blocks."""
    stayed, prefill, decode = (Driver(embedded, num_drafts=num) for num in (2, 0, 2))
    for prompt, driver in ((prompts[0], stayed), (prompts[0], prefill)):
        driver.join(0, prompt, decodes=driver is stayed)
        driver.prefill(0)
    decode.join(0, prompts[0], output=prefill.output[100], num_computed=len(prompts[0]))
    for source, target in zip(prefill.blocks[0], decode.blocks[0], strict=True):
        decode.cache.write_block(target, prefill.cache.read_block(source))
    counted = []
    for driver in (stayed, decode):
        results = [driver.run(grows=driver.grow(driver.last)) for _ in range(16)]
        counted.append([result.num_accepted for result in results])

    assert decode.output == stayed.output
    assert counted[0] == counted[1] and sum(first for first, _ in counted[0]) > 8


def handed_over(model, prompts, num_drafts, *, sampling, count):
    """Rows that decode where they were not prefilled: blocks with their hidden states are all that comes along."""
    prefill, decode = Driver(model, num_blocks=96), Driver(model, num_drafts=num_drafts, num_blocks=96)
    said, counted = {}, np.zeros((2, num_drafts), int)
    for slot, prompt in enumerate(prompts):
        prefill.join(slot, prompt, sampling=sampling, max_tokens=count, decodes=False)
    hear(prefill.run({slot: len(prompt) for slot, prompt in enumerate(prompts)}), said)
    for slot, prompt in enumerate(prompts):
        decode.join(slot, prompt, output=prefill.output[100 + slot], num_computed=len(prompt), sampling=sampling,
                    max_tokens=count)
        for source, target in zip(prefill.blocks[slot], decode.blocks[slot], strict=False):
            decode.cache.write_block(target, prefill.cache.read_block(source))
    while len(decode.left) < len(prompts):
        result = decode.run(grows=decode.grow(decode.last))
        hear(result, said)
        counted += np.array([result.num_drafted, result.num_accepted])
    return decode.output, said, counted


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("batch", [1, 8])
def test_fifty_prompts_get_the_tokens_and_logprobs_of_plain_decoding_wherever_they_are_drafted_for(embedded, batch):
    """C12: colocated, and handed over from a prefill instance; alone, and in batches."""
    asked, texts = replace(GREEDY, num_logprobs=5), read_texts(HELD_OUT, EMBEDDED, embedded.shape.vocab_size, 1 << 20)
    texts = [text[:10 + 3 * number % 31] for number, text in enumerate(texts[:50])]
    assert len(texts) == 50
    counts = np.zeros((2, 2), int)
    for first in range(0, 50, batch):
        prompts = texts[first:first + batch]
        expected, told = continue_plainly(embedded, prompts, sampling=asked)
        for place, (run, options) in enumerate([(continue_all, {}), (handed_over, {"count": 40})]):
            output, said, counted = run(embedded, prompts, 1, sampling=asked, **options)
            assert output == expected
            assert said.keys() == told.keys()
            for key, (chosen, ids, values) in said.items():
                assert chosen == pytest.approx(told[key][0], abs=1e-4)
                assert chosen != 0.0 or told[key][0] == 0.0, "a zero that is no certainty"
                assert ids == told[key][1] and values == pytest.approx(told[key][2], abs=1e-4)
            counts[place] += counted[:, 0]
    acceptance = counts[:, 1] / counts[:, 0]
    assert acceptance.min() > 0.5 and abs(acceptance[0] - acceptance[1]) < 0.02


def test_a_layer_with_its_own_embedding_and_head_drafts_like_one_that_shares_them(tmp_path, prompts):
    """C11. The published copies repeat the main ones; the embedded model has none."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((EMBEDDED / name).read_bytes())
    tensors = load_file(EMBEDDED / "model.safetensors")
    last = "model.layers.6."
    tensors[last + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[last + "shared_head.head.weight"] = tensors.get("lm_head.weight", tensors[
        "model.embed_tokens.weight"]).clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    counted = [continue_all(load_model(folder, dtype="float32", drafts=True).model, prompts[:2], 1)[2].tolist()
               for folder in (EMBEDDED, tmp_path)]

    assert counted[0] == counted[1] and counted[0][1][0] > 0
