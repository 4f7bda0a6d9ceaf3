"""Step states of benchmarks and tests: every rank alike, as published measurements have them."""

from __future__ import annotations

import numpy as np

from tripool.sim.costs.state import StepState

NONE = np.zeros(0, np.int64)


def decode_state(ranks: int, rows: int, context: int, *, drafts: int = 0, microbatches: int = 1) -> StepState:
    """`rows` on each rank with `context` tokens in the cache each, and `drafts` guesses behind each row."""
    full = np.full(ranks, rows, np.int64)
    return StepState(full, full * context, full * drafts, NONE, NONE, NONE, microbatches)


def prefill_state(ranks: int, prompts: int, tokens: int, *, cached: int = 0, microbatches: int = 1) -> StepState:
    """`prompts` on each rank, of `tokens` tokens each, of which the first `cached` need not be computed."""
    zeros = np.zeros(ranks, np.int64)
    rank_C = np.repeat(np.arange(ranks, dtype=np.int64), prompts)
    first_C = np.full(ranks * prompts, cached, np.int64)
    return StepState(zeros, zeros, zeros, rank_C, first_C, np.full(ranks * prompts, tokens - cached, np.int64),
                     microbatches)
