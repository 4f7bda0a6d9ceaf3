"""The pieces in which a model is converted: what has to be in memory together, and what comes out of it.

A layer's attention is one piece, its router with the norm before it another, each expert one more. What comes out is
known before anything is read: names, element types and shapes, so that files can be laid out and disk space asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tripool.core.shape import ModelShape
from tripool.engine.checkpoint import ITEM_BYTES, StoredTensor
from tripool.engine.model.layout import shared_tensors, weight_plan
from tripool.quant.policy import becomes_int8, rule_of
from tripool.quant.recipe import Recipe

Kind = Literal["attention", "router", "dense", "expert", "alone"]
SCALE = "_scale"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.(experts\.\d+|shared_experts)\..*")


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of the output."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are converted together."""

    kind: Kind
    name: str
    layer: int                       # -1 outside of layers
    tensors: tuple[StoredTensor, ...]
    planned: tuple[Planned, ...]

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self.tensors]

    @property
    def expert(self) -> int | None:
        """The number of a routed expert."""
        number = self.name.rpartition(".")[2]
        return int(number) if self.kind == "expert" and number.isdigit() else None

    @property
    def read_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def written_bytes(self) -> int:
        return sum(planned.num_bytes for planned in self.planned)

    @property
    def in_parts(self) -> bool:
        """Whether its rows are converted a few at a time: tables that stay floats."""
        return (self.kind == "alone" and all(planned.dtype != "I8" for planned in self.planned)
                and not self.name.endswith(".eh_proj.weight"))          # which is written and read in another basis

    def working_bytes(self, *, compensation: bool) -> int:
        """About what a conversion of it takes at its most: floats twice, one matrix thrice more, second moments."""
        counts = [math.prod(tensor.shape) for tensor in self.tensors]
        if self.in_parts:
            return 0
        moments = 0
        if compensation and self.kind != "alone":
            moments = max((tensor.shape[1] for tensor in self.tensors if len(tensor.shape) == 2), default=0) ** 2 * 32
        return 9 * sum(counts) + 12 * max(counts) + moments


def units_of(shape: ModelShape, tensors: Mapping[str, StoredTensor], recipe: Recipe) -> list[Unit]:
    """All that is converted, in the order of a forward pass. Tensors that the model does not know are left out."""
    names = [source.tensor for spec in weight_plan(shape) for source in spec.sources]
    names += [source.tensor for source in shared_tensors(shape) if source.tensor in tensors]
    groups: dict[tuple[Kind, str, int], list[str]] = {}
    for name in names:
        groups.setdefault(_group_of(shape, name), []).append(name)
    return [Unit(kind, unit, layer, tuple(tensors[name] for name in members),
                 tuple(planned for name in members for planned in _planned(tensors[name], recipe)))
            for (kind, unit, layer), members in groups.items()]


def _group_of(shape: ModelShape, name: str) -> tuple[Kind, str, int]:
    found = _LAYER.fullmatch(name)
    if found is None:
        return "alone", name, -1
    layer, rest = int(found[1]), found[2]
    prefix = f"model.layers.{layer}"
    if rest.startswith(("self_attn.", "input_layernorm.")):
        return "attention", f"{prefix}.self_attn", layer
    if expert := _EXPERT.fullmatch(rest):
        return "expert", f"{prefix}.mlp.{expert[1]}", layer
    if rest.startswith(("mlp.", "post_attention_layernorm.")):
        return ("router" if shape.is_moe(layer) else "dense"), f"{prefix}.mlp", layer
    return "alone", name, layer


def _planned(stored: StoredTensor, recipe: Recipe) -> Iterator[Planned]:
    if becomes_int8(stored.name, mixed_precision=recipe.mixed_precision):
        yield Planned(stored.name, "I8", stored.shape)
        yield Planned(stored.name + SCALE, "F32", (stored.shape[0], 1))
    elif recipe.rotation and rule_of(stored.name).name == "router":
        yield Planned(stored.name, "F32", stored.shape)                 # in another basis BF16 would round it again
    else:
        yield Planned(stored.name, "BF16" if stored.dtype == "F8_E4M3" else stored.dtype, stored.shape)
