"""Cached context of one instance: the keys of its blocks, and the trade of blocks with the pool.

A full block is named by a chain of hashes, under which this instance and the pool know what it holds. What a request
finds here is shared, what the pool has is fetched before computing, and what the pool lacks is offered to it in the
background. A pool that is slow or gone costs a bounded share of the blocks and a bounded wait, never a request.
"""

from __future__ import annotations

from tripool.control.blocks import BlockAllocator
from tripool.control.outbox import Outbox
from tripool.control.rank import Rank
from tripool.control.sequence import Phase, Sequence
from tripool.control.stats import SchedulerStats
from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.keys import block_keys, namespace_key, root_key
from tripool.core.messages import Facts, Fetch, Fetched, Store
from tripool.core.request import TOKEN_BYTES

STORE_SHARE = 4
"""One part in so many of a rank's blocks may be named by unanswered `Store`s: a slow pool must not keep the rest."""

FETCH_PAUSE_S = 5.0
"""After a `Fetch` failed the pool is not asked for so long: one that is gone or stuck delays few requests, not all."""


class ContextCache:
    """Names blocks, finds them again, and asks the pool to bring and to keep them."""

    def __init__(self, config: InstanceConfig, deployment: Deployment, outbox: Outbox, stats: SchedulerStats) -> None:
        self._caches = config.enable_prefix_caching
        self._stores_generated = config.store_generated
        self._uses_pool = deployment.cache.count > 0 and config.enable_prefix_caching
        self._fetch_deadline_s = deployment.cache.fetch_deadline_s
        self._store_deadline_s = deployment.cache.store_deadline_s
        self._outbox = outbox
        self._stats = stats
        self._fetch_not_before = 0.0
        self._namespace = b""
        self._block_tokens = 0

    def loaded(self, facts: Facts) -> None:
        """Blocks are interchangeable with those of instances that have the same model, layout and block size."""
        self._block_tokens = facts.block_tokens
        self._namespace = namespace_key({"fingerprint": facts.fingerprint, "layout": facts.layout,
                                         "block_tokens": str(facts.block_tokens)})

    # ------------------------------------------------------------ keys

    def name_blocks(self, sequence: Sequence) -> None:
        """Name the full blocks that have no key yet. What is only pulled here is named when it leaves."""
        if not self._caches or sequence.grant is not None:
            return
        parent = sequence.keys[-1] if sequence.keys else root_key(self._namespace, sequence.request.salt)
        rest = sequence.tokens[len(sequence.keys) * self._block_tokens * TOKEN_BYTES:]
        sequence.keys += block_keys(parent, rest, self._block_tokens)

    def prefix_keys(self, sequence: Sequence) -> list[bytes]:
        """Of the blocks that may stand in for computing: at least the last token is computed."""
        if sequence.grant is not None or not sequence.takes_prefix:
            return []
        return sequence.keys[:(sequence.num_tokens - 1) // self._block_tokens]

    def register(self, sequence: Sequence, blocks: BlockAllocator) -> None:
        """Make the full blocks computed so far known under their keys."""
        first, end = sequence.num_registered, min(sequence.num_computed // self._block_tokens, len(sequence.keys))
        if end > first:
            blocks.register(sequence.blocks[first:end], sequence.keys[first:end])
            sequence.num_registered = end

    def keep(self, sequence: Sequence, rank: Rank) -> None:
        """A row leaves: its full blocks stay cached, and the pool is offered those it does not have."""
        self.name_blocks(sequence)
        self.register(sequence, rank.blocks)
        self.store(sequence, rank)

    # ------------------------------------------------------------ from the pool

    def fetch(self, sequence: Sequence, blocks: BlockAllocator, now: float) -> bool:
        """Ask the pool for what follows the blocks found here. False: nothing to ask for, or not the time to ask."""
        keys = self.prefix_keys(sequence)[sequence.num_registered:]
        if not self._uses_pool or not keys or now < self._fetch_not_before:
            return False
        sequence.phase = Phase.FETCHING
        first, sequence.num_published = sequence.num_published, sequence.num_published + len(keys)
        self._stats.fetches += 1
        into = blocks.refs(sequence.blocks[first:sequence.num_published])
        self._outbox.ask(Fetch(self._outbox.verb_id(), self._fetch_deadline_s, sequence.rank, tuple(keys),
                               tuple(into)), sequence)
        return True

    def fetched(self, sequence: Sequence, fetched: Fetched, blocks: BlockAllocator) -> None:
        """Blocks have come that need not be computed."""
        first = sequence.num_registered
        end = max(first, min(first + fetched.num_blocks, len(self.prefix_keys(sequence))))
        arrived = sequence.blocks[first:end]
        blocks.register(arrived, sequence.keys[first:end])
        blocks.set_pooled(arrived, True)
        blocks.set_checksums(zip(arrived, fetched.checksums, strict=False))
        sequence.num_registered = end
        num_hit = len(arrived) * self._block_tokens
        sequence.num_computed += num_hit
        self._stats.pool_hit_tokens += num_hit

    def fetch_failed(self, now: float) -> None:
        """A miss like any other, but the pool is left alone for a while."""
        self._stats.fetches_failed += 1
        self._fetch_not_before = now + FETCH_PAUSE_S

    # ------------------------------------------------------------ to the pool

    def store(self, sequence: Sequence, rank: Rank) -> None:
        """Offer the pool what it lacks, as far as it keeps up."""
        if not self._uses_pool:
            return
        end = sequence.num_registered
        if not self._stores_generated:
            end = min(end, sequence.request.num_prompt_tokens // self._block_tokens)
        fresh = rank.blocks.unpooled(sequence.keys[:end], sequence.blocks[:end])
        num_allowed = max(1, rank.blocks.num_blocks // STORE_SHARE) - rank.num_storing
        self._stats.stores_skipped_blocks += max(0, len(fresh) - num_allowed)
        fresh = fresh[:num_allowed]
        if not fresh:
            return
        keys, blocks = zip(*fresh, strict=True)
        rank.blocks.pin(*blocks)
        rank.blocks.set_pooled(blocks, True)
        rank.num_storing += len(blocks)
        self._stats.stores += 1
        self._outbox.ask(Store(self._outbox.verb_id(), self._store_deadline_s, rank.index, keys,
                               tuple(rank.blocks.refs(blocks))))

    def stored(self, verb: Store, num_new: int | None, rank: Rank) -> None:
        """With None the pool did not take them; they are offered again when somebody uses them again."""
        rank.num_storing -= len(verb.blocks)
        self._stats.stored_blocks += num_new or 0
        blocks = [ref.block for ref in reversed(verb.blocks)]
        if num_new is None:
            rank.blocks.set_pooled(blocks, False)
        rank.blocks.unpin(*blocks)
