"""Ranks that cannot work together are refused at the start, with one cause, and nothing is left behind."""

import signal
import threading
import time
from contextlib import closing
from dataclasses import replace

import psutil
import pytest

from tests.checkpoints import tiny_config, write_checkpoint
from tripool.core.deployment import Deployment, InstanceConfig, ModelConfig
from tripool.core.errors import ConfigError
from tripool.core.placement import initial_placement
from tripool.core.request import Limits, Request, Sampling, pack_tokens
from tripool.engine.checkpoint import open_checkpoint
from tripool.serve import ranks
from tripool.serve.models import expert_geometry, resolve
from tripool.serve.offline import Offline


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "model"
    write_checkpoint(folder, tiny_config("v3"))
    return folder


def deployment(folder, **fields):
    return Deployment(model=ModelConfig(path=str(folder)), hybrid=InstanceConfig(count=1, threads=1, **fields))


@pytest.mark.parametrize(("fields", "words"), [
    ({"ranks": 2, "redundant_experts": 9}, "rank 0 has 9 slots .* at most 8"),
    ({"ranks": 2, "shared_expert_copies": 3}, "num_shared_copies is 3, more than the 2 ranks"),
    ({"ranks": 3, "expert_nodes": 2}, "num_nodes is 2, which does not divide 3 ranks"),
    ({"ranks": 4, "expert_nodes": 3}, "num_nodes is 3"),
    ({"ranks": 65, "redundant_experts": 60}, "takes 1 to 64 ranks, not 65"),
    ({"ranks": 2, "exchange_tokens": 1 << 21}, "capacity is 2097152 tokens; it takes 1 to 1048576"),
])
def test_what_cannot_be_laid_out_is_refused_before_anything_is_started(folder, fields, words):
    with pytest.raises(ConfigError, match=f"hybrid: .*{words}"):
        resolve(deployment(folder, **fields))


def test_a_room_too_small_to_decode_is_refused_with_the_value_that_would_do():
    with pytest.raises(ConfigError, match=r"exchange_tokens is 4, .* max_num_seqs 16 .* give at least 16, or 0"):
        InstanceConfig(ranks=2, max_num_seqs=16, exchange_tokens=4)


