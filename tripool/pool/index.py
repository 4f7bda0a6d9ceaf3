"""Which blocks a server has, who holds them, and which one goes when room is needed.

A put reserves room, writes in place and seals; nobody sees a block before it is sealed, and the first
seal of a key wins. A read takes a lease. What a client holds, in either way, is never given away: it
ends when the client gives it back or its process is gone, and no timer ends it. Only sealed blocks
without leases are evicted, the longest unused first. A block that is dropped while it is read leaves
the index at once and its memory when the last lease ends.

The index lives in the owner's own memory, so a client that dies at any moment leaves nothing half
done. It is plain state: it knows no sockets, processes or clocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import asdict, dataclass
from enum import Enum

from tripool.pool.arena import HEADER_BYTES, Mapping, block_header, checksum_of
from tripool.pool.extents import ExtentAllocator
from tripool.pool.wire import Status

BUSY_S = 1.0
"""A key that somebody began to write less than this ago is BUSY for others. After it they may write it too and the
first seal wins, so that a stopped writer blocks nobody."""

MAX_HELD_FRACTION = 0.75
"""Of the arena, by one client: a client that hangs leaves room for the others."""


class State(Enum):
    """The life of a block."""

    WRITING = "writing"      # reserved; only its writer knows it
    SEALED = "sealed"        # visible
    DROPPED = "dropped"      # no longer visible; its memory goes with the last lease


@dataclass(slots=True, eq=False)
class Block:
    """An extent of the arena in one life."""

    key: bytes
    offset: int
    num_bytes: int
    generation: int
    reserved_at: float
    state: State = State.WRITING
    checksum: int = 0
    num_leases: int = 0


class Holder:
    """One client, as far as blocks are concerned: its leases and reservations by number."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocks: dict[int, Block] = {}
        self.held_bytes = 0                       # a block counts once, however often it is leased
        self._times: Counter[Block] = Counter()

    def take(self, hold: int, block: Block) -> None:
        self.blocks[hold] = block
        self._times[block] += 1
        if self._times[block] == 1:
            self.held_bytes += block.num_bytes

    def give_back(self, hold: int) -> Block | None:
        block = self.blocks.pop(hold, None)
        if block is not None:
            self._times[block] -= 1
            if not self._times[block]:
                del self._times[block]
                self.held_bytes -= block.num_bytes
        return block

    def held_with(self, block: Block) -> int:
        """Bytes it would hold with this block too."""
        return self.held_bytes + (0 if block in self._times else block.num_bytes)


@dataclass(slots=True)
class Counters:
    """What happened since the server started."""

    hits: int = 0
    misses: int = 0
    partial: int = 0             # prefix reads that ended at a miss after at least one hit
    stored: int = 0
    stored_bytes: int = 0
    duplicates: int = 0          # puts of what was there already
    busy: int = 0
    no_space: int = 0
    capped: int = 0              # leases and reservations refused because their client holds too much
    evictions: int = 0
    evicted_bytes: int = 0
    lease_lost: int = 0          # reads that found another block after their copy
    damaged: int = 0             # blocks dropped because their bytes had changed
    unknown_seals: int = 0
    reclaimed: int = 0           # holds of processes that were gone


