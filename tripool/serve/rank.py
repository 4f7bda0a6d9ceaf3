"""One rank of an instance: its share of the weights, its rows, its end of the exchange.

The first rank lives in the instance's own process, the others are processes of their own which answer over a socket:
one for steps, and one for experts that move in meanwhile. The words they exchange are at the top.
"""

from __future__ import annotations

import gc
import logging
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tripool import __version__
from tripool.core.deployment import InstanceConfig
from tripool.core.errors import ExchangeError, LostRanksError, TripoolError
from tripool.core.messages import Role
from tripool.core.placement import PackedPlacement, Placement, unpack
from tripool.core.plan import RankResult, Section
from tripool.engine.cache import BlockCache
from tripool.engine.checkpoint import Checkpoint, open_checkpoint
from tripool.engine.executor import Executor
from tripool.engine.load import LoadedModel, load_model
from tripool.engine.parallel.direct import DirectExchange
from tripool.engine.parallel.exchange import CollectiveExchange, Exchange, LocalExchange
from tripool.engine.parallel.groups import file_store, join_group
from tripool.engine.parallel.segment import Geometry as ExchangeGeometry
from tripool.engine.parallel.segment import Segment, exchange_geometry
from tripool.engine.relocate import ExpertLoader
from tripool.engine.threads import set_rank_threads
from tripool.serve.arena import Geometry, map_arena
from tripool.serve.dataplane import step_aside
from tripool.serve.models import kind_of
from tripool.serve.process import ProcessSpec, run_process

log = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
PROGRESS_STEP = 0.01

# ---------------------------------------------------------------- words between an instance and its ranks


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank other than the first is told on its socket before anything else."""

    rank: int
    num_blocks: int
    block_bytes: int
    placement: PackedPlacement
    meeting: str                    # file where the ranks of a collective exchange meet
    segment_fd: int                 # memory of a direct exchange, or -1
    moves_fd: int                   # socket on which it is told of experts that move in


@dataclass(frozen=True, slots=True)
class RankReady:
    """Its answer, once its weights are loaded."""

    digest: str                     # of its part of the weights; hexadecimal: it has 128 bits
    common: str                     # of the weights that every rank has
    version: str                    # of the code that it runs
    weight_bytes: int               # in its memory


@dataclass(frozen=True, slots=True)
class RankFailed:
    """Its answer instead of a result."""

    cause: str


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step. With `abandon` it is not taken: the rows come and go as the section says, and are all given back."""

    section: Section
    epoch: int = 0                  # of a direct exchange
    live: tuple[int, ...] = ()      # ranks that take part
    placement: PackedPlacement | None = None     # where it is another than this rank knows
    num_microbatches: int = 1
    reports_experts: bool = False
    abandon: str = ""               # why


@dataclass(frozen=True, slots=True)
class RankTook:
    """What came of a step."""

    result: RankResult
    cause: str = ""                 # of a step that was given up
    missed: tuple[int, ...] = ()    # ranks that did not do their part before the deadline
    exchange: dict[str, int] | None = None       # counters since the rank's start
    num_steps: int = 0                           # likewise, those that were given up left out


@dataclass(frozen=True, slots=True)
class MoveIn:
    """An expert moves into a slot of this rank (the slot's number among its own)."""

    layer: int
    slot: int
    expert: int


# ---------------------------------------------------------------- a rank, in whichever process


