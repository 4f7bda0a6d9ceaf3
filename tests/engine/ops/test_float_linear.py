"""Float linear: close to exact sums, and the same bits at every level, in any company, with any number of threads."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.engine.ops.builders import LEVELS, generator, rows, same
from tripool.engine.memory import large_pages
from tripool.engine.ops import native, packed
from tripool.engine.ops.float_linear import float_linear, pack, pack_scaled
from tripool.engine.ops.native import FLOATS

SHAPES = ((1, 1), (3, 5), (16, 4), (17, 63), (70, 100), (7, 1029), (128, 512))
"""Outputs and inputs."""

ROWS = (0, 1, 2, 3, 6, 7, 16, 33, 200)

BY_TILES = [level for level in LEVELS if level.values[0] >= native.BEST]

KINDS = [*(pytest.param(kind, False, id=str(kind)) for kind in FLOATS),
         pytest.param(torch.bfloat16, True, id="rounded")]
"""Of weights, and whether rows are rounded."""


def matrix(num_outputs, num_inputs, chance, dtype=torch.float32):
    return torch.randn(num_outputs, num_inputs, generator=chance).to(dtype)


def most_off(x, weight, dtype=torch.float32):
    """A chain of float32 additions: half a last place of the largest possible sum for each, and one more to round."""
    total = x.double().abs() @ weight.double().abs().T
    return total * (x.shape[1] + 1) * 2.0 ** -24 * 1.01 + total * (2.0 ** -8 if dtype == torch.bfloat16 else 0) + 1e-37


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_a_kernel_agrees_with_its_definition_and_with_plain_to_the_bit(level, kind, shape):
    for num_rows in ROWS:
        chance = generator(*shape, num_rows)
        given, x = matrix(*shape, chance, kind), rows(num_rows, shape[1], chance)
        weight, bias = pack(given), torch.randn(shape[0], generator=chance)
        for row in (x, x.bfloat16()):
            found = float_linear(row, weight, level=level)
            assert found.shape == (num_rows, shape[0])
            assert ((found - float_linear(row, weight, level=-1)).abs() <= most_off(row, given)).all(), num_rows
            assert same(found, float_linear(row, weight, level=0)), num_rows
            biased = float_linear(row, weight, bias_N=bias, level=level)
            assert torch.equal(biased, found + bias), num_rows
            rounded = float_linear(row, weight, bias_N=bias, dtype=torch.bfloat16, level=level)
            assert torch.equal(rounded, biased.bfloat16()), num_rows


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_rows_are_rounded_for_a_weight_that_asks_for_it(level, kind, shape):
    """Up to the order of additions the product of rounded rows; and of a row alone the same bits as in company."""
    for num_rows in ROWS:
        chance = generator(*shape, num_rows)
        x = torch.randn(num_rows, shape[1], generator=chance)
        if kind == "int8":
            q = torch.randint(-128, 128, (1, *shape), dtype=torch.int8, generator=chance)
            weight = pack_scaled(q, (torch.rand(1, shape[0], 1, generator=chance) + 0.1) / 100)
        else:
            weight = pack(matrix(*shape, chance, torch.bfloat16))
        asks, given = replace(weight, rounds=True), weight.unpacked()[0]
        found = float_linear(x, asks, level=level)
        assert ((found - float_linear(x.bfloat16(), weight, level=-1)).abs() <= 2 * most_off(x, given)).all(), num_rows
        assert torch.equal(float_linear(x, asks, level=-1), float_linear(x.bfloat16(), weight, level=-1))
        assert same(found, float_linear(x.bfloat16(), asks, level=level))
        for row in {0, num_rows // 2, num_rows - 1} if num_rows else ():
            assert same(float_linear(x[row:row + 1], asks, level=level)[0], found[row]), (num_rows, row)


def added_by_tiles(x, weight):
    """Products of 32 inputs are added from zero, of even and of odd inputs apart, then both to the sum. Each product of
    two numbers in bfloat16 is exact in float32."""
    x, weight = (F.pad(each.bfloat16().float(), (0, -each.shape[1] % 32)) for each in (x, weight))
    y = torch.zeros(x.shape[0], weight.shape[0])
    for k in range(0, x.shape[1], 32):
        even, odd = torch.zeros_like(y), torch.zeros_like(y)
        for pair in range(k, k + 32, 2):
            even += x[:, pair, None] * weight[:, pair]
            odd += x[:, pair + 1, None] * weight[:, pair + 1]
        y += even + odd
    return y


@pytest.mark.parametrize("level", BY_TILES)
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize(("widths", "counts"), [((1, 2, 31, 32, 33, 63, 65), range(71)),
                                                ((1100,), (1, 20, 33, 70, 200))], ids=["narrow", "wide"])
def test_tiles_add_in_their_order_whatever_the_rows_and_inputs(level, kind, widths, counts):
    for width in widths:
        chance = generator(width)
        x = torch.randn(max(counts), width, generator=chance)
        if kind == "int8":
            given = torch.randint(-128, 128, (1, 100, width), dtype=torch.int8, generator=chance)
            weight = pack_scaled(given, torch.ones(1, 100, 1))
        else:
            given = matrix(100, width, chance, torch.bfloat16)[None]
            weight = pack(given)
        expected = added_by_tiles(x, given[0])
        for count in counts:
            assert same(float_linear(x[:count], replace(weight, rounds=True), level=level), expected[:count]), count


@pytest.mark.parametrize("level", BY_TILES)
def test_tiles_know_no_numbers_that_are_not_normal(level):
    """They are zero, whether given or found on the way; infinities and NaN spoil their own rows."""
    tiny, x = 2.0 ** -100, torch.ones(5, 3)
    weight = torch.tensor([[1.0, 1.0, 1.0], [tiny, 0.0, 0.0], [tiny * 2.0 ** -30, 0.0, 0.0]]).bfloat16()
    x[1], x[2], x[3, 1], x[4, 0] = 2.0 ** -130, 2.0 ** -27, torch.inf, torch.nan
    y = float_linear(x, replace(pack(weight), rounds=True), level=level)
    assert y[0].tolist() == [3.0, tiny, 0.0] and not y[1].any() and y[2].tolist() == [3 * 2.0 ** -27, 0.0, 0.0]
    assert y[3, 0].isinf() and y[3, 1:].isnan().all() and y[4].isnan().all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_of_an_odd_number_of_inputs_nothing_behind_the_last_is_read(level, kind):
    """What lies behind a row of five inputs, or behind a block of weights, may be no number."""
    weights = torch.arange(1.0, 6.0).repeat(16, 1)
    one = pack(weights.bfloat16()) if kind == "bfloat16" else pack_scaled(weights.to(torch.int8)[None],
                                                                        torch.ones(1, 16, 1))
    wide = torch.full((2, *one.data.shape[1:]), -1, dtype=one.data.dtype).copy_(one.data)
    if kind == "bfloat16":
        wide[1] = float("nan")
    asks = replace(one, data=wide[:1], rounds=True)
    x = torch.full((40, 5), 2.0)
    for num_rows in (1, 2, 13, 40):
        assert (float_linear(x[:num_rows], asks, level=level) == 30.0).all()


def test_the_definition_is_the_product():
    chance = generator(1)
    x, weight, bias = torch.randn(5, 40, generator=chance), matrix(20, 40, chance), torch.randn(20, generator=chance)
    found = float_linear(x, pack(weight), bias_N=bias, level=-1)
    assert torch.allclose(found, torch.nn.functional.linear(x, weight, bias), atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", FLOATS, ids=str)
def test_an_element_is_one_chain_in_the_order_of_the_inputs(level, kind):
    """Where the order shows: a large number comes and goes; what was added before is lost, what comes after stays."""
    big, width = 2.0 ** 40, 2100
    for place in (0, 1, 2, 1000, 2097):
        x, before = torch.ones(1, width), place
        x[0, place], x[0, place + 1] = big, -big
        for num_rows in (1, 2, 7, 40):
            y = float_linear(x.expand(num_rows, -1), pack(torch.ones(70, width, dtype=kind)), level=level)
            assert (y == width - before - 2).all(), (place, num_rows)


@pytest.mark.parametrize("level", LEVELS)
def test_products_are_not_rounded_before_they_are_added(level):
    x = torch.tensor([[1.0, 1.0 + 2.0 ** -20]])
    weight = pack(torch.tensor([[-1.0, 1.0 + 2.0 ** -20], [0.0, 0.0]]))
    assert float_linear(x, weight, level=level)[0, 0].item() == 2.0 ** -19 + 2.0 ** -40


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kind", "rounds"), KINDS)
def test_a_row_does_not_depend_on_its_company(level, kind, rounds):
    """1,100 inputs, 450 rows: several panels of rows, each in several parts of its inputs."""
    chance = generator(8)
    num_rows = 450 if level else 30
    weight, x = replace(pack(matrix(70, 1100, chance, kind)), rounds=rounds), rows(num_rows, 1100, chance)
    y = float_linear(x, weight, level=level)
    for count in (1, 2, 3, 4, 5, 6, 13, 25):
        assert same(float_linear(x[:count], weight, level=level), y[:count]), count
    for row in (6, num_rows // 2, num_rows - 1):
        assert same(float_linear(x[row:row + 1], weight, level=level)[0], y[row])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", FLOATS, ids=str)
def test_very_wide_rows_and_many_channels(level, kind):
    """More inputs than a panel of 20 rows has room for, and more channels than a part keeps the sums of."""
    chance = generator(9)
    for outputs, inputs, num_rows in ((20, 4111, 20), (9000, 3, 192)):
        given, x = matrix(outputs, inputs, chance, kind), torch.randn(num_rows, inputs, generator=chance)
        found = float_linear(x, pack(given), level=level)
        assert ((found - float_linear(x, pack(given), level=-1)).abs() <= most_off(x, given)).all()


@pytest.mark.parametrize("level", [level for level in LEVELS if level.values[0] > 0])
@pytest.mark.parametrize("rounds", [False, True])
def test_results_do_not_depend_on_the_number_of_threads(level, rounds):
    chance = generator(10)
    weight = replace(pack(matrix(1000, 300, chance, torch.bfloat16)), rounds=rounds)
    for num_rows in (1, 5, 250):
        x = rows(num_rows, 300, chance)
        expected = float_linear(x, weight, level=level)
        try:
            for number in (2, 5):
                native.use_threads(number)
                assert same(float_linear(x, weight, level=level), expected), (num_rows, number)
        finally:
            native.use_threads(1)


@pytest.mark.parametrize("level", [-1, *LEVELS])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_that_is_not_finite_spoils_itself_and_no_other(level, dtype):
    chance = generator(6)
    weight, x = pack(matrix(20, 50, chance)), torch.randn(5, 50, generator=chance)
    x[1, 7], x[2, 0], x[4, 49] = float("nan"), float("inf"), -float("inf")
    y = float_linear(x.to(dtype), weight, dtype=dtype, level=level)
    assert y[1].isnan().all() and y[[2, 4]].isinf().all() and y[[0, 3]].isfinite().all()


@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_packed_can_be_unpacked(kind, shape):
    given = matrix(*shape, generator(*shape), kind)
    packed = pack(given)
    assert torch.equal(packed.unpacked()[0], given) and packed.unpacked().dtype == kind
    assert packed.data.is_contiguous() and packed.data.shape[2:] == (shape[1], 16)


@pytest.mark.parametrize("level", LEVELS)
def test_rows_need_not_lie_beside_one_another(level):
    chance = generator(9)
    weight, x = pack(matrix(20, 30, chance)), torch.randn(4, 60, generator=chance)[:, ::2]
    assert torch.equal(float_linear(x, weight, level=level), float_linear(x.contiguous(), weight, level=level))


def test_what_does_not_fit_is_refused():
    weight, x = pack(torch.zeros(20, 30)), torch.zeros(2, 30)
    for wrong in (
        lambda: float_linear(torch.zeros(2, 31), weight),
        lambda: float_linear(x.double(), weight),
        lambda: float_linear(x.to(torch.int8), weight),
        lambda: float_linear(x, weight, bias_N=torch.zeros(19)),
        lambda: float_linear(x, weight, bias_N=torch.zeros(20).bfloat16()),
        lambda: float_linear(x, weight, dtype=torch.float16),
        lambda: float_linear(x, pack(torch.zeros(2, 20, 30))),
        lambda: pack(torch.zeros(3, 4).half()),
        lambda: pack(torch.zeros(3, 0)),
    ):
        with pytest.raises(AssertionError):
            wrong()


def test_a_large_weight_lies_in_large_pages_and_is_the_same(monkeypatch):
    asked = []
    monkeypatch.setattr(packed, "large_pages", lambda num_bytes: asked.append(num_bytes) or large_pages(num_bytes))
    small, large = torch.randn(16, 64), torch.randn(1024, 768)
    assert torch.equal(pack(small).unpacked()[0], small) and torch.equal(pack(large).unpacked()[0], large)
    assert asked == [large.nbytes]
