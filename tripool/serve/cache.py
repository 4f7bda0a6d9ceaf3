"""The process of a cache server: `pool.server` under the launcher's rules."""

from __future__ import annotations

import logging
from pathlib import Path

from tripool.pool.server import PoolServer, run_server
from tripool.serve.metrics import serve_metrics
from tripool.serve.process import ProcessSpec, run_process

log = logging.getLogger(__name__)


def main(spec: ProcessSpec) -> None:
    def ready(server: PoolServer) -> None:
        page = serve_metrics(spec, lambda: {name: float(value) for name, value in server.metrics().items()})
        log.info("metrics of %s are at port %d", spec.member, page.server_port)

    run_server(spec.member, Path(spec.caches[spec.member]), spec.deployment.cache.bytes, ready)


if __name__ == "__main__":
    run_process(main)
