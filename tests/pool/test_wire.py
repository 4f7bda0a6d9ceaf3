"""Frames of the pool: what is well formed comes through, nothing else does."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pool.builders import key, keys
from tripool.core.errors import WireError
from tripool.pool.wire import (
    MAX_FRAME_BYTES,
    MAX_KEYS,
    Exists,
    FrameBuffer,
    Hello,
    Lease,
    Leased,
    Refused,
    Release,
    Reserve,
    Reserved,
    Seal,
    Slot,
    Status,
    frame,
    read_reply,
    read_request,
)

REQUESTS = [
    Hello(bytes(16), True), Reserve(1, 4096, keys(1, 2), [10, 20]), Seal(2, [4096, 4097], [0, 2**64 - 1]),
    Lease(3, 8192, keys(1), True), Exists(4, []), Release([5, 6], 1, keys(1)),
]
REPLIES = [
    Reserved(1, "boot", [Status.OK, Status.BUSY], [Slot(0, 10, 1), None], "full"),
    Leased(2, "boot", [Slot(4096, 10, 1, 2**64 - 1), None]), Refused(0, "boot", "no"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_a_request_comes_through(request_):
    assert read_request(frame(request_)[4:]) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda each: type(each).__name__)
def test_a_reply_comes_through(reply):
    assert read_reply(frame(reply)[4:]) == reply


@pytest.mark.parametrize("wrong", [
    Hello(bytes(15), True),
    Exists(1, [b"short"]),
    Exists(1, [key(1)] * (MAX_KEYS + 1)),
    Reserve(1, 1, keys(1, 2), [10]),
    Reserve(1, 1, keys(1), [0]),
    Reserve(1, 1, keys(1), [-5]),
    Reserve(1, 1, keys(1), [2**63]),
    Seal(1, [1], []),
    Lease(-1, 1, keys(1), True),
    Lease(1, 2**63, keys(1), True),
], ids=str)
def test_a_field_out_of_bounds_is_refused(wrong):
    with pytest.raises(WireError):
        read_request(msgspec.msgpack.encode(wrong))


@pytest.mark.parametrize("body", [
    b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "Nobody"}), msgspec.msgpack.encode({"type": "Exists"}),
    msgspec.msgpack.encode({"type": "Exists", "call": "one", "keys": []}), b"\x91" * 5000,
], ids=repr)
def test_what_is_no_message_is_refused(body):
    with pytest.raises(WireError):
        read_request(body)


@given(st.binary(max_size=200))
def test_no_bytes_get_past_the_decoder_unnoticed(body):
    for read in (read_request, read_reply):
        try:
            read(body)
        except WireError:
            pass


@settings(max_examples=50)
@given(st.lists(st.sampled_from(REQUESTS), max_size=5), st.data())
def test_frames_come_whole_however_the_stream_is_cut(requests, data):
    stream = b"".join(frame(each) for each in requests)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    buffer, received = FrameBuffer(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        buffer.feed(stream[start:end])
        while (body := buffer.next()) is not None:
            received.append(read_request(body))
    assert received == requests
    assert len(buffer) == 0


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_frame_that_says_it_is_empty_or_too_long_is_refused_before_it_comes(length):
    buffer = FrameBuffer()
    buffer.feed(length.to_bytes(4, "little"))
    with pytest.raises(WireError, match=f"{length} bytes"):
        buffer.next()


def test_the_longest_batches_fit_a_frame():
    longest = [key(1)] * MAX_KEYS
    assert len(frame(Reserve(2**62, 2**62, longest, [2**62] * MAX_KEYS))) < MAX_FRAME_BYTES
    slots = [Slot(2**62, 2**62, 2**62, 2**64 - 1)] * MAX_KEYS
    assert len(frame(Reserved(2**62, "boot", [Status.OK] * MAX_KEYS, slots))) < MAX_FRAME_BYTES
