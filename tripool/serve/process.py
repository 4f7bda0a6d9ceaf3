"""What every process of a deployment does alike: how it is told what to be, and how it ends.

A process is started as `python -m MODULE SPEC`, where SPEC is a file of the runtime directory (mode 0700,
the owner's alone). It dies with its launcher, even if that was killed. When it cannot start, it leaves one
sentence in `MEMBER.error` beside the spec, so that the launcher can say why.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tripool.core.deployment import Deployment
from tripool.core.errors import ConfigError, TripoolError

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
EXIT_UNUSABLE = 2
EXIT_BUG = 70
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """All that a process is told."""

    member: str
    role: str                         # gateway, prefill, decode, hybrid or cache
    deployment: Deployment
    runtime_dir: str
    gateway: str = ""                 # address to join
    caches: dict[str, str] = field(default_factory=dict)   # name -> socket path
    threads: int = 1                  # of torch, per rank
    cluster_key: str = ""             # hex
    record: str = ""                  # file for a recording of every decision
    log_level: str = "info"
    log_format: str = "text"
    metrics_port: int = 0             # 0: any free one
    launcher_pid: int = 0             # 0: started by hand
    # For tests: seconds to wait before verbs of the data plane; `staged`: the cache as on an accelerator.
    faults: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.cluster_key)

    @property
    def socket_address(self) -> str:
        return f"unix:{self.runtime_dir}/{self.member}.sock"


def write_spec(spec: ProcessSpec) -> Path:
    """Put a spec where its process will find it."""
    path = Path(spec.runtime_dir) / f"{spec.member}.json"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.encode(spec))
    return path


def error_path(runtime_dir: str, member: str) -> Path:
    return Path(runtime_dir) / f"{member}.error"


def new_boot_id() -> str:
    """Names one life of one process."""
    return secrets.token_hex(8)


def die_with(launcher_pid: int) -> None:
    """Have the kernel end this process when its launcher ends."""
    if launcher_pid:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher_pid:
            os._exit(EXIT_UNUSABLE)


def run_process(main: Callable[[ProcessSpec], None]) -> None:
    """Entry point of every process: read the spec, run, and leave the reason when that fails."""
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: python -m {main.__module__} SPEC (started by `tripool serve`)")
    try:
        spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ProcessSpec)
    except FileNotFoundError:
        raise SystemExit(f"{sys.argv[1]} is gone, and so is whoever wanted this process") from None
    die_with(spec.launcher_pid)
    set_up_logs(spec.member, spec.log_level, spec.log_format)
    try:
        main(spec)
    except TripoolError as error:
        error_path(spec.runtime_dir, spec.member).write_text(str(error))
        log.log(logging.DEBUG if spec.launcher_pid else logging.ERROR, "%s", error)     # a launcher tells it itself
        raise SystemExit(EXIT_UNUSABLE) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What a caller passed as `extra`; a mapping called `fields` stands for its items."""
    extra = {name: value for name, value in record.__dict__.items() if name not in PLAIN}
    return {**extra.pop("fields", {}), **extra}


class TextFormatter(logging.Formatter):
    """A line for people, with what a caller passed as `extra` at its end."""

    def __init__(self, member: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {member} %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        more = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        return super().formatMessage(record) + more


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what a caller passed as `extra` becomes fields."""

    def __init__(self, member: str) -> None:
        super().__init__()
        self.member = member

    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"), "level": record.levelname.lower(),
                  "member": self.member, "logger": record.name, "message": record.getMessage(), **fields_of(record)}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields, enc_hook=str).decode()


def set_up_logs(member: str, level: str, form: str = "text") -> None:
    """Send logs of this process to standard error, as text or as JSON lines.

    Raises:
        ConfigError: no such level or form.
    """
    if level not in LOG_LEVELS:
        raise ConfigError(f"--log-level is {level!r}; known are {', '.join(LOG_LEVELS)}")
    if form not in LOG_FORMATS:
        raise ConfigError(f"--log-format is {form!r}; known are {', '.join(LOG_FORMATS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(member) if form == "json" else TextFormatter(member))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for library in ("httpx", "uvicorn"):
        logging.getLogger(library).setLevel(logging.WARNING)
