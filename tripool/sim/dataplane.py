"""The five verbs with a toy price, on blocks that remember what was written to them.

There is no model here (`toy`), only rows that move (`engine`) and blocks that know what they hold (`memory`). This
module takes verbs and answers each exactly once, after its price or at its deadline. Copies are proved by generation
and checksum like the real ones. Whatever no right scheduler lets happen is noted in the memory's `wrongs`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tripool.core.machine import Address, Message, Send
from tripool.core.messages import (
    Facts,
    Failed,
    Fetch,
    Fetched,
    Load,
    Loaded,
    Pull,
    Pulled,
    Ran,
    Run,
    Store,
    Stored,
)
from tripool.core.plan import BlockId, BlockRef, StepResult
from tripool.sim.engine import SimEngine
from tripool.sim.memory import EMPTY, SimArena, SimMemory

Verb = Fetch | Run | Store | Pull | Load


# ---------------------------------------------------------------- prices and faults


@dataclass(frozen=True, slots=True)
class ToyPrice:
    """What a verb takes, in seconds: something to begin with and something for each piece."""

    step_s: float = 0.010
    chunk_token_s: float = 50e-6
    decode_row_s: float = 200e-6
    copy_s: float = 0.0005
    block_s: float = 0.0001
    load_s: float = 0.5


@dataclass(slots=True)
class VerbFaults:
    """Verbs that fail or take long, drawn from a generator until `end_s`."""

    generator: random.Random
    fail: float = 0.0
    slow: float = 0.0
    max_slow_s: float = 1.0
    end_s: float = float("inf")

    def draw(self, verb: Verb, now: float) -> tuple[bool, float]:
        """Whether a verb fails, and by how much it is late."""
        if now >= self.end_s or isinstance(verb, Load):
            return False, 0.0
        rare = 0.25 if isinstance(verb, Run) else 1.0      # a failed step costs every request in it
        fails = self.generator.random() < self.fail * rare
        late_s = self.generator.random() * self.max_slow_s if self.generator.random() < self.slow else 0.0
        return fails, late_s


@dataclass(frozen=True, slots=True)
class Sabotage:
    """Checks to leave out, to see that their lack is noticed."""

    skip_pull_proof: bool = False


# ---------------------------------------------------------------- the data plane


@dataclass(frozen=True, slots=True)
class Due:
    """The data plane's timer to itself: a verb is done, or has failed."""

    verb: Verb
    cause: str = ""


