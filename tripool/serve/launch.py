"""Starts, watches and stops the processes of a deployment on this machine, in order.

Cache servers come first, then the gateway, then the instances together; they end in the opposite order,
each group after the one that sends it work. Everything is checked before anything is started. A process
that dies is started again under the same name with a new boot id, a few times; requests it held are the
gateway's business. All processes die with this one, and the runtime directory goes with it; one that a killed
launcher left is removed by the next.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from tripool.core.deployment import Deployment
from tripool.core.errors import ConfigError
from tripool.core.messages import ROLES
from tripool.serve.budget import threads_per_rank, usable_cores
from tripool.serve.models import resolve
from tripool.serve.process import ProcessSpec, error_path, write_spec

log = logging.getLogger(__name__)

MODULES = {"gateway": "tripool.api.server", "cache": "tripool.serve.cache",
           "prefill": "tripool.serve.instance", "decode": "tripool.serve.instance", "hybrid": "tripool.serve.instance"}
MAX_RESTARTS = 5
RESTART_DELAY_S = 0.2
LONGEST_SOCKET_NAME = 107        # of Linux: sun_path without its end
LOCK = "launcher.lock"           # in a runtime directory: locked as long as its launcher lives
STABLE_S = 60.0                  # after so long without a death, earlier restarts are forgiven
LATE_S = 5.0                     # on top of a process's own budget, before it is killed


@dataclass(slots=True)
class Process:
    """One child and how often it has been started again."""

    spec: ProcessSpec
    popen: subprocess.Popen[bytes]
    restarts: int = 0
    started: float = field(default_factory=time.monotonic)


class Fleet:
    """The running processes of a deployment."""

    def __init__(self, deployment: Deployment, url: str, *, restart: bool) -> None:
        self.deployment = deployment
        self.runtime_dir, self._lock = make_runtime_dir()
        self.url = url
        self.processes: dict[str, Process] = {}
        self._restart = restart
        self._stopping = False

    @property
    def pids(self) -> dict[str, int]:
        return {name: each.popen.pid for name, each in self.processes.items()}

    def start(self, spec: ProcessSpec) -> None:
        """Start a process.

        Raises:
            ConfigError: its socket would have too long a name.
        """
        if len(os.fsencode(spec.socket_address)) > len("unix:") + LONGEST_SOCKET_NAME:
            raise ConfigError(f"the socket {spec.socket_address.removeprefix('unix:')} has a longer name than the "
                              f"{LONGEST_SOCKET_NAME} bytes that are allowed; set TMPDIR to a folder with a short name")
        write_spec(spec)
        error_path(spec.runtime_dir, spec.member).unlink(missing_ok=True)
        command = [sys.executable, "-m", MODULES[spec.role], str(Path(spec.runtime_dir) / f"{spec.member}.json")]
        popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        old = self.processes.get(spec.member)
        self.processes[spec.member] = Process(spec, popen, old.restarts + 1 if old else 0)

    def watch(self, *, restart: bool = True) -> None:
        """Notice processes that have ended; start them again, or raise what they left as their reason.

        To be called by a thread that lives as long as the fleet: the kernel ends a process with the thread that
        started it.

        Raises:
            ConfigError: a process cannot start, or keeps dying.
        """
        for name, each in list(self.processes.items()):
            code = each.popen.poll()
            if code is None or self._stopping:
                continue
            reason = self.reason(name)
            if reason is not None:
                raise ConfigError(reason)
            if time.monotonic() - each.started > STABLE_S:
                each.restarts = 0
            if not restart or not self._restart or each.spec.role == "gateway" or each.restarts >= MAX_RESTARTS:
                raise ConfigError(f"{name} ended with code {code}; its log above says more")
            log.warning("%s ended with code %s; starting it again", name, code)
            time.sleep(RESTART_DELAY_S)
            self.start(each.spec)

    def reason(self, member: str) -> str | None:
        """The sentence that a process left when it could not start."""
        path = error_path(str(self.runtime_dir), member)
        return path.read_text() if path.exists() else None

    def health(self) -> tuple[bool, str]:
        """Whether the gateway says that requests are taken, and if not, why."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as answer:
                return True, answer.read().decode()
        except urllib.error.HTTPError as error:
            return False, error.read().decode()
        except OSError:
            return False, "the gateway does not answer yet"

    def wait_ready(self, deadline_s: float, progress: Callable[[str], None] = lambda text: None) -> None:
        """Until requests are taken.

        Raises:
            ConfigError: a process could not start, or the deadline passed.
        """
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            self.watch(restart=False)        # what ends before it was ever ready would end again
            ready, text = self.health()
            progress(text)
            if ready:
                return
            time.sleep(0.05)
        raise ConfigError(f"not ready after {deadline_s:.0f} s: {text}")

    def wait(self) -> None:
        """Watch until interrupted."""
        while not self._stopping:
            self.watch()
            time.sleep(0.1)

    def stop(self) -> None:
        """End everything in order: gateway, instances, caches. Streams get their budget to finish."""
        self._stopping = True
        budget = self.deployment.shutdown_s + LATE_S
        for roles in (("gateway",), ROLES, ("cache",)):
            group = [each for each in self.processes.values() if each.spec.role in roles]
            for each in group:
                if each.popen.poll() is None:
                    each.popen.send_signal(signal.SIGTERM)
            end = time.monotonic() + budget
            for each in group:
                try:
                    each.popen.wait(timeout=max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    log.error("%s did not end within its budget and is killed", each.spec.member)
                    each.popen.kill()
                    each.popen.wait()

    def kill(self) -> None:
        """End everything at once."""
        self._stopping = True
        for each in self.processes.values():
            if each.popen.poll() is None:
                each.popen.kill()
        for each in self.processes.values():
            each.popen.wait()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            self.stop() if error is None else self.kill()
        finally:
            shutil.rmtree(self.runtime_dir, ignore_errors=True)
            os.close(self._lock)


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How to run, as opposed to what."""

    restart: bool = True
    record_dir: str = ""              # a recording of every decision, one file per process
    log_level: str = "info"
    log_format: str = "text"
    cluster_key: str = ""
    notify: Callable[[str], None] = lambda text: None     # told of long work before the start, such as a download
    metrics_port: int = 0             # of the first instance; the next and the caches take the following; 0: any free
    faults: Mapping[str, Mapping[str, float]] = field(default_factory=dict)   # by member, for fault tests


def launch(deployment: Deployment, options: LaunchOptions | None = None) -> Fleet:
    """Check everything, then start all processes of a deployment. They may still be loading on return.

    Raises:
        ConfigError: a setting is wrong, the port is taken.
        CheckpointError: the model folder is unusable; nothing was started.
    """
    options = options or LaunchOptions()
    cores = usable_cores()
    deployment, _ = resolve(deployment, options.notify)
    deployment = replace(deployment, gateway=replace(deployment.gateway, port=free_port(deployment)))
    fleet = Fleet(deployment, f"http://{_reachable(deployment.gateway.host)}:{deployment.gateway.port}",
                  restart=options.restart)
    runtime_dir = fleet.runtime_dir
    caches = {f"cache-{i}": f"{runtime_dir}/cache-{i}.sock" for i in range(deployment.cache.count)}

    def spec(member: str, role: str, threads: int, index: int = 0) -> ProcessSpec:
        return ProcessSpec(
            member, role, deployment, str(runtime_dir), f"unix:{runtime_dir}/gateway.sock", caches, threads,
            options.cluster_key, f"{options.record_dir}/{member}" if options.record_dir else "",
            options.log_level, options.log_format, options.metrics_port + index if options.metrics_port else 0,
            os.getpid(), dict(options.faults.get(member, {})))

    try:
        num_instances = sum(getattr(deployment, role).count for role in ROLES)
        for i, name in enumerate(caches):
            fleet.start(spec(name, "cache", 1, num_instances + i))
        fleet.start(spec("gateway", "gateway", 1))
        index = 0
        for role in ROLES:
            config = getattr(deployment, role)
            for i in range(config.count):
                fleet.start(spec(f"{role}-{i}", role, threads_per_rank(deployment, config, cores), index))
                index += 1
    except BaseException as error:
        fleet.__exit__(type(error), error, error.__traceback__)
        raise
    return fleet


def make_runtime_dir() -> tuple[Path, int]:
    """A directory for the sockets of a deployment, and the handle of its lock. Removes those of dead launchers."""
    for lock_path in Path(tempfile.gettempdir()).glob(f"tripool-*/{LOCK}"):
        _remove_if_stale(lock_path)
    folder = Path(tempfile.mkdtemp(prefix="tripool-"))
    new = folder / f"{LOCK}.new"
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(folder / LOCK)                # nobody sees it unlocked
    return folder, lock


def _remove_if_stale(lock_path: Path) -> None:
    """Remove a runtime directory whose launcher is gone; the kernel has let go of its lock."""
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:                          # somebody else's, or gone meanwhile
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        log.info("removing %s, which a killed launcher left", lock_path.parent)
        shutil.rmtree(lock_path.parent, ignore_errors=True)
    except BlockingIOError:
        pass                                 # its launcher lives
    finally:
        os.close(lock)


def free_port(deployment: Deployment) -> int:
    """The gateway's port, seen to be free; one that the system chooses for port 0.

    Raises:
        ConfigError: it is taken, or the address is not this machine's.
    """
    host, port = deployment.gateway.host, deployment.gateway.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}; choose another --port "
                              "(0 takes any free one) or --host") from error
        return int(probe.getsockname()[1])


def _reachable(host: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


