"""What recordings of a deployment say about its machine: how long steps, copies and messages took.

A recording (`serve.recording`) has every message that a scheduler took and sent, with the time; all processes of a
machine read one clock. A step is as long as its scheduler waits for it, from asking for it to the answer: the engine,
and what lies between the two. That is what a simulated scheduler waits for, too. Who computed in a step, and with how
much context, is followed from plan to plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tripool.core import messages as m
from tripool.core.machine import Address
from tripool.core.plan import StepPlan, StepResult
from tripool.core.request import RequestId, num_tokens
from tripool.core.timeline import Record
from tripool.serve.recording import read_recording

Key = tuple[str, RequestId, int]
"""A message that is looked for in two recordings: its kind, a request, and its attempt or its first token's number."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an instance. Of several ranks, what the one with the most of it had to do."""

    member: Address
    begun_s: float
    ended_s: float
    engine_s: float                # of them in the engine
    num_rows: int                  # that decode, on all ranks
    tokens: int                    # of rows that decode, drafts included
    context: float                 # tokens in the cache of each such row, on average
    chunk_tokens: int
    chunk_first: float             # from which position; of several chunks, of one that costs as much

    @property
    def seconds(self) -> float:
        return self.ended_s - self.begun_s

    @property
    def computes(self) -> bool:
        return bool(self.tokens or self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class Copy:
    """One `Pull`, `Fetch` or `Store`."""

    kind: str
    begun_s: float
    seconds: float
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Hop:
    """One message on its way from process to process."""

    kind: str
    sent_s: float
    seconds: float


@dataclass(slots=True)
class Readings:
    """All that was found."""

    steps: list[Step] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    hops: list[Hop] = field(default_factory=list)
    first_s: dict[RequestId, float] = field(default_factory=dict)
    """From a request's arrival at its instance to the step that brought its first token."""

    submitted_s: dict[RequestId, float] = field(default_factory=dict)
    """When the gateway took it."""

    def without(self, spans: Sequence[tuple[float, float]]) -> Readings:
        """The same but for what began in one of these spans of time."""
        def is_ours(at_s: float) -> bool:
            return not any(begun_s <= at_s <= ended_s for begun_s, ended_s in spans)

        return Readings([each for each in self.steps if is_ours(each.begun_s)],
                        [each for each in self.copies if is_ours(each.begun_s)],
                        [each for each in self.hops if is_ours(each.sent_s)],
                        self.first_s, {name: at_s for name, at_s in self.submitted_s.items() if is_ours(at_s)})


@dataclass(slots=True)
class Row:
    """A request in a slot."""

    request_id: RequestId
    known: int                     # tokens
    computed: int


class Follower:
    """Reads the steps and copies of one instance."""

    def __init__(self, member: Address) -> None:
        self.member = member
        self.steps: list[Step] = []
        self.copies: list[Copy] = []
        self._rows: dict[tuple[int, int], Row] = {}
        self._places: dict[RequestId, tuple[int, int]] = {}
        self._run: tuple[float, StepPlan] | None = None
        self._asked: dict[int, tuple[float, m.Pull | m.Fetch | m.Store]] = {}

    def take(self, record: Record) -> None:
        message = record.message
        if isinstance(message, m.Ran):
            self._end(message.result, record.now)
        elif isinstance(message, m.Pulled | m.Fetched | m.Stored):
            self._copied(message, record.now)
        for send in record.sends:
            if isinstance(send.message, m.Run):
                self._run = record.now, send.message.plan
            elif isinstance(send.message, m.Pull | m.Fetch | m.Store):
                self._asked[send.message.verb_id] = record.now, send.message

    def _copied(self, answer: m.Pulled | m.Fetched | m.Stored, now: float) -> None:
        begun_s, verb = self._asked.pop(answer.verb_id)
        if isinstance(verb, m.Pull):
            num_blocks = len(verb.into)
        else:
            num_blocks = answer.num_blocks if isinstance(answer, m.Fetched) else getattr(answer, "num_new", 0)
        self.copies.append(Copy(type(verb).__name__, begun_s, now - begun_s, num_blocks))

    def _end(self, result: StepResult, now: float) -> None:
        """A step is over. Only now is its plan looked at: nothing else happens to rows meanwhile."""
        if self._run is None:
            return
        (begun_s, plan), self._run = self._run, None
        num_ranks = len(plan.sections)
        rows, context, chunk, pairs = ([0.0] * num_ranks for _ in range(4))
        chunks: dict[tuple[int, int], int] = {}
        for rank, section in enumerate(plan.sections):
            for slot in section.leaves:
                self._leave(rank, slot)
            for join in section.joins:
                self._rows[rank, join.slot] = Row(join.request_id, num_tokens(join.tokens), join.num_computed)
                self._places[join.request_id] = rank, join.slot
            for each in section.chunks:
                chunks[rank, each.slot] = each.num_tokens
                first = self._rows[rank, each.slot].computed
                chunk[rank] += each.num_tokens
                pairs[rank] += each.num_tokens * (first + 0.5 * each.num_tokens)
        for place, row in self._rows.items():
            if place not in chunks and row.known - row.computed == 1:
                rows[place[0]] += 1
                context[place[0]] += row.computed
        drafted = [sum(each.num_drafted) for each in result.ranks]
        tokens = [int(count) + more for count, more in zip(rows, drafted, strict=True)]
        busiest = max(range(num_ranks), key=lambda rank: tokens[rank])
        fullest = max(range(num_ranks), key=lambda rank: chunk[rank])
        if not result.aborted:
            self.steps.append(Step(
                self.member, begun_s, now, result.seconds, int(sum(rows)), tokens[busiest],
                context[busiest] / max(rows[busiest], 1.0), int(chunk[fullest]),
                pairs[fullest] / chunk[fullest] - 0.5 * chunk[fullest] if chunk[fullest] else 0.0))
        self._settle(chunks, result)

    def _settle(self, chunks: dict[tuple[int, int], int], result: StepResult) -> None:
        for place, count in chunks.items():
            self._rows[place].computed += count
        for rank, each in enumerate(result.ranks):
            for emitted in each.emitted:
                for request_id, _, _, tokens in emitted.columns.rows():
                    row = self._rows[self._places[request_id]]
                    row.known += num_tokens(tokens)
                    row.computed = row.known - 1
            for left in each.left:
                self._leave(rank, left.slot)

    def _leave(self, rank: int, slot: int) -> None:
        row = self._rows.pop((rank, slot), None)
        if row is not None and self._places.get(row.request_id) == (rank, slot):
            del self._places[row.request_id]


def read_readings(folder: Path) -> Readings:
    """All recordings of a folder, of one run of a deployment.

    Raises:
        WireError: a file is not a recording.
    """
    found = Readings()
    sent: dict[Key, float] = {}
    came: dict[Key, float] = {}
    arrived_s: dict[RequestId, float] = {}
    for path in sorted(each for each in folder.iterdir() if each.is_file()):
        setup, records = read_recording(path)
        follower = Follower(setup.member) if setup.role != "gateway" else None
        for record in records:
            if follower is not None:
                follower.take(record)
            for key in _keys(record.message):
                came.setdefault(key, record.now)
            for send in record.sends:
                if send.to.partition("/")[0] != setup.member:
                    for key in _keys(send.message):
                        sent.setdefault(key, record.now)
            match record.message:
                case m.Submit(request):
                    found.submitted_s[request.request_id] = record.now
                case m.Prefill(request):
                    arrived_s.setdefault(request.request_id, record.now)
        if follower is not None:
            found.steps += follower.steps
            found.copies += follower.copies
    found.steps.sort(key=lambda step: step.begun_s)
    found.hops = sorted((Hop(key[0], at_s, came[key] - at_s) for key, at_s in sent.items() if key in came),
                        key=lambda hop: hop.sent_s)
    for (kind, request_id, start), at_s in sent.items():
        if kind == "Tokens" and start == 0 and request_id in arrived_s:
            found.first_s[request_id] = at_s - arrived_s[request_id]
    return found


def _keys(message: object) -> Iterable[Key]:
    match message:
        case m.Prefill() | m.Admit():
            return ((type(message).__name__, message.request.request_id, message.attempt),)
        case m.Prefilled():
            return (("Prefilled", message.request_id, message.attempt),)
        case m.Tokens():
            return [("Tokens", request_id, start) for emitted in message.emitted
                    for request_id, _, start, _ in emitted.columns.rows()]
    return ()

