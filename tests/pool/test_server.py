"""The owner's loop: it waits for nobody, believes nobody, and keeps nothing when it ends."""

import gc
import os
import random
import signal
import socket
import threading
import time

import pytest

from tests.pool.builders import (
    BLOCK_BYTES,
    EXTENT_BYTES,
    arena_mappings,
    contents,
    eventually,
    items,
    key,
    keys,
    open_files,
    places,
)
from tripool.pool.sdk import PoolClient, PutStatus
from tripool.pool.server import PoolServer
from tripool.pool.wire import (
    Exists,
    Flush,
    FrameBuffer,
    GetStats,
    Hello,
    Lease,
    Refused,
    Release,
    Reserve,
    Seal,
    frame,
    read_reply,
)


@pytest.fixture
def stranger():
    """A plain socket to a server, with or without the greeting."""
    opened: list[socket.socket] = []

    def connect(server, *, greet: bool = True, writes: bool = False) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(20)
        sock.connect(str(server.path))
        opened.append(sock)
        if greet:
            sock.sendall(frame(Hello(os.urandom(16), writes)))
            _, fds, _, _ = socket.recv_fds(sock, 4096, 4)
            for fd in fds:
                os.close(fd)
        return sock

    yield connect
    for sock in opened:
        sock.close()


def last_words(sock: socket.socket) -> Refused:
    """What the server says before it hangs up; it must hang up."""
    buffer = FrameBuffer()
    while received := sock.recv(4096):
        buffer.feed(received)
    reply = None
    while (body := buffer.next()) is not None:
        reply = read_reply(body)
    assert isinstance(reply, Refused)
    return reply


def fill(sock: socket.socket, message: bytes) -> None:
    """Send a message again and again until the other side takes no more."""
    sock.settimeout(0.3)
    rest = message
    try:
        while True:
            rest = rest[sock.send(rest):] or message
    except TimeoutError:
        pass


# ---------------------------------------------------------------------------------------------- slow clients


def test_a_client_that_never_reads_its_answers_stalls_nobody(pool_server, pool_client, stranger):
    server = pool_server()
    client = pool_client(server)
    client.put(items(1))
    deaf = stranger(server)
    fill(deaf, frame(GetStats(1)) * 1000)                 # small questions with long answers

    for _ in range(20):
        assert client.exists([key(1)]) == [True]
    assert client.metrics().get("unanswered", 0) == 0
    waiting = [len(each.outgoing) + len(each.incoming) for each in server._connections]
    assert max(waiting) < 1 << 20                         # it is not listened to while it does not listen


def test_a_stopped_client_stalls_nobody(pool_server, pool_client, actor):
    server = pool_server()
    client = pool_client(server)
    stopped = actor(server)
    stopped.signal(signal.SIGSTOP)
    assert client.put(items(1, 2)) == [PutStatus.OK] * 2
    stopped.signal(signal.SIGCONT)
    assert stopped.do("fetch", 1, 2) == 2


def test_half_a_frame_is_waited_for_without_keeping_others(pool_server, pool_client, stranger):
    server = pool_server()
    slow = stranger(server)
    question = frame(Exists(7, [key(1)]))
    slow.sendall(question[:9])
    assert pool_client(server).put(items(1)) == [PutStatus.OK]
    slow.sendall(question[9:])
    buffer = FrameBuffer()
    buffer.feed(slow.recv(4096))
    assert read_reply(buffer.next()).found == [True]


# ---------------------------------------------------------------------------------------------- wrong clients


@pytest.mark.parametrize("sent", [
    b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\0", b"\xff\xff\xff\xff", frame(Exists(1, [])), b"\3\0\0\0\x93\1\2",
    frame(Hello(bytes(16), False))[:4] + b"\xc1" * 100,
], ids=["http", "empty", "endless", "no greeting", "no message", "rubbish"])
def test_a_peer_that_does_not_greet_properly_is_told_and_left(pool_server, pool_client, stranger, sent):
    server = pool_server()
    sock = stranger(server, greet=False)
    sock.sendall(sent)
    assert last_words(sock).cause
    assert pool_client(server).put(items(1)) == [PutStatus.OK]


def test_a_hold_number_cannot_be_used_twice(pool_server, stranger, pool_client):
    server = pool_server()
    pool_client(server).put(items(1))
    sock = stranger(server)
    sock.sendall(frame(Lease(1, 10, keys(1), False)) + frame(Lease(2, 10, keys(1), False)))
    assert "hold 10 is in use" in last_words(sock).cause
    # The process lives on (it is ours), so the first lease is quarantined.
    eventually(lambda: server.metrics()["quarantined_bytes"] == BLOCK_BYTES)


def test_a_second_greeting_is_refused(pool_server, stranger):
    sock = stranger(pool_server())
    sock.sendall(frame(Hello(os.urandom(16), True)))
    assert "second Hello" in last_words(sock).cause


def test_too_many_clients_are_turned_away(pool_server, stranger):
    server = pool_server(max_clients=2)
    stranger(server)
    stranger(server)
    assert "2 clients are connected already" in last_words(stranger(server, greet=False)).cause


