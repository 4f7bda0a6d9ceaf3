"""What the operators of a model have to do: multiplications, bytes of weights, of cache entries and of activations.

Pure arithmetic on a `ModelShape`. Names are the paper's: MLAProlog is everything before the attention core (section
4.2.2), with the key half of kv_b absorbed; the output projection contains its value half. Prefill expands keys and
values instead, and attention is then that of as many heads (section 4.2.2).

A parameter is counted once per element; how many bytes it takes is `Numbers`'. A multiplication with an addition
counts as two operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from tripool.core.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Numbers:
    """Bytes of an element. The defaults are the paper's (section 4.5): INT8 products, BF16 for the rest."""

    weight_bytes: float = 1.0              # matrices of attention and feed-forwards
    table_bytes: float = 2.0               # embedding and head
    latent_bytes: float = 2.0              # of a cache entry's latent; with 1 attention multiplies it as INT8, too
    rotary_bytes: float = 2.0              # of its rotary part
    activation_bytes: float = 2.0          # between operators, and in combine
    sent_bytes: float = 1.0                # of a token in dispatch
    scale_bytes: float = 512.0             # of a quantised token's scales on their way (section 4.2.1: 7 KB and 0.5 KB)


@dataclass(frozen=True, slots=True)
class Work:
    """Per layer, for one token or for the whole layer, as the name says."""

    down_params: int                       # q_a and kv_a: before the all-gather of SP-TP-SP
    up_params: int                         # q_b and kv_b
    up_cache_params: int                   # kv_b alone: of a token whose cache entry is there already
    absorbed_key_params: int
    absorbed_value_params: int
    output_params: int                     # o_proj
    expert_params: int
    gate_params: int
    dense_params: int                      # of a layer without experts
    draft_params: int                      # of the MTP layer's projection of two hidden states into one
    head_params: int
    absorbed_operations: int               # of one query token with one token of the context
    absorbed_rotary_operations: int        # those of them with the rotary part of an entry
    expanded_operations: int
    norm_elements: int                     # activations that norms and quantisation read or write, per token
    gated_elements: int                    # the same of the gated product of one expert

    @property
    def prolog_params(self) -> int:
        """What decode multiplies by before the attention core."""
        return self.down_params + self.up_params - self.up_cache_params + self.absorbed_key_params

    @property
    def decode_output_params(self) -> int:
        """What decode multiplies by after it."""
        return self.absorbed_value_params + self.output_params


def work_of(shape: ModelShape) -> Work:
    """The arithmetic of a model."""
    heads, hidden = shape.num_heads, shape.hidden_size
    key_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim
    query_down = hidden * shape.q_lora_rank if shape.q_lora_rank else 0
    query_up = (shape.q_lora_rank or hidden) * heads * key_dim
    key_value_up = shape.kv_lora_rank * heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    # In elements of the model's own type: two norms, each with the sum before it (two reads, two writes), the rotary
    # part of the queries (read, written), quantisation of what attention gives (read, half as much written).
    norm = 8 * hidden + 2 * heads * shape.qk_rope_head_dim + 3 * heads * shape.v_head_dim // 2
    return Work(
        down_params=query_down + hidden * shape.entry_width,
        up_params=query_up + key_value_up,
        up_cache_params=key_value_up,
        absorbed_key_params=shape.kv_lora_rank * heads * shape.qk_nope_head_dim,
        absorbed_value_params=shape.kv_lora_rank * heads * shape.v_head_dim,
        output_params=heads * shape.v_head_dim * hidden,
        expert_params=shape.expert_params() if shape.num_routed_experts else 0,
        gate_params=hidden * shape.num_routed_experts,
        dense_params=3 * hidden * shape.intermediate_size,
        draft_params=2 * hidden * hidden,
        head_params=shape.vocab_size * hidden,
        absorbed_operations=2 * heads * (shape.entry_width + shape.kv_lora_rank),
        absorbed_rotary_operations=2 * heads * shape.qk_rope_head_dim,
        expanded_operations=2 * heads * (key_dim + shape.v_head_dim),
        norm_elements=norm,
        gated_elements=5 * shape.moe_intermediate_size // 2,
    )


def dispatch_bytes(shape: ModelShape, numbers: Numbers) -> float:
    """One token to one expert: its values and their scales."""
    scales = numbers.scale_bytes if numbers.sent_bytes < numbers.activation_bytes else 0.0
    return shape.hidden_size * numbers.sent_bytes + scales


def combine_bytes(shape: ModelShape, numbers: Numbers) -> float:
    """One token back from one expert."""
    return shape.hidden_size * numbers.activation_bytes


def entry_bytes(shape: ModelShape, numbers: Numbers, num_layers: int) -> float:
    """Cache entries of one token in so many layers."""
    return (shape.kv_lora_rank * numbers.latent_bytes + shape.qk_rope_head_dim * numbers.rotary_bytes) * num_layers
