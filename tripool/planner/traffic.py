"""What a workload asks of a deployment, at any pace: tokens to compute, rows that decode, and what was seen before.

A plan is made for a pace that may not be the workload's own: the most that so many NPUs serve is looked for by letting
the same requests come faster. How much of the prompts is in the pool depends on the pool's size, found by one pass over
the trace for each size. Nothing here knows a machine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tripool.core.errors import ConfigError
from tripool.sim.requests import Workload, WorkRequest
from tripool.sim.synthetic import SyntheticWork

Reals = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NUM_LOOKED_AT = 4000
"""Requests of a made-up workload that the closed form looks at."""

NUM_CONTEXTS = 1 << 15

LEAST_PACE = 1e-3
"""Requests a second: a trial of some hundreds lasts days."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace, or what a made-up workload is drawn from."""

    source: Workload | SyntheticWork
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.source, SyntheticWork) and not self.source.requests_per_s:
            raise ConfigError("requests_per_s is 0: a workload without requests needs no deployment")
        if isinstance(self.source, Workload) and not self.source.requests:
            raise ConfigError("the workload holds no request: there is nothing to plan for")
        if self.requests_per_s < LEAST_PACE:
            raise ConfigError(f"requests_per_s is {self.requests_per_s:g}; the least that is planned for is "
                              f"{LEAST_PACE:g}, one in a quarter of an hour")

    @property
    def requests_per_s(self) -> float:
        """Its own pace."""
        if isinstance(self.source, SyntheticWork):
            return self.source.requests_per_s
        return len(self.source.requests) / (self.source.span_s or 1.0)

    def at(self, requests_per_s: float, seconds: float) -> Workload:
        """The requests at some pace, for so long; of a longer trace the stretch with the most tokens."""
        if isinstance(self.source, SyntheticWork):
            return replace(self.source, requests_per_s=requests_per_s, duration_s=seconds).draw(self.seed)
        times = requests_per_s / self.requests_per_s
        paced = self.source if abs(times - 1) < 1e-9 else self.source.faster(times)
        return busiest_stretch(paced, seconds)

    def to_look_at(self) -> Workload:
        """What the closed form reckons with: a trace whole, of a made-up workload a good number of requests."""
        if isinstance(self.source, Workload):
            return self.source
        drawn = self.at(self.requests_per_s, NUM_LOOKED_AT / self.requests_per_s)
        return drawn.faster(self.requests_per_s * drawn.span_s / len(drawn.requests))      # chance had its own pace

    def longer(self, times: float) -> Traffic:
        """The same with all prompts so many times as long; what they share stays as it is."""
        if isinstance(self.source, SyntheticWork):
            prompt = max(round(self.source.prompt_tokens * times), self.source.prefix_tokens + 1)
            return replace(self, source=replace(self.source, prompt_tokens=prompt))
        return replace(self, source=Workload(self.source.source, tuple(_stretched(each, times)
                                                                       for each in self.source.requests)))


def busiest_stretch(workload: Workload, seconds: float) -> Workload:
    """The part of a workload of so many seconds in which the most tokens come."""
    requests = workload.requests
    if workload.span_s <= seconds:
        return workload
    at_s = np.array([each.at_s for each in requests])
    tokens = np.concatenate([[0], np.cumsum([each.num_prompt + each.num_output for each in requests])])
    ends = np.searchsorted(at_s, at_s + seconds, side="right")
    first = int(np.argmax(tokens[ends] - tokens[:-1]))
    begin_s = requests[first].at_s
    return Workload(workload.source, tuple(replace(each, at_s=each.at_s - begin_s)
                                           for each in requests[first:int(ends[first])]))


def _stretched(request: WorkRequest, times: float) -> WorkRequest:
    """The last part of the prompt takes up the difference, as far as it goes."""
    *shared, (name, count) = request.parts
    more = round(request.num_prompt * (times - 1))
    while count + more < 1 and shared:
        more += count
        name, count = shared.pop()
    return replace(request, parts=(*shared, (name, max(count + more, 1))))


