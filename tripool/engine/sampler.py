"""Chooses the next token of each row.

Every row is drawn by itself: its uniform number comes from a counter-based generator keyed by the request's
seed and the position of the new token, and all arithmetic runs along the row. So a token does not depend on
the batch, on the slot, or on how often an instance failed before, and a replay repeats it.

What a row's parameters mean, in the order in which they act on its logits:

1. repetition penalty: logits of tokens seen in prompt or output are divided by it when positive, multiplied when not;
2. frequency and presence penalty: minus `frequency * times in the output`, minus `presence` if there at all;
3. logit bias is added;
4. below `min_tokens` the stop tokens are impossible;
5. temperature divides; zero means the largest logit, lowest index on a tie;
6. min-p drops tokens less likely than `min_p` times the likeliest;
7. top-k keeps the k likeliest;
8. top-p keeps the fewest likeliest tokens that hold that share of what is left. Lowest index wins a tie.

The last four are `ops/sample`.

Log-probabilities are those of the raw distribution, before all of this (`ops/logprobs`). The sampler knows slots and
numbers; it knows no requests and never ends one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tripool.core.request import Limits, Sampling
from tripool.engine.ops.sample import DRAW, Draws, Ints, sample

NEVER = np.iinfo(np.int64).max

Bools = npt.NDArray[np.bool_]


class Sampler:
    """Sampling parameters of all slots, in columns.

    N rows of a step · V vocabulary · S slots
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.num_slots = num_slots
        self._draw = np.zeros(num_slots, DRAW)
        self._penalties = np.zeros((num_slots, 3), np.float32)     # repetition, presence, frequency
        self._stops_from = np.zeros(num_slots, np.int64)           # first position at which a stop token may stand
        self._plain_from = np.zeros(num_slots, np.int64)           # first position for which logits stay as they are
        self._penalised = np.zeros(num_slots, bool)
        self._bias: list[tuple[Tensor, Tensor] | None] = [None] * num_slots
        self._stops: list[Tensor | None] = [None] * num_slots
        self._seen: list[Seen | None] = [None] * num_slots         # of those with penalties

    def admit(self, slot: int, sampling: Sampling, limits: Limits, tokens: npt.NDArray[np.int32],
              num_prompt: int) -> None:
        """A request takes the slot. `tokens` are its prompt and what it has emitted: penalties are rebuilt from it."""
        greedy = not sampling.temperature > 0 or sampling.top_k == 1
        top_k = sampling.top_k if 0 < sampling.top_k < self.vocab_size else 0
        self._draw[slot] = (0.0 if greedy else sampling.temperature, sampling.min_p, top_k, sampling.top_p,
                            sampling.seed & 0xFFFFFFFFFFFFFFFF, 0)
        stops = [token for token in limits.stop_token_ids if 0 <= token < self.vocab_size]
        self._stops[slot] = torch.tensor(stops, dtype=torch.int64, device=self.device) if stops else None
        self._stops_from[slot] = num_prompt + limits.min_tokens if stops else 0
        bias = [(token, value) for token, value in sampling.logit_bias if 0 <= token < self.vocab_size]
        self._bias[slot] = None if not bias else (
            torch.tensor([token for token, _ in bias], device=self.device),
            torch.tensor([value for _, value in bias], dtype=torch.float32, device=self.device))
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self._penalised[slot] = penalties != (1.0, 0.0, 0.0)
        self._penalties[slot] = penalties
        self._seen[slot] = Seen(tokens, num_prompt, self.vocab_size) if self._penalised[slot] else None
        self._plain_from[slot] = NEVER if bias or self._penalised[slot] else self._stops_from[slot]

    def plain_draws(self, slots_N: Ints, positions_N: Ints) -> Draws | None:
        """How tokens are drawn at these positions and after; None if logits of some row are changed before."""
        if (positions_N < self._plain_from[slots_N]).any():
            return None
        return self._draws(slots_N, positions_N)

    @property
    def plain_columns(self) -> tuple[Ints, Draws]:
        """Of all slots, and always the same: the first position with unchanged logits, and how tokens are drawn."""
        return self._plain_from, self._draw

    def _draws(self, slots_N: Ints, positions_N: Ints) -> Draws:
        draw_N = self._draw.take(slots_N)
        draw_N["position"] = positions_N
        return draw_N

    def choose(self, logits_NV: Tensor, slots_N: Ints, positions_N: Ints, *, only_guessed: bool = False) -> Ints:
        """The next token of each row; `positions_N` are where the new tokens will stand. Leaves the logits alone.

        A token that is `only_guessed` does not count for penalties.
        """
        draw_N = self.plain_draws(slots_N, positions_N)
        if draw_N is not None:
            return sample(logits_NV, draw_N)
        draw_N = self._draws(slots_N, positions_N)
        adjusted = (positions_N < self._plain_from[slots_N]).nonzero()[0]
        logits_NV = logits_NV.clone(memory_format=torch.contiguous_format)
        penalised = self._penalised[slots_N].nonzero()[0]
        if penalised.size:
            self._penalise(logits_NV, penalised, slots_N[penalised])
        for row in adjusted:
            self._adjust(logits_NV, int(row), int(slots_N[row]), int(positions_N[row]))
        chosen_N = sample(logits_NV, draw_N)
        if not only_guessed:
            for row in penalised:
                self._seen_by(slots_N[row]).add(int(chosen_N[row]))
        return chosen_N

    def _penalise(self, logits_NV: Tensor, rows: Ints, slots: Ints) -> None:
        """Penalties of some rows, in place: of the tokens that they have seen alone."""
        seen = [self._seen_by(slot) for slot in slots]
        lengths = [each.size for each in seen]
        place_K = self._to_device(np.concatenate(
            [row * self.vocab_size + each.tokens for row, each in zip(rows, seen, strict=True)]))
        count_K = np.concatenate([each.counts for each in seen])
        repetition_K, presence_K, frequency_K = self._penalties[slots].repeat(lengths, 0).T
        logit_X = logits_NV.view(-1)
        logit_K = logit_X.index_select(0, place_K).cpu().numpy()
        with np.errstate(all="ignore"):                  # logits and penalties may be anything
            logit_K = np.where(logit_K > 0, logit_K / repetition_K, logit_K * repetition_K)
            logit_K -= frequency_K * count_K + presence_K * (count_K > 0)
        logit_X.index_copy_(0, place_K, self._to_device(logit_K))

    def _adjust(self, logits_NV: Tensor, row: int, slot: int, position: int) -> None:
        """Bias and minimum length of a row, in place."""
        bias, stops = self._bias[slot], self._stops[slot]
        if bias is not None:
            logits_NV[row].index_add_(0, bias[0], bias[1])
        if stops is not None and position < self._stops_from[slot]:
            logits_NV[row, stops] = -torch.inf

    def _seen_by(self, slot: int) -> Seen:
        seen = self._seen[slot]
        assert seen is not None, f"slot {slot} has penalties, but nothing was counted for it"
        return seen

    def _to_device(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


class Seen:
    """The tokens that a request has seen, and how often each is in its output."""

    def __init__(self, tokens: npt.NDArray[np.int32], num_prompt: int, vocab_size: int) -> None:
        known, first = np.unique(tokens, return_inverse=True)
        counts = np.bincount(first[num_prompt:], minlength=known.size).astype(np.float32)
        within = (known >= 0) & (known < vocab_size)
        self.size = int(within.sum())
        self._tokens, self._counts = known[within].astype(np.int64), counts[within]
        self._place = {token: place for place, token in enumerate(self._tokens.tolist())}

    @property
    def tokens(self) -> Ints:
        return self._tokens[:self.size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[:self.size]

    def add(self, token: int) -> None:
        """One more in the output."""
        place = self._place.setdefault(token, self.size)
        if place == self.size:
            if place == self._tokens.size:
                self._tokens = np.pad(self._tokens, (0, place + 16))
                self._counts = np.pad(self._counts, (0, place + 16))
            self._tokens[place] = token
            self._counts[place] = 0.0
            self.size += 1
        self._counts[place] += 1.0
