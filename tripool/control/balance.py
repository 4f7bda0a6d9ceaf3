"""Balanced placement of experts: which get copies, and on which ranks they live.

After EPLB (github.com/deepseek-ai/EPLB; the paper's redundant experts, section 4.1): hot experts get copies, and copies
are packed so that the busiest rank of each layer has as little as possible. With nodes the groups of the router go to
nodes first (*hierarchical*, for prefill), without them all ranks are alike (*global*, for decode). What EPLB leaves
open is done here: slots may be uneven, copies of one expert are on different ranks, and an expert stays where it is
unless moving it helps. How it gets where it should be is `control.experts`'.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from itertools import accumulate
from math import fsum

from tripool.core.placement import EMPTY, Geometry, Placement, initial_layer

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
    """Load of each rank in one layer: every copy of an expert takes an equal share of its load.

    Sums are exact before they are rounded, so that no rank seems to have more because its slots are in another order.
    """
    num_copies = [0] * len(loads)
    for expert in experts:
        if expert != EMPTY:
            num_copies[expert] += 1
    shares: list[list[float]] = [[] for _ in range(num_ranks)]
    for slot, expert in enumerate(experts):
        if expert != EMPTY:
            shares[rank_of[slot]].append(loads[expert] / num_copies[expert])
    return [fsum(each) for each in shares]


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

        The busiest rank has no more than with `current` (if that is a placement on the living ranks with no empty slot,
        the shared expert in its own slots alone; every slot gets an expert here, and copies take turns whatever else
        their ranks have), and with `move_load` 0 no more than with the initial placement. Among placements within
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
                fresh, peak, limit = self._settled(loads, self._initial, held), at_start, at_start
            limit = min(limit, at_start)
        near = self._near(loads, held, limit) if current is not None else None
        if near is None:
            return fresh
        saved = self._num_moves(held, fresh) - self._num_moves(held, near)
        if saved < 0:
            return fresh
        return near if self.peak(near, loads) <= max(limit, peak + saved * move_load) else fresh

    def _settled(self, loads: Sequence[float], experts: Sequence[int], held: Sequence[int]) -> list[int]:
        """`experts` with its ranks renamed to what they hold: as even as before."""
        packing = _Packing(self, loads)
        for ranks in self._nodes:
            packing.adopt(ranks, experts, self._experts)
            packing.rename(ranks, held)
        return packing.to_slots(held)

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
