"""Which experts get copies and where they live: expert loads, balanced placement, and moves while requests run.

After EPLB (github.com/deepseek-ai/EPLB; the paper's redundant experts, section 4.1): hot experts get copies, and copies
are packed so that the busiest rank of each layer has as little as possible. With nodes the groups of the router go to
nodes first (*hierarchical*, for prefill), without them all ranks are alike (*global*, for decode). What EPLB leaves
open is done here: slots may be uneven, copies of one expert are on different ranks, and an expert stays where it is
unless moving it helps.

A map that is in use is never touched. To move an expert, a version of the map stops naming a slot (only one whose
expert has another copy), the slot is filled once no step can read it any more, and a further version names it again.
`Rebalancer` is the machine that does so, layer by layer, and that takes dead ranks out of the map and returning ones
back in. It knows tokens counted per expert and bytes of an expert; it knows no requests, tensors or links.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tripool.core.errors import ConfigError, WireError
from tripool.core.machine import Address, Message, Send
from tripool.core.messages import Failed, Tick
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
    initial_layer,
    pack_edits,
    unpack,
)

SAME_BALANCE = 1.01
"""Maximum loads within this factor count as the same balance; then the placement with fewer moves is taken."""

NUM_LOW_RANKS = 8
NUM_SPARE_EXPERTS = 16
"""How widely `_Packing.improve` looks for a partner of the busiest rank; wider costs time and rarely finds more."""


# ---------------------------------------------------------------- loads


class LoadStatistics:
    """Tokens per step of each layer's experts, smoothed exponentially.

    A step `half_life_steps` ago weighs half as much as the last one. State is one number per layer and expert.
    """

    def __init__(self, num_layers: int, num_experts: int, half_life_steps: float) -> None:
        self.num_layers, self.num_experts = num_layers, num_experts
        self.half_life_steps = half_life_steps
        self.num_steps = 0                                   # ever counted
        self._weight = 0.0
        self._sums = [0.0] * (num_layers * num_experts)

    def add(self, counts: bytes, num_steps: int = 1) -> None:
        """Count the tokens of `num_steps` steps: int32 per layer and expert, packed."""
        column = array("i")
        column.frombytes(counts)
        assert len(column) == len(self._sums), f"{len(column)} counts for {len(self._sums)} experts"
        keep = 0.5 ** (num_steps / self.half_life_steps)
        self._weight = self._weight * keep + num_steps
        self._sums = [total * keep + count for total, count in zip(self._sums, column, strict=True)]
        self.num_steps += num_steps

    def layer(self, layer: int) -> list[float]:
        """Mean tokens per step of each expert of one layer."""
        at = layer * self.num_experts
        weight = self._weight or 1.0
        return [total / weight for total in self._sums[at:at + self.num_experts]]

    def layers(self) -> list[list[float]]:
        return [self.layer(layer) for layer in range(self.num_layers)]


def rank_loads(experts: Sequence[int], loads: Sequence[float], rank_of: Sequence[int], num_ranks: int) -> list[float]:
    """Load of each rank in one layer: every copy of an expert takes an equal share of its load."""
    num_copies = [0] * len(loads)
    for expert in experts:
        if expert != EMPTY:
            num_copies[expert] += 1
    totals = [0.0] * num_ranks
    for slot, expert in enumerate(experts):
        if expert != EMPTY:
            totals[rank_of[slot]] += loads[expert] / num_copies[expert]
    return totals


def max_over_mean(experts: Sequence[int], loads: Sequence[float], rank_of: Sequence[int],
                  alive: Sequence[bool]) -> float:
    """How much more the busiest rank has than the mean of the living ones, in one layer. 1 is perfect, or no load."""
    totals = rank_loads(experts, loads, rank_of, len(alive))
    living = [total for total, lives in zip(totals, alive, strict=True) if lives]
    mean = sum(living) / len(living) if living else 0.0
    return max(living) / mean if mean > 0.0 else 1.0


# ---------------------------------------------------------------- placement of one layer


class Placer:
    """Places the experts of one layer after another over the living ranks of a geometry."""

    def __init__(self, geometry: Geometry, alive: Sequence[bool] | None = None) -> None:
        self.geometry = geometry
        self.alive = tuple(alive) if alive is not None else (True,) * geometry.num_ranks
        self.rank_of = geometry.rank_of_slots()
        starts = [0, *accumulate(geometry.slots_per_rank)]
        self._shared = [slot for slot in geometry.shared_slots if self.alive[self.rank_of[slot]]]
        living = sum(self.alive[rank] for rank in self.rank_of)
        if living - len(self._shared) < geometry.num_routed:
            self._shared = []                                 # too few are left to reserve some
        kept = dict.fromkeys(geometry.shared_slots if self._shared else ())
        self._slots = [[slot for slot in range(starts[rank], starts[rank + 1]) if slot not in kept] if lives else []
                       for rank, lives in enumerate(self.alive)]
        self._room = [len(slots) for slots in self._slots]
        self._experts = list(range(geometry.num_routed if self._shared else geometry.num_experts))
        self._initial = initial_layer(geometry) if all(self.alive) else None
        self._nodes = self._living_nodes()

    def _living_nodes(self) -> list[list[int]]:
        """Ranks by node; all in one where a node has too few living slots, or the shared expert lost its own."""
        geometry = self.geometry
        per_node = geometry.num_ranks // geometry.num_nodes
        nodes = [list(range(at, at + per_node)) for at in range(0, geometry.num_ranks, per_node)]
        needed = geometry.num_routed // geometry.num_nodes
        nodes = [[rank for rank in ranks if self._room[rank]] for ranks in nodes]
        whole = len(self._experts) == geometry.num_routed
        if whole and all(sum(self._room[rank] for rank in ranks) >= needed for ranks in nodes):
            return nodes
        return [[rank for rank in range(geometry.num_ranks) if self._room[rank]]]

    @property
    def is_possible(self) -> bool:
        """Whether the living slots can hold every expert."""
        return sum(self._room) >= len(self._experts)

    def place(self, loads: Sequence[float], current: Sequence[int] | None = None, *,
              move_load: float = 0.0) -> list[int]:
        """The expert of each slot, for these loads (any unit), given what the slots hold now.

        The busiest rank has no more than with `current` (if that is a placement on the living ranks, the shared expert
        in its own slots alone), and with `move_load` 0 no more than with the initial placement. Among placements within
        `SAME_BALANCE` of the best one found, the one with the fewest moves is taken; `move_load` is how much more load
        on the busiest rank one move fewer is worth. Deterministic.
        """
        assert self.is_possible, "fewer living slots than experts"
        held = list(current) if current is not None else [EMPTY] * self.geometry.num_slots
        fresh = self._fresh(loads, held)
        peak = self.peak(fresh, loads)
        limit = peak * SAME_BALANCE
        if self._initial is not None:
            at_start = self.peak(self._initial, loads)
            if at_start < peak:
                fresh, peak, limit = self._settled(loads, self._initial, held, at_start), at_start, at_start
            limit = min(limit, at_start)
        near = self._near(loads, held, limit) if current is not None else None
        if near is None:
            return fresh
        saved = self._num_moves(held, fresh) - self._num_moves(held, near)
        if saved < 0:
            return fresh
        return near if self.peak(near, loads) <= max(limit, peak + saved * move_load) else fresh

    def _settled(self, loads: Sequence[float], experts: Sequence[int], held: Sequence[int], peak: float) -> list[int]:
        """`experts` with its ranks renamed to what they hold."""
        packing = _Packing(self, loads)
        for ranks in self._nodes:
            packing.adopt(ranks, experts, self._experts)
            packing.rename(ranks, held)
        settled = packing.to_slots(held)
        return settled if self.peak(settled, loads) <= peak else list(experts)

    def _fresh(self, loads: Sequence[float], held: Sequence[int]) -> list[int]:
        packing = _Packing(self, loads)
        for ranks, experts in self._node_experts(loads, held):
            packing.pack(ranks, experts)
            packing.improve(ranks, packing.bound(ranks, experts))
            packing.rename(ranks, held)
        return packing.to_slots(held)

    def _near(self, loads: Sequence[float], held: Sequence[int], target: float) -> list[int] | None:
        """`held`, mended and improved only until no rank has more than `target`. None: it breaks up groups."""
        nodes = self._held_nodes(held)
        if nodes is None:
            return None
        packing = _Packing(self, loads)
        for ranks, experts in nodes:
            packing.adopt(ranks, held, experts)
            packing.mend(ranks, experts)
            packing.improve(ranks, target)
        return packing.to_slots(held)

    def peak(self, experts: Sequence[int], loads: Sequence[float]) -> float:
        """The load of the busiest rank."""
        return max(rank_loads(experts, loads, self.rank_of, self.geometry.num_ranks))

    @staticmethod
    def _num_moves(held: Sequence[int], experts: Sequence[int]) -> int:
        return sum(new not in (EMPTY, old) for old, new in zip(held, experts, strict=True))

    # ------------------------------------------------------------ groups on nodes

    def _groups(self) -> list[list[int]]:
        geometry = self.geometry
        size = geometry.num_routed // geometry.num_groups
        return [list(range(at, at + size)) for at in range(0, geometry.num_routed, size)]

    def _node_experts(self, loads: Sequence[float], held: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Each node's ranks with the experts of the groups packed onto it: equal numbers of groups, even load."""
        nodes = self._nodes
        if len(nodes) == 1:
            return [(nodes[0], self._experts)]
        groups = self._groups()
        weights = [sum(loads[expert] for expert in group) for group in groups]
        packs = _pack_groups(weights, [float(len(ranks)) for ranks in nodes])
        kinds = [[(self._room[rank], self.geometry.slots_per_rank[rank]) for rank in ranks] for ranks in nodes]
        if all(kind == kinds[0] for kind in kinds):          # nodes are alike: name them after what they hold
            votes = self._votes(held)
            pairs = sorted((-sum(votes[group][node] for group in pack), index, node)
                           for index, pack in enumerate(packs) for node in range(len(nodes)))
            packs = [packs[index] for index in _match(pairs, len(nodes))]
        return [(ranks, [expert for group in sorted(pack) for expert in groups[group]])
                for ranks, pack in zip(nodes, packs, strict=True)]

    def _held_nodes(self, held: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
        """Each node's ranks with the experts of the groups that are there now; None if groups are spread unevenly."""
        nodes = self._nodes
        if len(nodes) == 1:
            return [(nodes[0], self._experts)]
        groups, per_node = self._groups(), self.geometry.num_groups // len(nodes)
        packs: list[list[int]] = [[] for _ in nodes]
        for group, votes in enumerate(self._votes(held)):
            packs[votes.index(max(votes))].append(group)
        if any(len(pack) != per_node for pack in packs):
            return None
        return [(ranks, [expert for group in pack for expert in groups[group]])
                for ranks, pack in zip(nodes, packs, strict=True)]

    def _votes(self, held: Sequence[int]) -> list[list[int]]:
        """For each group, how many of its copies each node holds."""
        size = self.geometry.num_routed // self.geometry.num_groups
        votes = [[0] * len(self._nodes) for _ in range(self.geometry.num_groups)]
        for node, ranks in enumerate(self._nodes):
            for rank in ranks:
                for slot in self._slots[rank]:
                    if 0 <= held[slot] < self.geometry.num_routed:
                        votes[held[slot] // size][node] += 1
        return votes


class _Packing:
    """Who holds what in one layer while it is being worked out: copies on ranks, before they get slots."""

    def __init__(self, placer: Placer, loads: Sequence[float]) -> None:
        geometry = placer.geometry
        self.placer, self.loads = placer, loads
        self.room = placer._room
        self.held: list[list[int]] = [[] for _ in range(geometry.num_ranks)]
        self.hosts: list[list[int]] = [[] for _ in range(geometry.num_experts)]
        self.share = [0.0] * geometry.num_experts             # load of each copy
        self.base = [0.0] * geometry.num_ranks                # what a copy of the shared expert puts on its rank
        for slot in placer._shared:
            self.base[placer.rank_of[slot]] = loads[geometry.num_routed] / len(placer._shared)
        self.load = list(self.base)

    # ------------------------------------------------------------ steps

    def pack(self, ranks: Sequence[int], experts: Sequence[int]) -> None:
        """Copies for the hottest experts until all room is spoken for, then the largest to the least loaded rank."""
        loads = self.loads
        num_copies = dict.fromkeys(experts, 1)
        most = len(ranks)
        queue = [(-loads[expert], expert) for expert in experts]
        heapq.heapify(queue)
        for _ in range(sum(self.room[rank] for rank in ranks) - len(experts)):
            while num_copies[queue[0][1]] >= most:
                heapq.heappop(queue)
            _, expert = queue[0]
            num_copies[expert] += 1
            heapq.heapreplace(queue, (-loads[expert] / num_copies[expert], expert))
        items = sorted((-loads[expert] / count, expert, count) for expert, count in num_copies.items())
        bins = [(self.load[rank], rank) for rank in ranks]
        heapq.heapify(bins)
        for share, expert, count in items:
            taken = []
            for _ in range(count):
                if not bins:
                    break
                load, rank = heapq.heappop(bins)              # each rank at most once per expert
                self.held[rank].append(expert)
                self.hosts[expert].append(rank)
                if len(self.held[rank]) < self.room[rank]:
                    taken.append((load - share, rank))
            for item in taken:
                heapq.heappush(bins, item)
        self.recount(ranks, experts)
        self.mend(ranks, experts)                             # room left where the last ranks had the last experts

    def adopt(self, ranks: Sequence[int], held: Sequence[int], experts: Sequence[int]) -> None:
        """Take what the slots of `ranks` hold, as far as it is of `experts` and once per rank."""
        wanted = dict.fromkeys(experts)
        for rank in ranks:
            for slot in self.placer._slots[rank]:
                expert = held[slot]
                if expert in wanted and expert not in self.held[rank]:
                    self.held[rank].append(expert)
                    self.hosts[expert].append(rank)
        self.recount(ranks, experts)

    def mend(self, ranks: Sequence[int], experts: Sequence[int]) -> None:
        """Give every expert a copy and every slot an expert."""
        for expert in sorted((each for each in experts if not self.hosts[each]), key=lambda each: -self.loads[each]):
            free = [rank for rank in ranks if len(self.held[rank]) < self.room[rank]]
            if free:
                self.add(expert, min(free, key=lambda rank: (self.load[rank], rank)))
                continue
            spare = min((each for each in experts if len(self.hosts[each]) > 1),
                        key=lambda each: (self.loads[each] / (len(self.hosts[each]) - 1), each))
            rank = max(self.hosts[spare], key=lambda each: (self.load[each], each))
            self.remove(spare, rank)
            self.add(expert, rank)
        while True:
            free = [rank for rank in ranks if len(self.held[rank]) < self.room[rank]]
            if not free:
                return
            rank = min(free, key=lambda each: (self.load[each], each))
            self.add(max((each for each in experts if rank not in self.hosts[each]),
                         key=lambda each: (self.share[each], -each)), rank)

    def improve(self, ranks: Sequence[int], target: float) -> None:
        """Relieve the busiest rank, again and again, until none has more than `target` or nothing helps.

        Three steps are tried, and the one that leaves the affected ranks with the lowest maximum is taken: exchange an
        expert with a less loaded rank; give one of its experts one copy more, in place of a copy that is missed least;
        take a copy from the rank itself and put one of a lightly loaded expert in its place.
        """
        light = sorted(dict.fromkeys(expert for rank in ranks for expert in self.held[rank]),
                       key=lambda expert: (self.loads[expert], expert))
        for _ in range(4 * len(ranks) + 64):
            top = max(ranks, key=lambda rank: (self.load[rank], -rank))
            peak = self.load[top]
            if peak <= target:
                return
            order = sorted(ranks, key=lambda rank: (self.load[rank], rank))
            bar = peak * (1.0 - 1e-9)
            swap = self._best_swap(top, order[:NUM_LOW_RANKS], bar)
            copy = self._best_copy(top, order, swap[0] if swap else bar)
            copy = self._best_relief(top, light, (copy or swap or (bar,))[0]) or copy
            if copy is not None:
                _, expert, spare, rank = copy
                self.remove(spare, rank)
                self.add(expert, rank)
            elif swap is not None:
                _, ours, theirs, rank = swap
                self.remove(ours, top)
                self.remove(theirs, rank)
                self.add(ours, rank)
                self.add(theirs, top)
            else:
                return

    def _best_swap(self, top: int, low: Sequence[int], bar: float) -> tuple[float, int, int, int] | None:
        best = None
        share, peak, mine = self.share, self.load[top], self.held[top]
        for rank in low:
            load, others = self.load[rank], self.held[rank]
            if rank == top:
                continue
            for ours in mine:
                if ours in others:
                    continue
                have = share[ours]
                for theirs in others:
                    less = have - share[theirs]
                    if less <= 0.0 or theirs in mine:
                        continue
                    worst = max(peak - less, load + less)
                    if worst < bar:
                        bar, best = worst, (worst, ours, theirs, rank)
        return best

    def _best_copy(self, top: int, order: Sequence[int], bar: float) -> tuple[float, int, int, int] | None:
        best = None
        spares = sorted((self.loads[each] / (len(self.hosts[each]) - 1), each)
                        for each in self.placer._experts if len(self.hosts[each]) > 1)
        own = dict.fromkeys(order)
        spares = [pair for pair in spares if self.hosts[pair[1]][0] in own][:NUM_SPARE_EXPERTS]
        for expert in sorted(self.held[top], key=lambda each: (-self.share[each], each))[:4]:
            hosts = self.hosts[expert]
            new = self.loads[expert] / (len(hosts) + 1)
            less = self.share[expert] - new
            if self.load[top] - less >= bar:
                break
            for after, spare in spares:
                if spare == expert:
                    continue
                more = after - self.share[spare]
                for rank in self.hosts[spare]:
                    if expert in self.held[rank]:
                        continue
                    worst = self.load[rank] - self.share[spare] + new
                    if worst >= bar:
                        continue
                    for host in self.hosts[spare]:
                        if host != rank:
                            worst = max(worst, self.load[host] + more - (less if host in hosts else 0.0))
                    worst = max(worst, self.load[top] - less + (more if spare in self.held[top] else 0.0))
                    if worst < bar:
                        bar, best = worst, (worst, expert, spare, rank)
        return best

    def _best_relief(self, top: int, light: Sequence[int], bar: float) -> tuple[float, int, int, int] | None:
        best = None
        own = self.held[top]
        few = [expert for expert in light[:NUM_SPARE_EXPERTS] if expert not in own]
        for spare in own:
            hosts = self.hosts[spare]
            if len(hosts) < 2:
                continue
            more = self.loads[spare] / (len(hosts) - 1) - self.share[spare]
            after = max(self.load[host] for host in hosts if host != top) + more
            if after >= bar:
                continue
            for expert in few:
                new = self.loads[expert] / (len(self.hosts[expert]) + 1)
                worst = max(after, self.load[top] - self.share[spare] + new)
                if worst < bar:
                    bar, best = worst, (worst, expert, spare, top)
        return best

    def rename(self, ranks: Sequence[int], current: Sequence[int]) -> None:
        """Let ranks that are alike exchange all they hold, so that as much as possible stays where it is."""
        at: dict[int, list[int]] = {}
        for rank in ranks:
            for slot in self.placer._slots[rank]:
                if current[slot] != EMPTY:
                    at.setdefault(current[slot], []).append(rank)
        kinds: dict[tuple[int, float], list[int]] = {}
        for rank in ranks:
            kinds.setdefault((self.room[rank], self.base[rank]), []).append(rank)
        for alike in kinds.values():
            index = {rank: i for i, rank in enumerate(alike)}
            overlap: dict[tuple[int, int], int] = {}
            for pack, rank in enumerate(alike):
                for expert in self.held[rank]:
                    for host in at.get(expert, ()):
                        if host in index:
                            key = pack, index[host]
                            overlap[key] = overlap.get(key, 0) + 1
            pairs = sorted((-count, pack, place) for (pack, place), count in overlap.items())
            order = _match(pairs, len(alike))
            packs = [self.held[rank] for rank in alike]
            for place, rank in enumerate(alike):
                self.held[rank] = packs[order[place]]
        for rank in ranks:
            for expert in self.held[rank]:
                self.hosts[expert] = []
        for rank in ranks:
            for expert in self.held[rank]:
                self.hosts[expert].append(rank)

    def to_slots(self, current: Sequence[int]) -> list[int]:
        """Slots for what the ranks hold: an expert keeps its slot, others take the free ones in order."""
        placer = self.placer
        experts = [EMPTY] * placer.geometry.num_slots
        for slot in placer._shared:
            experts[slot] = placer.geometry.num_routed
        for rank, held in enumerate(self.held):
            left = dict.fromkeys(held)
            free = []
            for slot in placer._slots[rank]:
                if current[slot] in left:
                    experts[slot] = current[slot]
                    del left[current[slot]]
                else:
                    free.append(slot)
            for slot, expert in zip(free, sorted(left), strict=False):
                experts[slot] = expert
        return experts

    # ------------------------------------------------------------ books

    def bound(self, ranks: Sequence[int], experts: Sequence[int]) -> float:
        """No placement leaves the busiest rank with less."""
        total = sum(self.loads[expert] for expert in experts) + sum(self.base[rank] for rank in ranks)
        return max(total, max(self.loads[expert] for expert in experts)) / len(ranks)

    def recount(self, ranks: Sequence[int], experts: Sequence[int]) -> None:
        for expert in experts:
            self.share[expert] = self.loads[expert] / max(1, len(self.hosts[expert]))
        for rank in ranks:
            self.load[rank] = self.base[rank] + sum(self.share[expert] for expert in self.held[rank])

    def add(self, expert: int, rank: int) -> None:
        self.held[rank].append(expert)
        self._set_hosts(expert, self.hosts[expert] + [rank])

    def remove(self, expert: int, rank: int) -> None:
        self.held[rank].remove(expert)
        self._set_hosts(expert, [host for host in self.hosts[expert] if host != rank])

    def _set_hosts(self, expert: int, hosts: list[int]) -> None:
        for host in self.hosts[expert]:
            self.load[host] -= self.share[expert]
        self.hosts[expert] = hosts
        self.share[expert] = self.loads[expert] / max(1, len(hosts))
        for host in hosts:
            self.load[host] += self.share[expert]


def _match(pairs: Sequence[tuple[int, int, int]], count: int) -> list[int]:
    """For each place its pack, after (-gain, pack, place) in order; what is left over is matched in order."""
    pack_of: list[int | None] = [None] * count
    used = [False] * count
    for _, pack, place in pairs:
        if pack_of[place] is None and not used[pack]:
            pack_of[place], used[pack] = pack, True
    rest = iter([pack for pack in range(count) if not used[pack]])
    return [pack if pack is not None else next(rest) for pack in pack_of]


def _pack_groups(weights: Sequence[float], sizes: Sequence[float]) -> list[list[int]]:
    """Equal numbers of groups for each node, so that the largest load per rank is small; then exchanges that help."""
    per_node = len(weights) // len(sizes)
    packs: list[list[int]] = [[] for _ in sizes]
    load = [0.0] * len(sizes)
    for group in sorted(range(len(weights)), key=lambda each: (-weights[each], each)):
        node = min((each for each, pack in enumerate(packs) if len(pack) < per_node),
                   key=lambda each: ((load[each] + weights[group]) / sizes[each], each))
        packs[node].append(group)
        load[node] += weights[group]
    while True:
        top = max(range(len(sizes)), key=lambda each: (load[each] / sizes[each], -each))
        bar, best = load[top] / sizes[top] * (1.0 - 1e-9), None
        for node in range(len(sizes)):
            for ours in packs[top] if node != top else ():
                for theirs in packs[node]:
                    less = weights[ours] - weights[theirs]
                    worst = max((load[top] - less) / sizes[top], (load[node] + less) / sizes[node])
                    if worst < bar:
                        bar, best = worst, (node, ours, theirs, less)
        if best is None:
            return packs
        node, ours, theirs, less = best
        packs[top][packs[top].index(ours)] = theirs
        packs[node][packs[node].index(theirs)] = ours
        load[top] -= less
        load[node] += less


def place(loads: Sequence[Sequence[float]], geometry: Geometry, *, current: Placement | None = None,
          alive: Sequence[bool] | None = None, version: int = 1) -> Placement:
    """A balanced map for these loads (per layer and logical expert, any unit): see `Placer.place`."""
    placer = Placer(geometry, alive)
    layers = tuple(tuple(placer.place(each, current.layers[layer] if current is not None else None))
                   for layer, each in enumerate(loads))
    return Placement(version, geometry.num_experts, geometry.slots_per_rank, layers)


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
class MoveExperts:
    """rebalancer -> data plane, a `Load`: copy experts, with all their tensors, into slots that no map in use names.

    Answered exactly once before `deadline_s` (seconds from when it was sent), by `ExpertsMoved` when every copy is
    whole and proved, or by `Failed`; either answer says that nothing is written any more.
    """

    verb_id: int
    deadline_s: float
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class ExpertsMoved:
    """data plane -> rebalancer: all moves of a `MoveExperts` are done."""

    verb_id: int


@dataclass(frozen=True, slots=True)
class RankLost:
    """host -> rebalancer: a rank's process is gone or fenced off; its slots are lost."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankBack:
    """host -> rebalancer: a new process has the rank. `held`: int16 experts in its slots, layer by layer, packed."""

    rank: int
    held: bytes                # EMPTY for a slot with nothing in it


@dataclass(frozen=True, slots=True)
class Rebalance:
    """operator -> rebalancer: do it now, without the gate; with a `goal` towards this map."""

    goal: PackedPlacement | None = None


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

    def ended(self, verb_id: int) -> None:
        """It was answered."""
        self._running.pop(verb_id, None)

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
                 address: Address = "experts", scheduler: Address = "scheduler",
                 dataplane: Address = "dataplane") -> None:
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
        self._next_verb = 1
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
        if self.is_moving or self._missing or now < self._not_before or self.stats.num_steps < self._pass_at:
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
        verb_id, self._next_verb = self._next_verb, self._next_verb + 1
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
