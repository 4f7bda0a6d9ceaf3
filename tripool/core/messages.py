"""Every message between machines, and the five verbs between a machine and its data plane.

One request, in order (docs: ARCHITECTURE.md, "One request"):

    api      -> gateway    Submit                 a record is opened
    gateway  -> router     Route                  ids and sizes only
    router   -> gateway    Placed / Rejected      a prefill (or hybrid) member
    gateway  -> prefill    Prefill
    prefill  -> gateway    Tokens                 the first
    prefill  -> router     Prefilled              its blocks wait to be pulled
    router   -> gateway    Placed                 a decode member
    gateway  -> decode     Admit
    decode   -> prefill    Release                once pulled
    decode   -> gateway    Tokens                 ... the last, with Done
    gateway  -> router     Finished

An instance that cannot go on with one request says `AttemptFailed`; a lost instance is told by `health`
as `MemberChanged`. Either way the gateway alone tries again, as attempt n + 1, or gives up. A decode
instance that refuses an `Admit` gives the grant back, and the gateway has a member chosen anew first:

    decode   -> gateway    AttemptFailed          with the grant, which it never touched
    gateway  -> router     PlaceElsewhere
    router   -> gateway    Placed / Rejected      for the same blocks: another decode member, or the
                                                  same one once it has room, if it was only full

One that is to change its role gives its rows away with all that they have computed, and others go on with them:

    decode   -> gateway    HandOn                 its own blocks wait to be pulled
    gateway  -> router     PlaceElsewhere         ... and from here on as after a prefill

Every message about a request names its attempt, and each may arrive twice, late, or never.
"""

from __future__ import annotations

from typing import Literal, get_args

from tripool.core.machine import Address
from tripool.core.placement import Geometry, Move, PackedPlacement
from tripool.core.plan import BlockRef, Emitted, StepPlan, StepResult, TokenLogprobs
from tripool.core.request import Request, RequestId, TokenBytes
from tripool.core.value import value

Role = Literal["prefill", "decode", "hybrid"]
ROLES: tuple[Role, ...] = get_args(Role)
Stage = Literal["prefill", "decode"]
State = Literal["loading", "up", "draining", "down"]
FinishReason = Literal["stop", "length", "abort"]

# ---------------------------------------------------------------- client side


@value(frozen=True, slots=True)
class Submit:
    """api -> gateway: begin a request."""

    request: Request


@value(frozen=True, slots=True)
class Cancel:
    """api -> gateway: nobody waits for this request any more (client gone, or a stop string was met)."""

    request_id: RequestId


@value(frozen=True, slots=True)
class Output:
    """gateway -> api: more of a request. The last one has `finish` or `error`; exactly one such is sent."""

    request_id: RequestId
    tokens: TokenBytes = b""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None           # a sentence for the client
    status: int = 200                  # HTTP status that fits `error`
    retry_after_s: float | None = None
    num_cached_tokens: int | None = None    # prompt tokens whose cache entries were reused


# ---------------------------------------------------------------- placing


@value(frozen=True, slots=True)
class Route:
    """gateway -> router: choose a member for the first stage of an attempt."""

    request_id: RequestId
    attempt: int
    num_tokens: int                    # to prefill: prompt, and what earlier attempts emitted
    priority: int = 0
    avoid: Address = ""                # where the last attempt failed: taken again only if nobody else is there


@value(frozen=True, slots=True)
class Placed:
    """router -> gateway: the member for a stage. For decode, the grant comes along."""

    request_id: RequestId
    attempt: int
    stage: Stage
    member: Address
    grant: Grant | None = None


@value(frozen=True, slots=True)
class Rejected:
    """router -> gateway: 429, every place is full; 503, nobody is there; 400, nobody could ever hold it."""

    request_id: RequestId
    attempt: int
    cause: str
    status: int
    retry_after_s: float


@value(frozen=True, slots=True)
class Started:
    """gateway -> router: an attempt's first token has come, so that it no longer queues for a prefill."""

    request_id: RequestId
    attempt: int


@value(frozen=True, slots=True)
class PlaceElsewhere:
    """gateway -> router: the decode member did not take the attempt; its grant is as good for another one."""

    request_id: RequestId
    attempt: int
    refused_by: Address                # not to be chosen again, unless it was only full
    full: bool = False
    grant: Grant | None = None         # in place of the one that is known, of a row that was handed on


@value(frozen=True, slots=True)
class Finished:
    """gateway -> router: an attempt is over, however it ended."""

    request_id: RequestId
    attempt: int


# ---------------------------------------------------------------- gateway and instances


@value(frozen=True, slots=True)
class Prefill:
    """gateway -> prefill or hybrid: compute this request's cache and its next token."""

    request: Request
    attempt: int
    emitted: TokenBytes = b""          # by earlier attempts; they are computed again like the prompt


@value(frozen=True, slots=True)
class Part:
    """One block of a grant: where it lies and what proves it."""

    rank: int
    block: int
    generation: int
    checksum: int                      # xxh3_64 of the whole block extent


