"""How many threads a process computes with. How many it may have is decided in `serve/budget.py`, for all processes.

A rank's kernels have a small pool of their own (`ops/csrc/threads.h`). Torch has another, whose threads wait actively
after each operation: on the cores where ours want to run. So where kernels compute, torch keeps to the calling thread.
"""

from __future__ import annotations

import torch

from tripool.engine.ops import native


def set_threads(num_threads: int) -> None:
    """For tools that compute with torch. To be called on the thread that computes: OpenMP counts for each caller."""
    torch.set_num_threads(num_threads)
    torch.set_flush_denormal(True)


def set_rank_threads(num_threads: int) -> None:
    """For ranks: kernels get them all, and torch only where there are no kernels. On the thread that computes, too."""
    native.use_threads(num_threads)
    set_threads(num_threads if native.chosen_level() < 0 else 1)
