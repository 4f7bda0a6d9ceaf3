"""What the model multiplies by, in the form that suits the machine: matrices, gated feed-forwards, stacks of experts.

On a CPU with compiled kernels, weights are packed once into the order in which these read them, INT8 as it is stored
and floats in the type in which they are stored, and torch's copies are let go as packing goes on. Elsewhere torch
multiplies, and floats alone: an accelerator's INT8 weights have been widened when they were read. Packed products
treat every row by itself, so that its bits depend on no other row; torch's need fixed tiles for that (`ops.tiles`).

A product of one row with a matrix stored output by output reads it, in torch, at half the speed of the same matrix
stored input by input (measured on one core, weights not in cache: 6.5 against 14 GB/s); with more rows the two are
near equal. For torch, a model small enough to be copied is therefore turned: shapes stay, strides change.

T tokens · K inputs · N outputs · D model width · E experts · F feed-forward width · P pairs of row and expert
H heads · n key width without position · v value width · L latent width
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Literal, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.engine.model.layers import gated
from tripool.engine.model.layout import SCALE
from tripool.engine.ops import native
from tripool.engine.ops.expert_ffn import Int8Experts, expert_ffn, pack_experts
from tripool.engine.ops.float_experts import FloatExperts, float_experts
from tripool.engine.ops.float_experts import pack_experts as pack_float_experts
from tripool.engine.ops.float_linear import FloatWeight, ScaledWeight, float_linear, pack_scaled
from tripool.engine.ops.float_linear import pack as pack_floats
from tripool.engine.ops.head_product import HeadWeight, head_product
from tripool.engine.ops.int8_linear import Int8Weight, int8_linear, pack
from tripool.engine.parallel.exchange import ArrivedRows, Pairs
from tripool.engine.parallel.quantise import dequantise, quantise

TURNED_BYTES = 1 << 30
"""Of a model that is turned; for a larger one a second copy would cost more than it gives."""

QUANTISED_ROWS = 4096
"""Of the output head, at a time: their floats are held besides."""

EXPANSION = ("latent_of_key", "key", "value")
"""The matrices of an expansion, as they are called where they are kept packed."""

Packed = Int8Weight | FloatWeight | ScaledWeight
AnyPacked = TypeVar("AnyPacked", bound=Packed)
Stack = Int8Experts | FloatExperts
HeldIn = Literal["model", "int8", "bfloat16"]
"""Element type of weights, as `layout` calls it."""
HELD_IN: dict[torch.dtype, HeldIn] = {torch.int8: "int8", torch.bfloat16: "bfloat16"}


class Matrix(Protocol):
    """A linear layer: from `[T, K]` to `[T, N]`, in the type of the rows."""

    def __call__(self, x_TK: Tensor) -> Tensor: ...


class TorchMatrix:
    """A matrix as torch multiplies it."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        return F.linear(x_TK, self.weight_NK, self.bias_N)


class Int8Matrix:
    """A matrix of eight-bit integers; rows are quantised on the way."""

    def __init__(self, weight: Int8Weight, bias_N: Tensor | None = None) -> None:
        self.weight = weight
        self.bias_N = bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        y_TN = int8_linear(x_TK, self.weight, dtype=x_TK.dtype)
        return y_TN if self.bias_N is None else y_TN.add_(self.bias_N)


class FloatMatrix:
    """A matrix of floats, or of integers that are widened, of rows in float32."""

    def __init__(self, weight: FloatWeight | ScaledWeight, bias_N: Tensor | None = None) -> None:
        self.weight = weight
        self.bias_N = bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        return float_linear(x_TK, self.weight, bias_N=self.bias_N)


def _packed_matrix(weight: Packed, bias_N: Tensor | None) -> Matrix:
    return Int8Matrix(weight, bias_N) if isinstance(weight, Int8Weight) else FloatMatrix(weight, bias_N)


def packed(matrix: Matrix | None) -> tuple[Packed, Tensor | None] | None:
    """Weights and bias of a packed matrix."""
    if matrix is None:
        return None
    assert isinstance(matrix, Int8Matrix | FloatMatrix), "torch multiplies this matrix"
    return matrix.weight, matrix.bias_N


class Expansion(Protocol):
    """What makes keys and values of latents, of one layer, and its use in absorbed form."""

    def absorb(self, query_THn: Tensor, out_THL: Tensor) -> None:
        """Queries that multiply latents."""

    def values(self, latent_THL: Tensor) -> Tensor:
        """Each head's values `[T, H, v]`, of its own latents."""

    def keys_and_values(self, latent_TL: Tensor) -> tuple[Tensor, Tensor]:
        """All heads' keys `[T, H, n]` and values `[T, H, v]`."""


