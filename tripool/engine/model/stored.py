"""What of a checkpoint stays in memory as it is stored, because kernels multiply it so.

Known without torch and without reading a weight, so that `doctor` reckons with what loading does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, Protocol

from tripool.core.shape import ModelShape
from tripool.engine.model.layout import WeightSpec, expert_plan

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_BYTES = 4

Kept = Literal["int8", "bfloat16"]
KEPT: dict[str, Kept] = {"I8": "int8", "BF16": "bfloat16"}


class Stored(Protocol):
    """A checkpoint, or what its configuration says of it."""

    @property
    def shape(self) -> ModelShape: ...

    def dtype_of(self, tensor: str) -> str:
        """The element type in which a tensor is stored, as safetensors calls it."""


def as_stored(plan: Iterable[WeightSpec], checkpoint: Stored, *, floats: bool = False,
              shared_in_slots: bool = False) -> list[WeightSpec]:
    """The same plan for kernels that multiply what is stored: INT8 matrices are not widened, nor (`floats`) bfloat16.

    What is computed in one call stays as it is if all its tensors are of one kind, and a stack of experts if those of
    all its layer are, because any of them may move in.
    """
    plan, shape = list(plan), checkpoint.shape
    last = shape.num_routed_experts + (1 if shared_in_slots else 0)
    kinds: dict[str, set[Kept | None]] = {}              # of what is computed in one call

    def owner(spec: WeightSpec) -> str:
        return spec.name.removesuffix(".gate_up").removesuffix(".down")

    for spec in plan:
        sources = spec.sources
        if owner(spec).endswith(".experts"):
            if owner(spec) in kinds:
                continue
            layer = int(spec.name.split(".")[1])
            sources = tuple(source for expert in range(last) for each in expert_plan(shape, layer, expert)
                            for source in each.sources)
        kinds.setdefault(owner(spec), set()).update(KEPT.get(checkpoint.dtype_of(each.tensor)) for each in sources)

    def kept(spec: WeightSpec) -> WeightSpec:
        if not spec.is_matrix and not (floats and spec.name == "embed"):
            return spec
        found = kinds[owner(spec)]
        kind = next(iter(found)) if len(found) == 1 else None
        return spec if kind is None or (kind == "bfloat16" and not floats) else replace(spec, dtype=kind)

    return [kept(spec) for spec in plan]


def held_bytes(spec: WeightSpec, dtype: str) -> int:
    """What a tensor of the plan takes, with its scales in INT8, if the model is computed in a type."""
    scales = SCALE_BYTES * math.prod(spec.shape[:-1]) if spec.dtype == "int8" else 0
    return ITEM_BYTES[dtype if spec.dtype == "model" else spec.dtype] * math.prod(spec.shape) + scales
