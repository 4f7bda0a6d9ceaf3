"""Which expert lives in which slot: the expert map of an instance, one version of it at a time.

A *slot* is room for one expert of one MoE layer with all its tensors. Every layer has the same slots, numbered over
the whole instance; rank r owns a contiguous range of them, as long as it likes. An expert may have copies in several
slots, on different ranks, and a slot may be empty. The router of the model names *logical* experts; this is the one
place where they become slots. Layers are counted over the MoE layers alone (those of MTP follow the main ones).

The shared expert, where the paper gives it ranks of its own (section 4.1: 32 copies at EP320), is one more logical
expert, numbered after the routed ones; every token chooses it. Where each rank computes it for itself it is not here.

Loads, costs and the reasons for a map are `control.experts`'; weights and tensors are the engine's.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tripool.core.errors import ConfigError, WireError

SlotId = int
"""A slot of the instance, from 0; the same numbers in every layer."""

EMPTY = -1
"""In place of an expert: the slot holds nothing that may be used."""

DISK = -1
"""In place of a slot to copy from: the expert is read from the pool or from disk."""

MAX_EXPERTS = 32_767
"""Of one layer; experts travel as int16."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What an instance has room for. Checked when built.

    Raises:
        ConfigError: no placement can exist; the message names the number that is wrong and one that would do.
    """

    slots_per_rank: tuple[int, ...]
    num_routed: int                         # logical experts of a layer, without the shared one
    shared_slots: tuple[SlotId, ...] = ()   # slots that hold the shared expert, in every layer; ascending
    num_groups: int = 1                     # expert groups of the router, of consecutive experts (only with nodes)
    num_nodes: int = 1                      # consecutive ranks; above 1, all experts of a group live on one node

    def __post_init__(self) -> None:
        if self.num_routed < 1 or self.num_experts > MAX_EXPERTS:
            raise ConfigError(f"num_routed is {self.num_routed}; it must be between 1 and {MAX_EXPERTS - 1}")
        if not self.slots_per_rank or min(self.slots_per_rank) < 0:
            raise ConfigError(f"slots_per_rank is {list(self.slots_per_rank)}; give every rank 0 or more slots")
        needed = self.num_routed + len(self.shared_slots)
        if self.num_slots < needed:
            raise ConfigError(f"{self.num_slots} expert slots on {self.num_ranks} ranks cannot hold {self.num_routed} "
                              f"routed experts and {len(self.shared_slots)} copies of the shared one: "
                              f"{needed} slots are needed")
        self._check_shared()
        self._check_nodes()
        routed_slots = self.routed_slots_per_rank()
        for rank, num_slots in enumerate(routed_slots):
            if num_slots > self.num_routed // self.num_nodes:
                raise ConfigError(
                    f"rank {rank} has {num_slots} slots for routed experts, but at most "
                    f"{self.num_routed // self.num_nodes} different ones may live there, and copies of one expert must "
                    f"be on different ranks: lower its slots or spread the redundancy over more ranks")

    def _check_shared(self) -> None:
        rank_of = self.rank_of_slots()
        seen: dict[int, int] = {}
        last = -1
        for slot in self.shared_slots:
            if not last < slot < self.num_slots:
                raise ConfigError(f"shared_slots names slot {slot} after {last}; they must ascend and be below "
                                  f"{self.num_slots}")
            last = slot
            rank = rank_of[slot]
            if rank in seen:
                raise ConfigError(f"shared_slots {seen[rank]} and {slot} are both on rank {rank}; copies of the shared "
                                  f"expert must be on different ranks")
            seen[rank] = slot

    def _check_nodes(self) -> None:
        if self.num_nodes < 1 or self.num_groups < 1:
            raise ConfigError(f"num_nodes is {self.num_nodes} and num_groups {self.num_groups}; both must be 1 or more")
        if self.num_nodes == 1:
            return
        if self.num_ranks % self.num_nodes:
            raise ConfigError(f"num_nodes is {self.num_nodes}, which does not divide {self.num_ranks} ranks")
        if self.num_routed % self.num_groups:
            raise ConfigError(f"num_groups is {self.num_groups}, which does not divide {self.num_routed} experts")
        if self.num_groups % self.num_nodes:
            raise ConfigError(f"num_nodes is {self.num_nodes}, which does not divide {self.num_groups} expert groups: "
                              f"use a divisor, or num_nodes 1 (global placement)")
        per_node, needed = self.num_ranks // self.num_nodes, self.num_routed // self.num_nodes
        slots = self.routed_slots_per_rank()
        for node in range(self.num_nodes):
            room = sum(slots[node * per_node:(node + 1) * per_node])
            if room < needed:
                raise ConfigError(f"node {node} has {room} slots for routed experts and must hold {needed} of them "
                                  f"({self.num_groups // self.num_nodes} groups): give it {needed - room} more")

    @property
    def num_ranks(self) -> int:
        return len(self.slots_per_rank)

    @property
    def num_slots(self) -> int:
        return sum(self.slots_per_rank)

    @property
    def num_experts(self) -> int:
        """Logical experts of a layer; the shared one, if it is placed by the map, is the last."""
        return self.num_routed + (1 if self.shared_slots else 0)

    @property
    def num_redundant(self) -> int:
        """Slots of a layer beyond one per routed expert and those of the shared one."""
        return self.num_slots - self.num_routed - len(self.shared_slots)

    def rank_of_slots(self) -> list[int]:
        """The rank of each slot."""
        return [rank for rank, count in enumerate(self.slots_per_rank) for _ in range(count)]

    def routed_slots_per_rank(self) -> list[int]:
        """Slots of each rank that the shared expert does not take."""
        rank_of, slots = self.rank_of_slots(), list(self.slots_per_rank)
        for slot in self.shared_slots:
            slots[rank_of[slot]] -= 1
        return slots


def even_geometry(num_ranks: int, num_routed: int, *, num_redundant: int = 0, num_shared_copies: int = 0,
                  num_groups: int = 1, num_nodes: int = 1) -> Geometry:
    """Divide all slots over the ranks as evenly as they go; copies of the shared expert at equal distances.

    The paper's decode instance (section 4.1) is `even_geometry(320, 256, num_redundant=32, num_shared_copies=32)`,
    its prefill instance `even_geometry(32, 256, num_redundant=32)` with the shared expert computed by each rank.

    Raises:
        ConfigError: see `Geometry`; also where there are more shared copies than ranks.
    """
    if num_ranks < 1 or num_redundant < 0 or num_shared_copies < 0:
        raise ConfigError(f"num_ranks is {num_ranks}, num_redundant {num_redundant}, num_shared_copies "
                          f"{num_shared_copies}; they must be at least 1, 0 and 0")
    if num_shared_copies > num_ranks:
        raise ConfigError(f"num_shared_copies is {num_shared_copies}, more than the {num_ranks} ranks that could hold "
                          f"one each")
    total = num_routed + num_redundant + num_shared_copies
    slots = [total // num_ranks + (rank < total % num_ranks) for rank in range(num_ranks)]
    if total < num_ranks and num_shared_copies:
        hosts = [rank for rank in range(num_ranks) if slots[rank]]
    else:
        hosts = list(range(num_ranks))
    if num_shared_copies > len(hosts):
        raise ConfigError(f"num_shared_copies is {num_shared_copies}, but only {len(hosts)} ranks have a slot")
    starts = [0, *accumulate(slots)]
    shared = [starts[hosts[i * len(hosts) // num_shared_copies]] for i in range(num_shared_copies)]
    return Geometry(tuple(slots), num_routed, tuple(shared), num_groups, num_nodes)


@dataclass(frozen=True, slots=True)
class Move:
    """One expert of one layer is copied into a slot, with all its tensors."""

    layer: int
    from_slot: SlotId          # or DISK
    to_slot: SlotId
    expert: int


@dataclass(frozen=True, slots=True)
class Edit:
    """A slot of the map names another expert, or none."""

    layer: int
    slot: SlotId
    expert: int                # or EMPTY


@dataclass(frozen=True, slots=True)
class MapChange:
    """How one version of a map becomes the next, as it travels: `edits` are int32 (layer, slot, expert), packed."""

    base: int
    version: int
    edits: bytes


@dataclass(frozen=True, slots=True)
class PackedPlacement:
    """A whole map as it travels: uint16 slots of each rank, int16 experts layer by layer."""

    version: int
    num_experts: int
    slots_per_rank: bytes
    experts: bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """One version of the expert map. Build it freely; `check` says whether it may be used."""

    version: int
    num_experts: int                           # logical experts of a layer
    slots_per_rank: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]        # for each MoE layer the expert of each slot, or EMPTY

    @property
    def num_slots(self) -> int:
        return sum(self.slots_per_rank)

    @property
    def num_ranks(self) -> int:
        return len(self.slots_per_rank)

    def rank_of(self, slot: SlotId) -> int:
        """The rank that owns a slot."""
        assert 0 <= slot < self.num_slots, f"there is no slot {slot}"
        return bisect_right(list(accumulate(self.slots_per_rank)), slot)

    def rank_of_slots(self) -> list[int]:
        """The rank of each slot."""
        return [rank for rank, count in enumerate(self.slots_per_rank) for _ in range(count)]

    def slots_of_rank(self, rank: int) -> range:
        """The slots that a rank owns."""
        start = sum(self.slots_per_rank[:rank])
        return range(start, start + self.slots_per_rank[rank])

    def held_by(self, rank: int, layer: int) -> tuple[int, ...]:
        """The expert of each slot of a rank, or EMPTY."""
        slots = self.slots_of_rank(rank)
        return self.layers[layer][slots.start:slots.stop]

    def slots_of(self, layer: int, expert: int) -> tuple[SlotId, ...]:
        """The slots of an expert's copies, ascending."""
        return tuple(slot for slot, held in enumerate(self.layers[layer]) if held == expert)

    def copies(self, layer: int) -> list[list[SlotId]]:
        """For each expert the slots of its copies, ascending: the table behind `choose`."""
        table: list[list[SlotId]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.layers[layer]):
            if expert != EMPTY:
                table[expert].append(slot)
        return table

    def choose(self, layer: int, expert: int, position: int, source_rank: int = 0) -> SlotId:
        """The slot to which a rank sends the token at `position` of its batch for `expert` (see `choose`)."""
        return choose(self.slots_of(layer, expert), position, source_rank)

    def missing(self) -> list[tuple[int, int]]:
        """(layer, expert) of every expert that no slot names; with any of them no step may run."""
        found = []
        for layer, experts in enumerate(self.layers):
            named = bytearray(self.num_experts)
            for expert in experts:
                if expert != EMPTY:
                    named[expert] = 1
            if not all(named):
                found += [(layer, expert) for expert in range(self.num_experts) if not named[expert]]
        return found

    def check(self, *, partial: bool = False) -> None:
        """Refuse a map that would lose or double a token's contribution; `partial` allows experts without a slot.

        Raises:
            ConfigError: the first thing wrong, with layer, slot and expert, and what would mend it.
        """
        num_slots, rank_of = self.num_slots, self.rank_of_slots()
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise ConfigError(f"the map has {self.num_experts} experts; it must have 1 to {MAX_EXPERTS}")
        if not self.slots_per_rank or min(self.slots_per_rank) < 0:
            raise ConfigError(f"slots_per_rank is {list(self.slots_per_rank)}; give every rank 0 or more slots")
        for layer, experts in enumerate(self.layers):
            if len(experts) != num_slots:
                raise ConfigError(f"layer {layer} of the map has {len(experts)} slots, the ranks have {num_slots} "
                                  f"together: name an expert, or {EMPTY}, for each")
            at: dict[tuple[int, int], int] = {}
            for slot, expert in enumerate(experts):
                if expert == EMPTY:
                    continue
                if not 0 <= expert < self.num_experts:
                    raise ConfigError(f"layer {layer}, slot {slot}: there is no expert {expert}; experts are 0 to "
                                      f"{self.num_experts - 1}, {EMPTY} is an empty slot")
                key = expert, rank_of[slot]
                if key in at:
                    raise ConfigError(f"layer {layer}: expert {expert} is in slots {at[key]} and {slot}, both of rank "
                                      f"{rank_of[slot]}; put the copy on another rank or empty the slot")
                at[key] = slot
        if not partial:
            for layer, expert in self.missing():
                raise ConfigError(f"layer {layer}: expert {expert} is in no slot; name it in an empty slot or in place "
                                  f"of a redundant copy")

    def apply(self, change: MapChange) -> Placement:
        """The next version of this map.

        Raises:
            WireError: the change is for another version, or names a layer, slot or expert that is not there.
        """
        if change.base != self.version or change.version <= change.base:
            raise WireError(f"a map change from version {change.base} to {change.version} does not fit version "
                            f"{self.version}")
        layers: dict[int, list[int]] = {}
        num_slots = self.num_slots
        for edit in unpack_edits(change.edits):
            if not (0 <= edit.layer < len(self.layers) and 0 <= edit.slot < num_slots
                    and EMPTY <= edit.expert < self.num_experts):
                raise WireError(f"a map change names layer {edit.layer}, slot {edit.slot}, expert {edit.expert}, which "
                                f"do not exist here")
            layers.setdefault(edit.layer, list(self.layers[edit.layer]))[edit.slot] = edit.expert
        changed = tuple(tuple(layers[i]) if i in layers else old for i, old in enumerate(self.layers))
        return Placement(change.version, self.num_experts, self.slots_per_rank, changed)

    def pack(self) -> PackedPlacement:
        """As it travels."""
        return PackedPlacement(self.version, self.num_experts, array("H", self.slots_per_rank).tobytes(),
                               b"".join(array("h", experts).tobytes() for experts in self.layers))


