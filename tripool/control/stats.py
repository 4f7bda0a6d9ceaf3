"""Figures of one instance, for metrics and heartbeats: counters that only grow, and gauges of a moment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tripool.control.rank import Rank
from tripool.control.sequence import Phase, Sequence

ALARMING_DRAFTS = 256
"""So many first drafts in a row, all of them wrong, are no chance: weights or hidden states are at fault."""


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
    role_changes: int = 0
    requests: int = 0
    finished: int = 0
    handed_over: int = 0
    handed_on: int = 0                    # rows that decoded here and go on elsewhere
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
    drafted_tokens: dict[str, int] = field(default_factory=dict)     # by position: `position=1` are the first of a step
    accepted_tokens: dict[str, int] = field(default_factory=dict)    # likewise, those that became tokens
    drafts_rejected_in_a_row: int = 0     # a gauge: first drafts since one was accepted
    draft_alarm: int = 0                  # a gauge: 1 while that is more than chance explains
    failures: dict[str, int] = field(default_factory=dict)      # by cause
    aborts: dict[str, int] = field(default_factory=dict)        # by phase

    def count_drafts(self, num_drafted: tuple[int, ...], num_accepted: tuple[int, ...]) -> None:
        """Add what one rank's step verified, by position."""
        if not num_drafted:
            return
        for position, (drafted, accepted) in enumerate(zip(num_drafted, num_accepted, strict=True), start=1):
            label = f"position={position}"
            self.drafted_tokens[label] = self.drafted_tokens.get(label, 0) + drafted
            self.accepted_tokens[label] = self.accepted_tokens.get(label, 0) + accepted
        if any(num_accepted):
            self.drafts_rejected_in_a_row = 0
        else:
            self.drafts_rejected_in_a_row += num_drafted[0]
        self.draft_alarm = int(self.drafts_rejected_in_a_row >= ALARMING_DRAFTS)

    def measure(self, sequences: Collection[Sequence], ranks: list[Rank]) -> None:
        """Set the gauges to what is so now; `sequences` are all that live on the instance."""
        self.measure_load(sequences, ranks)
        self.num_blocks = self.num_free_blocks = 0
        self.num_held_blocks = self.num_cached_blocks = self.num_quarantined_blocks = 0
        for rank in ranks:
            blocks = rank.blocks
            self.num_blocks += blocks.num_blocks
            self.num_free_blocks += blocks.num_free
            self.num_held_blocks += blocks.num_held
            self.num_cached_blocks += blocks.num_cached
            self.num_quarantined_blocks += blocks.num_quarantined

    def measure_load(self, sequences: Collection[Sequence], ranks: list[Rank]) -> None:
        """Of the gauges, those of requests."""
        self.num_running = sum([rank.num_running for rank in ranks])
        decoding, handed = Phase.DECODING, Phase.HANDED
        others = [each for each in sequences if each.phase is not decoding]          # few of thousands, mostly
        waiting = [each for each in others if each.phase is not handed]
        self.num_handed_over = len(others) - len(waiting)
        self.num_waiting = len(sequences) - self.num_handed_over - self.num_running
        self.num_waiting_tokens = sum([each.num_to_compute for each in waiting])
