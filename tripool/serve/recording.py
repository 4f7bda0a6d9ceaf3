"""A recording of every decision of a process, for replay.

One file per process: a first frame that says how to build its machines again, then one frame per message
that a machine handled, with the time it was told and what it answered. `core.timeline.replay` feeds the
messages to fresh machines and compares the answers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from tripool.control.gateway import Gateway
from tripool.control.health import Health
from tripool.control.router import Router
from tripool.control.scaling import Scaling
from tripool.control.scheduler import InstanceScheduler
from tripool.core.deployment import Deployment
from tripool.core.errors import WireError
from tripool.core.machine import Address, Machine, Send
from tripool.core.messages import Role
from tripool.core.timeline import Mismatch, Record, replay
from tripool.serve.wire import KINDS

LENGTH = struct.Struct("<I")
_KIND_OF = {kind: number for number, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True)
class Setup:
    """How to build a process's machines again."""

    member: str
    role: str
    boot_id: str
    deployment: Deployment


def machines_of(setup: Setup) -> dict[Address, Machine]:
    """Fresh machines, at their addresses."""
    if setup.role == "gateway":
        return {"gateway": Gateway(setup.deployment.gateway), "gateway/router": Router(setup.deployment.gateway),
                "gateway/health": Health(setup.deployment), "gateway/scaling": Scaling(setup.deployment)}
    config = getattr(setup.deployment, setup.role)
    role = msgspec.convert(setup.role, Role)
    return {setup.member: InstanceScheduler(setup.member, role, config, setup.deployment, setup.boot_id)}


class Recorder:
    """Writes records to a file as they happen."""

    def __init__(self, path: Path, setup: Setup) -> None:
        self._file = path.open("wb", buffering=1 << 16)
        self._encoder = msgspec.msgpack.Encoder()
        self._write(setup)
        self._file.flush()

    def __call__(self, record: Record) -> None:
        """Add a record. What is still said while a process ends is not kept."""
        if self._file.closed:
            return
        self._write([record.now, record.address, _packed(record.message),
                     [[send.to, send.delay_s, _packed(send.message)] for send in record.sends]])

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _write(self, value: Any) -> None:
        data = self._encoder.encode(value)
        self._file.write(LENGTH.pack(len(data)) + data)


def read_recording(path: Path) -> tuple[Setup, Iterator[Record]]:
    """The setup and the records of a file; a record cut off by a crash ends it.

    Raises:
        WireError: the file is not a recording, or of another version.
    """
    frames = _frames(path)
    try:
        return msgspec.convert(next(frames), Setup, strict=False), _records(frames)
    except (StopIteration, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(f"{path} is not a recording of this version: {error}") from error


def replay_recording(path: Path) -> tuple[int, list[Mismatch]]:
    """Play a recording to fresh machines: how many decisions there were, and where they came out otherwise."""
    setup, records = read_recording(path)
    played = list(records)
    return len(played), replay(machines_of(setup), played)


def _records(frames: Iterator[Any]) -> Iterator[Record]:
    for now, address, message, sends in frames:
        yield Record(now, address, _unpacked(message),
                     tuple(Send(to, _unpacked(sent), delay_s) for to, delay_s, sent in sends))


def _frames(path: Path) -> Iterator[Any]:
    data = path.read_bytes()
    at = 0
    while at + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if at + length > len(data):
            return
        yield msgspec.msgpack.decode(data[at:at + length])
        at += length


def _packed(message: Any) -> list[Any]:
    return [_KIND_OF[type(message)], msgspec.msgpack.encode(message)]


def _unpacked(packed: list[Any]) -> Any:
    kind, body = packed
    return msgspec.msgpack.decode(body, type=KINDS[kind])
