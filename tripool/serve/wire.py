"""Frames: how a message crosses from one process to another.

A frame is `length u32 · kind u16 · address length u8 · address · msgpack body`, little-endian. The kind
is a place in a fixed table of types, so the body is decoded into exactly that type or refused. Nothing is
unpickled, nothing is imported by name, and a frame longer than allowed ends the connection. What may
arrive is stated per direction: an instance cannot speak with the gateway's voice.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from tripool.control.experts import ExpertFigures
from tripool.core import messages as m
from tripool.core.errors import WireError
from tripool.core.machine import Address
from tripool.core.placement import PackedPlacement

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 16 << 20
MAX_GREETING_BYTES = 4096
HEAD = struct.Struct("<IHB")


@dataclass(frozen=True, slots=True)
class Opening:
    """First words of whoever connects. `nonce` is what the other side must answer to."""

    version: int
    member: str
    role: str
    boot_id: str
    host_id: str                  # of the kernel it runs on: equal ids share memory
    listen: tuple[str, ...]       # where its own peers reach it
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The listener's answer: who it is, its own nonce, and the proof for the caller's."""

    member: str
    boot_id: str
    host_id: str
    nonce: bytes
    proof: bytes


@dataclass(frozen=True, slots=True)
class Proof:
    """The caller's proof for the listener's nonce."""

    proof: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The listener does not want this caller, and says why."""

    cause: str


@dataclass(frozen=True, slots=True)
class PeerUp:
    """gateway -> an instance's data plane: another member whose blocks it may have to pull."""

    member: str
    boot_id: str
    host_id: str
    listen: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """decode -> prefill on another host: send me these blocks."""

    read_id: int
    parts: tuple[m.Part, ...]


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """prefill -> decode on another host: one block, or nothing when its generation has passed."""

    read_id: int
    index: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Report:
    """instance -> gateway, now and then: its counters and gauges by name, for people and dashboards."""

    member: str
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class ExpertReport:
    """instance -> gateway, about once a second while they change: its experts, for pictures and dashboards."""

    member: str
    figures: ExpertFigures
    num_routed: int                        # experts of a layer; a shared one that the map places comes after them
    loads: bytes                           # float32 tokens per step of each MoE layer and expert, smoothed, packed
    first: PackedPlacement                 # the map it started with
    placement: PackedPlacement             # the newest
    exchange: tuple[dict[str, int], ...]   # what each rank counted; empty where nothing crosses ranks


KINDS: tuple[type, ...] = (Opening, Welcome, Proof, Refused, PeerUp, ReadBlocks, BlockBytes, Report, *m.MESSAGES,
                           ExpertReport)
"""The table of kinds. Append only: a place in it is a number on the wire, and in recordings that of a message."""

GREETINGS = (Opening, Welcome, Proof, Refused)
FROM_INSTANCE = (m.Hello, m.Heartbeat, m.Tokens, m.Prefilled, m.AttemptFailed, m.HandOn, Report, ExpertReport)
FROM_GATEWAY = (m.Prefill, m.Admit, m.Abort, m.Release, m.Drain, m.Flush, m.Rebalance, m.ChangeRole, PeerUp)
FROM_READER = (m.Release, ReadBlocks)
FROM_SOURCE = (BlockBytes,)

_KIND_OF = {kind: number for number, kind in enumerate(KINDS)}
_DECODERS: tuple[msgspec.msgpack.Decoder[Any], ...] = tuple(msgspec.msgpack.Decoder(kind) for kind in KINDS)
_ENCODER = msgspec.msgpack.Encoder()


def encode(to: Address, message: Any) -> bytes:
    """One frame."""
    body = _ENCODER.encode(message)
    address = to.encode()
    if len(body) + len(address) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return HEAD.pack(len(address) + len(body), _KIND_OF[type(message)], len(address)) + address + body


class FrameReader:
    """Cuts a byte stream into messages of the allowed kinds."""

    def __init__(self, allowed: tuple[type, ...], max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.allowed = frozenset(_KIND_OF[kind] for kind in allowed)
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Address, Any]]:
        """The messages that are complete now, as (address, message).

        Raises:
            WireError: a frame is too long, of a kind that is not allowed here, or does not decode.
        """
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= HEAD.size:
                length, kind, address_length = HEAD.unpack_from(self._buffer, at)
                if length > self.max_bytes:
                    raise WireError(f"a frame of {length} bytes is over the limit of {self.max_bytes}")
                if kind not in self.allowed:
                    name = KINDS[kind].__name__ if kind < len(KINDS) else f"kind {kind}"
                    raise WireError(f"{name} is not taken on this link")
                if address_length > length:
                    raise WireError("a frame's address is longer than the frame")
                start = at + HEAD.size
                if len(self._buffer) < start + length:
                    return
                body = bytes(self._buffer[start:start + length])
                at = start + length
                try:
                    address = body[:address_length].decode("ascii")
                    message = _DECODERS[kind].decode(body[address_length:])
                except (UnicodeDecodeError, msgspec.DecodeError) as error:
                    raise WireError(f"a {KINDS[kind].__name__} does not decode: {error}") from error
                yield address, message
        finally:
            del self._buffer[:at]
