"""Products head by head: near their definition at every level, and alone as in company."""

from dataclasses import replace

import pytest
import torch

from tests.engine.ops.builders import FLOATS, LEVELS, ROWS, close, generator, same
from tripool.engine.ops.float_linear import float_linear, pack, pack_scaled
from tripool.engine.ops.head_product import head_product

SHAPES = ((1, 1, 1), (3, 5, 9), (2, 32, 256), (4, 130, 7), (2, 4, 24), (1, 3, 100), (1, 530, 30))
"""Heads, inputs and outputs."""


def integers(heads, outputs, inputs, chance):
    """All values that int8 has, -128 too."""
    return torch.randint(-128, 128, (heads, outputs, inputs), dtype=torch.int8, generator=chance)


def scales(*shape, chance):
    return (torch.rand(shape, generator=chance) + 0.1) / 100


def floats(heads, outputs, inputs, chance):
    return torch.randn(heads, outputs, inputs, generator=chance) / inputs ** 0.5


WEIGHTS = {
    "float32": lambda *shape: pack(floats(*shape)),
    "bfloat16": lambda *shape: pack(floats(*shape).bfloat16()),
    "int8, scales of outputs": lambda heads, outputs, inputs, chance: pack_scaled(
        integers(heads, outputs, inputs, chance), scales(heads, outputs, 1, chance=chance) / inputs ** 0.5),
    "int8, scales of inputs": lambda heads, outputs, inputs, chance: pack_scaled(
        integers(heads, outputs, inputs, chance), scales(heads, 1, inputs, chance=chance) / inputs ** 0.5),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_kernel_is_near_its_definition(level, kind, dtype):
    for heads, inputs, outputs in SHAPES:
        for num_tokens in ROWS:
            chance = generator(heads, inputs, num_tokens)
            x = torch.randn(num_tokens, heads, inputs + 3, generator=chance).to(dtype)[..., 3:]
            weight = WEIGHTS[kind](heads, outputs, inputs, chance)
            expected = head_product(x, weight, level=-1)
            found = head_product(x, weight, level=level)
            assert close(found, expected, near=max(1.0, inputs / 200)), (heads, inputs, outputs, num_tokens)
            assert same(found, head_product(x, weight, level=0))
            for token in {0, num_tokens // 2, num_tokens - 1} if num_tokens else ():
                assert same(head_product(x[token:token + 1], weight, level=level)[0], found[token])
            wide = torch.zeros(num_tokens, heads, outputs + 2, dtype=dtype)
            head_product(x, weight, out_THB=wide[..., 1:-1], level=level)
            assert same(wide[..., 1:-1], found) and not wide[..., 0].any() and not wide[..., -1].any()


@pytest.mark.parametrize("kind", [kind for kind in WEIGHTS if kind != "float32"])
@pytest.mark.parametrize("level", LEVELS)
def test_rows_are_rounded_for_a_weight_that_asks_for_it(level, kind):
    """After scales of inputs. Their product in float32 may fall to either side of a half."""
    for heads, inputs, outputs in SHAPES:
        for num_tokens in ROWS:
            chance = generator(heads, inputs, num_tokens)
            x = torch.randn(num_tokens, heads, inputs, generator=chance)
            weight = WEIGHTS[kind](heads, outputs, inputs, chance)
            asks = replace(weight, rounds=True)
            found, exact = head_product(x, asks, level=level), head_product(x, weight, level=level)
            assert close(found, head_product(x, asks, level=-1), near=max(1.0, inputs / 200))
            assert num_tokens == 0 or inputs < 5 or not torch.equal(found, exact), "nothing was rounded"
            for token in {0, num_tokens - 1} if num_tokens else ():
                assert same(head_product(x[token:token + 1], asks, level=level)[0], found[token])


@pytest.mark.parametrize("level", LEVELS)
def test_a_head_is_a_linear_layer(level):
    chance = generator(1)
    x, matrices = torch.randn(7, 3, 40, generator=chance), torch.randn(3, 20, 40, generator=chance)
    found = head_product(x, pack(matrices), level=level)
    for head in range(3):
        assert same(found[:, head], float_linear(x[:, head], pack(matrices[head]), level=level))


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_an_int8_matrix_is_its_numbers_times_their_scales(level):
    """Scales of outputs multiply results, and scales of inputs rows, in float32: the rest is a product of floats."""
    chance = generator(2)
    x, q = torch.randn(5, 3, 37, generator=chance), integers(3, 21, 37, chance)
    of_outputs, of_inputs = scales(3, 21, 1, chance=chance), scales(3, 1, 37, chance=chance)
    whole = pack(q.float())
    assert same(pack_scaled(q, of_outputs).unpacked().float(), q.float() * of_outputs)
    assert same(pack_scaled(q, of_inputs).unpacked().float(), q.float() * of_inputs)
    by_output, by_input = (head_product(x, pack_scaled(q, each), level=level) for each in (of_outputs, of_inputs))
    expected = (head_product(x, whole, level=level) * of_outputs.squeeze(2),
                head_product(x * of_inputs.squeeze(1), whole, level=level))
    for found, wanted in zip((by_output, by_input), expected, strict=True):
        assert same(found, wanted) if level >= 0 else close(found, wanted, near=1.0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_sum_is_one_chain_in_the_order_of_the_inputs(level):
    """Where the order shows: a large number comes and goes; what was added before is lost, what comes after stays."""
    width, outputs = 1030, 130
    for place in (0, 1, 2, 500, 1027):
        x = torch.ones(1, 1, width)
        x[..., place], x[..., place + 1] = 2.0 ** 40, -2.0 ** 40
        weight = pack_scaled(torch.full((1, outputs, width), 3, dtype=torch.int8), torch.full((1, outputs, 1), 0.5))
        assert (head_product(x, weight, level=level) == 1.5 * (width - place - 2)).all()


def test_int8_matrices_take_a_byte_for_each_element():
    weight = pack_scaled(torch.zeros(2, 32, 48, dtype=torch.int8), torch.ones(2, 32, 1))
    assert [part.nbytes for part in weight.parts] == [2 * 32 * 48, 4 * 2 * 32] and weight.num_matrices == 2


def test_what_does_not_fit_is_refused():
    x, weight = torch.zeros(2, 3, 4), pack(torch.zeros(3, 5, 4))
    for wrong in (
        lambda: head_product(x, pack(torch.zeros(2, 5, 4)), level=0),
        lambda: head_product(x, pack(torch.zeros(3, 4, 5)), level=0),
        lambda: head_product(x.half(), weight, level=0),
        lambda: head_product(torch.zeros(2, 4, 3).transpose(1, 2), weight, level=0),
        lambda: head_product(x, weight, out_THB=torch.zeros(2, 3, 4), level=0),
        lambda: head_product(x, weight, out_THB=torch.zeros(2, 3, 5).bfloat16(), level=0),
        lambda: pack_scaled(torch.zeros(3, 5, 4), torch.ones(3, 5, 1)),
        lambda: pack_scaled(torch.zeros(3, 5, 4, dtype=torch.int8), torch.ones(3, 5, 1).double()),
        lambda: pack_scaled(torch.zeros(3, 5, 4, dtype=torch.int8), torch.ones(3, 5)),
        lambda: pack_scaled(torch.zeros(3, 5, 4, dtype=torch.int8), torch.ones(3, 4, 1)),
    ):
        with pytest.raises(AssertionError):
            wrong()