def test_frames_made_at_random_do_not_end_the_server(pool_server, pool_client, stranger):
    """Messages that are nearly right: a valid one with bytes changed, cut or added, or with odd numbers in it."""
    server = pool_server(num_blocks=4)
    client = pool_client(server)
    client.put(items(1, 2))
    chance = random.Random(20)

    def message() -> bytes:
        number = lambda: chance.choice([0, 1, 2, 4096, 2**31, 2**62, 2**63 - 1])  # noqa: E731
        some_keys = [key(chance.randrange(4)) for _ in range(chance.randrange(4))]
        numbers = [number() for _ in range(chance.randrange(4))]
        valid = frame(chance.choice([
            Hello(os.urandom(16), True), Reserve(number(), number(), some_keys, [number() or 1 for _ in some_keys]),
            Seal(number(), numbers, numbers), Lease(number(), number(), some_keys, True), Exists(number(), some_keys),
            Release(numbers, number(), some_keys), Flush(number()), GetStats(number())]))
        damaged = bytearray(valid)
        for _ in range(chance.choice([0, 0, 1, 3])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        return bytes(damaged[:len(damaged) - chance.choice([0, 0, 0, 3])])

    for _ in range(150):
        sock = stranger(server, greet=chance.random() < 0.9)
        try:
            sock.sendall(b"".join(message() for _ in range(chance.randrange(1, 6))))
            sock.close()
        except OSError:
            pass                                          # it hung up already, as it may

    assert client.flush() >= 0
    server.check()
    eventually(lambda: server.metrics()["clients"] == 1)
    assert client.metrics().get("unanswered", 0) == 0


def test_a_message_that_the_server_itself_fails_on_costs_one_client_only(pool_server, pool_client, monkeypatch, caplog):
    server = pool_server()
    client, victim = pool_client(server), pool_client(server)
    monkeypatch.setattr(server._index, "flush", lambda: 1 // 0)
    assert victim.flush() == 0
    assert "ZeroDivisionError" in caplog.text
    assert client.put(items(1)) == [PutStatus.OK]
    eventually(lambda: victim.exists([key(1)]) == [True])     # it came back by itself


# ---------------------------------------------------------------------------------------------- figures and leaks


def test_figures_say_what_is_there_and_what_happened(pool_server, pool_client):
    server = pool_server(num_blocks=4)
    client = pool_client(server)
    client.put(items(0, 1, 2))
    client.put(items(2, 3, 4))                            # one is there, and one pushes out the longest unused: block 2
    client.fetch_prefix(keys(0, 1, 9), places(3))
    client.exists(keys(0, 8))

    figures = client.stats()["cache"]
    expected = {"up": 1, "blocks": 4, "stored": 5, "duplicates": 1, "evictions": 1, "hits": 2, "misses": 1,
                "partial": 1, "used_bytes": 4 * EXTENT_BYTES, "capacity_bytes": 4 * EXTENT_BYTES,
                "lease_lost": 0, "clients": 1, "quarantined_bytes": 0,
                "stored_bytes": 5 * BLOCK_BYTES, "evicted_bytes": BLOCK_BYTES}
    assert {name: figures[name] for name in expected} == expected
    assert figures["boot_id"] == server.boot_id
    assert set(server.metrics()) <= set(figures)
    assert client.metrics() == {"put_ok": 5, "put_exists": 1, "fetched_blocks": 2, "fetches_partial": 1,
                                "servers": 1, "servers_up": 1}


def test_nothing_is_left_of_servers_and_clients_that_ended(tmp_path):
    gc.collect()
    files, threads, mappings = open_files(), threading.active_count(), arena_mappings()

    def live() -> None:
        servers = [PoolServer(tmp_path / name, 20 * EXTENT_BYTES, name=name) for name in ("cache-0", "cache-1")]
        loops = [threading.Thread(target=server.serve_forever) for server in servers]
        for loop in loops:
            loop.start()
        with PoolClient({server.name: server.path for server in servers}, timeout_s=20) as client:
            client.put(items(*range(8)))
            views = client.lease(keys(*range(8)))
        # The client is closed, its views are not: they are readable still, and their leases hold until they end.
        assert sum(server.metrics()["leased_blocks"] for server in servers) == 8
        for number, view in enumerate(views):
            assert bytes(view.data) == contents(number)
            view.close()
        eventually(lambda: all(server.metrics()["clients"] == 0 for server in servers))
        assert sum(server.metrics()["leased_blocks"] for server in servers) == 0
        for server, loop in zip(servers, loops, strict=True):
            server.check()
            server.stop()
            loop.join()

    live()
    gc.collect()
    assert open_files() == files
    assert threading.active_count() == threads
    assert arena_mappings() == mappings
    assert list(tmp_path.iterdir()) == []


def test_a_server_stops_from_another_thread_while_it_waits(tmp_path):
    server = PoolServer(tmp_path / "cache", EXTENT_BYTES)
    loop = threading.Thread(target=server.serve_forever)
    loop.start()
    time.sleep(0.05)
    server.stop()
    loop.join(10)
    assert not loop.is_alive()
