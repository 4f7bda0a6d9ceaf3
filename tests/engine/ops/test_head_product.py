"""Products head by head: near their definition at every level, and alone as in company."""

import pytest
import torch

from tests.engine.ops.builders import FLOATS, LEVELS, ROWS, close, generator, same
from tripool.engine.ops.float_linear import float_linear, pack
from tripool.engine.ops.head_product import head_product

SHAPES = ((1, 1, 1), (3, 5, 9), (2, 32, 256), (4, 130, 7), (2, 4, 24))
"""Heads, inputs and outputs."""


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_kernel_is_near_its_definition(level, kind, dtype):
    for heads, inputs, outputs in SHAPES:
        for num_tokens in ROWS:
            chance = generator(heads, inputs, num_tokens)
            x = torch.randn(num_tokens, heads, inputs + 3, generator=chance).to(dtype)[..., 3:]
            weight = pack((torch.randn(heads, outputs, inputs, generator=chance) / inputs ** 0.5).to(kind))
            expected = head_product(x, weight, level=-1)
            found = head_product(x, weight, level=level)
            assert close(found, expected, near=1.0), (heads, inputs, outputs, num_tokens)
            assert same(found, head_product(x, weight, level=0))
            for token in {0, num_tokens // 2, num_tokens - 1} if num_tokens else ():
                assert same(head_product(x[token:token + 1], weight, level=level)[0], found[token])
            wide = torch.zeros(num_tokens, heads, outputs + 2, dtype=dtype)
            head_product(x, weight, out_THB=wide[..., 1:-1], level=level)
            assert same(wide[..., 1:-1], found) and not wide[..., 0].any() and not wide[..., -1].any()


@pytest.mark.parametrize("level", LEVELS)
def test_a_head_is_a_linear_layer(level):
    chance = generator(1)
    x, matrices = torch.randn(7, 3, 40, generator=chance), torch.randn(3, 20, 40, generator=chance)
    found = head_product(x, pack(matrices), level=level)
    for head in range(3):
        assert same(found[:, head], float_linear(x[:, head], pack(matrices[head]), level=level))


def test_what_does_not_fit_is_refused():
    x, weight = torch.zeros(2, 3, 4), pack(torch.zeros(3, 5, 4))
    for wrong in (
        lambda: head_product(x, pack(torch.zeros(2, 5, 4)), level=0),
        lambda: head_product(x, pack(torch.zeros(3, 4, 5)), level=0),
        lambda: head_product(x.half(), weight, level=0),
        lambda: head_product(torch.zeros(2, 4, 3).transpose(1, 2), weight, level=0),
        lambda: head_product(x, weight, out_THB=torch.zeros(2, 3, 4), level=0),
        lambda: head_product(x, weight, out_THB=torch.zeros(2, 3, 5).bfloat16(), level=0),
    ):
        with pytest.raises(AssertionError):
            wrong()
