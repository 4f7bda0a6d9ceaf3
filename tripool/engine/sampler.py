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

Log-probabilities are those of the raw distribution, before all of this. The sampler knows slots and numbers;
it knows no requests and never ends one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tripool.core.request import Limits, Sampling
from tripool.engine.ops.sample import DRAW, sample

MAX_TOP_LOGPROBS = 20
LEAST_LOGPROB = -9999.0            # stands for minus infinity, which JSON cannot say
NEVER = np.iinfo(np.int64).max

Ints = npt.NDArray[np.int64]
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
        self._seen_SV: Tensor | None = None                        # both only once somebody asks for penalties
        self._count_SV: Tensor | None = None

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
        if self._penalised[slot]:
            self._penalties[slot] = penalties
            self._count(slot, tokens, num_prompt)
        self._plain_from[slot] = NEVER if bias or self._penalised[slot] else self._stops_from[slot]

    def choose(self, logits_NV: Tensor, slots_N: Ints, positions_N: Ints, *, only_guessed: bool = False) -> Ints:
        """The next token of each row; `positions_N` are where the new tokens will stand. Leaves the logits alone.

        A token that is `only_guessed` does not count for penalties.
        """
        draw_N = self._draw[slots_N]
        draw_N["position"] = positions_N
        adjusted = (positions_N < self._plain_from[slots_N]).nonzero()[0]
        if not adjusted.size:
            return sample(logits_NV, draw_N)
        logits_NV = logits_NV.clone()
        for row in adjusted:
            self._adjust(logits_NV[row], int(slots_N[row]), int(positions_N[row]))
        chosen_N = sample(logits_NV, draw_N)
        if not only_guessed:
            self._record(slots_N, chosen_N)
        return chosen_N

    def _index(self, rows: Ints) -> Tensor:
        return torch.from_numpy(rows).to(self.device)

    def _adjust(self, logits_V: Tensor, slot: int, position: int) -> None:
        """Penalties, bias and minimum length, in place."""
        if self._penalised[slot]:
            assert self._seen_SV is not None and self._count_SV is not None, "penalties without counts"
            repetition, presence, frequency = self._penalties[slot].tolist()
            if repetition != 1.0:
                penalised_V = torch.where(logits_V > 0, logits_V / repetition, logits_V * repetition)
                torch.where(self._seen_SV[slot], penalised_V, logits_V, out=logits_V)
            if presence or frequency:
                count_V = self._count_SV[slot]
                logits_V -= frequency * count_V + presence * (count_V > 0)
        bias = self._bias[slot]
        if bias is not None:
            logits_V.index_add_(0, bias[0], bias[1])
        stops = self._stops[slot]
        if stops is not None and position < self._stops_from[slot]:
            logits_V[stops] = -torch.inf

    def _count(self, slot: int, tokens: npt.NDArray[np.int32], num_prompt: int) -> None:
        if self._seen_SV is None or self._count_SV is None:
            self._seen_SV = torch.zeros((self.num_slots, self.vocab_size), dtype=torch.bool, device=self.device)
            self._count_SV = torch.zeros((self.num_slots, self.vocab_size), dtype=torch.float32, device=self.device)
        counts = np.bincount(tokens[num_prompt:], minlength=self.vocab_size)[:self.vocab_size]
        seen = np.bincount(tokens, minlength=self.vocab_size)[:self.vocab_size] > 0
        self._count_SV[slot] = torch.from_numpy(counts.astype(np.float32)).to(self.device)
        self._seen_SV[slot] = torch.from_numpy(seen).to(self.device)

    def _record(self, slots_N: Ints, chosen_N: Ints) -> None:
        rows = self._penalised[slots_N].nonzero()[0]
        if rows.size:
            assert self._seen_SV is not None and self._count_SV is not None, "penalties without counts"
            slots, tokens = self._index(slots_N[rows]), self._index(chosen_N[rows])
            self._count_SV[slots, tokens] += 1
            self._seen_SV[slots, tokens] = True


def raw_logprobs(logits_NV: Tensor) -> Tensor:
    """Log-probabilities of the distribution the model gave, finite throughout."""
    logprob_NV = logits_NV.float().log_softmax(-1)
    return logprob_NV.nan_to_num(nan=LEAST_LOGPROB, posinf=0.0, neginf=LEAST_LOGPROB).clamp_(min=LEAST_LOGPROB)


def top_logprobs(logprob_NV: Tensor, chosen_N: Tensor) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Of each row: the log-probability of the chosen token, and the ids and log-probabilities of the 20 likeliest."""
    chosen = logprob_NV.gather(1, chosen_N.unsqueeze(-1)).squeeze(-1)
    values_NK, ids_NK = logprob_NV.topk(min(MAX_TOP_LOGPROBS, logprob_NV.shape[-1]), -1)
    return chosen.tolist(), ids_NK.tolist(), values_NK.tolist()
