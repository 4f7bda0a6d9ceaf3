"""Fits the four residuals, each on its own cell, one after the other.

The step overhead is read off its cell: of xDeepServe's 93 + 2 ms the 2 are the time between iterations. (Fitted on the
sum of 95 it would take up whatever is missing in 62 layers of that system, 16 ms, and be no step overhead.) The layer
overhead needs the skew for its experts and the skew needs the overhead for its prefill; so both are fitted
twice. Each is found by halving an interval, because its cell grows with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tripool.sim.costs.residuals import Residuals
from tripool.sim.reproduce.predictions import Predictions

LAYER_US = 874.0                           # fig22_mtp, without drafts, batch 96
GAP_MS = 2.0                               # xdeepserve_decode: between two iterations of 93 ms
DEFAULT_OVER_PERFECT = 50302 / 59337       # sglang_prefill: 6,288 / 7,417 of the paper's Table 2 before rounding
CUT_S = 0.861                              # fig23_context_cache: TTFT with half of the prompt in the pool


def fit() -> Residuals:
    """The four residuals. One whose cell cannot be met within its range is at the end of the range."""
    found = Residuals()
    for _ in range(2):
        found = _fitted(found, "layer_overhead", lambda now: _layer_us(now) - LAYER_US, 0.0, 2.0)
        found = _fitted(found, "expert_skew", lambda now: DEFAULT_OVER_PERFECT - _default_over_perfect(now), 0.0, 3.0,
                        steps=20)
    found = replace(found, step_overhead_ms=GAP_MS)
    return _fitted(found, "pool_gbps", lambda now: _cut_s(now) - CUT_S, 0.05, 200.0)


def _layer_us(residuals: Residuals) -> float:
    return Predictions(residuals).decode_layer_s(96, 4096, drafts=0) * 1e6


def _default_over_perfect(residuals: Residuals) -> float:
    predictions = Predictions(residuals)
    return (predictions.gpu_prefill_tokens_per_s("h100", perfect=False)
            / predictions.gpu_prefill_tokens_per_s("h100", perfect=True))


def _cut_s(residuals: Residuals) -> float:
    predictions = Predictions(residuals)
    return predictions.cached_ttft_s(0.0) - predictions.cached_ttft_s(0.5)


def _fitted(residuals: Residuals, name: str, excess: Callable[[Residuals], float], low: float, high: float,
            steps: int = 40) -> Residuals:
    """With one of them where an increasing function of it is 0."""
    for _ in range(steps):
        middle = (low + high) / 2
        is_low = excess(replace(residuals, **{name: middle})) < 0
        low, high = (middle, high) if is_low else (low, middle)
    return replace(residuals, **{name: (low + high) / 2})
