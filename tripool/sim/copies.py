"""Fetch, Store and Pull with a price: bytes travel in `fabric`, the pool is `servers`, a pulled block proves itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tripool.core.machine import Address, Send
from tripool.core.messages import Failed, Fetch, Fetched, Pull, Pulled, Store, Stored
from tripool.core.plan import BlockRef
from tripool.sim.fabric import Copy, Endpoint, FlowDue
from tripool.sim.world import SUM, Generations, World


class Copies:
    """Those of one life of one instance, whose blocks have the generations that are kept here."""

    def __init__(self, member: Address, address: Address, generations: list[Generations], world: World,
                 lost: Collection[int]) -> None:
        """`address`: of who is told that a copy is due; `lost`: ranks without a process, as they are at any time."""
        self.generations = generations
        self._member, self._address, self._world, self._lost = member, address, world, lost

    def publish(self, rank: int, into: Sequence[BlockRef]) -> None:
        """Blocks of a rank get new contents: whoever was granted the old ones finds them gone."""
        generations = self.generations[rank]
        for ref in into:
            generations[ref.block] = ref.generation

    def fetch(self, verb: Fetch, now: float) -> list[Send]:
        self.publish(verb.rank, verb.into)
        found = self._world.servers.find(verb.keys)
        self._begin_pool_copy(sum(found.values()), found, verb, now)
        return []

    def store(self, verb: Store, now: float) -> list[Send]:
        missing = self._world.servers.missing(verb.keys)
        self._begin_pool_copy(sum(missing.values()), missing, verb, now)
        return []

    def pull(self, verb: Pull, now: float) -> list[Send]:
        self.publish(verb.rank, verb.into)
        ranks = [part.rank for part in verb.grant.parts]
        num_blocks = len(verb.into)
        ends: list[tuple[Endpoint, float]] = [((self._member, verb.rank), 1.0)]
        ends += [((verb.grant.source, rank), ranks.count(rank) / num_blocks) for rank in dict.fromkeys(ranks)]
        self._begin(self._world.fabric.planes.pull, num_blocks, ends, verb, now)
        return []

    def lose_rank(self, rank: int, now: float) -> None:
        """Its copies, under way or asked for before its end was known, fail now. What others copy from it goes on."""
        self._world.fabric.fail_transfers_of(self._address, rank, f"rank {rank} of {self._member} is gone", now)

    def _begin_pool_copy(self, num_blocks: int, servers: dict[str, int], verb: Fetch | Store, now: float) -> None:
        planes = self._world.fabric.planes
        in_software, at_server = planes.pool_shares
        ends = [((self._member, verb.rank), 1.0)]
        ends += [((server, 0), count / num_blocks * at_server) for server, count in servers.items()]
        if in_software:
            ends.append(((f"{self._member}/pool", verb.rank), in_software))
        self._begin(planes.pool, num_blocks, ends, verb, now)

    def _begin(self, plane: str, num_blocks: int, ends: list[tuple[Endpoint, float]], verb: Copy, now: float) -> None:
        self._world.fabric.begin(plane, num_blocks, self._world.block_bytes, ends, self._address, verb, now)
        if verb.rank in self._lost:
            self.lose_rank(verb.rank, now)

    def end(self, due: FlowDue, now: float) -> list[Send]:
        """A copy has arrived or failed."""
        verb, num_blocks = due.flow.verb, due.flow.num_blocks
        cause = due.cause
        if isinstance(verb, Pull):
            cause = cause or self._stale(verb)
        if self._world.watcher is not None:
            self._world.watcher.copy(type(verb).__name__, self._member, due.flow.plane, due.flow.begun_s, now,
                                     due.flow.num_bytes, cause)
        if cause:
            return [Send(self._member, Failed(verb.verb_id, cause))]
        if isinstance(verb, Fetch):
            return [Send(self._member, Fetched(verb.verb_id, num_blocks, (SUM,) * num_blocks))]
        if isinstance(verb, Store):
            return [Send(self._member, Stored(verb.verb_id, self._world.servers.put(verb.keys)))]
        return [Send(self._member, Pulled(verb.verb_id))]

    def _stale(self, verb: Pull) -> str:
        """Why the granted blocks are not what they were; empty if they are."""
        grant = verb.grant
        arenas = self._world.arenas.get((grant.source, grant.boot_id))
        if arenas is None:
            return f"{grant.source} is not mapped"
        for part in grant.parts:
            if arenas[part.rank][part.block] != part.generation:
                return f"block {part.block} of {grant.source} is not the one that was granted"
        return ""
