"""The five verbs with a price: steps by a model of costs, copies by bytes and bandwidth. No contents, only counts.

What is asked of it is what the real data plane is asked, by the same scheduler. Rows are in `lockstep`, or where they
draft in `drafting`; prices come from `pricing`; `copies` has the verbs that move blocks. Two things make it fast and
change no decision:

- Steps in which nothing happens but that every row emits a token are taken together, and answered as one step. Such a
  stretch ends where a row ends or lacks a block, and as soon as the scheduler has heard anything, with the step that
  runs then; so whoever joins or leaves does so at the same step as if each had been asked for.
- Tokens that nothing waits for are told to the gateway every so often, all rows' at once and well within its deadline
  (no stretch goes on beyond). When an instance dies, those of steps that were over are told first.

With `every_step` neither is done, and the outcome is the same to the last digit; a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tripool.core.deployment import InstanceConfig
from tripool.core.machine import Address, Message, Send
from tripool.core.messages import (
    ExpertsMoved,
    Facts,
    Failed,
    Fetch,
    Load,
    Loaded,
    MoveExperts,
    Pull,
    Ran,
    RankBack,
    RankLost,
    Run,
    Store,
    Tokens,
)
from tripool.core.placement import DISK
from tripool.core.plan import (
    IDLE_RESULT,
    IDLE_SECTION,
    BlockId,
    Emitted,
    Join,
    Left,
    RankResult,
    Section,
    Slot,
    StepResult,
    token_columns,
)
from tripool.core.request import RequestId
from tripool.core.value import value
from tripool.sim.columns import Floats, Taken
from tripool.sim.copies import Copies
from tripool.sim.costs.state import Ints, StepState
from tripool.sim.dataplane import LoseRank, RankReady, ReturnRank
from tripool.sim.demand import LiveExperts
from tripool.sim.drafting import Drafting
from tripool.sim.fabric import FlowDue, LinksChanged
from tripool.sim.lockstep import Lockstep
from tripool.sim.pricing import NO_CHUNKS, ExchangeLinks, Priced, StepPrices, end_of_bucket
from tripool.sim.requests import END_TOKEN, TOKEN
from tripool.sim.row import Row
from tripool.sim.world import SUM, Generations, World

MAX_DRAFT_STEPS = 8
"""Where rows draft each step has to be drawn, also those that are not taken after all."""

FRESH_S = 1.0
"""A gateway hears within so much time that a row has begun to decode here."""

NO_ENDS: Floats = np.zeros(0)


@dataclass(slots=True, eq=False)
class Stretch:
    """A `Run` under way: one step, or several taken together."""

    verb: Run
    begun_s: float
    num_rows: int                      # that decode in it
    chunks: list[tuple[Row, int]]      # known tokens that rows compute
    pieces: list[tuple[float, int, Priced | None]] = field(default_factory=list)
    """Seconds of a step, for how many steps, and what they consist of."""
    ends_s: Floats = field(default_factory=lambda: NO_ENDS)            # of each step
    taken: list[Taken] = field(default_factory=list)   # of each step, where rows draft
    cause: str = ""                    # why it fails
    left_s: float = 0.0                # of its step, while it stands still
    state: StepState | None = None     # of its first step, where transfers may make steps longer,
    exchange_share: float = 0.0        # and which part of it is exchange
    link_share: float = 1.0            # what transfers leave of the links
    slow: float = 1.0                  # times as long as its price what is left of the step takes, for that
    added_s: float = 0.0               # to its last step, for the same reason
    chunk_share: float = 0.0           # of its seconds, that known tokens add to what its rows would take alone


@dataclass(slots=True)
class RankOutput:
    """A rank's result in the making."""

    told: dict[Address, list[tuple[RequestId, int, int, bytes]]] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    need: list[Slot] = field(default_factory=list)
    want: list[Slot] = field(default_factory=list)
    sums: tuple[tuple[BlockId, int], ...] = ()
    num_chunk_tokens: int = 0
    num_decode_tokens: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    def result(self) -> RankResult:
        emitted = tuple([Emitted(reader, token_columns(rows)) for reader, rows in self.told.items()])
        return RankResult(emitted, tuple(self.left), tuple(self.need), self.sums, self.num_chunk_tokens,
                          self.num_decode_tokens, want=tuple(self.want), num_drafted=self.drafted,
                          num_accepted=self.accepted)


