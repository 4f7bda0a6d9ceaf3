"""The gateway process: HTTP in front of the machines, on one event loop.

`serve.gateway` runs the machines and links and knows no HTTP; `api.app` speaks HTTP and knows neither. Here
they are put together. On SIGTERM readiness goes first, running streams finish within their budget, and then
the process ends; a second SIGTERM ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from tripool import __version__
from tripool.api.app import build_app
from tripool.api.backend import BackendStatus, OutputStream, Sample
from tripool.api.experts import member_experts
from tripool.api.schema import MemberExperts
from tripool.api.settings import ApiSettings, load_settings
from tripool.core.messages import Facts
from tripool.core.request import Request, RequestId
from tripool.core.shape import model_shape
from tripool.serve.gateway import GatewayHost, wait_until_idle
from tripool.serve.process import ProcessSpec, run_process

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75


class ServedBackend:
    """`serve.gateway.GatewayHost` as the API wants it."""

    def __init__(self, front: GatewayHost) -> None:
        self._front = front
        self._facts: Facts | None = None

    def new_request_id(self) -> RequestId:
        return self._front.new_request_id()

    def open(self, request: Request) -> OutputStream:
        return self._front.open(request)

    def status(self) -> BackendStatus:
        front = self._front
        health = front.health.snapshot()
        self._facts = health.facts or self._facts
        stats = front.gateway.stats
        return BackendStatus(
            ready=health.ready and not front.draining,
            draining=front.draining,
            cause="draining" if front.draining else health.cause,
            load_fraction=health.load_fraction,
            facts=self._facts,
            members=health.members,
            num_waiting=front.router.num_queued,
            num_running=max(0, stats.num_open - front.router.num_queued),
            settings={"reports": front.reports, "caches": front.cache_stats, "gateway": msgspec.to_builtins(stats),
                      "router": msgspec.to_builtins(front.router.stats),
                      "scaling": msgspec.to_builtins(front.scaling.stats)},
        )

    def samples(self) -> Iterator[Sample]:
        for name, value, labels in self._front.counters():
            yield Sample(name, name.removesuffix("_total").replace("_", " "),
                         "counter" if name.endswith("_total") else "gauge", value, labels)

    async def flush_cache(self) -> int:
        return await self._front.flush_cache()

    async def experts(self, members: Sequence[str]) -> list[MemberExperts]:
        reports = [self._front.experts[name] for name in members if name in self._front.experts]
        return await asyncio.to_thread(lambda: [member_experts(report) for report in reports])

    def rebalance(self, members: Sequence[str]) -> list[str]:
        return self._front.rebalance(members)


def settings_of(spec: ProcessSpec) -> ApiSettings:
    """What the HTTP side needs to know of the model and the deployment."""
    deployment = spec.deployment
    folder = Path(deployment.model.path)
    shape = model_shape(msgspec.json.decode((folder / "config.json").read_bytes()))
    shown = msgspec.to_builtins(deployment)
    for keys in ("api_keys", "admin_keys"):
        shown["gateway"][keys] = len(shown["gateway"][keys])
    return load_settings(
        folder, deployment.gateway, model_name=deployment.model.served_name, vocab_size=shape.vocab_size,
        max_model_len=deployment.model.max_model_len or shape.max_position, version=__version__,
        tokenizer_folder=Path(deployment.model.tokenizer) if deployment.model.tokenizer else None,
        chat_template=Path(deployment.model.chat_template) if deployment.model.chat_template else None, shown=shown)


class Server(uvicorn.Server):
    """Uvicorn, with the signals left to us: it would stop listening before the streams have ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(spec: ProcessSpec) -> None:
    loop = asyncio.get_running_loop()
    settings = settings_of(spec)
    front = GatewayHost(spec, loop)
    gateway = spec.deployment.gateway
    config = uvicorn.Config(build_app(ServedBackend(front), settings), host=gateway.host, port=gateway.port,
                            log_config=None, access_log=False, lifespan="off", timeout_keep_alive=KEEP_ALIVE_S,
                            http="httptools", loop="none", ws="none", server_header=False)
    server = Server(config)
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        if not await wait_until_idle(front, spec.deployment.shutdown_s):
            log.warning("%d streams did not end within the shutdown budget", front.num_open)
        server.should_exit = True

    def terminate() -> None:
        if front.draining:
            os._exit(0)
        front.draining = True
        draining.append(loop.create_task(drain()))

    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, terminate)
    front.start()
    gc.freeze()      # what was built at start lives for ever; collections need not look at it
    try:
        await server.serve()
    finally:
        await front.stop()


def main(spec: ProcessSpec) -> None:
    uvloop.run(_run(spec))


if __name__ == "__main__":
    run_process(main)
