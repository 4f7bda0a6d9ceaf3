"""The ranks of one instance as a group that exchanges tensors, over gloo.

A group is an object, not a state of the process, so one process may belong to several. Its calls are collective:
every rank makes the same ones in the same order, and each ends by `timeout_s` if another rank is gone. Ranks meet
through a store (a file or a TCP port) that whoever starts them has chosen; they listen on loopback unless told.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """This rank's end of the group."""

    rank: int
    num_ranks: int
    backend: Any              # a gloo process group

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent[r]` rows to each rank r, in order, and get `received[r]` from it. gloo moves host memory."""
        source = rows.contiguous().cpu()
        target = source.new_empty(sum(received), *source.shape[1:])
        self.backend.alltoall_base(target, source, received, sent).wait()
        return target.to(rows.device)

    def exchange_counts(self, sent: list[int]) -> list[int]:
        """How many rows each rank is about to send here."""
        ones = [1] * self.num_ranks
        return self.all_to_all(torch.tensor(sent), ones, ones).tolist()


def join_group(rank: int, num_ranks: int, store: dist.Store, *, timeout_s: float = 60.0,
               host: str = "127.0.0.1") -> Group:
    """Meet the other ranks at a store; returns when all are there.

    Raises:
        RuntimeError: a rank did not come within `timeout_s`.
    """
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return Group(rank, num_ranks, dist.ProcessGroupGloo(store, rank, num_ranks, options))


def file_store(path: Path, num_ranks: int) -> dist.Store:
    """A meeting place for ranks of one host: a file that none of them has used before."""
    return dist.FileStore(str(path), num_ranks)
