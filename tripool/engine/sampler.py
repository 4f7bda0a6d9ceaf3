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
Singles = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


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

    def choose(self, logits_NV: Tensor, slots_N: Ints, positions_N: Ints, *, only_guessed: bool = False) -> Ints:
        """The next token of each row; `positions_N` are where the new tokens will stand. Leaves the logits alone.

        A token that is `only_guessed` does not count for penalties.
        """
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
        if adjusted.size and not only_guessed:
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
        weight_NV = _probabilities(logits_NV, temperature_N1)
        filtered = self._filtered[slots_N].nonzero()[0]
        if filtered.size:
            which = slots_N[filtered]
            rows = self._index(filtered) if filtered.size < slots_N.size else slice(None)
            weight_NV[rows] = _filter(weight_NV[rows], self._min_p[which], self._top_k[which], self._top_p[which])
        return _invert(weight_NV, uniforms(self._seed[slots_N], positions_N))

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


def _probabilities(logits_NV: Tensor, temperature_N1: Tensor) -> Tensor:
    """What the logits say at a temperature, whatever they are: a broken row still gives some token."""
    weight_NV = (logits_NV / temperature_N1).softmax(-1)
    odd = weight_NV[:, 0].isnan()                     # then the whole row is
    if odd.any():
        limit = torch.finfo(torch.float32).max / 4
        finite_NV = logits_NV[odd].nan_to_num(nan=-limit, posinf=limit, neginf=-limit)
        below_NV = finite_NV - finite_NV.amax(-1, keepdim=True)
        weight_NV[odd] = (below_NV / temperature_N1[odd]).softmax(-1)
    return weight_NV


def _filter(weight_NV: Tensor, min_p_N: Floats, top_k_N: Ints, top_p_N: Floats) -> Tensor:
    """Weights with the dropped tokens at zero, in place. A row that needs more than the `PREFIX` likeliest is sorted
    whole."""
    vocab_size = weight_NV.shape[-1]
    prefix = min(PREFIX, vocab_size)
    keep_N, threshold_N, tied_N = _cut(_largest(weight_NV, prefix), min_p_N, top_k_N, top_p_N)
    longer = np.flatnonzero(keep_N >= prefix) if prefix < vocab_size else np.empty(0, np.int64)
    if longer.size:
        sorted_LV = _largest(weight_NV[torch.from_numpy(longer).to(weight_NV.device)], vocab_size)
        cut = _cut(sorted_LV, min_p_N[longer], top_k_N[longer], top_p_N[longer])
        keep_N[longer], threshold_N[longer], tied_N[longer] = cut
    threshold_N1 = torch.from_numpy(threshold_N).to(weight_NV.device).unsqueeze(-1)
    for row in np.flatnonzero(tied_N).tolist():
        equal_V = weight_NV[row] == threshold_N1[row]
        room = int(keep_N[row]) - int((weight_NV[row] > threshold_N1[row]).sum())
        weight_NV[row].masked_fill_(equal_V & (equal_V.cumsum(-1) > room), 0)
    return weight_NV.masked_fill_(weight_NV < threshold_N1, 0)


def _cut(sorted_NP: Singles, min_p_N: Floats, top_k_N: Ints, top_p_N: Floats) -> tuple[Ints, Singles, Bools]:
    """From the largest weights of each row: how many it keeps, the last of them, and whether the next equals it.

    A number that reaches the width of a prefix says only that the prefix does not tell.
    """
    width = sorted_NP.shape[-1]
    rows = np.arange(len(sorted_NP))
    likely_N = (sorted_NP >= (np.minimum(min_p_N, 1.0) * sorted_NP[:, 0])[:, None]).sum(-1)
    left_N = np.where((top_k_N > 0) & (top_k_N < likely_N), top_k_N, likely_N)
    cumulative_NP = sorted_NP.cumsum(-1, dtype=np.float64)
    total_N = np.where(left_N < width, cumulative_NP[rows, np.maximum(left_N - 1, 0)], 1.0)
    nucleus_N = np.minimum((cumulative_NP < (top_p_N * total_N)[:, None]).sum(-1) + 1, left_N)
    unknown_N = (left_N >= width) & ((min_p_N > 0) | (top_k_N > 0))
    keep_N = np.clip(np.where((top_p_N < 1) & ~unknown_N, nucleus_N, left_N), 1, width)
    last_N = sorted_NP[rows, keep_N - 1]
    return keep_N, last_N, (keep_N < width) & (sorted_NP[rows, np.minimum(keep_N, width - 1)] == last_N)


