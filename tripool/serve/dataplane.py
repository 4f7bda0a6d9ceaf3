"""The five verbs, for real: an engine, a pool and the arenas of other instances behind one port.

A verb is taken on the event loop, done on a thread, and answered on the loop exactly once. `Run` and
`Load` have a thread of their own, because the engine is one; copies (`Fetch`, `Pull`), background
copies (`Store`) and experts that move (`MoveExperts`) have theirs, so that a slow pool or disk never
holds up a step. A copy checks its deadline between blocks and answers only when it has stopped writing,
since the blocks are free to be used again once it has answered. Copies are made in the arenas; an engine
that computes elsewhere is told before one is read there and after one was written there. A step that
outlives its deadline cannot be stopped: the process ends itself, which its peers notice at once, rather
than stay and hold requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from tripool.core import messages as m
from tripool.core.errors import ConfigError, PoolError, StaleBlockError, TripoolError
from tripool.core.machine import Address
from tripool.core.placement import Move
from tripool.core.plan import BlockId, BlockRef, StepPlan, StepResult
from tripool.pool.sdk import PoolClient
from tripool.serve.arena import Arena, PeerArena, prove_bytes
from tripool.serve.host import Host
from tripool.serve.wire import BlockBytes, ReadBlocks

log = logging.getLogger(__name__)

EXIT_STUCK = 70
MOVER_NICENESS = 10
MEETING_S = 1.0


class Engine(Protocol):
    """What `serve.ranks` provides: all ranks of this instance, run from one thread."""

    facts: m.Facts
    experts: m.ExpertFacts | None

    @property
    def arenas(self) -> Sequence[Arena]: ...

    @property
    def exchange_counts(self) -> list[dict[str, int]]:
        """Counters of each rank's exchange, where there is one between ranks."""

    @property
    def memory(self) -> dict[int, dict[str, int]]:
        """Bytes that each rank has in memory, by what for."""

    def run(self, plan: StepPlan) -> StepResult:
        """Take one step. Blocks that it seals are in the arenas before it returns."""

    def move(self, moves: Sequence[Move]) -> None:
        """Copy experts into slots that no map in use names; from any thread, also while a step runs."""

    def download(self, rank: int, blocks: Iterable[BlockId]) -> None:
        """Have blocks in the arena as the model has computed them; from any thread, also while a step runs."""

    def upload(self, rank: int, blocks: Iterable[BlockId]) -> None:
        """Have blocks where the model computes as they are in the arena; from any thread, also while a step runs."""

    def reset(self) -> None:
        """Drop all rows, after a step that failed."""


@dataclass(slots=True)
class TransferStats:
    """Counters of copies, for metrics."""

    pulled_blocks: int = 0
    pulled_bytes: int = 0
    pull_seconds: float = 0.0
    failed_pulls: int = 0
    stale_blocks: int = 0
    fetched_blocks: int = 0
    missed_blocks: int = 0
    fetch_seconds: float = 0.0
    stored_blocks: int = 0
    store_seconds: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0
    chunk_tokens: int = 0
    decode_tokens: int = 0
    moved_experts: int = 0
    move_seconds: float = 0.0


@dataclass(slots=True)
class Peer:
    """A prefill instance whose blocks may be pulled: mapped where memory is shared, else asked over its link."""

    boot_id: str
    arenas: list[PeerArena] = field(default_factory=list)
    ask: Callable[[ReadBlocks], None] | None = None


