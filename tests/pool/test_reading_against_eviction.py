"""A slow reader against writers that push the pool over its limit: verified blocks or none, and no put waits for ever.

A reader gets all blocks, or a shorter prefix of whole ones, or nothing; never mixed bytes. Bytes are a
function of the key, so every reader can tell.
"""

import random
import signal
import threading
import time

import pytest

from tests.pool.builders import BLOCK_BYTES, contents, eventually, item, items, key, keys, places
from tests.pool.conftest import ActorProcess
from tripool.pool import sdk
from tripool.pool.sdk import PutStatus

PREFIX = list(range(64))


class SlowCopy:
    """Copies like the real one, but stops before block `pause_at` until it may go on."""

    def __init__(self, monkeypatch, pause_at: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.pause_at, self.num_copied = pause_at, 0
        self.copy = sdk.copy_block
        self.reader = -1
        monkeypatch.setattr(sdk, "copy_block", self)

    def __call__(self, source: memoryview, target: memoryview) -> None:
        if threading.get_ident() == self.reader:
            if self.num_copied == self.pause_at:
                self.reached.set()
                assert self.go_on.wait(60)
            self.num_copied += 1
        self.copy(source, target)


class Reading(threading.Thread):
    """A reader that fetches the prefix in a thread."""

    def __init__(self, client, slow: SlowCopy) -> None:
        super().__init__()
        self.client, self.slow = client, slow
        self.into = places(len(PREFIX))
        self.count = -1
        self.start()
        assert slow.reached.wait(60)

    def run(self) -> None:
        self.slow.reader = threading.get_ident()
        self.count = len(self.client.fetch_prefix(keys(*PREFIX), self.into, timeout_s=60.0))

    def finish(self) -> int:
        self.slow.go_on.set()
        self.join(60)
        assert not self.is_alive()
        return self.count

    @property
    def is_right(self) -> bool:
        return all(bytes(self.into[i]) == contents(i) for i in range(self.count))


def test_writers_over_the_limit_do_not_touch_what_a_slow_reader_reads(pool_server, pool_client, monkeypatch):
    server = pool_server(num_blocks=70)
    writer, client = pool_client(server), pool_client(server)
    writer.put(items(*PREFIX))
    reading = Reading(client, SlowCopy(monkeypatch, pause_at=30))

    for number in range(100, 160):
        assert writer.put(items(number)) == [PutStatus.OK]      # never refused: six blocks can always go

    assert reading.finish() == 64
    assert reading.is_right
    assert server.metrics()["evictions"] >= 54
    assert server.metrics()["lease_lost"] == 0
    eventually(lambda: server.metrics()["leased_blocks"] == 0)
    assert writer.put(items(*range(200, 270))) == [PutStatus.OK] * 70


def test_a_reader_whose_leases_end_under_it_keeps_only_what_it_proved(pool_server, pool_client, monkeypatch):
    """Leases end when they should not, by a client's mistake: all it held is released in the middle of the read."""
    server = pool_server(num_blocks=70)
    writer, client = pool_client(server), pool_client(server)
    writer.put(items(*PREFIX))
    reading = Reading(client, SlowCopy(monkeypatch, pause_at=30))

    link = client._members.links["cache"]
    link.give_back(*link._viewed)
    eventually(lambda: server.metrics()["leased_blocks"] == 0)
    writer.put(items(*range(100, 170)))                         # overwrites every block of the prefix

    assert reading.finish() == 30
    assert reading.is_right
    eventually(lambda: server.metrics()["lease_lost"] == 1)
    assert client.metrics()["lease_lost"] == client.metrics()["fetches_partial"] == 1


def test_a_block_overwritten_between_its_copy_and_its_check_does_not_count(pool_server, pool_client, monkeypatch):
    server = pool_server(num_blocks=1)
    writer, client = pool_client(server), pool_client(server)
    writer.put(items(0))
    copy = sdk.copy_block

    def overwritten_behind(source: memoryview, target: memoryview) -> None:
        copy(source, target)
        monkeypatch.setattr(sdk, "copy_block", copy)
        link = client._members.links["cache"]
        link.give_back(*link._viewed)
        assert writer.put(items(1)) == [PutStatus.OK]

    monkeypatch.setattr(sdk, "copy_block", overwritten_behind)
    assert client.fetch_prefix([key(0)], places(1)) == []
    eventually(lambda: server.metrics()["lease_lost"] == 1)


def test_a_server_killed_during_the_read_loses_nothing_that_was_leased(server_process, pool_client, monkeypatch):
    server = server_process(num_blocks=120)
    client = pool_client(server)
    client.put(items(*PREFIX))
    reading = Reading(client, SlowCopy(monkeypatch, pause_at=30))

    server.kill()
    server.start()                                              # a new life, at the same place, with other blocks
    eventually(lambda: client.stats()["cache"]["up"])
    client.put([(key(number), memoryview(bytes(BLOCK_BYTES)), None) for number in range(100, 120)])

    assert reading.finish() == 64
    assert reading.is_right
    assert client.fetch_prefix(keys(*PREFIX), places(64)) == []


def test_one_of_several_servers_killed_during_the_read_changes_no_byte(server_process, pool_client, monkeypatch):
    servers = [server_process(f"cache-{i}", num_blocks=60) for i in range(2)]
    client = pool_client(*servers)
    client.put(items(*PREFIX))
    reading = Reading(client, SlowCopy(monkeypatch, pause_at=10))
    servers[0].kill()
    assert reading.finish() == 64
    assert reading.is_right
    gone = [client._members.ring.server(key(number)) == "cache-0" for number in PREFIX]
    assert len(client.fetch_prefix(keys(*PREFIX), places(64))) == gone.index(True)


def test_a_read_that_takes_too_long_ends_with_the_blocks_it_has(pool_server, pool_client, monkeypatch):
    server = pool_server(num_blocks=70)
    client = pool_client(server)
    client.put(items(*PREFIX))
    copy, now = sdk.copy_block, [0.0]

    def slow(source: memoryview, target: memoryview) -> None:
        copy(source, target)
        now[0] += 1.0                                           # every copy takes a second of the reader's clock

    clock = time.monotonic
    monkeypatch.setattr(sdk, "copy_block", slow)
    monkeypatch.setattr(sdk.time, "monotonic", lambda: clock() + now[0])
    into = places(64)
    count = len(client.fetch_prefix(keys(*PREFIX), into, timeout_s=40.0))
    monkeypatch.setattr(sdk.time, "monotonic", clock)

    assert 1 <= count <= 40
    assert [bytes(into[i]) for i in range(count)] == [contents(i) for i in range(count)]
    eventually(lambda: server.metrics()["leased_blocks"] == 0)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_readers_and_writers_that_are_killed_and_stopped_never_show_a_wrong_byte(pool_server, pool_client, actor, seed):
    """Chaos with real processes over a small pool, then nothing may be held and everything must fit again."""
    chance = random.Random(seed)
    server = pool_server(num_blocks=12, busy_s=0.02)
    client = pool_client(server)
    actors: list[ActorProcess] = [actor(server) for _ in range(3)]
    ends = time.monotonic() + (3.0 if seed == 1 else 30.0)
    num_read = 0

    while time.monotonic() < ends:
        i = chance.randrange(3)
        first = chance.randrange(10)
        numbers = range(first, first + chance.randrange(1, 6))
        what = chance.choice(["put", "fetch", "lease", "reserve", "close_views", "stop", "kill"])
        if what in ("put", "fetch", "lease"):
            answer = actors[i].do(what, *numbers)
            assert what == "put" or answer >= 0
            assert what != "lease" or not answer or actors[i].do("all_views_are_right")
            num_read += what != "put" and answer
        elif what == "reserve":
            actors[i].do("reserve", first)
        elif what == "close_views":
            actors[i].do("close_views")
        else:
            # In the middle of something: it is not waited for.
            actors[i].tell(chance.choice(["put", "fetch", "lease"]), *numbers)
            time.sleep(chance.random() * 0.003)
            actors[i].signal(signal.SIGSTOP)
            client.put(items(*(chance.randrange(15) for _ in range(4))), timeout_s=5.0)
            if what == "stop":
                actors[i].signal(signal.SIGCONT)
                actors[i].answer()
            elif chance.random() < 0.3:
                actors[i].kill()
                actors[i] = actor(server)
            else:
                actors[i].signal(signal.SIGCONT)
                assert actors[i].answer() != -1
        into = places(len(numbers))
        count = len(client.fetch_prefix(keys(*numbers), into, timeout_s=5.0))
        assert all(bytes(into[n]) == contents(numbers[n]) for n in range(count))
        num_read += count

    for each in actors:
        each.kill()
    assert num_read > 0
    eventually(lambda: server.metrics()["leased_blocks"] == 0 and server.metrics()["reserved_blocks"] == 0)
    figures = server.metrics()
    assert figures["quarantined_bytes"] == figures["lease_lost"] == figures["damaged"] == 0
    server.check()
    assert client.put(items(*range(100, 112))) == [PutStatus.OK] * 12


def test_a_put_of_any_size_succeeds_when_nothing_is_held(pool_server, pool_client):
    client = pool_client(pool_server(num_blocks=12))
    chance = random.Random(4)
    for number in range(300):
        size = chance.choice([100, 5_000, BLOCK_BYTES, 5 * BLOCK_BYTES, 11 * BLOCK_BYTES])
        assert client.put([item(number, size)]) == [PutStatus.OK]
        if chance.random() < 0.5:
            into = [memoryview(bytearray(size))]
            assert len(client.fetch_prefix([key(number)], into)) == 1
            assert bytes(into[0]) == contents(number, size)
