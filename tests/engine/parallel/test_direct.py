"""Ranks that are processes, exchanging over shared memory, give what one process gives, and never wait forever."""

import json
import os
import random
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import tiny_config
from tests.engine.parallel import direct_ranks as ranks
from tests.engine.parallel.builders import (
    PLENTY,
    alone,
    contexts,
    experts,
    finish,
    geometry,
    picks,
    process_server,
    segment_of,
    start,
    tokens,
)
from tripool.core.deployment import InstanceConfig
from tripool.core.errors import ConfigError, LostRanksError
from tripool.core.placement import even_geometry, initial_placement
from tripool.core.shape import model_shape
from tripool.engine.model.layout import moe_layers
from tripool.engine.parallel import native
from tripool.engine.parallel.definition import Definition
from tripool.engine.parallel.direct import DirectExchange
from tripool.engine.parallel.segment import (
    WORDS,
    Geometry,
    Segment,
    buffer_bytes,
    create_segment,
    exchange_geometry,
    packet_size,
)

LEVELS = [pytest.param(native.BEST, id="native", marks=pytest.mark.skipif(not native.is_built(), reason="not built")),
          pytest.param(-1, id="definition")]


@pytest.fixture
def memory():
    """Segments for ranks that are other processes: where they find them."""
    made = []

    def make(layout: Geometry) -> str:
        made.append(create_segment(layout, PLENTY))
        return f"/proc/{os.getpid()}/fd/{made[-1]}"

    yield make
    for fd in made:
        os.close(fd)


def notes(folder, num_ranks):
    return [json.loads((folder / f"note{rank}.json").read_text()) for rank in range(num_ranks)]


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------- the same results


@pytest.mark.parametrize(("num_ranks", "level"), [
    pytest.param(2, native.BEST, id="2"), pytest.param(4, native.BEST, id="4"), pytest.param(8, native.BEST, id="8"),
    pytest.param(2, -1, id="2-definition")])
def test_every_mix_of_tokens_gives_the_bits_of_one_process(memory, tmp_path, num_ranks, level):
    """0, 1, C - 1, C, C + 1, 3 C tokens; all to one rank; uneven slots; rows as they are and quantised (C17, C18)."""
    places = [memory(ranks.layout_of(num_ranks, mode)) for mode in ranks.MODES]
    assert finish(start(ranks.all_mixes, num_ranks, tmp_path, places, level)) == [0] * num_ranks
    for rank in range(num_ranks):
        found = load_file(tmp_path / f"rank{rank}.safetensors")
        for mode in ranks.MODES:
            layout = ranks.layout_of(num_ranks, mode)
            for layer, counts in enumerate(ranks.mixes(num_ranks)):
                expected = alone(*ranks.layer_input(mode, layout, layer, rank, counts[rank]), layout)
                assert torch.equal(found[f"{mode[0]}.{layer}"], expected), (rank, mode, counts)
            for pair in range(4):
                for half in (0, 1):
                    count = (0, 3, 2 * layout.capacity + 1)[(pair + rank + half) % 3]
                    expected = alone(*ranks.layer_input(mode, layout, pair, rank, count), layout)
                    assert torch.equal(found[f"{mode[0]}.half.{pair}.{half}"], expected), (rank, mode, pair, half)
            for half in (0, 1):
                expected = torch.cat([alone(*ranks.half_input(mode, layout, layer, rank, half), layout)
                                      for layer in range(ranks.TURNS)])
                assert torch.equal(found[f"{mode[0]}.turn.{half}"], expected), (rank, mode, half)


def test_the_collective_exchange_gives_the_same_with_uneven_slots(tmp_path):
    assert finish(start(ranks.collective_mixes, 4, tmp_path)) == [0] * 4
    layout = ranks.layout_of(4, ranks.MODES[0])
    for rank in range(4):
        found = load_file(tmp_path / f"collective{rank}.safetensors")
        for layer, counts in enumerate(ranks.mixes(4)[:12]):
            x, slot = ranks.layer_input(ranks.MODES[0], layout, layer, rank, counts[rank])
            assert torch.equal(found[f"float32.{layer}"], alone(x, slot, layout))