class TorchExpansion:
    """An expansion as torch multiplies it."""

    def __init__(self, weight: Tensor, key_HnL: Tensor, value_HvL: Tensor) -> None:
        self.weight = weight
        self.key_HnL = key_HnL
        self.value_HLv = value_HvL.transpose(1, 2).contiguous()

    def absorb(self, query_THn: Tensor, out_THL: Tensor) -> None:
        out_THL.copy_(torch.bmm(query_THn.transpose(0, 1), self.key_HnL).transpose(0, 1))

    def values(self, latent_THL: Tensor) -> Tensor:
        return torch.bmm(latent_THL.transpose(0, 1), self.value_HLv).transpose(0, 1)

    def keys_and_values(self, latent_TL: Tensor) -> tuple[Tensor, Tensor]:
        num_heads, key_width, _ = self.key_HnL.shape
        both_THx = F.linear(latent_TL, self.weight).unflatten(-1, (num_heads, -1))
        return both_THx[..., :key_width], both_THx[..., key_width:]


class PackedExpansion:
    """The same packed: keys in both directions."""

    def __init__(self, latent_of_key: HeadWeight, key: HeadWeight, value: HeadWeight) -> None:
        self.latent_of_key = latent_of_key
        self.key = key
        self.value = value

    def absorb(self, query_THn: Tensor, out_THL: Tensor) -> None:
        head_product(query_THn, self.latent_of_key, out_THB=out_THL)

    def values(self, latent_THL: Tensor) -> Tensor:
        return head_product(latent_THL, self.value)

    def keys_and_values(self, latent_TL: Tensor) -> tuple[Tensor, Tensor]:
        latent_THL = latent_TL.unsqueeze(1).expand(-1, self.value.num_matrices, -1)
        return head_product(latent_THL, self.key), head_product(latent_THL, self.value)


class Gated(Protocol):
    """`down(silu(gate(x)) * up(x))`, from `[T, D]` to `[T, D]`."""

    def __call__(self, x_TD: Tensor) -> Tensor: ...


class TorchGated:
    """A gated feed-forward as torch multiplies it."""

    def __init__(self, gate_up_2FD: Tensor, down_DF: Tensor) -> None:
        self.gate_up_2FD = gate_up_2FD
        self.down_DF = down_DF

    def __call__(self, x_TD: Tensor) -> Tensor:
        return gated(x_TD, self.gate_up_2FD, self.down_DF)


class PackedGated:
    """The same in one call: a stack of one expert, to which every row goes."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def __call__(self, x_TD: Tensor) -> Tensor:
        row_T = torch.arange(x_TD.shape[0])
        return _feed_forward(Pairs(x_TD, None, row_T, torch.zeros_like(row_T)), self.stack, x_TD.dtype)


class PackedExperts:
    """This rank's routed experts, packed: one call computes all pairs of arrived rows and their experts.

    INT8 experts take rows as the exchange delivers them, quantised before they travelled or not.
    """

    def __init__(self, stack: Stack, dtype: torch.dtype) -> None:
        """`dtype`: of results."""
        self.stack = stack
        self.dtype = dtype
        self.held_in: HeldIn = HELD_IN.get(stack.down.data.dtype, "model")
        self.num_experts = stack.num_experts

    def __call__(self, arrived: ArrivedRows) -> Tensor:
        return _feed_forward(arrived.pairs(), self.stack, self.dtype).unflatten(0, arrived.expert_NK.shape)

    def slot(self, number: int) -> tuple[Tensor, ...]:
        """Views of one expert; who writes there changes the expert."""
        return tuple(part[number] for part in _parts(self.stack))

    def as_slot(self, expert: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What to write to a slot, of an expert as `layout.expert_plan` names its tensors."""
        return tuple(part[0] for part in _parts(_stack({name: each.unsqueeze(0) for name, each in expert.items()})))


def _feed_forward(pairs: Pairs, stack: Stack, dtype: torch.dtype) -> Tensor:
    row_MD, scale_M, row_P, expert_P = pairs
    if isinstance(stack, Int8Experts):
        return expert_ffn(row_MD, row_P, expert_P, stack, scale_M=scale_M, dtype=dtype)
    if scale_M is not None:
        row_MD = dequantise(row_MD, scale_M, dtype)
    return float_experts(row_MD, row_P, expert_P, stack, dtype=dtype)


def _parts(stack: Stack) -> list[Tensor]:
    return [*stack.gate_up.parts, *stack.down.parts]


def _stack(parts: Mapping[str, Tensor]) -> Stack:
    gate_up, down = parts["gate_up"], parts["down"]
    if "down" + SCALE in parts:
        return pack_experts(gate_up, parts["gate_up" + SCALE], down, parts["down" + SCALE])
    return pack_float_experts(gate_up, down)


