"""Multi-head latent attention over the paged latent cache.

A token leaves one entry: a normed latent from which all heads' keys and values follow, and one rotary key that all
heads share. *Expanded* attention forms keys and values of the whole context, which pays when many queries share
them. *Absorbed* attention moves the key's expansion to the query and the value's to the result, so that a query
works on entries as they lie: decoding, and a short chunk behind a cached prefix. Both are the same mathematics.
Deterministic work uses the absorbed form for every token. Compiled kernels (`ops/mla.py`) give a token the same bits
in any company; without them each token is alone, over a context padded to whole blocks, so that all shapes follow from
its position.

T tokens · D model width · H heads · n key width without position · r rotary width · v value width · L latent width
W entry width (L + r) · N context positions · P rotary pairs · C tokens of one row · D decode rows · Q tokens of each
X tokens and heads
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.core.shape import ModelShape
from tripool.engine.model.context import DecodeRows, ForwardContext, PagedRows, Row
from tripool.engine.model.layers import softmax_scale
from tripool.engine.model.products import PackedExpansion, Weights, packed
from tripool.engine.ops import native
from tripool.engine.ops.layer import AttentionLayer
from tripool.engine.ops.mla import absorbed_attention, expanded_attention
from tripool.engine.ops.rms_norm import rms_norm
from tripool.engine.ops.rotary import entries_definition, rotate, write_entries

QUERY_TILE = 128
"""Queries taken together in expanded attention: bounds the logits' memory and skips what a causal mask hides."""


