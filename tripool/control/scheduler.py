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
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tripool.control import decode, prefill
from tripool.control.rank import Rank
from tripool.control.sequence import Phase, Sequence
from tripool.control.waiting import WaitingLine
from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.keys import block_keys, namespace_key, root_key
from tripool.core.machine import Address, Message, Send
from tripool.core.messages import (
    Abort,
    Admit,
    AttemptFailed,
    Done,
    Drain,
    Facts,
    Failed,
    Fetch,
    Fetched,
    FinishReason,
    Flush,
    Grant,
    Heartbeat,
    Hello,
    Load,
    Loaded,
    LoadProgress,
    Part,
    Prefill,
    Prefilled,
    Pull,
    Pulled,
    Ran,
    Release,
    Role,
    Run,
    State,
    Store,
    Stored,
    Tick,
    Tokens,
)
from tripool.core.plan import BlockId, BlockRef, Chunk, Emitted, Grow, Join, Left, RankResult, Section, StepPlan
from tripool.core.request import TOKEN_BYTES, Request, RequestId, TokenBytes, num_tokens

MAX_REMEMBERED = 4096
"""Ended attempts that are remembered, so that a message that comes late or twice does not begin them anew."""

MAX_HELD_TOLD = 64
"""Attempts that one heartbeat names."""

HELD_AFTER_S = 3.0
"""Age from which an attempt is named in heartbeats: longer than messages travel, shorter than a long request lives."""

STORE_SHARE = 4
"""One part in so many of a rank's blocks may be named by unanswered `Store`s: a slow pool must not keep the rest."""

FETCH_PAUSE_S = 5.0
"""After a `Fetch` failed the pool is not asked for so long: one that is gone or stuck delays few requests, not all."""

Answer = Ran | Fetched | Stored | Pulled | Loaded | Failed


def namespace_of(facts: Facts) -> bytes:
    """Under which name an instance's blocks are interchangeable with those of others."""
    return namespace_key({"fingerprint": facts.fingerprint, "layout": facts.layout,
                          "block_tokens": str(facts.block_tokens)})


@dataclass(slots=True)
class SchedulerStats:
    """Figures of one instance for metrics. Gauges are of the moment at which `InstanceScheduler.stats` was read."""

    num_running: int = 0                  # rows in the engine that compute or decode
    num_waiting: int = 0                  # in line, or waiting for a Fetch or Pull
    num_waiting_tokens: int = 0           # still to be computed or pulled
    num_handed_over: int = 0              # whose blocks wait to be pulled
    num_free_blocks: int = 0
    num_held_blocks: int = 0
    num_cached_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_blocks: int = 0
    steps: int = 0
    requests: int = 0
    finished: int = 0
    handed_over: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0                # of requests whose first token came
    local_hit_tokens: int = 0             # context found in this instance's cache
    pool_hit_tokens: int = 0              # context fetched from the pool
    computed_tokens: int = 0              # in chunks, those that were computed again included
    generated_tokens: int = 0
    engine_seconds: float = 0.0
    fetches: int = 0
    fetches_failed: int = 0
    pulls: int = 0
    pulled_blocks: int = 0
    stores: int = 0
    stored_blocks: int = 0                # that were new to the pool
    stores_skipped_blocks: int = 0        # not offered, because the pool was slow to take earlier ones
    failures: dict[str, int] = field(default_factory=dict)      # by cause
    aborts: dict[str, int] = field(default_factory=dict)        # by phase


@dataclass(slots=True)
class _Step:
    """The unanswered `Run`: who computes how many tokens on each rank."""

    rows: list[list[tuple[Sequence, int]]]