class RankEngine:
    """Takes steps, and lets experts move in beside them."""

    def __init__(self, spec: ProcessSpec, config: InstanceConfig, checkpoint: Checkpoint, placement: Placement,
                 rank: int, *, meeting: str, segment_fd: int, num_blocks: int, memory: memoryview,
                 generations: memoryview, progress: Callable[[float], None] | None = None) -> None:
        """Load the weights; the descriptor of the segment stays the caller's.

        Raises:
            CheckpointError: the folder cannot be used.
            ConfigError: a setting does not fit the model or the machine.
        """
        model = spec.deployment.model
        geometry = exchange_geometry(checkpoint.shape, config, placement, kind_of(checkpoint, model))
        self.rank = rank
        self.told_version = placement.version        # of the expert map
        self.num_steps = 0
        self._exchange = _make_exchange(spec, config, geometry, placement, rank, meeting, segment_fd)
        num_drafts = spec.deployment.num_drafts(msgspec.convert(spec.role, Role))
        told = 0.0

        def tell(done: int, total: int) -> None:
            nonlocal told
            if progress is not None and (done / total >= told + PROGRESS_STEP or done == total):
                told = done / total
                progress(told)

        self.loaded: LoadedModel = load_model(
            checkpoint, dtype=model.dtype, deterministic=model.deterministic, device=model.device,
            load_format=model.load_format, exchange=self._exchange, placement=placement, rank=rank,
            drafts=num_drafts > 0, int8_head=model.head_dtype == "int8", packed_root=model.packed_root, progress=tell)
        cache = BlockCache(self.loaded.shape, num_blocks, spec.deployment.block_tokens, self.loaded.dtype,
                           memory=memory, generations=generations, device=model.device, staged="staged" in spec.faults)
        self.executor = Executor(self.loaded.model, cache, max_num_seqs=config.max_num_seqs,
                                 max_model_len=model.max_model_len or self.loaded.shape.max_position,
                                 num_drafts=num_drafts)
        self._loader = ExpertLoader(checkpoint, self.loaded.shape, self.loaded.dtype, self.loaded.model,
                                    digests=self.loaded.digests, load_format=model.load_format)

    @property
    def ready(self) -> RankReady:
        """What this rank has loaded, to be compared with the others."""
        common = sum(digest for name, digest in self.loaded.digests.items() if "experts." not in name)
        return RankReady(f"{self.loaded.digest:x}", f"{common:x}", __version__, self.loaded.weight_bytes)

    def step(self, step: RankStep) -> RankTook:
        """Take a step, or give it up with the others.

        Whatever else is raised: nobody waits for this rank any more, and its rows are as they may be.
        """
        executor, exchange = self.executor, self._exchange
        if step.placement is not None:
            self.loaded.model.use_placement(unpack(step.placement), self.rank)
        if step.abandon:
            return self._took(executor.abandon(step.section), step.abandon)
        try:
            if isinstance(exchange, DirectExchange) and step.epoch > exchange.context.epoch:
                exchange.reset(step.epoch, step.live)
        except ExchangeError as error:
            return self._took(executor.abandon(step.section), str(error), missed(error))
        try:
            return self._took(executor.run(step.section, num_microbatches=step.num_microbatches,
                                           reports_experts=step.reports_experts))
        except ExchangeError as error:
            return self._took(executor.abandon(), str(error), missed(error))
        except BaseException:
            self.abort()
            raise

    def _took(self, result: RankResult, cause: str = "", missed: tuple[int, ...] = ()) -> RankTook:
        self.num_steps += not cause
        return RankTook(result, cause, missed, self.exchange_counts, self.num_steps)

    def move_in(self, moves: tuple[MoveIn, ...]) -> None:
        """Have experts in slots that no step names; returns when all are there. On a thread of its own.

        Raises:
            CheckpointError: a file could not be read or has changed; then some slots hold nothing usable.
        """
        for move in moves:
            self._loader.load(move.layer, move.slot, move.expert)

    def abort(self, epoch: int | None = None) -> None:
        """Let nobody wait for a step that cannot be. From any thread."""
        if isinstance(self._exchange, DirectExchange):
            self._exchange.abort(epoch)

    def waits(self, rank: int) -> bool | None:
        """Whether a rank sleeps in the exchange until others have done their part; None where nobody can tell."""
        if not isinstance(self._exchange, DirectExchange):
            return None
        return bool(self._exchange.context.segment.lines["waiting"][rank])

    @property
    def exchange_counts(self) -> dict[str, int]:
        """Counters of the exchange since the start; none where nothing crosses ranks, or another library moves it."""
        return self._exchange.counted if isinstance(self._exchange, DirectExchange) else {}


