"""INT8 linear: every level gives the bits of the definition, the definition gives exact sums."""

import pytest
import torch

from tests.engine.ops.builders import LEVELS, ROWS, generator, matrix, rows, same, weight
from tripool.engine.ops.int8_linear import exact_product, int8_linear, pack
from tripool.engine.parallel.quantise import quantise

SHAPES = ((1, 1), (3, 5), (16, 4), (17, 63), (40, 100), (7, 2049), (128, 512))
"""Outputs and inputs."""


def floats_and_quantised(x):
    q, scale = quantise(x)
    return {"float32": (x, None), "bfloat16": (x.bfloat16(), None), "int8": (q, scale)}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_a_kernel_gives_the_bits_of_its_definition(level, shape):
    for num_rows in ROWS:
        chance = generator(*shape, num_rows)
        linear, x = weight(*shape, chance), rows(num_rows, shape[1], chance)
        for given, (row, scale) in floats_and_quantised(x).items():
            for dtype in (torch.float32, torch.bfloat16):
                found = int8_linear(row, linear, scale_T=scale, dtype=dtype, level=level)
                expected = int8_linear(row, linear, scale_T=scale, dtype=dtype, level=-1)
                assert found.shape == (num_rows, shape[0])
                assert same(found, expected), (num_rows, given, dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_wide_rows_go_through_in_several_parts(level, num_rows):
    """7,168 inputs: the rows that one pass over the weights serves are fewer than 40."""
    chance = generator(7168, num_rows)
    linear, x = weight(33, 7168, chance), rows(num_rows, 7168, chance)
    assert same(int8_linear(x, linear, level=level), int8_linear(x, linear, level=-1))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 2, 4, 13])
def test_sums_of_extremes_are_exact(level, num_rows):
    """All of one sign, where an instruction that saturates would show, to the largest width: 2**31 is not reached."""
    for width in (64, 1 << 17):
        for of_row, of_weight in ((-127, -128), (-127, 127), (127, 127), (127, -128)):
            q = torch.full((num_rows, width), of_row, dtype=torch.int8)
            linear = pack(torch.full((16, width), of_weight, dtype=torch.int8), torch.ones(16))
            expected = torch.tensor(of_row * of_weight * width, dtype=torch.int64)
            if expected < 1 << 31:
                found = int8_linear(q, linear, scale_T=torch.ones(num_rows), level=level)
                assert torch.equal(found, expected.float().expand_as(found))


def test_the_definition_counts_in_integers():
    chance = generator(4)
    q, other = matrix(9, 301, chance)[0], matrix(12, 301, chance)[0]
    assert torch.equal(exact_product(q, other).long(), q.long() @ other.long().T)


def test_the_result_is_close_to_what_floats_give():
    """Half a step of 1/127 in rows and in weights, averaged over the inputs."""
    chance = generator(5)
    x, w = torch.randn(20, 400, generator=chance), torch.randn(30, 400, generator=chance)
    found, exact = int8_linear(x, pack(*quantise(w))), x @ w.T
    assert (found - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_packed_can_be_unpacked(shape):
    q, scale = matrix(*shape, generator(*shape))
    packed = pack(q, scale)
    assert torch.equal(packed.unpacked()[0][0], q) and torch.equal(packed.unpacked()[1][0], scale)
    assert packed.data.is_contiguous() and packed.data.shape[3:] == (16, 4)


@pytest.mark.parametrize("level", [-1, *LEVELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_not_finite_spoils_itself_and_no_other(level, dtype):
    chance = generator(6)
    linear, x = weight(20, 50, chance), torch.randn(5, 50, generator=chance)
    x[1, 7], x[2, 0], x[4, 49] = float("nan"), float("inf"), -float("inf")
    y = int8_linear(x.to(dtype), linear, dtype=dtype, level=level)
    assert y.isnan().all(-1).tolist() == [False, True, True, False, True]
    assert y[[0, 3]].isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_does_not_depend_on_its_company(level):
    chance = generator(8)
    linear, x = weight(50, 300, chance), rows(200, 300, chance)
    y = int8_linear(x, linear, level=level)
    for row in (0, 1, 6, 100, 199):
        assert torch.equal(int8_linear(x[row:row + 1], linear, level=level)[0], y[row])


@pytest.mark.parametrize("level", LEVELS)
def test_rows_need_not_lie_beside_one_another(level):
    chance = generator(9)
    linear, x = weight(20, 30, chance), torch.randn(4, 60, generator=chance)[:, ::2]
    assert torch.equal(int8_linear(x, linear, level=level), int8_linear(x.contiguous(), linear, level=level))


def test_what_does_not_fit_is_refused():
    linear, x = weight(20, 30, generator(10)), torch.zeros(2, 30)
    q, scale = quantise(x)
    for wrong in (
        lambda: int8_linear(torch.zeros(2, 31), linear),
        lambda: int8_linear(x.double(), linear),
        lambda: int8_linear(q, linear),
        lambda: int8_linear(x, linear, scale_T=scale),
        lambda: int8_linear(q, linear, scale_T=scale[:1]),
        lambda: int8_linear(x, linear, dtype=torch.float16),
        lambda: pack(torch.zeros(3, 4, dtype=torch.int8), torch.ones(4)),
        lambda: pack(torch.zeros(3, 4), torch.ones(3)),
        lambda: pack(torch.zeros(1, (1 << 17) + 1, dtype=torch.int8), torch.ones(1)),
    ):
        with pytest.raises(AssertionError):
            wrong()
