"""Log-probabilities: of a given token of each row of logits, and of the row's likeliest tokens.

They are those of the distribution that `sample` draws from at temperature one without filters, with its weights and
its order of tokens: the largest logits first, the lowest index first among equal ones. What is not a number is like
minus infinity; where no logit is above that, all tokens are equally likely. As sums of these weights are exact, results
depend neither on the level nor on threads or the other rows. Rounding weights to their grain costs less than 3e-6.

Rows of log-probabilities are never made: a row's largest logit and its total weight are enough.

X rows of logits · N rows that are asked for · V vocabulary · K likeliest tokens
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.ops.sample import MOST_TOKENS, Floats, Ints, Singles, weights

LEAST_LOGPROB = -9999.0            # stands for minus infinity, which JSON cannot say


def logprobs(logits_XV: Tensor, row_N: Ints, token_N: Ints, num_top: int, *,
             level: int | None = None) -> tuple[Singles, Ints, Singles]:
    """Of each row `row_N` of float32 logits: the log-probability of the token `token_N`, and the `num_top` likeliest
    tokens (all, if there are fewer) with theirs, finite throughout."""
    num_tokens = logits_XV.shape[1]
    assert logits_XV.dtype == torch.float32 and 0 < num_tokens <= MOST_TOKENS, "float32 logits, and not too many"
    assert row_N.shape == token_N.shape and row_N.dtype == token_N.dtype == np.int64, "a token for each row"
    assert not row_N.size or (row_N.min() >= 0 and row_N.max() < len(logits_XV)), "rows that there are"
    assert not row_N.size or (token_N.min() >= 0 and token_N.max() < num_tokens), "tokens that there are"
    num_top = min(num_top, num_tokens)
    level = native.level_for(logits_XV, level)
    if level < 0:
        most_N, total_N, top_NK = definition(logits_XV[torch.from_numpy(row_N).to(logits_XV.device)], num_top)
    else:
        if logits_XV.stride(1) != 1:
            logits_XV = logits_XV.contiguous()
        row_N, num_rows = np.ascontiguousarray(row_N), len(row_N)
        most_N, total_N = np.empty(num_rows, np.float32), np.empty(num_rows, np.float64)
        top_NK = np.empty((num_rows, num_top), np.int64)
        native.module().logprobs(
            level, logits_XV.data_ptr(), logits_XV.stride(0), native.address(row_N), num_rows, num_tokens, num_top,
            native.address(most_N), native.address(total_N), native.address(top_NK))
    logit_NJ = _taken(logits_XV, row_N, np.concatenate([token_N[:, None], top_NK], 1))
    with np.errstate(invalid="ignore"):                          # of infinities
        below_NJ = np.where(logit_NJ == most_N[:, None], 0.0, logit_NJ.astype(np.float64) - most_N[:, None])
        logprob_NJ = np.maximum(below_NJ - np.log(total_N)[:, None], LEAST_LOGPROB).astype(np.float32)
    return logprob_NJ[:, 0], top_NK, logprob_NJ[:, 1:]


def _taken(logits_XV: Tensor, row_N: Ints, token_NJ: Ints) -> Singles:
    row_N1, token_NJ = (torch.from_numpy(each).to(logits_XV.device) for each in (row_N[:, None], token_NJ))
    taken: Singles = _numbers(logits_XV[row_N1, token_NJ]).cpu().numpy()
    return taken


def _numbers(logits: Tensor) -> Tensor:
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def definition(logits_NV: Tensor, num_top: int) -> tuple[Singles, Floats, Ints]:
    """The largest logit of each row, the sum of its weights, and its likeliest tokens, in plain torch."""
    logits_NV = _numbers(logits_NV)
    weight_NV = weights(logits_NV, np.ones(len(logits_NV), np.float32))
    order_NV = logits_NV.sort(dim=-1, descending=True, stable=True).indices
    return (logits_NV.amax(-1).cpu().numpy(), weight_NV.sum(-1, dtype=torch.float64).cpu().numpy(),
            order_NV[:, :num_top].cpu().numpy())