def missed(error: ExchangeError) -> tuple[int, ...]:
    """The ranks whose fault it was, if anybody knows."""
    return error.ranks if isinstance(error, LostRanksError) else ()


def _make_exchange(spec: ProcessSpec, config: InstanceConfig, geometry: ExchangeGeometry, placement: Placement,
                   rank: int, meeting: str, segment_fd: int) -> Exchange:
    how, timeout_s = config.how_to_exchange, 0.8 * spec.deployment.run_deadline_s     # before the step's own
    if how == "direct":
        return DirectExchange(Segment(segment_fd, geometry), rank, timeout_s=timeout_s)
    if how == "collective":
        group = join_group(rank, placement.num_ranks, file_store(Path(meeting), placement.num_ranks),
                           timeout_s=timeout_s)
        return CollectiveExchange(group, placement.slots_per_rank)
    return LocalExchange(quantised=config.exchange_rows == "int8")


# ---------------------------------------------------------------- frames


def send(sock: socket.socket, value: Any) -> None:
    """One value, of a type that both sides know."""
    data = msgspec.msgpack.encode(value)
    sock.sendall(LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> bytes | None:
    """One value's bytes; None when the other side is gone."""
    head = _exactly(sock, LENGTH.size)
    return None if head is None else _exactly(sock, LENGTH.unpack(head)[0])


def _exactly(sock: socket.socket, length: int) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        try:
            more = sock.recv(length - len(data))
        except ConnectionResetError:         # it died with something of ours unread
            return None
        if not more:
            return None
        data += more
    return bytes(data)


# ---------------------------------------------------------------- a process of its own


def rank_main(spec: ProcessSpec) -> None:
    """A rank other than the first: load, then answer until the instance is gone."""
    sock = socket.socket(fileno=sys.stdin.fileno())
    first = receive(sock)
    if first is None:
        return
    fd, rank_spec = msgspec.msgpack.decode(first, type=tuple[int, RankSpec])
    set_rank_threads(spec.threads)
    memory, generations = map_arena(fd, Geometry(rank_spec.num_blocks, rank_spec.block_bytes))
    config: InstanceConfig = getattr(spec.deployment, spec.role)
    try:
        checkpoint = open_checkpoint(Path(spec.deployment.model.path), verify_checksums=False)
        engine = RankEngine(spec, config, checkpoint, unpack(rank_spec.placement), rank_spec.rank,
                            meeting=rank_spec.meeting, segment_fd=rank_spec.segment_fd,
                            num_blocks=rank_spec.num_blocks, memory=memory, generations=generations)
    except TripoolError as error:
        send(sock, ("failed", RankFailed(str(error))))
        return
    moves = socket.socket(fileno=rank_spec.moves_fd)
    threading.Thread(target=_move_in, args=(engine, moves), name="moves", daemon=True).start()
    gc.freeze()          # see `Instance`
    send(sock, ("done", engine.ready))
    while (data := receive(sock)) is not None:
        step = msgspec.msgpack.decode(data, type=RankStep | None)
        if step is None:
            engine.executor.reset()
            continue
        try:
            send(sock, ("done", engine.step(step)))
        except Exception as error:
            log.exception("a step failed")
            send(sock, ("failed", RankFailed(f"{type(error).__name__}: {error}")))


def _move_in(engine: RankEngine, sock: socket.socket) -> None:
    step_aside()
    while (data := receive(sock)) is not None:
        try:
            engine.move_in(msgspec.msgpack.decode(data, type=tuple[MoveIn, ...]))
            send(sock, ("done", None))
        except Exception as error:
            log.exception("moving experts in failed")
            send(sock, ("failed", RankFailed(str(error))))


if __name__ == "__main__":
    run_process(rank_main)
