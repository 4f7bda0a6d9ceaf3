"""Which tensors the model computes with, and which checkpoint tensors fill them.

Weights that one product reads together lie together (query and latent projections, gate and up), so that a step
is few large products. Every checkpoint tensor lands whole and unchanged in one contiguous region, so a loader can
read straight into place; an expert is one index of a stack, which has one for each slot of the rank.
The plan knows names and shapes; it knows nothing of files, element types on disk or devices.

Names, for layer `i` (MTP layers follow the main ones):

    embed [V, D] · norm [D] · head [V, D] (absent when tied to embed)
    layers.i.input_norm, layers.i.post_norm [D]
    layers.i.attention.in [query + latent + rotary, D]    query: rank of q_lora, or all query heads without it
    layers.i.attention.query_norm [Q] · .query [heads * (nope + rope), Q]      with q_lora alone
    layers.i.attention.latent_norm [L] · .latent [heads * (nope + v), L] · .out [D, heads * v]
    layers.i.attention.in_bias, .out_bias                 with attention_bias alone
    layers.i.dense.gate_up [2F, D] · .down [D, F]         layers without experts
    layers.i.experts.gate_up [E, 2F, D] · .down [E, D, F] the experts in this rank's slots; an empty slot is not filled
    layers.i.router.gate [all E, D] · .bias [all E]       float32 always
    layers.i.shared.gate_up [2F, D] · .down [D, F]         unless the shared expert has slots of its own
    layers.i.mtp.embed_norm, .hidden_norm, .norm [D] · .join [D, 2D]           MTP layers alone

A matrix that is held in INT8 has beside it `<name>.scale`, float32 without the last dimension: one for each output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tripool.core.errors import ConfigError
from tripool.core.placement import EMPTY, Placement, even_geometry, initial_placement
from tripool.core.shape import ModelShape

Region = tuple[int | slice, ...]
SCALE = ".scale"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor and its place: `weight[into]` has exactly its shape and is contiguous.

    Many ranks may read it; `counted` is true on one of them, whose part of the fingerprint it is.
    """

    tensor: str
    shape: tuple[int, ...]
    into: Region = ()
    counted: bool = True


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of the model, and the element type in which it is held.

    That is the one computed in, but float32 where the mathematics asks for it at any precision, and what is stored
    where kernels take it as it is (`stored.as_stored`).
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    dtype: Literal["model", "float32", "bfloat16", "int8"] = "model"

    @property
    def is_matrix(self) -> bool:
        """Rows are multiplied by it, and it is used for nothing else."""
        as_it_lies = self.dtype == "float32" or self.name.endswith("embed")
        return len(self.shape) > 1 and not as_it_lies

    @property
    def is_expansion(self) -> bool:
        """It makes keys and values of latents, head by head: rows stay floats, whatever it is held in."""
        return self.name.endswith(".latent")


def moe_layers(shape: ModelShape) -> list[int]:
    """Layers with experts, those of MTP last: the layers that an expert map counts."""
    return [layer for layer in range(shape.num_cached_layers) if shape.is_moe(layer)]


def check_mtp(shape: ModelShape) -> None:
    """See that there is a layer to draft with.

    Raises:
        ConfigError: there is none.
    """
    if not shape.num_mtp_layers:
        raise ConfigError("num_speculative_tokens asks for drafting, but the model has no MTP layer "
                          "(num_nextn_predict_layers in config.json, and that layer's tensors); leave it out")


def whole_placement(shape: ModelShape) -> Placement:
    """The expert map of one rank that holds every expert."""
    return initial_placement(even_geometry(1, shape.num_routed_experts), len(moe_layers(shape)))


