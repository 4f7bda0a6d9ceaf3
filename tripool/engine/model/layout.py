"""Which tensors the model computes with, and which checkpoint tensors fill them.

Weights that one product reads together lie together (query and latent projections, gate and up), so that a step
is few large products. Every checkpoint tensor lands whole and unchanged in one contiguous region, so a loader can
read straight into place; an expert is one index of a stack, and a rank holds the experts of its own share.
The plan knows names and shapes; it knows nothing of files, element types on disk or devices.

Names, for layer `i` (MTP layers follow the main ones):

    embed [V, D] · norm [D] · head [V, D] (absent when tied to embed)
    layers.i.input_norm, layers.i.post_norm [D]
    layers.i.attention.in [query + latent + rotary, D]    query: rank of q_lora, or all query heads without it
    layers.i.attention.query_norm [Q] · .query [heads * (nope + rope), Q]      with q_lora alone
    layers.i.attention.latent_norm [L] · .latent [heads * (nope + v), L] · .out [D, heads * v]
    layers.i.attention.in_bias, .out_bias                 with attention_bias alone
    layers.i.dense.gate_up [2F, D] · .down [D, F]         layers without experts
    layers.i.experts.gate_up [E, 2F, D] · .down [E, D, F] this rank's routed experts
    layers.i.router.gate [all E, D] · .bias [all E]       float32 always
    layers.i.shared.gate_up [2F, D] · .down [D, F]
    layers.i.mtp.embed_norm, .hidden_norm, .norm [D] · .join [D, 2D]           MTP layers alone
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tripool.core.shape import ModelShape

Region = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor and its place: `weight[into]` has exactly its shape and is contiguous."""

    tensor: str
    shape: tuple[int, ...]
    into: Region = ()


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of the model. `dtype` is the model's own unless the mathematics asks for float32 at any precision."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    dtype: Literal["model", "float32"] = "model"


def expert_range(shape: ModelShape, rank: int, num_ranks: int) -> range:
    """The routed experts that a rank holds: equal consecutive shares."""
    total = shape.num_routed_experts
    assert total % num_ranks == 0, f"{num_ranks} ranks do not divide {total} experts"
    share = total // num_ranks
    return range(rank * share, (rank + 1) * share)