@dataclass(slots=True)
class _Parcel:
    """What one step has for one gateway."""

    emitted: list[Emitted] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    cached: list[tuple[RequestId, int, int]] = field(default_factory=list)


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
        self.facts: Facts | None = None
        self.ranks: list[Rank] = []
        self.sequences: dict[RequestId, Sequence] = {}       # living ones, oldest first
        self._data = f"{member}/data"
        self._health = health
        self._router = router
        self._line = WaitingLine()
        # The last attempt that ended here, and whether it was refused and its grant given back.
        self._ended: OrderedDict[RequestId, tuple[int, bool]] = OrderedDict()
        self._verbs: dict[int, tuple[Message, Sequence | None]] = {}
        self._step: _Step | None = None
        self._num_verbs = 0
        self._fetch_not_before = 0.0
        self._now = 0.0
        self._num_arrived = 0
        self._progress = 0
        self._beat = 0
        self._load_fraction = 0.0
        self._namespace = b""
        self._block_tokens = deployment.block_tokens
        self._uses_pool = deployment.cache.count > 0 and config.enable_prefix_caching
        self._stats = SchedulerStats()
        self._outbox: list[Send] = []

    # ------------------------------------------------------------ messages

    def handle(self, message: Message, now: float) -> list[Send]:
        self._now = now
        match message:
            case Prefill(request, attempt, emitted):
                self._enter(request, attempt, emitted, None)
            case Admit(request, attempt, emitted, grant):
                self._enter(request, attempt, emitted, grant)
            case Release(request_id, attempt):
                self._release(request_id, attempt)
            case Abort(request_id, attempt):
                self._abort(request_id, attempt)
            case Ran() | Fetched() | Stored() | Pulled() | Loaded() | Failed():
                self._take_answer(message)
            case LoadProgress(fraction):
                self._load_fraction = fraction
            case Tick("heartbeat", token):
                if token == self._beat:
                    self._heartbeat()
            case Tick("start"):
                self._start()
            case Drain():
                if self.state in ("loading", "up"):
                    self.state = "draining"
            case Flush():
                for rank in self.ranks:
                    rank.blocks.forget_cached()
        self._begin_waiting()
        self._next_step()
        sends, self._outbox = self._outbox, []
        return sends

    @property
    def stats(self) -> SchedulerStats:
        """Counters, with the gauges of this moment. Read it; do not keep it."""
        stats, ranks = self._stats, self.ranks
        stats.num_running = sum(rank.num_running for rank in ranks)
        stats.num_handed_over = sum(each.phase is Phase.HANDED for each in self.sequences.values())
        stats.num_waiting = len(self.sequences) - stats.num_handed_over - stats.num_running
        stats.num_waiting_tokens = self._num_waiting_tokens()
        stats.num_blocks = sum(rank.blocks.num_blocks for rank in ranks)
        stats.num_free_blocks = sum(rank.blocks.num_free for rank in ranks)
        stats.num_held_blocks = sum(rank.blocks.num_held for rank in ranks)
        stats.num_cached_blocks = sum(rank.blocks.num_cached for rank in ranks)
        stats.num_quarantined_blocks = sum(rank.blocks.num_quarantined for rank in ranks)
        return stats

    @property
    def is_idle(self) -> bool:
        """No request, no unanswered verb, no row that has yet to leave the engine."""
        return not self.sequences and not self._verbs and not any(rank.slots for rank in self.ranks)

    # ------------------------------------------------------------ a life

    def _start(self) -> None:
        if self._beat:
            return
        self._send(self._health, Hello(self.member, self.role, self.boot_id))
        self._ask(Load(self._verb_id(), self.deployment.load_deadline_s))
        self._heartbeat()

    def _loaded(self, facts: Facts) -> None:
        num_blocks, rest = divmod(facts.num_blocks, facts.num_ranks)
        assert not rest, f"{facts.num_blocks} blocks cannot be shared by {facts.num_ranks} ranks"
        num_slots = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self.facts = facts
        self.ranks = [Rank(index, num_blocks, num_slots) for index in range(facts.num_ranks)]
        self._block_tokens = facts.block_tokens
        self._namespace = namespace_of(facts)
        if self.state == "loading":
            self.state = "up"

    def _heartbeat(self) -> None:
        stats, loading = self.stats, self.facts is None
        held: list[tuple[RequestId, int]] = []
        for sequence in self.sequences.values():
            if sequence.since_s > self._now - HELD_AFTER_S or len(held) == MAX_HELD_TOLD:
                break
            held.append((sequence.request.request_id, sequence.attempt))
        self._send(self._health, Heartbeat(
            self.member, self.boot_id, self.state, self._progress, stats.num_running, stats.num_waiting,
            stats.num_waiting_tokens, stats.num_free_blocks + stats.num_cached_blocks, self.facts,
            load_fraction=self._load_fraction if loading else 0.0, held=tuple(held), role=self.role,
            in_step=self._step is not None))
        self._beat += 1
        self._outbox.append(Send(self.member, Tick("heartbeat", self._beat), self.deployment.heartbeat_s))

    def _num_waiting_tokens(self) -> int:
        total = sum(sequence.num_tokens for sequence in self._line)
        for rank in self.ranks:
            total += sum(row.num_to_compute for row in rank.slots.values()
                         if not row.ended and row.phase not in (Phase.DECODING, Phase.HANDED))
        return total

    # ------------------------------------------------------------ entering and ending

    def _enter(self, request: Request, attempt: int, emitted: TokenBytes, grant: Grant | None) -> None:
        request_id = request.request_id
        known = self.sequences.get(request_id)
        if known is not None and known.attempt >= attempt:
            if grant is not None and (known.attempt > attempt or known.grant != grant):
                self._send(grant.source, Release(request_id, attempt))
            return
        ended, gave_back = self._ended.get(request_id, (-1, False))
        if ended >= attempt:
            # What was given back is somebody else's: the same `Admit` once more must neither begin nor release it.
            if grant is not None and not (gave_back and ended == attempt):
                self._send(grant.source, Release(request_id, attempt))
            return
        if known is not None:
            self._end(known)
        self._stats.requests += 1
        self._num_arrived += 1
        sequence = Sequence(request, attempt, self._num_arrived, self._now, request.prompt + emitted,
                            decodes=self.role != "prefill", grant=grant, prompt_scored=bool(emitted))
        self.sequences[request_id] = sequence
        refusal = self._refusal(sequence)
        if refusal is not None:
            self._refuse(sequence, *refusal)
            return
        sequence.root = root_key(self._namespace, request.salt)
        self._extend_keys(sequence)
        self._line.add(sequence)

    def _refusal(self, sequence: Sequence) -> tuple[str, str, bool] | None:
        """Why a request cannot be taken: a word for the counter, a sentence, and whether to try elsewhere."""
        grant = sequence.grant
        if self.state != "up" or self.facts is None:
            return self.state, f"{self.member} is {self.state}", True
        if (grant is not None) != (self.role == "decode"):
            return "role", f"{self.member} is a {self.role} instance and takes no such request", True
        if grant is not None and grant.layout != self.facts.layout:
            return "layout", f"the blocks of {grant.source} have another layout than those of {self.member}", True
        if grant is not None and not self._fits_tokens(grant, sequence):
            return "grant", f"the blocks granted by {grant.source} do not fit the request's tokens", True
        if not sequence.tokens:
            return "empty", "a request needs at least one token", False
        if sequence.num_tokens >= self.facts.max_model_len:
            return "window", (f"{sequence.num_tokens} tokens leave no room in the context window of "
                              f"{self.facts.max_model_len}"), False
        return self._never_fits(sequence)

    def _fits_tokens(self, grant: Grant, sequence: Sequence) -> bool:
        return (0 < grant.num_tokens < sequence.num_tokens
                and len(grant.parts) == -(-grant.num_tokens // self._block_tokens))

    def _never_fits(self, sequence: Sequence) -> tuple[str, str, bool] | None:
        num_blocks = self.ranks[0].blocks.num_blocks
        if sequence.num_blocks_to_start(self._block_tokens) <= num_blocks:
            return None
        return "cache", f"{sequence.num_tokens} tokens need more cache than {self._cache_size}", False

    @property
    def _cache_size(self) -> str:
        num_blocks = self.ranks[0].blocks.num_blocks
        return (f"the {num_blocks * self._block_tokens} tokens ({num_blocks} blocks of {self._block_tokens}) "
                f"that a rank of {self.member} has")

    def _abort(self, request_id: RequestId, attempt: int) -> None:
        sequence = self.sequences.get(request_id)
        if sequence is not None and sequence.attempt <= attempt:
            phase = sequence.phase.value
            self._stats.aborts[phase] = self._stats.aborts.get(phase, 0) + 1
            self._end(sequence)
        self._remember(request_id, attempt)     # its Prefill or Admit may still be on the way

    def _release(self, request_id: RequestId, attempt: int) -> None:
        sequence = self.sequences.get(request_id)
        if sequence is not None and sequence.attempt == attempt and sequence.phase is Phase.HANDED:
            self._end(sequence)

    def _refuse(self, sequence: Sequence, label: str, cause: str, retry: bool) -> None:
        """A request is not taken. A grant that is in order goes back unreleased: another instance can use it."""
        grant = sequence.grant
        if grant is None or not retry or label == "grant":
            self._fail(sequence, label, cause, retry)
            return
        sequence.grant = None
        self._fail(sequence, label, cause, retry, grant)
        self._remember(sequence.request.request_id, sequence.attempt, gave_back=True)

    def _fail(self, sequence: Sequence, label: str, cause: str, retry: bool, given_back: Grant | None = None) -> None:
        self._stats.failures[label] = self._stats.failures.get(label, 0) + 1
        request = sequence.request
        self._send(request.reply_to, AttemptFailed(request.request_id, sequence.attempt, self.member, cause, retry,
                                                   given_back))
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """The request is over here. What an unanswered verb or the engine still names stays until the answer."""
        del self.sequences[sequence.request.request_id]
        self._remember(sequence.request.request_id, sequence.attempt)
        sequence.ended = True
        if sequence.phase is Phase.WAITING:
            if sequence in self._line:
                self._line.remove(sequence)
            self._release_grant(sequence)
            return
        rank = self.ranks[sequence.rank]
        if sequence.phase is Phase.READY or (sequence.phase is Phase.HANDED and not sequence.in_engine):
            self._let_go(sequence)
            return
        rank.set_look_ahead(sequence, 0)
        rank.quarantine_blocks(sequence)
        if sequence.in_engine:
            rank.ask_to_leave(sequence)

    def _remember(self, request_id: RequestId, attempt: int, *, gave_back: bool = False) -> None:
        known = self._ended.pop(request_id, (-1, False))
        self._ended[request_id] = max(known, (attempt, gave_back))
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

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
            self._send(sequence.grant.source, Release(sequence.request.request_id, sequence.attempt))
            sequence.grant = None

    # ------------------------------------------------------------ beginning

    def _begin_waiting(self) -> None:
        if len(self._line) and any(rank.has_slot for rank in self.ranks):
            self._line.begin(self._try_begin)

    def _try_begin(self, sequence: Sequence) -> bool:
        for rank in sorted(self.ranks, key=lambda rank: (len(rank.slots), -rank.blocks.num_available, rank.index)):
            if rank.has_slot and self._begin_on(rank, sequence):
                return True
        return False

    def _begin_on(self, rank: Rank, sequence: Sequence) -> bool:
        wanted = self._prefix_keys(sequence)
        matched = rank.blocks.match(wanted)
        num_new = sequence.num_blocks_to_start(self._block_tokens) - len(matched)
        num_spare = rank.blocks.num_available - rank.blocks.num_cached_of(matched) - num_new
        ahead = decode.look_ahead_blocks(sequence, self._block_tokens)
        if not decode.has_room(num_spare, rank.look_ahead + ahead, alone=not rank.slots):
            return False
        for block in matched:
            rank.blocks.hold(block)
        fresh = rank.blocks.allocate(num_new)
        rank.take_slot(sequence)
        rank.set_look_ahead(sequence, ahead)
        sequence.blocks = matched + [ref.block for ref in fresh]
        sequence.num_computed = len(matched) * self._block_tokens
        sequence.num_registered = sequence.num_published = len(matched)
        self._stats.local_hit_tokens += sequence.num_computed
        if sequence.grant is not None:
            self._pull(sequence, sequence.grant, fresh)
        elif self._uses_pool and len(wanted) > len(matched) and self._now >= self._fetch_not_before:
            self._fetch(sequence, wanted[len(matched):], fresh)
        else:
            self._ready(sequence)
        return True

    def _prefix_keys(self, sequence: Sequence) -> list[bytes]:
        """Of the blocks that may stand in for computing: at least the last token is computed."""
        if sequence.grant is not None or not sequence.takes_prefix:
            return []
        return sequence.keys[:(sequence.num_tokens - 1) // self._block_tokens]

    def _extend_keys(self, sequence: Sequence) -> None:
        """Name the full blocks that have no key yet. What is only pulled here is named when it leaves."""
        if not self.config.enable_prefix_caching or sequence.grant is not None:
            return
        parent = sequence.keys[-1] if sequence.keys else sequence.root
        rest = sequence.tokens[len(sequence.keys) * self._block_tokens * TOKEN_BYTES:]
        sequence.keys += block_keys(parent, rest, self._block_tokens)

    def _fetch(self, sequence: Sequence, keys: list[bytes], into: list[BlockRef]) -> None:
        sequence.phase = Phase.FETCHING
        sequence.num_published += len(keys)
        self._stats.fetches += 1
        self._ask(Fetch(self._verb_id(), self.deployment.cache.fetch_deadline_s, sequence.rank, tuple(keys),
                        tuple(into[:len(keys)])), sequence)

    def _fetched(self, sequence: Sequence, num_blocks: int, checksums: tuple[int, ...]) -> None:
        if sequence.ended:
            self._let_go_ended(sequence)
            return
        blocks = self.ranks[sequence.rank].blocks
        first = sequence.num_registered
        for index in range(first, min(first + num_blocks, len(self._prefix_keys(sequence)))):
            block = sequence.blocks[index]
            blocks.register(block, sequence.keys[index])
            blocks.set_pooled(block, True)
            if index - first < len(checksums):
                blocks.set_checksum(block, checksums[index - first])
            sequence.num_registered += 1
        num_hit = (sequence.num_registered - first) * self._block_tokens
        sequence.num_computed += num_hit
        self._stats.pool_hit_tokens += num_hit
        self._ready(sequence)

    def _pull(self, sequence: Sequence, grant: Grant, into: list[BlockRef]) -> None:
        sequence.phase = Phase.PULLING
        sequence.num_published = len(grant.parts)
        self._stats.pulls += 1
        self._ask(Pull(self._verb_id(), self.deployment.pull_deadline_s, sequence.rank, grant,
                       tuple(into[:len(grant.parts)])), sequence)

    def _pulled(self, sequence: Sequence, failure: str | None) -> None:
        grant = sequence.grant
        assert grant is not None, "pulled without a grant"
        if sequence.ended:
            self._let_go_ended(sequence)
        elif failure is not None:
            sequence.phase = Phase.READY
            self._release_grant(sequence)
            self._fail(sequence, "pull", f"pulling from {grant.source} failed: {failure}", retry=True)
        else:
            self._release_grant(sequence)
            self._stats.pulled_blocks += len(grant.parts)
            sequence.num_computed = grant.num_tokens
            sequence.num_reused = None          # told by the instance that prefilled it
            sequence.prompt_scored = True
            for block in sequence.blocks[:grant.num_tokens // self._block_tokens]:
                self.ranks[sequence.rank].blocks.set_pooled(block, True)      # by the instance that prefilled it
            self._ready(sequence)

    def _ready(self, sequence: Sequence) -> None:
        sequence.phase = Phase.READY
        if sequence.num_reused is not None and not sequence.stepped_back:
            sequence.num_reused = min(sequence.num_computed, sequence.request.num_prompt_tokens)
        self.ranks[sequence.rank].prefilling[sequence.slot] = sequence

    # ------------------------------------------------------------ planning a step

    def _next_step(self) -> None:
        if self._step is not None or not self.ranks:
            return
        sections, step = [], _Step([])
        for rank in self.ranks:
            section, rows = self._plan_rank(rank)
            sections.append(section)
            step.rows.append(rows)
        if not any(rank.num_active or rows or section.leaves or section.grows
                   for rank, section, rows in zip(self.ranks, sections, step.rows, strict=True)):
            return
        self._step = step
        self._stats.steps += 1
        plan = StepPlan(self._stats.steps, tuple(sections))
        self._ask(Run(self._verb_id(), self.deployment.run_deadline_s, plan))

    def _plan_rank(self, rank: Rank) -> tuple[Section, list[tuple[Sequence, int]]]:
        grows, fresh = self._plan_grows(rank)
        rows = self._plan_rows(rank)
        joins, chunks, seals = [], [], []
        for sequence, count in rows:
            if sequence.phase is Phase.READY:
                joins.append(self._join(sequence))
                fresh += [rank.blocks.ref(block) for block in sequence.blocks[sequence.num_published:]]
                sequence.phase = Phase.COMPUTING
            if sequence.num_to_compute > 1:       # the last known token alone makes a decode row, which is not named
                chunks.append(Chunk(sequence.slot, count))
            if not sequence.decodes:
                seals += self._plan_seals(rank, sequence, count)
        leaves = tuple(rank.leaving)
        rank.leaving.clear()
        return Section(leaves, tuple(fresh), tuple(joins), tuple(grows), tuple(chunks), tuple(seals)), rows

    def _plan_rows(self, rank: Rank) -> list[tuple[Sequence, int]]:
        """Who computes how many of its known tokens in this step. Rows that only decode are counted, not listed."""
        if not rank.prefilling:
            return []
        last = [row for row in rank.prefilling.values() if row.num_to_compute == 1]
        others = [row for row in rank.prefilling.values() if row.num_to_compute > 1]
        budget = self.config.max_num_batched_tokens - rank.num_active - len(last)
        return [(row, 1) for row in last] + prefill.split_budget(others, budget)

    def _join(self, sequence: Sequence) -> Join:
        request = sequence.request
        return Join(sequence.slot, request.request_id, sequence.attempt, request.reply_to, sequence.tokens,
                    request.num_prompt_tokens, sequence.num_computed, tuple(sequence.blocks), sequence.sampling,
                    request.limits, sequence.decodes)

    def _plan_seals(self, rank: Rank, sequence: Sequence, count: int) -> list[BlockId]:
        """Blocks that this step completes and that somebody will pull: full ones, and the last one at the end."""
        computed = sequence.num_computed + count
        end = -(-computed // self._block_tokens) if computed == sequence.num_tokens else computed // self._block_tokens
        seals = [block for block in sequence.blocks[sequence.num_sealed:end] if rank.blocks.checksum(block) is None]
        sequence.num_sealed = end
        return seals

    def _plan_grows(self, rank: Rank) -> tuple[list[Grow], list[BlockRef]]:
        grows: list[Grow] = []
        fresh: list[BlockRef] = []
        while rank.needy:
            if rank.blocks.num_available:
                slot = next(iter(rank.needy))
                del rank.needy[slot]
                sequence = rank.slots[slot]
                refs = rank.blocks.allocate(1)
                sequence.blocks.append(refs[0].block)
                rank.set_look_ahead(sequence, decode.look_ahead_blocks(sequence, self._block_tokens))
                grows.append(Grow(slot, (refs[0].block,)))
                fresh += refs
            elif grows or not self._make_room(rank):       # who grows in this step must not leave in it
                break
        return grows, fresh

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
        """A row that has the whole rank to itself and still lacks a block can never go on here."""
        if len(rank.slots) > 1 or rank.blocks.num_quarantined:
            return
        sequence = rank.slots[next(iter(rank.needy))]
        self._fail(sequence, "cache", f"the request needs more cache than {self._cache_size}", retry=False)

    def _step_back(self, sequence: Sequence) -> None:
        """Back into the line, with what it has emitted; its blocks stay cached as long as nobody needs the room."""
        self._keep_context(sequence)
        self._let_go(sequence)
        sequence.phase = Phase.WAITING
        sequence.stepped_back = True
        refusal = self._never_fits(sequence)
        if refusal is not None:
            self._fail(sequence, *refusal)
        else:
            self._line.add(sequence)

    # ------------------------------------------------------------ answers

    def _take_answer(self, answer: Answer) -> None:
        verb, sequence = self._verbs.pop(answer.verb_id, (None, None))
        if verb is None:
            return
        self._progress += 1
        failure = answer.cause if isinstance(answer, Failed) else None
        match verb, answer:
            case Run(), Ran():
                self._ran(answer)
            case Run(), _:
                self._run_failed(failure or "no result")
            case Fetch(), Fetched() if sequence is not None:
                self._fetched(sequence, answer.num_blocks, answer.checksums)
            case Fetch(), _ if sequence is not None:
                self._stats.fetches_failed += 1
                self._fetch_not_before = self._now + FETCH_PAUSE_S
                self._fetched(sequence, 0, ())
            case Pull(), _ if sequence is not None:
                self._pulled(sequence, failure)
            case Store(), _:
                self._stored(verb, answer.num_new if isinstance(answer, Stored) else None)
            case Load(), Loaded():
                self._loaded(answer.facts)
            case Load(), _:
                self.state = "down"

    def _ran(self, ran: Ran) -> None:
        step, self._step = self._step, None
        assert step is not None, "a result without a step"
        self._stats.engine_seconds += ran.result.seconds
        parcels: dict[Address, _Parcel] = {}
        sampled: list[Sequence] = []
        for rank, rows, result in zip(self.ranks, step.rows, ran.result.ranks, strict=True):
            self._take_result(rank, rows, result, parcels, sampled)
        for address, parcel in parcels.items():
            self._send(address, Tokens(self.member, tuple(parcel.emitted), tuple(parcel.done), tuple(parcel.cached)))
        for sequence in sampled:
            if not sequence.ended and not sequence.decodes:
                self._hand_over(sequence)

    def _take_result(self, rank: Rank, rows: list[tuple[Sequence, int]], result: RankResult,
                     parcels: dict[Address, _Parcel], sampled: list[Sequence]) -> None:
        for block, checksum in result.sums:
            rank.blocks.set_checksum(block, checksum)
        self._stats.computed_tokens += result.num_chunk_tokens
        for emitted in result.emitted:
            self._stats.generated_tokens += num_tokens(emitted.columns.tokens)
            parcels.setdefault(emitted.reply_to, _Parcel()).emitted.append(emitted)
        for sequence, count in rows:
            sequence.num_computed += count
            self._register(sequence)
            if not sequence.num_to_compute and not sequence.ended:
                self._sampled(rank, sequence, parcels)
                sampled.append(sequence)
        for left in result.left:
            self._left(rank, left, parcels)
        for slot in result.need:
            if slot in rank.decoding:
                rank.needy[slot] = None

    def _sampled(self, rank: Rank, sequence: Sequence, parcels: dict[Address, _Parcel]) -> None:
        """All known tokens are computed and the next one came."""
        request = sequence.request
        if sequence.num_reused is not None:
            self._stats.prompt_tokens += request.num_prompt_tokens
            parcels.setdefault(request.reply_to, _Parcel()).cached.append(
                (request.request_id, sequence.attempt, sequence.num_reused))
            sequence.num_reused = None
        sequence.prompt_scored = True
        rank.rest(sequence)
        self._store(sequence)
        if sequence.decodes:
            sequence.phase = Phase.DECODING
            rank.decoding[sequence.slot] = sequence

    def _left(self, rank: Rank, left: Left, parcels: dict[Address, _Parcel]) -> None:
        sequence = rank.slots.get(left.slot)
        if sequence is None or not sequence.in_engine:
            return
        if sequence.ended:
            self._let_go_ended(sequence)
        elif sequence.phase is Phase.HANDED:
            rank.free_slot(sequence)
        else:
            sequence.tokens, sequence.num_computed = left.tokens, left.num_computed
            if left.reason is None:
                self._step_back(sequence)
            else:
                self._finish(sequence, left, parcels)

    def _finish(self, sequence: Sequence, left: Left, parcels: dict[Address, _Parcel]) -> None:
        request = sequence.request
        self._stats.finished += 1
        num_output = sequence.num_tokens - request.num_prompt_tokens
        reason: FinishReason = "length" if left.reason == "length" else "stop"
        parcels.setdefault(request.reply_to, _Parcel()).done.append(
            Done(request.request_id, sequence.attempt, reason, num_output, left.stop_token))
        self._keep_context(sequence)
        sequence.phase = Phase.READY       # in no engine and no verb: what it holds can go
        self._end(sequence)

    def _hand_over(self, sequence: Sequence) -> None:
        """Offer the blocks to whoever decodes. They stay until Release or Abort."""
        rank, facts, request = self.ranks[sequence.rank], self.facts, sequence.request
        assert facts is not None, "computed before loading"
        parts = []
        for block in sequence.blocks:
            checksum = rank.blocks.checksum(block)
            if checksum is None:
                self._fail(sequence, "seal", f"{self.member} did not sum block {block}", retry=True)
                return
            parts.append(Part(rank.index, block, rank.blocks.generation(block), checksum))
        self._stats.handed_over += 1
        sequence.phase = Phase.HANDED
        rank.ask_to_leave(sequence)
        num_output = sequence.num_tokens + 1 - request.num_prompt_tokens
        grant = Grant(self.member, self.boot_id, facts.layout, sequence.num_tokens, tuple(parts))
        self._send(self._router, Prefilled(request.request_id, sequence.attempt, grant, sequence.num_tokens + 1,
                                           request.limits.max_tokens - num_output))

    def _run_failed(self, cause: str) -> None:
        """The engine has dropped its rows. Those of the step begin anew elsewhere; handed-over blocks are sound."""
        self._step = None
        for rank in self.ranks:
            for sequence in [each for each in rank.slots.values() if each.in_engine]:
                if sequence.ended:
                    self._let_go_ended(sequence)
                elif sequence.phase is Phase.HANDED:
                    rank.free_slot(sequence)
                else:
                    sequence.phase = Phase.READY
                    self._fail(sequence, "run", f"a step of {self.member} failed: {cause}", retry=True)

    # ------------------------------------------------------------ keeping context

    def _register(self, sequence: Sequence) -> None:
        """Make the full blocks computed so far known under their keys."""
        blocks = self.ranks[sequence.rank].blocks
        end = min(sequence.num_computed // self._block_tokens, len(sequence.keys))
        for index in range(sequence.num_registered, end):
            blocks.register(sequence.blocks[index], sequence.keys[index])
        sequence.num_registered = max(sequence.num_registered, end)

    def _keep_context(self, sequence: Sequence) -> None:
        """A row leaves: its full blocks stay cached, and the pool is offered those it does not have."""
        self._extend_keys(sequence)
        self._register(sequence)
        self._store(sequence)

    def _store(self, sequence: Sequence) -> None:
        """Offer the pool what it lacks, as far as it keeps up."""
        if not self._uses_pool:
            return
        rank = self.ranks[sequence.rank]
        end = sequence.num_registered
        if not self.config.store_generated:
            end = min(end, sequence.request.num_prompt_tokens // self._block_tokens)
        fresh = [(key, block) for key, block in zip(sequence.keys[:end], sequence.blocks[:end], strict=True)
                 if rank.blocks.key(block) == key and not rank.blocks.is_pooled(block)]
        num_allowed = max(1, rank.blocks.num_blocks // STORE_SHARE) - rank.num_storing
        self._stats.stores_skipped_blocks += max(0, len(fresh) - num_allowed)
        fresh = fresh[:num_allowed]
        if not fresh:
            return
        for _, block in fresh:
            rank.blocks.pin(block)
            rank.blocks.set_pooled(block, True)
        rank.num_storing += len(fresh)
        self._stats.stores += 1
        self._ask(Store(self._verb_id(), self.deployment.cache.store_deadline_s, rank.index,
                        tuple(key for key, _ in fresh), tuple(rank.blocks.ref(block) for _, block in fresh)))

    def _stored(self, verb: Store, num_new: int | None) -> None:
        """With None the pool did not take them; they are offered again when somebody uses them again."""
        blocks = self.ranks[verb.rank].blocks
        self.ranks[verb.rank].num_storing -= len(verb.blocks)
        self._stats.stored_blocks += num_new or 0
        for ref in reversed(verb.blocks):
            if num_new is None:
                blocks.set_pooled(ref.block, False)
            blocks.unpin(ref.block)

    # ------------------------------------------------------------ sending

    def _send(self, to: Address, message: Message) -> None:
        self._outbox.append(Send(to, message))

    def _verb_id(self) -> int:
        self._num_verbs += 1
        return self._num_verbs

    def _ask(self, verb: Load | Fetch | Pull | Run | Store, sequence: Sequence | None = None) -> None:
        self._verbs[verb.verb_id] = (verb, sequence)
        self._send(self._data, verb)

    # ------------------------------------------------------------ checking

    def check_invariants(self) -> None:
        """Every block and slot is accounted for; raises AssertionError with a sentence. For tests and chaos."""
        for rank in self.ranks:
            rank.check()
            rank.blocks.check()
            self._check_blocks(rank)
        for sequence in self.sequences.values():
            assert not sequence.ended, f"request {sequence.request.request_id} ended but is still listed"
            waits = sequence.phase is Phase.WAITING
            assert waits == (sequence in self._line), f"request {sequence.request.request_id} is {sequence.phase.value}"
            assert not waits or (not sequence.blocks and sequence.slot < 0), "a waiting request holds blocks or a slot"

    def _check_blocks(self, rank: Rank) -> None:
        refs: dict[BlockId, int] = {}
        pins: dict[BlockId, int] = {}
        for sequence in self._holders(rank):
            assert len(dict.fromkeys(sequence.blocks)) == len(sequence.blocks), "a sequence names a block twice"
            for block in sequence.blocks:
                counts = pins if sequence.ended else refs
                counts[block] = counts.get(block, 0) + 1
        for block, count in refs.items():
            shared = count + pins.get(block, 0) > 1
            assert not shared or rank.blocks.key(block) is not None, f"rows share block {block}, which has no key"
        for verb, _ in self._verbs.values():
            if isinstance(verb, Store) and verb.rank == rank.index:
                for ref in verb.blocks:
                    pins[ref.block] = pins.get(ref.block, 0) + 1
        for block in range(rank.blocks.num_blocks):
            counted = rank.blocks.num_refs(block), rank.blocks.num_pins(block)
            named = refs.get(block, 0), pins.get(block, 0)
            assert counted == named, f"block {block} of rank {rank.index} is counted {counted}, but named by {named}"

    def _holders(self, rank: Rank) -> Iterator[Sequence]:
        yield from rank.slots.values()
        for sequence in self.sequences.values():
            if sequence.rank == rank.index and sequence.slot < 0 and sequence.blocks:
                yield sequence