def packs_floats(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels multiply floats, too, if rows are of this type."""
    return device.type == "cpu" and dtype == torch.float32 and native.chosen_level() >= 0


def packed_ahead(tensors: MutableMapping[str, Tensor], matrices: Iterable[str], *, floats: bool, int8_head: bool,
                 num_heads: int, key_width: int) -> dict[str, Tensor | Packed]:
    """What `Weights` would pack, packed before it asks, and the rest as it is; `matrices` are names of `layout`.

    What has been packed is taken out of the mapping. An expansion becomes three matrices.
    """
    found: dict[str, Packed] = {}
    for name in matrices:
        owner, _, part = name.rpartition(".")
        if part == "down" or not (floats or name + SCALE in tensors):
            continue                                # `down` comes with its `gate_up`
        if part == "gate_up":
            stack = _stack(_taken(tensors, owner, alone=tensors[name].dim() == 2))
            found[name], found[f"{owner}.down"] = stack.gate_up, stack.down
        elif part == "latent":
            made = _packed_expansion(tensors, name, num_heads, key_width)
            found.update({f"{name}.{each}": weight for each, weight in zip(EXPANSION, made, strict=True)})
        else:
            rounds = int8_head and name == "head"
            found[name] = _packed(tensors.pop(name), tensors.pop(name + SCALE, None), rounds=rounds)
    return {**found, **tensors}


def _taken(tensors: MutableMapping[str, Tensor], name: str, *, alone: bool) -> dict[str, Tensor]:
    """The tensors of experts (or of one, that is no stack yet), by what is behind their name."""
    taken = {part + suffix: tensors.pop(f"{name}.{part}{suffix}") for part in ("gate_up", "down")
             for suffix in ("", SCALE) if f"{name}.{part}{suffix}" in tensors}
    return {part: each.unsqueeze(0) for part, each in taken.items()} if alone else taken


def _keys_and_values(weight: Tensor, num_heads: int, key_width: int) -> tuple[Tensor, Tensor]:
    """What gives each head's keys `[H, n, L]`, and what its values `[H, v, L]`; or the scales of these."""
    key_HnL, value_HvL = weight.unflatten(0, (num_heads, -1)).tensor_split([key_width], dim=1)
    return key_HnL, value_HvL


def _packed_expansion(tensors: MutableMapping[str, Tensor], name: str, num_heads: int,
                      key_width: int) -> tuple[HeadWeight, HeadWeight, HeadWeight]:
    """As `EXPANSION` names them."""
    key_HnL, value_HvL = _keys_and_values(tensors.pop(name), num_heads, key_width)
    scale = tensors.pop(name + SCALE, None)
    if scale is None:
        return pack_floats(key_HnL.transpose(1, 2)), pack_floats(key_HnL), pack_floats(value_HvL)
    key_Hn1, value_Hv1 = _keys_and_values(scale.unsqueeze(-1), num_heads, key_width)
    return (pack_scaled(key_HnL.transpose(1, 2), key_Hn1.transpose(1, 2)), pack_scaled(key_HnL, key_Hn1),
            pack_scaled(value_HvL, value_Hv1))


def _packed(weight_NK: Tensor, scale_N: Tensor | None, *, rounds: bool = False) -> Packed:
    """Integers as they are; floats too, unless they are rounded here, with one scale for each output."""
    if scale_N is not None:
        return pack(weight_NK, scale_N)
    if not rounds:
        return pack_floats(weight_NK)
    parts = [quantise(each) for each in weight_NK.split(QUANTISED_ROWS)]
    q_NK, scale_N = torch.cat([q for q, _ in parts]), torch.cat([scale for _, scale in parts])
    return pack_scaled(q_NK.unsqueeze(0), scale_N[None, :, None])


def _last_outputs(weight: Packed, count: int) -> Packed:
    """They do not begin where a block does, so they are packed for themselves."""
    assert not isinstance(weight, ScaledWeight), "the head is used whole"
    if isinstance(weight, Int8Weight):
        return pack(*(each[0, -count:] for each in weight.unpacked()))
    return pack_floats(weight.unpacked()[0, -count:])


class Weights:
    """A model's tensors by the names of `layout`, on their way into products.

    What is packed anew is taken out of the mapping, so that the memory it lay in is free as soon as nobody else holds
    it; some may come packed already. `plain`: torch multiplies everything, as where there are no kernels. `int8_head`:
    the output head is rounded to eight bits, if floats are packed at all. `rounds_rows`: rows are rounded to bfloat16
    for packed products with weights that are not float32, and so is what compiled attention multiplies. `row_by_row`:
    all products are packed, and treat every row by itself.
    """

    def __init__(self, tensors: MutableMapping[str, Tensor], *, deterministic: bool = False, plain: bool = False,
                 int8_head: bool = False, rounds_rows: bool = False,
                 packed: Mapping[str, Packed] | None = None) -> None:
        self.tensors = tensors
        self.packed = packed or {}
        self.dtype = tensors["norm"].dtype          # of rows, and of the cache
        self.device = tensors["norm"].device
        self._compiled = not plain and native.level_for(tensors["norm"]) >= 0
        self.row_by_row = not plain and packs_floats(self.dtype, self.device)
        self._int8_head = int8_head
        self.rounds_rows = rounds_rows
        self._made: dict[tuple[str, int | None], Matrix] = {}
        self._expansions: dict[str, Expansion] = {}
        num_bytes = sum(each.nbytes for each in (*tensors.values(), *self.packed.values()))
        self._turns = not deterministic and self.device.type == "cpu" and num_bytes <= TURNED_BYTES

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.packed

    def matrix(self, name: str, bias_N: Tensor | None = None, *, last: int | None = None) -> Matrix:
        """A linear layer, the same for all who ask. `last`: only so many outputs, the last; ask for them first."""
        if (name, last) not in self._made:
            self._made[name, last] = self._matrix(name, bias_N, last)
        return self._made[name, last]

    def _matrix(self, name: str, bias_N: Tensor | None, last: int | None) -> Matrix:
        rows = slice(None) if last is None else slice(-last, None)
        if bias_N is not None:
            bias_N = bias_N[rows]
        if name in self.packed:
            weight = self.packed[name]
            return _packed_matrix(self._rounding(weight if last is None else _last_outputs(weight, last)), bias_N)
        weight_NK, scale_N = self.tensors[name][rows], self.tensors.get(name + SCALE)
        if scale_N is None and not self.row_by_row:
            return TorchMatrix(self._turned(weight_NK), bias_N)
        if last is None and name != "embed":
            del self.tensors[name]
        rounds = self._int8_head and name in ("head", "embed")
        weight = _packed(weight_NK, None if scale_N is None else scale_N[rows], rounds=rounds)
        return _packed_matrix(self._rounding(weight), bias_N)

    def _rounding(self, weight: AnyPacked) -> AnyPacked:
        """The same weight, which asks for rounded rows if that was wished and it can."""
        if not self.rounds_rows or isinstance(weight, Int8Weight) or weight.data.dtype == torch.float32:
            return weight
        return replace(weight, rounds=True)

    def expansion(self, name: str, num_heads: int, key_width: int) -> Expansion:
        """What makes keys and values of latents, the same for all who ask."""
        if name not in self._expansions:
            self._expansions[name] = self._expansion(name, num_heads, key_width)
        return self._expansions[name]

    def _expansion(self, name: str, num_heads: int, key_width: int) -> Expansion:
        kept = [self.packed.get(f"{name}.{part}") for part in EXPANSION]
        if None not in kept:
            return PackedExpansion(*(self._rounding(each) for each in kept if isinstance(each, HeadWeight)))
        if self._compiled or name + SCALE in self.tensors:
            made = _packed_expansion(self.tensors, name, num_heads, key_width)
            return PackedExpansion(*(self._rounding(each) for each in made))
        weight = self.tensors[name]
        return TorchExpansion(weight, *_keys_and_values(weight, num_heads, key_width))

    def gated(self, name: str) -> Gated:
        """A dense feed-forward."""
        if self.packs(name):
            return PackedGated(self._stack(name, alone=True))
        return TorchGated(self._turned(self[f"{name}.gate_up"]), self._turned(self[f"{name}.down"]))

    def packs(self, name: str) -> bool:
        """Whether these experts are packed."""
        return self.row_by_row or f"{name}.down" in self.packed or f"{name}.down{SCALE}" in self.tensors

    def stack(self, name: str) -> Stack:
        """A stack of experts that is packed."""
        return self._stack(name, alone=False)

    def _stack(self, name: str, *, alone: bool) -> Stack:
        if f"{name}.down" in self.packed:
            gate_up, down = self.packed[f"{name}.gate_up"], self.packed[f"{name}.down"]
            if isinstance(gate_up, Int8Weight) and isinstance(down, Int8Weight):
                return Int8Experts(gate_up, down)
            assert isinstance(gate_up, FloatWeight) and isinstance(down, FloatWeight), f"{name} is of two kinds"
            return FloatExperts(self._rounding(gate_up), self._rounding(down))
        stack = _stack(_taken(self.tensors, name, alone=alone))
        if isinstance(stack, Int8Experts):
            return stack
        return FloatExperts(self._rounding(stack.gate_up), self._rounding(stack.down))

    def turned_stack(self, name: str) -> tuple[Tensor, Tensor]:
        """Gate and up, and down, of a stack that torch multiplies."""
        return self._turned(self[f"{name}.gate_up"]), self._turned(self[f"{name}.down"])

    def _turned(self, weight: Tensor) -> Tensor:
        return weight.mT.contiguous().mT if self._turns else weight

