"""The sampler against the definition of each parameter, in plain arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tripool.core.request import Limits, Sampling
from tripool.engine.ops.sample import uniforms
from tripool.engine.sampler import Sampler

VOCAB = 512
NO_LIMITS = Limits(max_tokens=100)


def random_logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * spread


def sampler_of(*samplings: Sampling, vocab: int = VOCAB, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (),
               limits: Limits = NO_LIMITS) -> Sampler:
    sampler = Sampler(len(samplings), vocab)
    tokens = np.array(prompt + output, np.int32)
    for slot, sampling in enumerate(samplings):
        sampler.admit(slot, sampling, limits, tokens, len(prompt))
    return sampler


def draws(sampling: Sampling, logits_V: torch.Tensor, count: int, **context: object) -> np.ndarray:
    """What one request would get at `count` positions, from the same logits."""
    sampler = sampler_of(sampling, vocab=logits_V.numel(), **context)  # type: ignore[arg-type]
    slots = np.zeros(count, np.int64)
    return sampler.choose(logits_V.expand(count, -1).contiguous(), slots, np.arange(1000, 1000 + count))


def probabilities(logits_V: torch.Tensor, temperature: float = 1.0) -> np.ndarray:
    scaled = logits_V.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """The statistic as a number of standard deviations above its mean, small cells merged."""
    order = np.argsort(-expected)
    counts, expected = counts[order], expected[order]
    large = expected >= 10
    counts = np.append(counts[large], counts[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def test_temperature_zero_takes_the_largest_logit_and_the_lowest_index_on_a_tie():
    logits = random_logits(3)
    logits[1, [7, 100, 300]] = 50.0
    sampler = sampler_of(*[Sampling(temperature=0.0)] * 3)

    chosen = sampler.choose(logits, np.arange(3), np.full(3, 9))

    assert chosen.tolist() == [int(logits[0].argmax()), 7, int(logits[2].argmax())]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_draws_follow_the_distribution_at_a_temperature(temperature):
    logits = random_logits()[0]
    count = 40_000

    counts = np.bincount(draws(Sampling(temperature=temperature, seed=11), logits, count), minlength=VOCAB)

    assert abs(chi_square(counts, probabilities(logits, temperature) * count)) < 5


def test_draws_of_different_seeds_follow_the_distribution_too():
    logits = random_logits(seed=4)[0]
    count = 20_000
    sampler = sampler_of(*[Sampling(seed=seed) for seed in range(count)])

    chosen = sampler.choose(logits.expand(count, -1).contiguous(), np.arange(count), np.full(count, 5))

    assert abs(chi_square(np.bincount(chosen, minlength=VOCAB), probabilities(logits) * count)) < 5


def test_a_vocabulary_that_fills_no_whole_tile_is_drawn_from_as_well():
    logits = random_logits(vocab=333, spread=0.5)[0]
    count = 40_000

    counts = np.bincount(draws(Sampling(seed=3), logits, count), minlength=333)

    assert len(counts) == 333
    assert abs(chi_square(counts, probabilities(logits) * count)) < 5


def test_uniform_numbers_are_even_and_neighbouring_seeds_and_positions_are_unrelated():
    seeds = np.repeat(np.arange(300, dtype=np.uint64), 300)
    positions = np.tile(np.arange(300), 300)
    numbers = uniforms(seeds, positions).reshape(300, 300)

    assert numbers.min() >= 0 and numbers.max() < 1
    cells = np.bincount((numbers * 64).astype(int).ravel(), minlength=64)
    assert abs(chi_square(cells, np.full(64, 90_000 / 64))) < 5
    for along in (numbers[1:] - 0.5) * (numbers[:-1] - 0.5), (numbers[:, 1:] - 0.5) * (numbers[:, :-1] - 0.5):
        assert abs(along.mean()) < 5 / 12 / math.sqrt(along.size)      # five deviations of a product of uniforms


MIXED = (
    Sampling(temperature=0.0), Sampling(seed=1), Sampling(temperature=0.7, top_p=0.9, seed=2),
    Sampling(top_k=5, seed=3), Sampling(min_p=0.1, seed=4), Sampling(repetition_penalty=1.3, seed=5),
    Sampling(presence_penalty=0.5, seed=6, top_p=0.5),
    Sampling(logit_bias=((3, 4.0), (9, -100.0)), seed=7), Sampling(temperature=1.4, top_p=0.999, top_k=400, seed=8),
)


def test_a_token_does_not_depend_on_the_rest_of_the_batch_nor_on_the_slot():
    logits = random_logits(len(MIXED), seed=5, spread=1.0)
    positions = np.arange(20, 20 + len(MIXED))
    context = {"prompt": (3, 4, 5), "output": (5, 6)}
    together = sampler_of(*MIXED, **context).choose(logits, np.arange(len(MIXED)), positions)

    for row, sampling in enumerate(MIXED):
        alone = sampler_of(sampling, **context).choose(logits[row:row + 1], np.array([0]), positions[row:row + 1])
        assert alone[0] == together[row], sampling
    backwards = np.arange(len(MIXED))[::-1].copy()
    turned = sampler_of(*MIXED, **context).choose(logits[backwards.copy()], backwards, positions[backwards])
    assert turned[::-1].tolist() == together.tolist()


def test_choosing_leaves_the_logits_as_they_were():
    logits = random_logits(len(MIXED))
    before = logits.clone()

    sampler_of(*MIXED, prompt=(1, 2), output=(2,)).choose(logits, np.arange(len(MIXED)), np.arange(len(MIXED)))

    assert torch.equal(logits, before)


@pytest.mark.parametrize("top_k", [1, 2, 7, 16, 17, 256, 257, VOCAB, VOCAB + 5])
def test_top_k_keeps_exactly_the_k_likeliest(top_k):
    logits = random_logits(spread=0.1)[0]

    chosen = set(draws(Sampling(temperature=5.0, top_k=top_k), logits, 8_000).tolist())

    likeliest = set(logits.sort(descending=True, stable=True).indices[:top_k].tolist())
    assert chosen <= likeliest
    if top_k <= 256:
        assert chosen == likeliest


def test_among_equal_logits_top_k_keeps_the_lowest_indices():
    chosen = draws(Sampling(top_k=3), torch.zeros(VOCAB), 500)

    assert set(chosen.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(("top_p", "spread"), [(0.0, 1.0), (0.3, 1.0), (0.9, 1.0), (0.9, 0.05), (0.9999, 3.0)])
def test_top_p_keeps_the_fewest_likeliest_tokens_that_hold_the_share(top_p, spread):
    logits = random_logits(spread=spread)[0]
    expected = probabilities(logits)
    order = np.argsort(-expected, kind="stable")
    nucleus = order[:int((np.cumsum(expected[order]) < top_p).sum()) + 1]
    count = 10_000

    counts = np.bincount(draws(Sampling(top_p=top_p, seed=2), logits, count), minlength=VOCAB)

    outside = np.ones(VOCAB, bool)
    outside[nucleus] = False
    assert counts[outside].sum() == 0
    expected = np.where(outside, 0.0, expected)
    if len(nucleus) > 1:
        assert abs(chi_square(counts, expected / expected.sum() * count)) < 5


def test_min_p_drops_what_is_much_less_likely_than_the_likeliest():
    logits = random_logits(spread=1.0)[0]
    expected = probabilities(logits)

    chosen = draws(Sampling(min_p=0.2), logits, 5_000)

    assert set(chosen.tolist()) == set(np.flatnonzero(expected >= 0.2 * expected.max()).tolist())


@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_each_filter_sees_what_the_one_before_left(spread):
    logits = random_logits(spread=spread, seed=3)[0]
    expected = probabilities(logits)
    order = np.argsort(-expected, kind="stable")
    left = order[expected[order] >= 0.6 * expected.max()][:300]
    share = np.cumsum(expected[left]) / expected[left].sum()
    left = left[:int((share < 0.7).sum()) + 1]

    chosen = draws(Sampling(min_p=0.6, top_k=300, top_p=0.7), logits, 12_000)

    assert set(chosen.tolist()) == set(left.tolist())


def test_the_repetition_penalty_counts_prompt_and_output_and_always_lowers():
    logits = torch.full((1, VOCAB), -10.0)
    logits[0, :6] = torch.tensor([4.0, 3.0, 2.9, -1.0, -1.0, -1.0])
    seen = sampler_of(Sampling(temperature=0.0, repetition_penalty=1.4), prompt=(0,), output=(1,))
    negative = logits.clone()
    negative[0, :3] = -50.0

    assert seen.choose(logits, np.array([0]), np.array([2])).tolist() == [2]            # 4 / 1.4 < 2.9
    worse = sampler_of(Sampling(temperature=0.0, repetition_penalty=1.4), prompt=(3,), output=(4,))
    assert worse.choose(negative, np.array([0]), np.array([2])).tolist() == [5]         # -1 * 1.4 < -1


def test_presence_and_frequency_count_the_output_only_and_grow_with_each_choice():
    logits = torch.full((1, VOCAB), -100.0)
    logits[0, :3] = torch.tensor([10.0, 9.2, 8.9])
    frequency = sampler_of(Sampling(temperature=0.0, frequency_penalty=0.5), prompt=(0, 0, 0, 0))
    presence = sampler_of(Sampling(temperature=0.0, presence_penalty=1.0), prompt=(0, 0, 0, 0))

    def generate(sampler: Sampler) -> list[int]:
        return [int(sampler.choose(logits, np.array([0]), np.array([4 + i]))[0]) for i in range(6)]

    assert generate(frequency) == [0, 0, 1, 0, 2, 1]      # 10 9.5 9.0 8.5, 9.2 8.7 8.2, 8.9 8.4
    assert generate(presence) == [0, 1, 0, 0, 0, 0]       # 10 then 9; 9.2 then 8.2


def test_any_number_of_tokens_is_counted_and_none_outside_the_vocabulary():
    logits = random_logits()
    sampler = sampler_of(Sampling(temperature=0.0, presence_penalty=50.0), prompt=(3, VOCAB + 4, -2))

    chosen = [int(sampler.choose(logits, np.array([0]), np.array([3 + i]))[0]) for i in range(100)]

    assert chosen == logits[0].argsort(descending=True)[:100].tolist()


def test_a_guess_does_not_count():
    logits = random_logits()
    sampler = sampler_of(Sampling(temperature=0.0, presence_penalty=50.0))

    first = sampler.choose(logits, np.array([0]), np.array([0]), only_guessed=True).tolist()

    assert sampler.choose(logits, np.array([0]), np.array([0])).tolist() == first
    assert sampler.choose(logits, np.array([0]), np.array([1])).tolist() != first


def test_penalties_rebuilt_from_emitted_tokens_continue_where_another_slot_stopped():
    logits = random_logits(spread=0.3)
    sampling = Sampling(seed=5, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2)
    first = sampler_of(sampling, prompt=(1, 2, 3))
    whole = [int(first.choose(logits, np.array([0]), np.array([3 + i]))[0]) for i in range(12)]

    resumed = sampler_of(sampling, prompt=(1, 2, 3), output=tuple(whole[:7]))
    rest = [int(resumed.choose(logits, np.array([0]), np.array([10 + i]))[0]) for i in range(5)]

    assert rest == whole[7:]


def test_logit_bias_is_added_and_can_ban_or_force():
    logits = torch.zeros((1, VOCAB))
    forced = sampler_of(Sampling(logit_bias=((5, 100.0), (VOCAB + 7, 3.0), (-1, 3.0))))
    assert forced.choose(logits, np.array([0]), np.array([0])).tolist() == [5]
    logits[0, 5] = 30.0
    logits[0, 6] = 1.0
    banned = sampler_of(Sampling(temperature=0.0, logit_bias=((5, -100.0),)))
    assert banned.choose(logits, np.array([0]), np.array([0])).tolist() == [6]


def test_no_stop_token_is_chosen_before_the_minimum_length():
    logits = torch.zeros((1, VOCAB))
    logits[0, 9] = 50.0
    limits = Limits(max_tokens=10, min_tokens=2, stop_token_ids=(9, VOCAB + 1))
    sampler = sampler_of(Sampling(temperature=0.0), prompt=(1, 2, 3), limits=limits)

    assert [int(sampler.choose(logits, np.array([0]), np.array([at]))[0]) for at in (3, 4, 5)] == [0, 0, 9]


def test_a_slot_forgets_its_former_request():
    logits = random_logits()
    former = Sampling(temperature=0.0, logit_bias=((5, 100.0),), repetition_penalty=9.0, top_p=0.1)
    limits = Limits(max_tokens=4, min_tokens=100, stop_token_ids=(int(logits.argmax()),))
    sampler = sampler_of(former, prompt=(1,), limits=limits)

    sampler.admit(0, Sampling(temperature=0.0), NO_LIMITS, np.array([2], np.int32), 1)

    assert sampler.choose(logits, np.array([0]), np.array([1])).tolist() == [int(logits.argmax())]


HARD_LOGITS = {
    "all masked": torch.full((VOCAB,), -torch.inf),
    "all nan": torch.full((VOCAB,), torch.nan),
    "one nan": torch.cat([torch.tensor([torch.nan]), torch.zeros(VOCAB - 1)]),
    "two infinite": torch.cat([torch.full((2,), torch.inf), torch.zeros(VOCAB - 2)]),
    "huge": torch.linspace(-3e38, 3e38, VOCAB),
    "equal": torch.zeros(VOCAB),
}
HARD_SAMPLING = (
    Sampling(temperature=0.0), Sampling(temperature=1e-40), Sampling(temperature=1e-5), Sampling(temperature=1e30),
    Sampling(top_p=0.0), Sampling(top_p=1e-300), Sampling(top_k=10**9), Sampling(min_p=1.0),
    Sampling(min_p=5.0, top_p=0.5), Sampling(repetition_penalty=1e-30), Sampling(repetition_penalty=1e30),
    Sampling(presence_penalty=1e30, frequency_penalty=-1e30), Sampling(logit_bias=((1, -1e38), (1, 1e38))),
    Sampling(seed=2**63 - 1), Sampling(seed=-1),
)


@pytest.mark.parametrize("name", HARD_LOGITS)
def test_extreme_values_still_give_a_token(name):
    logits = HARD_LOGITS[name].expand(len(HARD_SAMPLING), -1).contiguous()
    sampler = sampler_of(*HARD_SAMPLING, prompt=(1, 1), output=(1,))

    for position in range(3):
        chosen = sampler.choose(logits, np.arange(len(HARD_SAMPLING)), np.full(len(HARD_SAMPLING), position))
        assert ((chosen >= 0) & (chosen < VOCAB)).all()


def test_a_nearly_zero_temperature_takes_the_largest_logit():
    logits = random_logits()[0]

    assert set(draws(Sampling(temperature=1e-6), logits, 50).tolist()) == {int(logits.argmax())}


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[5, 130, 131]] = 0.0

    assert set(draws(Sampling(), logits, 20_000).tolist()) == {5, 130, 131}
