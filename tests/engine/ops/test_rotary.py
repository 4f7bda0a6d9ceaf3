"""Rotary positions and cache entries: near their definitions at every level, in place, and never out of place."""

import pytest
import torch

from tests.engine.ops.builders import FLOATS, LEVELS, ROWS, close, generator, rows, same
from tripool.engine.ops.rotary import entries_definition, rotate, write_entries

EPS = 1e-6
WIDTHS = (2, 6, 32, 34, 64)


def turns(num_tokens, width, chance):
    angle = torch.rand(num_tokens, width // 2, generator=chance) * 100
    return torch.polar(torch.full_like(angle, 1.1), angle)


def most(x):
    """The largest magnitude of each row: of a pair's two products one may cancel the other."""
    return x.float().abs().amax(-1, keepdim=True)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_kernel_is_near_its_definition(level, dtype, interleaved):
    for width in WIDTHS:
        for num_tokens in ROWS:
            chance = generator(width, num_tokens)
            wide = rows(num_tokens, 3 * (width + 6), chance, dtype).view(num_tokens, 3, width + 6)
            table = turns(num_tokens, width, chance)
            for x in (wide[..., 6:], wide[:, 0, :width]):                 # all heads, and one that all share
                expected = rotate(x, table, interleaved, level=-1)
                found = rotate(x, table, interleaved, level=level)
                assert close(found, expected, near=most(x)), (width, num_tokens)
                assert same(found, rotate(x, table, interleaved, level=0))
                again = wide.clone()
                place = again[..., 6:] if x.dim() == 3 else again[:, 0, :width]
                rotate(place, table, interleaved, out_TXr=place, level=level)
                assert same(place, found)
                place.copy_(x)
                assert same(again, wide)                                  # nothing beside them was touched


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("level", LEVELS)
def test_entries_are_written_to_their_places(level, dtype, interleaved):
    for rank, width in ((1, 2), (20, 8), (256, 64)):
        for num_tokens in ROWS:
            chance = generator(rank, num_tokens)
            x = rows(num_tokens, rank + width + 10 - rank % 2, chance, dtype)[:, 10 - rank % 2:]
            weight, table = torch.randn(rank, generator=chance).to(dtype), turns(num_tokens, width, chance)
            cache = torch.zeros(30, 11 * (rank + width) + 3, dtype=dtype)  # blocks hold more than these entries
            entries = cache[:, 2:-1].view(30, 11, rank + width) if rank == 1 else cache[:, :-3].unflatten(1, (11, -1))
            place = torch.randperm(330, generator=chance)[:num_tokens]
            block, offset = place // 11, place % 11
            expected = torch.zeros(entries.shape, dtype=dtype)
            expected[block, offset] = entries_definition(x, weight, EPS, table, interleaved)
            write_entries(x, weight, EPS, table, interleaved, entries, block, offset, level=level)
            scale = torch.zeros(30, 11, 1)
            scale[block, offset] = most(x)
            assert close(entries, expected, near=scale), (rank, num_tokens)
            assert torch.equal(entries == 0, expected == 0)


@pytest.mark.parametrize("level", [-1, *LEVELS])
@pytest.mark.parametrize(("block", "offset"), [(4, 0), (0, 5), (1 << 40, 0)])
def test_an_entry_that_is_not_there_is_refused(level, block, offset):
    entries = torch.zeros(4, 5, 6)
    with pytest.raises(IndexError):
        write_entries(torch.ones(2, 6), torch.ones(4), EPS, turns(2, 2, generator(1)), True, entries,
                      torch.tensor([0, block]), torch.tensor([0, offset]), level=level)
    assert level < 0 or not entries.any()


def test_what_does_not_fit_is_refused():
    x, table = torch.zeros(2, 3, 8), turns(2, 8, generator(2))
    for wrong in (
        lambda: rotate(x, table[:1], True, level=0),
        lambda: rotate(x, table.to(torch.complex128), True, level=0),
        lambda: rotate(x[..., :6], table, True, level=0),
        lambda: rotate(x.transpose(1, 2), table, True, level=0),
        lambda: rotate(x, table, True, out_TXr=torch.zeros(2, 2, 8), level=0),
    ):
        with pytest.raises(AssertionError):
            wrong()
