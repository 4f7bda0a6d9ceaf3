"""Work in tiles: the same numbers as at once, and the same bits in any company."""

import pytest
import torch
import torch.nn.functional as F

from tripool.engine.ops.tiles import TILE_ROWS, in_tiles, whole


@pytest.mark.parametrize("num_rows", [0, 1, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 5 * TILE_ROWS + 3])
def test_tiles_give_what_the_whole_gives(num_rows):
    x, weight = torch.randn(num_rows, 24), torch.randn(40, 24)

    def stage(tile):
        return F.linear(tile, weight), tile.sum(-1)

    for tiled, at_once in zip(in_tiles(stage, x), whole(stage, x), strict=True):
        assert tiled.shape == at_once.shape
        assert torch.allclose(tiled, at_once, atol=1e-5)


def test_a_stage_sees_one_shape_alone():
    seen = set()

    def stage(a, b):
        seen.add((a.shape, b.shape, a.is_contiguous(), a.data_ptr() % 64))
        return a

    in_tiles(stage, torch.randn(3, 50, 16).transpose(0, 1), torch.randn(50, 2))
    assert seen == {((TILE_ROWS, 3, 16), (TILE_ROWS, 2), True, 0)}


@pytest.mark.parametrize(("width", "outputs"), [(256, 512), (64, 24), (96, 384), (24, 128), (768, 256), (1536, 300)])
def test_a_rows_bits_do_not_depend_on_its_place_or_its_neighbours(width, outputs):
    weight, row = torch.randn(outputs, width), torch.randn(width)

    def stage(tile):
        return F.silu(F.linear(tile, weight)) * tile.square().mean(-1, keepdim=True).rsqrt()

    wanted = in_tiles(stage, row.unsqueeze(0))[0]
    for num_rows in (2, 16, 37):
        for place in range(num_rows):
            x = torch.randn(num_rows, width)
            x[place] = row
            assert torch.equal(in_tiles(stage, x)[place], wanted)