@value(frozen=True, slots=True)
class Grant:
    """Blocks of a prefill instance that a decode instance may copy, until `Release`, `Abort` or the end of either."""

    source: Address
    boot_id: str                       # of the source's process life
    layout: str                        # digest of the block layout; must equal the reader's own
    num_tokens: int                    # positions computed
    parts: tuple[Part, ...]


@value(frozen=True, slots=True)
class Prefilled:
    """prefill -> router: a request is ready to move on."""

    request_id: RequestId
    attempt: int
    grant: Grant
    num_tokens: int                    # prompt and emitted, for the choice of a decode member


@value(frozen=True, slots=True)
class Admit:
    """gateway -> decode: take over a prefilled request."""

    request: Request
    attempt: int
    emitted: TokenBytes                # by all attempts, the prefill's token included
    grant: Grant
    turn: int = 1                      # how often this attempt was offered: one that was full may be asked again


@value(frozen=True, slots=True)
class Release:
    """decode -> prefill: the blocks were copied (or will not be); they may go."""

    request_id: RequestId
    attempt: int


@value(frozen=True, slots=True)
class Abort:
    """gateway -> any instance: this attempt is over; drop what you hold for it. Unknown attempts are ignored.

    With a `turn` it goes on elsewhere: only what came with this turn or an earlier one is over, and it may come back.
    """

    request_id: RequestId
    attempt: int
    turn: int | None = None


@value(frozen=True, slots=True)
class Done:
    """Part of `Tokens`: an attempt ended by itself."""

    request_id: RequestId
    attempt: int
    reason: FinishReason
    num_output: int                    # output tokens of the whole request, all attempts
    stop_token: int | None = None


@value(frozen=True, slots=True)
class Tokens:
    """instance -> gateway: what one step emitted, for all of the gateway's requests at once."""

    source: Address
    emitted: tuple[Emitted, ...]
    done: tuple[Done, ...] = ()
    cached: tuple[tuple[RequestId, int, int], ...] = ()   # (request, attempt, prompt tokens reused), with a first token


@value(frozen=True, slots=True)
class AttemptFailed:
    """instance -> gateway: this attempt cannot go on here. `retry` says whether another attempt may succeed."""

    request_id: RequestId
    attempt: int
    source: Address
    cause: str
    retry: bool = True
    grant: Grant | None = None         # of an `Admit` that was refused: untouched, and not released
    full: bool = False                 # refused for lack of room alone: the same member may take it later
    turn: int = 0                      # of the `Admit` that this answers; 0 for a `Prefill`


@value(frozen=True, slots=True)
class HandOn:
    """decode -> gateway: this attempt goes on elsewhere, from these blocks. All tokens from here came before."""

    request_id: RequestId
    attempt: int
    source: Address
    grant: Grant
    turn: int                          # of the `Admit` that brought it here


# ---------------------------------------------------------------- members


@value(frozen=True, slots=True)
class Facts:
    """What an instance is: fixed for the life of its process."""

    model: str
    fingerprint: str                   # of the weights
    layout: str                        # digest of the block layout
    max_model_len: int
    block_tokens: int
    num_blocks: int                    # of all ranks together
    num_ranks: int = 1

    @property
    def num_rank_blocks(self) -> int:
        """Of one rank: what a single request can have at most."""
        return self.num_blocks // self.num_ranks


@value(frozen=True, slots=True)
class Hello:
    """instance -> health: a process has come up (again)."""

    member: Address
    role: Role
    boot_id: str


@value(frozen=True, slots=True)
class Heartbeat:
    """instance -> health, several times a second. `progress` grows with every step; busy without it is stalled."""

    member: Address
    boot_id: str
    state: State
    progress: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_blocks: int               # free or evictable
    facts: Facts | None = None         # once loaded
    load_fraction: float = 0.0         # while loading
    held: tuple[tuple[RequestId, int], ...] = ()   # the oldest attempts it holds, so that forgotten ones come to light
    role: Role | None = None           # so that a lost `Hello` does no harm
    in_step: bool = False              # a `Run` is unanswered: bounded by its own deadline, however little progresses
    line_room: int = 0                 # about how many more requests may wait here; beyond, a decode instance refuses
    becomes: Role | None = None        # the role it will serve in when it has finished what it has
    num_lost_ranks: int = 0            # of those that `facts` counts: their slots and blocks serve nobody


@value(frozen=True, slots=True)
class Lost:
    """host -> health: the connection to a member ended or its process is gone."""

    member: Address
    boot_id: str


@value(frozen=True, slots=True)
class Drain:
    """operator -> health -> instance: take no new work, finish what you have."""

    member: Address


@value(frozen=True, slots=True)
class ChangeRole:
    """scaling -> instance: take no new work, finish what you have, then serve in this role. The same role: stay in it.

    Of two, the one with the higher number counts. It is said once more, as `heard`, when it is known that the instance
    takes no new work: whatever it was still given had been sent before.
    """

    member: Address
    boot_id: str                       # the life that is meant
    number: int                        # grows from one change to the next
    role: Role
    cause: str = ""                    # for people
    heard: bool = False


@value(frozen=True, slots=True)
class Flush:
    """operator -> instance: forget cached prefixes that nobody uses at the moment."""


