"""Two microbatches give the bits of one; a step that was given up leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.checkpoints import tiny_config
from tests.engine.driver import GREEDY, Driver
from tests.engine.model.builders import build_model, random_tokens
from tripool.core.errors import LostRanksError
from tripool.core.plan import BlockRef, Chunk, Grow, Section
from tripool.core.request import Sampling
from tripool.engine.executor import middle
from tripool.engine.model.turns import all_to_the_end
from tripool.engine.parallel.exchange import LocalExchange

CONFIG = tiny_config("v3", mtp=1)
SAMPLED = Sampling(temperature=0.8, top_p=0.95, presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.1,
                   seed=42, num_logprobs=3, num_prompt_logprobs=2)
PROMPTS = {slot: random_tokens(length, seed=slot) for slot, length in enumerate((29, 5, 40, 1))}


class Failing(LocalExchange):
    """Fails in the call with a number, counted from when it was set."""

    countdown = 1 << 40

    def _call(self) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            raise LostRanksError([1], "dispatch", 1.0)

    def begin_dispatch(self, x_TD, slot_TK):
        self._call()
        return super().begin_dispatch(x_TD, slot_TK)

    def finish_dispatch(self, sent):
        self._call()
        return super().finish_dispatch(sent)

    def begin_combine(self, handle, y_NKD):
        self._call()
        return super().begin_combine(handle, y_NKD)

    def finish_combine(self, sent):
        self._call()
        return super().finish_combine(sent)


@pytest.fixture(scope="module")
def exact_model():
    return build_model(CONFIG, deterministic=True, exchange=Failing())


def play(driver, fails=None):
    """Rows that join, are cut, decode and leave; every step of `fails` fails first, in the call that it names."""
    found: dict[int, list] = {slot: [] for slot in PROMPTS}
    exchange, entries = driver.executor.model.moe_blocks[0].exchange, []
    script = [({0: 10}, [0]), ({0: 19, 1: 5, 2: 7}, [1, 2]), ({2: 33}, [])] + [({}, [])] * 3 + [({3: 1}, [3])]
    script += [({}, [])] * 3
    for step, (chunks, joins) in enumerate(script):
        for slot in joins:
            driver.join(slot, PROMPTS[slot], sampling=SAMPLED if slot % 2 == 0 else GREEDY)
        grows = driver.grow(driver.last)
        if step in (fails or {}):
            exchange.countdown = fails[step]
            result = driver.run(chunks, grows=grows)
            assert result.aborted and not result.emitted and not result.need
            grows = []                                   # they join again with the blocks they were given
        result = driver.run(chunks, grows=grows)
        assert not result.aborted
        for emitted in result.emitted:
            for kind in ("logprobs", "prompt_logprobs"):
                for each in getattr(emitted, kind):
                    found[each.request_id - 100].append((kind, each.start, each.chosen, each.top_ids, each.top_values))
    for slot in PROMPTS:                                 # what drafting would read, and what others would pull
        for block in driver.blocks[slot]:
            entries.append(driver.cache.data[block].nan_to_num(123.0))
    return driver.output, found, torch.stack(entries)


@pytest.fixture(scope="module")
def undisturbed(exact_model):
    return play(Driver(exact_model))


def test_two_microbatches_give_the_bits_of_one(exact_model, undisturbed):
    output, logprobs, entries = play(Driver(exact_model, num_microbatches=2))
    assert (output, logprobs) == undisturbed[:2]
    assert torch.equal(entries, undisturbed[2])


def test_without_determinism_two_microbatches_give_the_same_tokens():
    model = build_model(CONFIG)
    assert play(Driver(model, num_microbatches=2))[0] == play(Driver(model))[0]


@pytest.mark.parametrize(("num_microbatches", "call"), [(1, 1), (1, 4), (1, 8), (2, 2), (2, 7), (2, 12), (2, 15),
                                                        (2, 16)])
def test_a_row_that_joins_again_after_a_step_was_given_up_goes_on_as_if_nothing_had_been(
        exact_model, undisturbed, num_microbatches, call):
    """Two layers: the last call of two microbatches fails when one of them is through with its own."""
    fails = dict.fromkeys((0, 1, 2, 4, 6, 9), call)
    output, logprobs, entries = play(Driver(exact_model, num_microbatches=num_microbatches), fails)
    assert (output, logprobs) == undisturbed[:2]
    assert torch.equal(entries, undisturbed[2])


def test_a_step_given_up_says_all_rows_as_they_were_and_those_that_were_to_leave(exact_model):
    driver = Driver(exact_model)
    for slot in (0, 1, 2):
        driver.join(slot, PROMPTS[slot])
    driver.run({0: 29, 1: 5, 2: 10})
    before = driver.executor._num_tokens.copy()
    driver.join(3, PROMPTS[3])
    exact_model.moe_blocks[0].exchange.countdown = 3
    result = driver.run({2: 5, 3: 1}, leaves=[1], fresh=[BlockRef(60, 7)])

    assert result.aborted and [left.slot for left in result.left] == [1, 0, 2, 3]
    assert [(left.reason, left.num_computed) for left in result.left] == [(None, 5), (None, 29), (None, 10), (None, 0)]
    assert [len(left.tokens) // 4 for left in result.left] == [before[1], before[0], before[2], 1]
    assert driver.cache.generations[60] == 7
    assert driver.executor.abandon().left == ()


def test_a_step_that_was_never_run_here_is_given_up_with_all_that_it_asked(exact_model):
    driver = Driver(exact_model)
    driver.join(0, PROMPTS[0])
    driver.join(1, PROMPTS[1])
    driver.run({0: 29, 1: 5})
    driver.join(2, PROMPTS[2], num_computed=0)
    section = Section(leaves=(1,), fresh=(BlockRef(50, 3),), joins=tuple(driver._waiting), grows=(Grow(0, (63,)),),
                      chunks=(Chunk(2, 4),))
    result = driver.executor.abandon(section)

    assert result.aborted and [(left.slot, left.num_computed) for left in result.left] == [(1, 5), (0, 29), (2, 0)]
    assert driver.cache.generations[50] == 3
    driver._waiting = []
    driver.join_again(result)
    driver.run({2: 1000})
    driver.decode(3)
    alone = Driver(exact_model)
    alone.join(2, PROMPTS[2])
    alone.run({2: 1000})
    alone.decode(3)
    assert driver.output[102] == alone.output[102]


@pytest.mark.parametrize(("counts", "cut"), [
    ([], 0), ([7], 0), ([1, 1], 1), ([1, 1, 1], 1), ([1, 1, 1, 1], 2), ([1, 1, 10], 2), ([9, 1, 1], 1),
    ([1, 2, 1, 2, 1, 2], 3), ([2, 2, 5, 1], 2)])
def test_rows_are_cut_where_both_halves_have_about_as_many_tokens(counts, cut):
    assert middle(np.array(counts, np.int64)) == cut


def test_two_computations_take_turns_until_both_have_ended():
    seen = []

    def count(name, pauses):
        for number in range(pauses):
            seen.append(f"{name}{number}")
            yield
        return torch.tensor(pauses)

    assert all_to_the_end([count("a", 3), count("b", 1)]) == [3, 1]
    assert seen == ["a0", "b0", "a1", "a2"]
