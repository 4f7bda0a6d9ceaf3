"""Starting and stopping: errors before anything runs, nothing left behind, members that join by hand."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.fleet import TINY, served
from tripool.core.deployment import CacheConfig, Deployment, GatewayConfig, InstanceConfig, ModelConfig
from tripool.core.errors import CheckpointError, ConfigError, TripoolError
from tripool.serve.launch import MODULES, LaunchOptions, launch, make_runtime_dir
from tripool.serve.process import ProcessSpec, write_spec

pytestmark = pytest.mark.timeout(240)


def deployment(**model) -> Deployment:
    return Deployment(model=ModelConfig(**{"path": str(TINY), **model}), gateway=GatewayConfig(port=0),
                      hybrid=InstanceConfig(count=1, threads=1))


def start(wanted: Deployment) -> None:
    with launch(wanted, LaunchOptions(log_level="error")) as fleet:
        fleet.wait_ready(60)


def children() -> set[int]:
    return {each.pid for each in psutil.Process().children(recursive=True)}


def copy_of_tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    return folder


def cut_the_weights(folder: Path) -> str:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)
    return "model.safetensors"


def lose_the_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "safetensors"


def spoil_the_config(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return "llama"


@pytest.mark.parametrize("damage", [cut_the_weights, lose_the_weights, spoil_the_config])
def test_a_damaged_model_is_refused_before_anything_is_started(tmp_path, damage):
    """C22."""
    folder = copy_of_tiny(tmp_path)
    named = damage(folder)
    before = children()
    with pytest.raises(CheckpointError, match=named):
        launch(deployment(path=str(folder)))
    assert children() == before


def test_a_missing_tokenizer_is_said_and_everything_ends(tmp_path):
    folder = copy_of_tiny(tmp_path)
    (folder / "tokenizer.json").unlink()
    before = children()
    with pytest.raises(TripoolError, match=r"tokenizer\.json"):
        start(deployment(path=str(folder)))
    assert children() == before


def test_a_taken_port_is_refused_before_anything_is_started():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wanted = replace(deployment(), gateway=GatewayConfig(port=taken.getsockname()[1]))
        before = children()
        with pytest.raises(ConfigError, match="choose another --port"):
            launch(wanted)
        assert children() == before


@pytest.mark.parametrize(("changes", "said"), [
    (dict(model=ModelConfig(path=str(TINY), max_model_len=1 << 20)), "made for 4096 tokens"),
    (dict(hybrid=InstanceConfig(count=1, ranks=2, redundant_experts=17)), "copies of one expert must be on different"),
])
def test_what_does_not_fit_the_model_is_refused_before_anything_is_started(changes, said):
    before = children()
    with pytest.raises(ConfigError, match=said):
        launch(replace(deployment(), **changes))
    assert children() == before


def test_a_socket_with_too_long_a_name_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        launch(deployment())
    assert list(folder.iterdir()) == []


def test_a_process_that_cannot_start_is_not_started_again(monkeypatch):
    monkeypatch.setitem(MODULES, "hybrid", "tripool.no_such_module")
    before = children()
    with pytest.raises(ConfigError, match="hybrid-0 ended with code 1"):
        start(deployment())
    assert children() == before


def test_too_little_memory_for_the_cache_is_said_with_the_bytes_it_needs():
    small = replace(deployment(), hybrid=InstanceConfig(count=1, threads=1, cache_bytes=1 << 20))
    before = children()
    with pytest.raises(ConfigError, match=r"needs \d+ bytes"):
        start(small)
    assert children() == before


def test_after_a_stop_no_process_socket_or_memory_is_left():
    before, shared = children(), set(os.listdir("/dev/shm"))
    with served(prefill=1, decode=1, cache=1) as pools:
        runtime_dir, pids = pools.fleet.runtime_dir, list(pools.fleet.pids.values())
        pools.token_ids([20, 30, 40], 2)
        assert runtime_dir.stat().st_mode & 0o077 == 0
    assert children() == before
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not runtime_dir.exists()
    assert set(os.listdir("/dev/shm")) == shared


def test_all_processes_die_with_a_launcher_that_is_killed_and_the_next_clears_up(tmp_path, monkeypatch):
    script = ("import sys, time\n"
              "from tests.serve.test_launch import deployment\n"
              "from tripool.serve.launch import LaunchOptions, launch\n"
              "with launch(deployment(), LaunchOptions(log_level='error')) as fleet:\n"
              "    print(*fleet.pids.values(), flush=True)\n"
              "    time.sleep(60)\n")
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                                env={**os.environ, "TMPDIR": str(tmp_path)})
    assert launcher.stdout is not None
    pids = [int(pid) for pid in launcher.stdout.readline().split()]
    assert len(pids) == 2
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + 60        # one that still imports notices when it has done so
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < end, "a process outlived its launcher"
        time.sleep(0.1)
    (left,) = tmp_path.glob("tripool-*")
    (tmp_path / "tripool-notes").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, first_lock = make_runtime_dir()
    assert not left.exists()
    second, second_lock = make_runtime_dir()
    assert first.exists() and second.exists() and (tmp_path / "tripool-notes").exists()
    os.close(first_lock)
    os.close(second_lock)


KEY = "5e" * 32


class Joined:
    """A decode instance started by hand."""

    def __init__(self, fleet, tmp_path: Path, gateway: str, key: str) -> None:
        config = replace(fleet.deployment, cache=CacheConfig())
        spec = ProcessSpec("decode-9", "decode", config, str(tmp_path), gateway, cluster_key=key, log_level="error")
        self.process = subprocess.Popen([sys.executable, "-m", "tripool.serve.instance", str(write_spec(spec))])
        self.error = tmp_path / "decode-9.error"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="class")
def open_to_members():
    """1P1D that members may join, and where."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with served(prefill=1, decode=1, gateway={"join": address}, cluster_key=KEY) as pools:
        yield pools, address


