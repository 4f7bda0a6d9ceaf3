"""The question that is put to a cost model, and its answer: what all ranks of an instance compute in one step.

R ranks · C chunks of prompts, on all ranks together
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from tripool.core.value import value

Ints = npt.NDArray[np.int64]
Level = Literal["speed of light", "efficiency", "measured", "residual"]


class Balance(Protocol):
    """How evenly the experts of an instance are asked."""

    def busiest(self, num_requests: float) -> float:
        """The busiest rank's tokens over the mean of all ranks in a step of so many requests, averaged over layers."""
        ...


@value(frozen=True, slots=True)
class StepState:
    """Rows that decode are counted by rank, chunks are listed."""

    rows_R: Ints                  # requests that decode
    context_R: Ints               # tokens in the cache that these rows read, all rows of the rank together
    drafts_R: Ints                # guesses that are computed behind the rows' own tokens, all rows together
    chunk_rank_C: Ints            # which rank computes a chunk,
    chunk_first_C: Ints           # from which position of its prompt,
    chunk_tokens_C: Ints          # and how many tokens
    num_microbatches: int = 1
    balance: Balance | None = None         # of the experts where they are now; None: where the cost model has them
    link_share: float = 1.0                # of a link's bandwidth, what transfers leave the exchange where it is least


@value(frozen=True, slots=True)
class Part:
    """One operator, transfer or residual of a step. Parts that run beside others are already what is left of them."""

    name: str
    seconds: float
    level: Level


@value(frozen=True, slots=True)
class Breakdown:
    """Parts that add up to the time of the step."""

    parts: tuple[Part, ...]

    @property
    def total_s(self) -> float:
        return sum(part.seconds for part in self.parts)


class StepCosts(Protocol):
    """Anything that prices steps: operators, curves, a measured table."""

    def step_time(self, state: StepState) -> Breakdown: ...
