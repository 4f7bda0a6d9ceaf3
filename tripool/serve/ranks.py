"""The engine of an instance: rank 0 in this process, the others in processes of their own.

Each rank has its own cache arena and its own share of the experts. A step goes to all ranks at once, each
gets its section, and they meet in every layer's exchange; so one result is ready when all are. The arenas
are made here and mapped by the rank that computes in them; then they are sealed, and only readers can map
them. A rank that ends takes its instance with it, at once: the exchange cannot go on without it.

On an accelerator the cache lies there and the arena is where its blocks come and go: a step copies down what it
seals, and the data plane says which blocks it is about to read from the arena, and which it has written there.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from tripool.core.deployment import InstanceConfig
from tripool.core.errors import ConfigError, TripoolError
from tripool.core.messages import Facts
from tripool.core.placement import PackedPlacement, Placement, initial_placement, unpack
from tripool.core.plan import BlockId, RankResult, Section, StepPlan
from tripool.engine.cache import BlockCache, block_bytes, layout_digest
from tripool.engine.checkpoint import Checkpoint, open_checkpoint
from tripool.engine.executor import Executor
from tripool.engine.load import LoadedModel, check_device, compute_dtype, load_model
from tripool.engine.model.layout import moe_layers
from tripool.engine.parallel.direct import DirectExchange
from tripool.engine.parallel.exchange import CollectiveExchange, Exchange, LocalExchange
from tripool.engine.parallel.groups import file_store, join_group
from tripool.engine.parallel.segment import Geometry as ExchangeGeometry
from tripool.engine.parallel.segment import Segment, create_segment, exchange_geometry
from tripool.engine.threads import set_threads
from tripool.engine.weights import fingerprint
from tripool.pool.arena import available_memory_bytes
from tripool.serve.arena import Arena, Geometry, map_arena
from tripool.serve.budget import blocks_per_rank
from tripool.serve.models import expert_geometry
from tripool.serve.process import ProcessSpec, run_process, write_spec

log = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
PROGRESS_STEP = 0.01
EXIT_RANK_LOST = 71


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank other than the first is told on its socket before anything else."""

    rank: int
    num_blocks: int
    block_bytes: int
    placement: PackedPlacement
    meeting: str                    # file where the ranks of a collective exchange meet
    segment_fd: int                 # memory of a direct exchange, or -1


@dataclass(frozen=True, slots=True)
class RankReady:
    """Its answer, once its weights are loaded."""

    digest: str                     # hexadecimal: it has 128 bits


@dataclass(frozen=True, slots=True)
class RankFailed:
    """Its answer instead of a result."""

    cause: str


class RankProcess:
    """A rank in a process of its own, reached over a socket pair."""

    def __init__(self, spec: ProcessSpec, rank_spec: RankSpec, arena: Arena) -> None:
        self.rank = rank_spec.rank
        ours, theirs = socket.socketpair()
        member = f"{spec.member}.{self.rank}"
        path = write_spec(replace(spec, member=member, launcher_pid=os.getpid(), record=""))
        command = [sys.executable, "-m", "tripool.serve.ranks", str(path)]
        with theirs:
            fds = [arena.fd, *([rank_spec.segment_fd] if rank_spec.segment_fd >= 0 else [])]
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), pass_fds=fds)
        self._socket = ours
        send(ours, (arena.fd, rank_spec))

    def ask(self, section: Section | None) -> None:
        """Begin a step; None: drop all rows."""
        send(self._socket, section)

    def answer(self, kind: Any) -> Any:
        """Wait for the answer to what was asked.

        Raises:
            ConfigError: the rank failed or is gone.
        """
        data = receive(self._socket)
        if data is None:
            raise ConfigError(f"rank {self.rank} is gone (code {self.process.wait()})")
        answer = msgspec.msgpack.decode(data, type=tuple[str, msgspec.Raw])
        if answer[0] == "failed":
            raise ConfigError(f"rank {self.rank}: {msgspec.msgpack.decode(answer[1], type=RankFailed).cause}")
        return msgspec.msgpack.decode(answer[1], type=kind)


