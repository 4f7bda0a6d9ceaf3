"""RMS norm: near its definition at every level, the same bits at each, and exactly what is quantised of it."""

import pytest
import torch

from tests.engine.ops.builders import FLOATS, LEVELS, ROWS, close, generator, rows, same
from tripool.engine.ops.rms_norm import add_and_norm, rms_norm, rms_norm_int8
from tripool.engine.parallel.quantise import quantise

WIDTHS = (1, 7, 8, 33, 256, 2049)
EPS = 1e-6


def given(num_rows, width, dtype):
    """Rows, as many to add, and weights."""
    chance = generator(num_rows, width)
    weight = (torch.randn(width, generator=chance) + 1).to(dtype)
    return rows(num_rows, width, chance, dtype), rows(num_rows, width, chance, dtype), weight


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_kernel_is_near_its_definition(level, dtype):
    for width in WIDTHS:
        for num_rows in ROWS:
            x, _, weight = given(num_rows, width, dtype)
            found = rms_norm(x, weight, EPS, level=level)
            assert found.shape == x.shape and found.dtype == dtype
            assert close(found, rms_norm(x, weight, EPS, level=-1)), (width, num_rows)
            assert same(found, rms_norm(x, weight, EPS, level=0)), (width, num_rows)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_the_residual_is_added_before(level, dtype):
    for width in WIDTHS:
        for num_rows in (0, 1, 5):
            x, more, weight = given(num_rows, width, dtype)
            total, normed = add_and_norm(x, more, weight, EPS, level=level)
            assert same(total, x + more)
            assert same(normed, rms_norm(x + more, weight, EPS, level=level))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_quantised_rows_are_those_of_the_normed(level, dtype):
    for width in WIDTHS:
        for num_rows in ROWS:
            x, _, weight = given(num_rows, width, dtype)
            q, scale = rms_norm_int8(x, weight, EPS, level=level)
            expected_q, expected_scale = quantise(rms_norm(x, weight, EPS, level=level))
            assert torch.equal(q, expected_q) and same(scale, expected_scale), (width, num_rows)


@pytest.mark.parametrize("level", LEVELS)
def test_rows_may_be_parts_of_wider_ones_and_do_not_depend_on_their_company(level):
    x, weight = torch.randn(40, 100, generator=generator(1)), torch.randn(30, generator=generator(2))
    found = rms_norm(x[:, 50:80], weight, EPS, level=level)
    for row in (0, 7, 39):
        assert torch.equal(found[row], rms_norm(x[row:row + 1, 50:80].clone(), weight, EPS, level=level)[0])


@pytest.mark.parametrize("level", [-1, *LEVELS])
def test_a_row_that_is_not_finite_spoils_itself_and_no_other(level):
    x = torch.randn(3, 20, generator=generator(3))
    x[1, 4] = float("nan")
    found = rms_norm(x, torch.ones(20), EPS, level=level)
    assert found.isnan().any(-1).tolist() == [False, True, False]


def test_what_does_not_fit_is_refused():
    x = torch.zeros(2, 8)
    for wrong in (
        lambda: rms_norm(x, torch.ones(7), EPS, level=0),
        lambda: rms_norm(x, torch.ones(8, dtype=torch.bfloat16), EPS, level=0),
        lambda: add_and_norm(x, torch.zeros(2, 7), torch.ones(8), EPS, level=0),
        lambda: rms_norm(x.t(), torch.ones(2), EPS, level=0),
    ):
        with pytest.raises(AssertionError):
            wrong()
