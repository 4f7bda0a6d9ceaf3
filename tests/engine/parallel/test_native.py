"""The native half agrees with its definition, in either role of an exchange."""

import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.parallel.builders import (
    Side,
    contexts,
    experts,
    geometry,
    picks,
    segment_of,
    soon,
    tokens,
)
from tripool.engine.ops import native as operations
from tripool.engine.parallel import native
from tripool.engine.parallel.definition import Definition, Status, tag_of
from tripool.engine.parallel.quantise import dequantise, quantise

needs_native = pytest.mark.skipif(not native.is_built(), reason="the native module is not built here")
LEVELS = (0, 1, 2)
FIRST = tag_of(0, 0)


def test_where_there_is_a_compiler_the_native_module_is_built():
    if sys.platform != "linux" or (shutil.which("c++") is None and shutil.which("g++") is None):
        pytest.skip("no compiler")
    assert native.is_built(), "run `make native` and read what the compiler says"


def test_the_native_module_loads_neither_torch_nor_numpy():
    script = "import sys\nfrom tripool import _native\nsys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert not native.is_built() or subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_below_the_lowest_level_the_definition_is_used():
    assert isinstance(native.kernels(-1), Definition)


@needs_native
def test_the_level_is_capped():
    assert [native.kernels(cap).level <= cap for cap in LEVELS] == [True] * 3
    assert native.kernels(0).level == 0


@needs_native
def test_left_to_itself_an_exchange_runs_at_the_level_of_operations(monkeypatch):
    monkeypatch.setattr(operations, "chosen_level", lambda: -1)
    assert isinstance(native.kernels(), Definition)
    monkeypatch.setattr(operations, "chosen_level", lambda: 0)
    assert native.kernels().level == 0
    monkeypatch.undo()
    assert native.kernels().level == min(operations.chosen_level(), native.BEST)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", LEVELS)
@pytest.mark.parametrize("width", [1, 7, 64, 100, 7168])
def test_rows_are_quantised_as_the_definition_says(cap, dtype, width):
    x = tokens(40, width, width)
    for row, factor in enumerate((0.0, 1e-32, 1e-29, 1e-5, 1e30)):
        x[row] *= factor
    x[5, 0], x[6, -1], x[7, 0] = float("nan"), float("inf"), -float("inf")
    x = x.to(dtype)
    q, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x))
    native.Native(cap).quantise(x, q, scale)

    expected_q, expected_scale = quantise(x)
    assert torch.equal(q, expected_q)
    assert torch.equal(scale.nan_to_num(-1.0), expected_scale.nan_to_num(-1.0))
    assert expected_scale.isnan().nonzero().flatten().tolist() == [5, 6, 7]


@given(st.lists(st.floats(-1e37, 1e37), min_size=1, max_size=40))
def test_a_quantised_row_is_never_off_by_more_than_half_a_step(values):
    x = torch.tensor([values])
    q, scale = quantise(x)
    error = (dequantise(q, scale, torch.float32) - x).abs().max()
    assert error <= 0.5001 * scale.max() + 1e-30
    if native.is_built():
        native_q, native_scale = torch.empty_like(q), torch.empty_like(scale)
        native.Native().quantise(x, native_q, native_scale)
        assert torch.equal(native_q, q) and torch.equal(native_scale, scale)


def implementations():
    return [Definition(), *([native.Native()] if native.is_built() else [])]


@given(st.data())
def test_ranks_of_both_kinds_understand_one_another(data):
    """Each rank draws its implementation and its tokens; layers follow one another through both halves."""
    slots = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(lambda each: sum(each) >= 2))
    rows = data.draw(st.sampled_from(["float32", "bfloat16", "int8"]))
    layout = geometry(slots, rows=rows, results=data.draw(st.sampled_from(["float32", "bfloat16"])),
                      picks=data.draw(st.integers(1, min(3, sum(slots)))), width=data.draw(st.sampled_from([8, 33])))
    dtype = torch.float32 if rows == "int8" else getattr(torch, rows)
    with segment_of(layout) as (_, segment):
        sides = [Side(data.draw(st.sampled_from(implementations())), each) for each in contexts(segment)]
        for layer in range(3):
            tag = tag_of(0, layer)
            counts = [data.draw(st.integers(0, layout.capacity)) for _ in sides]
            x = [tokens(count, 10 * layer + rank, layout.width, dtype) for rank, count in enumerate(counts)]
            slot = [picks(count, layout, 10 * layer + rank) for rank, count in enumerate(counts)]
            for rank, side in enumerate(sides):
                assert side.send(tag, x[rank], slot[rank], rounds=rank + 1) == Status.DONE
            for rank, side in enumerate(sides):
                row, scale, of_pair, expert = side.receive(tag)
                assert list(side.rounds) == list(range(1, len(sides) + 1))
                given_x = row if scale is None else dequantise(row, scale, dtype)
                y = experts(given_x[of_pair], (expert + layout.first_slot[rank]).unsqueeze(-1))
                assert side.send_back(tag, y.squeeze(1).to(getattr(torch, layout.result_format))) == Status.DONE
            for rank, side in enumerate(sides):
                status, out = side.receive_back(tag, counts[rank])
                sent = dequantise(*quantise(x[rank]), dtype) if rows == "int8" else x[rank]
                assert status == Status.DONE
                assert torch.equal(out, experts(sent, slot[rank]).to(out.dtype))
        for side in sides:
            counted = side.context.counted
            assert counted["sleeps"] == counted["wakes"] == counted["waited_ns"] == 0              # nobody had to wait