class Ranks:
    """All ranks of an instance, driven from one thread. Implements `serve.dataplane.Engine`."""

    def __init__(self, spec: ProcessSpec, config: InstanceConfig, progress: Callable[[float], None]) -> None:
        """Check the checkpoint, reserve the caches, load the weights.

        Raises:
            CheckpointError: the folder cannot be used.
            ConfigError: a setting does not fit the model or the machine.
        """
        begun = time.perf_counter()
        deployment = spec.deployment
        set_threads(spec.threads)
        check_device(deployment.model.device)
        checkpoint = open_checkpoint(Path(deployment.model.path), verify_checksums=not spec.launcher_pid)
        shape = checkpoint.shape
        dtype = compute_dtype(checkpoint, deployment.model.dtype, deterministic=deployment.model.deterministic,
                              device=deployment.model.device)
        max_model_len = deployment.model.max_model_len or shape.max_position
        size = block_bytes(shape, deployment.block_tokens, dtype)
        num_blocks = blocks_per_rank(shape, deployment, config, size, max_model_len, available_memory_bytes())
        layout = layout_digest(shape, deployment.block_tokens, dtype)
        self.arenas: Sequence[Arena] = [Arena(f"{spec.member}.{rank}", num_blocks, size, layout)
                                        for rank in range(config.ranks)]
        experts = expert_geometry(shape, config)
        placement = initial_placement(experts, len(moe_layers(shape)))
        meeting = f"{spec.runtime_dir}/{spec.member}-ranks-{os.getpid()}"
        segment_fd = -1
        if config.how_to_exchange == "direct":
            segment_fd = create_segment(exchange_geometry(shape, config, placement, dtype), available_memory_bytes(),
                                        f"{spec.member}-exchange")
        self._others = [
            RankProcess(spec, RankSpec(rank, num_blocks, size, placement.pack(), meeting, segment_fd),
                        self.arenas[rank])
            for rank in range(1, config.ranks)]
        if self._others:
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        loaded = load_rank(spec, config, checkpoint, placement, 0, meeting, segment_fd, progress)
        self._executor = make_executor(spec, config, loaded, self.arenas[0].payload, self.arenas[0].generations,
                                       num_blocks)
        assert not self._executor.cache.is_staged or not self._others, "ranks of other processes stage no blocks"
        digests = [loaded.digest, *(int(other.answer(RankReady).digest, 16) for other in self._others)]
        for arena in self.arenas:
            arena.seal()
        self.facts = Facts(deployment.model.served_name, fingerprint(shape, digests), layout, max_model_len,
                           deployment.block_tokens, num_blocks * config.ranks, config.ranks)
        log.info("loaded %s in %.1f s (weights %.1f s), %d rank(s), %d blocks of %d tokens each, %s on %d thread(s)",
                 deployment.model.served_name, time.perf_counter() - begun, loaded.seconds, config.ranks, num_blocks,
                 deployment.block_tokens, dtype, spec.threads)

    def run(self, plan: StepPlan) -> tuple[RankResult, ...]:
        """One step of all ranks."""
        for other in self._others:
            other.ask(plan.sections[other.rank])
        first = self._executor.run(plan.sections[0])
        return (first, *(other.answer(RankResult) for other in self._others))

    def _watch(self) -> None:
        """End this process when a rank is gone: its peers notice at once, and its requests go elsewhere."""
        fds = {os.pidfd_open(other.process.pid): other for other in self._others}
        gone = fds[select.select(list(fds), [], [])[0][0]]
        log.critical("rank %d is gone (code %s); its instance ends with it", gone.rank, gone.process.poll())
        os._exit(EXIT_RANK_LOST)

    def download(self, rank: int, blocks: Iterable[BlockId]) -> None:
        """Have blocks in the arena as the model has computed them."""
        if rank == 0:           # the others compute in their arenas
            self._executor.cache.download(blocks)

    def upload(self, rank: int, blocks: Iterable[BlockId]) -> None:
        """Have blocks where the model computes as they are in the arena."""
        if rank == 0:
            self._executor.cache.upload(blocks)

    def reset(self) -> None:
        """Drop all rows, after a step that failed."""
        self._executor.reset()
        for other in self._others:
            other.ask(None)


