"""The process of a prefill, decode or hybrid instance: its machine, data plane and links.

It dials the gateway, says hello, loads its weights while its heartbeats tell how far it is, and then does
what it is told. An instance that prefills, or may come to, listens for those that decode and hands them its
arenas. It ends when the gateway's stream ends; on SIGTERM it takes no new work, finishes what it has, and leaves.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import signal
import time
from array import array
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from tripool.control.scheduler import InstanceScheduler
from tripool.core import messages as m
from tripool.core.deployment import InstanceConfig
from tripool.core.errors import ConfigError, TripoolError, WireError
from tripool.core.machine import Address
from tripool.core.placement import PackedPlacement, initial_placement
from tripool.pool.sdk import PoolClient
from tripool.serve.arena import PeerArena
from tripool.serve.dataplane import DataPlane, Peer, read_blocks
from tripool.serve.host import Host
from tripool.serve.links import Link, Listener, call, host_id, own_address_towards
from tripool.serve.metrics import expert_values, instance_values, memory_values, serve_metrics
from tripool.serve.process import EXIT_BUG, ProcessSpec, new_boot_id, run_process
from tripool.serve.ranks import Ranks
from tripool.serve.recording import Recorder, Setup
from tripool.serve.wire import (
    FROM_GATEWAY,
    FROM_READER,
    FROM_SOURCE,
    PROTOCOL_VERSION,
    ExpertReport,
    Opening,
    PeerUp,
    ReadBlocks,
    Report,
    Welcome,
)

log = logging.getLogger(__name__)

DIAL_DEADLINE_S = 30.0
REPORT_S = 0.5
EXPERT_REPORT_S = 1.0
LOOKING_SHARE = 0.005            # of the loop's time that a look at experts may take; milliseconds with large maps


class Instance:
    """One instance on one event loop."""

    def __init__(self, spec: ProcessSpec, loop: asyncio.AbstractEventLoop) -> None:
        self.spec = spec
        self.ended: asyncio.Future[None] = loop.create_future()
        self.boot_id = new_boot_id()
        self.config: InstanceConfig = getattr(spec.deployment, spec.role)
        setup = Setup(spec.member, spec.role, self.boot_id, spec.deployment)
        self._recorder = Recorder(Path(f"{spec.record}.{self.boot_id}"), setup) if spec.record else None
        self.host = Host(spec.member, loop, self._recorder, on_bug=self._bug)
        self.scheduler = InstanceScheduler(spec.member, msgspec.convert(spec.role, m.Role), self.config,
                                           spec.deployment, self.boot_id)
        self.host.add_machine(spec.member, self.scheduler)
        pool = None
        if spec.caches and self.config.enable_prefix_caching:
            pool = PoolClient({name: Path(path) for name, path in spec.caches.items()},
                              timeout_s=spec.deployment.cache.fetch_deadline_s)
        self.data = DataPlane(self.host, spec.member, self._open_engine, pool,
                              self._cannot_load, verify_checksums=spec.deployment.verify_checksums,
                              faults=spec.faults)
        self.host.add_port(f"{spec.member}/data", self._take)
        self.host.send_out = self._send
        self.host.flush_out = self._flush
        self._gateway: Link | None = None
        self._sources: dict[str, Link] = {}
        self._readers: set[Link] = set()
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._draining_since: float | None = None
        self._first_map: PackedPlacement | None = None
        self._experts: ExpertReport | None = None          # as last told
        self._experts_due_s = 0.0
        self.metrics_port = 0
        self.me = Opening(PROTOCOL_VERSION, spec.member, spec.role, self.boot_id, host_id(), (), b"")
        self._listeners: list[Listener] = []

    def _open_engine(self, progress: Callable[[float], None]) -> Ranks:
        ranks = Ranks(self.spec, self.config, progress, lost=self.data.rank_lost, back=self.data.rank_back)
        gc.freeze()      # what was built at start lives for ever; to look at it took a tenth of the time of small steps
        return ranks

    async def start(self) -> None:
        """Join the deployment."""
        if self.spec.deployment.may_serve(self.spec.role, "prefill"):
            addresses = [self.spec.socket_address]
            if self.spec.gateway.startswith("tcp://"):
                addresses.append(f"tcp://{own_address_towards(self.spec.gateway)}:0")
            for address in addresses:
                listener = Listener(address, self.me, self.spec.key, self._accept_reader, self._arena_fds)
                listener.start()
                self._listeners.append(listener)
            self.me = dataclasses.replace(self.me, listen=tuple(each.address for each in self._listeners))
        self._gateway = await self._dial_gateway()
        self.host.post(self.spec.member, m.Tick("start"))
        self._report()

    async def stop(self) -> None:
        for task in self._dialling.values():
            task.cancel()
        for listener in self._listeners:
            await listener.stop()
        self.data.stop()
        if self._recorder is not None:
            self._recorder.close()

    def drain(self) -> None:
        """SIGTERM: finish and leave. A second one ends at once."""
        if self._draining_since is not None:
            self._end()
            return
        self._draining_since = time.monotonic()
        self.host.post(self.spec.member, m.Drain(self.spec.member))
        self._leave_when_idle()

    def _leave_when_idle(self) -> None:
        assert self._draining_since is not None
        waited = time.monotonic() - self._draining_since
        if not self.scheduler.sequences or waited > self.spec.deployment.shutdown_s:
            self._end()
        else:
            self.host.loop.call_later(0.05, self._leave_when_idle)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _cannot_load(self, error: TripoolError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def _bug(self) -> None:
        log.critical("a machine failed; its state cannot be trusted, so this process ends")
        os._exit(EXIT_BUG)

    # ------------------------------------------------------------ gateway

    async def _dial_gateway(self) -> Link:
        end = time.monotonic() + DIAL_DEADLINE_S
        while True:
            try:
                link, _ = await call(self.spec.gateway, self.me, self.spec.key, self._gateway_link)
                return link
            except (OSError, TimeoutError) as error:
                if time.monotonic() > end:
                    raise ConfigError(f"no gateway answers at {self.spec.gateway} ({error or 'no greeting in time'}); "
                                      "start it first, or check the address") from error
                await asyncio.sleep(0.05)
            except WireError as error:
                raise ConfigError(str(error)) from error

    def _gateway_link(self, welcome: Welcome) -> Link:
        return Link(welcome, FROM_GATEWAY, self._from_gateway, self._gateway_gone)

    def _from_gateway(self, link: Link, to: Address, message: Any) -> None:
        if to.partition("/")[0] == self.spec.member:
            self.host.post(to, message)

    def _gateway_gone(self, link: Link, cause: str) -> None:
        log.info("the gateway is gone (%s); this instance ends", cause)
        self._end()

    def values(self) -> dict[str, float]:
        """Everything countable here, by name; also from other threads."""
        experts = {} if self._experts is None else expert_values(self._experts)
        memory = {} if self.data.engine is None else memory_values(self.data.engine.memory)
        return {**instance_values(self.scheduler, self.data), **experts, **memory,
                "metrics_port": float(self.metrics_port)}

    def _report(self) -> None:
        """Counters for people, a few times a second, and now and then how experts are used."""
        if self._gateway is not None and self._gateway.is_open:
            now = time.monotonic()
            if now >= self._experts_due_s:
                told, self._experts = self._experts, self._look_at_experts()
                looked_s = time.monotonic() - now
                self._experts_due_s = now + max(EXPERT_REPORT_S, looked_s / LOOKING_SHARE)
                if self._experts is not None and self._experts != told:
                    self._gateway.send("gateway/api", self._experts)
            self._gateway.send("gateway/api", Report(self.spec.member, self.values()))
            self._gateway.flush()
            self.host.loop.call_later(REPORT_S, self._report)

    def _look_at_experts(self) -> ExpertReport | None:
        """How experts are used now; None where there are none, or not yet."""
        rebalancer, engine = self.scheduler.rebalancer, self.data.engine
        if rebalancer is None or engine is None:
            return None
        if self._first_map is None:
            self._first_map = initial_placement(rebalancer.geometry, rebalancer.num_layers).pack()
        loads = array("f", chain.from_iterable(rebalancer.stats.layers()))
        return ExpertReport(self.spec.member, rebalancer.figures(), rebalancer.geometry.num_routed, loads.tobytes(),
                            self._first_map, rebalancer.placement.pack(), tuple(engine.exchange_counts))

    # ------------------------------------------------------------ peers

    def _take(self, message: Any) -> None:
        """The data plane's port; peers are met here, since meeting them takes links."""
        if isinstance(message, PeerUp):
            known = self.data.peers.get(message.member)
            if known is None or known.boot_id != message.boot_id:
                running = self._dialling.pop(message.member, None)
                if running is not None:
                    running.cancel()
                self._dialling[message.member] = self.host.loop.create_task(self._meet(message))
        else:
            self.data.take(message)

    async def _meet(self, peer: PeerUp) -> None:
        """Open a link to a prefill instance and map its arenas, if its memory can be reached."""
        same_host = peer.host_id == self.me.host_id
        where = next((each for each in peer.listen if each.startswith("unix:") == same_host), peer.listen[-1])
        try:
            link, fds = await call(where, self.me, self.spec.key,
                                   lambda welcome: Link(welcome, FROM_SOURCE, self._from_source, self._source_gone))
            arenas = [await asyncio.to_thread(PeerArena, fd) for fd in fds]
        except (OSError, TimeoutError, WireError) as error:
            log.error("cannot reach the blocks of %s at %s: %s", peer.member, where, error)
            return

        def ask(message: ReadBlocks) -> None:
            link.send(f"{peer.member}/data", message)
            link.flush()

        self._sources[peer.member] = link
        self.data.peers[peer.member] = Peer(peer.boot_id, arenas, ask)
        log.info("blocks of %s can be pulled %s", peer.member, "from shared memory" if arenas else "over the network")

    def _from_source(self, link: Link, to: Address, message: Any) -> None:
        self.data.take(message)

    def _source_gone(self, link: Link, cause: str) -> None:
        if self._sources.get(link.member) is link:
            del self._sources[link.member]      # its arenas stay mapped: what was granted can still be pulled

    def _accept_reader(self, opening: Opening) -> str | Link:
        if not self.spec.deployment.may_serve(opening.role, "decode"):
            return f"role {opening.role!r} does not read blocks"
        if self.data.engine is None:
            return f"{self.spec.member} is still loading"
        link = Link(opening, FROM_READER, self._from_reader, lambda link, cause: self._readers.discard(link))
        self._readers.add(link)
        return link

    def _arena_fds(self) -> list[int]:
        return [arena.reader_fd for arena in self.data.engine.arenas] if self.data.engine is not None else []

    def _from_reader(self, link: Link, to: Address, message: Any) -> None:
        if isinstance(message, ReadBlocks):
            assert self.data.engine is not None
            for answer in read_blocks(self.data.engine.arenas, message):
                link.send(f"{link.member}/data", answer)
            link.flush()
        else:
            self.host.post(self.spec.member, message)

    def _send(self, to: Address, message: Any) -> None:
        member = to.partition("/")[0]
        link = self._gateway if member == "gateway" else self._sources.get(member)
        if link is not None:
            link.send(to, message)

    def _flush(self) -> None:
        if self._gateway is not None:
            self._gateway.flush()
        for link in self._sources.values():
            link.flush()


async def _run(spec: ProcessSpec) -> None:
    loop = asyncio.get_running_loop()
    instance = Instance(spec, loop)
    server = serve_metrics(spec, instance.values, lambda: instance.scheduler.role)
    instance.metrics_port = server.server_port
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, instance.drain)
    try:
        await instance.start()
        await instance.ended
    finally:
        server.shutdown()
        await instance.stop()


def main(spec: ProcessSpec) -> None:
    uvloop.run(_run(spec))
    logging.shutdown()
    os._exit(0)          # threads of torch and of libraries must not keep a finished process


if __name__ == "__main__":
    run_process(main)