def unpack(packed: PackedPlacement) -> Placement:
    """The inverse of `Placement.pack`.

    Raises:
        WireError: lengths do not fit, or the map is no map at all.
    """
    if len(packed.slots_per_rank) % 2 or len(packed.experts) % 2:
        raise WireError("a packed expert map is cut off")
    slots, experts = array("H"), array("h")
    slots.frombytes(packed.slots_per_rank)
    experts.frombytes(packed.experts)
    num_slots = sum(slots)
    if not num_slots or len(experts) % num_slots:
        raise WireError(f"a packed expert map has {len(experts)} entries for {num_slots} slots")
    layers = tuple(tuple(experts[at:at + num_slots]) for at in range(0, len(experts), num_slots))
    placement = Placement(packed.version, packed.num_experts, tuple(slots), layers)
    try:
        placement.check(partial=True)
    except ConfigError as error:
        raise WireError(f"a packed expert map is wrong: {error}") from error
    return placement


def choose(copies: Sequence[SlotId], position: int, source_rank: int = 0) -> SlotId:
    """Which of an expert's copies (ascending slots) serves the token at `position` of `source_rank`'s batch.

    Copies take turns by position, and ranks begin at different ones, so that many ranks with one token each use all
    copies too. A pure function of the map: whoever computes it, on whichever rank, gets the same slot. Section 4.2.1
    leaves the choice open; rotation by batch position needs no communication (arXiv 2508.02520).
    """
    return copies[(position + source_rank) % len(copies)]


