"""The paged allocator of one rank: which blocks are free, held, cached or quarantined.

A block is *held* while somebody counts on it, *quarantined* while nobody does but a verb that is still unanswered
names it, *cached* while only its key is worth keeping, and *free* otherwise. Free and cached blocks can be given out;
free ones go first, then the cached one that was left alone for longest. Every time a block is given out for new
contents its generation grows by one, so that whoever remembers an older life of it can tell.

It knows nothing of requests, tokens or bytes; a checksum is a number that somebody remembers here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from tripool.core.plan import BlockId, BlockRef


class BlockAllocator:
    """The blocks of one rank. free + held + quarantined + cached = all, after every call."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_available = num_blocks           # that `allocate` could give out now: free or cached
        self.num_held = 0
        self.num_quarantined = 0
        self._refs = [0] * num_blocks             # sequences that count on the block
        self._pins = [0] * num_blocks             # unanswered verbs that name it on nobody's behalf
        self._generations = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._checksums: list[int | None] = [None] * num_blocks
        self._pooled = [False] * num_blocks       # the pool has these contents, or was offered them
        self._free = list(range(num_blocks - 1, -1, -1))            # a stack: the lowest number first
        self._cached: OrderedDict[BlockId, None] = OrderedDict()    # the longest unused first
        self._by_key: dict[bytes, BlockId] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def allocate(self, count: int) -> list[BlockId]:
        """Give out `count` blocks for new contents, each held once and in its next life."""
        assert count <= self.num_available, f"{count} blocks asked for, {self.num_available} there"
        free, generations, refs = self._free, self._generations, self._refs
        blocks = free[:-count - 1:-1]
        del free[len(free) - len(blocks):]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            generations[block] += 1
            refs[block] = 1
        self.num_available -= count
        self.num_held += count
        return blocks

    def match(self, keys: Sequence[bytes]) -> list[BlockId]:
        """The blocks that hold the longest run of leading keys. They are not held yet."""
        blocks = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_cached_of(self, blocks: Iterable[BlockId]) -> int:
        """How many of these would no longer be available once held."""
        return sum([block in self._cached for block in blocks])

    def hold(self, *blocks: BlockId) -> None:
        """Count on blocks that `match` found."""
        refs, pins, cached = self._refs, self._pins, self._cached
        for block in blocks:
            if not refs[block]:
                if pins[block]:
                    self.num_quarantined -= 1
                else:
                    assert block in cached, f"block {block} is free and cannot be shared"
                    del cached[block]
                    self.num_available -= 1
                self.num_held += 1
            refs[block] += 1

    def release(self, *blocks: BlockId) -> None:
        """Count on blocks no longer."""
        refs, pins = self._refs, self._pins
        unused = []
        for block in blocks:
            assert refs[block] > 0, f"block {block} released twice"
            refs[block] -= 1
            if not refs[block]:
                self.num_held -= 1
                if pins[block]:
                    self.num_quarantined += 1
                else:
                    unused.append(block)
        self._settle(unused)

    def pin(self, *blocks: BlockId) -> None:
        """A verb names these blocks: they are not given out again before `unpin`."""
        refs, pins = self._refs, self._pins
        for block in blocks:
            if not refs[block] and not pins[block]:
                assert block in self._cached, f"block {block} is free and cannot be pinned"
                del self._cached[block]
                self.num_available -= 1
                self.num_quarantined += 1
            pins[block] += 1

    def unpin(self, *blocks: BlockId) -> None:
        """The verb that named these blocks was answered."""
        refs, pins = self._refs, self._pins
        unused = []
        for block in blocks:
            assert pins[block] > 0, f"block {block} unpinned twice"
            pins[block] -= 1
            if not pins[block] and not refs[block]:
                self.num_quarantined -= 1
                unused.append(block)
        self._settle(unused)

    def quarantine(self, *blocks: BlockId) -> None:
        """Count on blocks no longer, but keep them until the verb that names them was answered (`unpin`)."""
        self.pin(*blocks)
        self.release(*blocks)

    def register(self, blocks: Sequence[BlockId], keys: Sequence[bytes]) -> None:
        """Remember what full blocks hold. Where another block is known under the key, it stays so."""
        refs, pins, known, by_key = self._refs, self._pins, self._keys, self._by_key
        for block, key in zip(blocks, keys, strict=True):
            assert refs[block] or pins[block], f"block {block} is nobody's and cannot be registered"
            if key not in by_key and known[block] is None:
                known[block] = key
                by_key[key] = block

    def forget_cached(self) -> int:
        """Drop the keys of all blocks that nobody counts on. Returns how many cached blocks became free."""
        for key, block in list(self._by_key.items()):
            if not self._refs[block]:
                del self._by_key[key]
                self._keys[block] = None
        dropped = list(reversed(self._cached))
        self._cached.clear()
        self.num_available -= len(dropped)
        self._settle(dropped)
        return len(dropped)

    def refs(self, blocks: Iterable[BlockId]) -> list[BlockRef]:
        """The blocks in their present life."""
        generations = self._generations
        return [BlockRef(block, generations[block]) for block in blocks]

    def key(self, block: BlockId) -> bytes | None:
        return self._keys[block]

    def checksums(self, blocks: Iterable[BlockId]) -> list[int | None]:
        """Of the blocks' contents, where somebody said them."""
        known = self._checksums
        return [known[block] for block in blocks]

    def proofs(self, blocks: Iterable[BlockId]) -> list[tuple[BlockId, int, int | None]]:
        """Each of these blocks, its generation, and its checksum if somebody said it."""
        generations, checksums = self._generations, self._checksums
        return [(block, generations[block], checksums[block]) for block in blocks]

    def set_checksums(self, sums: Iterable[tuple[BlockId, int]]) -> None:
        checksums = self._checksums
        for block, checksum in sums:
            checksums[block] = checksum

    def unpooled(self, keys: Iterable[bytes], blocks: Iterable[BlockId]) -> list[tuple[bytes, BlockId]]:
        """Those of these blocks that are known under their key, and whose contents the pool was not offered."""
        known, pooled = self._keys, self._pooled
        return [(key, block) for key, block in zip(keys, blocks, strict=True)
                if known[block] == key and not pooled[block]]

    def set_pooled(self, blocks: Iterable[BlockId], pooled: bool) -> None:
        are_pooled = self._pooled
        for block in blocks:
            are_pooled[block] = pooled

    def num_refs(self, block: BlockId) -> int:
        return self._refs[block]

    def num_pins(self, block: BlockId) -> int:
        return self._pins[block]

    def check(self) -> None:
        """Count everything again; raises AssertionError where the books are wrong."""
        held = quarantined = 0
        free = dict.fromkeys(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        for block in range(self.num_blocks):
            used = bool(self._refs[block]), bool(self._pins[block]), block in self._cached, block in free
            assert self._refs[block] >= 0 and self._pins[block] >= 0, f"block {block} was given back too often"
            held += used[0]
            quarantined += used[1] and not used[0]
            assert not ((used[0] or used[1]) and (used[2] or used[3])), f"block {block} is in use and to be had"
            assert any(used), f"block {block} is lost"
            key = self._keys[block]
            assert key is None or self._by_key[key] == block, f"block {block} has a key that names another block"
            assert key is None or not used[3], f"block {block} is free but has a key"
            assert key is not None or not used[2], f"block {block} is cached without a key"
        assert (held, quarantined) == (self.num_held, self.num_quarantined), "held or quarantined blocks are miscounted"
        assert self.num_available == self.num_free + self.num_cached, "blocks to be had are miscounted"
        total = self.num_free + self.num_held + self.num_quarantined + self.num_cached
        assert total == self.num_blocks, f"{total} blocks of {self.num_blocks} are accounted for"

    def _settle(self, blocks: list[BlockId]) -> None:
        """Nobody counts on these blocks any more, and no verb names them."""
        keys, checksums, pooled, cached, free = self._keys, self._checksums, self._pooled, self._cached, self._free
        for block in blocks:
            if keys[block] is None:
                checksums[block] = None
                pooled[block] = False
                free.append(block)
            else:
                cached[block] = None
        self.num_available += len(blocks)

    def _evict(self, count: int) -> list[BlockId]:
        """Forget what the cached blocks hold that were left alone for longest."""
        cached, by_key, keys, checksums, pooled = self._cached, self._by_key, self._keys, self._checksums, self._pooled
        blocks = list(islice(cached, count))
        for block in blocks:
            del cached[block]
            key = keys[block]
            assert key is not None, f"block {block} is cached without a key"
            del by_key[key]
            keys[block] = checksums[block] = None
            pooled[block] = False
        return blocks