class SimDataPlane:
    """Answers the verbs of one life of one instance."""

    def __init__(self, member: Address, boot_id: str, facts: Facts, memory: SimMemory, *, price: ToyPrice | None = None,
                 faults: VerbFaults | None = None, sabotage: Sabotage | None = None) -> None:
        self.member = member
        self.address = f"{member}/data"
        self.facts = facts
        self.wrongs = memory.wrongs
        self.unanswered: dict[int, Verb] = {}
        self.num_stale_pulls = 0
        self.num_fetched_blocks = 0
        self._memory = memory
        self._price = price or ToyPrice()
        self._faults = faults
        self._sabotage = sabotage or Sabotage()
        self._verb_ids: dict[int, None] = {}
        self._arenas = [SimArena(facts.num_blocks // facts.num_ranks) for _ in range(facts.num_ranks)]
        self._engines = [SimEngine(member, arena, facts.block_tokens, memory.wrongs, partial(self._renew, rank))
                         for rank, arena in enumerate(self._arenas)]
        self._being_copied: list[dict[BlockId, int]] = [{} for _ in self._arenas]
        memory.arenas[member, boot_id] = self._arenas

    def handle(self, message: Message, now: float) -> list[Send]:
        match message:
            case Due(verb, cause):
                del self.unanswered[verb.verb_id]
                return [Send(self.member, self._end(verb, cause))]
            case Fetch() | Run() | Store() | Pull() | Load():
                return self._take(message, now)
        return []

    def named_blocks(self, rank: int) -> list[BlockId]:
        """Blocks that a row of the engine or an unanswered copy may touch: nobody may give them out."""
        in_use = [*self._engines[rank].in_rows.items(), *self._being_copied[rank].items()]
        return [block for block, count in in_use if count]

    def _take(self, verb: Verb, now: float) -> list[Send]:
        if verb.verb_id in self._verb_ids:
            self.wrongs.append(f"{self.member} used verb id {verb.verb_id} twice")
        self._verb_ids[verb.verb_id] = None
        if isinstance(verb, Run) and any(isinstance(other, Run) for other in self.unanswered.values()):
            self.wrongs.append(f"{self.member} asked for step {verb.plan.step} while another runs")
        self.unanswered[verb.verb_id] = verb
        self._begin(verb)
        fails, late_s = self._faults.draw(verb, now) if self._faults is not None else (False, 0.0)
        price_s = self._price_s(verb) + late_s
        cause = f"{type(verb).__name__} failed by chance" if fails else ""
        if price_s > verb.deadline_s:
            price_s, cause = verb.deadline_s, f"{type(verb).__name__} did not end within {verb.deadline_s:g} s"
        return [Send(self.address, Due(verb, cause), price_s)]

    def _price_s(self, verb: Verb) -> float:
        price = self._price
        match verb:
            case Run(_, _, plan):
                tokens = max(sum(chunk.num_tokens for chunk in section.chunks) for section in plan.sections)
                num_rows = max(len(engine.rows) for engine in self._engines)
                return price.step_s + tokens * price.chunk_token_s + num_rows * price.decode_row_s
            case Load():
                return price.load_s
            case Store():
                return price.copy_s + len(verb.blocks) * price.block_s
            case _:
                return price.copy_s + len(verb.into) * price.block_s

    def _begin(self, verb: Verb) -> None:
        """What happens before any time has passed: rows come and go, and blocks that will be written are renewed."""
        match verb:
            case Run(_, _, plan):
                for engine, section in zip(self._engines, plan.sections, strict=True):
                    engine.begin(section, plan.step)
            case Fetch() | Pull():
                self._renew(verb.rank, verb.into)
                self._count_copies(verb, 1)
            case Store():
                self._count_copies(verb, 1)

    def _end(self, verb: Verb, cause: str) -> Message:
        if not isinstance(verb, Run | Load):
            self._count_copies(verb, -1)
        match verb:
            case Run(verb_id, _, plan):
                if cause:
                    for engine in self._engines:
                        engine.drop_rows()
                    return Failed(verb_id, cause)
                ranks = tuple(engine.end(section)
                              for engine, section in zip(self._engines, plan.sections, strict=True))
                return Ran(verb_id, StepResult(plan.step, ranks))
            case Load(verb_id):
                return Failed(verb_id, cause) if cause else Loaded(verb_id, self.facts)
            case Store():
                return Failed(verb.verb_id, cause) if cause else self._store(verb)
            case Fetch():
                return Failed(verb.verb_id, cause) if cause else self._fetch(verb)
            case Pull():
                return Failed(verb.verb_id, cause) if cause else self._pull(verb)

    # ------------------------------------------------------------ copies

    def _renew(self, rank: int, refs: Sequence[BlockRef]) -> None:
        """Publish a new generation before the first write. Nobody may still have the block."""
        arena = self._arenas[rank]
        for ref in refs:
            # The same one again is what a copy brought nothing into, and a row writes after all.
            if ref.generation < arena.generations[ref.block]:
                self.wrongs.append(f"{self.member} block {ref.block}: generation {ref.generation} is not new")
            if self._engines[rank].in_rows.get(ref.block):
                self.wrongs.append(f"{self.member} block {ref.block} was given out while a row has it")
            if self._being_copied[rank].get(ref.block):
                self.wrongs.append(f"{self.member} block {ref.block} was given out while a verb names it")
            arena.generations[ref.block] = ref.generation
            arena.contents[ref.block] = EMPTY

    def _count_copies(self, verb: Fetch | Pull | Store, sign: int) -> None:
        counts = self._being_copied[verb.rank]
        for ref in verb.blocks if isinstance(verb, Store) else verb.into:
            counts[ref.block] = counts.get(ref.block, 0) + sign
            if sign < 0 and self._arenas[verb.rank].generations[ref.block] != ref.generation:
                self.wrongs.append(f"{self.member} block {ref.block} was renewed under an unanswered "
                                   f"{type(verb).__name__}")

    def _fetch(self, verb: Fetch) -> Fetched:
        contents = []
        for key in verb.keys:
            content = self._memory.pool.get(key)
            if content is None:
                break
            contents.append(content)
        for ref, content in zip(verb.into, contents, strict=False):
            self._arenas[verb.rank].contents[ref.block] = content
        self.num_fetched_blocks += len(contents)
        return Fetched(verb.verb_id, len(contents), tuple(content.checksum for content in contents))

    def _store(self, verb: Store) -> Stored:
        num_new = 0
        for key, ref in zip(verb.keys, verb.blocks, strict=True):
            content = self._arenas[verb.rank].contents[ref.block]
            if content.num_filled != self.facts.block_tokens:
                self.wrongs.append(f"{self.member} stored block {ref.block}, which is not full")
            if self._memory.pool.get(key, content) != content:
                self.wrongs.append(f"{self.member} stored other contents under a key that the pool has")
            num_new += self._memory.put(key, content)
        return Stored(verb.verb_id, num_new)

    def _pull(self, verb: Pull) -> Pulled | Failed:
        grant = verb.grant
        source = self._memory.arenas.get((grant.source, grant.boot_id))
        if source is None:
            return Failed(verb.verb_id, f"{grant.source} is not mapped")
        if len(grant.parts) != len(verb.into):
            self.wrongs.append(f"{self.member} pulls {len(grant.parts)} blocks into {len(verb.into)}")
        for part, ref in zip(grant.parts, verb.into, strict=False):
            arena = source[part.rank]
            if not self._sabotage.skip_pull_proof and not arena.proves(part):
                self.num_stale_pulls += 1
                return Failed(verb.verb_id, f"block {part.block} of {grant.source} is not the one that was granted")
            self._arenas[verb.rank].contents[ref.block] = arena.contents[part.block]
        return Pulled(verb.verb_id)


def toy_facts(num_blocks: int, block_tokens: int, *, num_ranks: int = 1, layout: str = "toy",
              max_model_len: int = 1 << 20) -> Facts:
    """What a simulated instance says of itself; `num_blocks` is of one rank."""
    return replace(Facts("toy", "toy", layout, max_model_len, block_tokens, num_blocks), num_ranks=num_ranks,
                   num_blocks=num_blocks * num_ranks)
