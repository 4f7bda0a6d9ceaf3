"""The search for a deployment: hundreds of designs in closed form, of which a few are worth simulating.

Prefill and decode are chosen apart, because what one costs the other does not, and are put together where the planes
carry what passes between them. Instances that do both are the baseline: where they need no more NPUs, nothing is split.
There are two questions: the fewest NPUs that serve a workload, and the most of it that so many NPUs serve.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tripool.core.deployment import (
    MOST_DRAFTS,
    CacheConfig,
    Deployment,
    GatewayConfig,
    InstanceConfig,
    ModelConfig,
)
from tripool.core.errors import ConfigError
from tripool.core.messages import ROLES, Role
from tripool.planner.fit import DecodeFit, HybridFit, Machine, PrefillFit, Priced
from tripool.planner.goals import Budget, Goals
from tripool.planner.space import STEP_TOKENS, Layout, instance, layouts
from tripool.planner.traffic import Demand, Traffic

Fit = PrefillFit | DecodeFit | HybridFit

BLOCK_TOKENS = 128
"""Tokens of a block: section 4.4.2 has 128 to 512."""

NUM_KEPT = 6
"""Designs of a pool that are put together with those of the other."""

NEARLY_BEST = 0.98
"""Of the most that any budget of a step serves: the smallest that serves this is taken."""

NUM_FINALISTS = 2
"""Split deployments that are simulated, beside the best that is not."""

GUESSED_ROWS = 64
"""Rows of a rank for whose exchange memory is set aside until their number is known."""

WORTH_KEEPING = 0.01
"""Part of the prompts that a pool of any size would have to save, to be worth one."""

NEARLY_ALL = 0.95
"""Of what a pool that forgets nothing would save: the smallest pool that saves this is taken."""

WIRE_SHARE = 0.8
"""Of a plane, that hand-overs may take on average."""


@dataclass(frozen=True, slots=True)
class Pool:
    """So many instances of one design."""

    role: Role
    fit: Fit
    rows: int                              # of a rank
    count: int
    times: float                           # the pace it keeps up with, as a multiple of the workload's

    @property
    def num_dies(self) -> int:
        return self.count * self.fit.config.ranks


@dataclass(frozen=True, slots=True)
class Candidate:
    """A deployment and the pace that it is to keep up with, as a multiple of the workload's."""

    deployment: Deployment
    times: float
    predicted: float                       # the same in closed form
    is_fixed: bool = False                 # somebody's own: it is not mended

    @property
    def num_dies(self) -> int:
        configs = [getattr(self.deployment, role) for role in ROLES]
        return sum(config.count * config.ranks for config in configs)

    @property
    def is_split(self) -> bool:
        return bool(self.deployment.prefill.count)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: which model on which machine, for whom, how well, and what it may cost."""

    machine: Machine
    traffic: Traffic
    goals: Goals
    budget: Budget
    most: bool = False                     # the most of the workload that the budget serves; else the fewest dies
    model: ModelConfig = field(default_factory=ModelConfig)
    num_drafts: int = 0                    # up to so many may be drafted

    def __post_init__(self) -> None:
        if self.num_drafts > MOST_DRAFTS:
            raise ConfigError(f"acceptance of {self.num_drafts} drafts is given; the most that are made is "
                              f"{MOST_DRAFTS}")
        if self.num_drafts and not self.machine.shape.num_mtp_layers:
            raise ConfigError("acceptance of drafts is given, but the model has no MTP layer that makes them; leave it "
                              "out")


class Search:
    """Everything that was found about one question in closed form."""

    def __init__(self, question: Question, progress: Callable[[str, float], None] = lambda words, part: None) -> None:
        """Screen all designs.

        Raises:
            ConfigError: nothing fits, or no size keeps the goals; the message says what binds.
        """
        self.question, self.progress = question, progress
        self.demand = Demand(question.traffic.to_look_at(), BLOCK_TOKENS)
        self._check_lengths()
        self.pool_tokens = self._choose_pool()
        machine, budget = question.machine, question.budget
        self.prefill: list[PrefillFit] = []
        self.decode: list[tuple[DecodeFit, int]] = []
        self.decode_fits: list[DecodeFit] = []     # also those that another of their layout is better than
        self.hybrid: list[tuple[HybridFit, int]] = []
        self.refused: list[str] = []
        shapes = [(role, layout) for role in ROLES
                  for layout in layouts(machine.shape, machine.hardware, budget.num_dies, role)]
        for number, (role, layout) in enumerate(shapes):
            progress(f"screening {role} instances of {layout.ranks} rank(s)", number / len(shapes))
            try:
                self._screen(role, layout)
            except ConfigError as error:
                self.refused.append(str(error))
        self._check_goals()

    # ------------------------------------------------------------ one instance

    def _screen(self, role: Role, layout: Layout) -> None:
        """The best step budget, drafts and microbatches of a layout."""
        machine = self.question.machine
        if role == "decode":
            priced = machine.priced(role, instance(layout, rows=GUESSED_ROWS))
            self._check_room(priced, layout)
            self.decode.append(self._best_decode(layout, priced))
            return
        priced = machine.priced(role, instance(layout, rows=GUESSED_ROWS if role == "hybrid" else 8, step_tokens=64))
        self._check_room(priced, layout)
        if role == "prefill":
            self.prefill.append(self._best_prefill(layout, priced))
        else:
            self.hybrid.append(self._best_hybrid(layout, priced))

    def _prefills(self, layout: Layout, priced: Priced, role: Role) -> Iterator[PrefillFit]:
        longest = int(np.quantile(self.demand.prompt_N, 0.99))
        for tokens in STEP_TOKENS:
            for halves in (False, True) if layout.ranks > 1 else (False,):
                config = instance(layout, rows=_prefill_rows(tokens, self.demand), step_tokens=tokens,
                                  microbatches=halves)
                if role == "hybrid":
                    config = replace(config, max_num_seqs=1)
                yield PrefillFit(self.demand, priced, config, self.pool_tokens)
            if tokens >= longest and tokens >= 4 * self.demand.mean_prompt:
                return

    def _best_prefill(self, layout: Layout, priced: Priced) -> PrefillFit:
        """The shortest steps that serve nearly as much as the best: when too much comes, less waits behind a step."""
        tried: list[tuple[float, PrefillFit]] = []
        best = -1.0
        for fit in sorted(self._prefills(layout, priced, "prefill"), key=lambda fit: -fit.tokens_per_s):
            bound = fit.tokens_per_s / (self.demand.requests_per_s * fit.mean_computed)
            if bound < NEARLY_BEST * best:
                break
            tried.append((fit.most_times(self.question.goals, 1), fit))
            best = max(best, tried[-1][0])
        if not best:                           # none keeps any pace: which comes nearest?
            return min((fit for _, fit in tried), key=lambda fit: fit.alone_s(self.question.goals.share_of_each))
        return min((fit for times, fit in tried if times >= NEARLY_BEST * best), key=lambda fit: fit.full_s)

    def _decodes(self, layout: Layout, priced: Priced, step_tokens: int | None = None) -> Iterator[DecodeFit]:
        for drafts in range(self.question.num_drafts + 1):
            for halves in (False, True) if layout.ranks > 1 else (False,):
                config = instance(layout, rows=1, drafts=drafts, microbatches=halves, step_tokens=step_tokens)
                yield DecodeFit(self.demand, priced, config, self.question.goals)

    def _best_decode(self, layout: Layout, priced: Priced) -> tuple[DecodeFit, int]:
        goals = self.question.goals

        def worth(pair: tuple[DecodeFit, int]) -> float:
            fit, rows = pair
            return rows / fit.tpot_s(rows) if rows else -fit.tpot_s(1)
        fits = list(self._decodes(layout, priced))
        self.decode_fits += fits
        return max(((fit, fit.rows_within(goals)) for fit in fits), key=worth)

    def _best_hybrid(self, layout: Layout, priced: Priced) -> tuple[HybridFit, int]:
        goals = self.question.goals
        decodes = list(self._decodes(layout, priced))
        best: tuple[HybridFit, int] | None = None
        best_times = -1.0
        for prefill in self._prefills(layout, priced, "hybrid"):
            for decode in decodes:
                if decode.config.microbatches != prefill.config.microbatches:
                    continue
                fit = HybridFit(self.demand, prefill, decode)
                times = fit.most_times(goals, 1)
                if times > best_times:
                    best, best_times = (fit, max(1, math.ceil(fit.step_s(times, 1)[1]))), times
        assert best is not None, "a layout has at least one step budget"
        return best

    # ------------------------------------------------------------ what can be said at once

    def _check_lengths(self) -> None:
        if self.demand.longest >= self._window:
            raise ConfigError(f"{self._longest_words()}, and the model's context window is {self._window}")

    def _check_room(self, priced: Priced, layout: Layout) -> None:
        if priced.cache_tokens < self.demand.longest + 2 * BLOCK_TOKENS:
            raise ConfigError(f"{self._longest_words()}, and a rank of {layout.ranks} holds {priced.cache_tokens} "
                              "beside its weights")

    @property
    def _window(self) -> int:
        return self.question.model.max_model_len or self.question.machine.shape.max_position

    def _longest_words(self) -> str:
        number = int(np.argmax(self.demand.prompt_N + self.demand.output_N))
        return (f"request {number + 1} has {self.demand.prompt_N[number]} + {self.demand.output_N[number]} tokens")

    def _check_goals(self) -> None:
        """Whether any design keeps the goals at all, however few requests there are."""
        goals, model = self.question.goals, self.question.machine.hardware
        if not self.decode and not self.hybrid:
            raise ConfigError(f"no instance of up to {self.question.budget.num_dies} dies of {model.name} can hold the "
                              f"model and the workload. The least that is missing: {_least_missing(self.refused)}")
        share = goals.share_of_each
        if not self.decode or not self.prefill or any(fit.most_times(goals, 1) for fit, _ in self.hybrid):
            return
        if not any(rows for _, rows in self.decode):
            fit, _ = min(self.decode, key=lambda pair: pair[0].tpot_s(1))
            raise ConfigError(
                f"TPOT {goals.tpot_s:g} s cannot be met by {goals.share:.0%} of the requests: on the fastest decode "
                f"instance there is, of {fit.config.ranks} rank(s), one row on each takes {fit.tpot_s(1):.4g} s a "
                f"token{_with_drafts(fit)}, and the hand-over comes on top of that")
        ready = [fit for fit in self.prefill if fit.alone_s(share) <= goals.ttft_s]
        if not ready:
            best = min(self.prefill, key=lambda fit: fit.alone_s(share))
            length = int(np.quantile(self.demand.prompt_N, share))
            raise ConfigError(
                f"TTFT {goals.ttft_s:g} s cannot be met by {goals.share:.0%} of the requests: a prompt of {length} "
                f"tokens, as {1 - share:.0%} exceed, takes {best.alone_s(share):.4g} s when it is alone on the fastest "
                f"prefill instance there is, of {best.config.ranks} rank(s)")

    # ------------------------------------------------------------ the pool

    def _choose_pool(self) -> int:
        """Tokens that the pool holds: the smallest that saves nearly all that can be saved, within nodes' memory."""
        demand, question = self.demand, self.question
        everything = demand.distinct_tokens
        most = demand.reused_share(everything)
        if most < WORTH_KEEPING:
            return 0
        nodes = -(-question.budget.num_dies // question.machine.hardware.dies_per_node)
        room = question.budget.node_cache_bytes * nodes / self._token_bytes()
        for halvings in range(6, -1, -1):
            size = everything >> halvings
            if size > room:
                return int(room)
            if demand.reused_share(size) >= NEARLY_ALL * most:
                return size
        return everything

    def _token_bytes(self) -> int:
        shape, hardware = self.question.machine.shape, self.question.machine.hardware
        for layout in reversed(layouts(shape, hardware, self.question.budget.num_dies, "hybrid")):
            try:
                return self.question.machine.priced("hybrid", instance(layout, step_tokens=64)).rig.token_bytes
            except ConfigError:
                continue
        return 1                               # nothing fits, which is said with its reasons later

    # ------------------------------------------------------------ pools together

    def candidates(self) -> list[Candidate]:
        """The best deployments in closed form, split or not, the best first.

        Raises:
            ConfigError: none serves the workload within the budget.
        """
        question = self.question
        split = self._split()
        whole = [self._candidate((pool,), pool.times) for pool in self._whole()]
        found = split[:NUM_FINALISTS] + whole[:1]
        if not found:
            raise ConfigError(self._too_little())
        return found if question.most else sorted(found, key=lambda each: (each.num_dies, -each.times))

    def _times(self, fit: Fit, rows: int, count: int) -> float:
        """The pace, as a multiple of the workload's, that so many instances of a design keep up with."""
        goals = self.question.goals
        if isinstance(fit, DecodeFit):
            return fit.most_times(goals, count, rows)
        return fit.most_times(goals, count)

    def _sizes(self, role: Role, fit: Fit, rows: int) -> Iterator[Pool]:
        """One instance of a design, two, ... as far as the budget goes; none of one that keeps no pace."""
        for count in range(1, self.question.budget.num_dies // fit.config.ranks + 1):
            pool = Pool(role, fit, rows, count, self._times(fit, rows, count))
            if not pool.times:
                return
            yield pool

    def _designs(self, role: Role) -> list[tuple[Fit, int]]:
        if role == "prefill":
            return [(fit, 0) for fit in self.prefill]
        return [*self.decode] if role == "decode" else [*self.hybrid]

    def _enough(self, role: Role) -> list[Pool]:
        """Of each design the smallest pool that serves the workload; those with the fewest dies."""
        found = []
        for fit, rows in self._designs(role):
            counts = range(1, self.question.budget.num_dies // fit.config.ranks + 1)
            place = bisect_left(counts, True, key=lambda count: self._times(fit, rows, count) >= 1.0)
            if place < len(counts):
                found.append(Pool(role, fit, rows, counts[place], self._times(fit, rows, counts[place])))
        return sorted(found, key=lambda pool: (pool.num_dies, -pool.times))[:NUM_KEPT]

    def _of_all_sizes(self, role: Role) -> list[Pool]:
        """All sizes of the designs that serve most for a die."""
        single = [(self._times(fit, rows, 1) / fit.config.ranks, fit, rows) for fit, rows in self._designs(role)]
        single.sort(key=lambda each: -each[0])
        return [pool for _, fit, rows in single[:NUM_KEPT] for pool in self._sizes(role, fit, rows)]

    def _whole(self) -> list[Pool]:
        """Instances that do both, the best first."""
        if self.question.most:
            return sorted(self._of_all_sizes("hybrid"), key=lambda pool: (-pool.times, pool.num_dies))
        return self._enough("hybrid")

    def _split(self) -> list[Candidate]:
        """Prefill and decode pools, put together."""
        question = self.question
        pools = self._of_all_sizes if question.most else self._enough
        prefill, decode = pools("prefill"), pools("decode")
        pairs = []
        for one in prefill:
            for other in decode:
                dies = one.num_dies + other.num_dies
                if dies > question.budget.num_dies:
                    continue
                times = min(one.times, other.times, self._wire_times(one, other))
                if question.most or times >= 1.0:
                    pairs.append((times, dies, one, other))
        if question.most:
            pairs.sort(key=lambda pair: (-pair[0], pair[1]))
        else:
            pairs.sort(key=lambda pair: (pair[1], -pair[0]))
        found: list[Candidate] = []
        seen: set[tuple[int, int]] = set()
        for times, _, one, other in pairs:
            key = one.fit.config.ranks, other.fit.config.ranks
            if key not in seen:                # of instances of one size only the best
                seen.add(key)
                found.append(self._candidate((one, other), times))
                if len(found) == NUM_FINALISTS:
                    break
        return found

    def _wire_times(self, prefill: Pool, decode: Pool) -> float:
        """The pace at which hand-overs take up the plane that carries them."""
        rig = prefill.fit.priced.rig
        plane = rig.planes.planes[rig.planes.pull]
        ends = min(prefill.num_dies, decode.num_dies)
        return (WIRE_SHARE * ends * plane.bytes_per_s
                / (self.demand.requests_per_s * self.demand.mean_prompt * rig.token_bytes))

    def _candidate(self, pools: Sequence[Pool], times: float) -> Candidate:
        configs = {pool.role: replace(self._config(pool), count=pool.count) for pool in pools}
        return Candidate(self.assemble(configs, times), times, times)

    def _config(self, pool: Pool) -> InstanceConfig:
        """An instance as the deployment has it, with as many blocks as it needs."""
        demand, machine = self.demand, self.question.machine
        config = pool.fit.config
        if pool.role != "prefill":
            drafts = pool.fit.num_drafts if isinstance(pool.fit, HybridFit) else config.num_speculative_tokens
            config = replace(config, max_num_seqs=pool.rows, num_speculative_tokens=drafts,
                             max_num_batched_tokens=max(config.max_num_batched_tokens, pool.rows * (1 + drafts)))
        room = machine.priced(pool.role, config).cache_tokens
        typical = float(np.quantile(demand.prompt_N + demand.output_N, 0.9))
        # What serves has room for a request as long as the window and for a block more, which is begun beside it.
        wanted = max(config.max_num_seqs * typical + demand.longest, self._window + 2 * BLOCK_TOKENS)
        if config.enable_prefix_caching:       # what is asked for again is kept here too, as far as there is room
            wanted += demand.distinct_tokens if self.pool_tokens else 0
        tokens = int(min(room, wanted)) // BLOCK_TOKENS * BLOCK_TOKENS
        return replace(config, cache_tokens=max(tokens, BLOCK_TOKENS))

    def assemble(self, configs: dict[Role, InstanceConfig], times: float) -> Deployment:
        """A deployment of these pools, with a cache on its nodes and queues as long as its goals allow."""
        question, demand = self.question, self.demand
        machine = question.machine
        num_dies = sum(config.count * config.ranks for config in configs.values())
        nodes = -(-num_dies // machine.hardware.dies_per_node)
        cache = CacheConfig()
        if self.pool_tokens:
            each = min(self.pool_tokens * self._token_bytes() / nodes, question.budget.node_cache_bytes)
            cache = CacheConfig(count=nodes, bytes=max(_round_up(each), 1 << 20))
        held = min(config.cache_tokens for config in configs.values()) // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS
        model = question.model if held >= self._window else replace(question.model, max_model_len=held)
        queued_s = 4.0 * question.goals.ttft_s
        requests = math.ceil(demand.requests_per_s * max(times, 1.0) * queued_s)
        defaults = GatewayConfig()
        gateway = replace(
            defaults, max_queued_requests=max(defaults.max_queued_requests, requests),
            max_queued_tokens=max(defaults.max_queued_tokens, math.ceil(requests * demand.mean_prompt),
                                  2 * demand.longest))
        return Deployment(model=model, gateway=gateway, cache=cache, block_tokens=BLOCK_TOKENS,
                          **configs)  # type: ignore[arg-type]

    def given(self, deployment: Deployment) -> Candidate:
        """Somebody's own deployment, to be compared with."""
        machine, goals, demand = self.question.machine, self.question.goals, self.demand
        paces = []
        for role in ROLES:
            config: InstanceConfig = replace(getattr(deployment, role), count=1)
            count = getattr(deployment, role).count
            if not count:
                continue
            priced = machine.priced(role, config)
            prefill = PrefillFit(demand, priced, config, self.pool_tokens)
            decode = DecodeFit(demand, priced, config, goals)
            fits: dict[Role, Fit] = {"prefill": prefill, "decode": decode, "hybrid": HybridFit(demand, prefill, decode)}
            paces.append(self._times(fits[role], min(decode.rows_within(goals), config.max_num_seqs), count))
        times = min(paces)
        return Candidate(deployment, times if self.question.most and times else 1.0, times, is_fixed=True)

    def _too_little(self) -> str:
        """Why the budget does not do."""
        question, demand = self.question, self.demand
        dies = question.machine.hardware.package.dies
        name = question.machine.hardware.package.name
        parts = []
        roles: tuple[tuple[Role, str], ...] = (("prefill", "prefill alone would carry {:.3g} within its TTFT goal"),
                                               ("decode", "decode alone would carry {:.3g} within its TPOT goal"),
                                               ("hybrid", "instances that do both would carry {:.3g}"))
        for role, words in roles:
            if self._designs(role):            # not where steps were measured of other roles alone
                best = max((pool.times for pool in self._of_all_sizes(role)), default=0.0)
                parts.append(words.format(best * demand.requests_per_s))
        return (f"{question.budget.num_dies / dies:g} {name}s do not serve {demand.requests_per_s:.3g} requests/s "
                f"within the goals. With all of them, {', and '.join(parts)}.{self._why_no_pair()} Give more, lower "
                "the goals, or ask with --most how much they do serve")

    def _why_no_pair(self) -> str:
        """Where either pool alone would do, and the budget not for both: what both take."""
        pools = self._of_all_sizes if self.question.most else self._enough
        least = [min((pool.num_dies for pool in pools(role)), default=0) for role in ("prefill", "decode")]
        if not all(least) or sum(least) <= self.question.budget.num_dies:
            return ""
        package = self.question.machine.hardware.package
        both, prefill, decode = (dies / package.dies for dies in (sum(least), *least))
        return f" Both take at least {both:g} {package.name}s, {prefill:g} to prefill and {decode:g} to decode."


def _prefill_rows(step_tokens: int, demand: Demand) -> int:
    """Rows of a prefill rank: those of two steps, which are computed or wait to be handed over."""
    return max(8, 4 * math.ceil(step_tokens / demand.mean_prompt))


def _with_drafts(fit: DecodeFit) -> str:
    drafts = fit.config.num_speculative_tokens
    return f" with {drafts} draft(s)" if drafts else ""


def _least_missing(refused: Sequence[str]) -> str:
    """Of the reasons the one of the largest instance: it needs least on each die."""
    return refused[-1] if refused else "nothing was tried"


def _round_up(size: float) -> int:
    """To whole GiB, or whole MiB of less."""
    unit = 1 << 30 if size > 1 << 30 else 1 << 20
    return math.ceil(size / unit) * unit
