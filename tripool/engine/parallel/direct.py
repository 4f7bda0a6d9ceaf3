"""FusedDispatch and FusedCombine: rows are written straight into the memory of the rank that needs them.

An exchange costs two passes over shared memory and no system call when nobody has to wait. Dispatch quantises each
token once (early quantisation; or leaves rows as they are, in deterministic mode), and writes it once to every rank
that holds one of its slots. Combine brings one row per token and pick; the owner sums them, so that the result does
not depend on who computed what. Every rank takes part in every exchange, with zero tokens too. More tokens than the
buffers hold go in rounds: each rank announces how many it needs, and all make as many as the one that needs most.
Two exchanges may be under way at a time, one in each half of the buffers; then there is no room for rounds.

Every wait has a deadline and a mask of the ranks that live. Who is missing is named in the error; then whoever leads
the instance aborts the epoch (all waits end at once) and has the survivors enter a new one together.

T own tokens · K picks · D model width · M arrived rows · N arrived pairs of row and expert · P own pairs · R ranks
"""

from __future__ import annotations

import os
import platform
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from tripool.core.errors import AbortedError, ConfigError, LostRanksError
from tripool.engine.parallel.definition import (
    COMBINE,
    COUNT_BITS,
    DISPATCH,
    DTYPES,
    Ints,
    Kernels,
    Status,
    ints,
    tag_of,
)
from tripool.engine.parallel.exchange import InOneGo, Pairs
from tripool.engine.parallel.native import kernels as best_kernels
from tripool.engine.parallel.quantise import dequantise
from tripool.engine.parallel.segment import Context, Segment

SPINS = 200
"""Pauses (about 10 µs) before a rank sleeps. Much longer is ten times slower when ranks outnumber cores (measured)."""

SPINS_OVERSUBSCRIBED = 20
COME_AGAIN = int(Status.COME_AGAIN)

Parts = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""What one round brings: rows, their scales, the row and the expert of each pair."""


class ArrivedPackets(NamedTuple):
    """What arrived, as it was sent: each row once, and beside it the pairs (row, expert) to compute.

    Kernels for quantised rows read `row_MD`, `scale_M` and `row_N`; others take `x_ND`.
    """

    row_MD: Tensor                  # int8, or rows as they are
    scale_M: Tensor | None          # of int8 rows
    row_N: Tensor                   # the row of each pair
    expert_NK: Tensor               # the expert of each pair (its position in this rank's stack), [N, 1]
    dtype: torch.dtype              # of the model

    @property
    def x_ND(self) -> Tensor:
        """The row of each pair, in the model's own numbers."""
        rows = self.row_MD if self.scale_M is None else dequantise(self.row_MD, self.scale_M, self.dtype)
        if rows.shape[0] != self.row_N.shape[0]:
            rows = rows.index_select(0, self.row_N)
        return rows.to(self.dtype)

    def pairs(self) -> Pairs:
        rows = self.row_MD if self.scale_M is not None else self.row_MD.to(self.dtype)
        return Pairs(rows, self.scale_M, self.row_N, self.expert_NK.flatten())


class Round(NamedTuple):
    """One exchange of at most `capacity` tokens of each rank."""

    tag: int
    tokens: slice                   # of this rank
    order_P: Ints                   # own pairs, sorted by the rank they went to
    sent_R: Ints                    # pairs to each rank


class Received(NamedTuple):
    """A round whose tokens have come."""

    sent: Round
    received_R: Ints                # pairs from each rank
    num_pairs: int                  # of those


@dataclass(slots=True, eq=False)
class UnderWay:
    """Something sent for which answers have not been awaited yet."""

    alone: bool = field(default=True, init=False)      # nothing else of its kind has been under way meanwhile


@dataclass(slots=True, eq=False)
class Dispatched(UnderWay):
    """An exchange whose first tokens have been sent."""

    number: int
    x_TD: Tensor
    slot_TK: Tensor
    own_rounds: int
    first: Round
    dtype: torch.dtype              # of the model, and where it computes
    device: torch.device


class DirectHandle(NamedTuple):
    """What `combine` needs to send results back the way their inputs came."""

    number: int
    num_tokens: int
    rounds: tuple[Received, ...]
    device: torch.device


@dataclass(slots=True, eq=False)
class Combined(UnderWay):
    """An exchange whose first results have been sent."""

    handle: DirectHandle
    y_NKD: Tensor                   # results of this rank's own tokens are taken from it in the end
    dtype: torch.dtype


