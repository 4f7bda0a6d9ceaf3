"""The whole engine at each level of its kernels says what it says without any."""

from __future__ import annotations

import random

import pytest

from tests.checkpoints import tiny_config, write_checkpoint
from tests.engine.driver import Driver
from tests.engine.model.builders import random_tokens
from tests.engine.ops.builders import LEVELS
from tests.engine.parallel.builders import segment_of
from tests.engine.test_speculate import hear, mend
from tripool.core.request import Sampling
from tripool.engine.load import load_model
from tripool.engine.model.products import FloatMatrix, Int8Matrix
from tripool.engine.ops import native
from tripool.engine.parallel.direct import DirectExchange
from tripool.engine.parallel.exchange import LocalExchange
from tripool.engine.parallel.segment import Geometry

CONFIG = tiny_config("v3", mtp=1)
ROWS = Geometry((CONFIG["n_routed_experts"],), 64, CONFIG["num_experts_per_tok"], CONFIG["hidden_size"], "int8",
                "float32")
PROMPTS = ((40, 51), (17, 17), (1, 43), (30, 123))  # lengths, and seeds with which it is clear which tokens come next
NUM_TOKENS = 6
NEAR = {"bfloat16": 1e-4, "int8": 0.04}
"""Logits. Sums are made in another order, and a number of INT8 rows may fall to the other side of a half by that."""
CLEAR = 0.1            # between the likeliest two tokens
ASKED = Sampling(temperature=0.0, num_logprobs=5, num_prompt_logprobs=1)


@pytest.fixture(scope="module", params=NEAR)
def stored(request):
    """The element type of weights."""
    return request.param


@pytest.fixture(scope="module")
def folder(stored, tmp_path_factory):
    made = tmp_path_factory.mktemp(stored)
    write_checkpoint(made, CONFIG, dtype=stored)
    return made


def force(patch, level):
    """Operations and the exchange run at a level."""
    patch.setattr(native, "chosen_level", lambda: level)


def answers(model, *, num_drafts=0, num_microbatches=1, guessed=None, prompts=PROMPTS):
    """What rows say that come one after the other: chunks beside rows that decode, and all decoding in the end."""
    driver = Driver(model, num_drafts=num_drafts, num_microbatches=num_microbatches)
    if num_drafts:
        mend(driver, guessed, 0.7, random.Random(0))
    said = {}
    for slot, (length, seed) in enumerate(prompts):
        driver.join(slot, random_tokens(length, seed=seed), sampling=ASKED, max_tokens=NUM_TOKENS)
        hear(driver.run({slot: 13}, grows=driver.grow(driver.last)), said)
        hear(driver.run({slot: 40}, grows=driver.grow(driver.last)), said)
    while len(driver.left) < len(prompts):
        hear(driver.run(grows=driver.grow(driver.last)), said)
    return driver.output, said


@pytest.fixture(scope="module")
def plainly(stored, folder):
    """Without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        force(patch, -1)
        model = load_model(folder, dtype="float32", exchange=LocalExchange(quantised=stored == "int8")).model
        return answers(model)


def test_what_is_compared_is_clear(plainly):
    output, said = plainly
    assert all(len(tokens) == NUM_TOKENS for tokens in output.values())
    assert min(values[0] - values[1] for (_, kind, _), (_, _, values) in said.items() if kind == "logprobs") > CLEAR


@pytest.mark.parametrize(("num_drafts", "num_microbatches"), [(0, 2), (2, 1)])
@pytest.mark.parametrize("level", LEVELS)
def test_a_level_says_what_is_said_without_kernels(stored, folder, plainly, monkeypatch, level,
                                                     num_drafts, num_microbatches):
    """Chunks, steps of decoding and of drafting; in INT8 with rows that travel quantised."""
    force(monkeypatch, level)
    expected, told = plainly
    with segment_of(ROWS) as (_, segment):
        exchange = DirectExchange(segment, 0) if stored == "int8" else LocalExchange()
        model = load_model(folder, dtype="float32", exchange=exchange, drafts=num_drafts > 0).model
        assert isinstance(model.layers[-1].attention.out, Int8Matrix if stored == "int8" else FloatMatrix)
        guessed = {100 + slot: [*random_tokens(length, seed=seed), *expected[100 + slot]]
                   for slot, (length, seed) in enumerate(PROMPTS)}
        output, said = answers(model, num_drafts=num_drafts, num_microbatches=num_microbatches, guessed=guessed)

    assert output == expected and said.keys() == told.keys()
    for place, (chosen, _, values) in said.items():
        assert chosen == pytest.approx(told[place][0], abs=NEAR[stored]), place
        assert values == pytest.approx(told[place][2], abs=NEAR[stored]), place


@pytest.mark.parametrize("level", LEVELS)
def test_in_deterministic_mode_company_changes_no_bit_at_any_level(folder, monkeypatch, level):
    force(monkeypatch, level)
    model = load_model(folder, deterministic=True).model
    together = answers(model)
    for slot in (0, 2):
        output, said = answers(model, prompts=[PROMPTS[slot]])
        assert output[100] == together[0][100 + slot]
        assert {place[1:]: value for place, value in said.items()} == {
            place[1:]: value for place, value in together[1].items() if place[0] == 100 + slot}
