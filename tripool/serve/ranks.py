"""The engine of an instance: rank 0 in this process, the others in processes of their own.

Each rank has its own cache arena and its own share of the experts. A step goes to all ranks at once, each
gets its section, and they meet in every layer's exchange; so one result is ready when all are. The arenas
are made here and mapped by the rank that computes in them; whoever else gets one can only read it.

A rank that is gone, or does nothing, is given up: its process is ended, the step in flight is aborted on all ranks,
and steps go on without it as soon as a plan says so. Meanwhile a new process loads its weights and takes its place, on
the same arena. Only a direct exchange can do without a rank; with another one the instance ends with it, at once.

On an accelerator the cache lies there and the arena is where its blocks come and go: a step copies down what it
seals, and the data plane says which blocks it is about to read from the arena, and which it has written there.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tripool.core.deployment import InstanceConfig
from tripool.core.errors import ConfigError, TripoolError
from tripool.core.messages import ExpertFacts, Facts
from tripool.core.placement import Move, PackedPlacement, initial_placement
from tripool.core.plan import BlockId, RankResult, StepPlan, StepResult
from tripool.engine.cache import block_bytes, layout_digest
from tripool.engine.checkpoint import open_checkpoint
from tripool.engine.load import DTYPES, check_device
from tripool.engine.memory import large_page_bytes, process_memory
from tripool.engine.model.layout import moe_layers
from tripool.engine.parallel.segment import create_segment, exchange_geometry
from tripool.engine.threads import set_rank_threads
from tripool.engine.weights import fingerprint
from tripool.pool.arena import available_memory_bytes
from tripool.serve.arena import Arena
from tripool.serve.budget import blocks_per_rank
from tripool.serve.models import expert_geometry, kind_of
from tripool.serve.process import ProcessSpec, write_spec
from tripool.serve.rank import (
    MoveIn,
    RankEngine,
    RankFailed,
    RankReady,
    RankSpec,
    RankStep,
    RankTook,
    receive,
    send,
)
from tripool.serve.watch import LOOK_S, PATIENCE, RankWatch, look_at

log = logging.getLogger(__name__)

EXIT_RANK_LOST = 71
MAX_RETURNS = 5
"""New processes for a rank in a row that end while they load; after that its place stays empty."""

RETURN_PAUSE_S = 0.2


class RankGone(Exception):
    """A rank's process does not answer any more."""