def test_ranks_without_tokens_take_every_step(memory, tmp_path):
    layout = geometry((1, 1, 1, 1))
    processes = start(ranks.idle_then_busy, 4, tmp_path, memory(layout), layout, 500)
    assert finish(processes) == [0] * 4
    assert notes(tmp_path, 4) == [{"right": True, "layers": 500}] * 4


@pytest.mark.skipif(not native.is_built(), reason="futexes are the native module's; `test_native` asks for it where it "
                                                   "can be built")
def test_a_rank_that_sleeps_is_woken_and_those_on_time_make_no_system_call(memory, tmp_path):
    layout = geometry((2, 2))
    assert finish(start(ranks.late_sender, 2, tmp_path, memory(layout), layout)) == [0, 0]
    first, second = notes(tmp_path, 2)
    assert first["right"] and second["right"]
    assert first["sleeps"] >= 1 and second["wakes"] >= 1
    assert first["waited_ns"] > 2e8
    # The other half of the sentence: `test_native` counts none in exchanges that find everything there.


# --------------------------------------------------------------------------------------------------- ranks that fail


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_killed_rank_is_named_and_the_others_go_on_in_a_new_epoch(memory, tmp_path, phase):
    layout = geometry((2, 2, 2))
    codes = finish(start(ranks.dies, 3, tmp_path, memory(layout), layout, phase))
    assert codes == [0, 0, -signal.SIGKILL]
    found = notes(tmp_path, 2)
    assert [each["right"] for each in found] == [True, True]
    assert all(each["waited_s"] < 10 for each in found)
    lost = [each for each in found if each["kind"] == "LostRanksError"]
    assert lost and {each["kind"] for each in found} <= {"LostRanksError", "AbortedError"}
    for each in lost:
        assert each["ranks"] == [2] and each["phase"] == phase
        assert f"rank(s) 2 did not take part in {phase} within 2 s" in each["message"]


def test_a_stopped_rank_is_masked_and_taken_back_when_it_runs_again(memory, tmp_path):
    layout = geometry((2, 2, 2))
    processes = start(ranks.stops_and_comes_back, 3, tmp_path, memory(layout), layout)
    until(lambda: all((tmp_path / f"without{rank}").exists() for rank in (0, 1)))
    os.kill(int((tmp_path / "stopping").read_text()), signal.SIGCONT)
    assert finish(processes) == [0, 0, 0]
    first, second, stopped = notes(tmp_path, 3)
    assert [each["right"] for each in (first, second, stopped)] == [True] * 3
    assert "LostRanksError" in (first["error"], second["error"])
    assert stopped["error"] == "AbortedError"


