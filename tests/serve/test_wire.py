"""Frames: what is encoded comes back, and what is malformed is refused without harm."""

import dataclasses
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.core import messages as m
from tripool.core.errors import WireError
from tripool.core.plan import Emitted, Join, Section, StepPlan, TokenLogprobs, token_columns
from tripool.core.request import Limits, Request, Sampling, pack_tokens
from tripool.serve.wire import (
    FROM_GATEWAY,
    FROM_INSTANCE,
    FROM_READER,
    HEAD,
    KINDS,
    MAX_FRAME_BYTES,
    FrameReader,
    encode,
)

REQUEST = Request(7, pack_tokens([1, 2, 3]), Sampling(logit_bias=((3, -1.5),), seed=9), Limits(5, 1, (1, 2)),
                  b"salt", 2)
GRANT = m.Grant("prefill-0", "boot", "layout", 3, (m.Part(0, 4, 2, 2**64 - 1),))
JOIN = Join(0, 7, 1, "gateway", b"", 0, 0, (1,), Sampling(), Limits(3), True)
COLUMNS = token_columns([(7, 1, 0, pack_tokens([5])), (8, 2, 3, pack_tokens([6, 7]))])


@pytest.mark.parametrize("message", [
    m.Prefill(REQUEST, 2, pack_tokens([9])),
    m.Admit(REQUEST, 1, pack_tokens([9]), GRANT),
    m.Prefilled(7, 1, GRANT, 4),
    m.Tokens("decode-0", (Emitted("gateway", COLUMNS, (TokenLogprobs(7, 1, 0, (-0.5,), ((1, 2),), ((-0.5, -1.0),)),)),),
             (m.Done(8, 2, "stop", 5, 1),), ((7, 1, 64),)),
    m.Heartbeat("decode-0", "boot", "up", 5, 1, 0, 0, 9, m.Facts("m", "f", "l", 4096, 64, 9)),
    m.Run(3, 1.0, StepPlan(1, (Section(joins=(JOIN,)),))),
])
def test_a_message_comes_back_as_it_was(message):
    frames = FrameReader(KINDS)
    assert list(frames.feed(encode("somewhere/else", message))) == [("somewhere/else", message)]


def test_frames_may_arrive_in_any_pieces():
    data = encode("a", m.Release(1, 2)) + encode("b", m.Abort(3, 4))
    reader = FrameReader(KINDS)
    got = [pair for i in range(len(data)) for pair in reader.feed(data[i:i + 1])]
    assert got == [("a", m.Release(1, 2)), ("b", m.Abort(3, 4))]


def test_every_field_of_every_kind_can_be_decoded():
    for kind in KINDS:
        assert dataclasses.is_dataclass(kind) and typing.get_type_hints(kind) is not None
    assert len(set(KINDS)) == len(KINDS)


@pytest.mark.parametrize(("allowed", "refused"), [
    (FROM_INSTANCE, m.Prefill(REQUEST, 1)), (FROM_GATEWAY, m.Tokens("x", ())), (FROM_READER, m.Abort(1, 1)),
])
def test_each_direction_takes_only_its_own_kinds(allowed, refused):
    with pytest.raises(WireError, match=type(refused).__name__):
        list(FrameReader(allowed).feed(encode("x", refused)))


def test_a_frame_that_claims_to_be_huge_is_refused_before_it_arrives():
    with pytest.raises(WireError, match="over the limit"):
        list(FrameReader(KINDS).feed(HEAD.pack(MAX_FRAME_BYTES + 1, 0, 0)))


def test_fields_of_the_wrong_type_are_refused():
    good = encode("x", m.Release(1, 2))
    bad = good.replace(b"\x01\xa7attempt", b"\xa1z\xa7attempt")    # request_id becomes a string
    bad = HEAD.pack(len(bad) - HEAD.size, *HEAD.unpack_from(good)[1:]) + bad[HEAD.size:]
    with pytest.raises(WireError, match="Release does not decode"):
        list(FrameReader(KINDS).feed(bad))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 60), st.integers(0, 255))
def test_any_bytes_are_either_waited_for_or_refused(body, kind, address_length):
    for data in (body, HEAD.pack(len(body), kind, address_length) + body):
        try:
            for _, message in FrameReader(KINDS).feed(data):
                assert type(message) in KINDS
        except WireError:
            pass
