"""Log-probabilities: of a given token of each row of logits, and of the row's likeliest tokens.

They are those of the distribution that `sample` draws from at temperature one without filters, with its weights and
its order of tokens: the largest logits first, the lowest index first among equal ones. What is not a number is like
minus infinity; where no logit is above that, all tokens are equally likely. As sums of these weights are exact, results
depend neither on the level nor on threads or the other rows. Rounding weights to their grain costs less than 3e-6.

Rows of log-probabilities are never made: a row's largest logit and its total weight are enough.

X rows of logits · N rows that are asked for · V vocabulary · K likeliest tokens · J the token, and these behind it
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tripool.engine.ops import native
from tripool.engine.ops.sample import MOST_TOKENS, Ints, Singles, weights

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
        row_N, token_N = (torch.from_numpy(each).to(logits_XV.device) for each in (row_N, token_N))
        logprob_NJ, top_NK = definition(logits_XV[row_N], token_N, num_top)
    else:
        if logits_XV.stride(1) != 1:
            logits_XV = logits_XV.contiguous()
        row_N, token_N = np.ascontiguousarray(row_N), np.ascontiguousarray(token_N)
        num_rows = len(row_N)
        logprob_NJ, top_NK = np.empty((num_rows, 1 + num_top), np.float32), np.empty((num_rows, num_top), np.int64)
        native.module().logprobs(
            level, logits_XV.data_ptr(), logits_XV.stride(0), num_tokens, native.address(row_N),
            native.address(token_N), num_rows, num_top, native.address(logprob_NJ), native.address(top_NK))
    np.maximum(logprob_NJ, LEAST_LOGPROB, out=logprob_NJ)
    return logprob_NJ[:, 0], top_NK, logprob_NJ[:, 1:]


def definition(logits_NV: Tensor, token_N: Tensor, num_top: int) -> tuple[Singles, Ints]:
    """The same in plain torch: each row's log-probabilities of the token and of the likeliest ones, and these."""
    logits_NV = logits_NV.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    total_N = weights(logits_NV, np.ones(len(logits_NV), np.float32)).sum(-1, dtype=torch.float64)
    top_NK = logits_NV.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    most_N1 = logits_NV.amax(-1, keepdim=True)
    logit_NJ = logits_NV.gather(-1, torch.cat([token_N.unsqueeze(-1), top_NK], -1))
    below_NJ = (logit_NJ.double() - most_N1.double()).masked_fill_(logit_NJ == most_N1, 0.0)
    return (below_NJ - total_N.log().unsqueeze(-1)).float().cpu().numpy(), top_NK.cpu().numpy()
