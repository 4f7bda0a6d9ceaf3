"""The five verbs with a toy price, on blocks that remember what was written to them.

There is no model here (`toy`), only rows that move (`engine`), blocks that know what they hold (`memory`) and slots
that hold experts (`experts`). This module takes verbs and answers each exactly once, after its price or at its
deadline. Copies are proved by generation and checksum like the real ones. A rank other than the first may be lost, and
come back; the step that runs then is given up, as it may be for other reasons. Whatever no right scheduler lets happen
is noted in the memory's `wrongs`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tripool.core.machine import Address, Message, Send
from tripool.core.messages import (
    ExpertsMoved,
    Facts,
    Failed,
    Fetch,
    Fetched,
    Load,
    Loaded,
    MoveExperts,
    Pull,
    Pulled,
    Ran,
    RankBack,
    RankLost,
    Run,
    Store,
    Stored,
)
from tripool.core.placement import DISK, Move
from tripool.core.plan import BlockId, BlockRef, RankResult, Section, StepPlan, StepResult
from tripool.sim.engine import SimEngine
from tripool.sim.experts import SimExperts
from tripool.sim.memory import EMPTY, SimArena, SimMemory

Verb = Fetch | Run | Store | Pull | Load | MoveExperts

NOTHING = Section()
FINISHED = (0.0, 0.0, 0.5, 1.0)
"""Of the ranks in a step that is given up: those that have been through with it. One of these for each step."""


# ---------------------------------------------------------------- prices and faults


@dataclass(frozen=True, slots=True)
class ToyPrice:
    """What a verb takes, in seconds: something to begin with and something for each piece."""

    step_s: float = 0.010
    chunk_token_s: float = 50e-6
    decode_row_s: float = 200e-6
    copy_s: float = 0.0005
    block_s: float = 0.0001
    load_s: float = 0.5                # of an instance, or of a rank that comes back
    move_bytes_per_s: float = 1e9      # of experts, into or out of one rank


@dataclass(slots=True)
class VerbFaults:
    """Verbs that fail or take long, drawn from a generator until `end_s`."""

    generator: random.Random
    fail: float = 0.0
    slow: float = 0.0
    max_slow_s: float = 1.0
    end_s: float = float("inf")
    fail_moves: float = 0.0            # of experts, in place of `fail`
    give_up: float = 0.0               # of steps of several ranks

    def draw(self, verb: Verb, now: float) -> tuple[bool, float]:
        """Whether a verb fails, and by how much it is late."""
        if now >= self.end_s or isinstance(verb, Load):
            return False, 0.0
        fail = self.fail
        if isinstance(verb, Run):
            fail *= 0.25                                   # a failed step costs every request in it
        elif isinstance(verb, MoveExperts):
            fail = self.fail_moves
        fails = self.generator.random() < fail
        late_s = self.generator.random() * self.max_slow_s if self.generator.random() < self.slow else 0.0
        return fails, late_s

    def draw_given_up(self, num_ranks: int, now: float) -> bool:
        """Whether a step is given up, though no rank is lost."""
        return num_ranks > 1 and now < self.end_s and self.generator.random() < self.give_up

    def draw_finished(self, num_ranks: int, now: float) -> list[bool]:
        """Which ranks have been through with a step that is given up."""
        if now >= self.end_s:
            return [False] * num_ranks
        share = self.generator.choice(FINISHED)
        return [self.generator.random() < share for _ in range(num_ranks)]


@dataclass(frozen=True, slots=True)
class Sabotage:
    """Checks to leave out, to see that their lack is noticed."""

    skip_pull_proof: bool = False
    skip_moves: bool = False           # experts are said to be moved, and are not


# ---------------------------------------------------------------- the data plane


@dataclass(frozen=True, slots=True)
class Due:
    """The data plane's timer to itself: a verb is done, or has failed."""

    verb: Verb
    cause: str = ""


@dataclass(frozen=True, slots=True)
class LoseRank:
    """To a data plane: the process of a rank is gone."""

    rank: int


@dataclass(frozen=True, slots=True)
class ReturnRank:
    """To a data plane: a lost rank begins another life, and loads."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankReady:
    """The data plane's timer to itself: the rank has loaded."""

    rank: int


