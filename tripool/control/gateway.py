"""Keeps the record of every request, and sees each one to exactly one end.

The record (prompt, emitted tokens, attempt, phase) is the only thing about a request that outlives an
instance. When an attempt cannot go on, whatever the reason, the gateway ends it everywhere and begins
attempt n + 1 elsewhere: prompt and emitted tokens are prefilled again, and because a token depends on the
request's seed and its position alone, the client's stream goes on with the same tokens. What an ended
attempt still sends is known by its number and dropped. Every phase has a deadline; the first cause of
trouble is kept, and told if the request fails in the end.

    placing -> prefill -> handover -> admitted -> decode       through a prefill and a decode instance
    placing -> prefill -> decode                               through a hybrid
    admitted -> handover                                       a decode member refused; who can takes the same blocks
    decode -> handover                                         a decode member hands a row on; who can takes its blocks
    any of these -> retrying -> placing                        an attempt failed
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from tripool.core.deployment import GatewayConfig
from tripool.core.machine import Address, Message, Send
from tripool.core.messages import (
    Abort,
    Admit,
    AttemptFailed,
    Cancel,
    Done,
    Finished,
    FinishReason,
    HandOn,
    Heartbeat,
    MemberChanged,
    Output,
    Placed,
    PlaceElsewhere,
    Prefill,
    Rejected,
    Role,
    Route,
    Started,
    State,
    Submit,
    Tick,
    Tokens,
)
from tripool.core.plan import Emitted, TokenLogprobs
from tripool.core.request import TOKEN_BYTES, Request, RequestId, TokenBytes, unpack_tokens

Phase = Literal["placing", "prefill", "handover", "admitted", "decode", "retrying"]
PHASES: tuple[Phase, ...] = ("placing", "prefill", "handover", "admitted", "decode", "retrying")

FIRST_RETRY_S = 0.05                   # then twice as long each time
SLACK_S = 1e-6                         # a timer may come early by a rounding error


@dataclass(slots=True)
class GatewayStats:
    """Counters for metrics. Causes are few and fixed; sentences are for people."""

    submitted: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)       # requests the client saw fail, by cause
    retried: dict[str, int] = field(default_factory=dict)      # attempts that failed and were tried again, by cause
    placed_elsewhere: int = 0          # a decode member refused, and a choice was asked for anew in the same attempt
    handed_on: int = 0                 # rows that a decode member gave away, to go on elsewhere in the same attempt
    aborted: dict[str, int] = field(default_factory=dict)      # requests nobody waited for any more, by phase
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    late_tokens: int = 0               # dropped: of an ended attempt, or sent twice
    forgotten_attempts: int = 0        # that an instance still held, and was told to drop
    phases: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))   # requests in each now

    @property
    def num_open(self) -> int:
        return sum(self.phases.values())


@dataclass(slots=True)
class Entry:
    """The record of one request."""

    request: Request
    attempt: int = 1
    phase: Phase = "placing"
    emitted: bytearray = field(default_factory=bytearray)
    prefill: Address = ""              # member of this attempt's first stage, once placed
    decode: Address = ""               # and of its second
    placed: Placed | None = None       # a decode member is chosen, though the first token may not be here yet
    refused_by: Address = ""           # the decode member that will not take this attempt; a second such ends it
    turn: int = 0                      # how often this attempt was offered to a decode member
    deadline_at: float = 0.0           # of the phase
    limit_at: float = 0.0              # the phase's deadline may be put off until here, not further
    timer_at: float = 0.0              # the earliest timer that is under way
    first_cause: str = ""
    avoid: Address = ""
    num_cached_tokens: int | None = None
    prompt_logprobs_end: int = 0       # position after the last one that was forwarded

    @property
    def num_emitted(self) -> int:
        return len(self.emitted) // TOKEN_BYTES

    @property
    def responsible(self) -> Address:
        """The member that is to bring the next token."""
        return self.decode or self.prefill


class Gateway:
    """The record keeper of one gateway process."""

    def __init__(self, config: GatewayConfig, *, address: Address = "gateway", router: Address = "gateway/router",
                 api: Address = "gateway/api") -> None:
        self.config = config
        self.address = address
        self.router = router
        self.api = api
        self.stats = GatewayStats()
        self.entries: dict[RequestId, Entry] = {}
        self._on_member: dict[Address, dict[RequestId, None]] = {}    # requests whose attempt a member may hold
        self._states: dict[Address, tuple[Role, State, str]] = {}     # role, state, cause
        self._patience_s: dict[Phase, float] = {
            "placing": config.place_deadline_s + 1.0,            # the router gives up first, and says why
            "prefill": config.prefill_deadline_s,
            "handover": config.place_deadline_s + 1.0,
            "admitted": config.decode_deadline_s,
            "decode": config.decode_deadline_s,
            "retrying": config.place_deadline_s}
        # A decode instance that says it still has the request is given more time: rows may wait for blocks or a slot.
        self._limit_s = {phase: max(patience_s, config.prefill_deadline_s)
                         for phase, patience_s in self._patience_s.items()}

    def handle(self, message: Message, now: float) -> list[Send]:
        match message:
            case Tokens():
                return self._take_tokens(message, now)
            case Submit(request):
                return self._submit(request, now)
            case Placed():
                return self._placed(message, now)
            case Rejected():
                return self._rejected(message, now)
            case AttemptFailed():
                return self._attempt_failed(message, now)
            case HandOn():
                return self._hand_on(message, now)
            case Cancel(request_id):
                return self._cancel(request_id)
            case MemberChanged():
                return self._member_changed(message, now)
            case Heartbeat():
                return self._reconcile(message, now)
            case Tick("deadline", request_id):
                return self._deadline(request_id, now)
            case Tick("retry", request_id):
                entry = self.entries.get(request_id)
                return self._route(entry, now) if entry is not None and entry.phase == "retrying" else []
        return []

    def check_invariants(self) -> None:
        """The record agrees with itself."""
        counts: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        for request_id, entry in self.entries.items():
            counts[entry.phase] += 1
            assert request_id == entry.request.request_id
            assert entry.num_emitted <= entry.request.limits.max_tokens, f"request {request_id} emitted too much"
            for member in (entry.prefill, entry.decode):
                assert not member or request_id in self._on_member[member], f"request {request_id} is not on {member}"
        assert counts == self.stats.phases, f"phases are {counts}, but counted as {self.stats.phases}"
        for member, held in self._on_member.items():
            for request_id in held:
                entry = self.entries[request_id]
                assert member in (entry.prefill, entry.decode), f"request {request_id} is still noted on {member}"

    # ------------------------------------------------------------ phases and their deadlines

    def _enter(self, entry: Entry, phase: Phase, now: float) -> list[Send]:
        self.stats.phases[entry.phase] -= 1
        self.stats.phases[phase] += 1
        entry.phase = phase
        entry.deadline_at, entry.limit_at = now + self._patience_s[phase], now + self._limit_s[phase]
        return self._arm(entry, now)

    def _arm(self, entry: Entry, now: float) -> list[Send]:
        """A timer for the deadline, unless one that comes no later is under way (it will look again)."""
        if now < entry.timer_at <= entry.deadline_at:
            return []
        entry.timer_at = entry.deadline_at
        return [Send(self.address, Tick("deadline", entry.request.request_id), entry.deadline_at - now)]

    def _deadline(self, request_id: RequestId, now: float) -> list[Send]:
        entry = self.entries.get(request_id)
        if entry is None:
            return []
        if now + SLACK_S < entry.deadline_at:
            return self._arm(entry, now) if now + SLACK_S >= entry.timer_at else []
        member = entry.responsible
        cause = {"placing": "no member was chosen in time",
                 "prefill": f"{member} brought no first token in time",
                 "handover": f"{member} finished the prefill, but no decode instance was chosen in time",
                 "admitted": f"{member} did not begin to decode in time",
                 "decode": f"{member} brought no further token in time",
                 "retrying": "the retry did not begin in time"}[entry.phase]
        return self._fail(entry, f"{entry.phase}_deadline", cause, now)

    # ------------------------------------------------------------ beginning

    def _submit(self, request: Request, now: float) -> list[Send]:
        if request.request_id in self.entries:
            return []
        entry = Entry(request)
        self.entries[request.request_id] = entry
        self.stats.submitted += 1
        self.stats.prompt_tokens += request.num_prompt_tokens
        self.stats.phases["placing"] += 1
        return self._route(entry, now)

    def _route(self, entry: Entry, now: float) -> list[Send]:
        request = entry.request
        timer = self._enter(entry, "placing", now)
        route = Route(request.request_id, entry.attempt, request.num_prompt_tokens + entry.num_emitted,
                      request.priority, entry.avoid)
        return [Send(self.router, route), *timer]

    def _placed(self, placed: Placed, now: float) -> list[Send]:
        entry = self._current(placed.request_id, placed.attempt)
        if entry is None:
            return []
        if placed.stage == "prefill":
            if entry.phase != "placing":
                return []
            entry.prefill = placed.member
            self._note(placed.member, entry)
            if self._state(placed.member) == "down":
                return self._fail(entry, "member_down", f"{placed.member} went down", now)
            prefill = Prefill(entry.request, entry.attempt, bytes(entry.emitted))
            return [Send(placed.member, prefill), *self._enter(entry, "prefill", now)]
        if entry.phase not in ("prefill", "handover") or entry.placed is not None or placed.grant is None:
            return []
        if placed.member == entry.refused_by:
            return []
        entry.placed = placed
        return self._admit(entry, now) if entry.phase == "handover" else []

    def _admit(self, entry: Entry, now: float) -> list[Send]:
        """Hand the request to its decode member, once the first token and the choice are both here."""
        placed = entry.placed
        assert placed is not None and placed.grant is not None, "admitted without a grant"
        entry.decode = placed.member
        self._note(placed.member, entry)
        state = self._state(placed.member)
        if state in ("draining", "down"):
            return self._place_elsewhere(entry, f"member_{state}", f"{placed.member} is {state}", now)
        expected = entry.request.num_prompt_tokens + entry.num_emitted - 1    # the last token is not computed yet
        if placed.grant.num_tokens != expected:
            return self._fail(entry, "gap", f"{placed.grant.source} granted {placed.grant.num_tokens} positions, "
                                            f"where {expected} were expected", now)
        entry.turn += 1
        admit = Admit(entry.request, entry.attempt, bytes(entry.emitted), placed.grant, entry.turn)
        return [Send(placed.member, admit), *self._enter(entry, "admitted", now)]

    def _rejected(self, rejected: Rejected, now: float) -> list[Send]:
        entry = self._current(rejected.request_id, rejected.attempt)
        if entry is None:
            return []
        status = rejected.status
        kind = {429: "queue_full", 503: "nobody_up"}.get(status, "too_large")
        has_streamed = entry.num_emitted > 1       # beyond the first token: no status may say that it has not begun
        if entry.phase != "placing" and (status == 503 or (status == 429 and has_streamed)):
            return self._fail(entry, kind, rejected.cause, now)        # somebody may come, or have room then
        if has_streamed and status < 500:
            status = 500
        cause = rejected.cause + (f"; the first trouble was: {entry.first_cause}" if entry.first_cause else "")
        return self._give_up(entry, kind, cause, status, rejected.retry_after_s)

    # ------------------------------------------------------------ tokens

    def _take_tokens(self, message: Tokens, now: float) -> list[Send]:
        done = {(each.request_id, each.attempt): each for each in message.done}
        for request_id, attempt, num_cached in message.cached:
            entry = self._current(request_id, attempt)
            if entry is not None and entry.num_cached_tokens is None:
                entry.num_cached_tokens = num_cached
                self.stats.cached_tokens += num_cached
        sends: list[Send] = []
        for emitted in message.emitted:
            sends += self._take_rows(emitted, done, message.source, now)
        for each in done.values():             # ended without a token in this message
            entry = self._current(each.request_id, each.attempt)
            if entry is not None:
                sends += self._end(entry, each, Output(each.request_id), now)
        return sends

    def _take_rows(self, emitted: Emitted, done: dict[tuple[RequestId, int], Done], source: Address,
                   now: float) -> list[Send]:
        logprobs = {(each.request_id, each.attempt): each for each in emitted.logprobs}      # of few, mostly of none
        sends: list[Send] = []
        for each in emitted.prompt_logprobs:
            sends += self._forward_prompt_logprobs(each, source, now)
        for request_id, attempt, start, tokens in emitted.columns.rows():
            entry = self.entries.get(request_id)
            if entry is None or entry.attempt != attempt:
                self.stats.late_tokens += len(tokens) // TOKEN_BYTES
                continue
            have, count = entry.num_emitted, len(tokens) // TOKEN_BYTES
            if start > have:
                done.pop((request_id, attempt), None)
                sends += self._fail(entry, "gap", f"tokens {have} to {start} from {source} were lost", now)
                continue
            if start < have:
                self.stats.late_tokens += min(have - start, count)
                tokens = tokens[(have - start) * TOKEN_BYTES:]
                count = len(tokens) // TOKEN_BYTES
            if not count:
                continue
            entry.emitted += tokens
            self.stats.output_tokens += count
            output = Output(request_id, tokens,
                            _from_output(logprobs.get((request_id, attempt)), have) if logprobs else None,
                            num_cached_tokens=None if have else entry.num_cached_tokens)
            end = done.pop((request_id, attempt), None) if done else None
            if end is not None:
                sends += self._end(entry, end, output, now)
            else:
                sends.append(Send(self.api, output))
                sends += self._progressed(entry, now)
        return sends

    def _progressed(self, entry: Entry, now: float) -> list[Send]:
        match entry.phase:
            case "decode":
                entry.deadline_at, entry.limit_at = now + self._patience_s["decode"], now + self._limit_s["decode"]
            case "admitted":
                return self._enter(entry, "decode", now)
            case "prefill":
                role = self._states.get(entry.prefill, ("prefill", "up", ""))[0]
                timer = self._enter(entry, "decode" if role == "hybrid" else "handover", now)
                admitted = self._admit(entry, now) if entry.placed is not None else []
                return [self._started(entry), *timer, *admitted]
        return []

    def _started(self, entry: Entry) -> Send:
        return Send(self.router, Started(entry.request.request_id, entry.attempt))

    def _forward_prompt_logprobs(self, part: TokenLogprobs, source: Address, now: float) -> list[Send]:
        """Once each, though later attempts compute them again. Position 0 has none, or one without meaning."""
        entry = self._current(part.request_id, part.attempt)
        if entry is None:
            return []
        if part.start > max(entry.prompt_logprobs_end, 1):
            return self._fail(entry, "gap", f"prompt log-probabilities {entry.prompt_logprobs_end} to {part.start} "
                                            f"from {source} were lost", now)
        fresh = _trim(part, entry.prompt_logprobs_end)
        if not fresh.chosen:
            return []
        entry.prompt_logprobs_end = fresh.start + len(fresh.chosen)
        return [Send(self.api, Output(part.request_id, prompt_logprobs=fresh))]

    # ------------------------------------------------------------ ending

    def _end(self, entry: Entry, done: Done, last: Output, now: float) -> list[Send]:
        """An instance says that the request is complete; believed if we have all that it emitted."""
        if done.num_output != entry.num_emitted or done.reason == "abort":
            sends = [Send(self.api, last)] if last.tokens else []
            cause = f"{entry.responsible} ended after {done.num_output} tokens, of which {entry.num_emitted} are here"
            return sends + self._fail(entry, "gap", cause, now)
        started = [self._started(entry)] if entry.phase == "prefill" else []
        return started + self._finish(entry, done.reason, done.stop_token, last.tokens, last.logprobs)

    def _finish(self, entry: Entry, reason: FinishReason, stop_token: int | None = None, tokens: TokenBytes = b"",
                logprobs: TokenLogprobs | None = None) -> list[Send]:
        """The request is complete; what came last goes with the word of it."""
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        last = Output(entry.request.request_id, tokens, logprobs, finish=reason, stop_token=stop_token,
                      num_cached_tokens=entry.num_cached_tokens)
        return [Send(self.api, last), *self._close(entry)]

    def _cancel(self, request_id: RequestId) -> list[Send]:
        entry = self.entries.get(request_id)
        if entry is None:
            return []
        self.stats.aborted[entry.phase] = self.stats.aborted.get(entry.phase, 0) + 1
        aborts = self._abort_everywhere(entry)
        return self._finish(entry, "abort") + aborts

    def _give_up(self, entry: Entry, kind: str, cause: str, status: int, retry_after_s: float | None) -> list[Send]:
        self.stats.failed[kind] = self.stats.failed.get(kind, 0) + 1
        aborts = self._abort_everywhere(entry)
        error = Output(entry.request.request_id, error=cause, status=status, retry_after_s=retry_after_s,
                       num_cached_tokens=entry.num_cached_tokens)
        return [Send(self.api, error), *self._close(entry), *aborts]

    def _close(self, entry: Entry) -> list[Send]:
        request_id = entry.request.request_id
        self._forget_members(entry)
        self.stats.phases[entry.phase] -= 1
        del self.entries[request_id]
        return [Send(self.router, Finished(request_id, entry.attempt))]

    # ------------------------------------------------------------ failing and trying again

    def _attempt_failed(self, failed: AttemptFailed, now: float) -> list[Send]:
        entry = self.entries.get(failed.request_id)
        if entry is None or entry.attempt > failed.attempt:
            abort = Abort(failed.request_id, failed.attempt)
            return [Send(failed.grant.source, abort)] if failed.grant is not None else []
        if entry.attempt < failed.attempt or failed.source != entry.responsible or entry.phase == "retrying":
            return []
        if failed.turn != entry.turn:      # said again of an offer that was made anew since
            return []
        cause = f"{failed.source}: {failed.cause}"
        if not failed.retry:
            return self._give_up(entry, "refused", cause, 500, None)
        if failed.grant is not None and entry.phase == "admitted":
            return self._place_elsewhere(entry, "attempt_failed", cause, now, full=failed.full)
        return self._fail(entry, "attempt_failed", cause, now)

    def _place_elsewhere(self, entry: Entry, kind: str, cause: str, now: float, *, full: bool = False) -> list[Send]:
        """The decode member did not touch the grant: somebody is asked anew, before the prompt is prefilled again.

        One that lacks room may be asked as often as the router finds it some; one that leaves is asked once.
        """
        if (entry.refused_by and not full) or self._state(entry.prefill) == "down":
            return self._fail(entry, kind, cause, now)
        request_id, member = entry.request.request_id, entry.decode
        entry.first_cause = entry.first_cause or cause
        self.stats.placed_elsewhere += 1
        self._on_member[member].pop(request_id, None)
        entry.decode, entry.placed = "", None
        if not full:
            entry.refused_by = member
        timer = self._enter(entry, "handover", now)
        return [Send(self.router, PlaceElsewhere(request_id, entry.attempt, member, full)), *timer]

    def _hand_on(self, message: HandOn, now: float) -> list[Send]:
        """A decode member gives a row away: it is now what a prefill member is, who holds the blocks."""
        request_id, source = message.request_id, message.source
        entry = self.entries.get(request_id)
        if entry is None or entry.attempt > message.attempt:
            return [Send(source, Abort(request_id, message.attempt))]
        if (entry.attempt, entry.turn, entry.decode) != (message.attempt, message.turn, source):
            return []                          # said twice
        self.stats.handed_on += 1
        if entry.prefill != source:
            self._on_member[entry.prefill].pop(request_id, None)
        entry.prefill, entry.decode, entry.placed, entry.refused_by = source, "", None, ""
        timer = self._enter(entry, "handover", now)
        return [Send(self.router, PlaceElsewhere(request_id, entry.attempt, source, grant=message.grant)), *timer]

    def _fail(self, entry: Entry, kind: str, cause: str, now: float) -> list[Send]:
        """End this attempt everywhere, then begin the next one, or end the request."""
        entry.first_cause = entry.first_cause or cause
        request = entry.request
        own_end = self._own_end(entry)
        if own_end is not None:
            aborts = self._abort_everywhere(entry)
            return self._finish(entry, *own_end) + aborts
        if entry.attempt >= self.config.max_attempts:
            told = f"the request failed {entry.attempt} times; first: {entry.first_cause}"
            if cause != entry.first_cause:
                told += f"; last: {cause}"
            return self._give_up(entry, kind, told, 503, None)
        self.stats.retried[kind] = self.stats.retried.get(kind, 0) + 1
        sends = self._abort_everywhere(entry)
        sends.append(Send(self.router, Finished(request.request_id, entry.attempt)))
        entry.avoid = entry.decode or entry.refused_by or entry.prefill
        self._forget_members(entry)
        entry.prefill, entry.decode, entry.placed, entry.refused_by, entry.turn = "", "", None, "", 0
        delay_s = FIRST_RETRY_S * 2 ** (entry.attempt - 1)
        entry.attempt += 1
        sends += self._enter(entry, "retrying", now)
        return [*sends, Send(self.address, Tick("retry", request.request_id), delay_s)]

    def _own_end(self, entry: Entry) -> tuple[FinishReason, int | None] | None:
        """The end that the tokens we have amount to, should the word of it be lost with the instance."""
        limits = entry.request.limits
        if entry.emitted and entry.num_emitted > limits.min_tokens:
            last = unpack_tokens(bytes(entry.emitted[-TOKEN_BYTES:]))[0]
            if last in limits.stop_token_ids:
                return "stop", last
        if entry.num_emitted >= limits.max_tokens:
            return "length", None
        return None

    def _abort_everywhere(self, entry: Entry) -> list[Send]:
        abort = Abort(entry.request.request_id, entry.attempt)
        return [Send(member, abort) for member in (entry.prefill, entry.decode) if member]

    # ------------------------------------------------------------ members

    def _member_changed(self, change: MemberChanged, now: float) -> list[Send]:
        self._states[change.member] = (change.role, change.state, change.cause)
        if change.state != "down":
            return []
        sends: list[Send] = []
        for request_id in list(self._on_member.get(change.member, ())):
            entry = self.entries[request_id]
            # Blocks outlive their process: once admitted, the decode member knows best whether they can be pulled.
            if entry.responsible == change.member:
                cause = f"{change.member} went down" + (f" ({change.cause})" if change.cause else "")
                sends += self._fail(entry, "member_down", cause, now)
        return sends

    def _reconcile(self, beat: Heartbeat, now: float) -> list[Send]:
        """A member says what it holds: what nobody waits for is dropped; what is held is not lost, only slow."""
        sends: list[Send] = []
        for request_id, attempt in beat.held:
            entry = self._current(request_id, attempt)
            if entry is None or not self._may_hold(entry, beat.member):
                self.stats.forgotten_attempts += 1
                turn = entry.turn if entry is not None else None       # it may be offered there again
                sends.append(Send(beat.member, Abort(request_id, attempt, turn)))
            elif entry.decode == beat.member or entry.phase == "decode":
                entry.deadline_at = max(entry.deadline_at, min(now + self.config.decode_deadline_s, entry.limit_at))
        return sends

    def _may_hold(self, entry: Entry, member: Address) -> bool:
        """A prefill member has nothing to hold any more once the decode member's tokens come."""
        if entry.phase == "decode":
            return member == entry.responsible
        return member in (entry.prefill, entry.decode)

    def _state(self, member: Address) -> State | None:
        known = self._states.get(member)
        return known[1] if known is not None else None

    def _note(self, member: Address, entry: Entry) -> None:
        self._on_member.setdefault(member, {})[entry.request.request_id] = None

    def _forget_members(self, entry: Entry) -> None:
        for member in (entry.prefill, entry.decode):
            if member:
                self._on_member[member].pop(entry.request.request_id, None)

    def _current(self, request_id: RequestId, attempt: int) -> Entry | None:
        entry = self.entries.get(request_id)
        return entry if entry is not None and entry.attempt == attempt else None


def _from_output(part: TokenLogprobs | None, first: int) -> TokenLogprobs | None:
    """Log-probabilities of the tokens from output number `first` on."""
    return None if part is None else _trim(part, first)


def _trim(part: TokenLogprobs, first: int) -> TokenLogprobs:
    skip = first - part.start
    if skip <= 0:
        return part
    return replace(part, start=part.start + skip, chosen=part.chosen[skip:], top_ids=part.top_ids[skip:],
                   top_values=part.top_values[skip:])