@pytest.mark.parametrize("kernels", implementations())
def test_a_token_goes_once_to_a_rank_that_holds_several_of_its_experts(kernels):
    layout = geometry((3, 1), picks=3)
    with segment_of(layout) as (_, segment):
        sender, other = (Side(kernels, each) for each in contexts(segment))
        sender.send(FIRST, tokens(2, 1), torch.tensor([[2, 3, 0], [0, 1, 2]]))
        other.send(FIRST, tokens(0, 1), torch.zeros(0, 3, dtype=torch.int64))
        row, _, of_pair, expert = sender.receive(FIRST)
        assert (row.shape[0], of_pair.tolist(), expert.tolist()) == (2, [0, 0, 1, 1, 1], [2, 0, 0, 1, 2])
        row, _, of_pair, expert = other.receive(FIRST)
        assert torch.equal(row, tokens(2, 1)[:1]) and (of_pair.tolist(), expert.tolist()) == ([0], [0])
        assert sender.context.counted["sent_bytes"] == layout.packet_bytes         # of two tokens, one went elsewhere
        other.send_back(FIRST, tokens(1, 3))
        assert other.context.counted["sent_bytes"] == 4 * layout.width


@pytest.mark.parametrize("kernels", implementations())
def test_fresh_memory_is_no_announcement(kernels):
    with segment_of(geometry((2, 2))) as (_, segment):
        assert Side(kernels, contexts(segment)[0]).counts(FIRST, soon(0.02)) == Status.LATE


def test_the_name_of_an_exchange_is_never_that_of_its_neighbours():
    assert len({tag_of(epoch, sequence) for epoch in (0, 1, 65533) for sequence in range(6)} - {0}) == 18
    assert [tag_of(7, sequence) & 1 for sequence in (0, 1, (1 << 24) - 1, 1 << 24)] == [0, 1, 1, 0]


@pytest.mark.parametrize("kernels", implementations())
def test_what_an_old_epoch_writes_late_is_never_taken_for_new(kernels):
    layout = geometry((2, 2))
    with segment_of(layout) as (_, segment):
        reader, late = (Side(kernels, each) for each in contexts(segment))
        reader.context.enter(1, [0, 1])
        reader.send(tag_of(1, 0), tokens(1, 1), picks(1, layout, 1))
        late.send(tag_of(0, 0), tokens(3, 2), picks(3, layout, 2))          # still in epoch 0, into the same half
        assert reader.counts(tag_of(1, 0), soon(0.05)) == Status.LATE
        late.context.enter(1, [0, 1])
        late.send(tag_of(1, 0), tokens(2, 3), torch.tensor([[0, 1], [1, 2]]))
        assert torch.equal(reader.receive(tag_of(1, 0))[0][-2:], tokens(2, 3))


@pytest.mark.parametrize("kernels", implementations())
def test_what_a_masked_rank_writes_lies_where_nobody_looks(kernels):
    layout = geometry((2, 2, 2))
    with segment_of(layout) as (_, segment):
        first, second, masked = (Side(kernels, each) for each in contexts(segment))
        for side in (first, second):
            side.context.enter(1, [0, 1])
            side.send(tag_of(1, 0), tokens(2, side.context.rank), picks(2, layout, 5, ranks=[0, 1]))
        masked.send(tag_of(0, 0), tokens(4, 9), picks(4, layout, 9))
        masked.send(tag_of(0, 1), tokens(4, 9), picks(4, layout, 9))
        rows = first.receive(tag_of(1, 0))[0]
        sent = torch.cat([tokens(2, 0), tokens(2, 1)])
        assert all(any(torch.equal(row, each) for each in sent) for row in rows)


@pytest.mark.parametrize("kernels", implementations())
def test_an_aborted_epoch_ends_its_waits_and_begins_no_sends(kernels):
    layout = geometry((2, 2))
    with segment_of(layout) as (_, segment):
        side, other = (Side(kernels, each) for each in contexts(segment))
        kernels.abort_epoch(other.context, 0)
        assert side.send(FIRST, tokens(1, 1), picks(1, layout, 1)) == Status.ABORTED
        assert side.counts(FIRST) == Status.ABORTED
        side.context.enter(1, [0, 1])
        assert side.send(tag_of(1, 0), tokens(1, 1), picks(1, layout, 1)) == Status.DONE


@pytest.mark.parametrize("kernels", implementations())
@pytest.mark.parametrize("slots", [[[0, 9]], [[-1, 0]], [[0, 4]]])
def test_a_slot_that_is_not_there_or_masked_is_refused(kernels, slots):
    layout = geometry((2, 2, 2))
    with segment_of(layout) as (_, segment):
        side = Side(kernels, contexts(segment)[0])
        side.context.enter(0, [0, 1])
        assert side.send(FIRST, tokens(1, 1), torch.tensor(slots)) == Status.BAD_SLOT


@needs_native
def test_a_signal_interrupts_a_native_wait():
    def ring(*_):
        raise InterruptedError("rung")

    layout = geometry((2, 2))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        with segment_of(layout) as (_, segment):
            side = Side(native.Native(), contexts(segment)[0])
            begun = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(InterruptedError):
                side.counts(FIRST)
            assert time.monotonic() - begun < 10
    finally:
        signal.signal(signal.SIGALRM, before)


@needs_native
def test_wrong_arguments_are_an_error_and_not_a_crash():
    with pytest.raises(TypeError, match="takes 4 integers, not 1"):
        native._native.send_combine(1)
    with pytest.raises(TypeError):
        native._native.quantise(1, 2, 3, 4, 5, "x")
