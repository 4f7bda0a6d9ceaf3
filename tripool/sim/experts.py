"""The experts of a simulated instance: what each slot holds, and which of them the tokens of a toy choose.

A slot holds a whole expert or nothing that may be read: nothing while a move writes to it, after one that failed, and
once its rank is gone. A step may run only with a map whose every slot holds what the map names, from its beginning to
its end, and a slot that it names may not be written meanwhile; whatever breaks this is noted as wrong. Tokens of the
toy choose experts by their numbers alone, some much more often than others; what those of a described model ask is
`demand`'s. It knows no rows, no prices and no time.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tripool.core.deployment import InstanceConfig
from tripool.core.machine import Address
from tripool.core.messages import ExpertFacts
from tripool.core.placement import DISK, EMPTY, Geometry, Move, SlotId, even_geometry, initial_placement, unpack_edits
from tripool.core.plan import StepPlan
from tripool.core.request import TokenBytes, unpack_tokens


@dataclass(frozen=True, slots=True)
class ToyMixture:
    """The MoE layers of a model that is not there."""

    num_layers: int = 2
    num_routed: int = 6                    # experts of a layer, without the shared one
    num_picks: int = 2
    expert_bytes: int = 1 << 20
    seconds_per_token: float = 1e-5
    room_tokens: int = 16

    def geometry(self, config: InstanceConfig) -> Geometry:
        """The slots of an instance."""
        return even_geometry(config.ranks, self.num_routed, num_redundant=config.redundant_experts,
                             num_shared_copies=config.shared_expert_copies)


@lru_cache(maxsize=1 << 16)
def chosen_experts(token: int, mixture: ToyMixture, num_experts: int) -> tuple[int, ...]:
    """What a token chooses, as places in the counts of all layers. Few experts are popular, others in each layer.

    With more experts than routed ones, the last is the shared one, which every token chooses.
    """
    num_layers, num_routed, num_picks = mixture.num_layers, mixture.num_routed, mixture.num_picks
    dice = struct.unpack(f"<{num_layers * num_picks}H",
                         hashlib.shake_128(token.to_bytes(4, "little")).digest(2 * num_layers * num_picks))
    places: list[int] = []
    for layer in range(num_layers):
        picked: dict[int, None] = {}
        for die in dice[layer * num_picks:(layer + 1) * num_picks]:
            expert = die * die * num_routed >> 32                # of low numbers more than of high ones
            while expert in picked:
                expert = (expert + 1) % num_routed
            picked[expert] = None
        first = layer * num_experts
        places += [first + (expert + layer) % num_routed for expert in picked]
        places += range(first + num_routed, first + num_experts)
    return tuple(places)


@dataclass(frozen=True, slots=True)
class _Flight:
    """An unanswered move of several experts, and in which life of their ranks it began."""

    moves: tuple[Move, ...]
    target_lives: tuple[int, ...]
    source_lives: tuple[int, ...]


class ExpertSlots:
    """The expert slots of one life of one instance."""

    def __init__(self, member: Address, geometry: Geometry, num_layers: int, wrongs: list[str]) -> None:
        self.geometry = geometry
        self.first = initial_placement(geometry, num_layers)
        self.version = self.first.version
        self.held = [list(experts) for experts in self.first.layers]
        self.num_moved = 0
        self._member = member
        self._wrongs = wrongs
        self._rank_of = geometry.rank_of_slots()
        self._lives = [0] * geometry.num_ranks                   # odd: the rank is lost
        self._named = [list(experts) for experts in self.first.layers]    # by the newest map of a plan
        self._unlike: dict[tuple[int, SlotId], None] = {}        # slots that hold something else than the map names
        self._copies = [[experts.count(expert) for expert in range(geometry.num_experts)] for experts in self._named]
        self._num_missing = 0                                    # experts in no slot, of all layers
        self._flights: dict[int, _Flight] = {}
        self._writing: dict[tuple[int, SlotId], int] = {}        # by which move
        self._step: int | None = None                            # the one that runs

    # ------------------------------------------------------------ steps

    def begin_step(self, plan: StepPlan) -> None:
        """Take the changes that came with a plan, and look whether its map can be used."""
        for change in plan.map_changes:
            if change.version <= self.version:
                continue
            if change.base != self.version:
                self._wrong(f"step {plan.step} brings a change from map {change.base}, but map {self.version} is known")
            self.version = change.version
            for edit in unpack_edits(change.edits):
                self._name(edit.layer, edit.slot, edit.expert)
        if plan.map_version != self.version:
            self._wrong(f"step {plan.step} names map {plan.map_version}, but map {self.version} is known")
        self._check(f"step {plan.step} begins")
        self._step = plan.step

    def end_step(self) -> None:
        """It was taken."""
        self._check(f"step {self._step} ends")
        self._step = None

    def drop_step(self) -> None:
        """It failed or was given up."""
        self._step = None

    def _check(self, when: str) -> None:
        if self._num_missing:
            self._wrong(f"{when} with {self._num_missing} experts in no slot of map {self.version}")
        for layer, slot in self._unlike:
            self._wrong(f"{when} with map {self.version}, which names expert {self._named[layer][slot]} in slot {slot} "
                        f"of layer {layer}, but there is {self.held[layer][slot]}")

    # ------------------------------------------------------------ moves

    def begin_moves(self, verb_id: int, moves: tuple[Move, ...]) -> None:
        """Slots lose what they hold."""
        for move in moves:
            at = move.layer, move.to_slot
            if at in self._writing:
                self._wrong(f"slot {at} is written by moves {self._writing[at]} and {verb_id} at once")
            if self._step is not None and self._named[move.layer][move.to_slot] != EMPTY:
                self._wrong(f"slot {at} is written while step {self._step} names it by map {self.version}")
            if not self.is_lost(self._rank_of[move.to_slot]):
                self._writing[at] = verb_id
                self._hold(*at, EMPTY)
        sources = tuple(0 if move.from_slot == DISK else self._lives[self._rank_of[move.from_slot]] for move in moves)
        self._flights[verb_id] = _Flight(moves, tuple(self._lives[self._rank_of[move.to_slot]] for move in moves),
                                         sources)
        for move, life in zip(moves, sources, strict=True):
            if not life % 2 and not self._has_source(move):
                self._wrong(f"expert {move.expert} of layer {move.layer} is copied from slot {move.from_slot}, where "
                            f"there is {self.held[move.layer][move.from_slot]}")

    def end_moves(self, verb_id: int, cause: str) -> str:
        """Slots hold what was moved to them, unless it failed: then the cause is returned. Each copy is proved."""
        flight = self._flights.pop(verb_id)
        for move, target_life, source_life in zip(flight.moves, flight.target_lives, flight.source_lives, strict=True):
            source_now = 0 if move.from_slot == DISK else self._lives[self._rank_of[move.from_slot]]
            if source_life % 2 or source_now != source_life:
                cause = cause or f"the rank of slot {move.from_slot} is gone"
            if target_life % 2 or self._lives[self._rank_of[move.to_slot]] != target_life:
                cause = cause or f"the rank of slot {move.to_slot} is gone"
            if not self._has_source(move):
                cause = cause or f"slot {move.from_slot} was written while it was copied"
        for move in flight.moves:
            at = move.layer, move.to_slot
            if self._writing.get(at) == verb_id:                 # else the rank has begun another life
                del self._writing[at]
            if not cause:
                self._hold(*at, move.expert)
                self.num_moved += 1
        return cause

    def _has_source(self, move: Move) -> bool:
        return move.from_slot == DISK or self.held[move.layer][move.from_slot] == move.expert

    # ------------------------------------------------------------ ranks

    def is_lost(self, rank: int) -> bool:
        return self._lives[rank] % 2 == 1

    def lose_rank(self, rank: int) -> None:
        """What its slots held is gone."""
        self._lives[rank] += 1
        self._fill(rank, [EMPTY] * len(self._slots_and_first(rank)))

    def return_rank(self, rank: int) -> bytes:
        """A new process has loaded what the rank held first; returned as it travels."""
        self._lives[rank] += 1
        first = [expert for _, _, expert in self._slots_and_first(rank)]
        self._fill(rank, first)
        return array("h", first).tobytes()

    def _fill(self, rank: int, experts: Sequence[int]) -> None:
        for (layer, slot, _), expert in zip(self._slots_and_first(rank), experts, strict=True):
            self._writing.pop((layer, slot), None)
            self._hold(layer, slot, expert)

    def _slots_and_first(self, rank: int) -> list[tuple[int, SlotId, int]]:
        slots = self.first.slots_of_rank(rank)
        return [(layer, slot, experts[slot]) for layer, experts in enumerate(self.first.layers) for slot in slots]

    # ------------------------------------------------------------ books

    def _hold(self, layer: int, slot: SlotId, expert: int) -> None:
        self.held[layer][slot] = expert
        self._compare(layer, slot)

    def _name(self, layer: int, slot: SlotId, expert: int) -> None:
        copies, before = self._copies[layer], self._named[layer][slot]
        self._named[layer][slot] = expert
        if expert != EMPTY:
            self._num_missing -= copies[expert] == 0
            copies[expert] += 1
        if before != EMPTY:
            copies[before] -= 1
            self._num_missing += copies[before] == 0
        self._compare(layer, slot)

    def _compare(self, layer: int, slot: SlotId) -> None:
        if self._named[layer][slot] in (EMPTY, self.held[layer][slot]):
            self._unlike.pop((layer, slot), None)
        else:
            self._unlike[layer, slot] = None

    def _wrong(self, what: str) -> None:
        self._wrongs.append(f"{self._member}: {what}")


class SimExperts(ExpertSlots):
    """The same, with tokens that choose experts by their numbers."""

    def __init__(self, member: Address, mixture: ToyMixture, geometry: Geometry, wrongs: list[str]) -> None:
        super().__init__(member, geometry, mixture.num_layers, wrongs)
        self.mixture = mixture
        self._tokens: Counter[int] = Counter()                   # computed since the last report

    @property
    def facts(self) -> ExpertFacts:
        """What the machine is told when the model is loaded."""
        mixture = self.mixture
        return ExpertFacts(self.geometry, self.first.pack(), mixture.expert_bytes, mixture.seconds_per_token,
                           mixture.room_tokens)

    def count(self, tokens: TokenBytes) -> None:
        """Tokens go through all layers."""
        self._tokens.update(unpack_tokens(tokens))

    def report(self) -> bytes:
        """How often each expert was chosen since the last report."""
        mixture, num_experts = self.mixture, self.geometry.num_experts
        counts = [0] * (mixture.num_layers * num_experts)
        for token, count in self._tokens.items():
            for place in chosen_experts(token, mixture, num_experts):
                counts[place] += count
        self._tokens.clear()
        return array("i", counts).tobytes()
