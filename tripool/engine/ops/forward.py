"""A whole forward pass, and drafts of the MTP layer, in one call each.

For steps whose tokens all attend over the paged cache, by a rank that is alone: then nothing of a decode step is done
between its layers, and one call finds the places of tokens, embeds them, runs all layers, and writes what the MTP layer
and the cache keep. The slow definition is `DeepseekModel.forward` op by op, with the same bits.

T tokens · R rows · B blocks · D model width · L layers with experts · K picks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tripool.core.shape import ModelShape
from tripool.engine.batch import Batch, LatentCache
from tripool.engine.ops import native
from tripool.engine.ops.layer import AttentionLayer, DenseLayer, ExpertLayer, Weight, numbers, product
from tripool.engine.ops.sample import Draws, Ints

WholeLayer = tuple[AttentionLayer, ExpertLayer | DenseLayer]


@dataclass(frozen=True, slots=True)
class MtpParts:
    """What the MTP layer's entries are made of, and, where it is run, the layer and the norm behind it."""

    embed_norm: Tensor
    hidden_norm: Tensor
    input_norm: Tensor
    latent_norm: Tensor
    join: tuple[Weight, Tensor | None]
    entry: tuple[Weight, Tensor | None]
    layer: WholeLayer | None
    norm: Tensor | None


