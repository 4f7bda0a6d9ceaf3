"""Products head by head: near their definition at every level, and alone as in company."""

import pytest
import torch

from tests.engine.ops.builders import FLOATS, LEVELS, ROWS, close, generator, same
from tripool.engine.ops.head_product import head_product

SHAPES = ((1, 1, 1), (3, 5, 9), (2, 32, 256), (4, 130, 7), (2, 4, 24))
"""Heads, inputs and outputs."""


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_kernel_is_near_its_definition(level, dtype):
    for heads, inputs, outputs in SHAPES:
        for num_tokens in ROWS:
            chance = generator(heads, inputs, num_tokens)
            x = torch.randn(num_tokens, heads, inputs + 3, generator=chance).to(dtype)[..., 3:]
            weight = (torch.randn(heads, inputs + 2, outputs, generator=chance) / inputs ** 0.5).to(dtype)[:, :inputs]
            expected = head_product(x, weight, level=-1)
            found = head_product(x, weight, level=level)
            assert close(found, expected, near=1.0), (heads, inputs, outputs, num_tokens)
            assert same(found, head_product(x, weight, level=0))
            for token in {0, num_tokens // 2, num_tokens - 1} if num_tokens else ():
                assert same(head_product(x[token:token + 1], weight, level=level)[0], found[token])


def test_what_does_not_fit_is_refused():
    x, weight = torch.zeros(2, 3, 4), torch.zeros(3, 4, 5)
    for wrong in (
        lambda: head_product(x, weight[:2], level=0),
        lambda: head_product(x, weight.transpose(1, 2), level=0),
        lambda: head_product(x, torch.zeros(3, 5, 4).transpose(1, 2), level=0),
        lambda: head_product(x, weight.bfloat16(), level=0),
    ):
        with pytest.raises(AssertionError):
            wrong()
