"""The sum over picks: near its definition at every level, with and without what else is added."""

import itertools

import pytest
import torch

from tests.engine.ops.builders import FLOATS, LEVELS, ROWS, close, generator, same
from tripool.engine.ops.weighted_sum import weighted_sum


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_kernel_is_near_its_definition(level, dtype):
    for num_picks, width in ((1, 1), (3, 9), (8, 256)):
        for num_tokens in ROWS:
            chance = generator(num_tokens, width)
            y = torch.randn(num_tokens, num_picks + 1, width, generator=chance).to(dtype)
            weight = torch.rand(num_tokens, num_picks, generator=chance)
            residual = torch.randn(num_tokens, width, generator=chance).to(dtype)
            for more, added in itertools.product((None, y[:, num_picks]), (None, residual)):
                def result(level, more=more, added=added, y=y[:, :num_picks], weight=weight):
                    return weighted_sum(y, weight, more_TD=more, residual_TD=added, level=level)
                found = result(level)
                assert close(found, result(-1), near=8.0), (num_picks, num_tokens)      # the definition rounds thrice
                assert same(found, result(0))
                for token in range(min(num_tokens, 2)):
                    rows = slice(token, token + 1)
                    alone = weighted_sum(y[rows, :num_picks], weight[rows], level=level,
                                         more_TD=None if more is None else more[rows],
                                         residual_TD=None if added is None else added[rows])
                    assert same(alone[0], found[token])


def test_what_does_not_fit_is_refused():
    y, weight = torch.zeros(2, 3, 8), torch.zeros(2, 3)
    for wrong in (
        lambda: weighted_sum(y, weight[:, :2], level=0),
        lambda: weighted_sum(y, weight.double(), level=0),
        lambda: weighted_sum(y, weight, more_TD=torch.zeros(2, 7), level=0),
        lambda: weighted_sum(y, weight, residual_TD=torch.zeros(1, 8), level=0),
    ):
        with pytest.raises(AssertionError):
            wrong()
