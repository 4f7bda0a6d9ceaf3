"""OpenAI servers of peers and of this project, each of them up only for its turn.

    with peer(command, environment, port) as server:
        run_load(server, jobs, Arrivals())

One server at a time: together they do not fit into a small machine's memory, and one that waits may take turns of the
cores, as vLLM's processes do with each other. What a server prints goes to a file and is told if it fails.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO
from urllib.parse import urlsplit

from tripool.cli.client import Server
from tripool.core.deployment import Deployment
from tripool.serve.launch import LaunchOptions, launch

START_S, END_S, LOOK_S = 900.0, 30.0, 0.1
LAST_LINES = 3                 # of what it printed, when it is gone


class ServerFailed(Exception):
    """It could not start, or could not answer; says why."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def ours(deployment: Deployment) -> Iterator[Server]:
    """This project's server: all processes of a deployment."""
    with launch(deployment, LaunchOptions(log_level="error")) as fleet:
        fleet.wait_ready(START_S)
        where = urlsplit(fleet.url)
        yield Server(where.hostname or "", where.port or 0)


@contextmanager
def peer(command: Sequence[str], environment: Mapping[str, str], port: int) -> Iterator[Server]:
    """A server of somebody else, once it says at /health that it is well. It ends with all processes of its group.

    Raises:
        ServerFailed: it does not start.
    """
    surroundings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    with tempfile.TemporaryFile(prefix="tripool-bench-") as log:
        # A group and no session of its own: the kernel shares cores between sessions first, whatever their priority.
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,
                                       env={**surroundings, **environment})
        except OSError as error:
            raise ServerFailed(f"{command[0]}: {error.strerror}") from error
        try:
            _wait_ready(process, f"http://127.0.0.1:{port}/health", log)
            yield Server("127.0.0.1", port)
        finally:
            _end(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            printed = log.read().decode(errors="replace").strip().splitlines()
            said = [line for line in printed if "Error: " in line] or printed
            raise ServerFailed(f"it ended with {process.returncode}; last: " + " | ".join(said[-LAST_LINES:]))
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except OSError:
            time.sleep(LOOK_S)
    raise ServerFailed(f"not ready after {START_S:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
