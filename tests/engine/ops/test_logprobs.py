"""Log-probabilities: those of the definition at every level to the bit, and those of torch but for rounding."""

import numpy as np
import pytest
import torch

from tests.engine.ops.builders import KINDS_OF_LOGITS, LEVELS, generator, logits_of
from tripool.engine.ops import native
from tripool.engine.ops.logprobs import LEAST_LOGPROB, logprobs
from tripool.engine.ops.sample import DRAW, sample


@pytest.fixture(autouse=True)
def one_thread_again():
    yield
    native.use_threads(1)


def equal(found, expected):
    return all(ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
               for ours, theirs in zip(found, expected, strict=True))


def some_rows(logits, count, chance):
    """Rows in any order, some of them more than once, and a token of each."""
    return (torch.randint(0, logits.shape[0], (count,), generator=chance).numpy(),
            torch.randint(0, logits.shape[1], (count,), generator=chance).numpy())


@pytest.mark.parametrize("kind", KINDS_OF_LOGITS)
@pytest.mark.parametrize("level", LEVELS)
def test_it_is_its_definition(level, kind):
    for num_tokens, count in ((1, 1), (2, 5), (7, 9), (63, 20), (64, 20), (333, 33), (4096, 17), (20_011, 7)):
        chance = generator(num_tokens, len(kind), 3)
        logits = logits_of(kind, count, num_tokens, chance)
        before = logits.clone()
        for num_top, num_rows in ((0, count), (1, 0), (1, 1), (20, count + 2)):
            rows, tokens = some_rows(logits, num_rows, chance)
            found = logprobs(logits, rows, tokens, num_top, level=level)
            assert equal(found, logprobs(logits, rows, tokens, num_top, level=-1)), (num_tokens, num_top)
            assert [each.shape for each in found] == [(num_rows,), *[(num_rows, min(num_top, num_tokens))] * 2]
        assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("kind", [each for each in KINDS_OF_LOGITS if each != "broken"])
@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_it_is_what_torch_says_in_double_precision(level, kind):
    for num_tokens in (1, 7, 333, 20_011):
        chance = generator(num_tokens, 4)
        logits = logits_of(kind, 6, num_tokens, chance)
        logits[:, 0] = 0.5                                       # not all of them masked
        rows, tokens = some_rows(logits, 9, chance)
        expected = logits[rows].double().log_softmax(-1).clamp(min=LEAST_LOGPROB)
        chosen, ids, values = logprobs(logits, rows, tokens, 20, level=level)
        assert chosen == pytest.approx(expected[range(9), tokens].numpy(), rel=1e-6, abs=3e-6)
        assert values == pytest.approx(expected.gather(1, torch.from_numpy(ids)).numpy(), rel=1e-6, abs=3e-6)
        assert values == pytest.approx(expected.sort(-1, descending=True).values[:, :20].numpy(), rel=1e-6, abs=3e-6)


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_the_lowest_index_comes_first_among_equal_ones(level):
    logits = torch.zeros(3, 5000)
    logits[0, [17, 4000, 31, 2]], logits[1, ::2], logits[2] = 1.0, -0.0, -torch.inf
    logits[2, 4990] = 0.0
    ids = logprobs(logits, np.arange(3), np.zeros(3, np.int64), 6, level=level)[1]
    assert ids.tolist() == [[2, 17, 31, 4000, 0, 1], [0, 1, 2, 3, 4, 5], [4990, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_impossible_tokens_have_a_finite_logprob(level):
    logits = torch.zeros(6, 64)
    logits[0, 3], logits[1], logits[2], logits[4, 5:7], logits[5, 3] = (
        -torch.inf, torch.nan, -torch.inf, torch.inf, torch.nan)
    logits[3, 0] = 3e38
    chosen, ids, values = logprobs(logits, np.arange(6), np.full(6, 3), 64, level=level)
    equally, least = pytest.approx(-np.log(64), abs=3e-6), LEAST_LOGPROB
    assert chosen.tolist() == [least, equally, equally, least, least, least]
    assert np.isfinite(values).all() and ids[5, -1] == ids[0, -1] == 3
    assert values[4].tolist() == [pytest.approx(-np.log(2)), pytest.approx(-np.log(2)), *[least] * 62]
    assert ids[4].tolist() == [5, 6, 0, 1, 2, 3, 4, *range(7, 64)]


@pytest.mark.parametrize("level", LEVELS)
def test_it_depends_neither_on_threads_nor_on_the_other_rows_nor_on_where_rows_lie(level):
    logits, tokens = logits_of("normal", 40, 3000, generator(5)), np.arange(40)
    expected = logprobs(logits, np.arange(40), tokens, 20, level=level)
    for number in (2, 3, 7):
        native.use_threads(number)
        assert equal(logprobs(logits, np.arange(40), tokens, 20, level=level), expected)
    for row in (0, 7, 39):
        alone = logprobs(logits[row:row + 1], np.zeros(1, np.int64), tokens[row:row + 1], 20, level=level)
        assert equal(alone, [each[row:row + 1] for each in expected])
    for given in (logits[::2, 3:70], logits[:, ::3], logits.T):
        rows, tokens = some_rows(given, 11, generator(6))
        assert equal(logprobs(given, rows[::-1], tokens[::-1], 5, level=level),
                     logprobs(given.contiguous(), rows[::-1].copy(), tokens[::-1].copy(), 5, level=level))


def test_the_likeliest_is_what_greedy_sampling_takes():
    logits = logits_of("ties", 50, 700, generator(7))
    ids = logprobs(logits, np.arange(50), np.zeros(50, np.int64), 1)[1]
    assert ids[:, 0].tolist() == sample(logits, np.zeros(50, DRAW)).tolist()


def test_more_tokens_are_fine():
    logits = torch.randn(2, 2**18 + 9, generator=generator(8))
    rows = np.arange(2)
    assert equal(logprobs(logits, rows, rows, 3), logprobs(logits, rows, rows, 3, level=-1))
    chosen = logprobs(logits, rows, rows, 0)[0]
    assert chosen == pytest.approx(logits.double().log_softmax(-1)[rows, rows].numpy(), abs=2e-5)    # a coarser grain


def test_what_does_not_fit_is_refused():
    logits, rows = torch.zeros(2, 9), np.arange(2)
    for wrong in (
        lambda: logprobs(logits.double(), rows, rows, 1),
        lambda: logprobs(logits[:, :0], rows, rows, 1),
        lambda: logprobs(logits, rows, rows[:1], 1),
        lambda: logprobs(logits, rows + 1, rows, 1),
        lambda: logprobs(logits, rows - 1, rows, 1),
        lambda: logprobs(logits, rows, rows + 8, 1),
        lambda: logprobs(logits, rows.astype(np.int32), rows, 1),
    ):
        with pytest.raises(AssertionError):
            wrong()
