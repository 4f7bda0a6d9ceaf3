"""A decode step in one call is, to the bit, the step that the executor takes one thing after the other."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.checkpoints import tiny_config
from tests.engine.driver import GREEDY, Driver
from tests.engine.model.builders import build_model, random_tokens
from tripool.api.tokenizer import load_tokenizer
from tripool.core.plan import Grow
from tripool.core.request import Sampling
from tripool.engine.load import load_model
from tripool.engine.ops import native
from tripool.serve.models import EMBEDDED

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the native module is not built")

WARM = Sampling(temperature=0.8, top_p=0.95, top_k=50)
PLAIN = (GREEDY, WARM, replace(WARM, drafts=False))
OTHERS = (replace(WARM, num_logprobs=2), replace(GREEDY, presence_penalty=0.5))
TEXTS = ("Once upon a time there was a", "The cat and", "One day, a girl named Lily found a key. She", "Tom")


@pytest.fixture(scope="module")
def embedded():
    """It guesses most of its own text right."""
    return load_model(EMBEDDED, drafts=True).model


@pytest.fixture(scope="module")
def with_int8_head():
    return load_model(EMBEDDED, drafts=True, int8_head=True).model


@pytest.fixture(scope="module")
def without_mtp():
    return build_model(tiny_config("v2-lite"))


def noted(driver, calls):
    """Count steps that are done in one call, and those that are not."""
    at_once = driver.executor._decode_at_once

    def note():
        brought = at_once()
        calls.append(brought is not None)
        return brought

    driver.executor._decode_at_once = note


def wishes(seed, vocabulary):
    """Some requests: the slot each wants, its prompt, and what it asks for."""
    rng, tokenizer, found = random.Random(seed), load_tokenizer(EMBEDDED), []
    for number in range(20):
        prompt = ([0, *tokenizer.encode(rng.choice(TEXTS), add_special_tokens=False)] if vocabulary > 1000
                  else random_tokens(rng.choice((1, 7, 8, 16)), seed=number))
        found.append((number % 6, prompt, dict(
            request_id=number, max_tokens=rng.randint(1, 50),
            sampling=replace(rng.choice(OTHERS if rng.random() < 0.15 else PLAIN), seed=number),
            stops=rng.sample(range(vocabulary), 30) if number % 3 == 0 else (), min_tokens=rng.choice((0, 0, 5)),
            reply_to=rng.choice(("gateway", "another")), decodes=rng.random() < 0.9)))
    return found


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_in_one_call_is_the_step_in_many(embedded, seed, num_drafts):
    compare(embedded, seed, num_drafts, embedded.shape.vocab_size)


def test_a_model_without_mtp_layer_decodes_in_one_call_too(without_mtp):
    compare(without_mtp, 5, 0, without_mtp.shape.vocab_size)


def test_a_model_with_a_rounded_head_drafts_and_decodes_in_one_call_too(with_int8_head):
    compare(with_int8_head, 6, 2, with_int8_head.shape.vocab_size)


def compare(model, seed, num_drafts, vocabulary):
    drivers = [Driver(model, num_blocks=403, num_drafts=num_drafts, max_model_len=96) for _ in range(2)]
    calls: list[bool] = []
    noted(drivers[0], calls)
    drivers[1].executor._decode_at_once = lambda: None
    rng, waiting = random.Random(seed), wishes(seed, vocabulary)
    taken: set[int] = set()
    for _ in range(400):
        while rng.random() < 0.5 and (free := [each for each in waiting if each[0] not in taken]):
            slot, prompt, options = free[0]
            waiting.remove(free[0])
            taken.add(slot)
            for driver in drivers:
                driver.join(slot, prompt, **options)
        executor, joins = drivers[0].executor, drivers[0].joins
        emitted = {slot for slot in taken if executor._join[slot] is joins[slot]
                   and executor._num_tokens[slot] > joins[slot].num_prompt}
        resting = [slot for slot in emitted if not joins[slot].decodes]
        chunks = {slot: rng.randint(1, 9) for slot in taken - emitted if not (
            executor._join[slot] is joins[slot] and executor._decoding[slot]) and rng.random() < 0.7}
        late = rng.random() < 0.2                                        # blocks come later than they are asked for
        grows = [[] if late else driver.grow(driver.last) for driver in drivers]
        leaves = [slot for slot in resting if rng.random() < 0.5]
        reports = rng.random() < 0.1
        one, other = (driver.run(chunks, grows=each, leaves=leaves, reports_experts=reports)
                      for driver, each in zip(drivers, grows, strict=True))
        assert one == other
        taken -= {left.slot for left in one.left}
        if not taken and not waiting:
            break
    columns = [[getattr(driver.executor, name) for name in ("_token_SL", "_num_tokens", "_num_computed", "_decoding")]
               for driver in drivers]
    assert all(np.array_equal(one, other) for one, other in zip(*columns, strict=True))
    assert same(drivers[0].cache.data, drivers[1].cache.data)
    assert drivers[0].output == drivers[1].output and len(drivers[0].left) == 20
    assert sum(calls) > 8, "hardly a step was taken in one call"


def same(one, other):
    """To the bit, what nobody wrote (NaN) included."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_what_one_call_does_not_do_changes_nothing_before_it_is_done_otherwise(embedded):
    driver = Driver(embedded, num_drafts=1)
    assert driver.executor._decode_at_once() is None                     # no rows
    driver.join(0, random_tokens(9), sampling=replace(GREEDY, num_logprobs=1))
    driver.prefill(0)
    before = driver.cache.data.clone(), driver.executor._token_SL.copy(), driver.executor._num_computed.copy()
    assert driver.executor._decode_at_once() is None                     # log-probabilities are wanted
    assert same(before[0], driver.cache.data) and np.array_equal(before[1], driver.executor._token_SL)
    assert np.array_equal(before[2], driver.executor._num_computed)
    embedded._places_are_plain = False
    try:
        assert driver.executor._decode_at_once() is None                 # experts lie elsewhere
    finally:
        embedded._places_are_plain = True


def test_columns_that_were_moved_are_written_down_anew(embedded):
    driver = Driver(embedded, max_model_len=16)
    calls: list[bool] = []
    noted(driver, calls)
    driver.join(0, random_tokens(9), stops=(5, 6, 7))
    driver.prefill(0)
    driver.run(grows=[Grow(0, tuple(driver.free.pop(0) for _ in range(9)))])
    driver.decode(3)
    assert calls[-4:] == [True] * 4 and len(driver.output[100]) == 5


def test_a_token_outside_the_vocabulary_is_an_error(embedded):
    driver = Driver(embedded)
    driver.join(0, random_tokens(9))
    driver.prefill(0)
    driver.executor._token_SL[0, 9] = 1 << 20
    with pytest.raises(IndexError, match="token 0 of the step"):
        driver.run(grows=driver.grow(driver.last))
