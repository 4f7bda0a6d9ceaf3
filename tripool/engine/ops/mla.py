"""Latent attention: absorbed over the paged cache, and expanded over keys and values written out.

*Absorbed*: tokens and heads of a row are queries that multiply the row's entries as they lie. An entry is key (all of
it) and value (its latent part) at once, so it is read once for up to 64 tokens and heads. *Expanded*: the tokens of one
row over keys and values of each head, a block of queries by a tile of positions at a time, so that no matrix of scores
is written down.

A token sees positions up to its own. Beyond them nothing is read, whatever lies there. What a token and head computes
is the same to the bit in any company, with any number of threads and any size of blocks (see `csrc/mla.h`), so
deterministic work runs these kernels too. AVX2 and AVX-512 give the same bits; plain C++ rounds products by themselves.

With `rounds`, queries (times their factor), keys, values and softmax weights are rounded to bfloat16 before they are
multiplied, and sums stay float32, as is usual for attention in bfloat16. A processor that multiplies such numbers two
at a time takes about half the time for both products.

T tokens · H heads · W entry width · L latent width · R rows · B blocks · C tokens of one row · N positions
n key width without position · r rotary width · v value width
"""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.ops.native import FLOATS

TILE = 64
"""Positions after which the maximum grows, counted from position 0. Rounded weights depend on it."""
LOG2_E = 1.44269504
"""With it in the factor of queries, weights are powers of two."""


def absorbed_attention(query_THW: Tensor, entries: Tensor, block_RB: Tensor, first_R: Tensor, count_R: Tensor, *,
                       scale: float, latent: int, first_seen: int = 0, rounds: bool = False,
                       level: int | None = None) -> Tensor:
    """Rows of `count_R` tokens at positions from `first_R` over entries `[blocks, block_tokens, W]`: `[T, H, L]`.

    Positions before `first_seen` are barred; a token that sees none at all gets zeros.
    """
    level = native.chosen_level() if level is None else level
    num_tokens, num_heads, width = query_THW.shape
    num_blocks, block_tokens, _ = entries.shape
    assert entries.shape[2] == width and entries.stride()[1:] == (width, 1), "entries lie beside one another in a block"
    assert query_THW.dtype in FLOATS and entries.dtype in FLOATS, f"no kernel for {query_THW.dtype}, {entries.dtype}"
    assert 0 < latent <= width, f"an entry of {width} has no latent of {latent}"
    for each in (block_RB, first_R, count_R):
        assert each.dtype == torch.int64 and each.is_contiguous(), "tables are int64 and contiguous"
    num_rows, columns = block_RB.shape
    assert first_R.shape == count_R.shape == (num_rows,), "one first position and one number of tokens for each row"
    if level < 0:
        return absorbed_definition(query_THW, entries, block_RB, first_R, count_R, scale, latent, first_seen, rounds)
    query_THW = query_THW.contiguous()
    latent_THL = query_THW.new_empty(num_tokens, num_heads, latent)
    wrong = native.module().absorbed_attention(
        level, query_THW.data_ptr(), native.FORMAT_CODES[query_THW.dtype], num_tokens, num_heads, width, latent,
        entries.data_ptr(), native.FORMAT_CODES[entries.dtype], num_blocks, entries.stride(0), block_tokens,
        block_RB.data_ptr(), columns, first_R.data_ptr(), count_R.data_ptr(), num_rows, first_seen, _bits(scale),
        rounds, latent_THL.data_ptr())
    assert wrong < 0, f"row {wrong} of {num_rows} has other tokens or blocks than there are"
    return latent_THL


def absorbed_definition(query_THW: Tensor, entries: Tensor, block_RB: Tensor, first_R: Tensor, count_R: Tensor,
                        scale: float, latent: int, first_seen: int, rounds: bool = False) -> Tensor:
    """The same in plain torch, one token after another."""
    latents, start = [query_THW.new_empty(0, query_THW.shape[1], latent)], 0
    for blocks, first, count in zip(block_RB, first_R.tolist(), count_R.tolist(), strict=True):
        entry_NW = _as_multiplied(entries[blocks].flatten(0, 1), rounds)
        for token in range(count):
            seen_NW = entry_NW[first_seen:first + token + 1]
            logit_HN = _scaled(query_THW[start + token], scale, rounds) @ seen_NW.T
            weight_HN, sum_H1 = _weights(logit_HN, first_seen, rounds)
            latent_HL = torch.where(sum_H1 == 0, 0.0, weight_HN @ seen_NW[:, :latent] / sum_H1)
            latents.append(latent_HL.unsqueeze(0).to(query_THW.dtype))
        start += count
    return torch.cat(latents)


