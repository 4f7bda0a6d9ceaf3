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

Log-probabilities are those of the raw distribution, before all of this. The sampler knows slots and numbers;
it knows no requests and never ends one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tripool.core.request import Limits, Sampling

MAX_TOP_LOGPROBS = 20
LEAST_LOGPROB = -9999.0            # stands for minus infinity, which JSON cannot say
PREFIX = 256                       # how many of the likeliest tokens are sorted before a row needs all of them
TILE = 64                          # tokens summed together on the first level of a draw

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


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


class Sampler:
    """Sampling parameters of all slots, in columns.

    N rows of a step · V vocabulary · S slots
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.num_slots = num_slots
        self._temperature = np.ones(num_slots, np.float32)
        self._top_p = np.ones(num_slots)
        self._top_k = np.zeros(num_slots, np.int64)
        self._min_p = np.zeros(num_slots)
        self._penalties = np.zeros((num_slots, 3), np.float32)     # repetition, presence, frequency
        self._seed = np.zeros(num_slots, np.uint64)
        self._stops_from = np.zeros(num_slots, np.int64)           # first position at which a stop token may stand
        self._greedy = np.ones(num_slots, bool)
        self._filtered = np.zeros(num_slots, bool)
        self._penalised = np.zeros(num_slots, bool)
        self._biased = np.zeros(num_slots, bool)
        self._bias: list[tuple[Tensor, Tensor] | None] = [None] * num_slots
        self._stops: list[Tensor | None] = [None] * num_slots
        self._seen_SV: Tensor | None = None                        # both only once somebody asks for penalties
        self._count_SV: Tensor | None = None

    def admit(self, slot: int, sampling: Sampling, limits: Limits, tokens: npt.NDArray[np.int32],
              num_prompt: int) -> None:
        """A request takes the slot. `tokens` are its prompt and what it has emitted: penalties are rebuilt from it."""
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k if 0 < sampling.top_k < self.vocab_size else 0
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = np.uint64(sampling.seed & 0xFFFFFFFFFFFFFFFF)
        self._greedy[slot] = not sampling.temperature > 0 or sampling.top_k == 1
        self._filtered[slot] = self._top_k[slot] > 0 or sampling.top_p < 1 or sampling.min_p > 0
        stops = [token for token in limits.stop_token_ids if 0 <= token < self.vocab_size]
        self._stops[slot] = torch.tensor(stops, dtype=torch.int64, device=self.device) if stops else None
        self._stops_from[slot] = num_prompt + limits.min_tokens if stops else 0
        bias = [(token, value) for token, value in sampling.logit_bias if 0 <= token < self.vocab_size]
        self._biased[slot] = bool(bias)
        self._bias[slot] = None if not bias else (
            torch.tensor([token for token, _ in bias], device=self.device),
            torch.tensor([value for _, value in bias], dtype=torch.float32, device=self.device))
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self._penalised[slot] = penalties != (1.0, 0.0, 0.0)
        if self._penalised[slot]:
            self._penalties[slot] = penalties
            self._count(slot, tokens, num_prompt)

    def choose(self, logits_NV: Tensor, slots_N: Ints, positions_N: Ints) -> Ints:
        """The next token of each row; `positions_N` are where the new tokens will stand. Leaves the logits alone."""
        too_short_N = positions_N < self._stops_from[slots_N]
        adjusted = (self._penalised[slots_N] | self._biased[slots_N] | too_short_N).nonzero()[0]
        if adjusted.size:
            logits_NV = logits_NV.clone()
            for row in adjusted:
                self._adjust(logits_NV[row], int(slots_N[row]), int(positions_N[row]))
        drawn = (~self._greedy[slots_N]).nonzero()[0]
        if not drawn.size:
            chosen_N = _largest_index(logits_NV)
        elif drawn.size == slots_N.size:
            chosen_N = self._draw(logits_NV, slots_N, positions_N)
        else:
            greedy = self._greedy[slots_N].nonzero()[0]
            chosen_N = np.empty(slots_N.size, np.int64)
            chosen_N[greedy] = _largest_index(logits_NV[self._index(greedy)])
            chosen_N[drawn] = self._draw(logits_NV[self._index(drawn)], slots_N[drawn], positions_N[drawn])
        if adjusted.size:
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

    def _draw(self, logits_NV: Tensor, slots_N: Ints, positions_N: Ints) -> Ints:
        temperature_N1 = torch.from_numpy(self._temperature[slots_N]).to(self.device).unsqueeze(-1)
        weight_NV = _weights(logits_NV, temperature_N1)
        filtered = self._filtered[slots_N].nonzero()[0]
        if filtered.size:
            rows = self._index(filtered)
            which = slots_N[filtered]
            weight_NV[rows] = _filter(weight_NV[rows], self._min_p[which], self._top_k[which], self._top_p[which])
        uniform_N = torch.from_numpy(uniforms(self._seed[slots_N], positions_N)).to(self.device)
        chosen: Ints = _invert(weight_NV, uniform_N).cpu().numpy()
        return chosen

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


def _largest_index(logits_NV: Tensor) -> Ints:
    """The index of each row's largest logit, the lowest on a tie."""
    if logits_NV.device.type == "cpu":
        return logits_NV.numpy().argmax(-1)          # five times faster than torch's
    chosen: Ints = logits_NV.argmax(-1).cpu().numpy()
    return chosen


