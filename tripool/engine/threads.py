"""How many threads torch computes with in this process."""

from __future__ import annotations

import torch


def set_threads(num_threads: int) -> None:
    """To be called on the thread that computes: OpenMP keeps the number per calling thread."""
    torch.set_num_threads(num_threads)
    torch.set_flush_denormal(True)
