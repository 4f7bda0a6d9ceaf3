"""Which rows compute how many of their tokens in a step.

The budget bounds the length of a step. Short prompts go first, so that none waits behind a long one; but a quarter of
the budget belongs to the row that came first, so that a stream of short ones cannot stop the long one. Among rows of
unlike priority only the most urgent get that quarter. It knows remaining token counts, not tokens, blocks or time.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from tripool.control.sequence import Sequence

OLDEST_SHARE = 4
"""One part in so many of the budget is kept for the first of the line."""


def split_budget(rows: Rows[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Share `budget` tokens among rows that have tokens to compute; rows that get none are left out."""
    if not rows or budget <= 0:
        return []
    first = min(rows, key=lambda row: row.order)
    kept = min(first.num_to_compute, max(1, budget // OLDEST_SHARE))
    left = budget - kept
    shares = []
    for row in sorted(rows, key=lambda row: (row.request.priority, row.num_to_compute, row.arrival)):
        own = kept if row is first else 0
        share = own + min(row.num_to_compute - own, left)
        left -= share - own
        if share:
            shares.append((row, share))
    return shares
