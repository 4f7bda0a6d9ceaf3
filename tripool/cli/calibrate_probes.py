"""What `tripool calibrate` asks of a deployment: batches that decode, prompts, both at once, and context from the pool.

The deployment is a real one, reached as any client reaches it, with every decision recorded; what is asked only makes
sure that each kind of step happens a few times. Rounds repeat everything, so that a slow minute is seen as one. Prompts
are random tokens and answers are drawn at temperature 1: greedy answers fall into loops in which rows share experts.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tripool.cli.client import Client, Server
from tripool.cli.load import COMPLETIONS, Job, Outcome, send
from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.errors import ConfigError
from tripool.core.messages import ROLES, Role
from tripool.core.shape import ModelShape
from tripool.serve.budget import DEFAULT_TOKENS_PER_ROW

FIRST_TOKEN = 16                   # below are those that mean something to a model
TAIL_TOKENS = 4                    # by which prompts of one batch differ: few, so that all of them decode at once soon
DECODE_STEPS = 48                  # of a batch, all of its rows in most of them
FIRST_STEPS = 2                    # times as many of the row that is there first, often before all others
SMALL_CHUNK, LARGEST_CHUNK = 16, 1024
BESIDE = ((2, 256), (8, 128))      # rows, and how many tokens each of them decodes while prompts come
BESIDE_PROMPT = 128
LONGEST = 512                      # context that is looked at; steps grow in proportion beyond
KEPT = 3                           # times as much fits into a cache, so that it is still there in the next round
FILLS = 1.1                        # times an instance's cache, until nothing of before is in it
REPEATS = 2                        # of a prompt, in a round
LONE, LONE_TOKENS = 4, 4           # requests that are alone, in a round, and tokens of each
PAUSE_S = 0.02                     # before each, in which the one before is stored in the pool
TIMEOUT_S = 600.0
UNCUT = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


Between = Callable[[Server, int], Awaitable[None]]
"""Uses a deployment after a round, of which the number is given."""


@dataclass(frozen=True, slots=True)
class Grids:
    """What is measured: numbers of rows and their contexts, chunks and where they begin, blocks from the pool."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    firsts: tuple[int, ...]
    beside: tuple[tuple[int, int], ...]    # rows, and tokens that each of them decodes while prompts come
    pool_blocks: tuple[int, ...]
    held_tokens: int               # by the cache of a rank that prefills
    rounds: int

    @property
    def num_probes(self) -> int:
        """Of all rounds, about alike in length."""
        return self.rounds * (len(self.rows) * len(self.contexts) + REPEATS * len(self.chunks) * len(self.firsts)
                              + LONE + len(self.pool_blocks) + len(self.beside))


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that was asked, and when. Times are of the clock of recordings."""

    kind: str                      # decode, prefill, alone, beside, pool
    round: int
    tokens: int                    # rows of a rank, or tokens of a chunk, or blocks
    across: int                    # the context of rows, or where the chunk begins
    begun_s: float
    ended_s: float
    ttft_s: float = 0.0            # of a request that came alone


def choose_grids(deployment: Deployment, shape: ModelShape, *, rounds: int, quick: bool = False) -> Grids:
    """Grids that a deployment can be asked for.

    Raises:
        ConfigError: its requests are too short for a grid.
    """
    decoding, prefilling = computing(deployment)
    longest = deployment.model.max_model_len or shape.max_position
    rows = decoding.max_num_seqs
    held, prefilling_held = (each.cache_tokens or max(2 * longest, each.max_num_seqs * DEFAULT_TOKENS_PER_ROW)
                             for each in (decoding, prefilling))
    context = min(min(held, prefilling_held) // rows // KEPT, longest - (FIRST_STEPS + 1) * DECODE_STEPS, LONGEST)
    context = context // deployment.block_tokens * deployment.block_tokens       # whole blocks, so that they are cached
    chunk = min(prefilling.max_num_batched_tokens, longest // 2, LARGEST_CHUNK)
    first = (min(longest - chunk - 1, LONGEST) // deployment.block_tokens) * deployment.block_tokens
    if context <= 0 or chunk <= SMALL_CHUNK or not first:
        raise ConfigError(f"requests of at most {longest} tokens, of which {held} fit, are too short to measure with; "
                          "raise max_model_len or cache_tokens")
    if rows < 2:
        raise ConfigError(f"max_num_seqs is {rows}; give at least 2, to see what one more row costs")
    all_rows = tuple(sorted({*(2 ** i for i in range(rows.bit_length()) if 2 ** i <= rows), rows}))
    all_chunks = tuple(sorted({each for each in (SMALL_CHUNK, 64, 256) if each < chunk} | {chunk}))
    half = context // 2 // deployment.block_tokens * deployment.block_tokens
    contexts = tuple(base + TAIL_TOKENS for base in sorted({0, half, context}))
    pool = tuple(sorted({1, max(first // deployment.block_tokens // 2, 1), first // deployment.block_tokens}))
    beside = tuple((min(count, rows), num_output) for count, num_output in BESIDE)
    if quick:
        all_rows, contexts = (1, min(4, rows)), (contexts[0], contexts[-1])
        all_chunks, beside, pool = (SMALL_CHUNK, chunk), ((all_rows[-1], DECODE_STEPS),), ()
    return Grids(all_rows, contexts, all_chunks, (0, first), beside, pool if deployment.cache.count else (),
                 prefilling_held, rounds)


def computing(deployment: Deployment) -> tuple[InstanceConfig, InstanceConfig]:
    """The settings of who decodes and of who prefills."""
    if deployment.hybrid.count:
        return deployment.hybrid, deployment.hybrid
    return deployment.decode, deployment.prefill


def roles_of(deployment: Deployment) -> list[Role]:
    """Roles that have an instance."""
    return [role for role in ROLES if getattr(deployment, role).count]


class Prober:
    """Asks one deployment."""

    def __init__(self, server: Server, model: str, grids: Grids, *, vocab_size: int, ranks: int, block_tokens: int,
                 between: Between | None = None,
                 progress: Callable[[float], None] = lambda fraction: None) -> None:
        """`between` is awaited after each round but the last."""
        self.probes: list[Probe] = []
        self.others: list[tuple[float, float]] = []          # when somebody else used the deployment, from and to
        self._between = between
        self._server, self._model, self._grids = server, model, grids
        self._ranks, self._block_tokens = ranks, block_tokens
        self._vocab = range(FIRST_TOKEN, vocab_size)
        self._random = random.Random(0)
        self._progress = progress
        self._round = 0

    async def run(self) -> None:
        """Ask everything.

        Raises:
            ConfigError: a request was not answered.
        """
        grids = self._grids
        async with Client(self._server) as client:
            await self._ask(client, [self._prompt(grids.firsts[-1], SMALL_CHUNK)], 4)       # to warm up,
            for number in range(grids.rows[-1] * self._ranks):                              # and to have it all cached
                await self._ask(client, [self._prompt(grids.contexts[-1], SMALL_CHUNK, number)], 4)
            for self._round in range(grids.rounds):
                for context in grids.contexts:
                    for rows in grids.rows:
                        prompts = [self._prompt(context - TAIL_TOKENS, TAIL_TOKENS, number)
                                   for number in range(rows * self._ranks)]
                        await self._probe(client, "decode", rows, context, prompts, DECODE_STEPS)
                for first in grids.firsts:
                    for chunk in grids.chunks:
                        for _ in range(REPEATS):
                            prompts = [self._prompt(first, chunk) for _ in range(self._ranks)]
                            await self._probe(client, "prefill", chunk, first, prompts, 1)
                for _ in range(LONE):
                    await self._probe(client, "alone", SMALL_CHUNK, 0, [self._prompt(0, SMALL_CHUNK)], LONE_TOKENS)
                for rows, num_output in grids.beside:
                    await self._beside(client, rows, num_output)
                if self._between is not None and self._round + 1 < grids.rounds:
                    await asyncio.sleep(PAUSE_S)
                    begun_s = time.monotonic()
                    await self._between(self._server, self._round)
                    self.others.append((begun_s, time.monotonic()))
            await self._from_pool(client)

    def _prompt(self, base: int, own: int, number: int = 0) -> list[int]:
        """The beginning of a long text, of which there are some, and then tokens that no other prompt has. Rows of a
        batch have texts of their own: blocks that they shared would be read once for all of them."""
        text = random.Random(number).choices(self._vocab, k=base)
        return text + self._random.choices(self._vocab, k=own)

    async def _probe(self, client: Client, kind: str, tokens: int, across: int, prompts: Sequence[list[int]],
                     num_output: int) -> None:
        await asyncio.sleep(PAUSE_S)
        begun_s = time.monotonic()
        outcomes = await self._ask(client, prompts, num_output)
        spoke = len(outcomes) == 1 and outcomes[0].event_s         # a token may have no text, and then no event either
        ttft_s = outcomes[0].ttft_s if spoke else 0.0
        self._add(Probe(kind, self._round, tokens, across, begun_s, time.monotonic(), ttft_s))

    async def _beside(self, client: Client, rows: int, num_output: int) -> None:
        """Rows decode while prompts come one after another."""
        own = min(BESIDE_PROMPT, self._grids.chunks[-1])
        begun_s, decoding = time.monotonic(), True

        async def decode() -> None:
            nonlocal decoding
            try:
                await self._ask(client, [self._prompt(0, SMALL_CHUNK) for _ in range(rows * self._ranks)],
                                num_output)
            finally:
                decoding = False

        async def prefill() -> None:
            while decoding:
                await asyncio.sleep(PAUSE_S)
                await self._ask(client, [self._prompt(0, own)], 1)

        await asyncio.gather(decode(), prefill())
        self._add(Probe("beside", self._round, rows, own, begun_s, time.monotonic()))

    async def _from_pool(self, client: Client) -> None:
        """Prompts that are in the pool and nowhere else: an instance's own cache has been filled with others."""
        stored = []
        for blocks in self._grids.pool_blocks * self._grids.rounds:
            stored.append(self._prompt(0, blocks * self._block_tokens + 1))
            await self._ask(client, [stored[-1]], 1)
        left = self._grids.held_tokens * self._ranks * FILLS if stored else 0.0
        while left > 0:
            await self._ask(client, [self._prompt(0, self._grids.chunks[-1])], 1)
            left -= self._grids.chunks[-1]
        for prompt in stored:
            await self._probe(client, "pool", len(prompt) // self._block_tokens, 0, [prompt], 1)

    def _add(self, probe: Probe) -> None:
        self.probes.append(probe)
        self._progress(len(self.probes) / self._grids.num_probes)

    async def _ask(self, client: Client, prompts: Sequence[list[int]], num_output: int) -> list[Outcome]:
        """Send prompts together and wait for all answers: of so many tokens, and of more to the first.

        Raises:
            ConfigError: one was not answered.
        """
        outcomes = [Outcome(time.perf_counter()) for _ in prompts]
        jobs = [self._job(prompt, num_output * FIRST_STEPS if len(prompts) > 1 and not number else num_output)
                for number, prompt in enumerate(prompts)]
        await asyncio.gather(*(send(client, job, outcome, timeout_s=TIMEOUT_S)
                               for job, outcome in zip(jobs, outcomes, strict=True)))
        for outcome in outcomes:
            if outcome.failure is not None:
                raise ConfigError(f"a request was not answered: {outcome.failure}")
        return outcomes

    def _job(self, prompt: list[int], num_output: int) -> Job:
        return Job(COMPLETIONS, {"model": self._model, "prompt": prompt, "max_tokens": num_output, "ignore_eos": True,
                                 "seed": self._random.getrandbits(31), **UNCUT})