class PricedPlane:
    """Answers the verbs of one life of one instance."""

    def __init__(self, member: Address, boot_id: str, facts: Facts, config: InstanceConfig, prices: StepPrices,
                 world: World, num_drafts: int = 0, *, experts: LiveExperts | None = None, load_s: float = 0.0,
                 rank_load_s: float = 0.0, beside: float = 1.0, links: ExchangeLinks | None = None) -> None:
        """`load_s`: until its weights are there; `rank_load_s`: of a rank that comes back; `beside`: how many times as
        long a step takes that begins while another instance is in one; `links`: None if ranks exchange over nothing
        that transfers use."""
        self.member = member
        self.address = f"{member}/data"
        self.facts = facts
        self.experts = experts                          # None: nobody looks where they are
        self.has_plans: Callable[[], bool] = lambda: False      # of the scheduler, after the step it asked for
        self.halted = False                             # ranks cannot exchange: the plane for it is lost
        self.lost: dict[int, None] = {}                 # ranks without a process
        self.num_steps = 0
        self.num_chunk_tokens = 0
        self.num_decode_tokens = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self._load_s, self._rank_load_s = load_s, rank_load_s
        self.prices = prices
        self._world = world
        self._num_slots = config.num_slots
        self._lockstep = Lockstep(facts.num_ranks)      # of rows that decode one of the two: where nobody drafts this,
        self._drafting = Drafting(facts.num_ranks, self._num_slots, num_drafts, world.acceptance, world.seed) \
            if num_drafts else None
        self._live: Lockstep | Drafting = self._drafting or self._lockstep
        self._rows: dict[int, Row] = {}                 # by place
        self._computing: dict[int, Row] = {}            # rows with known tokens to compute
        self._generations: list[Generations] = [[0] * facts.num_rank_blocks for _ in range(facts.num_ranks)]
        self._copies = Copies(member, self.address, self._generations, world, self.lost)
        self._outputs: dict[int, RankOutput] = {}       # of the step that runs, by rank
        self._stretch: Stretch | None = None
        self._owes_first = False                        # a request's first token comes with the next step
        self._coming_back: dict[int, None] = {}
        self._busy_ns = 0                               # whole ones: a sum that does not depend on its order
        self._chunk_ns = 0                              # of these
        self._tells_at_s = 0.0                          # when all that no gateway was told yet is told
        self._fresh: dict[Row, None] = {}               # live rows of which no gateway has heard from here
        self._alone = facts.num_ranks == 1
        self._no_drafts_R: Ints = np.zeros(facts.num_ranks, np.int64)
        self._beside = beside
        # Others may begin or end at any time; and the rebalancer counts steps.
        self._every_step = world.every_step or beside != 1.0 or experts is not None
        self._links = links
        if links is not None:
            world.fabric.join(member, links.plane, links.bytes_per_s, self.address)
        world.arenas[member, boot_id] = self._generations

    def handle(self, message: Message, now: float) -> list[Send]:
        match message:
            case StretchDue(stretch):
                ends = stretch is self._stretch and now >= stretch.ends_s[-1]      # not later than it was said
                return self._end_run(stretch, now) if ends else []
            case Run():
                return self._run(message, now)
            case FlowDue():
                return self._copies.end(message, now) if self._world.fabric.take(message, now) else []
            case LinksChanged():
                if self._stretch is not None and self._links is not None:
                    self._meet_transfers(self._stretch, self._links, now)
                return []
            case HaltSteps():
                return self._halt(now)
            case ResumeSteps():
                return self._go_on(now)
            case Fetch():
                return self._copies.fetch(message, now)
            case Pull():
                return self._copies.pull(message, now)
            case Store():
                return self._copies.store(message, now)
            case Load(verb_id):
                experts = self.experts.facts if self.experts is not None else None
                return [Send(self.address, _Later(Loaded(verb_id, self.facts, experts)), self._load_s)]
            case MoveExperts():
                return self._move(message)
            case MovesDue(verb, cause):
                return self._end_moves(verb, cause)
            case _Later(answer):
                return [Send(self.member, answer)]
            case LoseRank(rank):
                return self._lose(rank, now)
            case ReturnRank(rank):
                if rank in self.lost and rank not in self._coming_back:
                    self._coming_back[rank] = None
                    return [Send(self.address, RankReady(rank), self._rank_load_s)]
            case RankReady(rank):
                del self.lost[rank], self._coming_back[rank]
                held = self.experts.return_rank(rank) if self.experts is not None else b""
                return [Send(self.member, RankBack(rank, held))]
        return []

    @property
    def num_rows(self) -> int:
        """Requests in the engine."""
        return len(self._rows)

    def busy_s(self, now: float) -> float:
        """Seconds in steps so far."""
        return self._busy_ns / 1e9 + (now - self._stretch.begun_s if self._stretch is not None else 0.0)

    @property
    def chunk_s(self) -> float:
        """Seconds that known tokens took of steps that are over."""
        return self._chunk_ns / 1e9

    def is_ahead(self, now: float) -> bool:
        """Whether steps are taken that have not begun yet."""
        stretch = self._stretch
        return stretch is not None and len(stretch.ends_s) > 1 and bool(stretch.ends_s[-2] >= now)

    def heard(self, now: float) -> None:
        """The next step will be another: steps taken together end with this one."""
        stretch = self._stretch
        if stretch is None or not self.is_ahead(now):
            return
        self._shorten(stretch, int(np.searchsorted(stretch.ends_s, now)) + 1)
        self._world.post(self.address, StretchDue(stretch), float(stretch.ends_s[-1]))

    def stop(self, now: float) -> list[Send]:
        """What is said of steps that are over, now that the instance or a rank dies. The step that runs will not be."""
        stretch, self._stretch = self._stretch, None
        self._world.computing.pop(self.member, None)
        self._exchange_nothing(now)
        self._drop_step()
        if stretch is not None:
            self._shorten(stretch, 0 if stretch.cause else int(np.searchsorted(stretch.ends_s, now, "right")))
            begun_s = stretch.begun_s
            if len(stretch.ends_s):
                self._take_steps(stretch)
                begun_s = float(stretch.ends_s[-1])
            self._busy_ns += round((now - begun_s) * 1e9)
        told: dict[Address, list[tuple[RequestId, int, int, bytes]]] = {}
        for row in self._untold():
            told.setdefault(row.join.reply_to, []).append(self._tell(row))
        return [Send(reader, Tokens(self.member, (Emitted(reader, token_columns(rows)),)))
                for reader, rows in told.items()]

    # ------------------------------------------------------------ steps

    def _run(self, verb: Run, now: float) -> list[Send]:
        chunks: list[tuple[Row, int]] = []
        grown: list[tuple[Row, int]] = []
        for rank, section in enumerate(verb.plan.sections):
            if section is not IDLE_SECTION:
                self._apply(rank, section, chunks)
                for grow in section.grows:
                    grown.append((self._rows[rank * self._num_slots + grow.slot],
                                  len(grow.blocks) * self.facts.block_tokens))
        if grown:
            self._live.grow(grown)
        for row in self._computing.values():
            if row.num_to_compute == 1:
                chunks.append((row, 1))                # the last known token alone is not named
        if self.lost and any(rank not in verb.plan.lost_ranks for rank in self.lost):      # planned before that
            return self._give_up(verb)
        if self.experts is not None:
            self.experts.at(now)
            self.experts.begin_step(verb.plan)
        num_rows = self._live.begin()
        take = self._mixed_step if chunks else self._decode_steps
        stretch = take(Stretch(verb, now, num_rows, chunks))
        if num_rows or chunks:
            if self._beside != 1.0 and self._world.computing:
                self._slow_down(stretch)
            self._world.computing[self.member] = None
        if self._links is not None:
            self._world.fabric.exchange(self.member, self._links.plane, stretch.exchange_share, now)
            self._meet_transfers(stretch, self._links, now)
        if self.halted:
            stretch.left_s = float(stretch.ends_s[0]) - now
        if self.halted or stretch.ends_s[0] - now > verb.deadline_s:
            _fail_late(stretch)
        self._stretch = stretch
        self._world.post(self.address, StretchDue(stretch), float(stretch.ends_s[-1]))
        return []

    def _halt(self, now: float) -> list[Send]:
        """Ranks cannot reach each other: the step stands still, and fails at its deadline."""
        self.halted, stretch = True, self._stretch
        if stretch is not None and not stretch.cause:
            stretch.left_s = float(stretch.ends_s[-1]) - now
            _fail_late(stretch)
            self._world.post(self.address, StretchDue(stretch), float(stretch.ends_s[-1]))
        return []

    def _go_on(self, now: float) -> list[Send]:
        """They can again. What stood still is finished, if there is time."""
        self.halted, stretch = False, self._stretch
        if stretch is not None and stretch.left_s and now + stretch.left_s < stretch.ends_s[-1]:
            stretch.pieces = [(now + stretch.left_s - stretch.begun_s, 1, stretch.pieces[0][2])]
            stretch.ends_s, stretch.left_s, stretch.cause = np.array([now + stretch.left_s]), 0.0, ""
            self._world.post(self.address, StretchDue(stretch), float(stretch.ends_s[-1]))
        return []

    def _slow_down(self, stretch: Stretch) -> None:
        """Others compute on the same machine while this step runs."""
        (seconds, count, priced), = stretch.pieces
        stretch.pieces = [(seconds * self._beside, count, priced)]
        stretch.ends_s = np.array([stretch.begun_s + seconds * self._beside])
        self.prices.add("other instances", "measured", seconds * (self._beside - 1))

    def _exchange_nothing(self, now: float) -> None:
        """No step runs."""
        if self._links is not None:
            self._world.fabric.exchange(self.member, self._links.plane, 0.0, now)

    def _meet_transfers(self, stretch: Stretch, links: ExchangeLinks, now: float) -> None:
        """Transfers take another part of the links: what is left of the step that runs takes longer, or less long.

        No step is taken together with others meanwhile. What was exchanged before is not looked at: the rest of a step
        is as its whole.
        """
        share = self._world.fabric.link_share(self.member, links.plane)
        if share == stretch.link_share or stretch.cause or self.halted:
            return
        assert stretch.state is not None, "a step that transfers may slow down knows what is in it"
        self._shorten(stretch, min(int(np.searchsorted(stretch.ends_s, now)) + 1, len(stretch.ends_s)))
        slow = 1.0 if share == 1.0 else max(1.0, self.prices.times_longer(stretch.state, share))
        added_s = max(float(stretch.ends_s[-1]) - now, 0.0) * (slow / stretch.slow - 1.0)
        stretch.link_share, stretch.slow = share, slow
        stretch.added_s += added_s
        stretch.ends_s[-1] += added_s
        stretch.pieces = _with_longer_last(stretch.pieces, len(stretch.ends_s), added_s)
        if stretch.ends_s[-1] - stretch.begun_s > stretch.verb.deadline_s:
            _fail_late(stretch)
        self._world.post(self.address, StretchDue(stretch), float(stretch.ends_s[-1]))

    def _apply(self, rank: int, section: Section, chunks: list[tuple[Row, int]]) -> None:
        """Rows come and go."""
        first, generations = rank * self._num_slots, self._generations[rank]
        for slot in section.leaves:
            self._leave(rank, first + slot)
        for ref in section.fresh:
            generations[ref.block] = ref.generation
        for join in section.joins:
            self._join(rank, first + join.slot, join)
        for chunk in section.chunks:
            chunks.append((self._rows[first + chunk.slot], chunk.num_tokens))
        if section.seals:
            self._output(rank).sums = tuple((block, SUM) for block in section.seals)

    def _join(self, rank: int, place: int, join: Join) -> None:
        num_tokens = len(join.tokens) // TOKEN.size
        output, most = self._world.outputs[join.request_id], join.limits.max_tokens
        row = Row(join, rank, place, num_tokens, join.num_computed, len(join.blocks) * self.facts.block_tokens,
                  num_tokens - join.num_prompt, min(output, most), "stop" if output <= most else "length")
        self._rows[place] = row
        if row.num_to_compute > 1 or not join.decodes:
            self._computing[place] = row
        else:
            self._decode(row)

    def _decode(self, row: Row, last_s: float | None = None) -> None:
        """All known tokens but one are computed. `last_s`: the row itself has just emitted that one, and told it."""
        if last_s is None:
            last_s = self._world.emitted_s.pop(row.join.request_id, 0.0)
            self._fresh[row] = None
        number = row.num_tokens - row.join.num_prompt
        self._owes_first = self._owes_first or not number
        self._live.put(row, number, last_s)

    def _leave(self, rank: int, place: int) -> None:
        row = self._rows.pop(place)
        if row.live:
            self._world.emitted_s[row.join.request_id] = self._live.last_s(row)
            if self._live.number(row) > row.told:
                self._output(rank).told.setdefault(row.join.reply_to, []).append(self._tell(row))
        self._output(rank).left.append(self._left(row, None))
        self._live.take_off(row)
        self._computing.pop(place, None)
        self._fresh.pop(row, None)

    def _left(self, row: Row, reason: str | None) -> Left:
        number, computed = row.num_tokens - row.join.num_prompt, row.computed
        if row.live:
            number, computed = self._live.number(row), self._live.computed(row)
        tokens = row.join.tokens + row.tokens(row.number, number)
        return Left(row.join.slot, reason, tokens, computed, END_TOKEN if reason == "stop" else None)

    def _untold(self) -> list[Row]:
        """Live rows with tokens that no gateway was told yet."""
        return [row for _, row in sorted(self._rows.items()) if row.live and self._live.number(row) > row.told]

    def _tell(self, row: Row) -> tuple[RequestId, int, int, bytes]:
        """A live row's tokens that no gateway was told yet. Now it is."""
        first, last = row.told, self._live.number(row)
        row.told = last
        return row.join.request_id, row.join.attempt, first, row.tokens(first, last)

    def _mixed_step(self, stretch: Stretch) -> Stretch:
        """A step that computes known tokens, at the price of all it has in it."""
        (rows_R, context_R), drafts_R = self._live.load(), self._no_drafts_R
        if self._drafting is not None:
            drafts_R = self._drafting.drafts_R()
        ranks, firsts, counts = [], [], []
        for row, count in stretch.chunks:
            if count == 1 and row.num_to_compute == 1:
                rows_R[row.rank] += 1
                context_R[row.rank] += row.computed
            else:
                ranks.append(row.rank)
                firsts.append(row.computed)
                counts.append(count)
        state = StepState(rows_R, context_R, drafts_R, np.array(ranks, np.int64), np.array(firsts, np.int64),
                          np.array(counts, np.int64), stretch.verb.plan.num_microbatches, self.experts)
        price = self.prices.mixed(state)
        stretch.state, stretch.exchange_share = state, price.exchange_share
        if counts:
            rows_s = 0.0
            if stretch.num_rows or len(counts) < len(stretch.chunks):
                # With experts as costs have them: a look at where they are now would count.
                rows_s = self.prices.decode(rows_R, context_R, drafts_R, state.num_microbatches).seconds
            stretch.chunk_share = max(0.0, 1.0 - rows_s / price.seconds)
        stretch.pieces = [(price.seconds, 1, None)]
        stretch.ends_s = np.array([stretch.begun_s + price.seconds])
        if self._drafting is not None and stretch.num_rows:
            stretch.taken.append(self._drafting.step())
        return stretch

    def _decode_steps(self, stretch: Stretch) -> Stretch:
        """Steps until something happens in one, or just one."""
        lockstep, plan = self._lockstep, stretch.verb.plan
        now, num_rows = stretch.begun_s, stretch.num_rows
        end_s = min(max(self._tells_at_s, now + 1e-9), now + stretch.verb.deadline_s / 2)
        if self._every_step or self._outputs or self._owes_first or not num_rows or self.has_plans():
            end_s = now + 1e-9         # one step: rows leave with it, a client waits for it, or another one comes next
        elif self._fresh:
            end_s = min(end_s, now + FRESH_S)
        self._owes_first = False
        if self._drafting is not None:
            self._draft_steps(self._drafting, stretch, end_s)
            return stretch
        rows, context = lockstep.load_alone() if self._alone else lockstep.load()
        most = lockstep.num_plain_steps() if num_rows else 1
        seconds = now
        while most and seconds < end_s:
            priced, num_steps = self._price(rows, context, plan.num_microbatches)
            self._note_decode(stretch, priced, rows, context, self._no_drafts_R)
            num_steps = min(num_steps, most, max(1, math.ceil((end_s - seconds) / priced.seconds)))
            stretch.pieces.append((priced.seconds, num_steps, priced))
            seconds += priced.seconds * num_steps
            most -= num_steps
            context = context + rows * num_steps
        stretch.ends_s = _ends(now, stretch.pieces)
        return stretch

    def _price(self, rows: Ints | int, context: Ints | int, num_microbatches: int) -> tuple[Priced, int]:
        """What a step costs in which rows only decode, by rank or of the only one; for how many steps it stays so."""
        if isinstance(rows, int) and isinstance(context, int):
            priced = self.prices.decode_alone(rows, context, 0, num_microbatches)
            return priced, -((context - end_of_bucket(context)) // rows) if rows else 1
        return self.prices.decode(np.asarray(rows), np.asarray(context), self._no_drafts_R, num_microbatches,
                                   self.experts), 1

    def _draft_steps(self, drafting: Drafting, stretch: Stretch, end_s: float) -> None:
        """The same where rows draft: how far each comes in a step has to be drawn."""
        at_s = stretch.begun_s
        while True:
            load, drafts_R = drafting.load(), drafting.drafts_R()
            priced = self.prices.decode(*load, drafts_R, stretch.verb.plan.num_microbatches, self.experts)
            self._note_decode(stretch, priced, *load, drafts_R)
            at_s += priced.seconds
            stretch.pieces.append((priced.seconds, 1, priced))
            stretch.taken.append(drafting.step())
            if at_s >= end_s or len(stretch.taken) == MAX_DRAFT_STEPS or drafting.happens():
                stretch.ends_s = _ends(stretch.begun_s, stretch.pieces)
                return

    def _note_decode(self, stretch: Stretch, priced: Priced, rows: Ints | int, context: Ints | int,
                     drafts_R: Ints) -> None:
        """What is in the first step, where transfers may make it longer."""
        if self._links is not None and stretch.state is None:
            stretch.exchange_share = priced.exchange_share
            stretch.state = StepState(np.atleast_1d(rows), np.atleast_1d(context), drafts_R, NO_CHUNKS, NO_CHUNKS,
                                      NO_CHUNKS, stretch.verb.plan.num_microbatches, self.experts)

    def _shorten(self, stretch: Stretch, num_steps: int) -> None:
        """Only the first steps of it are taken."""
        if self._drafting is not None:
            for taken in stretch.taken[num_steps:]:
                self._drafting.revert(taken)
        del stretch.taken[num_steps:]
        if num_steps < len(stretch.ends_s):
            stretch.added_s = 0.0
        stretch.ends_s = stretch.ends_s[:num_steps]

    def _take_steps(self, stretch: Stretch) -> None:
        """Live rows have emitted what they do in these steps."""
        num_rows, num_steps, gaps = stretch.num_rows, len(stretch.ends_s), self._world.gaps
        self.num_steps += num_steps
        left = num_steps
        num_late = 0                                        # rows that did not emit in the step before
        if num_rows:
            num_late = self._live.take(stretch.begun_s, num_steps, float(stretch.ends_s[0]),
                                       float(stretch.ends_s[-1]), gaps)
        for seconds, count, priced in stretch.pieces:
            num_taken = min(count, left)
            if not num_taken:
                break
            left -= num_taken
            taken_ns = round(seconds * 1e9) * num_taken
            self._busy_ns += taken_ns
            self._chunk_ns += round(taken_ns * stretch.chunk_share)
            if priced is not None:
                self.prices.take(priced, num_taken)
            if num_rows:
                gaps.add(seconds, num_rows * num_taken - num_late)
                num_late = 0
        if stretch.added_s and self._links is not None:
            self.prices.add("exchange beside transfers", self._links.level, stretch.added_s)
        for taken in stretch.taken:
            self.num_decode_tokens += int(taken.emitted_N.sum())
            self.num_drafted += sum(taken.drafted)
            self.num_accepted += sum(taken.accepted)
        if self._drafting is None:
            self.num_decode_tokens += num_rows * num_steps

    def _end_run(self, stretch: Stretch, now: float) -> list[Send]:
        self._stretch = None
        self._world.computing.pop(self.member, None)
        self._exchange_nothing(now)
        if stretch.cause:
            self._busy_ns += round((now - stretch.begun_s) * 1e9)
            self._drop_step()
            self._drop_rows()
            return [Send(self.member, Failed(stretch.verb.verb_id, stretch.cause))]
        num_tokens = self.num_decode_tokens
        self._take_steps(stretch)
        num_tokens = self.num_decode_tokens - num_tokens
        num_chunk_tokens = sum([self._take_chunk(row, count, now) for row, count in stretch.chunks])
        self.num_chunk_tokens += num_chunk_tokens
        if stretch.num_rows:
            self._look_at_rows(now)
        if stretch.taken:
            output = self._output(0)
            output.drafted = tuple(map(sum, zip(*(taken.drafted for taken in stretch.taken), strict=True)))
            output.accepted = tuple(map(sum, zip(*(taken.accepted for taken in stretch.taken), strict=True)))
        if self._world.watcher is not None:
            self._world.watcher.step(self.member, stretch.begun_s, now, stretch.num_rows, num_chunk_tokens,
                                     len(stretch.ends_s))
        outputs, self._outputs = self._outputs, {}
        results = [IDLE_RESULT] * self.facts.num_ranks
        for rank, output in outputs.items():
            results[rank] = output.result()
        counts = self._count_experts(stretch, num_tokens + num_chunk_tokens)
        return [Send(self.member, Ran(stretch.verb.verb_id, StepResult(stretch.verb.plan.step, tuple(results),
                                                                       now - stretch.begun_s, "", counts)))]

    def _take_chunk(self, row: Row, count: int, now: float) -> int:
        """A row computes known tokens, and samples one after the last. Returns those that were no decode row's."""
        is_last_alone = row.num_to_compute == 1
        row.computed += count
        output = self._output(row.rank)
        output.num_chunk_tokens += 0 if is_last_alone else count
        if not row.num_to_compute:
            self._sample(row, output, now)
        elif row.num_to_compute == 1 and row.join.decodes:
            del self._computing[row.place]
            self._decode(row)
        return 0 if is_last_alone else count

    def _sample(self, row: Row, output: RankOutput, now: float) -> None:
        join, number = row.join, row.num_tokens - row.join.num_prompt
        del self._computing[row.place]
        row.num_tokens += 1
        output.told.setdefault(join.reply_to, []).append(
            (join.request_id, join.attempt, number, row.tokens(number, number + 1)))
        if number + 1 >= row.total:
            output.left.append(self._left(row, row.ends))
            del self._rows[row.place]
        elif join.decodes:
            self._decode(row, now)
            if row.computed >= row.room:
                output.need.append(join.slot)
        else:
            self._world.emitted_s[join.request_id] = now
            output.left.append(self._left(row, None))
            del self._rows[row.place]

    def _look_at_rows(self, now: float) -> None:
        """Who ended, who lacks a block, and whose tokens are told."""
        live, stopped = self._live, self._live.stopped()
        tells = dict.fromkeys([row for row in self._fresh if live.number(row) > row.told])
        for row in tells:
            del self._fresh[row]
        if now >= self._tells_at_s:
            tells |= dict.fromkeys(self._untold())
            self._tells_at_s = now + self._world.tell_every_s
        stops = dict.fromkeys(stopped)
        for row in sorted(stops | tells, key=lambda row: row.place) if tells else stopped:
            output, ends = self._output(row.rank), live.number(row) >= row.total
            if ends or row in tells:
                output.told.setdefault(row.join.reply_to, []).append(self._tell(row))
            if ends:
                output.left.append(self._left(row, row.ends))
                live.take_off(row)
                del self._rows[row.place]
            elif row in stops:
                output.need.append(row.join.slot)
        if self._drafting is not None:
            for row in self._drafting.wanting():
                self._output(row.rank).want.append(row.join.slot)

    def _output(self, rank: int) -> RankOutput:
        output = self._outputs.get(rank)
        if output is None:
            output = self._outputs[rank] = RankOutput()
        return output

    def _drop_rows(self) -> None:
        """After a failed step the engine is empty."""
        self._rows.clear()
        self._computing.clear()
        self._live.clear()
        self._outputs.clear()
        self._fresh.clear()

    # ------------------------------------------------------------ ranks

    def _lose(self, rank: int, now: float) -> list[Send]:
        """Its rows are gone, and the step that runs is given up by all."""
        if not 0 < rank < self.facts.num_ranks or rank in self.lost:
            return []
        stretch = self._stretch
        sends = [*self.stop(now), Send(self.member, RankLost(rank, "its die failed"))]
        self.lost[rank] = None
        self._copies.lose_rank(rank, now)
        if self.experts is not None:
            self.experts.lose_rank(rank)
        if stretch is not None:
            sends += self._give_up(stretch.verb)
        for row in [row for row in self._rows.values() if row.rank == rank]:
            self._remove(row)
        return sends

    def _give_up(self, verb: Run) -> list[Send]:
        """The step is not taken: no row is in the engine any more. Those of living ranks are told as they were."""
        lefts: dict[int, list[Left]] = {rank: output.left for rank, output in self._outputs.items()}
        for row in list(self._rows.values()):
            if row.rank not in self.lost:
                lefts.setdefault(row.rank, []).append(self._left(row, None))
            self._remove(row)
        self._outputs = {}
        ranks = tuple(IDLE_RESULT if rank in self.lost else RankResult(left=tuple(lefts.get(rank, ())), aborted=True)
                      for rank in range(self.facts.num_ranks))
        cause = f"ranks {list(self.lost)} are gone"
        return [Send(self.member, Ran(verb.verb_id, StepResult(verb.plan.step, ranks, 0.0, cause)))]

    def _remove(self, row: Row) -> None:
        del self._rows[row.place]
        self._computing.pop(row.place, None)
        self._fresh.pop(row, None)
        self._live.take_off(row)

    # ------------------------------------------------------------ experts

    def _count_experts(self, stretch: Stretch, num_tokens: int) -> bytes:
        """The step was taken: what it asked of the experts is counted, and told if the plan wants to know."""
        if self.experts is None:
            return b""
        self.experts.end_step()
        self.experts.count(num_tokens, stretch.num_rows + len(stretch.chunks))
        return self.experts.report() if stretch.verb.plan.reports_experts else b""

    def _drop_step(self) -> None:
        if self.experts is not None:
            self.experts.drop_step()

    def _move(self, verb: MoveExperts) -> list[Send]:
        """Experts are copied from rank to rank, beside everything else; the rank with most to copy decides."""
        assert self.experts is not None, "moving experts of a model that has none"
        self.experts.begin_moves(verb.verb_id, verb.moves)
        rank_of, ends = self.experts.geometry.rank_of_slots(), [0] * self.facts.num_ranks
        for move in verb.moves:
            ends[rank_of[move.to_slot]] += 1
            if move.from_slot != DISK:
                ends[rank_of[move.from_slot]] += 1
        seconds = max(ends) * self.experts.model.expert_bytes / self.experts.model.move_bytes_per_s
        late = f"it did not end within {verb.deadline_s:g} s" if self.halted or seconds > verb.deadline_s else ""
        return [Send(self.address, MovesDue(verb, late), verb.deadline_s if late else seconds)]

    def _end_moves(self, verb: MoveExperts, cause: str) -> list[Send]:
        assert self.experts is not None, "moving experts of a model that has none"
        cause = self.experts.end_moves(verb.verb_id, cause)
        return [Send(self.member, Failed(verb.verb_id, cause) if cause else ExpertsMoved(verb.verb_id))]


@dataclass(frozen=True, slots=True)
class HaltSteps:
    """To a data plane: the plane over which its ranks exchange is lost."""


@dataclass(frozen=True, slots=True)
class ResumeSteps:
    """To a data plane: that plane carries again."""


@value(frozen=True, slots=True)
class StretchDue:
    """A timer to the data plane itself: the step, or the last of those taken together, is over."""

    stretch: Stretch


@value(frozen=True, slots=True)
class MovesDue:
    """A timer to the data plane itself: experts are copied, or it took too long."""

    verb: MoveExperts
    cause: str


@value(frozen=True, slots=True)
class _Later:
    """A timer to the data plane itself, with an answer."""

    answer: Message


def _ends(begun_s: float, pieces: list[tuple[float, int, Priced | None]]) -> Floats:
    """When each step ends: each begins when the one before it has ended."""
    if len(pieces) == 1 and pieces[0][1] == 1:
        return np.array([begun_s + pieces[0][0]])
    times_s = np.empty(1 + sum([count for _, count, _ in pieces]))
    times_s[0], first = begun_s, 1
    for seconds, count, _ in pieces:
        times_s[first:first + count] = seconds
        first += count
    ends_s: Floats = np.add.accumulate(times_s)[1:]
    return ends_s


def _with_longer_last(pieces: list[tuple[float, int, Priced | None]], num_steps: int,
                      added_s: float) -> list[tuple[float, int, Priced | None]]:
    """The first so many steps, the last of them in a piece of its own and longer."""
    kept, left = [], num_steps
    for seconds, count, priced in pieces:
        kept.append((seconds, min(count, left), priced))
        left -= kept[-1][1]
    kept = [piece for piece in kept if piece[1]]
    seconds, count, priced = kept.pop()
    before = [(seconds, count - 1, priced)] if count > 1 else []
    return [*kept, *before, (seconds + added_s, 1, priced)]


def _fail_late(stretch: Stretch) -> None:
    """It will be given up at its deadline."""
    stretch.ends_s = np.array([stretch.begun_s + stretch.verb.deadline_s])
    stretch.cause = f"Run did not end within {stretch.verb.deadline_s:g} s"
