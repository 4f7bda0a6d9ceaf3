"""What clients do, made up from a seed: when requests come, how long they are, which prefixes they share.

A workload is a list of arrivals, fixed before anything runs. It knows nothing of who serves it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tripool.core.request import Limits, Request, Sampling, pack_tokens
from tripool.sim.toy import STOP_TOKEN, VOCAB


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and when its client comes and, if it does, gives up."""

    at_s: float
    request: Request
    cancel_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """Poisson arrivals of requests whose prompts may begin with one of a few shared prefixes."""

    num_requests: int
    requests_per_s: float
    prompt_tokens: tuple[int, int] = (8, 200)          # least and most, beyond the shared prefix
    output_tokens: tuple[int, int] = (1, 60)
    num_prefixes: int = 8
    prefix_tokens: tuple[int, int] = (16, 128)
    share: float = 0.5                                 # of requests that begin with a shared prefix
    stop: float = 0.5                                  # of requests that end at a stop token, should it come
    cancel: float = 0.0                                # of requests whose client gives up
    cancel_after_s: tuple[float, float] = (0.0, 2.0)
    logprobs: float = 0.0                              # of requests that ask for log-probabilities
    priorities: int = 1

    def arrivals(self, generator: random.Random, first_id: int = 1) -> list[Arrival]:
        """Draw the whole workload."""
        prefixes = [_tokens(generator, self.prefix_tokens) for _ in range(self.num_prefixes)]
        arrivals, at_s = [], 0.0
        for request_id in range(first_id, first_id + self.num_requests):
            at_s += generator.expovariate(self.requests_per_s)
            request = self._request(generator, request_id, prefixes)
            cancel_at_s = None
            if generator.random() < self.cancel:
                cancel_at_s = at_s + generator.uniform(*self.cancel_after_s)
            arrivals.append(Arrival(at_s, request, cancel_at_s))
        return arrivals

    def _request(self, generator: random.Random, request_id: int, prefixes: list[list[int]]) -> Request:
        shared = generator.choice(prefixes) if prefixes and generator.random() < self.share else []
        prompt = shared + _tokens(generator, self.prompt_tokens)
        max_tokens = generator.randint(*self.output_tokens)
        stops = (STOP_TOKEN, STOP_TOKEN + 1) if generator.random() < self.stop else ()
        min_tokens = generator.randint(0, max_tokens) if generator.random() < 0.2 else 0
        scored = generator.random() < self.logprobs
        sampling = Sampling(seed=generator.getrandbits(31), num_logprobs=0 if scored else -1,
                            num_prompt_logprobs=0 if scored and generator.random() < 0.5 else -1)
        return Request(request_id, pack_tokens(prompt), sampling, Limits(max_tokens, min_tokens, stops),
                       salt=generator.choice((b"", b"tenant")), priority=generator.randrange(self.priorities))


def _tokens(generator: random.Random, least_and_most: tuple[int, int]) -> list[int]:
    return [generator.randrange(VOCAB) for _ in range(generator.randint(*least_and_most))]
