"""Experts move while requests run, and every one stays reachable when ranks come and go.

A map that is in use is never touched. To move an expert, a version of the map stops naming a slot (only one whose
expert has another copy), the slot is filled once no step can read it any more, and a further version names it again.
`Rebalancer` is the machine that does so, layer by layer, towards the placement that `control.balance` finds, and that
takes dead ranks out of the map and returning ones back in. It knows tokens counted per expert and bytes of an expert;
it knows no requests, tensors or links.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from tripool.control.balance import LoadStatistics, Placer, max_over_mean, rank_loads
from tripool.core.errors import ConfigError, WireError
from tripool.core.machine import Address, Message, Send
from tripool.core.messages import ExpertsMoved, Failed, MoveExperts, RankBack, RankLost, Rebalance, Tick
from tripool.core.placement import (
    DISK,
    EMPTY,
    Edit,
    Geometry,
    MapChange,
    Move,
    PackedPlacement,
    Placement,
    SlotId,
    pack_edits,
    unpack,
)

# ---------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class StepReport:
    """scheduler -> rebalancer: `num_steps` steps were answered. Lost or doubled ones do no harm."""

    oldest_version: int        # no unanswered `Run` and no plan to come names an older map (see `LiveVersions`)
    num_steps: int
    counts: bytes              # int32 tokens of these steps per MoE layer and logical expert, packed; empty: unknown


@dataclass(frozen=True, slots=True)
class MapInUse:
    """scheduler -> rebalancer: as soon as `oldest_version` grows, whether or not steps run."""

    oldest_version: int


@dataclass(frozen=True, slots=True)
class NewMap:
    """rebalancer -> scheduler: plans from now on name this version. Versions come in order, none is left out.

    `lost_ranks` is the mask of the version: it names none of their slots. `num_losses` counts the ranks lost so far
    (one that comes back although its end was never told was lost too): whoever has counted more makes no plan before it
    has taken a version with as many. With `runnable` False some experts are in no slot: take the version, make no plan,
    and report as usual that older versions are no longer in use; a runnable version follows once they are loaded.
    """

    change: MapChange
    runnable: bool = True
    lost_ranks: tuple[int, ...] = ()
    num_losses: int = 0
    cause: str = ""            # why not runnable


@dataclass(frozen=True, slots=True)
class Unservable:
    """rebalancer -> scheduler: some experts can be brought into no slot. A returning rank may end this."""

    cause: str


class LiveVersions:
    """Kept by whoever sends `Run`: the oldest map that a step under way or a plan to come may name."""

    def __init__(self, version: int) -> None:
        self.newest = version
        self._running: dict[int, int] = {}

    def take(self, version: int) -> None:
        """Plans from now on name this version."""
        self.newest = max(self.newest, version)

    def started(self, verb_id: int) -> None:
        """A `Run` was sent, with the newest version."""
        self._running[verb_id] = self.newest

    def ended(self, verb_id: int) -> int:
        """It was answered; returns the version that it named."""
        return self._running.pop(verb_id, self.newest)

    @property
    def oldest(self) -> int:
        return min(self._running.values(), default=self.newest)


# ---------------------------------------------------------------- the machine


@dataclass(frozen=True, slots=True)
class RebalanceSettings:
    """What a move costs and brings. Seconds and bytes; checked when built."""

    expert_bytes: int                      # of one expert of one layer with all its tensors
    seconds_per_token: float               # a step lasts so much longer per token more on a layer's busiest rank
    bytes_per_s: float                     # at which one rank copies experts while it serves
    horizon_steps: int = 10_000            # for how long a placement is expected to fit
    interference: float = 0.2              # by what share of a copy's duration the steps beside it are late
    half_life_steps: float = 1_000.0       # of the load statistics
    min_steps: int = 100                   # counted before the first placement, and again after a rank came or went
    interval_steps: int = 1_000            # from one pass over all layers to the next
    plan_layers: int = 2                   # layers looked at per report: placing one takes milliseconds
    chunk_layers: int = 1                  # layers changed at the same time
    chunk_bytes: int = 1 << 30             # in one `MoveExperts`
    move_deadline_s: float = 30.0
    retry_s: float = 5.0                   # after a failed move
    max_failures: int = 3                  # of loads in a row before `Unservable` is said
    automatic: bool = True                 # look at the balance by itself; False: only when told to

    def __post_init__(self) -> None:
        for name in ("expert_bytes", "seconds_per_token", "bytes_per_s", "horizon_steps", "half_life_steps",
                     "interval_steps", "plan_layers", "chunk_layers", "move_deadline_s", "retry_s", "max_failures"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"experts.{name} is {getattr(self, name)}; it must be above 0")
        if self.interference < 0 or self.min_steps < 0:
            raise ConfigError(f"experts.interference is {self.interference} and experts.min_steps {self.min_steps}; "
                              f"neither may be below 0")
        if self.chunk_bytes < self.expert_bytes:
            raise ConfigError(f"experts.chunk_bytes is {self.chunk_bytes}, less than the {self.expert_bytes} of one "
                              f"expert")

    @property
    def chunk_moves(self) -> int:
        return self.chunk_bytes // self.expert_bytes


@dataclass(frozen=True, slots=True)
class ExpertFigures:
    """For metrics and pictures. `before` and `after` are max/mean of load over the living ranks, one per MoE layer."""

    version: int
    oldest_version: int
    runnable: bool
    before: tuple[float, ...]              # when the layer was last looked at, with the placement and loads of then
    after: tuple[float, ...]               # with those of now
    lost_ranks: tuple[int, ...]
    num_steps: int
    num_planned: int                       # layers looked at
    num_gated: int                         # layers whose better placement was not worth its moves
    num_changed: int                       # layers brought to a new placement
    num_blocked: int                       # layers that could not be, because no slot can be spared
    num_moves: int                         # experts copied
    moved_bytes: int
    num_failures: int                      # requests to the data plane that failed or were not answered in time
    cause: str                             # of the last failure or refusal


@dataclass(slots=True)
class _Flight:
    """An unanswered `MoveExperts`. `lives` says in which life of its rank each target was."""

    moves: tuple[Move, ...]
    lives: tuple[int, ...]
    urgent: bool                           # brings back experts that are in no slot
    late: bool = False


@dataclass(slots=True)
class _Task:
    """A layer on its way: `goals` are reached from the last to the first; those after the first make room."""

    goals: list[list[int]]
    num_staged: int = 0


class Rebalancer:
    """Moves the experts of one instance while it serves, and keeps every expert reachable when ranks come and go.

    The scheduler takes every `NewMap` in order, and says by `MapInUse` and `StepReport` which versions are still named;
    the data plane answers every `MoveExperts`. With as many slots as experts, and no slot empty, nothing can be moved
    while steps run: give each layer at least one slot more.
    """

    def __init__(self, geometry: Geometry, placement: Placement, settings: RebalanceSettings, *,
                 address: Address = "experts", scheduler: Address = "scheduler", dataplane: Address = "dataplane",
                 new_verb_id: Callable[[], int] | None = None) -> None:
        placement.check()
        if placement.slots_per_rank != geometry.slots_per_rank or placement.num_experts != geometry.num_experts:
            raise ConfigError(f"the expert map has {placement.num_experts} experts on ranks with "
                              f"{list(placement.slots_per_rank)} slots, the instance {geometry.num_experts} on "
                              f"{list(geometry.slots_per_rank)}")
        self.geometry, self.settings = geometry, settings
        self.address, self.scheduler, self.dataplane = address, scheduler, dataplane
        self.num_layers = len(placement.layers)
        self.version = self.oldest_version = placement.version
        self.alive = [True] * geometry.num_ranks
        self.runnable = True
        self.stats = LoadStatistics(self.num_layers, geometry.num_experts, settings.half_life_steps)
        self._rank_of = geometry.rank_of_slots()
        self._shared = dict.fromkeys(geometry.shared_slots)
        self._placer = Placer(geometry)
        self._named = [list(experts) for experts in placement.layers]     # by the newest map
        self._held = [list(experts) for experts in placement.layers]      # whole in the slot, named or not
        self._unnamed_since = [[placement.version] * geometry.num_slots for _ in placement.layers]
        self._busy: dict[tuple[int, SlotId], int] = {}                    # written by this unanswered verb
        self._lives = [0] * geometry.num_ranks
        self._num_losses = 0
        self._flights: dict[int, _Flight] = {}
        self._tasks: dict[int, _Task] = {}                                # by layer, in the order of work
        self._missing: dict[int, list[int]] = {}                          # experts of a layer that no slot names
        self._new_verb_id = new_verb_id or count(1).__next__
        self._next_layer = 0                                              # of the pass under way
        self._pass_at = settings.min_steps                                # steps counted before the next pass begins
        self._not_before = 0.0
        self._failures_in_row = 0
        self._told_unservable = False
        self._before = [1.0] * self.num_layers
        self._tally = _Tally()

    @property
    def placement(self) -> Placement:
        """The newest map."""
        return Placement(self.version, self.geometry.num_experts, self.geometry.slots_per_rank,
                         tuple(tuple(experts) for experts in self._named))

    @property
    def is_moving(self) -> bool:
        """Whether a change is under way."""
        return bool(self._tasks or self._flights)

    def figures(self) -> ExpertFigures:
        """A look at all of it; takes milliseconds for a large instance."""
        tally = self._tally
        after = tuple(max_over_mean(experts, self.stats.layer(layer), self._rank_of, self.alive)
                      for layer, experts in enumerate(self._named))
        return ExpertFigures(
            self.version, self.oldest_version, self.runnable, tuple(self._before), after,
            tuple(rank for rank, lives in enumerate(self.alive) if not lives), self.stats.num_steps, tally.planned,
            tally.gated, tally.changed, tally.blocked, tally.moves, tally.moves * self.settings.expert_bytes,
            tally.failures, tally.cause)

    def handle(self, message: Message, now: float) -> list[Send]:
        match message:
            case StepReport(oldest_version, num_steps, counts):
                self._retire(oldest_version)
                if counts:
                    self.stats.add(counts, num_steps)
                self._plan(now)
                return self._advance()
            case MapInUse(oldest_version):
                self._retire(oldest_version)
                return self._advance()
            case ExpertsMoved(verb_id):
                return self._answered(verb_id, "", now)
            case Failed(verb_id, cause):
                return self._answered(verb_id, cause, now)
            case Tick("experts-late", verb_id):
                return self._late(verb_id, now)
            case Tick("experts-retry"):
                return self._recover() if self._missing and not self._tasks else []
            case RankLost(rank):
                return self._lost(rank)
            case RankBack(rank, held):
                return self._back(rank, held)
            case Rebalance(goal):
                return self._forced(goal)
        return []

    # ------------------------------------------------------------ deciding

    def _plan(self, now: float) -> None:
        """Look at the next layers of the pass, once nothing else is under way."""
        settings = self.settings
        if (not settings.automatic or self.is_moving or self._missing or now < self._not_before
                or self.stats.num_steps < self._pass_at):
            return
        for _ in range(settings.plan_layers):
            self._plan_layer(self._next_layer, gated=True)
            self._next_layer += 1
            if self._next_layer == self.num_layers:
                self._next_layer = 0
                self._pass_at = self.stats.num_steps + settings.interval_steps
                return

    def _plan_layer(self, layer: int, *, gated: bool) -> None:
        """Make a task of the layer if a better placement pays for its moves."""
        settings, placer, named = self.settings, self._placer, self._named[layer]
        loads = self.stats.layer(layer)
        self._before[layer] = max_over_mean(named, loads, self._rank_of, self.alive)
        self._tally.planned += 1
        step_seconds = settings.seconds_per_token * settings.horizon_steps    # per token on the busiest rank
        copy_seconds = settings.expert_bytes / settings.bytes_per_s * settings.interference
        move_load = copy_seconds * 2 / max(1, sum(self.alive)) / step_seconds
        present = self._present(layer)
        goal = placer.place(loads, present, move_load=move_load)
        if goal == named:
            return
        gain_s = (placer.peak(named, loads) - placer.peak(goal, loads)) * step_seconds
        if gated and gain_s <= self._busiest_copies(layer, goal) * copy_seconds:
            self._tally.gated += 1
            return
        self._tasks[layer] = _Task([goal])

    def _present(self, layer: int) -> list[int]:
        """What the slots of a layer hold, as far as it can be used."""
        return [held if (layer, slot) not in self._busy else EMPTY for slot, held in enumerate(self._held[layer])]

    def _busiest_copies(self, layer: int, goal: Sequence[int]) -> int:
        """How many experts the rank with the most of them would have to receive and send."""
        ends = [0] * self.geometry.num_ranks
        for slot, expert in enumerate(goal):
            if expert not in (EMPTY, self._held[layer][slot]):
                ends[self._rank_of[slot]] += 1
                source = self._source(layer, expert, {}, ends)
                if source != DISK:
                    ends[self._rank_of[source]] += 1
        return max(ends)

    def _forced(self, packed: PackedPlacement | None) -> list[Send]:
        if self._missing or self.is_moving:
            self._tally.cause = "a rebalance was asked for while another change was under way"
            return []
        if packed is None:
            for layer in range(self.num_layers):
                self._plan_layer(layer, gated=False)
            return self._advance()
        try:
            goal = unpack(packed)
            goal.check()
        except (WireError, ConfigError) as error:
            self._tally.cause = f"the map to rebalance to was refused: {error}"
            return []
        dead = [rank for rank, lives in enumerate(self.alive) if not lives]
        if (goal.slots_per_rank, len(goal.layers)) != (self.geometry.slots_per_rank, self.num_layers):
            self._tally.cause = "the map to rebalance to is of another geometry"
            return []
        if any(experts[slot] != EMPTY for experts in goal.layers for rank in dead for slot in goal.slots_of_rank(rank)):
            self._tally.cause = f"the map to rebalance to names slots of lost ranks {dead}"
            return []
        for layer, experts in enumerate(goal.layers):
            if list(experts) != self._named[layer]:
                self._tasks[layer] = _Task([list(experts)])
        return self._advance()

    # ------------------------------------------------------------ moving

    def _retire(self, oldest_version: int) -> None:
        self.oldest_version = max(self.oldest_version, min(oldest_version, self.version))

    def _may_write(self, layer: int, slot: SlotId) -> bool:
        """No map that a step may still use names the slot, no verb writes to it, and its rank lives."""
        return (self._named[layer][slot] == EMPTY and self._unnamed_since[layer][slot] <= self.oldest_version
                and (layer, slot) not in self._busy and self.alive[self._rank_of[slot]])

    def _advance(self) -> list[Send]:
        """Go as far as possible without an answer: name what is there, drop what can be spared, ask for copies."""
        sends: list[Send] = []
        while True:
            edits: list[Edit] = []
            layers = self._layers_at_work()
            for layer in layers:
                edits += self._edit(layer)
            sends += self._publish(edits)
            done = [layer for layer in layers if self._named[layer] == self._tasks[layer].goals[-1]]
            for layer in done:
                task = self._tasks[layer]
                task.goals.pop()
                if not task.goals:
                    del self._tasks[layer]
                    self._tally.changed += 1
            if done:
                continue
            sends += self._ask(layers)
            stuck = [layer for layer in layers if not edits and self._is_stuck(layer)]
            for layer in stuck:
                self._make_room(layer)
            if not stuck:
                return sends

    def _layers_at_work(self) -> list[int]:
        if self._missing:
            return [layer for layer in self._tasks if layer in self._missing]
        return list(self._tasks)[:self.settings.chunk_layers]

    def _edit(self, layer: int) -> list[Edit]:
        """How the layer's map can come closer to its goal at once, without an expert losing its last copy."""
        goal, named, held = self._tasks[layer].goals[-1], list(self._named[layer]), self._held[layer]
        for slot, expert in enumerate(goal):
            if expert != EMPTY and named[slot] == EMPTY and held[slot] == expert and self._is_usable(layer, slot):
                self._name(named, slot, expert)
        copies = [0] * self.geometry.num_experts
        for expert in named:
            if expert != EMPTY:
                copies[expert] += 1
        loads = self.stats.layer(layer)
        wrong = [slot for slot, expert in enumerate(named) if expert not in (EMPTY, goal[slot])]
        wrong.sort(key=lambda slot: (loads[named[slot]] / max(1, copies[named[slot]] - 1), slot))
        open_slots = sum(named[slot] == EMPTY and goal[slot] != EMPTY for slot in range(len(goal)))
        budget = len(goal) if self._missing else max(0, self.settings.chunk_moves - open_slots)
        for slot in wrong:
            if copies[named[slot]] > 1 and (budget > 0 or goal[slot] == EMPTY):
                copies[named[slot]] -= 1
                budget -= goal[slot] != EMPTY
                named[slot] = EMPTY
        return [Edit(layer, slot, new) for slot, (old, new) in enumerate(zip(self._named[layer], named, strict=True))
                if new != old]

    def _is_usable(self, layer: int, slot: SlotId) -> bool:
        return (layer, slot) not in self._busy and self.alive[self._rank_of[slot]]

    def _name(self, named: list[int], slot: SlotId, expert: int) -> None:
        """Name a slot, in place of another one of the same rank with the same expert."""
        rank = self._rank_of[slot]
        for other, there in enumerate(named):
            if there == expert and self._rank_of[other] == rank:
                named[other] = EMPTY
        named[slot] = expert

    def _publish(self, edits: Sequence[Edit], cause: str = "", *, mask_changed: bool = False) -> list[Send]:
        """The next version of the map, if there is anything to say."""
        if not edits and not mask_changed:
            return []
        version = self.version + 1
        for edit in edits:
            if edit.expert == EMPTY:
                self._unnamed_since[edit.layer][edit.slot] = version
            self._named[edit.layer][edit.slot] = edit.expert
        for layer in dict.fromkeys(edit.layer for edit in edits):
            present = dict.fromkeys(self._named[layer])
            lacking = [expert for expert in range(self.geometry.num_experts) if expert not in present]
            self._missing.pop(layer, None)
            if lacking:
                self._missing[layer] = lacking
        change = MapChange(self.version, version, pack_edits(edits))
        self.version = version
        was_runnable, self.runnable = self.runnable, not self._missing
        assert self.runnable or cause or not was_runnable, "a change took the last copy of an expert off the map"
        if not self.runnable:
            cause = cause or self._lack()
        else:
            self._told_unservable, self._failures_in_row = False, 0
        lost_ranks = tuple(rank for rank, lives in enumerate(self.alive) if not lives)
        return [Send(self.scheduler, NewMap(change, self.runnable, lost_ranks, self._num_losses,
                                            "" if self.runnable else cause))]

    def _lack(self) -> str:
        layer, experts = next(iter(self._missing.items()))
        return (f"{sum(map(len, self._missing.values()))} experts are on no living rank "
                f"(layer {layer}: {experts[:8]}{' …' if len(experts) > 8 else ''})")

    def _ask(self, layers: Sequence[int]) -> list[Send]:
        """Ask for the copies that may be made now, as many as one request may have."""
        urgent = bool(self._missing)
        if any(not flight.late and (flight.urgent or not urgent) for flight in self._flights.values()):
            return []
        targets: dict[tuple[int, SlotId], int] = {}
        for layer in layers:
            goal, held = self._tasks[layer].goals[-1], self._held[layer]
            lacking = dict.fromkeys(self._missing.get(layer, ()))
            for slot, expert in sorted(enumerate(goal), key=lambda pair: (pair[1] not in lacking, pair[0])):
                if expert not in (EMPTY, held[slot]) and self._may_write(layer, slot):
                    if len(targets) < self.settings.chunk_moves:
                        targets[layer, slot] = expert
        if not targets:
            return []
        moves, ends = [], [0] * self.geometry.num_ranks
        for (layer, slot), expert in targets.items():
            source = self._source(layer, expert, targets, ends)
            if source != DISK:
                ends[self._rank_of[source]] += 1
            moves.append(Move(layer, source, slot, expert))
        verb_id = self._new_verb_id()
        for move in moves:
            self._busy[move.layer, move.to_slot] = verb_id
            self._held[move.layer][move.to_slot] = EMPTY
        lives = tuple(self._lives[self._rank_of[move.to_slot]] for move in moves)
        self._flights[verb_id] = _Flight(tuple(moves), lives, urgent)
        deadline_s = self.settings.move_deadline_s
        return [Send(self.dataplane, MoveExperts(verb_id, deadline_s, tuple(moves))),
                Send(self.address, Tick("experts-late", verb_id), delay_s=1.25 * deadline_s)]

    def _source(self, layer: int, expert: int, targets: dict[tuple[int, SlotId], int], ends: Sequence[int]) -> SlotId:
        """A slot with a whole copy that stays: a named one first, on the rank that sends least."""
        best = None
        for slot, held in enumerate(self._held[layer]):
            if held == expert and self._is_usable(layer, slot) and (layer, slot) not in targets:
                key = self._named[layer][slot] != expert, ends[self._rank_of[slot]], slot
                best = key if best is None or key < best else best
        return DISK if best is None else best[2]

    def _is_stuck(self, layer: int) -> bool:
        """Nothing more will change by itself: no slot of the layer waits for an answer or for old maps to end."""
        goal, named = self._tasks[layer].goals[-1], self._named[layer]
        if any(not flight.late for flight in self._flights.values()):
            return False
        for slot, expert in enumerate(goal):
            if expert != EMPTY and named[slot] == EMPTY and (layer, slot) not in self._busy:
                return False                                  # waits for `oldest_version`, or is about to be filled
        return True

    def _make_room(self, layer: int) -> None:
        """Experts without copies stand in each other's places: one steps aside into a slot that can be spared."""
        task, named = self._tasks[layer], self._named[layer]
        goal = task.goals[-1]
        copies = [0] * self.geometry.num_experts
        for expert in named:
            if expert != EMPTY:
                copies[expert] += 1
        loads = self.stats.layer(layer)
        spare = []
        for slot, expert in enumerate(named):
            if slot in self._shared or not self._is_usable(layer, slot):
                continue
            if expert == EMPTY:
                spare.append((0, 0.0, slot))
            elif copies[expert] > 1:
                spare.append((1, loads[expert] / (copies[expert] - 1), slot))
        standing = [slot for slot, expert in enumerate(named) if expert not in (EMPTY, goal[slot])]
        standing.sort(key=lambda slot: (goal[slot] == EMPTY, slot))
        task.num_staged += 1
        if not spare or not standing or task.num_staged > len(goal):
            del self._tasks[layer]
            self._tally.blocked += 1
            self._tally.cause = f"layer {layer}: no slot can be spared to move experts through; add a redundant slot"
            return
        aside, first = min(spare)[2], standing[0]
        step = list(named)
        step[aside], step[first] = named[first], EMPTY
        task.goals.append(step)

    # ------------------------------------------------------------ answers

    def _answered(self, verb_id: int, cause: str, now: float) -> list[Send]:
        flight = self._flights.pop(verb_id, None)
        if flight is None:
            return []
        for move, life in zip(flight.moves, flight.lives, strict=True):
            del self._busy[move.layer, move.to_slot]
            if not cause and life == self._lives[self._rank_of[move.to_slot]]:
                self._held[move.layer][move.to_slot] = move.expert
        if not cause:
            self._failures_in_row = 0
            self._tally.moves += len(flight.moves)
        elif not flight.late:
            return self._failed(cause, now)
        if self._missing and not self._tasks:
            return self._recover()                            # the slots that were written may help
        return self._advance()

    def _late(self, verb_id: int, now: float) -> list[Send]:
        """An answer is overdue. Its slots stay untouched until it comes; everything else goes on without it."""
        flight = self._flights.get(verb_id)
        if flight is None or flight.late:
            return []
        flight.late = True
        return self._failed("copying experts was not answered before its deadline", now)

    def _failed(self, cause: str, now: float) -> list[Send]:
        """The map of now stays. Copies that were dropped from it but are still whole are named again."""
        self._tally.failures += 1
        self._tally.cause = cause
        self._failures_in_row += 1
        self._not_before = now + self.settings.retry_s
        touched = self._layers_at_work()
        self._tasks.clear()
        if not self._missing:
            return self._publish([edit for layer in touched for edit in self._name_held(layer)])
        if self._failures_in_row < self.settings.max_failures:
            return self._recover()
        sends = [Send(self.address, Tick("experts-retry"), delay_s=self.settings.retry_s)]
        if not self._told_unservable:
            self._told_unservable = True
            sends.append(Send(self.scheduler, Unservable(f"{self._lack()}; loading them failed: {cause}")))
        return sends

    def _name_held(self, layer: int) -> list[Edit]:
        """Name every whole copy of a layer that no map names, except beside another one on the same rank."""
        named = self._named[layer]
        there = {(expert, self._rank_of[slot]) for slot, expert in enumerate(named)}
        edits = []
        for slot, expert in enumerate(self._held[layer]):
            key = expert, self._rank_of[slot]
            if expert != EMPTY and named[slot] == EMPTY and self._is_usable(layer, slot) and key not in there:
                there.add(key)
                edits.append(Edit(layer, slot, expert))
        return edits

    # ------------------------------------------------------------ ranks that come and go

    def _lost(self, rank: int) -> list[Send]:
        if not self.alive[rank]:
            return []
        self.alive[rank] = False
        self._num_losses += 1
        self._rank_changed(rank)
        edits = []
        for layer, named in enumerate(self._named):
            for slot in self._slots_of(rank):
                self._held[layer][slot] = EMPTY
                if named[slot] != EMPTY:
                    edits.append(Edit(layer, slot, EMPTY))
        for layer in range(self.num_layers):
            edits += self._name_held(layer)
        sends = self._publish(edits, f"rank {rank} was lost with experts that have no other copy", mask_changed=True)
        return sends + self._recover()

    def _back(self, rank: int, packed: bytes) -> list[Send]:
        slots = self._slots_of(rank)
        experts = array("h")
        if len(packed) == 2 * self.num_layers * len(slots):
            experts.frombytes(packed)
        else:
            self._tally.cause = (f"rank {rank} came back with {len(packed) // 2} experts for {len(slots)} slots in "
                                 f"each of {self.num_layers} layers; it is taken as empty")
            experts.extend([EMPTY] * (self.num_layers * len(slots)))
        sends = self._lost(rank)                              # if its end was never told
        self.alive[rank] = True
        self._rank_changed(rank)
        at = 0
        for layer in range(self.num_layers):
            for slot in slots:
                known = 0 <= experts[at] < self.geometry.num_experts and (layer, slot) not in self._busy
                self._held[layer][slot] = experts[at] if known else EMPTY
                at += 1
        edits = [edit for layer in range(self.num_layers) for edit in self._name_held(layer)]
        return sends + self._publish(edits, mask_changed=True) + self._recover()

    def _slots_of(self, rank: int) -> range:
        """The slots of a rank."""
        start = sum(self.geometry.slots_per_rank[:rank])
        return range(start, start + self.geometry.slots_per_rank[rank])

    def _rank_changed(self, rank: int) -> None:
        self._lives[rank] += 1
        self._tasks.clear()
        self._placer = Placer(self.geometry, self.alive)
        self._next_layer = 0
        self._pass_at = self.stats.num_steps + self.settings.min_steps

    def _recover(self) -> list[Send]:
        """Find slots for experts that no slot names: empty ones, then those of copies that are missed least."""
        self._tasks.clear()
        sends = self._publish([edit for layer in self._missing for edit in self._name_held(layer)])
        edits: list[Edit] = []
        for layer, lacking in self._missing.items():
            goal = self._rescue(layer, lacking)
            if goal is None:
                self._tasks.clear()
                if self._told_unservable or self._flights:    # an answer may give slots back
                    return sends
                self._told_unservable = True
                cause = f"{self._lack()}, and the living ranks have no slot for them"
                return [*sends, Send(self.scheduler, Unservable(cause))]
            self._tasks[layer] = _Task([goal])
            edits += [Edit(layer, slot, EMPTY) for slot, expert in enumerate(self._named[layer])
                      if expert not in (EMPTY, goal[slot])]
        return sends + self._publish(edits) + self._advance()

    def _rescue(self, layer: int, lacking: Sequence[int]) -> list[int] | None:
        """A goal that names every expert of the layer; None if there are too few slots."""
        goal, loads = list(self._named[layer]), self.stats.layer(layer)
        totals = rank_loads(goal, loads, self._rank_of, self.geometry.num_ranks)
        copies = [0] * self.geometry.num_experts
        for expert in goal:
            if expert != EMPTY:
                copies[expert] += 1
        taken: dict[SlotId, None] = {}
        coming: dict[int, None] = {}
        for flight in self._flights.values():
            for move, life in zip(flight.moves, flight.lives, strict=True):
                rank = self._rank_of[move.to_slot]
                if (move.layer == layer and move.expert in lacking and move.expert not in coming and not flight.late
                        and self.alive[rank] and life == self._lives[rank]):
                    goal[move.to_slot] = move.expert
                    taken[move.to_slot] = coming[move.expert] = None
        for expert in sorted((each for each in lacking if each not in coming), key=lambda each: (-loads[each], each)):
            options = []
            for slot, there in enumerate(goal):
                if slot in taken or not self._is_usable(layer, slot):
                    continue
                keep = slot in self._shared and expert != self.geometry.num_routed
                if there == EMPTY:
                    options.append((keep, 0, totals[self._rank_of[slot]], slot))
                elif copies[there] > 1:
                    left = loads[there] / (copies[there] - 1)
                    options.append((keep, 1, max(totals[self._rank_of[slot]], left), slot))
            if not options:
                return None
            slot = min(options)[3]
            if goal[slot] != EMPTY:
                copies[goal[slot]] -= 1
            goal[slot] = expert
            taken[slot] = None
            totals[self._rank_of[slot]] += loads[expert]
        return goal


@dataclass(slots=True)
class _Tally:
    """Counters of a `Rebalancer`."""

    planned: int = 0
    gated: int = 0
    changed: int = 0
    blocked: int = 0
    moves: int = 0
    failures: int = 0
    cause: str = ""
