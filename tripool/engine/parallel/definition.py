"""The exchange's functions in plain, slow Python: what `csrc/exchange.cpp` has to agree with, in layout and in result.

Ranks of both kinds can meet in one segment. Here a wait is a poll with short naps, and payload, count and flag are
ordinary stores in this order, which is enough on x86-64 (the only machine where `direct` runs). A native rank that
goes to sleep in the moment in which a rank of this kind looks whether it sleeps wakes up one slice (50 ms) later.

T own tokens · K picks · D model width · M arrived rows · N arrived pairs · P own pairs · R ranks
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tripool.engine.parallel.quantise import quantise
from tripool.engine.parallel.segment import Context

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
"""The formats of `segment`, as torch calls them."""

DISPATCH, COMBINE = 0, 1
COUNT_BITS = 24
EPOCH_BITS, SEQUENCE_BITS = 16, 24
NAP_S = 0.0002
SYS_FUTEX, FUTEX_WAKE = 202, 1
_libc = ctypes.CDLL(None, use_errno=True)


Ints = array
"""Integers, of 64 bits except the order of pairs (32): a few of them cost less than a tensor."""


def ints(count: int) -> Ints:
    """So many zeros."""
    return array("q", bytes(8 * count))


class Status(IntEnum):
    """How a call ended."""

    DONE = 0
    LATE = 1                  # the deadline has passed
    ABORTED = 2
    COME_AGAIN = 3            # after a signal, or a while: the caller may have signals to handle
    BAD_SLOT = 4              # no such slot, or its rank is masked
    TOO_MANY = 5              # more rows than a region holds


def tag_of(epoch: int, sequence: int) -> int:
    """The name of one exchange, as it stands in flags. Its lowest bit says which half of the buffers is used.

    Never zero, which is what memory holds before the first exchange.
    """
    return (epoch % ((1 << EPOCH_BITS) - 1) + 1) << SEQUENCE_BITS | sequence % (1 << SEQUENCE_BITS)


class Kernels(Protocol):
    """What `direct` needs; see `Definition` for what each does."""

    level: int

    def quantise(self, x_TD: Tensor, q_TD: Tensor, scale_T: Tensor) -> None: ...

    def send_dispatch(self, context: Context, tag: int, x_TD: Tensor, slot_TK: Tensor, rank_of_slot: Tensor,
                      first_slot: Tensor, rounds: int, order_P: Ints, sent_R: Ints) -> int: ...

    def await_counts(self, context: Context, tag: int, deadline_ns: int, count_3R: Ints) -> int: ...

    def assemble(self, context: Context, tag: int, deadline_ns: int, count_3R: Ints, row_MD: Tensor,
                 scale_M: Tensor | None, row_N: Tensor, expert_NK: Tensor, progress_2R: Ints) -> int: ...

    def send_combine(self, context: Context, tag: int, y_NKD: Tensor, received_R: Ints) -> int: ...

    def receive_combine(self, context: Context, tag: int, deadline_ns: int, y_NKD: Tensor, received_R: Ints,
                        order_P: Ints, sent_R: Ints, out_TKD: Tensor, progress_R: Ints) -> int: ...

    def join(self, context: Context, deadline_ns: int) -> int: ...

    def abort_epoch(self, context: Context, epoch: int) -> None: ...


class Definition:
    """Slow and obvious."""

    level = -1

    def quantise(self, x_TD: Tensor, q_TD: Tensor, scale_T: Tensor) -> None:
        """Rows to int8 with a scale each."""
        q, scale = quantise(x_TD)
        q_TD.copy_(q)
        scale_T.copy_(scale)

    def send_dispatch(self, context: Context, tag: int, x_TD: Tensor, slot_TK: Tensor, rank_of_slot: Tensor,
                      first_slot: Tensor, rounds: int, order_P: Ints, sent_R: Ints) -> int:
        """Write each token once to every rank that holds one of its slots.

        `order_P` gets the pairs (token * K + pick) sorted by rank, `sent_R` their number.
        """
        geometry, segment, me, live = context.geometry, context.segment, context.rank, context.live
        if context.is_aborted:
            return Status.ABORTED
        if x_TD.shape[0] > geometry.capacity:
            return Status.TOO_MANY
        slots, first = slot_TK.tolist(), first_slot.tolist()
        if any(not 0 <= slot < geometry.num_slots or int(rank_of_slot[slot]) not in live
               for row in slots for slot in row):
            return Status.BAD_SLOT
        targets: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(geometry.num_ranks)]
        for token, row in enumerate(slots):
            for pick, slot in enumerate(row):
                targets[int(rank_of_slot[slot])].setdefault(token, []).append((slot, pick))
        pairs = [[token * geometry.num_picks + pick for token in target for _, pick in target[token]]
                 for target in targets]
        if any(len(each) > x_TD.shape[0] * geometry.fan for each in pairs):
            return Status.TOO_MANY
        sent_R[:] = array("q", [len(each) for each in pairs])
        order_P[:] = array("i", [pair for each in pairs for pair in each])
        if geometry.row_format == "int8":
            row_TD, scale_T = quantise(x_TD)
        else:
            row_TD, scale_T = x_TD, torch.ones(x_TD.shape[0])
        data = _bytes(row_TD)
        for rank in live:
            flag = segment.flags[DISPATCH, tag & 1, rank, me]
            flag["rows"], flag["pairs"], flag["rounds"] = len(targets[rank]), len(pairs[rank]), rounds
            flag["word"] = tag << COUNT_BITS
            packets = segment.dispatch[tag & 1, rank, me]
            for count, (token, chosen) in enumerate(targets[rank].items()):
                tail = packets[count, context.geometry.layout["tail_offset"]:]
                packets[count, :data.shape[1]] = data[token]
                tail[:4].view("<f4")[0] = float(scale_T[token])
                tail[4:16].view("<u4")[:] = (me, token, len(chosen))
                tail[16:16 + 8 * len(chosen)].view("<i4")[:] = [
                    value for slot, pick in chosen for value in (slot - first[rank], pick)]
                flag["word"] = tag << COUNT_BITS | count + 1
            if rank != me:
                context.count("sent_bytes", len(targets[rank]) * geometry.packet_bytes)
            _wake(context, rank)
        return Status.DONE

    def await_counts(self, context: Context, tag: int, deadline_ns: int, count_3R: Ints) -> int:
        """How many rows, pairs and rounds each rank announces: rows of all ranks, then pairs, then rounds."""
        def look() -> bool:
            for rank in context.live:
                flag = context.segment.flags[DISPATCH, tag & 1, context.rank, rank]
                if _published(flag, tag) < 0:
                    return False
                for at, name in enumerate(("rows", "pairs", "rounds")):
                    count_3R[at * context.geometry.num_ranks + rank] = int(flag[name])
            return True

        return _wait(context, deadline_ns, look)

    def assemble(self, context: Context, tag: int, deadline_ns: int, count_3R: Ints, row_MD: Tensor,
                 scale_M: Tensor | None, row_N: Tensor, expert_NK: Tensor, progress_2R: Ints) -> int:
        """Copy what arrives into contiguous rows, by source. `progress_2R` begins at zero."""
        geometry = context.geometry
        num_ranks = geometry.num_ranks
        rows_R, pairs_R = count_3R[:num_ranks], count_3R[num_ranks:2 * num_ranks]
        data, tail_offset = _bytes(row_MD), geometry.layout["tail_offset"]

        def look() -> bool:
            flags = context.segment.flags[DISPATCH, tag & 1, context.rank]
            if any(_published(flags[rank], tag) != rows_R[rank] for rank in context.live):
                return False
            row = pair = 0
            for rank in context.live:
                for packet in context.segment.dispatch[tag & 1, context.rank, rank, :rows_R[rank]]:
                    tail = packet[tail_offset:]
                    data[row] = packet[:data.shape[1]]
                    if scale_M is not None:
                        scale_M[row] = float(tail[:4].view("<f4")[0])
                    for slot in tail[16:16 + 8 * int(tail[12:16].view("<u4")[0])].view("<i4")[::2]:
                        row_N[pair], expert_NK[pair] = row, int(slot)
                        pair += 1
                    row += 1
            progress_2R[:] = rows_R + pairs_R
            return True

        return _wait(context, deadline_ns, look)

    def send_combine(self, context: Context, tag: int, y_NKD: Tensor, received_R: Ints) -> int:
        """Write results back to the ranks whose tokens they are; `y_NKD` holds them by rank."""
        if context.is_aborted:
            return Status.ABORTED
        data, first = _bytes(y_NKD), 0
        if max(received_R) > context.geometry.capacity * context.geometry.fan:
            return Status.TOO_MANY
        for rank, count in enumerate(received_R):
            if rank in context.live and rank != context.rank:
                flag = context.segment.flags[COMBINE, tag & 1, rank, context.rank]
                flag["rows"] = count
                flag["word"] = tag << COUNT_BITS
                context.segment.combine[tag & 1, rank, context.rank, :count, :data.shape[1]] = data[first:first + count]
                flag["word"] = tag << COUNT_BITS | count
                context.count("sent_bytes", count * data.shape[1])
                _wake(context, rank)
            first += count
        return Status.DONE

    def receive_combine(self, context: Context, tag: int, deadline_ns: int, y_NKD: Tensor, received_R: Ints,
                        order_P: Ints, sent_R: Ints, out_TKD: Tensor, progress_R: Ints) -> int:
        """Put the results of own tokens where they belong; those computed here come from `y_NKD`."""
        out, own = _bytes(out_TKD), _bytes(y_NKD)
        first_own = sum(received_R[:context.rank])

        def look() -> bool:
            flags = context.segment.flags[COMBINE, tag & 1, context.rank]
            if any(_published(flags[rank], tag) != sent_R[rank] for rank in context.live if rank != context.rank):
                return False
            first = 0
            for rank, count in enumerate(sent_R):
                rows = (own[first_own:] if rank == context.rank
                        else context.segment.combine[tag & 1, context.rank, rank, :, :out.shape[1]])
                out[order_P[first:first + count]] = rows[:count]
                first += count
            progress_R[:] = sent_R
            return True

        return _wait(context, deadline_ns, look)

    def join(self, context: Context, deadline_ns: int) -> int:
        """Enter the context's epoch, and wait until all live ranks have entered it."""
        lines, live = context.segment.lines, context.live
        lines[context.rank]["joined"] = context.epoch
        for rank in live:
            _wake(context, rank)
        return _wait(context, deadline_ns, lambda: all(int(lines[rank]["joined"]) >= context.epoch for rank in live))

    def abort_epoch(self, context: Context, epoch: int) -> None:
        """Nobody finishes a wait of this epoch or an earlier one; all who sleep wake."""
        context.segment.aborted[0] = max(int(context.segment.aborted[0]), epoch + 1)
        for rank in range(context.geometry.num_ranks):
            _wake(context, rank, always=True)


