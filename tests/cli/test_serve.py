"""The commands together, with real processes: what a person types in two terminals."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.fake_server import tripool

READY_S = 100.0
pytestmark = pytest.mark.timeout(300)


class Command:
    """A command in a process of its own, and what it said on standard error so far."""

    def __init__(self, log: Path, *words: str) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tripool.cli.main", *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=os.environ | {"COLUMNS": "200"})

    def until_it_says(self, pattern: str) -> re.Match:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            found = re.search(pattern, self._log.read_text())
            if found:
                return found
            assert self.process.poll() is None, self._log.read_text()
            time.sleep(0.1)
        raise AssertionError(f"{pattern} was not said: {self._log.read_text()}")

    def children(self) -> list[int]:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in found.split()]

    def end(self) -> int:
        """Ask it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@contextlib.contextmanager
def running(log: Path, *words: str) -> Iterator[Command]:
    command = Command(log, *words)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait()


def runtime_dirs(temporary: Path) -> list[Path]:
    return list(temporary.glob("tripool-*"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where the processes put their sockets. Names of Unix sockets are short, so it must be, too."""
    folder = Path("/tmp") / f"t{os.getpid()}-{tmp_path.name[-8:]}"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    for left in runtime_dirs(folder):
        pytest.fail(f"{left} was left behind")
    folder.rmdir()


def test_a_served_model_is_talked_to_watched_and_measured(tmp_path, temporary):
    with running(tmp_path / "log", "serve", "--hybrid", "1", "--port", "0", "--threads", "1") as server:
        url = server.until_it_says(r"served at (http://\S+)/v1").group(1)
        pids = server.children()
        assert len(pids) == 2                  # gateway and instance

        said = tripool("chat", "--url", url, "--max-tokens", "4", "--temperature", "0", stdin="Hello!\n")
        assert said.exit_code == 0, said.output
        assert said.stdout.strip()
        seen = tripool("top", "--url", url, "--once", "--json")
        view = json.loads(seen.stdout)
        assert [(each["member"], each["state"]) for each in view["members"]] == [("hybrid-0", "up")]
        assert view["finished"] == 1
        measured = tripool("bench", "serve", "--url", url, "--num-prompts", "4", "--max-concurrency", "2",
                           "--input-len", "20", "--output-len", "5", "--json", "-")
        figures = json.loads(measured.stdout)["figures"]
        assert (figures["completed"], figures["failed"]) == (4, 0)
        assert (figures["prompt_tokens"], figures["output_tokens"]) == (80, 20)

        assert server.end() == 0
        assert all(not Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_plan_is_simulated_served_and_talked_to_as_it_was_written(tmp_path, temporary):
    asked = ("--hardware", "cpu", "--rate", "2", "--prompt-tokens", "50", "--output-tokens", "10")
    planned = tripool("plan", "--model", "tiny", *asked, "--slo-ttft", "1", "--slo-tpot", "0.1", "--processes", "1",
                      "--out", str(tmp_path / "plans"))
    assert planned.exit_code == 0, planned.output
    best = str(tmp_path / "plans" / "best.toml")

    simulated = tripool("simulate", best, *asked, "--duration", "10", "--json", "-")
    assert json.loads(simulated.stdout)["requests"]["served"] > 5, simulated.output
    with running(tmp_path / "log", "serve", best, "--port", "0", "--threads", "1") as server:
        url = server.until_it_says(r"tripool-tiny is served at (http://\S+)/v1").group(1)
        said = tripool("chat", "--url", url, "--max-tokens", "4", "--temperature", "0", stdin="Hello!\n")
        assert said.exit_code == 0 and said.stdout.strip(), said.output
        assert server.end() == 0


def test_members_join_one_by_one_and_leave(tmp_path, temporary):
    key, address = tmp_path / "key", f"tcp://127.0.0.1:{free_port()}"
    key.write_text("a secret of more than sixteen bytes")
    key.chmod(0o600)
    shared = ("--cluster-key-file", str(key), "--threads", "1")
    with running(tmp_path / "log", "serve", "--prefill", "1", "--decode", "1", "--port", "0",
                 "--accept-members", address, *shared) as server:
        url = server.until_it_says(r"served at (http://\S+)/v1").group(1)
        with running(tmp_path / "joiner", "serve", "--role", "decode", "--join", address, "--name", "late",
                     *shared) as late:
            states = {}
            end = time.monotonic() + READY_S
            while states.get("late") != "up":
                assert time.monotonic() < end, states
                view = json.loads(tripool("top", "--url", url, "--once", "--json").stdout)
                states = {each["member"]: each["state"] for each in view["members"]}
            assert late.end() == 0
        said = tripool("chat", "--url", url, "--max-tokens", "4", stdin="Hello!\n")
        assert said.exit_code == 0, said.output
        assert server.end() == 0


def test_a_member_without_the_right_key_is_not_let_in(tmp_path, temporary):
    address = f"tcp://127.0.0.1:{free_port()}"
    keys = []
    for name in ("right", "wrong"):
        keys.append(tmp_path / name)
        keys[-1].write_text(f"a secret of more than sixteen bytes: {name}")
        keys[-1].chmod(0o600)
    with running(tmp_path / "log", "serve", "--hybrid", "1", "--port", "0", "--accept-members", address,
                 "--cluster-key-file", str(keys[0]), "--threads", "1") as server:
        server.until_it_says(r"served at (http://\S+)/v1")
        with running(tmp_path / "joiner", "serve", "--role", "hybrid", "--join", address, "--cluster-key-file",
                     str(keys[1]), "--no-restart") as stranger:
            assert stranger.process.wait(timeout=60) == 2
        assert "key" in (tmp_path / "joiner").read_text()
        assert server.end() == 0


def test_a_port_in_use_is_named_before_anything_starts(tmp_path, temporary):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running(tmp_path / "log", "serve", "--hybrid", "1", "--port", str(port)) as server:
            assert server.process.wait(timeout=60) == 2
    assert f"cannot listen at 127.0.0.1:{port}" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_the_demo_ends_well(tmp_path, temporary):
    with running(tmp_path / "log", "demo", "--no-chat") as demo:
        assert demo.process.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    assert "prompt tokens came from the pool" in said
    assert "they are the same as without the failure" in said