def pack_edits(edits: Sequence[Edit]) -> bytes:
    """As they travel in a `MapChange`."""
    return array("i", [part for edit in edits for part in (edit.layer, edit.slot, edit.expert)]).tobytes()


def unpack_edits(packed: bytes) -> list[Edit]:
    """The inverse of `pack_edits`.

    Raises:
        WireError: the bytes are no whole number of edits.
    """
    if len(packed) % 12:
        raise WireError(f"{len(packed)} bytes are no whole number of map edits")
    parts = array("i")
    parts.frombytes(packed)
    return [Edit(parts[at], parts[at + 1], parts[at + 2]) for at in range(0, len(parts), 3)]


def difference(old: Placement, new: Placement) -> list[Move]:
    """The copies that turn what `old` names into what `new` names, by layer and slot.

    Sources are slots of `old`; an expert's several moves take turns over its copies. Slots that `new` leaves empty
    need no move.
    """
    assert (old.slots_per_rank, len(old.layers)) == (new.slots_per_rank, len(new.layers)), "maps of two instances"
    moves = []
    for layer, (before, after) in enumerate(zip(old.layers, new.layers, strict=True)):
        if before == after:
            continue
        copies, turn = old.copies(layer), [0] * max(old.num_experts, new.num_experts)
        for slot, expert in enumerate(after):
            if expert in (EMPTY, before[slot]):
                continue
            sources = copies[expert] if expert < old.num_experts else []
            source = sources[turn[expert] % len(sources)] if sources else DISK
            turn[expert] += 1
            moves.append(Move(layer, source, slot, expert))
    return moves