def _published(flag: Any, tag: int) -> int:
    word = int(flag["word"])
    return word & (1 << COUNT_BITS) - 1 if word >> COUNT_BITS == tag else -1


def _wait(context: Context, deadline_ns: int, look: Callable[[], bool]) -> int:
    if look():
        return Status.DONE
    begun = time.monotonic_ns()
    try:
        while True:
            if context.is_aborted:
                return Status.ABORTED
            if time.monotonic_ns() >= deadline_ns:
                return Status.LATE
            time.sleep(NAP_S)
            if look():
                return Status.DONE
    finally:
        context.count("waited_ns", time.monotonic_ns() - begun)


def _wake(context: Context, rank: int, *, always: bool = False) -> None:
    line = context.segment.lines[rank:rank + 1]
    if always or int(line["waiting"][0]):
        line["bell"] += 1
        _libc.syscall(SYS_FUTEX, ctypes.c_void_p(line["bell"].ctypes.data), FUTEX_WAKE, 1 << 30, None, None, 0)


def _bytes(rows: Tensor) -> NDArray[np.uint8]:
    """Rows as their bytes, which are the tensor's own."""
    assert rows.is_contiguous() and rows.dtype in DTYPES.values()
    return rows.view(-1, rows.shape[-1]).view(torch.uint8).numpy()