@value(frozen=True, slots=True)
class MemberChanged:
    """health -> router, gateway, scaling: a member's state or load."""

    member: Address
    role: Role
    boot_id: str
    state: State
    facts: Facts | None
    num_running: int = 0
    num_waiting_tokens: int = 0
    num_free_blocks: int = 0
    cause: str = ""
    line_room: int = 0
    num_waiting: int = 0
    num_lost_ranks: int = 0


@value(frozen=True, slots=True)
class Tick:
    """A machine's timer to itself. `about` says which, `token` which life of it."""

    about: str
    token: int = 0


# ---------------------------------------------------------------- the five verbs


@value(frozen=True, slots=True)
class Fetch:
    """pool -> this instance's cache: the longest run of leading `keys` that the pool has."""

    verb_id: int
    deadline_s: float
    rank: int
    keys: tuple[bytes, ...]
    into: tuple[BlockRef, ...]


@value(frozen=True, slots=True)
class Fetched:
    """How many leading blocks arrived whole and proved; the rest of `into` is as good as unwritten."""

    verb_id: int
    num_blocks: int
    checksums: tuple[int, ...] = ()    # of those blocks


@value(frozen=True, slots=True)
class Run:
    """One step of the engine."""

    verb_id: int
    deadline_s: float
    plan: StepPlan


@value(frozen=True, slots=True)
class Ran:
    """The step was taken, or given up on some or all ranks (see `StepResult.aborted`)."""

    verb_id: int
    result: StepResult


@value(frozen=True, slots=True)
class Store:
    """this instance's cache -> pool, in the background."""

    verb_id: int
    deadline_s: float
    rank: int
    keys: tuple[bytes, ...]
    blocks: tuple[BlockRef, ...]


@value(frozen=True, slots=True)
class Stored:
    verb_id: int
    num_new: int


@value(frozen=True, slots=True)
class Pull:
    """a prefill instance's cache -> this instance's cache, each block proved by generation and checksum."""

    verb_id: int
    deadline_s: float
    rank: int
    grant: Grant
    into: tuple[BlockRef, ...]


@value(frozen=True, slots=True)
class Pulled:
    verb_id: int


@value(frozen=True, slots=True)
class Load:
    """pool or disk -> weights."""

    verb_id: int
    deadline_s: float


@value(frozen=True, slots=True)
class ExpertFacts:
    """What an instance is told of its experts once they are loaded, to spread them over its ranks from then on."""

    geometry: Geometry
    placement: PackedPlacement         # the map with which it starts
    expert_bytes: int                  # of one expert of one layer, as it lies in memory
    seconds_per_token: float           # one expert takes so much longer per token more, as measured when loaded
    room_tokens: int                   # of a rank that one exchange takes; larger batches go in rounds


@value(frozen=True, slots=True)
class Loaded:
    verb_id: int
    facts: Facts
    experts: ExpertFacts | None = None     # None: the model has none


@value(frozen=True, slots=True)
class LoadProgress:
    """data plane -> its machine, while a `Load` runs. Not an answer."""

    fraction: float


@value(frozen=True, slots=True)
class MoveExperts:
    """The form of `Load` that changes a placement: copy experts, whole, into slots that no map in use names.

    Answered exactly once before `deadline_s` (seconds from when it was sent), by `ExpertsMoved` when every copy is
    whole and proved, or by `Failed`; either answer says that nothing is written any more.
    """

    verb_id: int
    deadline_s: float
    moves: tuple[Move, ...]


@value(frozen=True, slots=True)
class ExpertsMoved:
    verb_id: int


@value(frozen=True, slots=True)
class RankLost:
    """data plane -> its machine: a rank's process is gone or fenced off, and with it its rows and expert slots.

    Its blocks stay readable. If a `Run` is unanswered, its answer comes after this.
    """

    rank: int
    cause: str = ""


@value(frozen=True, slots=True)
class RankBack:
    """data plane -> its machine: a new process has the rank. `held`: int16 experts in its slots, by layer, packed."""

    rank: int
    held: bytes                        # EMPTY for a slot with nothing in it


@value(frozen=True, slots=True)
class Rebalance:
    """operator -> instance: spread the experts anew now, without weighing costs; with a `goal` towards this map."""

    goal: PackedPlacement | None = None


@value(frozen=True, slots=True)
class Failed:
    """The other answer to any verb. `cause` is a sentence that names what failed."""

    verb_id: int
    cause: str


MESSAGES: tuple[type, ...] = (
    Submit, Cancel, Output, Route, Placed, Rejected, Started, Finished, Prefill, Prefilled, Admit, Release, Abort,
    Tokens, AttemptFailed, Hello, Heartbeat, Lost, Drain, Flush, MemberChanged, Tick,
    Fetch, Fetched, Run, Ran, Store, Stored, Pull, Pulled, Load, Loaded, LoadProgress, Failed, PlaceElsewhere,
    MoveExperts, ExpertsMoved, RankLost, RankBack, Rebalance, ChangeRole,
    HandOn,
)
"""All messages. What may cross a link between processes is chosen in `serve.wire`."""