def weight_plan(shape: ModelShape, placement: Placement | None = None, rank: int = 0) -> list[WeightSpec]:
    """All tensors of one rank, in the order in which a forward pass needs them; without a map, of the only rank."""
    placement = placement or whole_placement(shape)
    moe = {layer: index for index, layer in enumerate(moe_layers(shape))}
    plan = [_whole("embed", "model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)]
    for layer in range(shape.num_cached_layers):
        held = _held(placement, rank, moe[layer]) if layer in moe else []
        plan += _layer(shape, layer, held, shared_here=placement.num_experts == shape.num_routed_experts)
    plan.append(_whole("norm", "model.norm.weight", shape.hidden_size))
    if not shape.tie_embeddings:
        plan.append(_whole("head", "lm_head.weight", shape.vocab_size, shape.hidden_size))
    if rank:
        plan = [spec if ".experts." in spec.name else _uncounted(spec) for spec in plan]
    return plan


def _held(placement: Placement, rank: int, layer: int) -> list[Held]:
    """The expert in each of a rank's slots of one layer, and whether no slot before holds it too."""
    experts = placement.layers[layer]
    own = placement.slots_of_rank(rank)
    before = set(experts[:own.start])
    return [Held(experts[slot], experts[slot] not in before) for slot in own]


def _uncounted(spec: WeightSpec) -> WeightSpec:
    return replace(spec, sources=tuple(replace(source, counted=False) for source in spec.sources))


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


@dataclass(frozen=True, slots=True)
class Held:
    """What a slot holds."""

    expert: int                 # or EMPTY; after the routed ones comes the shared one
    is_first: bool              # of its copies


def _layer(shape: ModelShape, layer: int, held: list[Held], shared_here: bool) -> Iterator[WeightSpec]:
    ours, theirs, width = f"layers.{layer}", f"model.layers.{layer}", shape.hidden_size
    if layer >= shape.num_layers:
        yield _whole(f"{ours}.mtp.embed_norm", f"{theirs}.enorm.weight", width)
        yield _whole(f"{ours}.mtp.hidden_norm", f"{theirs}.hnorm.weight", width)
        yield _whole(f"{ours}.mtp.join", f"{theirs}.eh_proj.weight", width, 2 * width)
    yield _whole(f"{ours}.input_norm", f"{theirs}.input_layernorm.weight", width)
    yield from _attention(shape, f"{ours}.attention", f"{theirs}.self_attn")
    yield _whole(f"{ours}.post_norm", f"{theirs}.post_attention_layernorm.weight", width)
    if shape.is_moe(layer):
        yield from _experts(shape, ours, f"{theirs}.mlp", held, shared_here)
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


def _experts(shape: ModelShape, ours: str, theirs: str, held: list[Held], shared_here: bool) -> Iterator[WeightSpec]:
    all_experts, width, inner = shape.num_routed_experts, shape.hidden_size, shape.moe_intermediate_size
    gate = Source(f"{theirs}.gate.weight", (all_experts, width))
    yield WeightSpec(f"{ours}.router.gate", gate.shape, (gate,), dtype="float32")
    if shape.topk_method == "noaux_tc":
        bias = Source(f"{theirs}.gate.e_score_correction_bias", (all_experts,))
        yield WeightSpec(f"{ours}.router.bias", bias.shape, (bias,), dtype="float32")
    gate_up: list[Source] = []
    down: list[Source] = []
    for slot, each in enumerate(held):
        if each.expert != EMPTY:
            two, one = _expert(shape, theirs, each.expert)
            gate_up += [replace(source, into=(slot, *source.into), counted=each.is_first) for source in two]
            down += [replace(source, into=(slot,), counted=each.is_first) for source in one]
    yield WeightSpec(f"{ours}.experts.gate_up", (len(held), 2 * inner, width), tuple(gate_up))
    yield WeightSpec(f"{ours}.experts.down", (len(held), width, inner), tuple(down))
    if shape.num_shared_experts and shared_here:
        yield from _gated(f"{ours}.shared", f"{theirs}.shared_experts", width, inner * shape.num_shared_experts)


def expert_plan(shape: ModelShape, layer: int, expert: int) -> list[WeightSpec]:
    """`gate_up` and `down` of one expert, which may be the shared one (numbered after the routed ones)."""
    inner, width = shape.moe_intermediate_size, shape.hidden_size
    gate_up, down = _expert(shape, f"model.layers.{layer}.mlp", expert)
    return [WeightSpec("gate_up", (2 * inner, width), gate_up), WeightSpec("down", (width, inner), down)]


def _expert(shape: ModelShape, theirs: str, expert: int) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    """What fills its gate and up, and its down."""
    inner, width = shape.moe_intermediate_size, shape.hidden_size
    name = f"{theirs}.experts.{expert}" if expert < shape.num_routed_experts else f"{theirs}.shared_experts"
    return ((Source(f"{name}.gate_proj.weight", (inner, width), (slice(0, inner),)),
             Source(f"{name}.up_proj.weight", (inner, width), (slice(inner, 2 * inner),))),
            (Source(f"{name}.down_proj.weight", (width, inner)),))


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