def _largest(weight_NV: Tensor, count: int) -> Singles:
    """The `count` largest weights of each row, in falling order."""
    if weight_NV.device.type != "cpu":
        return weight_NV.topk(count, -1).values.cpu().numpy()
    weights = weight_NV.numpy()                       # numpy's vectorised partition and sort are ten times faster
    if count < weights.shape[-1]:
        weights = np.partition(weights, weights.shape[-1] - count, axis=-1)[:, -count:]
    return np.sort(weights, axis=-1)[:, ::-1]


def _invert(weight_NV: Tensor, uniform_N: Floats) -> Ints:
    """Invert each row's cumulative distribution at its uniform number.

    On two levels, tiles and the tokens of one tile, because a running sum is much slower than a plain one, and because
    so little of a row has to leave an accelerator. Each level is held strictly below its total, so that a token of
    weight zero is never chosen.
    """
    num_rows, vocab_size = weight_NV.shape
    if vocab_size % TILE:
        weight_NV = torch.nn.functional.pad(weight_NV, (0, TILE - vocab_size % TILE))
    weight_NBT = weight_NV.view(num_rows, -1, TILE)
    tile_N, share_N = _pick(weight_NBT.sum(-1).cpu().numpy(), uniform_N)
    tiles = torch.from_numpy(tile_N).to(weight_NV.device)
    inner_NT = weight_NBT[torch.arange(num_rows, device=weight_NV.device), tiles]
    inner_N, _ = _pick(inner_NT.cpu().numpy(), share_N)
    return tile_N * TILE + inner_N


def _pick(weight_NX: Singles, share_N: Floats) -> tuple[Ints, Floats]:
    """Where the running sum passes a share of the total, and how far into the weight of that index it does."""
    rows = np.arange(len(weight_NX))
    cumulative_NX = weight_NX.cumsum(-1, dtype=np.float64)
    total_N = cumulative_NX[:, -1]
    target_N = np.minimum(share_N * total_N, np.nextafter(total_N, 0.0))
    index_N = (cumulative_NX > target_N[:, None]).argmax(-1)
    weight_N = weight_NX[rows, index_N]
    into_N = (target_N - (cumulative_NX[rows, index_N] - weight_N)) / weight_N
    return index_N, np.clip(into_N, 0.0, 1.0)


def raw_logprobs(logits_NV: Tensor) -> Tensor:
    """Log-probabilities of the distribution the model gave, finite throughout."""
    logprob_NV = logits_NV.float().log_softmax(-1)
    return logprob_NV.nan_to_num(nan=LEAST_LOGPROB, posinf=0.0, neginf=LEAST_LOGPROB).clamp_(min=LEAST_LOGPROB)


def top_logprobs(logprob_NV: Tensor, chosen_N: Tensor) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Of each row: the log-probability of the chosen token, and the ids and log-probabilities of the 20 likeliest."""
    chosen = logprob_NV.gather(1, chosen_N.unsqueeze(-1)).squeeze(-1)
    values_NK, ids_NK = logprob_NV.topk(min(MAX_TOP_LOGPROBS, logprob_NV.shape[-1]), -1)
    return chosen.tolist(), ids_NK.tolist(), values_NK.tolist()
