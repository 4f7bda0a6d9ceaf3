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
from tripool.sim.reproduce.tables import published

DEFAULT_OVER_PERFECT = 50302 / 59337       # the 6,288 and 7,417 of the paper's Table 2, as SGLang's blog has them


def fit() -> Residuals:
    """The four residuals. One whose cell cannot be met within its range is at the end of the range."""
    cells = published("calibration")
    layer_us, cut_ms = cells["fig22_mtp/0/value"], cells["fig23_context_cache/3/value"]
    found = Residuals()
    for _ in range(2):
        found = _fitted(found, "layer_overhead", lambda now: _layer_us(now) - layer_us, 0.0, 2.0)
        found = _fitted(found, "expert_skew", lambda now: DEFAULT_OVER_PERFECT - _default_over_perfect(now), 0.0, 3.0,
                        steps=20)
    found = replace(found, step_overhead_ms=float(cells["xdeepserve_decode/0/gap_ms"]))
    return _fitted(found, "pool_gbps", lambda now: _cut_ms(now) - cut_ms, 0.05, 200.0)


def _layer_us(residuals: Residuals) -> float:
    return Predictions(residuals).decode_layer_s(96, 4096, drafts=0) * 1e6


def _default_over_perfect(residuals: Residuals) -> float:
    predictions = Predictions(residuals)
    return (predictions.gpu_prefill_tokens_per_s("h100", perfect=False)
            / predictions.gpu_prefill_tokens_per_s("h100", perfect=True))


def _cut_ms(residuals: Residuals) -> float:
    predictions = Predictions(residuals)
    return 1e3 * (predictions.cached_ttft_s(0.0) - predictions.cached_ttft_s(0.5))


def _fitted(residuals: Residuals, name: str, excess: Callable[[Residuals], float], low: float, high: float,
            steps: int = 40) -> Residuals:
    """With one of them where an increasing function of it is 0."""
    for _ in range(steps):
        middle = (low + high) / 2
        is_low = excess(replace(residuals, **{name: middle})) < 0
        low, high = (middle, high) if is_low else (low, middle)
    return replace(residuals, **{name: (low + high) / 2})
