"""The next token of each row of logits: the largest, or one drawn from what filters leave of the row.

A token's weight is exp of how far its logit lies below the largest, divided by the temperature, in float32, rounded to
a multiple of 2**-35 (a coarser one for more than 2**18 tokens). Sums of such weights are exact in double precision; so
a token depends neither on the order in which they are added nor on the device, the threads or the other rows. The
steps of the exponential are written out because all have to round alike.

The likeliest tokens are those of the largest logits, the lowest index first among equal ones. What is not a number is
like minus infinity; at temperature zero it is above all others, as in torch. Where no logit is above minus infinity,
all tokens weigh the same.

N rows · M rows that are drawn · V vocabulary
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tripool.engine.ops import native

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Draws = npt.NDArray[np.void]

COLDEST, HOTTEST = 1e-30, 1e30     # temperatures; beyond, they act like these
MOST_TOKENS = 1 << 21
LOWEST_POWER = -26.0               # exp of it is less than half of 2**-35

DRAW = np.dtype([("temperature", np.float32), ("min_p", np.float32), ("top_k", np.int64), ("top_p", np.float64),
                 ("seed", np.uint64), ("position", np.int64)])
"""How a row's token is drawn. Temperature zero takes the largest logit, and nothing else counts. The filters act in
this order, each on what the one before left: tokens of less than `min_p` times the likeliest's probability are dropped;
the `top_k` likeliest are kept (zero: all); the fewest likeliest that hold the share `top_p` are kept (one: all).
`position` is where the new token will stand."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample(logits_NV: Tensor, draw_N: Draws, *, level: int | None = None) -> Ints:
    """The next token of each row of float32 logits, which stay as they are."""
    num_rows, num_tokens = logits_NV.shape
    assert logits_NV.dtype == torch.float32 and 0 < num_tokens <= MOST_TOKENS, "float32 logits, and not too many"
    assert draw_N.dtype == DRAW and draw_N.shape == (num_rows,), "a draw for each row"
    level = native.level_for(logits_NV, level)
    if level < 0:
        return definition(logits_NV, draw_N)
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    draw_N, token_N = np.ascontiguousarray(draw_N), np.empty(num_rows, np.int64)
    native.module().sample(level, logits_NV.data_ptr(), logits_NV.stride(0), num_rows, num_tokens, draw_N.ctypes.data,
                           native.address(token_N))
    return token_N


def definition(logits_NV: Tensor, draw_N: Draws) -> Ints:
    """The same in plain torch."""
    token_N: Ints = logits_NV.argmax(-1).cpu().numpy()
    drawn_N = draw_N["temperature"] > 0
    if drawn_N.any():
        token_N[drawn_N] = _drawn(logits_NV[torch.from_numpy(drawn_N).to(logits_NV.device)], draw_N[drawn_N])
    return token_N


def _drawn(logits_MV: Tensor, draw_M: Draws) -> Ints:
    logits_MV = logits_MV.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    weight_MV = weights(logits_MV, draw_M["temperature"])
    if (draw_M["min_p"] > 0).any() or (draw_M["top_k"] > 0).any() or (draw_M["top_p"] < 1).any():
        weight_MV = _kept(logits_MV, weight_MV, draw_M)
    below_MV = weight_MV.double().cumsum(-1)
    total_M1 = below_MV[:, -1:]
    uniform_M1 = _column(uniforms(draw_M["seed"], draw_M["position"]), logits_MV.device)
    target_M1 = torch.minimum(uniform_M1 * total_M1, total_M1.nextafter(torch.zeros_like(total_M1)))
    token_M: Ints = torch.searchsorted(below_MV, target_M1, right=True).squeeze(-1).cpu().numpy()
    return token_M


def weights(logits_MV: Tensor, temperature_M: Singles) -> Tensor:
    """Float32 weights, the largest of them one. They do not fall where logits rise; that was tried on all floats."""
    num_tokens = logits_MV.shape[-1]
    most_M1 = logits_MV.amax(-1, keepdim=True)
    below_MV = (logits_MV - most_M1).masked_fill_(logits_MV == most_M1, 0.0)
    inverse_M = np.float32(1) / temperature_M.clip(np.float32(COLDEST), np.float32(HOTTEST))
    power_MV = (below_MV * _column(inverse_M, logits_MV.device)).clamp_(min=LOWEST_POWER)
    rounder = 1.5 * 2.0 ** (-12 + max(0, (num_tokens - 1).bit_length() - 18))
    return (_exponential(power_MV) + rounder) - rounder


def _exponential(x: Tensor) -> Tensor:
    """x = n ln 2 + r, a polynomial in r, n into the exponent."""
    magic = 12582912.0                                # 1.5 * 2**23: rounds to an integer in the low bits
    shifted = x * 1.44269504 + magic
    n = shifted - magic
    r = x - n * 0.693359375 + n * 2.12194440e-4
    p = torch.full_like(r, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + coefficient
    p = p * r * r + r + 1.0
    power = (shifted.view(torch.int32) - 0x4B400000 + 127) << 23
    return p * power.view(torch.float32)


def _kept(logits_MV: Tensor, weight_MV: Tensor, draw_M: Draws) -> Tensor:
    """The weights with those of dropped tokens at zero."""
    device = logits_MV.device
    order_MV = logits_MV.sort(dim=-1, descending=True, stable=True).indices
    kept_MV = weight_MV.gather(-1, order_MV)
    kept_MV[kept_MV < _column(draw_M["min_p"].clip(max=1), device)] = 0.0
    rank_V = torch.arange(logits_MV.shape[-1], device=device)
    kept_MV[rank_V >= _column(np.where(draw_M["top_k"] > 0, draw_M["top_k"], len(rank_V)), device)] = 0.0
    share_MV = kept_MV.double().cumsum(-1)
    mass_M1 = _column(np.where(draw_M["top_p"] < 1, draw_M["top_p"], np.inf), device) * share_MV[:, -1:]
    kept_MV[rank_V > (share_MV < mass_M1).sum(-1, keepdim=True)] = 0.0
    return torch.zeros_like(weight_MV).scatter_(-1, order_MV, kept_MV)


def _column(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device).unsqueeze(-1)


def uniforms(seeds: npt.NDArray[np.uint64], positions: Ints) -> Floats:
    """One number in [0, 1) for each (seed, position): SplitMix64 started at the mixed seed, read at the position."""
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1))
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser: every input bit moves every output bit."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
