"""The sum over picks: near its definition at every level, with and without what else is added."""

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
            for added in ((), (residual,), (y[:, num_picks], residual)):
                found = weighted_sum(y[:, :num_picks], weight, *added, level=level)
                expected = weighted_sum(y[:, :num_picks], weight, *added, level=-1)
                assert close(found, expected, near=8.0), (num_picks, num_tokens)        # the definition rounds thrice
                assert same(found, weighted_sum(y[:, :num_picks], weight, *added, level=0))
                for token in range(min(num_tokens, 2)):
                    alone = (each[token:token + 1] for each in (y[:, :num_picks], weight, *added))
                    assert same(weighted_sum(*alone, level=level)[0], found[token])


def test_what_does_not_fit_is_refused():
    y, weight = torch.zeros(2, 3, 8), torch.zeros(2, 3)
    for wrong in (
        lambda: weighted_sum(y, weight[:, :2], level=0),
        lambda: weighted_sum(y, weight.double(), level=0),
        lambda: weighted_sum(y, weight, torch.zeros(2, 7), level=0),
        lambda: weighted_sum(y, weight, torch.zeros(1, 8), level=0),
        lambda: weighted_sum(y, weight, *3 * [torch.zeros(2, 8)], level=0),
    ):
        with pytest.raises(AssertionError):
            wrong()