def expanded_attention(query_CHn: Tensor, query_CHr: Tensor, key_NHn: Tensor, key_Nr: Tensor, value_NHv: Tensor, *,
                       first: int, scale: float, rounds: bool = False, level: int | None = None) -> Tensor:
    """Tokens of one row at positions from `first` over all N positions up to the last of them: `[C, H, v]`."""
    level = native.chosen_level() if level is None else level
    given = (query_CHn, query_CHr, key_NHn, key_Nr, value_NHv)
    (num_tokens, num_heads, n), r, v = query_CHn.shape, query_CHr.shape[-1], value_NHv.shape[-1]
    num_positions = first + num_tokens
    assert query_CHr.shape == (num_tokens, num_heads, r) and key_NHn.shape == (num_positions, num_heads, n) \
        and key_Nr.shape == (num_positions, r) and value_NHv.shape == (num_positions, num_heads, v), \
        f"{num_tokens} tokens from {first} on do not fit {[list(each.shape) for each in given]}"
    assert query_CHn.dtype in FLOATS and all(each.dtype == query_CHn.dtype for each in given), "all of one element type"
    if level < 0:
        return expanded_definition(query_CHn, query_CHr, key_NHn, key_Nr, value_NHv, first, scale, rounds)
    given = tuple(each if each.stride(-1) == 1 else each.contiguous() for each in given)
    value_CHv = query_CHn.new_empty(num_tokens, num_heads, v)
    strides = [stride for each in given for stride in each.stride()[:-1]]
    native.module().expanded_attention(
        level, *(each.data_ptr() for each in given), native.FORMAT_CODES[query_CHn.dtype], *strides,
        num_tokens, num_heads, n, r, v, first, _bits(scale), rounds, value_CHv.data_ptr())
    return value_CHv


def expanded_definition(query_CHn: Tensor, query_CHr: Tensor, key_NHn: Tensor, key_Nr: Tensor, value_NHv: Tensor,
                        first: int, scale: float, rounds: bool = False) -> Tensor:
    """The same in plain torch, one token after another."""
    values = [value_NHv.new_empty(0, *value_NHv.shape[1:])]
    for token, queries in enumerate(zip(query_CHn, query_CHr, strict=True)):
        seen = first + token + 1
        query_Hn, query_Hr = (_scaled(each, scale, rounds) for each in queries)
        key_sHn, key_sr, value_sHv = (_as_multiplied(each[:seen], rounds) for each in (key_NHn, key_Nr, value_NHv))
        logit_Hs = (key_sHn * query_Hn).sum(-1).T + query_Hr @ key_sr.T
        weight_Hs, sum_H1 = _weights(logit_Hs, 0, rounds)
        value_Hv = torch.einsum("hs,shv->hv", weight_Hs, value_sHv) / sum_H1
        values.append(value_Hv.unsqueeze(0).to(value_NHv.dtype))
    return torch.cat(values)


def _as_multiplied(rows: Tensor, rounds: bool) -> Tensor:
    return (rows.bfloat16() if rounds else rows).float()


def _scaled(query: Tensor, scale: float, rounds: bool) -> Tensor:
    """Queries whose products are exponents of two."""
    return _as_multiplied(query.float() * (torch.tensor(scale) * LOG2_E), rounds)


def _weights(logit_HN: Tensor, first: int, rounds: bool) -> tuple[Tensor, Tensor]:
    """Of positions from `first` on: powers of two below the highest, and their sums, zero where there is no position.

    Weights are rounded below the highest of their tile and those before it, and made smaller thereafter.
    """
    (num_heads, num_seen), before = logit_HN.shape, first % TILE
    num_tiles = -(-(before + num_seen) // TILE)
    tile_HSp = F.pad(logit_HN, (before, num_tiles * TILE - before - num_seen), value=-torch.inf)
    highest_HS = tile_HSp.view(num_heads, num_tiles, TILE).amax(-1).cummax(1).values
    highest_HN = highest_HS.repeat_interleave(TILE, 1)[:, before:before + num_seen]
    weight_HN = _as_multiplied((logit_HN - highest_HN).exp2(), rounds) * (highest_HN - highest_HN[:, -1:]).exp2()
    return weight_HN, weight_HN.sum(-1, keepdim=True)


def _bits(value: float) -> int:
    """Of a float32, as compiled functions take it."""
    return int.from_bytes(struct.pack("<f", value), "little")