def _weights(logits_NV: Tensor, temperature_N1: Tensor) -> Tensor:
    """Unnormalised probabilities at a temperature; the likeliest token weighs 1, whatever the logits are."""
    most_N1 = logits_NV.amax(-1, keepdim=True)
    if not torch.isfinite(most_N1).all():
        odd = ~torch.isfinite(most_N1.squeeze(-1))
        logits_NV = logits_NV.clone()
        logits_NV[odd] = _finite(logits_NV[odd])
        most_N1 = logits_NV.amax(-1, keepdim=True)
    return (logits_NV - most_N1).div_(temperature_N1).exp_()


def _finite(logits: Tensor) -> Tensor:
    """Not-a-number as impossible, infinities as the largest numbers: a broken row still gives some token."""
    limit = torch.finfo(torch.float32).max / 4
    return logits.nan_to_num(nan=-limit, posinf=limit, neginf=-limit)


def _filter(weight_NV: Tensor, min_p_N: Floats, top_k_N: Ints, top_p_N: Floats) -> Tensor:
    """Weights with the dropped tokens at zero. A row that needs more than the `PREFIX` likeliest is sorted whole."""
    device = weight_NV.device
    filters = tuple(torch.from_numpy(each).to(device) for each in (min_p_N, top_k_N, top_p_N))
    total_N = weight_NV.sum(-1, dtype=torch.float64)
    prefix = min(PREFIX, weight_NV.shape[-1])
    sorted_NP = _largest(weight_NV, prefix)
    keep_N = _num_kept(sorted_NP, total_N, filters)
    longer = ((keep_N >= prefix) & (prefix < weight_NV.shape[-1])).nonzero().squeeze(-1)
    threshold_N = sorted_NP.gather(1, (keep_N - 1).clamp(max=prefix - 1).unsqueeze(-1)).squeeze(-1)
    if longer.numel():
        sorted_LV = _largest(weight_NV[longer], weight_NV.shape[-1])
        keep_L = _num_kept(sorted_LV, total_N[longer], tuple(each[longer] for each in filters))
        keep_N[longer] = keep_L
        threshold_N[longer] = sorted_LV.gather(1, (keep_L - 1).unsqueeze(-1)).squeeze(-1)
    kept_NV = weight_NV >= threshold_N.unsqueeze(-1)
    tied = (kept_NV.sum(-1) > keep_N).nonzero().squeeze(-1)
    if tied.numel():
        above_TV = weight_NV[tied] > threshold_N[tied].unsqueeze(-1)
        equal_TV = weight_NV[tied] == threshold_N[tied].unsqueeze(-1)
        room_T = keep_N[tied] - above_TV.sum(-1)
        kept_NV[tied] = above_TV | (equal_TV & (equal_TV.cumsum(-1) <= room_T.unsqueeze(-1)))
    return weight_NV * kept_NV


