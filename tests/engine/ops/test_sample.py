"""The next token of each row: the choice of its definition at every level, and the distribution it is drawn from."""

import itertools
import math

import numpy as np
import pytest
import torch

from tests.engine.ops.builders import KINDS_OF_LOGITS, LEVELS, generator, logits_of
from tripool.engine.ops import native
from tripool.engine.ops.sample import DRAW, definition, sample, uniforms, weights

ALL = 2**64
GRAIN = 2.0**-35


@pytest.fixture(autouse=True)
def one_thread_again():
    yield
    native.use_threads(1)


def draws(count, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0, seed=1):
    draw_N = np.zeros(count, DRAW)
    draw_N["temperature"], draw_N["min_p"], draw_N["top_k"], draw_N["top_p"] = temperature, min_p, top_k, top_p
    draw_N["seed"], draw_N["position"] = seed, np.arange(count)
    return draw_N


def mixed_draws(count, num_tokens, chance):
    """Every kind of temperature and filter, each with any other."""
    def some(*values):
        return np.array(values)[torch.randint(0, len(values), (count,), generator=chance).numpy()]

    return draws(count, temperature=some(0.0, 1e-40, 1e-5, 0.3, 1.0, 1.0, 1.7, 40.0, 1e35),
                 top_k=some(0, 0, 1, 2, 20, 200, num_tokens - 1, num_tokens, num_tokens + 7),
                 min_p=some(0, 0, 0, 0.05, 5), top_p=some(1.0, 1.0, 0.999, 0.9, 0.4, 1e-300, 0.0),
                 seed=torch.randint(-2**62, 2**62, (count,), generator=chance).numpy().astype(np.uint64))


@pytest.mark.parametrize("kind", KINDS_OF_LOGITS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_choice_is_that_of_the_definition(level, kind):
    for num_tokens, count in ((1, 20), (2, 30), (7, 30), (63, 90), (64, 90), (333, 150), (4096, 90), (20_011, 20)):
        chance = generator(num_tokens, len(kind))
        logits, draw_N = logits_of(kind, count, num_tokens, chance), mixed_draws(count, num_tokens, chance)
        before = logits.clone()
        found, expected = sample(logits, draw_N, level=level), definition(logits, draw_N)
        assert found.dtype == np.int64
        assert found.tolist() == expected.tolist(), (num_tokens, draw_N[found != expected])
        assert ((found >= 0) & (found < num_tokens)).all()
        assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("level", LEVELS)
def test_no_rows_are_fine_and_rows_may_lie_apart(level):
    logits = torch.randn(9, 80, generator=generator(1))
    assert sample(logits[:0], draws(0), level=level).tolist() == []
    for given in (logits[::2, 3:70], logits[:, ::3], logits.T):
        draw_N = mixed_draws(len(given), given.shape[1], generator(2))
        assert sample(given, draw_N, level=level).tolist() == definition(given, draw_N).tolist()
        assert sample(given, draw_N[::-1], level=level).tolist() == definition(given, draw_N[::-1].copy()).tolist()


@pytest.mark.parametrize("level", LEVELS)
def test_more_tokens_have_a_coarser_grain(level):
    logits = torch.randn(2, 2**18 + 9, generator=generator(3))
    draw_N = draws(2, top_p=np.array([1.0, 0.8]))
    assert sample(logits, draw_N, level=level).tolist() == definition(logits, draw_N).tolist()
    for num_tokens, grain in ((2**18, GRAIN), (2**18 + 1, 2 * GRAIN)):
        small = weights(torch.randn(1, num_tokens, generator=generator(4)) * 9, np.ones(1, np.float32))
        assert (small.double() % grain == 0).all() and (small.double() % (2 * grain) != 0).any()


@pytest.mark.parametrize("level", LEVELS)
def test_a_token_depends_neither_on_its_company_nor_on_threads(level):
    logits = logits_of("normal", 40, 3000, generator(5))
    draw_N = mixed_draws(40, 3000, generator(6))
    expected = sample(logits, draw_N, level=level).tolist()
    for number in (2, 3, 7):
        native.use_threads(number)
        assert sample(logits, draw_N, level=level).tolist() == expected
    assert [sample(logits[row:row + 1], draw_N[row:row + 1], level=level)[0] for row in range(40)] == expected


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_draws_follow_the_distribution_that_the_filters_leave(level):
    logits = torch.randn(500, generator=generator(7)) * 1.5
    probability = (logits.double() / 0.8).softmax(-1).numpy()
    order = np.argsort(-probability, kind="stable")
    order = order[probability[order] >= 0.01 * probability.max()][:90]
    share = np.cumsum(probability[order]) / probability[order].sum()
    order = order[:int((share < 0.95).sum()) + 1]
    expected = probability[order] / probability[order].sum()
    count = 10_000

    draw_N = draws(count, temperature=0.8, min_p=0.01, top_k=90, top_p=0.95)
    found = np.concatenate([sample(logits.expand(1000, -1), part, level=level) for part in np.split(draw_N, 10)])

    counts = np.bincount(found, minlength=500)[order]
    assert counts.sum() == count
    statistic = ((counts - expected * count) ** 2 / (expected * count)).sum()
    freedom = len(order) - 1
    assert expected.min() * count > 10 and freedom > 20
    assert abs(statistic - freedom) / math.sqrt(2 * freedom) < 5


def test_weights_are_accurate_never_fall_and_add_up_without_rounding():
    logits = torch.linspace(-30, 0, 200_000).unsqueeze(0)
    for temperature in (0.5, 1.0, 3.0):
        weight = weights(logits, np.full(1, temperature, np.float32)).double()
        power = logits.double() / temperature
        unit = 2.0**-24 * (2 - 2 * power)                # the power is rounded twice, the exponential too
        assert ((weight - power.exp()).abs() <= GRAIN / 2 + unit * power.exp()).all()
        assert (weight.diff() >= 0).all() and weight[0, -1] == 1
        shuffled = weight[:, torch.randperm(200_000, generator=generator(8))]
        assert weight.sum() == weight.flip(-1).cumsum(-1)[0, -1] == shuffled.cumsum(-1)[0, -1]


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_no_token_without_weight_is_drawn_at_either_end(level):
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 70:75], logits[0, 60], logits[0, 290] = 1.0, -40.0, -40.0
    for number, token in ((0, 70), (2**53 - 1, 74)):
        for filters in ({}, {"top_p": 0.9999}, {"top_k": 200}, {"top_k": 7}):
            draw_N = draws(1, seed=seed_with(number), **filters)
            assert uniforms(draw_N["seed"], draw_N["position"]) == number / 2**53
            assert sample(logits, draw_N, level=level).tolist() == [token]