def lie_side_by_side(held: Sequence[int]) -> bool:
    """Whether these are experts one after the other, so that a rank takes them where they lie in a file of all."""
    return not held or (held[0] >= 0 and list(held) == list(range(held[0], held[0] + len(held))))


def initial_layer(geometry: Geometry) -> list[int]:
    """The expert of each slot before any load is known.

    Routed experts are divided evenly over the ranks in order (with nodes: over the ranks of their node); every slot
    that is left takes a copy of the expert with the fewest copies that its rank lacks.
    """
    starts = [0, *accumulate(geometry.slots_per_rank)]
    experts = [EMPTY] * geometry.num_slots
    for slot in geometry.shared_slots:
        experts[slot] = geometry.num_routed
    room = geometry.routed_slots_per_rank()
    ranks_per_node = geometry.num_ranks // geometry.num_nodes
    experts_per_node = geometry.num_routed // geometry.num_nodes
    for node in range(geometry.num_nodes):
        ranks = list(range(node * ranks_per_node, (node + 1) * ranks_per_node))
        first = node * experts_per_node
        own = range(first, first + experts_per_node)
        held: dict[int, list[int]] = {}
        at = first
        for rank, count in zip(ranks, _even_shares(experts_per_node, [room[rank] for rank in ranks]), strict=True):
            held[rank] = list(range(at, at + count))
            at += count
        num_copies = dict.fromkeys(own, 1)
        for rank in ranks:
            while len(held[rank]) < room[rank]:
                lacking = [expert for expert in own if expert not in held[rank]]
                expert = min(lacking, key=lambda each: (num_copies[each], each))
                num_copies[expert] += 1
                held[rank].append(expert)
            free = [slot for slot in range(starts[rank], starts[rank + 1]) if experts[slot] == EMPTY]
            for slot, expert in zip(free, held[rank], strict=True):
                experts[slot] = expert
    return experts


def initial_placement(geometry: Geometry, num_layers: int) -> Placement:
    """The map with which an instance starts: `initial_layer` in each of its MoE layers, as version 1."""
    layer = tuple(initial_layer(geometry))
    placement = Placement(1, geometry.num_experts, geometry.slots_per_rank, (layer,) * num_layers)
    placement.check()
    return placement


def _even_shares(total: int, room: Sequence[int]) -> list[int]:
    """`total` things over places with limited room, as evenly as they go; earlier places get the odd ones."""
    assert total <= sum(room), f"{total} things do not fit"
    shares, left = [0] * len(room), total
    while left:
        for place, limit in enumerate(room):
            if left and shares[place] < limit:
                shares[place] += 1
                left -= 1
    return shares
