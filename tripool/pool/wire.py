"""What clients and a pool server say to each other: typed, bounded frames on a Unix socket.

A frame is its length (four bytes, little-endian) and one msgspec message. Types, key widths and list
lengths are checked while decoding, so that nothing malformed gets past this file. A message carries
whole batches of keys. A client names blocks by key and its own holds by number; where a block lies is
said by the server alone, and no bytes of a block ever travel here.

A *hold* is what a client has on a block: a lease, while it reads, or a reservation, until it seals. The
client chooses the numbers, ever growing, so that it can give a hold back although the answer was lost.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tripool.core.errors import WireError
from tripool.core.keys import KEY_BYTES

MAX_FRAME_BYTES = 1 << 20
MAX_KEYS = 4096
"""In one message; longer batches are cut by the client. 4096 blocks of 64 tokens are 262,144 tokens."""
SESSION_BYTES = 16
LENGTH_BYTES = 4

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=1, le=2**62)]
Checksum = Annotated[int, Meta(ge=0)]      # of 64 bits: msgpack holds no more


class Status(IntEnum):
    """What became of one key of a put."""

    OK = 0
    EXISTS = 1       # the first sealed bytes stay
    BUSY = 2         # somebody is writing this key now
    NO_SPACE = 3     # everything is held by readers and writers; later it may fit
    LOST = 4         # the server is gone, slow, or does not know the reservation


class Request(msgspec.Struct, frozen=True, tag=True):
    """What a client says."""


class Hello(Request, frozen=True):
    """The first message of a connection. A session outlives connections: a client that lost one comes back by it."""

    session: Annotated[bytes, Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
    writes: bool


class Reserve(Request, frozen=True):
    """Make room for blocks; key i becomes hold `first_hold + i`."""

    call: Natural
    first_hold: Natural
    keys: Keys
    sizes: Annotated[list[Size], Meta(max_length=MAX_KEYS)]


class Seal(Request, frozen=True):
    """These reservations are written: make them visible."""

    call: Natural
    holds: Annotated[list[Natural], Meta(max_length=MAX_KEYS)]
    checksums: Annotated[list[Checksum], Meta(max_length=MAX_KEYS)]


class Lease(Request, frozen=True):
    """Keep blocks as they are while I read; key i becomes hold `first_hold + i`. `prefix`: up to the first miss."""

    call: Natural
    first_hold: Natural
    keys: Keys
    prefix: bool


class Exists(Request, frozen=True):
    """Which keys could be read now. Takes no lease and does not count as a use."""

    call: Natural
    keys: Keys


class Release(Request, frozen=True):
    """End holds, whatever they are; unknown ones are ignored. Not answered.

    `num_lost` reads found another block after their copy than was leased. `suspects` failed their checksum: the server
    looks for itself and drops what is damaged.
    """

    holds: Annotated[list[Natural], Meta(max_length=MAX_KEYS)]
    num_lost: Natural = 0
    suspects: Keys = []


class Flush(Request, frozen=True):
    """Forget every block."""

    call: Natural


class GetStats(Request, frozen=True):
    """How is the server?"""

    call: Natural


class Reply(msgspec.Struct, frozen=True, tag=True):
    """What a server says. `boot_id` tells one life of a server from the next."""

    call: int
    boot_id: str


class Welcome(Reply, frozen=True):
    """The answer to `Hello`; the arena's descriptor comes with it."""

    name: str
    num_bytes: int


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """Where a block lies and what proves it."""

    offset: int
    num_bytes: int
    generation: int
    checksum: int = 0


class Reserved(Reply, frozen=True):
    statuses: list[Status]
    slots: list[Slot | None]
    cause: str = ""          # who holds the memory, when there was no space


class Sealed(Reply, frozen=True):
    statuses: list[Status]


class Leased(Reply, frozen=True):
    slots: list[Slot | None]


class Existing(Reply, frozen=True):
    found: list[bool]


class Flushed(Reply, frozen=True):
    num_blocks: int


class Stats(Reply, frozen=True):
    values: dict[str, int | float | str]


class Refused(Reply, frozen=True):
    """The server ends this connection, and why."""

    cause: str


AnyRequest = Hello | Reserve | Seal | Lease | Exists | Release | Flush | GetStats
AnyReply = Welcome | Reserved | Sealed | Leased | Existing | Flushed | Stats | Refused

Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(AnyRequest)
_reply_decoder = msgspec.msgpack.Decoder(AnyReply)


def frame(message: Request | Reply) -> bytes:
    """A message as it goes on the wire."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is longer than {MAX_FRAME_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def read_request(body: bytes) -> AnyRequest:
    """Raises WireError: not a request, or a field of the wrong type or size."""
    request: AnyRequest = _decode(_request_decoder, body)
    for left, right in _PAIRED.get(type(request), ()):
        if len(getattr(request, left)) != len(getattr(request, right)):
            raise WireError(f"a {type(request).__name__} has as many {left} as {right}")
    return request


def read_reply(body: bytes) -> AnyReply:
    """Raises WireError: not a reply, or a field of the wrong type or size."""
    return _decode(_reply_decoder, body)


_PAIRED: dict[type, tuple[tuple[str, str], ...]] = {Reserve: (("keys", "sizes"),), Seal: (("holds", "checksums"),)}


def _decode(decoder: msgspec.msgpack.Decoder[Message], body: bytes) -> Message:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, OverflowError, UnicodeDecodeError) as error:
        raise WireError(f"a frame of {len(body)} bytes is no message of the pool: {error}") from error


class FrameBuffer:
    """Bytes of a stream as they come, frames as they are whole."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def feed(self, received: bytes) -> None:
        self._bytes += received

    def next(self) -> bytes | None:
        """The next frame's body, or None while it is not whole.

        Raises:
            WireError: the frame says it is empty or longer than any message.
        """
        if len(self._bytes) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._bytes[:LENGTH_BYTES], "little")
        if not 0 < length <= MAX_FRAME_BYTES:
            raise WireError(f"a frame of {length} bytes; they have 1 to {MAX_FRAME_BYTES}")
        if len(self._bytes) < LENGTH_BYTES + length:
            return None
        body = bytes(self._bytes[LENGTH_BYTES:LENGTH_BYTES + length])
        del self._bytes[:LENGTH_BYTES + length]
        return body
