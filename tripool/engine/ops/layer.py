"""Halves of a layer in one call each: attention over the paged cache, and experts that are all on this rank.

What Python would do operation by operation, C++ does in the same order and to the same bits: a decode step of a few
rows spends no time between its operations. *Attention* is the paper's MLAProlog and Fused Attention in one. The slow
definitions are `LatentAttention` and `MixtureOfExperts` in `engine/model`, which do everything else too: rows that
attend to keys written out, experts on other ranks, element types other than float32.

A layer and a step are written down once, as integers in the order of the structures in `csrc/layer.h`.

T tokens · D model width · K picks · R rows
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tripool.core.shape import ModelShape
from tripool.engine.ops import native
from tripool.engine.ops.float_linear import FloatWeight, ScaledWeight
from tripool.engine.ops.head_product import HeadWeight
from tripool.engine.ops.int8_linear import Int8Weight
from tripool.engine.ops.router import routing_of

Weight = FloatWeight | Int8Weight | ScaledWeight
NOTHING = (-1, 0, 0, 0, 0, 0, 0)


class AttentionLayer:
    """Attention of one layer, with the norms before and after it."""

    def __init__(self, shape: ModelShape, scale: float, *, input_norm: Tensor, query_norm: Tensor | None,
                 latent_norm: Tensor, post_norm: Tensor, products: Sequence[tuple[Weight, Tensor | None] | None],
                 latent_of_key: HeadWeight, value_of_latent: HeadWeight, rounds: bool) -> None:
        """`products`: of inputs, of queries (if there is one) and of the output, each with its bias. `rounds`: see
        `absorbed_attention`."""
        self.width = shape.hidden_size
        self.kept = (input_norm, query_norm, latent_norm, post_norm, products, latent_of_key, value_of_latent)
        self.numbers = numbers(
            shape.hidden_size, shape.num_heads, shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim,
            shape.kv_lora_rank, native.float_bits(shape.rms_norm_eps), native.float_bits(scale), shape.rope_interleaved,
            rounds, input_norm.data_ptr(), 0 if query_norm is None else query_norm.data_ptr(), latent_norm.data_ptr(),
            post_norm.data_ptr(), *(number for each in products for number in (product(*each) if each else NOTHING)),
            *product(latent_of_key), *product(value_of_latent))

    def __call__(self, x_TD: Tensor, step: AttentionStep, entries: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream with what attention adds, and its norm. Writes the tokens' entries."""
        assert entries.shape == step.entries_shape and entries.stride() == step.entries_stride, "another cache"
        assert x_TD.dtype == torch.float32 and x_TD.shape == (step.num_tokens, self.width), "a row for each token"
        x_TD, y_TD = x_TD.clone(memory_format=torch.contiguous_format), torch.empty_like(x_TD)
        wrong = native.module().attention_layer(native.chosen_level(), self.numbers.data_ptr(), step.numbers.data_ptr(),
                                                entries.data_ptr(), x_TD.data_ptr(), y_TD.data_ptr())
        if wrong >= 0:
            raise IndexError(f"token or row {wrong} has no place in the cache")
        return x_TD, y_TD


class AttentionStep:
    """What all layers of a step have in common: tokens of rows that all attend over the paged cache."""

    def __init__(self, rotary_TP: Tensor, block_T: Tensor, offset_T: Tensor, block_RB: Tensor, first_R: Tensor,
                 count_R: Tensor, first_seen: int, entries: Tensor) -> None:
        num_tokens, num_rows = block_T.shape[0], first_R.shape[0]
        assert entries.dtype == torch.float32 and entries.stride()[1:] == (entries.shape[2], 1), "float32 entries"
        assert rotary_TP.dtype == torch.complex64 and rotary_TP.shape[0] == num_tokens, "a rotation for each token"
        given = (rotary_TP, block_T, offset_T, block_RB, first_R, count_R)
        assert all(each.is_contiguous() for each in given) and all(each.dtype == torch.int64 for each in given[1:]), \
            "tables are int64 and contiguous"
        assert offset_T.shape == (num_tokens,) and block_RB.shape[:1] == count_R.shape == (num_rows,), "other tables"
        self.kept, self.num_tokens = given, num_tokens
        self.entries_shape, self.entries_stride = entries.shape, entries.stride()
        self.numbers = numbers(num_tokens, rotary_TP.data_ptr(), rotary_TP.shape[1], block_T.data_ptr(),
                                offset_T.data_ptr(), block_RB.data_ptr(), block_RB.shape[1], first_R.data_ptr(),
                                count_R.data_ptr(), num_rows, first_seen, entries.shape[0], entries.stride(0),
                                entries.shape[1])


class ExpertLayer:
    """Router, experts, shared expert and their sum, of one layer."""

    def __init__(self, shape: ModelShape, gate: Weight, bias_E: Tensor | None, experts: tuple[Weight, Weight],
                 shared: tuple[Weight, Weight] | None) -> None:
        """`experts` and `shared`: gate and up in turn, and down."""
        self.width, self.num_picks = shape.hidden_size, shape.num_experts_per_token
        self.kept = (gate, bias_E, experts, shared)
        self.numbers = numbers(
            shape.hidden_size, *routing_of(shape), 0 if bias_E is None else bias_E.data_ptr(), *product(gate),
            *product(experts[0]), *product(experts[1]),
            *(number for each in (shared or (None, None)) for number in (product(each) if each else NOTHING)))

    def __call__(self, y_TD: Tensor, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream `x` with what the experts make of the normed `y`, and the experts `[T, K]`."""
        for each_TD in (y_TD, x_TD):
            assert each_TD.dtype == torch.float32 and each_TD.is_contiguous() and each_TD.shape[1] == self.width, "rows"
        x_TD, expert_TK = x_TD.clone(), torch.empty(len(x_TD), self.num_picks, dtype=torch.int64)
        native.module().expert_layer(native.chosen_level(), self.numbers.data_ptr(), len(x_TD), y_TD.data_ptr(),
                                     x_TD.data_ptr(), expert_TK.data_ptr())
        return x_TD, expert_TK


class DenseLayer:
    """A dense feed-forward of one layer."""

    def __init__(self, gate_up: Weight, down: Weight) -> None:
        self.kept = (gate_up, down)
        self.numbers = numbers(*product(gate_up), *product(down))


def numbers(*values: int) -> Tensor:
    """As C++ reads them."""
    return torch.tensor(values, dtype=torch.int64)


def product(weight: Weight, bias_N: Tensor | None = None) -> tuple[int, ...]:
    """Packed matrices, written down."""
    scales = weight.scale if isinstance(weight, Int8Weight | ScaledWeight) else None
    sums = weight.sum if isinstance(weight, Int8Weight) else None
    code = native.FORMAT_CODES[weight.data.dtype] if isinstance(weight, Int8Weight) else weight.format
    return (code, weight.data.data_ptr(), weight.num_outputs, weight.num_inputs,
            *(0 if each is None else each.data_ptr() for each in (scales, sums, bias_N)))
