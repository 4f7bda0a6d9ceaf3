"""Chooses members for requests: a prefill (or hybrid) first, a decode instance when the prefill is done.

The choice is stateless: any member of a role can serve any request, because context lives in the pool. What
is kept is a ledger of attempts under way, because heartbeats are a moment old: a member's load is what it
last reported plus what was placed on it since. The decode instance is chosen after prefill, on the load of
that moment. Only members with equal block layouts are paired. While nobody can take a request, because none is
up or all decode instances are full, it waits, in order of priority and arrival, for at most
`place_deadline_s`; how much may wait or be prefilled at once is capped, and whoever comes beyond the caps
is told when to come again, reckoned from the rate at which prompts were lately finished.

Whether a decode instance is full is its own decision: its reports say how many more it would let wait, and
where they are too old it refuses. The router sees a request three times (once more for each such refusal)
and never its tokens. It resubmits nothing: that is the gateway's work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tripool.core.deployment import GatewayConfig
from tripool.core.machine import Address, Message, Send
from tripool.core.messages import (
    Finished,
    Grant,
    MemberChanged,
    Placed,
    PlaceElsewhere,
    Prefilled,
    Rejected,
    Role,
    Route,
    Stage,
    Started,
    State,
    Tick,
)
from tripool.core.request import RequestId

RATE_WINDOW_S = 10.0
LEAST_RETRY_S = 1.0
MOST_RETRY_S = 60.0
TOO_MANY_REQUESTS = 429
UNAVAILABLE = 503


@dataclass(slots=True)
class Since:
    """What was placed on a member that its reports may not show yet: since the last one, and in the interval before."""

    total: int = 0
    latest: int = 0                    # of that, since the last report

    def add(self, count: int) -> None:
        self.total += count
        self.latest += count

    def reported(self) -> None:
        self.total, self.latest = self.latest, 0


@dataclass(slots=True)
class Member:
    """A member as the router sees it."""

    name: Address
    role: Role
    boot_id: str
    state: State = "loading"
    layout: str = ""
    block_tokens: int = 1
    num_rank_blocks: int = 0           # of one rank: what a single request can have at most
    reported_tokens: int = 0           # waiting to be prefilled, by its last report
    reported_free: int = 0             # blocks
    reported_running: int = 0
    line_room: int = 0                 # requests it would still let wait, by its last report
    tokens_since: Since = field(default_factory=Since)
    blocks_since: Since = field(default_factory=Since)
    num_prefilling: int = 0            # of our attempts
    num_prefilling_tokens: int = 0
    num_decoding: int = 0              # of our attempts

    @property
    def queued_tokens(self) -> int:
        """Tokens ahead of a newcomer: never more than what we placed there and have not heard of since."""
        return min(self.num_prefilling_tokens, self.reported_tokens + self.tokens_since.total)

    @property
    def free_blocks(self) -> int:
        return self.reported_free - self.blocks_since.total

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def could_hold(self, num_tokens: int) -> bool:
        return self.blocks_for(num_tokens) <= self.num_rank_blocks

    @property
    def is_full(self) -> bool:
        return self.line_room <= 0

    def is_short_for(self, num_tokens: int) -> bool:
        return self.blocks_for(num_tokens) > self.free_blocks


@dataclass(slots=True)
class Attempt:
    """An attempt under way. `member` is where its present stage was placed; empty while it waits for one."""

    request_id: RequestId
    attempt: int
    order: int                         # of arrival
    priority: int
    num_tokens: int
    avoid: Address
    stage: Stage
    since: float                       # when this stage was asked for
    member: Address = ""
    started: bool = False              # the first token has come
    grant: Grant | None = None
    refused_by: Address = ""           # the decode member that will not take it


@dataclass(slots=True)
class RouterStats:
    """Counters for metrics."""

    placed: dict[Address, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)      # by cause


class Router:
    """Places attempts on healthy members, and keeps the queue bounded."""

    def __init__(self, config: GatewayConfig, *, address: Address = "gateway/router",
                 gateway: Address = "gateway") -> None:
        self.config = config
        self.address = address
        self.gateway = gateway
        self.stats = RouterStats()
        self.members: dict[Address, Member] = {}
        self.attempts: dict[RequestId, Attempt] = {}
        self.num_queued = 0            # attempts without a first token
        self.num_queued_tokens = 0
        self._num_arrived = 0
        self._waiting: dict[RequestId, Attempt] = {}
        self._ups: dict[Role, list[Member]] = {}           # members that are up and loaded, as far as asked for
        self._drain = DrainRate()

    def handle(self, message: Message, now: float) -> list[Send]:
        match message:
            case Route():
                return self._route(message, now)
            case Started(request_id, attempt):
                entry = self._entry(request_id, attempt)
                if entry is not None:
                    self._start(entry, now)
            case Prefilled():
                return self._prefilled(message, now)
            case PlaceElsewhere():
                return self._place_elsewhere(message, now)
            case Finished(request_id, attempt):
                entry = self._entry(request_id, attempt)
                if entry is not None:
                    self._forget(entry)
            case MemberChanged():
                return self._member_changed(message, now)
            case Tick("place", request_id):
                return self._waited(request_id, now)
        return []

    def retry_after_s(self) -> float:
        """When the queue is likely to have room again."""
        rate = self._drain.tokens_per_s
        wait_s = self.num_queued_tokens / rate if rate > 0 else LEAST_RETRY_S
        return min(max(wait_s, LEAST_RETRY_S), MOST_RETRY_S)

    def check_invariants(self) -> None:
        """The ledger agrees with itself: sums equal what they sum, and whoever waits has no member."""
        queued = [entry for entry in self.attempts.values() if not entry.started]
        assert self.num_queued == len(queued), f"{self.num_queued} attempts counted as queued, {len(queued)} are"
        assert self.num_queued_tokens == sum(entry.num_tokens for entry in queued), "queued tokens do not add up"
        for entry in self._waiting.values():
            assert self.attempts.get(entry.request_id) is entry, f"attempt {entry} waits, but is over"
            assert not entry.member, f"attempt {entry} waits, but has a member"
        for member in self.members.values():
            own = [entry for entry in self.attempts.values() if entry.member == member.name]
            prefilling = [entry for entry in own if entry.stage == "prefill" and not entry.started]
            assert member.num_prefilling == len(prefilling), f"{member.name}: prefilling counts do not add up"
            assert member.num_prefilling_tokens == sum(entry.num_tokens for entry in prefilling), \
                f"{member.name}: prefilling tokens do not add up"
            decoding = sum(self._decodes(entry, member) for entry in own)
            assert member.num_decoding == decoding, f"{member.name}: decoding counts do not add up"

    # ------------------------------------------------------------ the ledger

    def _entry(self, request_id: RequestId, attempt: int) -> Attempt | None:
        entry = self.attempts.get(request_id)
        return entry if entry is not None and entry.attempt == attempt else None

    def _route(self, route: Route, now: float) -> list[Send]:
        known = self.attempts.get(route.request_id)
        if known is not None:
            if known.attempt >= route.attempt:
                return []
            self._forget(known)
        if route.attempt == 1:                 # later ones were let in already
            refusal = self._over_the_caps(route)
            if refusal:
                return [self._reject(route.request_id, route.attempt, refusal, TOO_MANY_REQUESTS)]
        self._num_arrived += 1
        entry = Attempt(route.request_id, route.attempt, self._num_arrived, route.priority, route.num_tokens,
                        route.avoid, "prefill", now)
        self.attempts[route.request_id] = entry
        self.num_queued += 1
        self.num_queued_tokens += entry.num_tokens
        return self._place(entry, now)

    def _over_the_caps(self, route: Route) -> str:
        """Why a new request cannot join the queue; empty if it can. One that meets an empty queue always can."""
        if self.num_queued >= self.config.max_queued_requests:
            return f"{self.num_queued} requests wait for their first token, which is the limit"
        if self.num_queued and self.num_queued_tokens + route.num_tokens > self.config.max_queued_tokens:
            return (f"{self.num_queued_tokens} prompt tokens wait to be computed; {route.num_tokens} more would pass "
                    f"the limit of {self.config.max_queued_tokens}")
        return ""

    def _start(self, entry: Attempt, now: float) -> None:
        if entry.started:
            return
        self._take_off(entry)
        entry.started = True
        self._put_on(entry)
        self.num_queued -= 1
        self.num_queued_tokens -= entry.num_tokens
        self._drain.finished(entry.num_tokens, now)

    def _prefilled(self, message: Prefilled, now: float) -> list[Send]:
        entry = self._entry(message.request_id, message.attempt)
        if entry is None or entry.stage == "decode" or entry.member != message.grant.source:
            return []
        self._start(entry, now)
        self._take_off(entry)
        entry.stage, entry.grant, entry.since, entry.member = "decode", message.grant, now, ""
        entry.num_tokens = message.num_tokens
        return self._place(entry, now)

    def _forget(self, entry: Attempt) -> None:
        self._take_off(entry)
        self._waiting.pop(entry.request_id, None)
        del self.attempts[entry.request_id]
        if not entry.started:
            self.num_queued -= 1
            self.num_queued_tokens -= entry.num_tokens

    def _put_on(self, entry: Attempt) -> None:
        """Count an attempt on its member."""
        member = self.members.get(entry.member)
        if member is not None:
            self._count(entry, member, 1)

    def _take_off(self, entry: Attempt) -> None:
        member = self.members.get(entry.member)
        if member is not None:
            self._count(entry, member, -1)

    def _count(self, entry: Attempt, member: Member, sign: int) -> None:
        if entry.stage == "prefill" and not entry.started:
            member.num_prefilling += sign
            member.num_prefilling_tokens += sign * entry.num_tokens
        elif self._decodes(entry, member):
            member.num_decoding += sign

    @staticmethod
    def _decodes(entry: Attempt, member: Member) -> bool:
        return entry.stage == "decode" or (entry.started and member.role == "hybrid")

    # ------------------------------------------------------------ choosing

    def _place(self, entry: Attempt, now: float) -> list[Send]:
        """Give an attempt a member; without one, let it wait, or say that it never can have one."""
        candidates = self._prefill_candidates() if entry.stage == "prefill" else self._decode_candidates(entry)
        able = [member for member in candidates if member.could_hold(entry.num_tokens)]
        if not able and entry.refused_by:          # blocks are not kept waiting for somebody to come up
            return self._refuse(entry, f"{entry.refused_by} did not take the request, and no other decode instance "
                                       "that can read its blocks is up", UNAVAILABLE)
        if candidates and not able:
            most = max(member.num_rank_blocks * member.block_tokens for member in candidates)
            return self._refuse(entry, f"{entry.num_tokens} tokens do not fit; the largest instance holds {most}", 400)
        if not able and entry.stage == "decode" and self._up("hybrid"):
            return self._refuse(entry, "no decode instance is up; a hybrid can take the request over", UNAVAILABLE)
        if not able and entry.grant is not None and any(each.name == entry.grant.source for each in self._up("decode")):
            return self._refuse(entry, "the only decode instance is the one that computed the prompt before it changed "
                                       "its role", UNAVAILABLE)
        ready = able if entry.stage == "prefill" else [member for member in able if not member.is_full]
        if not ready:
            return self._wait(entry, now)
        self._waiting.pop(entry.request_id, None)
        choose = self._prefill_cost if entry.stage == "prefill" else self._decode_cost
        member = min(ready, key=lambda each: choose(each, entry))
        return self._put(entry, member)

    def _put(self, entry: Attempt, member: Member) -> list[Send]:
        entry.member = member.name
        self._put_on(entry)
        if entry.stage == "prefill":
            member.tokens_since.add(entry.num_tokens)
        else:
            member.line_room -= 1              # until its next report: then it knows of this one, or will refuse
        member.blocks_since.add(member.blocks_for(entry.num_tokens))
        self.stats.placed[member.name] = self.stats.placed.get(member.name, 0) + 1
        return [Send(self.gateway, Placed(entry.request_id, entry.attempt, entry.stage, member.name, entry.grant))]

    def _place_elsewhere(self, message: PlaceElsewhere, now: float) -> list[Send]:
        """A decode member for a grant that came back, or for a row that was handed on: another one, or the first that
        has room if all are full."""
        entry = self._entry(message.request_id, message.attempt)
        if entry is None or entry.stage != "decode" or entry.request_id in self._waiting:
            return []
        if entry.member not in ("", message.refused_by):         # said twice, and already elsewhere
            return []
        self._take_off(entry)
        entry.member = ""
        if message.grant is not None:
            entry.grant, entry.num_tokens, entry.since = message.grant, message.grant.num_tokens + 1, now
        if not message.full:
            entry.refused_by = message.refused_by
        elif message.refused_by in self.members:
            self.members[message.refused_by].line_room = 0
        return self._place(entry, now)

    def _up(self, role: Role) -> list[Member]:
        if role not in self._ups:
            self._ups[role] = [member for member in self.members.values()
                               if member.state == "up" and member.role == role and member.num_rank_blocks]
        return self._ups[role]

    def _prefill_candidates(self) -> list[Member]:
        """Hybrids, and prefill instances whose blocks some decode instance that is up can read."""
        readable = [member.layout for member in self._up("decode")]
        return [member for member in self._up("prefill") if member.layout in readable] + self._up("hybrid")

    def _decode_candidates(self, entry: Attempt) -> list[Member]:
        """A member that holds the blocks itself, and has changed its role since, is none: it would wait for itself."""
        assert entry.grant is not None, f"request {entry.request_id} asks for a decode member without a grant"
        return [member for member in self._up("decode") if member.layout == entry.grant.layout
                and member.name not in (entry.refused_by, entry.grant.source)]

    @staticmethod
    def _prefill_cost(member: Member, entry: Attempt) -> tuple[bool, bool, int, int, bool, Address]:
        """Less is better: the shortest queue, then the fewest requests; an idle hybrid yields to an idle prefill."""
        return (member.name == entry.avoid, member.is_short_for(entry.num_tokens), member.queued_tokens,
                member.num_prefilling + member.num_decoding, member.role == "hybrid", member.name)

    @staticmethod
    def _decode_cost(member: Member, entry: Attempt) -> tuple[bool, bool, int, int, Address]:
        running = max(member.num_decoding, member.reported_running)
        return (member.name == entry.avoid, member.is_short_for(entry.num_tokens), running, -member.free_blocks,
                member.name)

    # ------------------------------------------------------------ waiting and refusing

    def _wait(self, entry: Attempt, now: float) -> list[Send]:
        """Wait for a member, not longer than `place_deadline_s` since the stage was first asked for."""
        if entry.request_id in self._waiting:
            return []
        self._waiting[entry.request_id] = entry
        left_s = entry.since + self.config.place_deadline_s - now
        return [Send(self.address, Tick("place", entry.request_id), max(left_s, 0.0))]

    def _waited(self, request_id: RequestId, now: float) -> list[Send]:
        entry = self._waiting.get(request_id)
        if entry is None:
            return []
        left_s = entry.since + self.config.place_deadline_s - now
        if left_s > 1e-6:                      # the timer of an earlier stage or attempt
            return [Send(self.address, Tick("place", request_id), left_s)]
        if entry.stage == "decode" and self._decode_candidates(entry):
            return self._refuse(entry, "every decode instance that can read the blocks was full for "
                                       f"{self.config.place_deadline_s:g} s", TOO_MANY_REQUESTS)
        what = "no prefill instance with a decode instance to read its blocks, and no hybrid," \
            if entry.stage == "prefill" else "no decode instance that can read the blocks"
        return self._refuse(entry, f"{what} was up within {self.config.place_deadline_s:g} s", UNAVAILABLE)

    def _refuse(self, entry: Attempt, cause: str, status: int) -> list[Send]:
        self._forget(entry)
        return [self._reject(entry.request_id, entry.attempt, cause, status)]

    def _reject(self, request_id: RequestId, attempt: int, cause: str, status: int) -> Send:
        kind = {TOO_MANY_REQUESTS: "queue_full", UNAVAILABLE: "nobody_up"}.get(status, "too_large")
        self.stats.rejected[kind] = self.stats.rejected.get(kind, 0) + 1
        return Send(self.gateway, Rejected(request_id, attempt, cause, status, round(self.retry_after_s(), 1)))

    # ------------------------------------------------------------ members

    def _member_changed(self, change: MemberChanged, now: float) -> list[Send]:
        known = self.members.get(change.member)
        if known is None or known.boot_id != change.boot_id:
            known = self._new_life(change)
        if (known.state, known.role) != (change.state, change.role) or not known.num_rank_blocks:
            self._ups.clear()
        known.state, known.role = change.state, change.role
        if change.state == "down":
            known = self._new_life(change)     # whatever it had is being placed again
        if change.facts is not None:
            known.layout, known.block_tokens = change.facts.layout, change.facts.block_tokens
            known.num_rank_blocks = change.facts.num_blocks // change.facts.num_ranks
        known.reported_tokens, known.reported_running = change.num_waiting_tokens, change.num_running
        known.reported_free, known.line_room = change.num_free_blocks, change.line_room
        known.tokens_since.reported()
        known.blocks_since.reported()
        if not self._waiting or change.state == "loading":
            return []
        waiting = sorted(self._waiting.values(), key=lambda entry: (entry.priority, entry.order))
        return [send for entry in waiting for send in self._place(entry, now)]

    def _new_life(self, change: MemberChanged) -> Member:
        """A member with nothing on it; our attempts on its old life are let go, their `Finished` will come."""
        for entry in self.attempts.values():
            if entry.member == change.member:
                entry.member = ""
        self._ups.clear()
        self.members[change.member] = Member(change.member, change.role, change.boot_id, change.state)
        return self.members[change.member]


@dataclass(slots=True)
class DrainRate:
    """Prompt tokens finished per second, forgetting with a window of a few seconds."""

    tokens_per_s: float = 0.0
    _pending: int = 0
    _begun: float | None = None

    def finished(self, num_tokens: int, now: float) -> None:
        if self._begun is None:
            self._begun = now
        self._pending += num_tokens
        passed_s = now - self._begun
        if passed_s < 1.0:                     # too short to tell a rate
            return
        weight = min(passed_s / RATE_WINDOW_S, 1.0) if self.tokens_per_s else 1.0
        self.tokens_per_s += weight * (self._pending / passed_s - self.tokens_per_s)
        self._pending, self._begun = 0, now
