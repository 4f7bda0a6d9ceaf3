"""What the simulated data plane asks of a machine's description: prices of steps, and planes that bytes travel over.

Steps are priced by anything that keeps the contract of `costs.state`. `LinearCosts` is the simplest: it has one price
for each thing a step consists of, which is also what a measurement of a real machine comes to. Prices of pure decode
steps are remembered, with contexts rounded to 1/32, because a long run asks for the same few thousand again and again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tripool.core.errors import ConfigError
from tripool.sim.costs.state import Breakdown, Ints, Level, Part, StepCosts, StepState
from tripool.sim.costs.steps import EXCHANGE
from tripool.sim.demand import LiveExperts

CONTEXT_BITS = 5
"""Leading bits, after the first, that a context keeps when it is priced: it is off by 1/64 at most."""

MOST_KNOWN = 4096
"""Prices that are remembered."""

SHORTEST_S = 1e-6
"""Of a step, so that time goes on whatever is left out of a price."""

NO_CHUNKS: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """Seconds of each thing that a step consists of. The rank that has most to do decides."""

    step_s: float = 0.0                    # of every step, however little there is in it
    row_s: float = 0.0                     # of each row that decodes, and of each draft behind it
    context_token_s: float = 0.0           # of each token in the cache that these rows read
    chunk_token_s: float = 0.0             # of each token of a prompt
    chunk_pair_s: float = 0.0              # of each pair of such a token and one before it
    level: Level = "measured"

    def __post_init__(self) -> None:
        for name in ("step_s", "row_s", "context_token_s", "chunk_token_s", "chunk_pair_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give seconds, not negative")
        if not any((self.step_s, self.row_s, self.context_token_s, self.chunk_token_s)):
            raise ConfigError("step_s, row_s, context_token_s and chunk_token_s are all 0: steps would take no time")

    def step_time(self, state: StepState) -> Breakdown:
        if len(state.rows_R) == 1:
            return self._of_one_rank(state)
        rows_R = (state.rows_R + state.drafts_R) * self.row_s
        context_R = state.context_R * self.context_token_s
        tokens_R, pairs_R = np.zeros(len(rows_R)), np.zeros(len(rows_R))
        if len(state.chunk_rank_C):
            tokens_C = state.chunk_tokens_C
            np.add.at(tokens_R, state.chunk_rank_C, tokens_C * self.chunk_token_s)
            pairs_C = tokens_C * (state.chunk_first_C + 0.5 * tokens_C)
            np.add.at(pairs_R, state.chunk_rank_C, pairs_C * self.chunk_pair_s)
        rank = int(np.argmax(rows_R + context_R + tokens_R + pairs_R))
        return self._parts(float(rows_R[rank]), float(context_R[rank]), float(tokens_R[rank]), float(pairs_R[rank]))

    def _of_one_rank(self, state: StepState) -> Breakdown:
        """The same without arrays, of which small ones are slow."""
        tokens = pairs = 0.0
        for first, count in zip(state.chunk_first_C.tolist(), state.chunk_tokens_C.tolist(), strict=True):
            tokens += count * self.chunk_token_s
            pairs += count * (first + 0.5 * count) * self.chunk_pair_s
        rows = (int(state.rows_R[0]) + int(state.drafts_R[0])) * self.row_s
        return self._parts(rows, int(state.context_R[0]) * self.context_token_s, tokens, pairs)

    def _parts(self, rows_s: float, context_s: float, tokens_s: float, pairs_s: float) -> Breakdown:
        level = self.level
        return Breakdown((Part("step", self.step_s, level), Part("rows", rows_s, level),
                          Part("context", context_s, level), Part("chunks", tokens_s, level),
                          Part("chunk attention", pairs_s, level)))


@dataclass(frozen=True, slots=True)
class Plane:
    """A network, as each of its endpoints sees it."""

    bytes_per_s: float                     # into or out of an endpoint
    latency_s: float = 0.0
    flow_bytes_per_s: float = 0.0          # most that one transfer reaches, for its software; 0: no such limit
    level: Level = "efficiency"            # of these numbers

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s is {self.bytes_per_s}; give a positive number")
        for name in ("latency_s", "flow_bytes_per_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a number that is not negative")


@dataclass(frozen=True, slots=True)
class ExchangeLinks:
    """Over what the ranks of an instance exchange, and how fast the link of each is."""

    plane: str
    bytes_per_s: float
    level: Level                           # of prices that say what a smaller share of them costs

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s is {self.bytes_per_s}; give a positive number")


@dataclass(frozen=True, slots=True)
class PoolEnds:
    """What the two ends of a copy to or from the pool do with their plane, where it is not what a rank does."""

    die_bytes_per_s: float                 # through the pool's software at a rank, all its copies together
    server_bytes_per_s: float              # into or out of the memory of one cache server

    def __post_init__(self) -> None:
        for name in ("die_bytes_per_s", "server_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a positive number")


@dataclass(frozen=True, slots=True)
class Planes:
    """Networks by name, and which of them carries what."""

    planes: Mapping[str, Plane]
    pull: str                              # blocks from prefill to decode instances
    pool: str                              # blocks to and from cache servers
    control: str                           # messages between processes: its latency alone counts
    pool_ends: PoolEnds | None = None      # None: those of copies to or from the pool are like all others

    def __post_init__(self) -> None:
        for name in ("pull", "pool", "control"):
            if getattr(self, name) not in self.planes:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, which is no plane; there are "
                                  f"{', '.join(self.planes)}")

    def fastest_copy(self, plane: str) -> float:
        """Bytes a second of the fastest transfer over a plane; 0 if none goes over it."""
        found = [0.0]
        if plane == self.pull:
            found.append(self.planes[plane].bytes_per_s)
        if plane == self.pool:
            found.append(self.planes[plane].bytes_per_s / max(self.pool_shares[0], 1.0))
        return max(found)

    @property
    def pool_shares(self) -> tuple[float, float]:
        """How much of an endpoint's bandwidth a copy takes up at a rank's pool software and at a server, of 1."""
        if self.pool_ends is None:
            return 0.0, 1.0
        full = self.planes[self.pool].bytes_per_s
        return full / self.pool_ends.die_bytes_per_s, full / self.pool_ends.server_bytes_per_s


Key = tuple[int | bytes, int | bytes, int | bytes, int, tuple[str, int, int] | None]


@dataclass(slots=True, eq=False)
class Priced:
    """A remembered price. Known by identity."""

    seconds: float
    exchange_share: float                                              # of them, while tokens are on their way
    parts_ps: tuple[tuple[tuple[str, Level], int], ...]                # by part; whole ones, of which sums are exact


def priced(breakdown: Breakdown) -> Priced:
    """The price of a step that consists of this."""
    seconds = max(breakdown.total_s, SHORTEST_S)
    exchange_s = sum([part.seconds for part in breakdown.parts if part.name in EXCHANGE])
    return Priced(seconds, exchange_s / seconds,
                  tuple([((part.name, part.level), round(part.seconds * 1e12)) for part in breakdown.parts]))


@dataclass(slots=True)
class StepPrices:
    """Prices of steps by one model of costs, and what all steps so far consisted of."""

    costs: StepCosts
    _known: dict[Key, Priced] = field(default_factory=dict)
    _taken: dict[Priced, int] = field(default_factory=dict)                    # steps, of which parts are yet to count
    _parts_ps: dict[tuple[str, Level], int] = field(default_factory=dict)      # a sum of which the order is no matter

    def decode(self, rows_R: Ints, context_R: Ints, drafts_R: Ints, num_microbatches: int,
               experts: LiveExperts | None = None) -> Priced:
        """The price of a step in which rows decode and nothing else is computed."""
        rounded_R = round_contexts(context_R)
        key = (rows_R.tobytes(), rounded_R.tobytes(), drafts_R.tobytes(), num_microbatches,
               experts.state if experts is not None else None)
        known = self._known.get(key)
        if known is None:
            state = StepState(rows_R.copy(), rounded_R, drafts_R.copy(), NO_CHUNKS, NO_CHUNKS, NO_CHUNKS,
                              num_microbatches, experts)
            known = self._keep(key, state)
        return known

    def decode_alone(self, num_rows: int, context: int, num_drafts: int, num_microbatches: int) -> Priced:
        """The same for an instance of one rank, without arrays."""
        context = round_context(context)
        key = num_rows, context, num_drafts, num_microbatches, None
        known = self._known.get(key)
        if known is None:
            state = StepState(np.array([num_rows]), np.array([context]), np.array([num_drafts]), NO_CHUNKS, NO_CHUNKS,
                              NO_CHUNKS, num_microbatches)
            known = self._keep(key, state)
        return known

    def take(self, price: Priced, num_steps: int) -> None:
        """So many steps at this price were taken."""
        self._taken[price] = self._taken.get(price, 0) + num_steps

    def add(self, name: str, level: Level, seconds: float) -> None:
        """A step consisted of something more."""
        self._count_taken()                                # so that parts are listed as they first came
        key = name, level
        self._parts_ps[key] = self._parts_ps.get(key, 0) + round(seconds * 1e12)

    def mixed(self, state: StepState) -> Priced:
        """The price of a step that computes chunks of prompts. It counts as taken."""
        price = priced(self.costs.step_time(state))
        self._count(price, 1)
        return price

    def times_longer(self, state: StepState, link_share: float) -> float:
        """How many times as long the step takes where transfers leave it so much of its links."""
        alone_s = self.costs.step_time(state).total_s
        return self.costs.step_time(replace(state, link_share=link_share)).total_s / max(alone_s, SHORTEST_S)

    def parts(self) -> dict[tuple[str, Level], float]:
        """Seconds of all steps taken so far, by part and level."""
        self._count_taken()
        return {key: sum_ps / 1e12 for key, sum_ps in self._parts_ps.items() if sum_ps}

    def _count_taken(self) -> None:
        for price, num_steps in self._taken.items():
            self._count(price, num_steps)
        self._taken.clear()

    def _count(self, price: Priced, num_steps: int) -> None:
        for key, part_ps in price.parts_ps:
            self._parts_ps[key] = self._parts_ps.get(key, 0) + part_ps * num_steps

    def _keep(self, key: Key, state: StepState) -> Priced:
        """Ask the model, and remember what it says for a while."""
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
            self._count_taken()
        price = self._known[key] = priced(self.costs.step_time(state))
        return price


def round_context(context: int) -> int:
    """To the middle of its bucket."""
    shift = context.bit_length() - 1 - CONTEXT_BITS
    return context if shift <= 0 else ((context >> shift) << shift) + (1 << shift >> 1)


def end_of_bucket(context: int) -> int:
    """The next context that is rounded to another."""
    shift = max(context.bit_length() - 1 - CONTEXT_BITS, 0)
    return ((context >> shift) + 1) << shift


def round_contexts(context_R: Ints) -> Ints:
    """The same for each."""
    _, exponents_R = np.frexp(context_R.astype(np.float64))
    shifts_R = np.maximum(exponents_R.astype(np.int64) - 1 - CONTEXT_BITS, 0)
    return ((context_R >> shifts_R) << shifts_R) + ((np.int64(1) << shifts_R) >> 1)
