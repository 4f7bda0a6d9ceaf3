"""The scheduler of one instance: the same machine for prefill, decode and hybrid.

A request enters by `Prefill` or `Admit`, waits in one line, and begins on a rank with a slot and blocks for all its
known tokens. Its context comes from this instance's cache, then from the pool (`Fetch`) or from a prefill instance
(`Pull`), and what is missing is computed in chunks. Then it is handed over (prefill) or decodes until it stops. When a
rank's blocks run out, the youngest row steps back into the line with all it has emitted, and resumes like a prompt.

One `Run` is unanswered at a time. Its plan is a difference, so a step costs nothing for rows that merely decode.
Blocks named by an unanswered verb stay where they are, whatever becomes of their request meanwhile: a request that
ended keeps its slot and its blocks, in quarantine, until the answer, or until its row has left the engine.

What the host owes: `Tick("start")` once; each verb answered exactly once, and after the answer nothing of it touches a
block any more; `Fetch` and `Pull` publish the generations of all of `into`, even if they fail; after a `Failed` run the
engine has dropped all its rows. The machine knows no model, bytes or sockets.

A prefill or decode instance may be told to change its role. It then says that it drains, and goes on with what it has
and what is still on its way to it. When that was heard, rows that decode are handed on to other instances, like
prompts that were computed; when nothing is left but blocks that wait to be pulled, it serves in the new role.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import islice

from tripool.control import decode
from tripool.control.admission import Failure, never_fits, outgrown, refusal
from tripool.control.context import ContextCache
from tripool.control.ended import EndedAttempts
from tripool.control.expert_map import ExpertMap
from tripool.control.experts import Rebalancer
from tripool.control.openings import Openings
from tripool.control.outbox import Answer, Outbox
from tripool.control.rank import Rank
from tripool.control.sequence import Phase, Sequence
from tripool.control.stats import SchedulerStats
from tripool.control.steps import Parcel, Share, plan_section
from tripool.control.waiting import WaitingLine
from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.machine import Address, Message, Send
from tripool.core.messages import (
    Abort,
    Admit,
    AttemptFailed,
    ChangeRole,
    Done,
    Drain,
    ExpertFacts,
    ExpertsMoved,
    Facts,
    Failed,
    Fetch,
    Fetched,
    FinishReason,
    Flush,
    Grant,
    HandOn,
    Heartbeat,
    Hello,
    Load,
    Loaded,
    LoadProgress,
    MoveExperts,
    Part,
    Prefill,
    Prefilled,
    Pull,
    Pulled,
    Ran,
    RankBack,
    RankLost,
    Rebalance,
    Release,
    Role,
    Run,
    State,
    Store,
    Stored,
    Tick,
)
from tripool.core.plan import (
    IDLE_RESULT,
    IDLE_SECTION,
    BlockRef,
    Grow,
    Left,
    RankResult,
    Section,
    Slot,
    StepResult,
)
from tripool.core.request import Request, RequestId, TokenBytes, num_tokens

MAX_HELD_TOLD = 64
"""Attempts that one heartbeat names."""

MAX_ABORTED_STEPS = 3
"""In a row, after which rows are not tried again here."""

NO_SHARES: list[Share] = []

HELD_AFTER_S = 3.0
"""Age from which an attempt is named in heartbeats: longer than messages travel, shorter than a long request lives."""


class InstanceScheduler:
    """Decides what one instance computes next, and where its requests' context lives."""

    def __init__(self, member: Address, role: Role, config: InstanceConfig, deployment: Deployment, boot_id: str, *,
                 health: Address = "gateway/health", router: Address = "gateway/router") -> None:
        self.member = member
        self.role: Role = role
        self.config = config
        self.deployment = deployment
        self.boot_id = boot_id
        self.state: State = "loading"
        self.becomes: Role | None = None                     # the role it will have when it has finished
        self.facts: Facts | None = None
        self.ranks: list[Rank] = []
        self.sequences: dict[RequestId, Sequence] = {}       # living ones, oldest first
        self._health = health
        self._router = router
        self._now = 0.0
        self._beat = 0
        self._told_state: State = "loading"                  # in the last heartbeat
        self._progress = 0
        self._load_fraction = 0.0
        self._block_tokens = deployment.block_tokens
        self._num_arrived = 0
        self._line = WaitingLine(deployment.block_tokens)
        self._openings = Openings(0)
        self._planned: dict[int, None] = {}                  # ranks that have plans, and perhaps some that had
        self._num_lost = 0                                   # ranks without a process
        self._ended = EndedAttempts()
        self._step: list[list[Share]] | None = None          # the unanswered `Run`: who computes on each rank
        self._stats = SchedulerStats()
        self._outbox = Outbox(f"{member}/data")
        self._context = ContextCache(config, deployment, self._outbox, self._stats)
        self._experts = ExpertMap(member, config, self._outbox)
        self._num_aborted = 0                                # steps in a row that were given up
        self._back: list[RankBack] = []                      # ranks that came back while a step ran
        self._last_change = 0                                # the number of the last word about its role,
        self._was_heard = False                              # and whether nobody sends work of this role any more

    # ------------------------------------------------------------ messages

    def handle(self, message: Message, now: float) -> list[Send]:
        self._now = now
        match message:
            case Ran() | Fetched() | Stored() | Pulled() | Loaded() | ExpertsMoved() | Failed():
                self._take_answer(message)
            case Tick("heartbeat", token):
                if token == self._beat:
                    self._heartbeat()
            case Prefill(request, attempt, emitted):
                self._enter(request, attempt, emitted, None, 0)
            case Admit(request, attempt, emitted, grant, turn):
                self._enter(request, attempt, emitted, grant, turn)
            case Release(request_id, attempt):
                self._release(request_id, attempt)
            case Abort(request_id, attempt, turn):
                self._abort(request_id, attempt, turn)
            case RankLost():
                self._rank_lost(message)
            case RankBack():
                self._rank_back(message)
            case Rebalance() | Tick("experts-late") | Tick("experts-retry"):
                self._experts.tell(message, now)
            case LoadProgress(fraction):
                self._load_fraction = fraction
            case Tick("start"):
                self._start()
            case Drain():
                if self.state in ("loading", "up"):
                    self.state, self.becomes = "draining", None
            case ChangeRole():
                self._plan_change(message)
            case Flush():
                for rank in self.ranks:
                    rank.blocks.forget_cached()
        self._begin_waiting()
        if self.becomes is not None and self._was_heard:
            self._go_on_changing(self.becomes)
        self._next_step()
        if self._beat and self._state_to_tell != self._told_state:     # who learns it late sends what is refused
            self._heartbeat()
        return self._outbox.empty()

    @property
    def stats(self) -> SchedulerStats:
        """Counters, with the gauges of this moment. Read it; do not keep it."""
        self._stats.measure(self.sequences.values(), self.ranks)
        return self._stats

    @property
    def rebalancer(self) -> Rebalancer | None:
        """Who moves the experts, to be looked at; None until they are loaded, or without experts."""
        return self._experts.rebalancer

    @property
    def has_plans(self) -> bool:
        """Whether the next step will do more than let the rows that decode go on."""
        if self._experts.has_changes:
            return True
        return bool(self._planned) and any(self.ranks[index].has_plans for index in self._planned)

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks without a process."""
        return [rank.index for rank in self.ranks if rank.is_lost]

    @property
    def is_idle(self) -> bool:
        """No request, no unanswered verb, no row that has yet to leave the engine."""
        return not self.sequences and not self._outbox.awaits_answers and not any(rank.slots for rank in self.ranks)

    @property
    def _line_room(self) -> int:
        if not self.ranks:
            return 0
        num_living, each = len(self.ranks) - self._num_lost, self.ranks[0]
        return decode.line_room(self._line.num_waiting, self._line.num_wanted_blocks,
                                num_living * each.num_slots, num_living * each.blocks.num_blocks)

    @property
    def _own_state(self) -> State:
        """An instance with experts in no slot takes nothing until they are loaded again."""
        return "loading" if self.state == "up" and not self._experts.runnable else self.state

    @property
    def _state_to_tell(self) -> State:
        """One that will change its role gets no new work, and still takes what was on its way to it."""
        return "draining" if self.becomes is not None and self._own_state == "up" else self._own_state

    # ------------------------------------------------------------ a life

    def _start(self) -> None:
        if self._beat:
            return
        self._outbox.send(self._health, Hello(self.member, self.role, self.boot_id))
        self._outbox.ask(Load(self._outbox.verb_id(), self.deployment.load_deadline_s))
        self._heartbeat()

    def _loaded(self, facts: Facts, experts: ExpertFacts | None) -> None:
        num_blocks, rest = divmod(facts.num_blocks, facts.num_ranks)
        assert not rest, f"{facts.num_blocks} blocks cannot be shared by {facts.num_ranks} ranks"
        self.facts = facts
        self._openings = Openings(self.config.num_slots)
        self.ranks = [Rank(index, num_blocks, self.config.num_slots, self._openings, self._planned,
                           self.config.tokens_per_row)
                      for index in range(facts.num_ranks)]
        self._block_tokens = facts.block_tokens
        self._line = WaitingLine(facts.block_tokens)
        self._context.loaded(facts)
        self._experts.loaded(experts)
        if self.state == "loading":
            self.state = "up"

    def _heartbeat(self) -> None:
        stats, state, loading = self._stats, self._state_to_tell, self.facts is None
        stats.measure_load(self.sequences.values(), self.ranks)
        num_free_blocks = sum([rank.blocks.num_available for rank in self.ranks if not rank.is_lost])
        held: list[tuple[RequestId, int]] = []
        for sequence in self.sequences.values():
            if sequence.since_s > self._now - HELD_AFTER_S or len(held) == MAX_HELD_TOLD:
                break
            held.append((sequence.request.request_id, sequence.attempt))
        self._outbox.send(self._health, Heartbeat(
            self.member, self.boot_id, state, self._progress, stats.num_running, stats.num_waiting,
            stats.num_waiting_tokens, num_free_blocks, self.facts,
            load_fraction=self._load_fraction if loading else 0.0, held=tuple(held), role=self.role,
            in_step=self._step is not None, line_room=self._line_room, becomes=self.becomes,
            num_lost_ranks=self._num_lost))
        self._told_state = state
        self._beat += 1
        self._outbox.send(self.member, Tick("heartbeat", self._beat), self.deployment.heartbeat_s)

    def _plan_change(self, change: ChangeRole) -> None:
        if self.state != "up" or change.boot_id != self.boot_id:
            return
        if not self.deployment.may_serve(self.role, change.role):
            return
        if change.number > self._last_change:
            self._last_change, self._was_heard = change.number, False
            self.becomes = change.role if change.role != self.role else None
        elif change.number == self._last_change:
            self._was_heard = self._was_heard or change.heard

    def _go_on_changing(self, role: Role) -> None:
        """Give rows away; take on the new role when nothing is left to do in this one."""
        for rank in self.ranks:
            for sequence in list(rank.decoding.values()) if not rank.is_lost else ():
                sequence.moves = True
                rank.ask_to_leave(sequence)
        if any(rank.slots for rank in self.ranks):
            return
        if all(sequence.phase is Phase.HANDED for sequence in self.sequences.values()):
            self.role, self.becomes = role, None
            self._stats.role_changes += 1

    # ------------------------------------------------------------ entering and ending

    def _enter(self, request: Request, attempt: int, emitted: TokenBytes, grant: Grant | None, turn: int) -> None:
        request_id = request.request_id
        known = self.sequences.get(request_id)
        if known is not None and known.phase is Phase.HANDED and known.attempt == attempt and known.turn < turn:
            self._end(known, goes_on=True)     # it has gone on elsewhere and comes back before its Release
            known = None
        if known is not None and known.attempt >= attempt:
            if grant is not None and (known.attempt > attempt or known.grant != grant):
                self._outbox.send(grant.source, Release(request_id, attempt))
            return
        if self._ended.has(request_id, attempt, turn):
            # What was given back is somebody else's: the same `Admit` once more must neither begin nor release it.
            if grant is not None and not self._ended.gave_back(request_id, attempt, turn):
                self._outbox.send(grant.source, Release(request_id, attempt))
            return
        if known is not None:
            self._end(known)
        self._stats.requests += 1
        self._num_arrived += 1
        sequence = Sequence(request, attempt, self._num_arrived, self._now, request.prompt + emitted,
                            decodes=self.role != "prefill", grant=grant, turn=turn, prompt_scored=bool(emitted))
        why_not = refusal(sequence, self.member, self.role, self._own_state, self.facts, self._line_room)
        if why_not is not None:
            self._refuse(sequence, why_not)
            return
        self.sequences[request_id] = sequence
        self._context.name_blocks(sequence)
        self._line.add(sequence)

    def _abort(self, request_id: RequestId, attempt: int, turn: int | None) -> None:
        """Of an attempt that goes on elsewhere, up to a turn."""
        sequence, last_turn = self.sequences.get(request_id), math.inf if turn is None else turn
        if sequence is not None and (sequence.attempt, sequence.turn) <= (attempt, last_turn):
            phase = sequence.phase.value
            self._stats.aborts[phase] = self._stats.aborts.get(phase, 0) + 1
            self._end(sequence, goes_on=turn is not None)
        if turn is None:
            self._ended.end(request_id, attempt)     # its Prefill or Admit may still be on the way
        else:
            self._ended.refuse(request_id, attempt, turn)

    def _release(self, request_id: RequestId, attempt: int) -> None:
        sequence = self.sequences.get(request_id)
        if sequence is not None and sequence.attempt == attempt and sequence.phase is Phase.HANDED:
            self._end(sequence, goes_on=True)

    def _refuse(self, sequence: Sequence, why_not: Failure) -> None:
        """A request is not taken. A grant that is in order goes back unreleased: another instance can use it."""
        request_id, attempt, grant = sequence.request.request_id, sequence.attempt, sequence.grant
        if grant is not None and why_not.spares_the_grant:
            self._tell_failure(sequence, why_not, grant)
            self._ended.refuse(request_id, attempt, sequence.turn)
        else:
            self._tell_failure(sequence, why_not)
            self._release_grant(sequence)
            self._ended.end(request_id, attempt)

    def _fail(self, sequence: Sequence, why: Failure) -> None:
        """A request that was taken cannot go on here."""
        self._tell_failure(sequence, why)
        self._end(sequence)

    def _tell_failure(self, sequence: Sequence, why: Failure, given_back: Grant | None = None) -> None:
        self._stats.failures[why.label] = self._stats.failures.get(why.label, 0) + 1
        request = sequence.request
        self._outbox.send(request.reply_to, AttemptFailed(request.request_id, sequence.attempt, self.member, why.cause,
                                                          why.retry, given_back, why.is_full, sequence.turn))

    def _end(self, sequence: Sequence, *, goes_on: bool = False) -> None:
        """The request is over here. What an unanswered verb or the engine still names stays until the answer.

        If it `goes_on` elsewhere, it may come here again.
        """
        request_id = sequence.request.request_id
        del self.sequences[request_id]
        if goes_on:
            self._ended.refuse(request_id, sequence.attempt, sequence.turn)
        else:
            self._ended.end(request_id, sequence.attempt)
        sequence.ended = True
        if sequence.phase is Phase.WAITING:
            if sequence in self._line:
                self._line.remove(sequence)
            self._release_grant(sequence)
            return
        rank = self.ranks[sequence.rank]
        if sequence.phase in (Phase.READY, Phase.HANDED):
            self._let_go(sequence)
            return
        rank.set_look_ahead(sequence, 0)
        rank.quarantine_blocks(sequence)
        if sequence.in_engine:
            rank.ask_to_leave(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        """Nothing names the sequence's slot and blocks any more."""
        rank = self.ranks[sequence.rank]
        if sequence.slot >= 0:
            rank.free_slot(sequence)
        rank.release_blocks(sequence)

    def _let_go_ended(self, sequence: Sequence) -> None:
        """The last verb that named an ended sequence was answered."""
        rank = self.ranks[sequence.rank]
        rank.free_slot(sequence)
        rank.unpin_blocks(sequence)
        self._release_grant(sequence)

    def _release_grant(self, sequence: Sequence) -> None:
        if sequence.grant is not None:
            self._outbox.send(sequence.grant.source, Release(sequence.request.request_id, sequence.attempt))
            sequence.grant = None

    # ------------------------------------------------------------ beginning

    def _begin_waiting(self) -> None:
        if self._line.num_waiting and self._openings.num_ranks:
            self._line.begin(self._try_begin)

    def _try_begin(self, sequence: Sequence) -> bool:
        keys = self._context.prefix_keys(sequence)
        num_blocks = sequence.num_blocks_to_start(self._block_tokens)
        ahead = decode.look_ahead_blocks(sequence, self._block_tokens)
        return any(self._begin_on(self.ranks[index], sequence, keys, num_blocks, ahead) for index in self._openings)

    def _begin_on(self, rank: Rank, sequence: Sequence, keys: list[bytes], num_blocks: int, ahead: int) -> bool:
        """Begin there, if its `num_blocks` fit: those of `keys` that the rank has, and new ones."""
        num_ahead, alone = rank.look_ahead + ahead, not rank.slots
        if not decode.has_room(rank.blocks.num_available - num_blocks + len(keys), num_ahead, alone=alone):
            return False                       # not even if all of them were there
        matched = rank.blocks.match(keys)
        num_new = num_blocks - len(matched)
        num_spare = rank.blocks.num_available - rank.blocks.num_cached_of(matched) - num_new
        if not decode.has_room(num_spare, num_ahead, alone=alone):
            return False
        rank.blocks.hold(*matched)
        fresh = rank.blocks.allocate(num_new)
        rank.take_slot(sequence)
        rank.set_look_ahead(sequence, ahead)
        sequence.blocks = matched + fresh
        sequence.num_computed = len(matched) * self._block_tokens
        sequence.num_registered = sequence.num_published = len(matched)
        self._stats.local_hit_tokens += sequence.num_computed
        if sequence.grant is not None:
            self._pull(sequence, sequence.grant)
        elif not self._context.fetch(sequence, rank.blocks, self._now):
            self._ready(sequence)
        return True

    def _pull(self, sequence: Sequence, grant: Grant) -> None:
        sequence.phase = Phase.PULLING
        sequence.num_published = len(grant.parts)
        self._stats.pulls += 1
        into = self.ranks[sequence.rank].blocks.refs(sequence.blocks[:len(grant.parts)])
        self._outbox.ask(Pull(self._outbox.verb_id(), self.deployment.pull_deadline_s, sequence.rank, grant,
                              tuple(into)), sequence)

    def _pulled(self, sequence: Sequence, failure: str | None) -> None:
        grant = sequence.grant
        assert grant is not None, "pulled without a grant"
        if sequence.ended:
            self._let_go_ended(sequence)
        elif failure is not None:
            sequence.phase = Phase.READY
            self._release_grant(sequence)
            self._fail(sequence, Failure("pull", f"pulling from {grant.source} failed: {failure}"))
        else:
            self._release_grant(sequence)
            self._stats.pulled_blocks += len(grant.parts)
            sequence.num_computed = grant.num_tokens
            sequence.num_reused = None          # told by the instance that prefilled it
            sequence.prompt_scored = True
            full = sequence.blocks[:grant.num_tokens // self._block_tokens]
            self.ranks[sequence.rank].blocks.set_pooled(full, True)           # by the instance that prefilled it
            self._ready(sequence)

    def _fetched(self, sequence: Sequence, fetched: Fetched | None) -> None:
        """With None the pool failed, which is a miss."""
        if fetched is None:
            self._context.fetch_failed(self._now)
        if sequence.ended:
            self._let_go_ended(sequence)
            return
        if fetched is not None:
            self._context.fetched(sequence, fetched, self.ranks[sequence.rank].blocks)
        self._ready(sequence)

    def _ready(self, sequence: Sequence) -> None:
        sequence.phase = Phase.READY
        if self.ranks[sequence.rank].is_lost:
            self._fail(sequence, self._rank_failure(sequence.rank))
            return
        if sequence.num_reused is not None and not sequence.stepped_back:
            sequence.num_reused = min(sequence.num_computed, sequence.request.num_prompt_tokens)
        self.ranks[sequence.rank].compute(sequence)

    # ------------------------------------------------------------ planning a step

    def _next_step(self) -> None:
        if self._step is not None or not self.ranks or not self._experts.runnable:
            return
        planned: dict[int, tuple[Section, list[Share]]] = {}
        for index in sorted(self._planned):
            rank = self.ranks[index]
            if rank.has_plans:
                grows, fresh = self._plan_grows(rank)
                planned[index] = plan_section(rank, grows, fresh, self.config.max_num_batched_tokens,
                                              self._block_tokens)
            if not rank.has_plans:
                del self._planned[index]
        if not (any(shares or section.leaves or section.grows for section, shares in planned.values())
                or any(rank.num_active for rank in self.ranks)):
            return
        sections, step = [IDLE_SECTION] * len(self.ranks), [NO_SHARES] * len(self.ranks)
        for index, (section, shares) in planned.items():
            sections[index], step[index] = section, shares
        self._step = step
        self._stats.steps += 1
        most_tokens = max(rank.num_decode_tokens + sum([count for _, count in shares])
                          for rank, shares in zip(self.ranks, step, strict=True)) if self.config.microbatches else 0
        verb_id, plan = self._outbox.verb_id(), self._experts.plan(self._stats.steps, sections, most_tokens)
        self._experts.started(verb_id)
        self._outbox.ask(Run(verb_id, self.deployment.run_deadline_s, plan))

    def _plan_grows(self, rank: Rank) -> tuple[list[Grow], list[BlockRef]]:
        grows: list[Grow] = []
        fresh: list[BlockRef] = []
        while rank.needy:
            slots = list(islice(rank.needy, rank.blocks.num_available))
            if slots:
                for slot in slots:
                    del rank.needy[slot]
                self._grow(rank, slots, grows, fresh)
            elif grows or not self._make_room(rank):       # who grows in this step must not leave in it
                break
        if rank.wanting:                                   # nobody steps back for drafts
            self._grow(rank, list(islice(rank.wanting, rank.blocks.num_available)), grows, fresh)
            rank.wanting.clear()
        return grows, fresh

    def _grow(self, rank: Rank, slots: list[Slot], grows: list[Grow], fresh: list[BlockRef]) -> None:
        """A block more for each of these rows."""
        blocks = rank.blocks.allocate(len(slots))
        for slot, block in zip(slots, blocks, strict=True):
            sequence = rank.slots[slot]
            sequence.blocks.append(block)
            rank.set_look_ahead(sequence, decode.look_ahead_blocks(sequence, self._block_tokens))
            grows.append(Grow(slot, (block,)))
        fresh += rank.blocks.refs(blocks)

    def _make_room(self, rank: Rank) -> bool:
        """Let somebody step back for those who lack a block. True: there is room now; False: later, with an answer."""
        if rank.leaving:
            return False
        sequence = decode.choose_to_step_back(rank.slots.values())
        if sequence is None:
            self._give_up_alone(rank)
            return False
        self._stats.preemptions += 1
        if sequence.phase is not Phase.READY:
            rank.ask_to_leave(sequence)
            return False
        self._step_back(sequence)
        return True

    def _give_up_alone(self, rank: Rank) -> None:
        """A row that has all blocks of the rank and still lacks one can never go on here."""
        row = rank.slots[next(iter(rank.needy))]
        if len(rank.slots) > 1 or len(row.blocks) < rank.blocks.num_blocks:      # others will let go of theirs
            return
        assert self.facts is not None, "computed before loading"
        self._fail(row, outgrown(self.member, self.facts))

    def _step_back(self, sequence: Sequence) -> None:
        """Back into the line, with what it has emitted; its blocks stay cached as long as nobody needs the room."""
        assert self.facts is not None, "computed before loading"
        self._context.keep(sequence, self.ranks[sequence.rank])
        self._let_go(sequence)
        sequence.phase = Phase.WAITING
        sequence.stepped_back, sequence.moves = True, False
        failure = never_fits(sequence, self.member, self.facts)
        if failure is not None:
            self._fail(sequence, failure)
        else:
            self._line.add(sequence)

    # ------------------------------------------------------------ answers

    def _take_answer(self, answer: Answer) -> None:
        asked = self._outbox.take(answer)
        if asked is None:
            return
        self._progress += 1
        verb, sequence = asked
        failure = answer.cause if isinstance(answer, Failed) else None
        match verb, answer:
            case Run(), Ran():
                self._experts.ended(verb.verb_id, answer.result, self._now)
                self._ran(answer.result)
            case Run(), _:
                self._experts.ended(verb.verb_id, None, self._now)
                self._run_failed(failure or "no result")
            case MoveExperts(), ExpertsMoved() | Failed():
                self._experts.moved(answer, self._now)
            case Fetch(), _ if sequence is not None:
                self._fetched(sequence, answer if isinstance(answer, Fetched) else None)
            case Pull(), _ if sequence is not None:
                self._pulled(sequence, failure)
            case Store(), _:
                num_new = answer.num_new if isinstance(answer, Stored) else None
                self._context.stored(verb, num_new, self.ranks[verb.rank])
            case Load(), Loaded():
                self._loaded(answer.facts, answer.experts)
            case Load(), _:
                self.state = "down"

    def _ran(self, result: StepResult) -> None:
        step, self._step = self._step, None
        assert step is not None, "a result without a step"
        self._stats.engine_seconds += result.seconds
        self._stats.aborted_steps += bool(result.aborted)
        self._num_aborted = self._num_aborted + 1 if result.aborted else 0
        parcels: defaultdict[Address, Parcel] = defaultdict(Parcel)
        through: list[Sequence] = []                       # with what they had to do here
        for rank, shares, each in zip(self.ranks, step, result.ranks, strict=True):
            if each is IDLE_RESULT and not shares:
                continue
            if each.aborted and not rank.is_lost:
                self._given_up(rank, each, result.aborted)
            elif not rank.is_lost:
                self._take_result(rank, shares, each, parcels, through)
        for gateway, parcel in parcels.items():
            self._outbox.send(gateway, parcel.tokens(self.member))
        for sequence in through:
            if not sequence.ended:
                self._hand_over(sequence)
        self._clear_lost_ranks()

    def _take_result(self, rank: Rank, shares: list[Share], result: RankResult,
                     parcels: dict[Address, Parcel], through: list[Sequence]) -> None:
        rank.blocks.set_checksums(result.sums)
        self._stats.computed_tokens += result.num_chunk_tokens
        for emitted in result.emitted:
            self._stats.generated_tokens += num_tokens(emitted.columns.tokens)
            parcels[emitted.reply_to].emitted.append(emitted)
        for sequence, count in shares:
            sequence.num_computed += count
            self._context.register(sequence, rank.blocks)
            if not sequence.num_to_compute and not sequence.ended:
                self._sampled(rank, sequence, parcels)
        for left in result.left:
            self._left(rank, left, parcels, through)
        if result.need or result.want:
            rank.note_need(result.need, result.want)
        self._stats.count_drafts(result.num_drafted, result.num_accepted)

    def _sampled(self, rank: Rank, sequence: Sequence, parcels: dict[Address, Parcel]) -> None:
        """All known tokens are computed and the next one came."""
        request = sequence.request
        if sequence.num_reused is not None:
            self._stats.prompt_tokens += request.num_prompt_tokens
            parcels[request.reply_to].cached.append((request.request_id, sequence.attempt, sequence.num_reused))
            sequence.num_reused = None
        sequence.prompt_scored = True
        rank.rest(sequence)
        self._context.store(sequence, rank)
        if sequence.decodes:
            rank.decode(sequence)

    def _out_of_engine(self, rank: Rank, left: Left) -> Sequence | None:
        """A row has left with all it knows; None if nobody goes on with it here."""
        sequence = rank.slots.get(left.slot)
        if sequence is None or not sequence.in_engine:
            return None
        if sequence.ended:
            self._let_go_ended(sequence)
            return None
        sequence.tokens, sequence.num_computed = left.tokens, left.num_computed
        return sequence

    def _left(self, rank: Rank, left: Left, parcels: dict[Address, Parcel], through: list[Sequence]) -> None:
        sequence = self._out_of_engine(rank, left)
        if sequence is None:
            return
        if left.reason is not None:
            self._finish(sequence, left, parcels)
        elif sequence.moves or not sequence.decodes:
            sequence.phase = Phase.READY       # in no engine and no verb
            through.append(sequence)
        else:
            self._step_back(sequence)

    def _finish(self, sequence: Sequence, left: Left, parcels: dict[Address, Parcel]) -> None:
        request = sequence.request
        self._stats.finished += 1
        num_output = sequence.num_tokens - request.num_prompt_tokens
        reason: FinishReason = "length" if left.reason == "length" else "stop"
        parcels[request.reply_to].done.append(
            Done(request.request_id, sequence.attempt, reason, num_output, left.stop_token))
        self._context.keep(sequence, self.ranks[sequence.rank])
        sequence.phase = Phase.READY       # in no engine and no verb: what it holds can go
        self._end(sequence)

    def _hand_over(self, sequence: Sequence) -> None:
        """Offer the blocks to whoever decodes, or goes on decoding. They stay until Release or Abort."""
        rank, request = self.ranks[sequence.rank], sequence.request
        grant = self._grant(sequence, rank)
        if grant is None:
            self._fail(sequence, Failure("seal", f"{self.member} did not sum every block of the request"))
            return
        sequence.phase = Phase.HANDED
        rank.free_slot(sequence)
        if not sequence.moves:
            self._stats.handed_over += 1
            self._outbox.send(self._router, Prefilled(request.request_id, sequence.attempt, grant,
                                                      sequence.num_tokens))
            return
        self._stats.handed_on += 1
        self._context.keep(sequence, rank)
        self._outbox.send(request.reply_to, HandOn(request.request_id, sequence.attempt, self.member, grant,
                                                   sequence.turn))

    def _grant(self, sequence: Sequence, rank: Rank) -> Grant | None:
        """The blocks that it has computed, for somebody to copy; None if one of them was not summed."""
        assert self.facts is not None, "computed before loading"
        proofs = rank.blocks.proofs(sequence.blocks[:-(-sequence.num_computed // self._block_tokens)])
        parts = [Part(rank.index, block, generation, checksum) for block, generation, checksum in proofs
                 if checksum is not None]
        if len(parts) < len(proofs):
            return None
        return Grant(self.member, self.boot_id, self.facts.layout, sequence.num_computed, tuple(parts))

    def _run_failed(self, cause: str) -> None:
        """The engine has dropped its rows. Those of the step begin anew elsewhere; handed-over blocks are sound."""
        self._step = None
        for rank in self.ranks:
            self._rows_gone(rank, Failure("run", f"a step of {self.member} failed: {cause}"))
        self._clear_lost_ranks()

    def _rows_gone(self, rank: Rank, why: Failure) -> None:
        """What a rank had in its engine is there no more."""
        for sequence in [each for each in rank.slots.values() if each.in_engine]:
            if sequence.ended:
                self._let_go_ended(sequence)
            else:
                sequence.phase = Phase.READY
                self._fail(sequence, why)

    # ------------------------------------------------------------ steps that were given up, and ranks that are gone

    def _given_up(self, rank: Rank, result: RankResult, cause: str) -> None:
        """No token came. The rows join again as they were, unless that was tried often enough."""
        for left in result.left:
            self._returned(rank, left)
        if self._num_aborted > MAX_ABORTED_STEPS:
            for sequence in list(rank.prefilling.values()):
                self._fail(sequence, Failure("run", f"{self._num_aborted} steps of {self.member} in a row were given "
                                                    f"up: {cause}"))

    def _returned(self, rank: Rank, left: Left) -> None:
        """A row is out of the engine because its step was given up: it joins again, if there is room for it."""
        sequence = self._out_of_engine(rank, left)
        if sequence is None:
            return
        missing = sequence.num_blocks_to_start(self._block_tokens) - len(sequence.blocks)
        if sequence.leaving or missing > rank.blocks.num_available:
            self._step_back(sequence)
            return
        sequence.num_published, sequence.num_sealed = len(sequence.blocks), 0
        sequence.blocks += rank.blocks.allocate(max(0, missing))
        rank.set_look_ahead(sequence, decode.look_ahead_blocks(sequence, self._block_tokens))
        rank.rest(sequence)
        sequence.phase = Phase.READY
        rank.compute(sequence)

    def _rank_lost(self, lost: RankLost) -> None:
        self._back = [back for back in self._back if back.rank != lost.rank]      # it is gone again
        if not 0 < lost.rank < len(self.ranks) or self.ranks[lost.rank].is_lost:
            return
        self._num_aborted = 0
        self._num_lost += 1
        self.ranks[lost.rank].set_lost(True)
        self._stats.lost_ranks += 1
        self._experts.rank_lost(lost, self._now)
        if self._step is None:
            self._clear_lost_ranks()          # else with the answer, which is near

    def _clear_lost_ranks(self) -> None:
        """No answer names rows of lost ranks any more. Blocks that wait to be pulled stay: their memory outlives it."""
        for rank in self.ranks if self._num_lost else ():
            if rank.is_lost and rank.slots:
                why = self._rank_failure(rank.index)
                self._rows_gone(rank, why)
                for sequence in list(rank.prefilling.values()):
                    self._fail(sequence, why)
        back, self._back = self._back, []
        for each in back:
            self._rank_back(each)

    def _rank_failure(self, rank: int) -> Failure:
        return Failure("rank", f"rank {rank} of {self.member} is gone")

    def _rank_back(self, back: RankBack) -> None:
        if not 0 < back.rank < len(self.ranks):
            return
        if self._step is not None:            # rows of its last life may still be listed
            self._back.append(back)
            return
        if not self.ranks[back.rank].is_lost:
            self._rank_lost(RankLost(back.rank, "it came back"))
        self._num_lost -= 1
        self.ranks[back.rank].set_lost(False)
        self._stats.returned_ranks += 1
        self._experts.rank_back(back, self._now)

    # ------------------------------------------------------------ checking

    def check_invariants(self) -> None:
        """Every block and slot is accounted for; raises AssertionError with a sentence. For tests and chaos."""
        for rank in self.ranks:
            without_slot = [each for each in self.sequences.values()
                            if each.rank == rank.index and each.slot < 0 and each.blocks]
            stored = [ref.block for verb in self._outbox.unanswered
                      if isinstance(verb, Store) and verb.rank == rank.index for ref in verb.blocks]
            rank.check(without_slot, stored)
        self._line.check()
        self._openings.check({rank.index: len(rank.slots) for rank in self.ranks if not rank.is_lost})
        for sequence in self.sequences.values():
            assert not sequence.ended, f"request {sequence.request.request_id} ended but is still listed"
            waits = sequence.phase is Phase.WAITING
            assert waits == (sequence in self._line), f"request {sequence.request.request_id} is {sequence.phase.value}"
            assert not waits or (not sequence.blocks and sequence.slot < 0), "a waiting request holds blocks or a slot"
