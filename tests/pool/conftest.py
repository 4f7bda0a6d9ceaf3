"""Pool servers in threads and in processes, clients, and processes that are clients; all ended after the test."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pool.builders import EXTENT_BYTES
from tripool.pool.sdk import PoolClient
from tripool.pool.server import PoolServer

ROOT = Path(__file__).resolve().parents[2]

SERVE = """
import sys
from pathlib import Path
from tripool.pool.server import run_server
run_server(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), lambda server: print("ready", flush=True))
"""


@pytest.fixture
def pool_server(tmp_path: Path) -> Iterator[Callable[..., PoolServer]]:
    """Start a server in a thread, with room for `num_blocks` blocks. It must have leaked nothing when the test ends."""
    started: list[tuple[PoolServer, threading.Thread]] = []

    def start(name: str = "cache", *, num_blocks: int = 20, **options: object) -> PoolServer:
        options.setdefault("max_held_fraction", 1.0)
        server = PoolServer(tmp_path / name, num_blocks * EXTENT_BYTES, name=name, **options)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.check()
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


class ServerProcess:
    """A server in a process of its own, that can be stopped, killed and started again at the same path."""

    def __init__(self, path: Path, num_bytes: int, name: str = "cache") -> None:
        self.path, self.num_bytes, self.name = path, num_bytes, name
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, self.name, str(self.path), str(self.num_bytes)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ready\n"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def server_process(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start(name: str = "cache", *, num_blocks: int = 20) -> ServerProcess:
        started.append(ServerProcess(tmp_path / name, num_blocks * EXTENT_BYTES, name))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def pool_client() -> Iterator[Callable[..., PoolClient]]:
    """A client of any number of servers."""
    opened: list[PoolClient] = []

    def connect(*servers: PoolServer | ServerProcess, timeout_s: float = 20.0, **options: object) -> PoolClient:
        opened.append(PoolClient({server.name: server.path for server in servers}, timeout_s=timeout_s, **options))
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


class ActorProcess:
    """The test's end of an actor."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", "tests.pool.actor", str(path)], cwd=ROOT,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.answer() == "ready"

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, method: str, *arguments: object) -> None:
        self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> object:
        return json.loads(self.process.stdout.readline())

    def do(self, method: str, *arguments: object) -> object:
        self.tell(method, *arguments)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def actor() -> Iterator[Callable[..., ActorProcess]]:
    started: list[ActorProcess] = []

    def start(server: PoolServer | ServerProcess) -> ActorProcess:
        started.append(ActorProcess(server.path))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.kill()
