"""Rotation: the model in another basis, in which no channel stands out and none is small.

An orthogonal matrix R spreads what a few channels carry over all of them. Three places allow one that costs nothing
when the model runs, because matrices on both sides take it in beforehand (the paper's 4.5; QuaRot, SpinQuant):

    residual stream      everything that writes it (embedding, o_proj, down_proj) gets R behind, everything that reads
                         it R before, together with the weights of the norm in between, which become ones: a row's
                         root mean square is the same in every basis, but a weight for each channel is not
    low-rank query       between q_a_proj and q_b_proj, in the same way; known to one layer's attention alone
    values of a head     between kv_b_proj and o_proj, where there is no norm

R is a randomised Hadamard matrix: signs, then the Kronecker product of Hadamard matrices and, for what is left of a
width that is no power of two, a cosine transform. So turning a row takes a few small products whatever its width.

The residual stream of a model with an MTP layer: that layer reads final-normed states, and its own final norm feeds the
head that it shares. One head can take in the weights of one norm, the main model's, which therefore stays exact. The
MTP layer's stream is stretched by the ratio of the two norms' weights, so that its logits point where they did; what
remains is a factor for each token inside the layer, near one. Drafts are guesses, proved by the main model.

D model width · X anything
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tripool.core.shape import ModelShape

SMALL_MATRIX = 64            # largest Hadamard matrix that is multiplied as it is
LARGEST_STRETCH = 8.0
READS = re.compile(r"(model\.layers\.\d+)\.(?:(self_attn\.(?:q_a_proj|q_proj|kv_a_proj_with_mqa))|"
                   r"mlp\.(?:gate|(?:\w+\.)*(?:\d+\.)?(?:gate_proj|up_proj)))\.weight")
WRITES = re.compile(r"model\.layers\.\d+\.(?:self_attn\.o_proj\.(?:weight|bias)|mlp\..*down_proj\.weight)")
NORMS = re.compile(r"model\.norm\.weight|model\.layers\.\d+\."
                   r"(?:input_layernorm|post_attention_layernorm|enorm|hnorm|shared_head\.norm)\.weight")
JOIN = re.compile(r"(model\.layers\.\d+)\.eh_proj\.weight")
EMBEDDING = re.compile(r"model\.(?:layers\.\d+\.)?embed_tokens\.weight")
HEAD = re.compile(r"lm_head\.weight|model\.layers\.\d+\.shared_head\.head\.weight")


@dataclass(frozen=True, slots=True)
class Rotation:
    """An orthogonal matrix, kept as its factors."""

    sign_D: Tensor
    factors: tuple[Tensor, ...]

    @classmethod
    def of(cls, width: int) -> Rotation:
        """The one of a width; there is no other, so that nothing has to be kept."""
        generator = torch.Generator().manual_seed(width)
        sign_D = 2.0 * torch.randint(2, (width,), generator=generator).double() - 1
        power = width & -width
        factors = [_cosines(width // power)] if power < width else []
        while power > 1:
            factors.append(_hadamard(min(power, SMALL_MATRIX)))
            power //= factors[-1].shape[0]
        return cls(sign_D, tuple(factors))

    def __call__(self, x_XD: Tensor) -> Tensor:
        """`x_XD @ R`."""
        after = x_XD.shape[-1]
        y = x_XD * self.sign_D.to(x_XD.dtype)
        for factor in self.factors:
            size = factor.shape[0]
            after //= size
            flat = y.reshape(-1, size, after).mT.reshape(-1, size)          # one large product instead of many small
            y = (flat @ factor.to(y.dtype)).view(-1, after, size).mT
        return y.reshape(x_XD.shape)

    def rows(self, weight_DX: Tensor) -> Tensor:
        """`R.T @ weight_DX`: what is written comes out turned."""
        return self(weight_DX.T).T.contiguous()


def _hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def _cosines(size: int) -> Tensor:
    """The orthonormal cosine transform."""
    at = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (at.unsqueeze(-1) + 0.5) * at) * math.sqrt(2 / size)
    matrix[:, 0] /= math.sqrt(2)
    return matrix


class ResidualRotation:
    """What becomes of each tensor of a model whose residual stream is turned."""

    def __init__(self, shape: ModelShape, norm_of: Callable[[str], Tensor]) -> None:
        """`norm_of` gives a norm's weights, as they were, by the tensor's name."""
        self.shape = shape
        self.norm_of = norm_of
        self.turn = Rotation.of(shape.hidden_size)

    def tensor(self, name: str, value: Tensor) -> Tensor:
        """A tensor of the turned model; rows of embeddings and heads may come a few at a time."""
        if NORMS.fullmatch(name):
            return torch.ones_like(value)
        if EMBEDDING.fullmatch(name):
            return self.turn(value)
        if HEAD.fullmatch(name):
            return self.turn(value * self.norm_of("model.norm.weight"))
        if found := READS.fullmatch(name):
            norm = f"{found[1]}.{'input_layernorm' if found[2] else 'post_attention_layernorm'}.weight"
            return self.turn(value * (self.norm_of(norm) / self._stretch(name)))
        if found := JOIN.fullmatch(name):
            final_D = self.norm_of("model.norm.weight")
            embedded, hidden = value.chunk(2, dim=-1)
            hidden = hidden * (self.norm_of(f"{found[1]}.hnorm.weight") * final_D / _mean(final_D))
            read = torch.cat([self.turn(embedded * self.norm_of(f"{found[1]}.enorm.weight")), self.turn(hidden)], -1)
            return self._written(name, read)
        return self._written(name, value) if WRITES.fullmatch(name) else value

    def rows(self, x_ND: Tensor, norm_D: Tensor) -> Tensor:
        """What a reader sees in the turned model, from what it saw after a norm with these weights."""
        return self.turn(torch.where(norm_D == 0, 0, x_ND / norm_D))

    def _written(self, name: str, value: Tensor) -> Tensor:
        stretch_D = self._stretch(name)
        return self.turn(value * stretch_D) if value.dim() == 1 else self.turn.rows(value * stretch_D.unsqueeze(-1))

    def _stretch(self, name: str) -> Tensor:
        """By how much channels of a layer's stream are larger, before they are turned: ones but in the MTP layer."""
        final_D, layer = self.norm_of("model.norm.weight"), int(name.split(".")[2])
        if layer < self.shape.num_layers:
            return torch.ones_like(final_D)
        own_D = self.norm_of(f"model.layers.{layer}.shared_head.norm.weight")
        ratio_D = torch.where(own_D * final_D > 0, own_D / final_D, 1.0)
        ratio_D = ratio_D.clamp(1 / LARGEST_STRETCH, LARGEST_STRETCH)
        return ratio_D / _mean(ratio_D)


def _mean(x_D: Tensor) -> Tensor:
    """Root mean square."""
    return x_D.square().mean().sqrt()