class Crew:
    """Ranks that obey, each with a pipe."""

    def __init__(self, num_ranks, place, layout):
        self.num_ranks, self.place, self.layout = num_ranks, place, layout
        self.server = process_server()
        self.processes, self.pipes = [None] * num_ranks, [None] * num_ranks
        for rank in range(num_ranks):
            self.hire(rank)

    def hire(self, rank):
        self.pipes[rank], theirs = self.server.Pipe()
        self.processes[rank] = self.server.Process(target=ranks.obeys,
                                                   args=(rank, self.num_ranks, self.place, self.layout, theirs))
        self.processes[rank].start()
        theirs.close()

    def order(self, live, epoch, num_layers, timeout_s=30.0):
        for rank in live:
            self.pipes[rank].send((epoch, live, num_layers, timeout_s))

    def answer(self, rank):
        assert self.pipes[rank].poll(40), f"rank {rank} hangs"
        return self.pipes[rank].recv()

    def dismiss(self):
        for process in self.processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("num_faults", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_whenever_a_rank_is_killed_or_stopped_nobody_hangs_and_no_result_is_wrong(memory, num_faults):
    layout = geometry((2, 1, 2, 1))
    crew, draw, epoch, everyone = Crew(4, memory(layout), layout), random.Random(num_faults), 1, [0, 1, 2, 3]
    try:
        crew.order(everyone, epoch, 1)                              # all have started
        assert [crew.answer(rank) for rank in everyone] == [(True, "")] * 4
        for fault in range(num_faults):
            victim, how = draw.randrange(4), draw.choice((signal.SIGKILL, signal.SIGSTOP))
            survivors = [rank for rank in everyone if rank != victim]
            crew.order(everyone, epoch + 1, 1_000_000, timeout_s=1.0)
            time.sleep(0.05 + 0.3 * draw.random())
            os.kill(crew.processes[victim].pid, how)
            said = [crew.answer(rank) for rank in survivors]
            assert all(right and error for right, error in said), (fault, said)

            crew.order(survivors, epoch + 2, 20)
            assert [crew.answer(rank) for rank in survivors] == [(True, "")] * 3, fault

            if how == signal.SIGSTOP:
                os.kill(crew.processes[victim].pid, signal.SIGCONT)
                assert crew.answer(victim) == (True, "AbortedError"), fault
            else:
                crew.processes[victim].join()
                crew.hire(victim)
            crew.order(everyone, epoch + 3, 20)
            assert [crew.answer(rank) for rank in everyone] == [(True, "")] * 4, fault
            epoch += 3
    finally:
        crew.dismiss()


@pytest.mark.parametrize("kernels", [pytest.param(kind, id=kind) for kind in ("best", "definition")])
def test_an_abort_from_outside_ends_all_waits_at_once(memory, tmp_path, kernels):
    layout = geometry((2, 2, 2))
    place = memory(layout)
    processes = start(ranks.waits_long, 2, tmp_path, place, layout)         # rank 2 does not exist
    until(lambda: all((tmp_path / f"waiting{rank}").exists() for rank in (0, 1)))
    time.sleep(0.3)
    watcher = ranks.opened(place, layout, 2, kernels=Definition() if kernels == "definition" else None)
    aborted_at = time.monotonic()
    watcher.abort()
    assert finish(processes) == [0, 0]
    for each in notes(tmp_path, 2):
        assert each["found"] == "aborted"
        assert each["ended"] - aborted_at < 5


@pytest.mark.parametrize("level", LEVELS)
def test_an_absent_rank_is_an_error_at_the_deadline(level):
    layout = geometry((2, 2, 2))
    with segment_of(layout) as (_, segment):
        exchange = DirectExchange(segment, 0, timeout_s=0.1, kernels=native.kernels(level))
        with pytest.raises(LostRanksError) as caught:
            exchange.dispatch(tokens(1, 1), picks(1, layout, 1))
        assert caught.value.ranks == (1, 2) and caught.value.phase == "dispatch"
        exchange.abort()
        with pytest.raises(LostRanksError) as caught:
            exchange.reset(1, [0, 2])
        assert caught.value.ranks == (2,) and caught.value.phase == "the reset"


@pytest.mark.parametrize("level", LEVELS)
def test_a_rank_alone_in_its_epoch_works(level):
    layout = geometry((4, 2))
    with segment_of(layout) as (_, segment):
        exchange = DirectExchange(segment, 0, timeout_s=5, kernels=native.kernels(level))
        exchange.reset(1, [0])
        x, slot = tokens(9, 1), picks(9, layout, 1, ranks=[0])
        assert torch.equal(ranks.exchanged(exchange, 0, layout, x, slot), experts(x, slot))


def test_a_third_exchange_in_flight_is_our_mistake():
    layout = geometry((4,))
    with segment_of(layout) as (_, segment):
        exchange = DirectExchange(segment, 0)
        for _ in range(2):
            exchange.dispatch(tokens(1, 1), picks(1, layout, 1))
        with pytest.raises(AssertionError, match="in flight"):
            exchange.dispatch(tokens(1, 1), picks(1, layout, 1))


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_two_exchanges_that_are_under_way_at_a_time_have_no_room_for_rounds(phase):
    """Another round would be written over what a slow rank has not read yet; all ranks refuse it alike."""
    layout = geometry((4,))
    with segment_of(layout) as (_, segment):
        exchange = DirectExchange(segment, 0)
        large, small = ((tokens(count, count), picks(count, layout, count)) for count in (layout.capacity + 1, 1))
        if phase == "dispatch":
            sent = [exchange.begin_dispatch(*each) for each in (small, large)]
            exchange.finish_dispatch(sent[0])
            with pytest.raises(AssertionError, match="more than 4 tokens; two exchanges at a time have no room"):
                exchange.finish_dispatch(sent[1])
        else:
            flying = [exchange.dispatch(*each) for each in (large, small)]
            sent = [exchange.begin_combine(handle, arrived.x_ND.unsqueeze(1)) for arrived, handle in flying]
            with pytest.raises(AssertionError, match="no room for rounds"):
                exchange.finish_combine(sent[0])


def test_an_exchange_that_begins_when_the_other_has_arrived_may_go_in_rounds():
    layout = geometry((4,))
    with segment_of(layout) as (_, segment):
        exchange = DirectExchange(segment, 0)
        inputs = [(tokens(count, count), picks(count, layout, count)) for count in (3 * layout.capacity, 9)]
        flying = [exchange.dispatch(*each) for each in inputs]
        for (x, slot), (arrived, handle) in zip(inputs, flying, strict=True):
            assert torch.equal(exchange.combine(handle, experts(arrived.x_ND, arrived.expert_NK)), experts(x, slot))


# ------------------------------------------------------------------------------------------------ memory and geometry


def test_buffers_have_the_size_of_the_papers_formula():
    """4.2.1: 320 ranks, 96 tokens, one expert per die: 225 MB and 420 MB, 645 MB together (binary)."""
    assert packet_size(7168, "int8", 8) == 7680
    dispatch, combine = buffer_bytes(320, 96, 8, 1, packet_size(7168, "int8", 8), 2 * 7168)
    assert (dispatch, combine) == (225 << 20, 420 << 20)
    assert dispatch + combine == 645 << 20


def test_the_segment_holds_two_buffers_of_every_rank():
    layout = geometry((3, 1), capacity=128, picks=4, width=7168, rows="int8", results="bfloat16")
    needed = 2 * layout.num_ranks * sum(layout.receive_bytes)
    assert needed <= layout.total_bytes < needed + (64 << 10)


def test_room_set_for_fewer_tokens_than_a_rank_decodes_is_refused():
    """A prefill's larger steps go in rounds, so only decode steps count."""
    shape = model_shape(tiny_config("v3"))
    placement = initial_placement(even_geometry(2, shape.num_routed_experts), len(moe_layers(shape)))

    def capacity(**settings):
        return exchange_geometry(shape, InstanceConfig(ranks=2, **settings), placement, "float32").capacity

    with pytest.raises(ConfigError, match=r"exchange_tokens is 16, .* max_num_seqs 32 .* give at least 32"):
        capacity(max_num_seqs=32, exchange_tokens=16)
    assert capacity(max_num_seqs=32, exchange_tokens=32) == 32
    assert capacity(max_num_seqs=300, max_num_batched_tokens=1000) == 300


def test_too_little_memory_is_said_at_the_start():
    layout = geometry((2, 2), capacity=1024, width=7168)
    with pytest.raises(ConfigError, match=f"needs {layout.total_bytes} bytes .* has 1000 free; lower the exchange's"):
        create_segment(layout, 1000)


@pytest.mark.parametrize("other", [dict(slots=(1, 3)), dict(picks=1), dict(rows="bfloat16"), dict(capacity=5)])
def test_ranks_that_do_not_agree_are_refused(other):
    with segment_of(geometry((3, 1))) as (fd, _), pytest.raises(ConfigError, match="the ranks do not agree"):
        Segment(fd, geometry(**{"slots": (3, 1), **other}))


@pytest.mark.parametrize("wrong", [dict(slots_of_rank=(0, 0)), dict(slots_of_rank=(1,) * 65), dict(capacity=0),
                                   dict(row_format="fp8"), dict(result_format="int8")])
def test_impossible_geometry_is_refused(wrong):
    with pytest.raises(ConfigError):
        Geometry(**{"slots_of_rank": (1, 1), "capacity": 4, "num_picks": 2, "width": 8, **wrong})


def test_a_context_holds_every_word_of_its_geometry():
    layout = geometry((3, 1))
    with segment_of(layout) as (_, segment):
        context = contexts(segment)[1]
        words = dict(zip(WORDS, context.words.tolist(), strict=True))
        assert {name: words[name] for name in layout.layout if name != "total"} == {
            name: value for name, value in layout.layout.items() if name != "total"}
        assert words["live"] == 3 and words["rank"] == 1
