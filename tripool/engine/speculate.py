"""Drafting: guesses at the tokens to come, which the same step's forward pass then proves.

The MTP layer guesses the token after the next from the next token and the hidden state before it. All it reads lies
in the cache: its own entries, which every forward pass writes, and the hidden state that a block keeps of its last
token. So nothing of a guess outlives its step, a row that was pulled from a prefill instance drafts at once like one
that never moved, and a step that is given up has nothing to take back. Further guesses reuse the layer: the state that
it gave takes the place of the model's.

A guess is drawn by the request's own sampling, with the number with which its position will be drawn; so it is right as
often as the two distributions let the same number fall on the same token, and at temperature 0 it is the likeliest. On
every rank of an instance the layer runs as often, with no rows too, since other ranks meet this one in it; a rank that
is alone runs it for rows only.

R rows · D model width · J drafts
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tripool.engine.batch import Batch
from tripool.engine.cache import BlockCache
from tripool.engine.model.deepseek import DeepseekModel
from tripool.engine.ops.sample import Ints
from tripool.engine.sampler import Sampler


class Drafter:
    """Guesses for the decode rows of a step."""

    def __init__(self, model: DeepseekModel, cache: BlockCache, sampler: Sampler, num_drafts: int) -> None:
        assert model.mtp_layer is not None, "a model that was built without drafting cannot draft"
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.num_drafts = num_drafts
        self.is_alone = all(block is None or block.exchange.is_alone for block in model.moe_blocks)

    def guess(self, slots_R: Ints, first_R: Ints, num_drafts_R: Ints, token_R: Ints, block_RB: Ints) -> Ints:
        """Guesses at the tokens after each row's last, `[R, J]`; what is beyond a row's number of drafts is zero.

        `first_R` are the positions of the last tokens, whose entries are still to be computed. Rows with more drafts
        come first. Blocks hold the positions of all tokens and guesses.

        Raises:
            ExchangeError: the ranks did not come together.
        """
        draft_RJ = np.zeros((slots_R.size, self.num_drafts), np.int64)
        num_rows = int((num_drafts_R > 0).sum())
        if self.is_alone and not num_rows:
            return draft_RJ
        drafting = slice(num_rows)
        at_once = self._guess_at_once(slots_R[drafting], first_R[drafting], num_drafts_R[drafting], token_R[drafting],
                                      block_RB[drafting])
        if at_once is not None:
            draft_RJ[drafting, :at_once.shape[1]] = at_once
            return draft_RJ
        state_RD: Tensor | None = None
        for draft in range(self.num_drafts):
            num_rows = int((num_drafts_R > draft).sum())
            if self.is_alone and not num_rows:
                break
            batch = self._batch(token_R[:num_rows], first_R[:num_rows] + draft, block_RB[:num_rows],
                                np.ones(num_rows, np.int64))
            state_RD = self.model.draft(batch, self.cache, None if state_RD is None else state_RD[:num_rows])
            if num_rows:
                token_R = self.sampler.choose(self.model.logits(state_RD), slots_R[:num_rows],
                                              first_R[:num_rows] + draft + 1, only_guessed=True)
                draft_RJ[:num_rows, draft] = token_R
        return draft_RJ

    def _guess_at_once(self, slots_R: Ints, first_R: Ints, num_drafts_R: Ints, token_R: Ints, block_RB: Ints,
                       ) -> Ints | None:
        """All of them in one call of the model; None where that cannot be, or logits of some row are changed."""
        draw_R = self.sampler.plain_draws(slots_R, first_R + 1)
        if draw_R is None or not slots_R.size:
            return None
        return self.model.guess(self._batch(token_R, first_R, block_RB, num_drafts_R), self.cache, num_drafts_R, draw_R)

    def _batch(self, token_R: Ints, position_R: Ints, block_RB: Ints, count_R: Ints) -> Batch:
        """Rows of one token, with blocks for `count_R` that follow it."""
        num_rows = len(token_R)
        num_blocks = int((position_R + count_R - 1).max()) // self.cache.block_tokens + 1 if num_rows else 0
        return Batch(
            token_T=self._to_device(token_R),
            first_R=position_R.tolist(),
            count_R=[1] * num_rows,
            num_decode_rows=num_rows,
            block_table_RB=self._to_device(block_RB[:, :num_blocks]),
        )

    def _to_device(self, values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.cache.data.device)