class RankProcess:
    """A rank in a process of its own, reached over two sockets: one for steps, one for experts that move in."""

    def __init__(self, spec: ProcessSpec, rank_spec: RankSpec, arena: Arena, told_version: int) -> None:
        self.rank = rank_spec.rank
        self.told_version = told_version         # of the expert map
        self.exchange_counts: dict[str, int] = {}
        self.num_steps = 0
        self._socket, theirs = socket.socketpair()
        self._moves, their_moves = socket.socketpair()
        member = f"{spec.member}.{self.rank}"
        path = write_spec(replace(spec, member=member, launcher_pid=os.getpid(), record=""))
        command = [sys.executable, "-m", "tripool.serve.rank", str(path)]
        with theirs, their_moves:
            fds = [arena.fd, their_moves.fileno(), *([rank_spec.segment_fd] if rank_spec.segment_fd >= 0 else [])]
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), pass_fds=fds)
            send(self._socket, (arena.fd, replace(rank_spec, moves_fd=their_moves.fileno())))

    def ask(self, step: RankStep | None) -> None:
        """Begin a step; None: drop all rows.

        Raises:
            RankGone: nobody is there.
        """
        self._send(self._socket, step)

    def answer(self, kind: Any) -> Any:
        """Wait for the answer to what was asked.

        Raises:
            RankGone: nobody is there any more.
            ConfigError: the rank failed.
        """
        return self._receive(self._socket, kind)

    @property
    def has_answered(self) -> bool:
        """Whether an answer (or the end) waits to be read."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def move_in(self, moves: tuple[MoveIn, ...]) -> None:
        """Have experts move in; returns when they are there. Raises as `answer` does."""
        self._send(self._moves, moves)
        self._receive(self._moves, None)

    def end(self) -> None:
        """Make sure that it is gone, and writes nothing any more."""
        self.process.kill()
        self.process.wait()

    def _send(self, sock: socket.socket, value: Any) -> None:
        try:
            send(sock, value)
        except OSError as error:
            raise RankGone(str(error)) from error

    def _receive(self, sock: socket.socket, kind: Any) -> Any:
        data = receive(sock)
        if data is None:
            raise RankGone("its process ended")
        answer = msgspec.msgpack.decode(data, type=tuple[str, msgspec.Raw])
        if answer[0] == "failed":
            raise ConfigError(f"rank {self.rank}: {msgspec.msgpack.decode(answer[1], type=RankFailed).cause}")
        return msgspec.msgpack.decode(answer[1], type=kind)


class Ranks:
    """All ranks of an instance, driven from one thread. Implements `serve.dataplane.Engine`."""

    def __init__(self, spec: ProcessSpec, config: InstanceConfig, progress: Callable[[float], None], *,
                 lost: Callable[[int, str], None] = lambda rank, cause: None,
                 back: Callable[[int, bytes], None] = lambda rank, held: None) -> None:
        """Check the checkpoint, reserve the caches, load the weights.

        `lost` and `back` are told of ranks that go and return (with the experts in their slots), from any thread; of a
        step in which a rank was lost `lost` hears before `run` returns.

        Raises:
            CheckpointError: the folder cannot be used.
            ConfigError: a setting does not fit the model or the machine.
        """
        begun = time.perf_counter()
        deployment = spec.deployment
        set_rank_threads(spec.threads)
        check_device(deployment.model.device)
        checkpoint = open_checkpoint(Path(deployment.model.path), verify_checksums=not spec.launcher_pid)
        shape = checkpoint.shape
        kind = kind_of(checkpoint, deployment.model)
        dtype = DTYPES[kind]
        max_model_len = deployment.model.max_model_len or shape.max_position
        size = block_bytes(shape, deployment.block_tokens, dtype)
        num_blocks = blocks_per_rank(shape, deployment, config, size, max_model_len, available_memory_bytes())
        layout = layout_digest(shape, deployment.block_tokens, dtype)
        self.arenas: Sequence[Arena] = [Arena(f"{spec.member}.{rank}", num_blocks, size, layout)
                                        for rank in range(config.ranks)]
        experts = expert_geometry(shape, config)
        self._initial = self._placement = initial_placement(experts, len(moe_layers(shape)))
        exchange = exchange_geometry(shape, config, self._placement, kind)
        self._segment_fd = -1
        if config.how_to_exchange == "direct":
            self._segment_fd = create_segment(exchange, available_memory_bytes(), f"{spec.member}-exchange")
        self._spec = spec
        self._meeting = f"{spec.runtime_dir}/{spec.member}-ranks-{os.getpid()}"
        self._num_blocks, self._block_bytes = num_blocks, size
        self._told_lost, self._told_back = lost, back
        self._lost: dict[int, str] = {}                        # ranks that are gone, and why
        self._asked: dict[int, None] = {}                      # ranks that have yet to answer in this step
        self._change = threading.RLock()                       # of the four above
        self._epoch, self._live = 0, tuple(range(config.ranks))
        self._is_void = False                                  # the exchange is between two epochs
        self._closed = False
        self._loaded: dict[int, dict[str, int]] = {}           # memory of each rank after loading
        self._num_failed: dict[int, int] = {}                  # processes in a row that ended before they were ready
        self._to_start: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._starting: dict[int, RankProcess] = {}            # lost ranks' next processes, which load
        self.others: dict[int, RankProcess] = {}
        try:
            for rank in range(1, config.ranks):
                self.others[rank] = self._start(rank)
            self._first = RankEngine(spec, config, checkpoint, self._placement, 0, meeting=self._meeting,
                                     segment_fd=self._segment_fd, num_blocks=num_blocks, memory=self.arenas[0].payload,
                                     generations=self.arenas[0].generations, progress=progress)
            assert not self._first.executor.cache.is_staged or not self.others, "ranks elsewhere stage no blocks"
            self._note_loaded(0, os.getpid(), self._first.ready)
            self._digests = [self._first.loaded.digest, *(self._ready(other) for other in self.others.values())]
        except BaseException:
            self.close()
            raise
        for arena in self.arenas:
            arena.seal(for_good=not self.others)
        self._watch = RankWatch(self._is_expected, self._lose) if self.others else None
        for other in self.others.values():
            self._watch_over(other)
        if self.others:
            threading.Thread(target=self._start_again, name="ranks-start", daemon=True).start()
        self.facts = Facts(deployment.model.served_name, fingerprint(shape, self._digests), layout, max_model_len,
                           deployment.block_tokens, num_blocks * config.ranks, config.ranks)
        self.experts: ExpertFacts | None = None
        if self._placement.layers:
            expert_size = shape.expert_params() * dtype.itemsize
            self.experts = ExpertFacts(experts, self._placement.pack(), expert_size,
                                       self._first.loaded.model.seconds_per_token(), exchange.capacity)
        log.info("loaded %s in %.1f s (weights %.1f s), %d rank(s), %d blocks of %d tokens each, %s on %d thread(s)",
                 deployment.model.served_name, time.perf_counter() - begun, self._first.loaded.seconds, config.ranks,
                 num_blocks, deployment.block_tokens, dtype, spec.threads)

    # ------------------------------------------------------------ steps

    def run(self, plan: StepPlan) -> StepResult:
        """One step of all ranks that the plan counts on.

        Raises:
            ConfigError: a rank failed otherwise than by being gone; call `reset` then.
        """
        for change in plan.map_changes:
            if change.version > self._placement.version:
                self._placement = self._placement.apply(change)
        with self._change:
            unexpected = [f"rank {rank} is gone: {cause}" for rank, cause in self._lost.items()
                          if rank not in plan.lost_ranks]
            live = tuple(rank for rank in range(len(plan.sections)) if rank not in plan.lost_ranks)
            present = [self.others[rank] for rank in live if rank and rank not in self._lost]
            if live != self._live or self._is_void:
                self._epoch, self._live, self._is_void = self._epoch + 1, live, False
            self._asked = dict.fromkeys(other.rank for other in present)

        def step_of(rank: int, placement: PackedPlacement | None) -> RankStep:
            return RankStep(plan.sections[rank], self._epoch, live, placement, plan.num_microbatches,
                            plan.reports_experts, unexpected[0] if unexpected else "")

        for other in present:
            self._ask(other, step_of(other.rank, self._news(other)))
        failure: Exception | None = None
        took: dict[int, RankTook] = {}
        try:
            took[0] = self._first.step(step_of(0, self._news(None)))
        except Exception as error:
            failure = error
        for other in present:
            if any(other.rank in each.missed for each in took.values()) and not other.has_answered:
                self._lose(other.rank, "it did not do its part in time")
            try:
                took[other.rank] = other.answer(RankTook)
                other.exchange_counts = took[other.rank].exchange or {}
                other.num_steps = took[other.rank].num_steps
            except RankGone as error:
                self._lose(other.rank, str(error))
            except ConfigError as error:
                failure = failure or error
            with self._change:
                self._asked.pop(other.rank, None)
        if failure is not None:
            raise failure
        results = tuple(took[rank].result if rank in took else RankResult() for rank in range(len(plan.sections)))
        cause = next((each.cause for each in took.values() if each.cause), "")
        self._is_void = bool(cause)
        if cause and self._lost:
            cause = "; ".join(f"rank {rank} is gone: {why}" for rank, why in self._lost.items())
        counts = [np.frombuffer(each.expert_counts, np.int32) for each in results if each.expert_counts]
        if counts:
            results = tuple(replace(each, expert_counts=b"") for each in results)
        return StepResult(plan.step, results, aborted=cause,
                          expert_counts=np.sum(counts, axis=0, dtype=np.int32).tobytes() if counts else b"")

    def _ask(self, other: RankProcess, step: RankStep | None) -> None:
        try:
            other.ask(step)
        except RankGone as error:
            self._lose(other.rank, str(error))

    def reset(self) -> None:
        """Drop all rows, after a step that failed."""
        self._is_void = True
        self._first.executor.reset()
        for other in self._present():
            self._ask(other, None)

    def _present(self) -> list[RankProcess]:
        with self._change:
            return [other for rank, other in self.others.items() if rank not in self._lost]

    # ------------------------------------------------------------ blocks

    def download(self, rank: int, blocks: Iterable[BlockId]) -> None:
        """Have blocks in the arena as the model has computed them."""
        if rank == 0:           # the others compute in their arenas
            self._first.executor.cache.download(blocks)

    def upload(self, rank: int, blocks: Iterable[BlockId]) -> None:
        """Have blocks where the model computes as they are in the arena."""
        if rank == 0:
            self._first.executor.cache.upload(blocks)

    # ------------------------------------------------------------ experts

    def move(self, moves: Sequence[Move]) -> None:
        """Have experts in slots that no map in use names; from a thread of its own, while steps run.

        Every rank reads from the checkpoint: the files of a model that is served are in memory, which all share.

        Raises:
            TripoolError: a rank is gone or could not read; nothing is written any more.
        """
        placement = self._initial
        by_rank: dict[int, list[MoveIn]] = {}
        for move in moves:
            rank = placement.rank_of(move.to_slot)
            slot = move.to_slot - placement.slots_of_rank(rank).start
            by_rank.setdefault(rank, []).append(MoveIn(move.layer, slot, move.expert))
        with self._change:
            gone = [rank for rank in by_rank if rank in self._lost]
        if gone:
            raise ConfigError(f"ranks {gone} are gone, no expert can move there")
        for rank, each in by_rank.items():
            try:
                (self.others[rank] if rank else self._first).move_in(tuple(each))
            except RankGone as error:
                raise ConfigError(f"rank {rank} is gone: {error}") from error

    @property
    def exchange_counts(self) -> list[dict[str, int]]:
        """Of each rank, since its start: `sleeps`, `wakes`, `waited_ns` for others and `sent_bytes`."""
        return [self._first.exchange_counts, *(other.exchange_counts for other in self.others.values())]

    @property
    def memory(self) -> dict[int, dict[str, int]]:
        """Of each rank: `weight_bytes` and `cache_bytes` as they were made, bytes in large pages as it had loaded, and
        `resident_bytes` now, of which `shared_bytes` are caches and exchange."""
        found = {}
        for rank, loaded in sorted(self._loaded.items()):
            now = process_memory(self.others[rank].process.pid if rank else os.getpid())
            live = {"resident_bytes": now.resident, "shared_bytes": now.shared} if now else {}
            found[rank] = {**loaded, **live, "cache_bytes": self._num_blocks * self._block_bytes}
        return found

    @property
    def num_steps(self) -> list[int]:
        """Steps that each rank has taken, since its start."""
        return [self._first.num_steps, *(other.num_steps for other in self.others.values())]

    def _news(self, other: RankProcess | None) -> PackedPlacement | None:
        """The expert map, if a rank (None: the first) has yet to hear of it."""
        told = self._first if other is None else other
        if told.told_version == self._placement.version:
            return None
        told.told_version = self._placement.version
        return self._placement.pack()

    # ------------------------------------------------------------ ranks that go and return

    def _start(self, rank: int) -> RankProcess:
        spec = RankSpec(rank, self._num_blocks, self._block_bytes, self._initial.pack(), self._meeting,
                        self._segment_fd, -1)
        return RankProcess(self._spec, spec, self.arenas[rank], self._initial.version)

    def _ready(self, other: RankProcess) -> int:
        """The digest of a rank's weights, once they are loaded and agree with those of the first rank.

        Raises:
            ConfigError: it could not load, or has loaded something else.
        """
        try:
            ready = other.answer(RankReady)
        except RankGone as error:
            raise ConfigError(f"rank {other.rank} is gone before it was ready (code {other.process.wait()})") from error
        ours = self._first.ready
        if ready.version != ours.version:
            raise ConfigError(f"rank {other.rank} runs tripool {ready.version}, and rank 0 {ours.version}; install the "
                              "same version for both and start again")
        if ready.common != ours.common:
            raise ConfigError(f"rank {other.rank} has read other weights than rank 0 from "
                              f"{self._spec.deployment.model.path}: the folder has changed meanwhile; start again")
        self._note_loaded(other.rank, other.process.pid, ready)
        return int(ready.digest, 16)

    def _note_loaded(self, rank: int, pid: int, ready: RankReady) -> None:
        self._loaded[rank] = {"weight_bytes": ready.weight_bytes, "large_page_bytes": large_page_bytes(pid)}

    def _watch_over(self, other: RankProcess) -> None:
        assert self._watch is not None, "one rank alone is not watched"
        self._watch.add(other.rank, other.process.pid)

    def _is_expected(self, rank: int) -> bool:
        """Whether others wait for a rank, which is not in the exchange itself."""
        with self._change:
            return (rank in self._asked and self._first.waits(rank) is False
                    and not self.others[rank].has_answered)

    def _lose(self, rank: int, cause: str) -> None:
        """Give a rank up: from now on it writes nothing, and nobody waits for it."""
        with self._change:
            if rank in self._lost or self._closed:
                return
            other = self.others[rank]
            other.end()
            if self._segment_fd < 0:
                log.critical("rank %d is gone (%s); its instance ends with it", rank, cause)
                os._exit(EXIT_RANK_LOST)
            log.error("rank %d is gone: %s; the others go on, and a new process will take its place", rank, cause)
            self._lost[rank] = cause
            self._asked.pop(rank, None)
            self._told_lost(rank, cause)
            self._first.abort(self._epoch)
        self._to_start.put(rank)

    def _start_again(self) -> None:
        """Start processes for lost ranks. One thread does so as long as there are ranks, because the kernel ends a
        child when the thread that started it ends."""
        while (rank := self._to_start.get()) is not None:
            try:
                with self._change:
                    if self._closed:
                        return
                    other = self._starting[rank] = self._start(rank)
            except OSError as error:          # there may be no memory for a process just now
                self._start_later(rank, f"no process could be started for rank {rank}: {error}")
                continue
            threading.Thread(target=self._return, args=(other,), name=f"rank-{rank}", daemon=True).start()

    def _return(self, other: RankProcess) -> None:
        """Let a new process take a rank's place once it has loaded; its slots hold what they held at the start."""
        rank = other.rank
        self._see_it_load(other)
        try:
            if self._ready(other) != self._digests[rank]:
                raise ConfigError(f"rank {rank} came back with other weights: the model folder has changed")
        except TripoolError as error:
            other.end()
            self._start_later(rank, str(error))
            return
        with self._change:
            if self._closed:
                return
            del self._starting[rank]
            self._num_failed.pop(rank, None)
            self.others[rank] = other
            del self._lost[rank]
            self._watch_over(other)
            slots = self._initial.slots_of_rank(rank)
            held = array("h", [layer[slot] for layer in self._initial.layers for slot in slots])
            log.warning("rank %d is back (process %d)", rank, other.process.pid)
            self._told_back(rank, held.tobytes())

    def _start_later(self, rank: int, cause: str) -> None:
        """A new process for a rank has failed: there is another, after a pause that grows, unless it was the last."""
        with self._change:
            if self._closed:                  # it was ended, or what it was to map is gone
                return
            self._starting.pop(rank, None)
            num_failed = self._num_failed[rank] = self._num_failed.get(rank, 0) + 1
        if num_failed == MAX_RETURNS:
            log.critical("%s; the instance goes on without it", cause)
            return
        log.error("%s", cause)
        time.sleep(RETURN_PAUSE_S * 2 ** num_failed)
        self._to_start.put(rank)

    def _see_it_load(self, other: RankProcess) -> None:
        """Wait until a new process has something to say; one that is stopped meanwhile is ended."""
        num_stopped = 0
        while not other.has_answered and num_stopped < PATIENCE:
            time.sleep(LOOK_S)
            look = look_at(other.process.pid)
            num_stopped = num_stopped + 1 if look is not None and look.is_stopped else 0
        if num_stopped >= PATIENCE:
            other.end()

    def close(self) -> None:
        """End the other ranks, and those that load to take a place among them."""
        with self._change:
            self._closed = True
            for other in (*self.others.values(), *self._starting.values()):
                other.end()
        self._to_start.put(None)