class SimDataPlane:
    """Answers the verbs of one life of one instance."""

    def __init__(self, member: Address, boot_id: str, facts: Facts, memory: SimMemory, *,
                 experts: SimExperts | None = None, num_drafts: int = 0, price: ToyPrice | None = None,
                 faults: VerbFaults | None = None, sabotage: Sabotage | None = None) -> None:
        self.member = member
        self.address = f"{member}/data"
        self.facts = facts
        self.experts = experts                           # None: the model has none
        self.lost: dict[int, float] = {}                 # ranks without a process, since when
        self._missed: dict[int, float] = {}              # when a step was planned last with one that is gone
        self.wrongs = memory.wrongs
        self.unanswered: dict[int, Verb] = {}
        self.num_stale_pulls = 0
        self.num_fetched_blocks = 0
        self.num_lost_ranks = 0
        self.num_steps_given_up = 0                      # on one rank or more
        self.num_steps_given_up_in_part = 0
        self.num_halved_steps = 0
        self.num_stale_plans = 0                         # steps given up because the plan did not know of a loss
        self.num_failed_moves = 0
        self._is_loaded = False
        self._coming_back: dict[int, None] = {}
        self._cut_off: dict[int, None] = {}              # verbs whose rank is gone
        self._step_fails = False                         # the one that runs, sooner or later
        self._finished: list[bool] | None = None         # ranks that will, if the step that runs will be given up
        self._memory = memory
        self._price = price or ToyPrice()
        self._faults = faults
        self._sabotage = sabotage or Sabotage()
        self._verb_ids: dict[int, None] = {}
        self._arenas = [SimArena(facts.num_blocks // facts.num_ranks) for _ in range(facts.num_ranks)]
        self._engines = [SimEngine(member, arena, facts.block_tokens, memory.wrongs, partial(self._renew, rank),
                                   experts.count if experts is not None else lambda tokens: None, num_drafts)
                         for rank, arena in enumerate(self._arenas)]
        self._being_copied: list[dict[BlockId, int]] = [{} for _ in self._arenas]
        memory.arenas[member, boot_id] = self._arenas

    def handle(self, message: Message, now: float) -> list[Send]:
        match message:
            case Due(verb, cause):
                if self.unanswered.pop(verb.verb_id, None) is not None:
                    return [Send(self.member, self._end(verb, cause))]
            case Fetch() | Run() | Store() | Pull() | Load() | MoveExperts():
                return self._take(message, now)
            case LoseRank(rank):
                return self._lose(rank, now)
            case ReturnRank(rank):
                if rank in self.lost and rank not in self._coming_back:
                    self._coming_back[rank] = None
                    return [Send(self.address, RankReady(rank), self._price.load_s)]
            case RankReady(rank):
                return self._return(rank)
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
        fails, late_s = self._faults.draw(verb, now) if self._faults is not None else (False, 0.0)
        if isinstance(verb, Run):
            self._step_fails, self._finished = fails, None
            self._begin_step(verb.plan, now, reaches_map=not fails)
            if self._unknown_losses(verb.plan):
                self.num_stale_plans += 1
                return [Send(self.member, self._end_step(verb, [False] * self.facts.num_ranks))]
            if self._faults is not None and self._faults.draw_given_up(self.facts.num_ranks, now):
                self._finished = self._faults.draw_finished(self.facts.num_ranks, now)
        else:
            self._begin(verb)
        self.unanswered[verb.verb_id] = verb
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
            case MoveExperts(_, _, moves):
                return price.copy_s + self._busiest_bytes(moves) / price.move_bytes_per_s
            case Store():
                return price.copy_s + len(verb.blocks) * price.block_s
            case _:
                return price.copy_s + len(verb.into) * price.block_s

    def _begin(self, verb: Verb) -> None:
        """What happens before any time has passed: what will be written is renewed."""
        match verb:
            case MoveExperts(verb_id, _, moves):
                assert self.experts is not None, "moving experts of a model that has none"
                self.experts.begin_moves(verb_id, moves)
            case Fetch() | Pull():
                if verb.rank in self.lost:
                    self._cut_off[verb.verb_id] = None
                else:
                    self._renew(verb.rank, verb.into)
                self._count_copies(verb, 1)
            case Store():
                self._count_copies(verb, 1)

    def _end(self, verb: Verb, cause: str) -> Message:
        if verb.verb_id in self._cut_off:
            del self._cut_off[verb.verb_id]
            cause = cause or f"a rank of {self.member} is gone"
        if isinstance(verb, Fetch | Pull | Store):
            self._count_copies(verb, -1)
        match verb:
            case Run():
                if cause:
                    return self._fail_step(verb, cause)
                return self._end_step(verb, self._finished or [True] * self.facts.num_ranks)
            case Load(verb_id):
                self._is_loaded = not cause
                experts = self.experts.facts if self.experts is not None else None
                return Failed(verb_id, cause) if cause else Loaded(verb_id, self.facts, experts)
            case MoveExperts(verb_id):
                return self._move(verb_id, cause)
            case Store():
                return Failed(verb.verb_id, cause) if cause else self._store(verb)
            case Fetch():
                return Failed(verb.verb_id, cause) if cause else self._fetch(verb)
            case Pull():
                return Failed(verb.verb_id, cause) if cause else self._pull(verb)

    # ------------------------------------------------------------ steps and ranks

    def _begin_step(self, plan: StepPlan, now: float, *, reaches_map: bool) -> None:
        """Rows come and go, and blocks that they will write are renewed. A step that fails may not reach the map."""
        for rank, (engine, section) in enumerate(zip(self._engines, plan.sections, strict=True)):
            if rank in self.lost or rank in plan.lost_ranks:
                if section != NOTHING and rank in plan.lost_ranks:
                    self.wrongs.append(f"{self.member} step {plan.step} asks something of rank {rank}, which is lost")
            else:
                engine.begin(section, plan.step)
        self.num_halved_steps += plan.num_microbatches == 2
        unknown = self._unknown_losses(plan)
        for rank in unknown:
            again, self._missed[rank] = self._missed.get(rank) == now, now
            if self.lost[rank] < now or again:           # the scheduler is told in that moment, before another step
                self.wrongs.append(f"{self.member} step {plan.step} was planned with rank {rank}, lost since "
                                   f"{self.lost[rank]:g} s")
        if self.experts is not None and reaches_map and not unknown:
            self.experts.begin_step(plan)

    def _end_step(self, verb: Run, finished: Sequence[bool]) -> Ran:
        """Living ranks that have not finished give the step up, and say how their rows stood before it."""
        plan, experts = verb.plan, self.experts
        if experts is not None and any(finished):
            experts.end_step()
        elif experts is not None:
            experts.drop_step()
        ranks = []
        for rank, (engine, section) in enumerate(zip(self._engines, plan.sections, strict=True)):
            if rank in self.lost or rank in plan.lost_ranks:
                ranks.append(RankResult())
            else:
                ranks.append(engine.end(section) if finished[rank] else engine.give_up())
        aborted = any(each.aborted for each in ranks)
        self.num_steps_given_up += aborted
        self.num_steps_given_up_in_part += aborted and any(finished)
        counts = experts.report() if experts is not None and plan.reports_experts and any(finished) else b""
        cause = f"ranks {list(self.lost)} are gone" if self.lost else "a rank was late"
        return Ran(verb.verb_id, StepResult(plan.step, tuple(ranks), 0.0, cause if aborted else "", counts))

    def _fail_step(self, verb: Run, cause: str) -> Failed:
        if self.experts is not None:
            self.experts.drop_step()
        for engine in self._engines:
            engine.drop_rows()
        return Failed(verb.verb_id, cause)

    def _unknown_losses(self, plan: StepPlan) -> list[int]:
        """Lost ranks that a plan counts on."""
        return [rank for rank in self.lost if rank not in plan.lost_ranks]

    def _lose(self, rank: int, now: float) -> list[Send]:
        """Its rows and experts are gone. Ranks give up the step that counts on it, unless they are through with it."""
        if not self._is_loaded or not 0 < rank < self.facts.num_ranks or rank in self.lost:
            return []
        self.num_lost_ranks += 1
        sends = [Send(self.member, RankLost(rank, "killed"))]
        run = next((verb for verb in self.unanswered.values()
                    if isinstance(verb, Run) and rank not in verb.plan.lost_ranks), None)
        num_ranks = self.facts.num_ranks
        finished = [False] * num_ranks
        if self._faults is not None and not self._step_fails:
            finished = self._faults.draw_finished(num_ranks, now)
        if not all(finished):                            # else its own result is there too
            self.lost[rank] = now
        if run is not None:
            del self.unanswered[run.verb_id]
            sends.append(Send(self.member, self._end_step(run, finished)))
        self.lost[rank] = now
        self._engines[rank].drop_rows()
        if self.experts is not None:
            self.experts.lose_rank(rank)
        for verb in self.unanswered.values():
            if isinstance(verb, Fetch | Pull) and verb.rank == rank:
                self._cut_off[verb.verb_id] = None
        return sends

    def _return(self, rank: int) -> list[Send]:
        del self.lost[rank], self._coming_back[rank]
        held = self.experts.return_rank(rank) if self.experts is not None else b""
        return [Send(self.member, RankBack(rank, held))]

    # ------------------------------------------------------------ copies

    def _busiest_bytes(self, moves: Sequence[Move]) -> int:
        """What the rank sends and receives that has most to copy."""
        assert self.experts is not None, "moving experts of a model that has none"
        rank_of = self.experts.geometry.rank_of_slots()
        ends = [0] * self.facts.num_ranks
        for move in moves:
            ends[rank_of[move.to_slot]] += 1
            if move.from_slot != DISK:
                ends[rank_of[move.from_slot]] += 1
        return max(ends) * self.experts.mixture.expert_bytes

    def _move(self, verb_id: int, cause: str) -> ExpertsMoved | Failed:
        assert self.experts is not None, "moving experts of a model that has none"
        if self._sabotage.skip_moves and not cause:
            self.experts.end_moves(verb_id, "nothing was written")
            return ExpertsMoved(verb_id)
        cause = self.experts.end_moves(verb_id, cause)
        self.num_failed_moves += bool(cause)
        return Failed(verb_id, cause) if cause else ExpertsMoved(verb_id)

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
            if sign < 0 and self._arenas[verb.rank].generations[ref.block] > ref.generation:
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
