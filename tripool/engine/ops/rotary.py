"""Rotary positions, and the entries of the latent cache: what the paper calls MLAProlog, but for its products.

MLAProlog is all that comes before attention. Here it is: the in-projection (a linear layer), `write_entries` on its
latent and key, norm and product of its query (`rms_norm`, a linear layer), `rotate` on the query's rotary part, and
`head_product` with the key's expansion on the rest.

T tokens · X heads, or nothing · r rotary width · P rotary pairs · L latent width · W entry width (L + r)
"""

from __future__ import annotations

import torch
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.ops import rms_norm as norm


def rotate(x_TXr: Tensor, rotary_TP: Tensor, interleaved: bool, *, out_TXr: Tensor | None = None,
           level: int | None = None) -> Tensor:
    """Turn each pair by its position's angle. Pairs are neighbours (`interleaved`) or half the width apart.

    Written to `out_TXr`, which may be where they come from.
    """
    level = native.level_for(x_TXr, level)
    if level < 0:
        turned_TXr = rotate_definition(x_TXr, rotary_TP, interleaved)
        return turned_TXr if out_TXr is None else out_TXr.copy_(turned_TXr)
    _check_rotary(x_TXr, rotary_TP)
    out_TXr = x_TXr.new_empty(x_TXr.shape) if out_TXr is None else out_TXr
    assert out_TXr.shape == x_TXr.shape and out_TXr.dtype == x_TXr.dtype and out_TXr.stride(-1) == 1, "wrong place"
    headed = x_TXr.dim() == 3
    native.module().rotate(
        level, native.FORMAT_CODES[x_TXr.dtype], x_TXr.data_ptr(), x_TXr.stride(0), x_TXr.stride(1) if headed else 0,
        x_TXr.shape[0], x_TXr.shape[1] if headed else 1, rotary_TP.data_ptr(), rotary_TP.shape[1], interleaved,
        out_TXr.data_ptr(), out_TXr.stride(0), out_TXr.stride(1) if headed else 0)
    return out_TXr


def write_entries(x_TW: Tensor, norm_L: Tensor, eps: float, rotary_TP: Tensor, interleaved: bool, entries: Tensor,
                  block_T: Tensor, offset_T: Tensor, *, level: int | None = None) -> None:
    """Norm the latent and rotate the key of each token, straight into its place in the paged cache.

    `entries` is a view `[blocks, tokens of a block, W]`.
    """
    level = native.level_for(x_TW, level)
    if level < 0:
        entries.index_put_((block_T, offset_T), entries_definition(x_TW, norm_L, eps, rotary_TP, interleaved))
        return
    rank = norm_L.shape[0]
    _check_rotary(x_TW[:, rank:], rotary_TP)
    assert entries.dtype == x_TW.dtype and entries.stride(-1) == 1 and entries.shape[-1] == x_TW.shape[1], "entries"
    assert norm_L.dtype == x_TW.dtype and norm_L.is_contiguous(), "weights of the norm"
    for place_T in (block_T, offset_T):
        assert place_T.dtype == torch.int64 and place_T.shape == x_TW.shape[:1], "a place for each token"
    block_T, offset_T = block_T.contiguous(), offset_T.contiguous()
    astray = native.module().write_entries(
        level, native.FORMAT_CODES[x_TW.dtype], x_TW.data_ptr(), x_TW.stride(0), x_TW.shape[0], rank,
        norm_L.data_ptr(), native.float_bits(eps), rotary_TP.data_ptr(), rotary_TP.shape[1], interleaved,
        entries.data_ptr(), entries.stride(0), entries.stride(1), entries.shape[0], entries.shape[1],
        block_T.data_ptr(), offset_T.data_ptr())
    if astray >= 0:
        raise IndexError(f"token {astray} has no place in the cache")


def _check_rotary(x_TXr: Tensor, rotary_TP: Tensor) -> None:
    assert rotary_TP.dtype == torch.complex64 and rotary_TP.is_contiguous(), "one complex number for each pair"
    assert rotary_TP.shape == (x_TXr.shape[0], x_TXr.shape[-1] // 2) and x_TXr.shape[-1] % 2 == 0, "pairs"
    assert x_TXr.stride(-1) == 1, "numbers of a row lie beside one another"


def rotate_definition(x_TXr: Tensor, rotary_TP: Tensor, interleaved: bool) -> Tensor:
    """The same in plain torch."""
    rotary = rotary_TP if x_TXr.dim() == 2 else rotary_TP.unsqueeze(1)
    if interleaved:
        pair = torch.view_as_complex(x_TXr.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pair * rotary).flatten(-2).to(x_TXr.dtype)
    pair = torch.complex(*x_TXr.float().chunk(2, dim=-1)) * rotary
    return torch.cat([pair.real, pair.imag], dim=-1).to(x_TXr.dtype)


def entries_definition(x_TW: Tensor, norm_L: Tensor, eps: float, rotary_TP: Tensor, interleaved: bool) -> Tensor:
    """Entries, in plain torch."""
    latent_TL, key_Tr = x_TW.tensor_split([norm_L.shape[0]], dim=-1)
    return torch.cat([norm.definition(latent_TL, norm_L, eps), rotate_definition(key_Tr, rotary_TP, interleaved)],
                     dim=-1)
