"""The process of a cache server: `pool.server` under the launcher's rules."""

from __future__ import annotations

from pathlib import Path

from tripool.pool.server import run_server
from tripool.serve.process import ProcessSpec, run_process


def main(spec: ProcessSpec) -> None:
    run_server(spec.member, Path(spec.caches[spec.member]), spec.deployment.cache.bytes)


if __name__ == "__main__":
    run_process(main)