def test_experts_of_a_routing_group_stay_on_one_node(folder):
    config = InstanceConfig(ranks=4, expert_nodes=2, redundant_experts=4)
    placement = initial_placement(expert_geometry(open_checkpoint(folder).shape, config), 2)
    for layer in placement.layers:
        for rank in range(4):
            groups = {layer[slot] // 2 for slot in placement.slots_of_rank(rank)}      # 8 experts in 4 groups
            assert groups <= {0, 1} if rank < 2 else groups <= {2, 3}


def started(folder, **fields):
    """Try to start an instance; returns the cause of its refusal."""
    before = set(psutil.Process().children())
    with pytest.raises(ConfigError) as refused, closing(Offline(deployment(folder, **fields))):
        pass
    left = [child for child in psutil.Process().children() if child not in before and child.is_running()
            and child.status() != psutil.STATUS_ZOMBIE]
    assert left == []
    return str(refused.value)


def test_too_little_shared_memory_is_said_with_what_is_needed(folder, monkeypatch):
    asked = iter([1 << 40, 1000])
    monkeypatch.setattr(ranks, "available_memory_bytes", lambda: next(asked))
    assert "the exchange needs " in started(folder, ranks=2)


def answering(monkeypatch, **changes):
    """Ranks that say something else of themselves than they should."""
    answer = ranks.RankProcess.answer

    def changed(self, kind):
        found = answer(self, kind)
        return replace(found, **changes) if isinstance(found, ranks.RankReady) else found

    monkeypatch.setattr(ranks.RankProcess, "answer", changed)


def test_a_rank_that_has_read_other_weights_is_refused(folder, monkeypatch):
    answering(monkeypatch, common="abc")
    assert "rank 1 has read other weights than rank 0" in started(folder, ranks=2)


def test_a_rank_of_another_version_is_refused(folder, monkeypatch):
    answering(monkeypatch, version="0.0.1")
    assert "rank 1 runs tripool 0.0.1" in started(folder, ranks=2)


def test_a_rank_that_ends_while_it_loads_ends_the_start(folder, monkeypatch):
    start = ranks.Ranks._start

    def start_and_kill(self, rank):
        other = start(self, rank)
        other.process.kill()
        return other

    monkeypatch.setattr(ranks.Ranks, "_start", start_and_kill)
    assert "rank 1 is gone before it was ready" in started(folder, ranks=2)


def test_a_rank_that_misses_the_deadline_is_given_up_though_nothing_looks_wrong_with_its_process(folder, monkeypatch):
    class Blind:
        def __init__(self, is_expected, lost):
            pass

        def add(self, rank, pid):
            pass

    monkeypatch.setattr(ranks, "RankWatch", Blind)
    asked = replace(deployment(folder, ranks=3, redundant_experts=8), run_deadline_s=4.0)
    request = Request(1, pack_tokens([5, 6, 7]), Sampling(temperature=0.0), Limits(8))
    with closing(Offline(asked)) as offline:
        stopped = offline.ranks.others[1].process
        stopped.send_signal(signal.SIGSTOP)
        tokens = []
        offline.generate([request], lambda output: tokens.append(output.tokens))
        assert len(b"".join(tokens)) == 4 * 8
        assert stopped.returncode == -signal.SIGKILL
        assert offline.scheduler.stats.lost_ranks == 1


def until(condition):
    """Wait for what another thread or process does; a test that waits in vain fails by its own timeout."""
    while not condition():
        time.sleep(0.01)


def starters():
    return [thread for thread in threading.enumerate() if thread.name == "ranks-start"]


def test_ranks_that_load_when_their_instance_closes_are_ended_with_it(folder, monkeypatch):
    loading = []
    start = ranks.Ranks._start

    def start_stopped(self, rank):
        other = start(self, rank)
        if hasattr(self, "facts"):                      # a new process for a rank that was lost
            other.process.send_signal(signal.SIGSTOP)
            loading.append(other.process)
        return other

    monkeypatch.setattr(ranks.Ranks, "_start", start_stopped)
    monkeypatch.setattr(ranks, "PATIENCE", 1 << 30)
    with closing(Offline(deployment(folder, ranks=2))) as offline:
        offline.ranks._lose(1, "a test says so")
        until(lambda: loading)
    assert loading[0].returncode == -signal.SIGKILL
    until(lambda: not starters())


def test_an_instance_that_has_closed_starts_no_ranks(folder, monkeypatch):
    uncaught = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    with closing(Offline(deployment(folder, ranks=2))) as offline:
        before = set(psutil.Process().children())
    offline.ranks._to_start.put(1)                      # it was lost just before
    until(lambda: not starters())
    assert uncaught == [] and set(psutil.Process().children()) <= before


def test_a_rank_returns_though_no_process_could_be_started_at_first(folder, monkeypatch):
    start, tried = ranks.Ranks._start, []

    def start_the_second_time(self, rank):
        tried.append(rank)
        if len(tried) == 2:                             # the first was at the start of the instance
            raise BlockingIOError("no memory for a process")
        return start(self, rank)

    monkeypatch.setattr(ranks.Ranks, "_start", start_the_second_time)
    with closing(Offline(deployment(folder, ranks=2))) as offline:
        offline.ranks._lose(1, "a test says so")
        until(lambda: not offline.ranks._lost)
        assert tried == [1, 1, 1]


def test_the_memory_of_every_rank_is_known(folder):
    with closing(Offline(deployment(folder, ranks=2))) as offline:
        found = offline.ranks.memory
        assert list(found) == [0, 1]
        for rank, counts in found.items():
            assert 0 < counts["weight_bytes"] < counts["resident_bytes"], rank
            assert counts["cache_bytes"] == offline.ranks.arenas[rank].payload.nbytes
            assert counts["shared_bytes"] <= counts["resident_bytes"] and counts["large_page_bytes"] >= 0
        offline.ranks.others[1].end()
        assert "resident_bytes" not in offline.ranks.memory[1]           # its process is gone