class Forward:
    """A model written down for C++, as integers in the order of the structures in `csrc/forward.h`."""

    def __init__(self, shape: ModelShape, embed_VD: Tensor, norm_D: Tensor, rotary: Tensor,
                 head: tuple[Weight, Tensor | None], layers: Sequence[WholeLayer], mtp: MtpParts | None) -> None:
        assert embed_VD.is_contiguous() and rotary.is_contiguous() and rotary.dtype == torch.complex64, "whole tables"
        self.shape = shape
        self._kept = (embed_VD, norm_D, rotary, head, layers, mtp)
        self._described: tuple = ()
        self._cache = self._model = numbers()
        self._written: list[Tensor] = []
        self._given: tuple[Tensor, ...] = ()
        self.num_choices = sum(isinstance(second, ExpertLayer) for _, second in layers)
        self.num_picks = shape.num_experts_per_token

    def __call__(self, batch: Batch, cache: LatentCache) -> tuple[Tensor, Tensor]:
        """The final-normed hidden states `[T, D]`, and the choices `[L, T, K]` of layers with experts.

        Raises:
            IndexError: a token is not in the vocabulary, or has no place in the cache.
        """
        rows = self._rows(batch, cache)
        hidden_TD = torch.empty(batch.num_tokens, self.shape.hidden_size)
        expert_LTK = torch.empty(self.num_choices, batch.num_tokens, self.num_picks, dtype=torch.int64)
        _check(native.module().forward(native.chosen_level(), self._model.data_ptr(), self._cache.data_ptr(),
                                       rows.data_ptr(), hidden_TD.data_ptr(), expert_LTK.data_ptr()))
        return hidden_TD, expert_LTK

    def draft(self, batch: Batch, cache: LatentCache, previous_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """The MTP layer's states `[T, D]`, and its choices `[T, K]`.

        `previous_TD`: the states before the tokens; None, of rows of one token: those in the cache. Raises as the
        forward pass does.
        """
        assert batch.num_tokens == batch.num_rows or previous_TD is not None, "the cache has states before rows alone"
        assert previous_TD is None or (previous_TD.dtype == torch.float32 and previous_TD.is_contiguous()), "rows"
        rows = self._rows(batch, cache)
        state_TD = torch.empty(batch.num_tokens, self.shape.hidden_size)
        expert_TK = torch.empty(batch.num_tokens, self.num_picks, dtype=torch.int64)
        _check(native.module().draft(native.chosen_level(), self._model.data_ptr(), self._cache.data_ptr(),
                                     rows.data_ptr(), 0 if previous_TD is None else previous_TD.data_ptr(),
                                     state_TD.data_ptr(), expert_TK.data_ptr()))
        return state_TD, expert_TK

    def guess(self, batch: Batch, cache: LatentCache, num_drafts_R: Ints, draw_R: Draws) -> tuple[Ints, Tensor]:
        """Drafts of rows of one token, the last that each knows, one after the other.

        Row r gets `num_drafts_R[r]`, no more than the row before it; blocks hold the positions of all but the last.
        `draw_R` say how the first is drawn. Returns the drafts `[R, J]`, zeros where there are none, and the layer's
        choices. Raises as the forward pass does.
        """
        assert batch.num_tokens == batch.num_rows == len(num_drafts_R) == len(draw_R), "rows are of one token"
        most = int(num_drafts_R[0])
        rows, num_drafts_R = self._rows(batch, cache), np.ascontiguousarray(num_drafts_R)
        draft_RJ = np.zeros((batch.num_rows, most), np.int64)
        expert_XK = torch.empty(int(num_drafts_R.sum()), self.num_picks, dtype=torch.int64)
        _check(native.module().guess(native.chosen_level(), self._model.data_ptr(), self._cache.data_ptr(),
                                     rows.data_ptr(), native.address(num_drafts_R), most, draw_R.ctypes.data,
                                     native.address(draft_RJ), expert_XK.data_ptr()))
        return draft_RJ, expert_XK

    def described(self, cache: LatentCache) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The model and this cache as they are written down, and what has to be kept as long as these are read."""
        self._describe(cache)
        return self._model, self._cache, self._written

    def _rows(self, batch: Batch, cache: LatentCache) -> Tensor:
        self._describe(cache)
        token_T, block_RB = batch.token_T, batch.block_table_RB.contiguous()
        assert token_T.is_contiguous() and token_T.dtype == block_RB.dtype == torch.int64, "tables are int64"
        spans = numbers(*batch.first_R, *batch.count_R)
        self._given = (block_RB, spans)                # as long as they are read
        return numbers(token_T.data_ptr(), batch.num_tokens, block_RB.data_ptr(), block_RB.shape[1], spans.data_ptr(),
                       spans.data_ptr() + 8 * batch.num_rows, batch.num_rows)

    def _describe(self, cache: LatentCache) -> None:
        """Write model and cache down, unless it was done for the same cache."""
        described = (cache.data.data_ptr(), cache.data.shape, cache.block_tokens)
        if described == self._described:
            return
        assert cache.data.dtype == torch.float32 and cache.data.is_contiguous(), "a cache of float32"
        embed_VD, norm_D, rotary, head, layers, mtp = self._kept
        shape, width = self.shape, cache.block_tokens * self.shape.entry_width
        num_blocks, stride = cache.data.shape
        self._cache = numbers(cache.data.data_ptr(), num_blocks, stride, cache.block_tokens,
                              shape.num_cached_layers * width)
        table = numbers(*(number for index, each in enumerate(layers) for number in _whole_layer(each, index * width)))
        self._written = [table]
        address = 0
        if mtp is not None:
            entries = shape.num_layers * width
            layer = numbers(*_whole_layer(mtp.layer, entries)) if mtp.layer is not None else None
            parts = numbers(mtp.embed_norm.data_ptr(), mtp.hidden_norm.data_ptr(), mtp.input_norm.data_ptr(),
                            mtp.latent_norm.data_ptr(), shape.kv_lora_rank, entries,
                            0 if mtp.norm is None else mtp.norm.data_ptr(), *product(*mtp.join), *product(*mtp.entry),
                            0 if layer is None else layer.data_ptr())
            address = parts.data_ptr()
            self._written += [parts] if layer is None else [parts, layer]
        self._model = numbers(
            shape.hidden_size, embed_VD.data_ptr(), native.FORMAT_CODES[embed_VD.dtype], embed_VD.shape[0],
            norm_D.data_ptr(), native.float_bits(shape.rms_norm_eps), rotary.data_ptr(), rotary.shape[1],
            rotary.shape[0], shape.rope_interleaved, table.data_ptr(), len(layers), address, *product(*head))
        self._described = described


def _whole_layer(layer: WholeLayer, entries: int) -> tuple[int, int, int, int]:
    attention, second = layer
    address = second.numbers.data_ptr()
    return (attention.numbers.data_ptr(), *((0, address) if isinstance(second, DenseLayer) else (address, 0)), entries)


def _check(wrong: int) -> None:
    if wrong >= 0:
        raise IndexError(f"token {wrong} of the batch is not in the vocabulary, or has no place in the cache")
