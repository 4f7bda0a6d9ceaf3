"""Made-up workloads: a rate, lengths, shared prefixes and bursts, drawn from a seed.

Arrivals are Poisson. With bursts they come in waves: for `burst_s` of every `burst_every_s` the rate is `burst_times`
as high, and between them lower, so that the mean stays. Lengths are log-normal about a mean (`spread` is the standard
deviation of the logarithm; 0: all alike).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from tripool.core.errors import ConfigError
from tripool.sim.requests import Workload, WorkRequest


@dataclass(frozen=True, slots=True)
class SyntheticWork:
    """What to draw. `share` of the prompts begin with one of `num_prefixes` prefixes of `prefix_tokens`."""

    duration_s: float
    requests_per_s: float
    prompt_tokens: int = 1024              # mean, the shared prefix included
    output_tokens: int = 256               # mean
    spread: float = 0.0
    num_prefixes: int = 0
    prefix_tokens: int = 0
    share: float = 0.0
    burst_every_s: float = 0.0             # 0: no bursts
    burst_s: float = 0.0
    burst_times: float = 1.0
    start_s: float = 0.0                   # silence before the first

    def __post_init__(self) -> None:
        for name in ("duration_s", "requests_per_s", "spread", "burst_every_s", "burst_s", "start_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a finite number that is not negative")
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; the least is 1")
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share is {self.share}; it is a part of all requests, from 0 to 1")
        if self.share and (self.num_prefixes < 1 or self.prefix_tokens < 1):
            raise ConfigError(f"share is {self.share}, but there are {self.num_prefixes} prefixes of "
                              f"{self.prefix_tokens} tokens; give both")
        if not self.share and (self.num_prefixes or self.prefix_tokens):
            raise ConfigError(f"there are {self.num_prefixes} prefixes of {self.prefix_tokens} tokens, but share is 0: "
                              "no prompt begins with one; give share, too")
        if self.share and self.prefix_tokens >= self.prompt_tokens:
            raise ConfigError(f"prefix_tokens is {self.prefix_tokens}, but a prompt has {self.prompt_tokens} on "
                              "average, the prefix included")
        if not self.burst_every_s and (self.burst_s or self.burst_times != 1):
            raise ConfigError(f"burst_s is {self.burst_s:g} and burst_times is {self.burst_times:g}, but burst_every_s "
                              "is 0: no burst ever begins; give burst_every_s, too")
        if self.burst_every_s:
            if not 0 < self.burst_s < self.burst_every_s:
                raise ConfigError(f"burst_s is {self.burst_s:g}, but burst_every_s is {self.burst_every_s:g}; give "
                                  "burst_s more than 0 and less than that, or burst_every_s 0 for no bursts")
            most = self.burst_every_s / self.burst_s
            if not 1 < self.burst_times <= most:
                raise ConfigError(f"burst_times is {self.burst_times:g}, but bursts of {self.burst_s:g} s every "
                                  f"{self.burst_every_s:g} s are more than 1 and at most {most:g} times the mean rate")

    def draw(self, seed: int) -> Workload:
        """The workload of a seed."""
        generator = random.Random(seed)
        requests: list[WorkRequest] = []
        at_s = self._next(generator, 0.0)
        while at_s < self.duration_s:
            requests.append(self._request(generator, self.start_s + at_s, self.num_prefixes + len(requests)))
            at_s = self._next(generator, at_s)
        return Workload("synthetic", tuple(requests))

    def _next(self, generator: random.Random, at_s: float) -> float:
        """The next arrival, by thinning."""
        if not self.requests_per_s:
            return math.inf
        most = self.burst_times if self.burst_every_s else 1.0
        while True:
            at_s += generator.expovariate(self.requests_per_s * most)
            if generator.random() * most < self._times(at_s):
                return at_s

    def _times(self, at_s: float) -> float:
        """The rate at a moment, over the mean."""
        if not self.burst_every_s:
            return 1.0
        if at_s % self.burst_every_s < self.burst_s:
            return self.burst_times
        return (self.burst_every_s - self.burst_s * self.burst_times) / (self.burst_every_s - self.burst_s)

    def _request(self, generator: random.Random, at_s: float, name: int) -> WorkRequest:
        num_prompt = self._length(generator, self.prompt_tokens)
        num_output = self._length(generator, self.output_tokens)
        shares = generator.random() < self.share
        prefix = generator.randrange(max(self.num_prefixes, 1))
        if not shares:
            return WorkRequest(at_s, ((name, num_prompt),), num_output)
        own = max(1, num_prompt - self.prefix_tokens)
        return WorkRequest(at_s, ((prefix, self.prefix_tokens), (name, own)), num_output)

    def _length(self, generator: random.Random, mean: int) -> int:
        if not self.spread:
            return mean
        return max(1, round(mean * math.exp(generator.gauss(0.0, self.spread) - self.spread**2 / 2)))