class DataPlane:
    """Answers the verbs of one instance's machine."""

    def __init__(self, host: Host, owner: Address, open_engine: Callable[[Callable[[float], None]], Engine],
                 pool: PoolClient | None, load_failed: Callable[[TripoolError], None], *, verify_checksums: bool,
                 faults: Mapping[str, float] | None = None) -> None:
        """`load_failed` is called on the loop when there is no engine to be had. `faults`, for fault tests, are seconds
        to wait before a step, a pull, a store or moves of experts (`run`, `pull`, `store`, `move`)."""
        self.stats = TransferStats()
        self.peers: dict[str, Peer] = {}
        self.engine: Engine | None = None
        self._host = host
        self._owner = owner
        self._open_engine = open_engine
        self._pool = pool
        self._load_failed = load_failed
        self._verify = verify_checksums
        self._faults = dict(faults or {})
        self._work: queue.SimpleQueue[m.Run | m.Load | None] = queue.SimpleQueue()
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="stores")
        self._moves = ThreadPoolExecutor(1, thread_name_prefix="moves", initializer=step_aside)
        self._reads: dict[int, queue.SimpleQueue[BlockBytes]] = {}
        self._next_read = 0
        self._guard: asyncio.TimerHandle | None = None
        self._engine_thread = threading.Thread(target=self._engine_loop, name="engine", daemon=True)
        self._engine_thread.start()

    def take(self, message: Any) -> None:
        """One verb (or a word from a peer), on the event loop."""
        match message:
            case m.Run() | m.Load():
                self._guard = self._host.loop.call_later(message.deadline_s, self._end_process, message)
                self._work.put(message)
            case m.Fetch():
                self._copies.submit(self._answer, self._fetch, message, time.monotonic() + message.deadline_s)
            case m.Pull():
                # As it is known now: a next life must not take its place while this one's memory is to be read.
                do = partial(self._pull, self.peers.get(message.grant.source))
                self._copies.submit(self._answer, do, message, time.monotonic() + message.deadline_s)
            case m.MoveExperts():
                self._moves.submit(self._answer, self._move, message, time.monotonic() + message.deadline_s)
            case m.Store():
                self._background.submit(self._answer, self._store, message, time.monotonic() + message.deadline_s)
            case BlockBytes():
                waiting = self._reads.get(message.read_id)
                if waiting is not None:
                    waiting.put(message)
            case _:
                log.warning("the data plane does not know %s", type(message).__name__)

    def stop(self) -> None:
        """Let the running work end; take no more."""
        self._work.put(None)
        self._engine_thread.join(timeout=5.0)
        self._copies.shutdown(wait=True, cancel_futures=True)
        self._background.shutdown(wait=True, cancel_futures=True)
        self._moves.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------ engine

    def _engine_loop(self) -> None:
        while (message := self._work.get()) is not None:
            try:
                answer: Any
                if isinstance(message, m.Run):
                    answer = m.Ran(message.verb_id, self._run(message.plan))
                else:
                    self.engine = self._open_engine(self._load_progress)
                    answer = m.Loaded(message.verb_id, self.engine.facts, self.engine.experts)
            except TripoolError as error:
                answer = self._engine_failed(message, error)
            except Exception as error:
                log.exception("the engine failed")
                answer = self._engine_failed(message, TripoolError(f"{type(error).__name__}: {error}"))
            self._host.loop.call_soon_threadsafe(self._engine_done, answer)

    def _engine_failed(self, message: m.Run | m.Load, error: TripoolError) -> m.Failed:
        if isinstance(message, m.Load):
            self._host.loop.call_soon_threadsafe(self._load_failed, error)
        elif self.engine is not None:
            self.engine.reset()
        return m.Failed(message.verb_id, str(error))

    def _engine_done(self, answer: Any) -> None:
        if self._guard is not None:
            self._guard.cancel()
        self._host.post(self._owner, answer)

    def _run(self, plan: StepPlan) -> StepResult:
        assert self.engine is not None, "a Run came before Loaded"
        begun = time.perf_counter()
        self._be_late("run")
        result = self.engine.run(plan)
        seconds = time.perf_counter() - begun
        self.stats.steps += 1
        self.stats.step_seconds += seconds
        self.stats.chunk_tokens += sum(rank.num_chunk_tokens for rank in result.ranks)
        self.stats.decode_tokens += sum(rank.num_decode_tokens for rank in result.ranks)
        return replace(result, seconds=seconds)

    def _move(self, message: m.MoveExperts, deadline: float) -> m.ExpertsMoved:
        assert self.engine is not None, "a MoveExperts came before Loaded"
        begun = time.perf_counter()
        self._be_late("move")
        self.engine.move(message.moves)
        self.stats.move_seconds += time.perf_counter() - begun
        self.stats.moved_experts += len(message.moves)
        return m.ExpertsMoved(message.verb_id)

    def rank_lost(self, rank: int, cause: str) -> None:
        """Told by the engine, from any thread."""
        self._host.post_threadsafe(self._owner, m.RankLost(rank, cause))

    def rank_back(self, rank: int, held: bytes) -> None:
        """Told by the engine, from any thread."""
        self._host.post_threadsafe(self._owner, m.RankBack(rank, held))

    def _load_progress(self, fraction: float) -> None:
        self._host.post_threadsafe(self._owner, m.LoadProgress(fraction))

    def _end_process(self, message: m.Run | m.Load) -> None:
        log.critical("%s did not end within its %.0f s; this process ends so that its requests can go elsewhere",
                     type(message).__name__, message.deadline_s)
        os._exit(EXIT_STUCK)

    # ------------------------------------------------------------ copies

    def _answer(self, do: Callable[[Any, float], Any], message: Any, deadline: float) -> None:
        try:
            answer = do(message, deadline)
        except TripoolError as error:
            answer = m.Failed(message.verb_id, str(error))
        except Exception as error:
            log.exception("%s failed", type(message).__name__)
            answer = m.Failed(message.verb_id, f"{type(error).__name__}: {error}")
        self._host.post_threadsafe(self._owner, answer)

    def _be_late(self, verb: str) -> None:
        if self._faults:
            time.sleep(self._faults.get(verb, 0.0))

    def _targets(self, rank: int, into: Sequence[BlockRef]) -> list[memoryview]:
        """The memory of blocks that are about to be written, their new generations published."""
        assert self.engine is not None, "a copy came before Loaded"
        arena = self.engine.arenas[rank]
        for ref in into:
            arena.generations[ref.block] = ref.generation
        return [arena.block(ref.block) for ref in into]

    def _fetch(self, message: m.Fetch, deadline: float) -> m.Fetched:
        assert self.engine is not None, "a Fetch came before Loaded"
        targets = self._targets(message.rank, message.into)
        if self._pool is None:
            return m.Fetched(message.verb_id, 0)
        begun = time.perf_counter()
        checksums = self._pool.fetch_prefix(message.keys, targets)
        self.engine.upload(message.rank, [ref.block for ref in message.into[:len(checksums)]])
        self.stats.fetch_seconds += time.perf_counter() - begun
        self.stats.fetched_blocks += len(checksums)
        self.stats.missed_blocks += len(message.keys) - len(checksums)
        return m.Fetched(message.verb_id, len(checksums), tuple(checksums))

    def _store(self, message: m.Store, deadline: float) -> m.Stored:
        if self._pool is None or self.engine is None:
            return m.Stored(message.verb_id, 0)
        if time.monotonic() > deadline:
            raise PoolError("a store waited past its deadline")
        begun = time.perf_counter()
        self._be_late("store")
        self.engine.download(message.rank, [ref.block for ref in message.blocks])
        arena = self.engine.arenas[message.rank]
        items = [(key, arena.block(ref.block), None) for key, ref in zip(message.keys, message.blocks, strict=True)]
        statuses = self._pool.put(items)
        num_new = sum(status.name == "OK" for status in statuses)
        self.stats.store_seconds += time.perf_counter() - begun
        self.stats.stored_blocks += num_new
        return m.Stored(message.verb_id, num_new)

    def _pull(self, known: Peer | None, message: m.Pull, deadline: float) -> m.Pulled:
        assert self.engine is not None, "a Pull came before Loaded"
        begun = time.perf_counter()
        self._be_late("pull")
        try:
            self._copy_grant(known, message, deadline)
            self.engine.upload(message.rank, [ref.block for ref in message.into])
        except (StaleBlockError, ConfigError) as error:
            self.stats.failed_pulls += 1
            self.stats.stale_blocks += isinstance(error, StaleBlockError)
            raise
        self.stats.pull_seconds += time.perf_counter() - begun
        self.stats.pulled_blocks += len(message.into)
        return m.Pulled(message.verb_id)

    def _copy_grant(self, known: Peer | None, message: m.Pull, deadline: float) -> None:
        grant = message.grant
        peer = known if known is not None and known.boot_id == grant.boot_id else self._met(grant, deadline)
        targets = self._targets(message.rank, message.into)
        if peer.arenas:
            for part, into in zip(grant.parts, targets, strict=True):
                if time.monotonic() > deadline:
                    raise ConfigError(f"a pull from {grant.source} did not end in time")
                peer.arenas[part.rank].copy_block(part, into, verify=self._verify)
                self.stats.pulled_bytes += len(into)
        else:
            self._read_remote(peer, grant, targets, deadline)

    def _met(self, grant: m.Grant, deadline: float) -> Peer:
        """The granting peer; one that has only just come up may take a moment to be met."""
        end = min(deadline, time.monotonic() + MEETING_S)
        while (peer := self.peers.get(grant.source)) is None or peer.boot_id != grant.boot_id:
            if time.monotonic() > end:
                raise ConfigError(f"{grant.source} (life {grant.boot_id}) is not connected: its blocks cannot be had")
            time.sleep(0.005)
        return peer

    def _read_remote(self, peer: Peer, grant: m.Grant, targets: Sequence[memoryview], deadline: float) -> None:
        """Blocks of another host, over the link; the source checked their generations after reading them."""
        if peer.ask is None:
            raise ConfigError(f"{grant.source} is neither mapped nor connected")
        self._next_read = read_id = self._next_read + 1
        arrived: queue.SimpleQueue[BlockBytes] = queue.SimpleQueue()
        self._reads[read_id] = arrived
        try:
            self._host.loop.call_soon_threadsafe(peer.ask, ReadBlocks(read_id, grant.parts))
            for _ in grant.parts:
                try:
                    data = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise ConfigError(f"a pull from {grant.source} did not end in time") from None
                part, into = grant.parts[data.index], targets[data.index]
                if len(data.data) != len(into):
                    raise StaleBlockError(f"block {part.block} of {grant.source} left generation {part.generation}")
                into[:] = data.data
                prove_bytes(into, part)          # over a network always
                self.stats.pulled_bytes += len(into)
        finally:
            del self._reads[read_id]


def step_aside() -> None:
    """Let this thread have what others leave of the cores: what it does is not urgent."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), MOVER_NICENESS)


def read_blocks(arenas: Sequence[Arena], message: ReadBlocks) -> list[BlockBytes]:
    """The source's side of a remote pull: each block whose generation still holds after it was copied."""
    answers = []
    for index, part in enumerate(message.parts):
        data = b""
        if 0 <= part.rank < len(arenas) and 0 <= part.block < arenas[part.rank].geometry.num_blocks:
            arena = arenas[part.rank]
            copied = bytes(arena.block(part.block))
            if arena.generations[part.block] == part.generation:
                data = copied
        answers.append(BlockBytes(message.read_id, index, data))
    return answers