class BlockIndex:
    """All blocks of one arena."""

    def __init__(self, arena: Mapping, *, busy_s: float = BUSY_S, max_held_fraction: float = MAX_HELD_FRACTION) -> None:
        self.counters = Counters()
        self._arena = arena
        self._busy_s = busy_s
        self._extents = ExtentAllocator(arena.num_bytes)
        self._max_held_bytes = int(arena.num_bytes * max_held_fraction)
        self._sealed: dict[bytes, Block] = {}
        self._unleased: OrderedDict[bytes, Block] = OrderedDict()     # sealed, the next to evict first
        self._writing: dict[bytes, list[Block]] = {}
        self._num_dropped = 0
        self._last_generation = 0

    # ------------------------------------------------------------------------------------------ put

    def reserve(self, holder: Holder, hold: int, key: bytes, num_bytes: int, now: float) -> Status | Block:
        """Room for a block that `holder` is to write, or why there is none."""
        if key in self._sealed:
            self.counters.duplicates += 1
            return Status.EXISTS
        if any(now - block.reserved_at < self._busy_s for block in self._writing.get(key, ())):
            self.counters.busy += 1
            return Status.BUSY
        if not self._may_hold(holder.held_bytes + num_bytes) or not self._make_room(num_bytes + HEADER_BYTES):
            self.counters.no_space += 1
            return Status.NO_SPACE
        offset = self._extents.allocate(num_bytes + HEADER_BYTES)
        assert offset is not None, f"room was made for {num_bytes} bytes, but there is none"
        self._last_generation += 1
        block = Block(key, offset, num_bytes, self._last_generation, reserved_at=now)
        self._writing.setdefault(key, []).append(block)
        holder.take(hold, block)
        return block

    def seal(self, holder: Holder, hold: int, checksum: int) -> Status:
        """Make a written block visible. The loser of a race is told EXISTS and its room is free again."""
        block = holder.blocks.get(hold)
        if block is None or block.state is not State.WRITING:
            self.counters.unknown_seals += 1
            return Status.LOST
        if block.key in self._sealed:
            self.counters.duplicates += 1
            self.release(holder, hold)
            return Status.EXISTS
        holder.give_back(hold)
        self._forget_writing(block)
        block.state, block.checksum = State.SEALED, checksum
        self._arena.write_header(block.offset, block_header(block.key, block.generation, block.num_bytes, checksum))
        self._sealed[block.key] = self._unleased[block.key] = block
        self.counters.stored += 1
        self.counters.stored_bytes += block.num_bytes
        return Status.OK

    # ------------------------------------------------------------------------------------------ get

    def lease(self, holder: Holder, hold: int, key: bytes) -> Block | None:
        """The block of `key`, kept as it is until the hold ends; None is a miss."""
        block = self._sealed.get(key)
        if block is None or not self._may_hold(holder.held_with(block)):
            self.counters.misses += 1
            return None
        self.counters.hits += 1
        self._unleased.pop(key, None)
        block.num_leases += 1
        holder.take(hold, block)
        return block

    def exists(self, key: bytes) -> bool:
        return key in self._sealed

    # ------------------------------------------------------------------------------------------ the end of a hold

    def release(self, holder: Holder, hold: int) -> None:
        """End a lease, or abandon a reservation. A hold that is not there has ended already."""
        block = holder.give_back(hold)
        if block is None:
            return
        if block.state is State.WRITING:
            self._forget_writing(block)
            self._free(block)
            return
        block.num_leases -= 1
        assert block.num_leases >= 0, f"block at {block.offset} was released more often than leased"
        if block.num_leases == 0 and block.state is State.SEALED:
            self._unleased[block.key] = block
        elif block.num_leases == 0:
            self._num_dropped -= 1
            self._free(block)

    def release_all(self, holder: Holder) -> None:
        """End all holds of a client whose process is gone."""
        self.counters.reclaimed += len(holder.blocks)
        for hold in sorted(holder.blocks, reverse=True):
            self.release(holder, hold)

    # ------------------------------------------------------------------------------------------ dropping

    def flush(self) -> int:
        """Forget every sealed block; those being read keep their memory until they are not."""
        blocks = list(self._sealed.values())
        for block in blocks:
            self._drop(block)
        return len(blocks)

    def suspect(self, key: bytes) -> None:
        """A reader found bytes that do not fit their proof: look again, and drop the block if it is so."""
        block = self._sealed.get(key)
        if block is not None and not self._is_whole(block):
            self.counters.damaged += 1
            self._drop(block)

    def _is_whole(self, block: Block) -> bool:
        header = block_header(block.key, block.generation, block.num_bytes, block.checksum)
        return (self._arena.header(block.offset) == header
                and checksum_of(self._arena.data(block.offset, block.num_bytes)) == block.checksum)

    def _drop(self, block: Block) -> None:
        del self._sealed[block.key]
        self._unleased.pop(block.key, None)
        block.state = State.DROPPED
        if block.num_leases == 0:
            self._free(block)
        else:
            self._num_dropped += 1

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until an extent of `num_bytes` fits; evict nothing when it never would."""
        if self._extents.largest_free_bytes >= num_bytes:
            return True
        oldest = next(iter(self._unleased.values()), None)
        if oldest is None:
            return False
        if self._extents.size_of(oldest.offset) < num_bytes and not self._extents.could_fit(
                num_bytes, (block.offset for block in self._unleased.values())):
            return False
        while self._extents.largest_free_bytes < num_bytes:
            victim = next(iter(self._unleased.values()))
            self.counters.evictions += 1
            self.counters.evicted_bytes += victim.num_bytes
            self._drop(victim)
        return True

    def _may_hold(self, held_bytes: int) -> bool:
        if held_bytes <= self._max_held_bytes:
            return True
        self.counters.capped += 1
        return False

    def _forget_writing(self, block: Block) -> None:
        others = self._writing[block.key]
        others.remove(block)
        if not others:
            del self._writing[block.key]

    def _free(self, block: Block) -> None:
        self._arena.wipe_header(block.offset)     # before the bytes can be given to a writer
        self._extents.free(block.offset)

    # ------------------------------------------------------------------------------------------ figures

    def figures(self) -> dict[str, int]:
        """Counters and the present state, as plain numbers."""
        return {
            **asdict(self.counters),
            "blocks": len(self._sealed),
            "leased_blocks": len(self._sealed) - len(self._unleased),
            "dropped_blocks": self._num_dropped,
            "reserved_blocks": sum(map(len, list(self._writing.values()))),
            "used_bytes": self._extents.used_bytes,
            "capacity_bytes": self._extents.num_bytes,
        }

    def check(self, holders: list[Holder]) -> None:
        """Assert what always holds; for tests. Every used extent is one block, and every lease has an owner."""
        held = [block for holder in holders for block in holder.blocks.values()]
        writing = [block for blocks in self._writing.values() for block in blocks]
        dropped = {id(block): block for block in held if block.state is State.DROPPED}
        alive = [*self._sealed.values(), *writing, *dropped.values()]
        used = sum(self._extents.rounded(block.num_bytes + HEADER_BYTES) for block in alive)
        for holder in holders:
            distinct = {id(block): block.num_bytes for block in holder.blocks.values()}
            assert holder.held_bytes == sum(distinct.values())
        assert used == self._extents.used_bytes, f"{used} bytes in blocks, {self._extents.used_bytes} in extents"
        assert len(dropped) == self._num_dropped
        for block in alive:
            leases = sum(each is block for each in held) if block.state is not State.WRITING else 0
            assert block.num_leases == leases, f"{block.num_leases} leases counted, {leases} held"
            assert (block.key in self._unleased and self._unleased[block.key] is block) == (
                block.state is State.SEALED and leases == 0)