class DirectExchange(InOneGo):
    """This rank's end of the exchange."""

    def __init__(self, segment: Segment, rank: int, *, timeout_s: float = 60.0, kernels: Kernels | None = None,
                 spin: int | None = None) -> None:
        """Take part from epoch 0 on, with all ranks.

        Raises:
            ConfigError: this machine's memory model is not the one that was written for.
        """
        if sys.platform != "linux" or platform.machine() != "x86_64":
            raise ConfigError("a direct exchange runs on Linux on x86-64; choose `collective` on this machine")
        geometry = segment.geometry
        if spin is None:
            spin = SPINS if geometry.num_ranks <= len(os.sched_getaffinity(0)) else SPINS_OVERSUBSCRIBED
        self.geometry = geometry
        self.rank = rank
        self.is_alone = geometry.num_ranks == 1
        self.timeout_s = timeout_s
        self.kernels = kernels or best_kernels()
        self.context = Context(segment, rank, spin)
        self.row_dtype = DTYPES[geometry.row_format]
        self.scaled = geometry.row_format == "int8"
        self.result_dtype = DTYPES[geometry.result_format]
        self.first_slot = torch.tensor(geometry.first_slot)
        self.rank_of_slot = torch.repeat_interleave(torch.arange(geometry.num_ranks, dtype=torch.int32),
                                                    torch.tensor(geometry.slots_of_rank))
        self._sequence = 0
        self._in_flight: list[int] = []
        self._dispatching: list[Dispatched] = []
        self._combining: list[Combined] = []

    def begin_dispatch(self, x_TD: Tensor, slot_TK: Tensor) -> Dispatched:
        """Write tokens to the ranks of their slots: as many as go in the first round.

        Raises:
            AbortedError: the step was given up.
        """
        num_tokens, capacity, dtype, device = x_TD.shape[0], self.geometry.capacity, x_TD.dtype, x_TD.device
        assert len(self._in_flight) < 2, "two exchanges are in flight; combine one of them first"
        assert x_TD.shape[1] == self.geometry.width and slot_TK.shape == (num_tokens, self.geometry.num_picks), "shapes"
        x_TD = _on_host(x_TD, dtype if self.scaled else self.row_dtype)
        slot_TK = _on_host(slot_TK, torch.int64)
        number, own_rounds = self._sequence, max(1, -(-num_tokens // capacity))
        first = self._send_round(x_TD, slot_TK, 0, own_rounds)
        sent = Dispatched(number, x_TD, slot_TK, own_rounds, first, dtype, device)
        self._in_flight.append(number)
        _meet(sent, self._dispatching)
        self._dispatching.append(sent)
        return sent

    def finish_dispatch(self, sent: Dispatched) -> tuple[ArrivedPackets, DirectHandle]:
        """What arrived here, by round, rank and token; sends what did not fit into the first round.

        Raises:
            LostRanksError: ranks did not send before the deadline.
            AbortedError: the step was given up.
        """
        received, parts, num_rounds = self._receive_round(sent.first)
        rounds, arrived = [received], [parts]
        # The next round is written over what a rank may not have read yet, unless it has told us since that it is
        # through with it; the begin of another exchange does not tell so. All ranks count alike, so all refuse.
        assert num_rounds == 1 or sent.alone, (
            f"a rank has more than {self.geometry.capacity} tokens; two exchanges at a time have no room for rounds")
        while len(rounds) < num_rounds:
            received, parts, announced = self._receive_round(
                self._send_round(sent.x_TD, sent.slot_TK, len(rounds), sent.own_rounds))
            rounds.append(received)
            arrived.append(parts)
            num_rounds = max(num_rounds, announced)
        self._dispatching.remove(sent)
        row_MD, scale_M, row_N, expert_NK = arrived[0] if num_rounds == 1 else _joined(arrived)
        device = sent.device
        if device.type != "cpu":
            row_MD, row_N, expert_NK = row_MD.to(device), row_N.to(device), expert_NK.to(device)
            scale_M = None if scale_M is None else scale_M.to(device)
        return (ArrivedPackets(row_MD, scale_M, row_N, expert_NK, sent.dtype),
                DirectHandle(sent.number, sent.x_TD.shape[0], tuple(rounds), device))

    def _send_round(self, x_TD: Tensor, slot_TK: Tensor, number: int, own_rounds: int) -> Round:
        num_tokens, capacity = x_TD.shape[0], self.geometry.capacity
        tokens = slice(min(number * capacity, num_tokens), min((number + 1) * capacity, num_tokens))
        if tokens.stop - tokens.start < num_tokens:
            x_TD, slot_TK = x_TD[tokens], slot_TK[tokens]
        tag = tag_of(self.context.epoch, self._sequence)
        self._sequence += 1
        order_P, sent_R = array("i", bytes(4 * slot_TK.numel())), ints(self.geometry.num_ranks)
        status = self.kernels.send_dispatch(self.context, tag, x_TD, slot_TK, self.rank_of_slot, self.first_slot,
                                            own_rounds, order_P, sent_R)
        if status:
            self._fail(status, DISPATCH, tag)
        return Round(tag, tokens, order_P, sent_R)

    def _receive_round(self, each: Round) -> tuple[Received, Parts, int]:
        """What came in a round, and the most rounds that a rank announces."""
        num_ranks, context, kernels, tag = self.geometry.num_ranks, self.context, self.kernels, each.tag
        deadline_ns = self._deadline_ns()
        count_3R, progress_2R = ints(3 * num_ranks), ints(2 * num_ranks)
        self._until_done(lambda: kernels.await_counts(context, tag, deadline_ns, count_3R), DISPATCH, tag)
        received_R = count_3R[num_ranks:2 * num_ranks]
        num_rows, num_pairs = sum(count_3R[:num_ranks]), sum(received_R)
        row_MD = torch.empty(num_rows, self.geometry.width, dtype=self.row_dtype)
        scale_M = torch.empty(num_rows) if self.scaled else None
        row_N = torch.empty(num_pairs, dtype=torch.int64)
        expert_NK = torch.empty(num_pairs, 1, dtype=torch.int64)
        self._until_done(lambda: kernels.assemble(context, tag, deadline_ns, count_3R, row_MD, scale_M, row_N,
                                                  expert_NK, progress_2R), DISPATCH, tag)
        return (Received(each, received_R, num_pairs), (row_MD, scale_M, row_N, expert_NK),
                max(count_3R[2 * num_ranks:]))

    def begin_combine(self, handle: DirectHandle, y_NKD: Tensor) -> Combined:
        """Write results back to the ranks whose tokens they are: those of the first round.

        Raises:
            AbortedError: the step was given up.
        """
        rounds, dtype = handle.rounds, y_NKD.dtype
        y_NKD = _on_host(y_NKD, self.result_dtype)
        assert y_NKD.shape == (sum([each.num_pairs for each in rounds]), 1, self.geometry.width), "a result for each"
        sent = Combined(handle, y_NKD, dtype)
        self._send_back(rounds[0], y_NKD)
        _meet(sent, self._combining)
        self._combining.append(sent)
        return sent

    def finish_combine(self, sent: Combined) -> Tensor:
        """The results of own tokens, `[T, K, D]`; sends what did not fit into the first round.

        Raises:
            LostRanksError: ranks did not send before the deadline.
            AbortedError: the step was given up.
        """
        handle, rounds, y_NKD = sent.handle, sent.handle.rounds, sent.y_NKD
        assert self._in_flight and self._in_flight[0] == handle.number, "exchanges end in the order in which they began"
        assert len(rounds) == 1 or sent.alone, "two exchanges at a time have no room for rounds"
        out_TKD = torch.empty(handle.num_tokens, self.geometry.num_picks, self.geometry.width, dtype=self.result_dtype)
        if len(rounds) == 1:
            self._get_back(rounds[0], y_NKD, out_TKD)
        else:
            first = 0
            for number, each in enumerate(rounds):
                y = y_NKD[first:first + each.num_pairs]
                if number:
                    self._send_back(each, y)
                self._get_back(each, y, out_TKD[each.sent.tokens])
                first += each.num_pairs
        self._in_flight.pop(0)
        self._combining.remove(sent)
        if sent.dtype != self.result_dtype:
            out_TKD = out_TKD.to(sent.dtype)
        return out_TKD if handle.device.type == "cpu" else out_TKD.to(handle.device)

    def _send_back(self, each: Received, y_NKD: Tensor) -> None:
        if status := self.kernels.send_combine(self.context, each.sent.tag, y_NKD, each.received_R):
            self._fail(status, COMBINE, each.sent.tag)

    def _get_back(self, each: Received, y_NKD: Tensor, out_TKD: Tensor) -> None:
        context, kernels, deadline_ns, sent = self.context, self.kernels, self._deadline_ns(), each.sent
        progress_R = ints(self.geometry.num_ranks)
        self._until_done(lambda: kernels.receive_combine(context, sent.tag, deadline_ns, y_NKD, each.received_R,
                                                         sent.order_P, sent.sent_R, out_TKD, progress_R),
                         COMBINE, sent.tag)

    def abort(self, epoch: int | None = None) -> None:
        """Give up an epoch (this one) on every rank: all waits end at once. Any thread of any rank may call it."""
        self.kernels.abort_epoch(self.context, self.context.epoch if epoch is None else epoch)

    def reset(self, epoch: int, live: Iterable[int]) -> None:
        """Enter a new epoch together with the other ranks that live in it. Returns when all of them have.

        Earlier epochs are given up, and what was in flight is void. Ranks that are not named are masked: nobody waits
        for them or sends to them. A process that takes a lost rank's place begins with this.

        Raises:
            LostRanksError: a rank did not enter before the deadline.
            AbortedError: the new epoch was given up meanwhile.
        """
        ranks = sorted(live)
        assert epoch > self.context.epoch and self.rank in ranks, "an epoch is newer than the last, and this rank in it"
        self.kernels.abort_epoch(self.context, epoch - 1)
        self.context.enter(epoch, ranks)
        self._sequence = 0
        self._in_flight, self._dispatching, self._combining = [], [], []
        deadline_ns = self._deadline_ns()
        self._until_done(lambda: self.kernels.join(self.context, deadline_ns), None, 0)

    @property
    def live(self) -> list[int]:
        """The ranks of this epoch."""
        return self.context.live

    @property
    def counted(self) -> dict[str, int]:
        """Since the start: `sleeps`, `wakes`, `waited_ns` for others, `sent_bytes` to others."""
        return self.context.counted

    def _deadline_ns(self) -> int:
        return time.monotonic_ns() + int(self.timeout_s * 1e9)

    def _until_done(self, call: Callable[[], int], kind: int | None, tag: int) -> None:
        while (status := call()) == COME_AGAIN:
            pass                                # Python handles its signals between two calls
        if status:
            self._fail(status, kind, tag)

    def _fail(self, status: int, kind: int | None, tag: int) -> NoReturn:
        if status == Status.LATE:
            phase = "the reset" if kind is None else ("dispatch", "combine")[kind]
            raise LostRanksError(self._missing(kind, tag), phase, self.timeout_s)
        if status == Status.ABORTED:
            raise AbortedError(f"epoch {self.context.epoch} of the exchange was aborted")
        assert status != Status.BAD_SLOT, f"a slot is none of {self.geometry.num_slots}, or its rank is masked"
        raise AssertionError("more rows than a region holds: a token names a slot twice")

    def _missing(self, kind: int | None, tag: int) -> list[int]:
        """Ranks whose part is not there. All were there by now, if they came in the last moment: then all are named."""
        segment = self.context.segment
        if kind is None:
            joined = segment.lines["joined"]
            found = [rank for rank in self.live if int(joined[rank]) < self.context.epoch]
        else:
            flags = segment.flags[kind, tag & 1, self.rank]
            found = [rank for rank in self.live if rank != self.rank
                     and int(flags[rank]["word"]) != tag << COUNT_BITS | int(flags[rank]["rows"])]
        return found or [rank for rank in self.live if rank != self.rank]


def _meet(sent: UnderWay, others: Iterable[UnderWay]) -> None:
    """Neither it nor those that are under way are alone."""
    for other in others:
        other.alone = sent.alone = False


def _on_host(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The same, contiguous, in host memory, of this type: itself, if it is so already (asking costs less than `to`)."""
    if rows.dtype == dtype and rows.device.type == "cpu" and rows.is_contiguous():
        return rows
    return rows.to("cpu", dtype).contiguous()


def _joined(arrived: list[Parts]) -> Parts:
    """What arrived in several rounds, as if in one."""
    rows, scales, row_of_pair, experts = zip(*arrived, strict=True)
    first = 0
    shifted = []
    for part, row_N in zip(rows, row_of_pair, strict=True):
        shifted.append(row_N + first)
        first += part.shape[0]
    return (torch.cat(rows), None if scales[0] is None else torch.cat(scales), torch.cat(shifted),
            torch.cat(experts))