def weight_plan(shape: ModelShape, rank: int = 0, num_ranks: int = 1) -> list[WeightSpec]:
    """All tensors of one rank, in the order in which a forward pass needs them."""
    plan = [_whole("embed", "model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)]
    for layer in range(shape.num_cached_layers):
        plan += _layer(shape, layer, expert_range(shape, rank, num_ranks))
    plan.append(_whole("norm", "model.norm.weight", shape.hidden_size))
    if not shape.tie_embeddings:
        plan.append(_whole("head", "lm_head.weight", shape.vocab_size, shape.hidden_size))
    return plan


def shared_tensors(shape: ModelShape) -> list[Source]:
    """Checkpoint tensors that repeat others (the MTP layer's embedding and head, a tied head): known, and not read.

    A published checkpoint stores them or leaves them out; the model shares the main ones either way.
    """
    table = (shape.vocab_size, shape.hidden_size)
    repeated = [Source("lm_head.weight", table)] if shape.tie_embeddings else []
    for layer in range(shape.num_layers, shape.num_cached_layers):
        repeated.append(Source(f"model.layers.{layer}.embed_tokens.weight", table))
        repeated.append(Source(f"model.layers.{layer}.shared_head.head.weight", table))
    return repeated


def _layer(shape: ModelShape, layer: int, experts: range) -> Iterator[WeightSpec]:
    ours, theirs, width = f"layers.{layer}", f"model.layers.{layer}", shape.hidden_size
    if layer >= shape.num_layers:
        yield _whole(f"{ours}.mtp.embed_norm", f"{theirs}.enorm.weight", width)
        yield _whole(f"{ours}.mtp.hidden_norm", f"{theirs}.hnorm.weight", width)
        yield _whole(f"{ours}.mtp.join", f"{theirs}.eh_proj.weight", width, 2 * width)
    yield _whole(f"{ours}.input_norm", f"{theirs}.input_layernorm.weight", width)
    yield from _attention(shape, f"{ours}.attention", f"{theirs}.self_attn")
    yield _whole(f"{ours}.post_norm", f"{theirs}.post_attention_layernorm.weight", width)
    if shape.is_moe(layer):
        yield from _experts(shape, ours, f"{theirs}.mlp", experts)
    else:
        yield from _gated(f"{ours}.dense", f"{theirs}.mlp", width, shape.intermediate_size)
    if layer >= shape.num_layers:
        yield _whole(f"{ours}.mtp.norm", f"{theirs}.shared_head.norm.weight", width)


def _attention(shape: ModelShape, ours: str, theirs: str) -> Iterator[WeightSpec]:
    query_width = shape.num_heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    down = (f"{theirs}.q_a_proj", shape.q_lora_rank) if shape.q_lora_rank else (f"{theirs}.q_proj", query_width)
    into = [down, (f"{theirs}.kv_a_proj_with_mqa", shape.entry_width)]
    yield _stacked(f"{ours}.in", [(f"{name}.weight", rows) for name, rows in into], shape.hidden_size)
    if shape.attention_bias:
        # The published layers give q_proj no bias; only the low-rank query has one.
        parts = [(f"{name}.bias", rows) for name, rows in into if not name.endswith(".q_proj")]
        yield _stacked(f"{ours}.in_bias", parts)
    if shape.q_lora_rank:
        yield _whole(f"{ours}.query_norm", f"{theirs}.q_a_layernorm.weight", shape.q_lora_rank)
        yield _whole(f"{ours}.query", f"{theirs}.q_b_proj.weight", query_width, shape.q_lora_rank)
    yield _whole(f"{ours}.latent_norm", f"{theirs}.kv_a_layernorm.weight", shape.kv_lora_rank)
    yield _whole(f"{ours}.latent", f"{theirs}.kv_b_proj.weight",
                 shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim), shape.kv_lora_rank)
    yield _whole(f"{ours}.out", f"{theirs}.o_proj.weight", shape.hidden_size, shape.num_heads * shape.v_head_dim)
    if shape.attention_bias:
        yield _whole(f"{ours}.out_bias", f"{theirs}.o_proj.bias", shape.hidden_size)


def _experts(shape: ModelShape, ours: str, theirs: str, experts: range) -> Iterator[WeightSpec]:
    all_experts, width, inner = shape.num_routed_experts, shape.hidden_size, shape.moe_intermediate_size
    gate = Source(f"{theirs}.gate.weight", (all_experts, width))
    yield WeightSpec(f"{ours}.router.gate", gate.shape, (gate,), dtype="float32")
    if shape.topk_method == "noaux_tc":
        bias = Source(f"{theirs}.gate.e_score_correction_bias", (all_experts,))
        yield WeightSpec(f"{ours}.router.bias", bias.shape, (bias,), dtype="float32")
    first, second = slice(0, inner), slice(inner, 2 * inner)
    gate_up, down = [], []
    for slot, expert in enumerate(experts):
        name = f"{theirs}.experts.{expert}"
        gate_up.append(Source(f"{name}.gate_proj.weight", (inner, width), (slot, first)))
        gate_up.append(Source(f"{name}.up_proj.weight", (inner, width), (slot, second)))
        down.append(Source(f"{name}.down_proj.weight", (width, inner), (slot,)))
    yield WeightSpec(f"{ours}.experts.gate_up", (len(experts), 2 * inner, width), tuple(gate_up))
    yield WeightSpec(f"{ours}.experts.down", (len(experts), width, inner), tuple(down))
    if shape.num_shared_experts:
        yield from _gated(f"{ours}.shared", f"{theirs}.shared_experts", width, inner * shape.num_shared_experts)


def _gated(ours: str, theirs: str, width: int, inner: int) -> Iterator[WeightSpec]:
    parts = [(f"{theirs}.gate_proj.weight", inner), (f"{theirs}.up_proj.weight", inner)]
    yield _stacked(f"{ours}.gate_up", parts, width)
    yield _whole(f"{ours}.down", f"{theirs}.down_proj.weight", width, inner)


def _whole(name: str, tensor: str, *shape: int) -> WeightSpec:
    return WeightSpec(name, shape, (Source(tensor, shape),))


def _stacked(name: str, parts: list[tuple[str, int]], *tail: int) -> WeightSpec:
    """Tensors below one another: `parts` are their names and numbers of rows."""
    sources, row = [], 0
    for tensor, rows in parts:
        sources.append(Source(tensor, (rows, *tail), (slice(row, row + rows),)))
        row += rows
    return WeightSpec(name, (row, *tail), tuple(sources))