class TestJoining:
    @pytest.fixture
    def pools(self, open_to_members):
        return open_to_members[0]

    @pytest.fixture
    def address(self, open_to_members):
        return open_to_members[1]

    def test_a_member_without_the_key_is_turned_away(self, pools, address, tmp_path):
        with Joined(pools.fleet, tmp_path, address, "11" * 32) as member:
            assert member.process.wait(timeout=60) == 2
            assert "key" in member.error.read_text()
            assert pools.state("decode-9") == "absent"
            assert pools.health() == 200

    def test_a_name_that_is_taken_is_refused(self, pools, tmp_path):
        gateway = f"unix:{pools.fleet.runtime_dir}/gateway.sock"
        spec = ProcessSpec("decode-0", "decode", pools.fleet.deployment, str(tmp_path), gateway, cluster_key=KEY,
                           log_level="error")
        done = subprocess.run([sys.executable, "-m", "tripool.serve.instance", str(write_spec(spec))], timeout=60,
                              check=False)
        assert done.returncode == 2
        assert "is taken" in (tmp_path / "decode-0.error").read_text()
        assert pools.health() == 200

    def test_a_member_joins_by_tcp_with_the_cluster_key_and_serves(self, pools, address, tmp_path, oracle, prompts):
        with Joined(pools.fleet, tmp_path, address, KEY) as member:
            pools.wait_for(lambda: pools.state("decode-9") == "up", 60)
            pools.kill("decode-0")
            pools.wait_for(lambda: pools.state("decode-0") == "down")
            prompt = prompts(1, seed=40)[0]
            oracle.check(prompt, pools.token_ids(prompt, 8))
            pools.wait_for(lambda: pools.reports()["decode-9"]["pulled_blocks"] > 0, 5)
            member.process.send_signal(signal.SIGTERM)
            assert member.process.wait(timeout=20) == 0