class Demand:
    """The requests of a workload as columns: when, how long, and how much of each prompt the pool has.

    N requests, in the order in which they come
    """

    def __init__(self, workload: Workload, block_tokens: int) -> None:
        self.workload = workload
        self.block_tokens = block_tokens
        requests = workload.requests
        self.at_N: Reals = np.array([each.at_s for each in requests])
        self.prompt_N: Ints = np.array([each.num_prompt for each in requests])
        self.output_N: Ints = np.array([each.num_output for each in requests])
        self.requests_per_s = len(requests) / (workload.span_s or 1.0)
        self.mean_prompt, self.mean_output = float(self.prompt_N.mean()), float(self.output_N.mean())
        self.longest = int((self.prompt_N + self.output_N).max())          # tokens of a request, prompt and answer
        self._reused: dict[int, Ints] = {}

    def __len__(self) -> int:
        return len(self.at_N)

    def reused_N(self, pool_tokens: int) -> Ints:
        """Tokens of each prompt, in whole blocks, that a pool of this size has when it comes."""
        if pool_tokens not in self._reused:
            parts = [request.parts for request in self.workload.requests]
            self._reused[pool_tokens] = leading_hits(parts, self.block_tokens, pool_tokens)
        return self._reused[pool_tokens]

    def reused_share(self, pool_tokens: int) -> float:
        """The same as a part of all prompt tokens."""
        return float(self.reused_N(pool_tokens).sum() / self.prompt_N.sum())

    @cached_property
    def distinct_tokens(self) -> int:
        """Tokens that a pool would hold which forgets nothing."""
        seen: dict[tuple[int, int, int], int] = {}
        for request in self.workload.requests:
            chain = 0
            for name, count in request.parts:
                key = (chain, name, count)
                chain = seen.setdefault(key, len(seen) + 1)
        return sum(count for _, _, count in seen)

    @cached_property
    def contexts(self) -> Ints:
        """Contexts of many rows, as somebody finds them who looks at a random moment; in no order."""
        generator = np.random.default_rng(0)
        picked = generator.choice(len(self), NUM_CONTEXTS, p=self.output_N / self.output_N.sum())
        written = generator.random(NUM_CONTEXTS) * self.output_N[picked]
        contexts: Ints = (self.prompt_N[picked] + written).astype(np.int64)
        return contexts

    def prompts(self, count: int, pool_tokens: int) -> tuple[list[int], list[int]]:
        """So many prompts picked at random: tokens that are there already, and tokens to compute."""
        picked = np.random.default_rng(0).integers(len(self), size=count)
        reused = self.reused_N(pool_tokens)[picked]
        return reused.tolist(), (self.prompt_N[picked] - reused).tolist()

    def most_rows(self, times: float, token_s: float, share: float) -> float:
        """Rows that decode, at a pace `times` its own and so many seconds a token, when this share of the answers'
        tokens sees no more of them."""
        begins = np.sort(self.at_N / times)
        lasts = self.output_N * token_s
        ends = np.sort(self.at_N / times + lasts)
        looks = np.concatenate([begins + 1e-9, self.at_N / times + lasts / 2])
        weights = np.concatenate([self.output_N, self.output_N])
        rows = np.searchsorted(begins, looks, side="right") - np.searchsorted(ends, looks, side="right")
        steady = self._steady_rows(times, token_s)
        order = np.argsort(rows)
        reached = np.cumsum(weights[order]) / weights.sum()
        found = float(rows[order][min(int(np.searchsorted(reached, share)), len(rows) - 1)])
        return max(found, steady)

    def _steady_rows(self, times: float, token_s: float) -> float:
        """Little's law; a made-up workload of a few seconds does not come to it by itself."""
        return self.requests_per_s * times * self.mean_output * token_s

    def waiting_s(self, times: float, tokens_per_s: float, pool_tokens: int) -> Reals:
        """Seconds that each request waits until those before it are computed, at so many tokens a second."""
        computed_N = (self.prompt_N - self.reused_N(pool_tokens)).astype(np.float64)
        gaps = np.diff(self.at_N / times, prepend=0.0)
        # Lindley's recursion, unrolled: work that has come and not been done, before each arrival.
        walk = np.concatenate([[0.0], np.cumsum(computed_N)[:-1]]) - tokens_per_s * np.cumsum(gaps)
        ahead = walk - np.minimum.accumulate(walk)
        waiting: Reals = ahead / tokens_per_s
        return waiting


def leading_hits(prompts: Sequence[Sequence[tuple[int, int]]], block_tokens: int, pool_tokens: int) -> Ints:
    """Leading tokens of each prompt that are in a cache of `pool_tokens`, which drops what was used longest ago.

    Whole blocks count, and of a prompt at least one token is left to compute.
    """
    held: OrderedDict[int, int] = OrderedDict()
    names: dict[tuple[int, int, int], int] = {}
    num_held = 0
    found = np.zeros(len(prompts), np.int64)
    for number, parts in enumerate(prompts):
        chain, hit, total, leads = 0, 0, 0, True
        for name, count in parts:
            chain = names.setdefault((chain, name, count), len(names) + 1)
            total += count
            if chain in held:
                held.move_to_end(chain)
                hit += count if leads else 0
                continue
            leads = False
            held[chain] = count
            num_held += count
            while num_held > pool_tokens and held:
                num_held -= held.popitem(last=False)[1]
        found[number] = min(hit, total - 1) // block_tokens * block_tokens
    return found