def seed_with(number):
    """The seed whose number at position zero is this, in units of 2**-53: SplitMix64 backwards."""
    golden = 0x9E3779B97F4A7C15

    def unshifted(x, by):
        found = x
        for _ in range(64 // by):
            found = x ^ (found >> by)
        return found

    def unmixed(x):
        x = unshifted(x, 31) * pow(0x94D049BB133111EB, -1, ALL) % ALL
        x = unshifted(x, 27) * pow(0xBF58476D1CE4E5B9, -1, ALL) % ALL
        return unshifted(x, 30)

    return np.uint64((unmixed((unmixed(number << 11) - golden) % ALL) - golden) % ALL)


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_a_seed_gives_the_same_tokens_as_ever(level):
    """Whoever changes this changes what requests with a seed get."""
    logits = (torch.arange(6000) * 7919 % 6007).float().view(1, -1) / 1000
    draw_N = draws(8, top_p=np.tile([1.0, 0.9], 4), top_k=np.repeat([0, 50], 4), seed=77)
    assert sample(logits.expand(8, -1), draw_N, level=level).tolist() == [
        5133, 2613, 1244, 5438, 4345, 3148, 2394, 5187]


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_among_tokens_that_weigh_the_same_the_larger_logits_are_kept(level):
    """At a great temperature all weights are one, though logits differ."""
    logits = torch.arange(4000.0)[torch.randperm(4000, generator=generator(9))].unsqueeze(0).expand(100, -1)
    for top_k, top_p in itertools.product((5, 900), (1.0, 0.5)):
        found = sample(logits, draws(100, temperature=1e30, top_k=top_k, top_p=top_p), level=level)
        assert logits[0, torch.from_numpy(found)].min() >= 4000 - math.ceil(top_k * top_p)


def test_what_does_not_fit_is_refused():
    logits = torch.zeros(2, 9)
    for wrong in (
        lambda: sample(logits.double(), draws(2)),
        lambda: sample(logits[:, :0], draws(2)),
        lambda: sample(logits, draws(3)),
        lambda: sample(logits, np.zeros(2)),
    ):
        with pytest.raises(AssertionError):
            wrong()