class LatentAttention:
    """Attention of one layer."""

    def __init__(self, shape: ModelShape, weights: Weights, layer: int, run: Any, deterministic: bool, *,
                 attends: bool = True) -> None:
        """`attends`: or else it writes entries and nothing more."""
        name = f"layers.{layer}.attention"
        self.shape = shape
        self.run = run
        self.compiled = native.level_for(weights[f"{name}.latent_norm"]) >= 0
        self.deterministic = deterministic
        self.scale = softmax_scale(shape)
        self.rounds = weights.rounds_rows
        self.head_width = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        in_bias_W = _query_bias_filled(weights.get(f"{name}.in_bias"), shape)
        self.entry_in = None
        if attends:
            self.expansion = weights.expansion(f"{name}.latent", shape.num_heads, shape.qk_nope_head_dim)
        else:
            self.entry_in = weights.matrix(f"{name}.in", in_bias_W, last=shape.entry_width)
        self.query_and_entry_in = weights.matrix(f"{name}.in", in_bias_W)
        self.query_norm = weights.get(f"{name}.query_norm")
        self.query_out = weights.matrix(f"{name}.query") if shape.q_lora_rank else None
        self.latent_norm_L = weights[f"{name}.latent_norm"]
        self.out = weights.matrix(f"{name}.out", weights.get(f"{name}.out_bias"))
        # A query costs more in absorbed form, the context costs more in expanded form: below so many queries it is the
        # context that decides (multiplications per context position and head).
        more_per_query = shape.entry_width + shape.kv_lora_rank - self.head_width - shape.v_head_dim
        expansion = shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)
        self.short_chunk = expansion / more_per_query if more_per_query > 0 else math.inf

    def __call__(self, x_TD: Tensor, context: ForwardContext, entries: Tensor) -> Tensor:
        """Write the tokens' entries, attend, and return what is added to the residual stream."""
        query_THx, entry_TW = self.run(self.project, x_TD)
        self.write(entry_TW, context, entries)
        query_THn, query_THr = query_THx.tensor_split([self.shape.qk_nope_head_dim], dim=-1)
        query_THr = self.run(self.rotate, query_THr, context.rotary_TP)
        if self.deterministic:
            query_THW = self.run(self.absorb, query_THn, query_THr)
            latent_THL = (self._one_by_one(query_THW, context.rows, entries) if context.paged is None else
                          self._paged(query_THW, context.paged, entries))
            value_THv = self.run(self.expand_value, latent_THL)
        else:
            value_THv = self._attend(query_THn, query_THr, context, entries)
        return self.run(self.output, value_THv)

    def in_one_call(self, input_norm_D: Tensor, post_norm_D: Tensor) -> AttentionLayer:
        """The same, with the norms before and after, for packed weights and tokens that all attend over the cache."""
        assert isinstance(self.expansion, PackedExpansion), "only packed weights are multiplied in one call"
        return AttentionLayer(
            self.shape, self.scale, input_norm=input_norm_D, query_norm=self.query_norm, latent_norm=self.latent_norm_L,
            post_norm=post_norm_D, latent_of_key=self.expansion.latent_of_key, value_of_latent=self.expansion.value,
            rounds=self.rounds,
            products=[packed(each) for each in (self.query_and_entry_in, self.query_out, self.out)])

    def project(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and entries, both before rotation."""
        shape = self.shape
        query, entry_TW = self.query_and_entry_in(x_TD).tensor_split([-shape.entry_width], dim=-1)
        if self.query_out is not None:
            query = self.query_out(rms_norm(query, self.query_norm, shape.rms_norm_eps))
        return query.unflatten(-1, (shape.num_heads, self.head_width)), entry_TW

    def entry(self, x_TD: Tensor) -> Tensor:
        """Entries alone, before norm and rotation."""
        assert self.entry_in is not None, "this one attends"
        return self.entry_in(x_TD)

    def write(self, entry_TW: Tensor, context: ForwardContext, entries: Tensor) -> None:
        """Norm and rotate what is to be entries, and write them to their places."""
        norm_L, eps, interleaved = self.latent_norm_L, self.shape.rms_norm_eps, self.shape.rope_interleaved
        if self.compiled:
            write_entries(entry_TW, norm_L, eps, context.rotary_TP, interleaved, entries, context.block_T,
                          context.offset_T)
        else:
            made_TW = self.run(lambda rows, rotary: entries_definition(rows, norm_L, eps, rotary, interleaved),
                               entry_TW, context.rotary_TP)
            entries.index_put_((context.block_T, context.offset_T), made_TW)

    def rotate(self, query_THr: Tensor, rotary_TP: Tensor) -> Tensor:
        """Rotated queries: in place, where compiled."""
        return rotate(query_THr, rotary_TP, self.shape.rope_interleaved, out_TXr=query_THr if self.compiled else None)

    def absorb(self, query_THn: Tensor, query_THr: Tensor) -> Tensor:
        """Queries that multiply entries as they lie."""
        latent = self.shape.kv_lora_rank
        query_THW = query_THn.new_empty(*query_THn.shape[:2], self.shape.entry_width)
        self.expansion.absorb(query_THn, query_THW[..., :latent])
        query_THW[..., latent:] = query_THr
        return query_THW

    def expand_value(self, latent_THL: Tensor) -> Tensor:
        return self.expansion.values(latent_THL)

    def output(self, value_THv: Tensor) -> Tensor:
        return self.out(value_THv.flatten(1))

    def _attend(self, query_THn: Tensor, query_THr: Tensor, context: ForwardContext, entries: Tensor) -> Tensor:
        parts = []
        if context.paged is not None and context.paged.stop:
            num_tokens = context.paged.stop
            query_THW = self.absorb(query_THn[:num_tokens], query_THr[:num_tokens])
            parts.append(self.expand_value(self._paged(query_THW, context.paged, entries)))
        elif context.decode:
            num_tokens = context.decode[-1].stop
            query_THW = self.absorb(query_THn[:num_tokens], query_THr[:num_tokens])
            latents = [self._absorbed(query_THW[group.start:group.stop], group, entries) for group in context.decode]
            parts.append(self.expand_value(latents[0] if len(latents) == 1 else torch.cat(latents)))
        for row in context.rows:
            query_CHn, query_CHr = query_THn[row.start:row.stop], query_THr[row.start:row.stop]
            if row.first and row.stop - row.start < self.short_chunk:
                latent_CHL = self._absorbed_chunk(self.absorb(query_CHn, query_CHr), row, entries)
                parts.append(self.expand_value(latent_CHL))
            else:
                parts.append(self._expanded(query_CHn, query_CHr, row, entries))
        if not parts:
            return query_THn.new_empty(0, self.shape.num_heads, self.shape.v_head_dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _paged(self, query_THW: Tensor, rows: PagedRows, entries: Tensor) -> Tensor:
        """Rows over their own contexts, as these lie."""
        return absorbed_attention(query_THW, entries, rows.block_RB, rows.first_R, rows.count_R, scale=self.scale,
                                  latent=self.shape.kv_lora_rank, first_seen=rows.first_seen, rounds=self.rounds)

    def _absorbed(self, query_THW: Tensor, decode: DecodeRows, entries: Tensor) -> Tensor:
        """Every row of a group over its own context, padded to the longest; a row's tokens are like more heads."""
        num_rows, num_tokens, num_positions = decode.barred_DQN.shape
        entry_DNW = _gather(entries, decode.block_DB).view(num_rows, num_positions, -1)
        heads = self.shape.num_heads
        barred = decode.barred_DQN.expand(-1, heads, -1) if num_tokens == 1 else (
            decode.barred_DQN.repeat_interleave(heads, 1))
        query_DXW = query_THW.reshape(num_rows, -1, self.shape.entry_width)
        logit_DXN = torch.baddbmm(barred, query_DXW, entry_DNW.transpose(1, 2), alpha=self.scale)
        latent_DXL = torch.bmm(logit_DXN.softmax(-1), entry_DNW[..., :self.shape.kv_lora_rank])
        return latent_DXL.view(query_THW.shape[0], heads, -1)

    def _absorbed_chunk(self, query_CHW: Tensor, row: Row, entries: Tensor) -> Tensor:
        """The few tokens of one row over its context, causally."""
        if row.paged is not None:
            return self._paged(query_CHW, row.paged, entries)
        entry_NW = self._context(row, entries)
        logit_CHN = torch.mm(query_CHW.flatten(0, 1), entry_NW.t()).unflatten(0, query_CHW.shape[:2]) * self.scale
        logit_CHN[..., row.first:] += _later(query_CHW.shape[0], logit_CHN).unsqueeze(1)
        latent = torch.mm(logit_CHN.softmax(-1).flatten(0, 1), entry_NW[:, :self.shape.kv_lora_rank])
        return latent.unflatten(0, query_CHW.shape[:2])

    def _context(self, row: Row, entries: Tensor) -> Tensor:
        """A row's entries in order, those of this batch included."""
        return _gather(entries, row.block_B).view(-1, self.shape.entry_width)[:row.num_positions]

    def _expanded(self, query_CHn: Tensor, query_CHr: Tensor, row: Row, entries: Tensor) -> Tensor:
        """The tokens of one row over its context, causally."""
        shape = self.shape
        entry_NW = self._context(row, entries)
        latent_NL, key_Nr = entry_NW.tensor_split([shape.kv_lora_rank], dim=-1)
        key_NHn, value_NHv = self.expansion.keys_and_values(latent_NL)
        if row.paged is not None:
            return expanded_attention(query_CHn, query_CHr, key_NHn, key_Nr, value_NHv, first=row.first,
                                      scale=self.scale, rounds=self.rounds)
        key_NHr = key_Nr.unsqueeze(1).expand(-1, shape.num_heads, -1)
        key_HxN = torch.cat([key_NHn, key_NHr], dim=-1).permute(1, 2, 0)
        value_HNv = value_NHv.transpose(0, 1)
        query_HCx = torch.cat([query_CHn, query_CHr], dim=-1).transpose(0, 1) * self.scale
        num_queries = query_HCx.shape[1]
        value_CHv = query_HCx.new_empty(num_queries, shape.num_heads, shape.v_head_dim)
        for start in range(0, num_queries, QUERY_TILE):
            stop = min(start + QUERY_TILE, num_queries)
            seen = row.first + stop
            logit_HCN = torch.bmm(query_HCx[:, start:stop], key_HxN[..., :seen])
            logit_HCN[..., seen - (stop - start):] += _later(stop - start, logit_HCN)
            value_CHv[start:stop] = torch.bmm(logit_HCN.softmax(-1), value_HNv[:, :seen]).transpose(0, 1)
        return value_CHv

    def _one_by_one(self, query_THW: Tensor, rows: list[Row], entries: Tensor) -> Tensor:
        """Every token alone, over a context of whole blocks: all shapes follow from its position."""
        block_tokens, rank = entries.shape[1], self.shape.kv_lora_rank
        latent_THL = query_THW.new_empty(*query_THW.shape[:2], rank)
        position_N = torch.arange(max((len(row.block_B) for row in rows), default=0) * block_tokens,
                                  device=query_THW.device)
        for row in rows:
            context_NW = _gather(entries, row.block_B).view(-1, self.shape.entry_width)
            for token in range(row.start, row.stop):
                position = row.first + token - row.start
                padded = (position // block_tokens + 1) * block_tokens
                logit_HN = torch.mm(query_THW[token], context_NW[:padded].t()) * self.scale
                logit_HN.masked_fill_(position_N[:padded] > position, -torch.inf)
                torch.mm(logit_HN.softmax(-1), context_NW[:padded, :rank], out=latent_THL[token])
        return latent_THL


def _gather(entries: Tensor, block_B: Tensor) -> Tensor:
    """A dense copy of whole blocks."""
    return entries.flatten(1).index_select(0, block_B)


def _later(num_tokens: int, like: Tensor) -> Tensor:
    """Minus infinity above the diagonal: a token does not see those after it."""
    return torch.full((num_tokens, num_tokens), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)


def _query_bias_filled(bias: Tensor | None, shape: ModelShape) -> Tensor | None:
    """A full-rank query has no bias while latent and rotary key have one: give it zeros."""
    if bias is None:
        return None
    query_width = shape.q_lora_rank or shape.num_heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    return F.pad(bias, (query_width + shape.entry_width - bias.shape[0], 0))
