"""Latent attention: absorbed over the paged cache, and expanded over keys and values written out.

*Absorbed*: tokens and heads of a row are queries that multiply the row's entries as they lie. An entry is key (all of
it) and value (its latent part) at once, so it is read once for up to 64 tokens and heads. *Expanded*: the tokens of one
row over keys and values of each head, a block of queries by a tile of positions at a time, so that no matrix of scores
is written down.

A token sees positions up to its own. Beyond them nothing is read, whatever lies there. What a token and head computes
is the same to the bit in any company, with any number of threads and any size of blocks (see `csrc/mla.h`), so
deterministic work runs these kernels too. AVX2 and AVX-512 give the same bits; plain C++ rounds products by themselves.

T tokens · H heads · W entry width · L latent width · R rows · B blocks · C tokens of one row · N positions
n key width without position · r rotary width · v value width
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.ops.native import FLOATS


def absorbed_attention(query_THW: Tensor, entries: Tensor, block_RB: Tensor, first_R: Tensor, count_R: Tensor, *,
                       scale: float, latent: int, first_seen: int = 0, level: int | None = None) -> Tensor:
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
        return absorbed_definition(query_THW, entries, block_RB, first_R, count_R, scale, latent, first_seen)
    query_THW = query_THW.contiguous()
    latent_THL = query_THW.new_empty(num_tokens, num_heads, latent)
    wrong = native.module().absorbed_attention(
        level, query_THW.data_ptr(), native.FORMAT_CODES[query_THW.dtype], num_tokens, num_heads, width, latent,
        entries.data_ptr(), native.FORMAT_CODES[entries.dtype], num_blocks, entries.stride(0), block_tokens,
        block_RB.data_ptr(), columns, first_R.data_ptr(), count_R.data_ptr(), num_rows, first_seen, _bits(scale),
        latent_THL.data_ptr())
    assert wrong < 0, f"row {wrong} of {num_rows} has other tokens or blocks than there are"
    return latent_THL


def absorbed_definition(query_THW: Tensor, entries: Tensor, block_RB: Tensor, first_R: Tensor, count_R: Tensor,
                        scale: float, latent: int, first_seen: int) -> Tensor:
    """The same in plain torch, one token after another."""
    latents, start = [query_THW.new_empty(0, query_THW.shape[1], latent)], 0
    for blocks, first, count in zip(block_RB, first_R.tolist(), count_R.tolist(), strict=True):
        entry_NW = entries[blocks].flatten(0, 1).float()
        for token in range(count):
            seen_NW = entry_NW[first_seen:first + token + 1]
            logit_HN = query_THW[start + token].float() @ seen_NW.T * scale
            latents.append((logit_HN.softmax(-1) @ seen_NW[:, :latent]).unsqueeze(0).to(query_THW.dtype))
        start += count
    return torch.cat(latents)


def expanded_attention(query_CHn: Tensor, query_CHr: Tensor, key_NHn: Tensor, key_Nr: Tensor, value_NHv: Tensor, *,
                       first: int, scale: float, level: int | None = None) -> Tensor:
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
        return expanded_definition(query_CHn, query_CHr, key_NHn, key_Nr, value_NHv, first, scale)
    given = tuple(each if each.stride(-1) == 1 else each.contiguous() for each in given)
    value_CHv = query_CHn.new_empty(num_tokens, num_heads, v)
    strides = [stride for each in given for stride in each.stride()[:-1]]
    native.module().expanded_attention(
        level, *(each.data_ptr() for each in given), native.FORMAT_CODES[query_CHn.dtype], *strides,
        num_tokens, num_heads, n, r, v, first, _bits(scale), value_CHv.data_ptr())
    return value_CHv


def expanded_definition(query_CHn: Tensor, query_CHr: Tensor, key_NHn: Tensor, key_Nr: Tensor, value_NHv: Tensor,
                        first: int, scale: float) -> Tensor:
    """The same in plain torch, one token after another."""
    values = [value_NHv.new_empty(0, *value_NHv.shape[1:])]
    for token, (query_Hn, query_Hr) in enumerate(zip(query_CHn.float(), query_CHr.float(), strict=True)):
        seen = first + token + 1
        logit_NH = (key_NHn[:seen].float() * query_Hn).sum(-1) + key_Nr[:seen].float() @ query_Hr.T
        weight_NH1 = (logit_NH * scale).softmax(0).unsqueeze(-1)
        values.append((weight_NH1 * value_NHv[:seen].float()).sum(0, keepdim=True).to(value_NHv.dtype))
    return torch.cat(values)


def _bits(value: float) -> int:
    """Of a float32, as compiled functions take it."""
    return int.from_bytes(struct.pack("<f", value), "little")