def _num_kept(sorted_NP: Tensor, total_N: Tensor, filters: tuple[Tensor, ...]) -> Tensor:
    """How many of the likeliest tokens a row keeps, as far as a sorted prefix tells; its whole width: unknown."""
    min_p_N, top_k_N, top_p_N = filters
    width = sorted_NP.shape[-1]
    likely_N = (sorted_NP >= (min_p_N.clamp(max=1.0) * sorted_NP[:, 0]).unsqueeze(-1)).sum(-1)
    left_N = torch.where((top_k_N > 0) & (top_k_N < likely_N), top_k_N, likely_N)
    cumulative_NP = sorted_NP.cumsum(-1, dtype=torch.float64)
    left_total_N = cumulative_NP.gather(1, (left_N - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    share_N = top_p_N * torch.where(left_N < width, left_total_N, total_N)
    nucleus_N = torch.minimum((cumulative_NP < share_N.unsqueeze(-1)).sum(-1) + 1, left_N)
    unknown_N = (left_N >= width) & ((min_p_N > 0) | (top_k_N > 0))      # what is left may end beyond the prefix
    return torch.where((top_p_N < 1) & ~unknown_N, nucleus_N, left_N).clamp(min=1, max=width)


def _largest(weight_NV: Tensor, count: int) -> Tensor:
    """The `count` largest weights of each row, in falling order."""
    if weight_NV.device.type != "cpu":
        return weight_NV.topk(count, -1).values
    weights = weight_NV.numpy()                       # numpy's vectorised partition and sort are ten times faster
    if count < weights.shape[-1]:
        weights = np.partition(weights, weights.shape[-1] - count, axis=-1)[:, -count:]
    return torch.from_numpy(np.ascontiguousarray(np.sort(weights, axis=-1)[:, ::-1]))


def _invert(weight_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Invert each row's cumulative distribution at its uniform number.

    On two levels, tiles and the tokens of one tile, because a running sum is much slower than a plain one. Each level
    is held strictly below its total, so that a token of weight zero is never chosen.
    """
    num_rows, vocab_size = weight_NV.shape
    if vocab_size % TILE:
        weight_NV = torch.nn.functional.pad(weight_NV, (0, TILE - vocab_size % TILE))
    weight_NBT = weight_NV.view(num_rows, -1, TILE)
    tile_NB = weight_NBT.sum(-1).double()
    tile_N1, share_N1 = _pick(tile_NB, uniform_N.unsqueeze(-1))
    rows = torch.arange(num_rows, device=weight_NV.device)
    inner_N1, _ = _pick(weight_NBT[rows, tile_N1.squeeze(-1)].double(), share_N1)
    return (tile_N1 * TILE + inner_N1).squeeze(-1)


def _pick(weight_NX: Tensor, share_N1: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum passes a share of the total, and how far into the weight of that index it does."""
    cumulative_NX = weight_NX.cumsum(-1)
    total_N1 = cumulative_NX[:, -1:]
    target_N1 = torch.minimum(share_N1 * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    index_N1 = torch.searchsorted(cumulative_NX, target_N1, right=True)
    weight_N1 = weight_NX.gather(1, index_N1)
    into_N1 = (target_N1 - (cumulative_NX.gather(1, index_N1) - weight_N1)) / weight_N1
    return index_N1, into_N1.clamp(0.0, 1.0)


def raw_logprobs(logits_NV: Tensor) -> Tensor:
    """Log-probabilities of the distribution the model gave, finite throughout."""
    logprob_NV = logits_NV.float().log_softmax(-1)
    return logprob_NV.nan_to_num(nan=LEAST_LOGPROB, posinf=0.0, neginf=LEAST_LOGPROB).clamp_(min=LEAST_LOGPROB)


def top_logprobs(logprob_NV: Tensor, chosen_N: Tensor) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Of each row: the log-probability of the chosen token, and the ids and log-probabilities of the 20 likeliest."""
    chosen = logprob_NV.gather(1, chosen_N.unsqueeze(-1)).squeeze(-1)
    values_NK, ids_NK = logprob_NV.topk(min(MAX_TOP_LOGPROBS, logprob_NV.shape[-1]), -1)
    return chosen.tolist(), ids_NK.tolist(), values_NK.tolist()
