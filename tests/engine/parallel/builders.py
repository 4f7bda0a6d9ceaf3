"""Small exchanges: tokens, slots, experts that cost nothing, and ranks as processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tripool.engine.parallel.definition import Status, ints
from tripool.engine.parallel.exchange import LocalExchange
from tripool.engine.parallel.segment import Context, Geometry, Segment, create_segment

WIDTH = 24
CAPACITY = 4
PLENTY = 1 << 40
COUNTS = (0, 1, CAPACITY - 1, CAPACITY, CAPACITY + 1, 3 * CAPACITY)


def geometry(slots=(3, 1), *, capacity=CAPACITY, picks=2, width=WIDTH, rows="float32", results="float32") -> Geometry:
    return Geometry(tuple(slots), capacity, picks, width, rows, results)


def tokens(count: int, seed: int, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def picks(count: int, layout: Geometry, seed: int, ranks: Sequence[int] | None = None) -> Tensor:
    """Different slots for each token, of the given ranks or of all."""
    first = layout.first_slot
    owned = [slot for rank in (range(layout.num_ranks) if ranks is None else ranks)
             for slot in range(first[rank], first[rank + 1])]
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(len(owned), generator=generator)[:layout.num_picks] for _ in range(count)]
    return torch.tensor(owned)[torch.stack(rows)] if rows else torch.zeros(0, layout.num_picks, dtype=torch.int64)


def experts(x_ND: Tensor, slot_NK: Tensor) -> Tensor:
    """What the expert in each (global) slot makes of each row: `[N, K, D]`, the same bits in any company."""
    slot_NK1 = slot_NK.unsqueeze(-1).float()
    return (x_ND.float().unsqueeze(1) * (0.37 * slot_NK1 + 1.0) + slot_NK1).to(x_ND.dtype)


def alone(x_TD: Tensor, slot_TK: Tensor, layout: Geometry) -> Tensor:
    """The results of one process that holds all experts."""
    exchange = LocalExchange(quantised=layout.row_format == "int8")
    arrived, handle = exchange.dispatch(x_TD, slot_TK)
    y_TKD = exchange.combine(handle, experts(arrived.x_ND, arrived.expert_NK))
    return y_TKD.to(getattr(torch, layout.result_format)).to(x_TD.dtype)


def exchanged(exchange: Any, rank: int, layout: Geometry, x_TD: Tensor, slot_TK: Tensor) -> Tensor:
    """One layer of this rank."""
    arrived, handle = exchange.dispatch(x_TD, slot_TK)
    return exchange.combine(handle, experts(arrived.x_ND, arrived.expert_NK + layout.first_slot[rank]))


def soon(seconds: float = 20.0) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


@contextmanager
def segment_of(layout: Geometry) -> Iterator[tuple[int, Segment]]:
    fd = create_segment(layout, PLENTY)
    try:
        yield fd, Segment(fd, layout)
    finally:
        os.close(fd)


def contexts(segment: Segment, *, spin: int = 0) -> list[Context]:
    """All ranks of a segment, in one process."""
    made = [Context(segment, rank, spin) for rank in range(segment.geometry.num_ranks)]
    for each in made:
        each.enter(0, list(range(segment.geometry.num_ranks)))
    return made


class Side:
    """A rank's calls of one exchange, one at a time, with any implementation."""

    def __init__(self, kernels: Any, context: Context) -> None:
        self.kernels, self.context, self.layout = kernels, context, context.geometry
        self.first = torch.tensor(self.layout.first_slot)
        self.rank_of = torch.repeat_interleave(torch.arange(self.layout.num_ranks, dtype=torch.int32),
                                               torch.tensor(self.layout.slots_of_rank))

    def send(self, tag: int, x_TD: Tensor, slot_TK: Tensor, rounds: int = 1) -> int:
        self.order = array("i", bytes(4 * slot_TK.numel()))
        self.sent = ints(self.layout.num_ranks)
        return self.kernels.send_dispatch(self.context, tag, x_TD, slot_TK, self.rank_of, self.first, rounds,
                                          self.order, self.sent)

    def counts(self, tag: int, deadline_ns: int | None = None) -> int:
        self.count = ints(3 * self.layout.num_ranks)
        deadline_ns = soon() if deadline_ns is None else deadline_ns
        while (status := self.kernels.await_counts(self.context, tag, deadline_ns, self.count)) == Status.COME_AGAIN:
            pass
        return status

    def receive(self, tag: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        assert self.counts(tag) == Status.DONE
        num_ranks = self.layout.num_ranks
        rows, self.received, self.rounds = (self.count[at:at + num_ranks] for at in (0, num_ranks, 2 * num_ranks))
        quantised = self.layout.row_format == "int8"
        row = torch.zeros(sum(rows), self.layout.width, dtype=getattr(torch, self.layout.row_format))
        scale = torch.zeros(row.shape[0]) if quantised else None
        of_pair, expert = torch.zeros(2, sum(self.received), dtype=torch.int64)
        progress = ints(2 * self.layout.num_ranks)
        assert self.kernels.assemble(self.context, tag, soon(), self.count, row, scale, of_pair, expert,
                                     progress) == Status.DONE
        return row, scale, of_pair, expert

    def send_back(self, tag: int, y_ND: Tensor) -> int:
        self.y = y_ND
        return self.kernels.send_combine(self.context, tag, y_ND, self.received)

    def receive_back(self, tag: int, num_tokens: int, deadline_ns: int | None = None) -> tuple[int, Tensor]:
        out = torch.zeros(num_tokens * self.layout.num_picks, self.layout.width, dtype=self.y.dtype)
        progress = ints(self.layout.num_ranks)
        status = self.kernels.receive_combine(self.context, tag, soon() if deadline_ns is None else deadline_ns, self.y,
                                              self.received, self.order, self.sent, out, progress)
        return status, out.view(num_tokens, self.layout.num_picks, self.layout.width)


def process_server() -> Any:
    """Where processes come from: forked from one that has loaded what they need."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.engine.parallel.ranks", "tests.engine.parallel.direct_ranks",
                                    "tests.engine.parallel.instance_ranks"])
    return server


def start(target: Callable[..., None], num_ranks: int, *args: Any) -> list[Any]:
    """A process for each rank."""
    server = process_server()
    processes = [server.Process(target=target, args=(rank, num_ranks, *args)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    return processes


def finish(processes: Sequence[Any], timeout_s: float = 90.0) -> list[int | None]:
    """Their exit codes; whoever is not done in time is killed."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]
