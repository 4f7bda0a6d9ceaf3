"""Figures of one instance, for metrics and heartbeats: counters that only grow, and gauges of a moment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tripool.control.rank import Rank
from tripool.control.sequence import Phase, Sequence


@dataclass(slots=True)
class SchedulerStats:
    """Counters are kept up by the scheduler; gauges are as `measure` last found them."""

    num_running: int = 0                  # rows in the engine that compute or decode
    num_waiting: int = 0                  # in line, or waiting for a Fetch or Pull
    num_waiting_tokens: int = 0           # still to be computed or pulled
    num_handed_over: int = 0              # whose blocks wait to be pulled
    num_free_blocks: int = 0
    num_held_blocks: int = 0
    num_cached_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_blocks: int = 0
    steps: int = 0
    aborted_steps: int = 0                # given up, because a rank was gone or too late
    lost_ranks: int = 0
    returned_ranks: int = 0
    requests: int = 0
    finished: int = 0
    handed_over: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0                # of requests whose first token came
    local_hit_tokens: int = 0             # context found in this instance's cache
    pool_hit_tokens: int = 0              # context fetched from the pool
    computed_tokens: int = 0              # in chunks, those that were computed again included
    generated_tokens: int = 0
    engine_seconds: float = 0.0
    fetches: int = 0
    fetches_failed: int = 0
    pulls: int = 0
    pulled_blocks: int = 0
    stores: int = 0
    stored_blocks: int = 0                # that were new to the pool
    stores_skipped_blocks: int = 0        # not offered, because the pool was slow to take earlier ones
    failures: dict[str, int] = field(default_factory=dict)      # by cause
    aborts: dict[str, int] = field(default_factory=dict)        # by phase

    def measure(self, sequences: Collection[Sequence], ranks: list[Rank]) -> None:
        """Set the gauges to what is so now; `sequences` are all that live on the instance."""
        self.num_running = sum(rank.num_running for rank in ranks)
        self.num_handed_over = sum(each.phase is Phase.HANDED for each in sequences)
        self.num_waiting = len(sequences) - self.num_handed_over - self.num_running
        self.num_waiting_tokens = sum(each.num_to_compute for each in sequences
                                      if each.phase not in (Phase.DECODING, Phase.HANDED))
        self.num_blocks = sum(rank.blocks.num_blocks for rank in ranks)
        self.num_free_blocks = sum(rank.blocks.num_free for rank in ranks)
        self.num_held_blocks = sum(rank.blocks.num_held for rank in ranks)
        self.num_cached_blocks = sum(rank.blocks.num_cached for rank in ranks)
        self.num_quarantined_blocks = sum(rank.blocks.num_quarantined for rank in ranks)