def make_exchange(spec: ProcessSpec, config: InstanceConfig, geometry: ExchangeGeometry, placement: Placement,
                  rank: int, meeting: str, segment_fd: int) -> Exchange:
    """One rank's end."""
    how, timeout_s = config.how_to_exchange, spec.deployment.run_deadline_s
    if how == "direct":
        segment = Segment(segment_fd, geometry)
        os.close(segment_fd)
        return DirectExchange(segment, rank, timeout_s=timeout_s)
    if how == "collective":
        group = join_group(rank, placement.num_ranks, file_store(Path(meeting), placement.num_ranks),
                           timeout_s=timeout_s)
        return CollectiveExchange(group, placement.slots_per_rank)
    return LocalExchange(quantised=config.exchange_rows == "int8")


def load_rank(spec: ProcessSpec, config: InstanceConfig, checkpoint: Checkpoint, placement: Placement, rank: int,
              meeting: str, segment_fd: int, progress: Callable[[float], None] | None) -> LoadedModel:
    """One rank's weights, and its place in the exchange."""
    model = spec.deployment.model
    dtype = compute_dtype(checkpoint, model.dtype, deterministic=model.deterministic, device=model.device)
    geometry = exchange_geometry(checkpoint.shape, config, placement, dtype)
    exchange = make_exchange(spec, config, geometry, placement, rank, meeting, segment_fd)
    told = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal told
        if progress is not None and (done / total >= told + PROGRESS_STEP or done == total):
            told = done / total
            progress(told)

    return load_model(checkpoint, dtype=model.dtype, deterministic=model.deterministic, device=model.device,
                      load_format=model.load_format, exchange=exchange, placement=placement, rank=rank, progress=tell)


def make_executor(spec: ProcessSpec, config: InstanceConfig, loaded: LoadedModel, memory: memoryview,
                  generations: memoryview, num_blocks: int) -> Executor:
    """A rank's executor over its arena."""
    deployment = spec.deployment
    cache = BlockCache(loaded.shape, num_blocks, deployment.block_tokens, loaded.dtype, memory=memory,
                       generations=generations, device=deployment.model.device, staged="staged" in spec.faults)
    max_model_len = deployment.model.max_model_len or loaded.shape.max_position
    return Executor(loaded.model, cache, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len)


def send(sock: socket.socket, value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    sock.sendall(LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> bytes | None:
    """One value's bytes; None when the other side is gone."""
    head = _exactly(sock, LENGTH.size)
    return None if head is None else _exactly(sock, LENGTH.unpack(head)[0])


def _exactly(sock: socket.socket, length: int) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        more = sock.recv(length - len(data))
        if not more:
            return None
        data += more
    return bytes(data)


def rank_main(spec: ProcessSpec) -> None:
    """A rank other than the first: load, then answer sections until the instance is gone."""
    sock = socket.socket(fileno=sys.stdin.fileno())
    first = receive(sock)
    if first is None:
        return
    fd, rank_spec = msgspec.msgpack.decode(first, type=tuple[int, RankSpec])
    set_threads(spec.threads)
    memory, generations = map_arena(fd, Geometry(rank_spec.num_blocks, rank_spec.block_bytes))
    config: InstanceConfig = getattr(spec.deployment, spec.role)
    try:
        checkpoint = open_checkpoint(Path(spec.deployment.model.path), verify_checksums=False)
        loaded = load_rank(spec, config, checkpoint, unpack(rank_spec.placement), rank_spec.rank, rank_spec.meeting,
                           rank_spec.segment_fd, None)
        executor = make_executor(spec, config, loaded, memory, generations, rank_spec.num_blocks)
    except TripoolError as error:
        send(sock, ("failed", RankFailed(str(error))))
        return
    send(sock, ("ready", RankReady(f"{loaded.digest:x}")))
    while (data := receive(sock)) is not None:
        section = msgspec.msgpack.decode(data, type=Section | None)
        if section is None:
            executor.reset()
            continue
        try:
            send(sock, ("result", executor.run(section)))
        except Exception as error:
            log.exception("a step failed")
            send(sock, ("failed", RankFailed(f"{type(error).__name__}: {error}")))


if __name__ == "__main__":
    run_process(rank_main)
