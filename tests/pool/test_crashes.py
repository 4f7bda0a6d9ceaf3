"""What clients and owners of one host do to each other when they die, stop or go wrong. Clients are real processes."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pool.builders import (
    BLOCK_BYTES,
    EXTENT_BYTES,
    arena_mappings,
    contents,
    eventually,
    item,
    items,
    key,
    keys,
    places,
)
from tests.pool.conftest import ROOT
from tripool.core.errors import ConfigError
from tripool.pool.sdk import PutStatus
from tripool.pool.server import PoolServer

OK = PutStatus.OK


def figure(server, name):
    return server.metrics()[name]


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


# ---------------------------------------------------------------------------------------------- writers


def test_a_put_of_a_killed_writer_leaves_nothing_and_the_key_can_be_put_again(pool_server, pool_client, actor):
    server = pool_server(num_blocks=1)
    client = pool_client(server)
    writer = actor(server)
    assert writer.do("reserve", 1) == "OK"
    writer.do("write", 1)
    assert figure(server, "reserved_blocks") == 1

    writer.kill()

    eventually(lambda: figure(server, "used_bytes") == 0)
    assert client.exists([key(1)]) == [False]
    assert client.put(items(1)) == [OK]
    assert figure(server, "reclaimed") == 1


def test_a_stopped_writer_keeps_its_room_and_seals_when_it_goes_on(pool_server, pool_client, actor):
    server = pool_server(num_blocks=4)
    client = pool_client(server)
    writer = actor(server)
    writer.do("reserve", 1)
    writer.signal(signal.SIGSTOP)

    assert client.put(items(*range(10, 20)))[-1] in (OK, PutStatus.NO_SPACE)
    for number in range(20, 30):
        assert client.put(items(number)) == [OK]                # evicting each other, never the reservation
    assert figure(server, "reserved_blocks") == 1
    writer.signal(signal.SIGCONT)
    writer.do("write", 1)

    assert writer.do("seal", 1) == "OK"
    into = places(1)
    assert len(client.fetch_prefix([key(1)], into)) == 1
    assert bytes(into[0]) == contents(1)


def test_a_stopped_writer_does_not_keep_others_from_its_key(pool_server, pool_client, actor):
    server = pool_server(busy_s=0.05)
    client = pool_client(server)
    writer = actor(server)
    writer.do("reserve", 1)
    writer.signal(signal.SIGSTOP)
    time.sleep(0.06)

    assert client.put(items(1)) == [OK]
    writer.signal(signal.SIGCONT)
    writer.do("write", 1)

    assert writer.do("seal", 1) == "EXISTS"
    assert figure(server, "used_bytes") == EXTENT_BYTES


def test_of_two_writers_of_one_key_the_first_to_seal_wins(pool_server, pool_client, actor):
    server = pool_server(busy_s=0.0)
    first, second = actor(server), actor(server)
    for writer in (first, second):
        assert writer.do("reserve", 1) == "OK"
    second.do("write", 1)
    first.do("write", 1)

    assert (second.do("seal", 1), first.do("seal", 1)) == ("OK", "EXISTS")
    assert first.do("fetch", 1) == 1
    assert figure(server, "blocks") == 1
    assert figure(server, "used_bytes") == EXTENT_BYTES


def test_a_key_that_somebody_has_just_begun_to_write_is_busy(pool_server, pool_client, actor):
    server = pool_server(busy_s=60.0)
    writer = actor(server)
    writer.do("reserve", 1)

    assert pool_client(server).put(items(1, 2)) == [PutStatus.BUSY, OK]


# ---------------------------------------------------------------------------------------------- readers


def test_leases_of_a_killed_reader_end_and_its_blocks_can_go(pool_server, pool_client, actor):
    server = pool_server(num_blocks=4)
    client = pool_client(server)
    client.put(items(0, 1, 2, 3))
    reader = actor(server)
    assert reader.do("lease", 0, 1, 2, 3) == 4
    assert client.put(items(4)) == [PutStatus.NO_SPACE]

    reader.kill()

    eventually(lambda: figure(server, "leased_blocks") == 0)
    assert client.put(items(4, 5, 6, 7)) == [OK] * 4
    assert figure(server, "evictions") == 4


def test_leases_end_with_their_process_though_a_forked_child_keeps_the_socket_open(pool_server, pool_client, actor):
    server = pool_server(num_blocks=4)
    client = pool_client(server)
    client.put(items(0, 1))
    reader = actor(server)
    reader.do("lease", 0, 1)
    reader.do("reserve", 2)
    child = reader.do("fork")
    try:
        reader.kill()
        eventually(lambda: figure(server, "leased_blocks") == 0 and figure(server, "reserved_blocks") == 0)
        assert not ended(child)
        assert figure(server, "clients") == 1                   # ours; the child's are closed
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_has_neither_the_memory_nor_the_connection(pool_server, pool_client, actor):
    server = pool_server()
    pool_client(server).put(items(1))
    reader = actor(server)
    reader.do("lease", 1)
    assert len(arena_mappings(reader.pid)) == 4                 # of its two clients, to read and to write

    assert reader.do("what_a_forked_child_sees", 1) == [False, []]
    assert reader.do("all_views_are_right")                     # the child closed its copies of them
    assert figure(server, "leased_blocks") == 1
    assert reader.do("fetch", 1) == 1


def test_blocks_of_a_reader_without_a_socket_are_not_reused_until_it_comes_back_and_releases(
        pool_server, pool_client, actor):
    server = pool_server(num_blocks=4)
    client = pool_client(server)
    client.put(items(0, 1, 2))
    reader = actor(server)
    reader.do("lease", 0, 1, 2)

    reader.do("drop_socket")
    eventually(lambda: figure(server, "quarantined_bytes") == 3 * BLOCK_BYTES)
    for number in range(10, 20):
        assert client.put(items(number)) == [OK]
    assert reader.do("all_views_are_right")
    reader.do("reconnect")
    assert figure(server, "quarantined_bytes") == 0
    assert figure(server, "leased_blocks") == 3
    reader.do("close_views")

    eventually(lambda: figure(server, "leased_blocks") == 0)


def test_blocks_of_a_stopped_reader_are_not_reused(pool_server, pool_client, actor):
    server = pool_server(num_blocks=3)
    client = pool_client(server)
    client.put(items(0, 1))
    reader = actor(server)
    reader.do("lease", 0, 1)
    reader.signal(signal.SIGSTOP)

    for number in range(10, 20):
        assert client.put(items(number)) == [OK]
    assert client.put(items(20, 21)) == [OK, PutStatus.NO_SPACE]
    reader.signal(signal.SIGCONT)

    assert reader.do("all_views_are_right")


def test_when_everything_is_leased_a_put_is_refused_at_once_and_the_holder_is_named(
        pool_server, pool_client, actor, caplog):
    server = pool_server(num_blocks=2)
    client = pool_client(server)
    client.put(items(0, 1))
    reader = actor(server)
    reader.do("lease", 0, 1)

    assert client.put(items(2)) == [PutStatus.NO_SPACE]

    assert f"pid {reader.pid} holds {2 * BLOCK_BYTES} bytes" in caplog.text
    assert f"pid {reader.pid} holds {2 * BLOCK_BYTES} bytes" in client.stats()["cache"]["holders"]
    assert client.exists(keys(0, 1)) == [True, True]            # nothing was evicted in vain


def test_one_client_cannot_hold_everything(pool_server, pool_client, actor):
    server = pool_server(num_blocks=4, max_held_fraction=0.5)
    client = pool_client(server)
    for number in range(4):
        client.put(items(number))

    assert actor(server).do("lease", 0, 1, 2, 3) == 2
    assert client.put(items(8)) == [OK]
    assert figure(server, "capped") == 2


# ---------------------------------------------------------------------------------------------- owners


def test_views_outlive_their_killed_owner_and_a_new_owner_starts_cold(server_process, pool_client):
    server = server_process()
    client = pool_client(server)
    client.put(items(*range(5)))
    first_boot = client.stats()["cache"]["boot_id"]
    views = client.lease(keys(*range(5)))

    server.kill()

    assert client.fetch_prefix(keys(0, 1), places(2)) == []
    assert client.exists([key(0)]) == [False]
    assert client.put(items(9)) == [PutStatus.LOST]
    assert client.stats() == {"cache": {"up": 0}}
    for number, view in enumerate(views):
        view.verify()
        assert bytes(view.data) == contents(number)

    server.start()
    eventually(lambda: client.stats()["cache"]["up"])
    assert client.stats()["cache"]["boot_id"] != first_boot
    assert client.exists([key(0)]) == [False]
    assert client.put(items(*range(20, 25))) == [OK] * 5
    new_view = client.lease([key(20)])[0]
    for number, view in enumerate(views):
        assert bytes(view.data) == contents(number)             # still the old arena
        view.close()
    assert client.stats()["cache"]["leased_blocks"] == 1        # the old holds mean nothing to the new owner
    assert bytes(new_view.data) == contents(20)
    new_view.close()


def test_calls_on_a_stopped_owner_end_at_their_deadline_and_what_they_took_is_given_back(server_process, pool_client):
    server = server_process()
    client = pool_client(server)
    client.put(items(0, 1, 2))
    server.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert client.fetch_prefix(keys(0, 1, 2), places(3), timeout_s=0.2) == []
        assert client.put(items(5), timeout_s=0.2) == [PutStatus.LOST]
        assert client.exists(keys(0), timeout_s=0.2) == [False]
        assert time.monotonic() - began < 10                    # bounded; the clock of a busy machine is its own
    finally:
        server.signal(signal.SIGCONT)

    eventually(lambda: client.stats()["cache"]["up"])
    eventually(lambda: client.stats()["cache"]["leased_blocks"] == 0)
    assert client.stats()["cache"]["reserved_blocks"] == 0
    into = places(3)
    assert len(client.fetch_prefix(keys(0, 1, 2), into)) == 3
    assert [bytes(place) for place in into] == [contents(0), contents(1), contents(2)]


def test_a_dead_server_among_several_is_a_miss_for_its_keys_only(server_process, pool_client):
    servers = [server_process(f"cache-{i}") for i in range(3)]
    client = pool_client(*servers)
    numbers = list(range(30))
    assert client.put(items(*numbers)) == [OK] * 30

    servers[1].kill()

    found = client.exists(keys(*numbers))
    dead = [client._members.ring.server(key(number)) == "cache-1" for number in numbers]
    assert found == [not each for each in dead]
    into = places(30)
    count = len(client.fetch_prefix(keys(*numbers), into))
    assert count == dead.index(True)
    assert [bytes(into[i]) for i in range(count)] == [contents(i) for i in range(count)]


def test_a_server_ends_cleanly_on_sigterm_and_a_second_life_takes_its_place(server_process):
    server = server_process()
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "/memfd:" in maps and "/dev/shm" not in maps         # nothing with a name, that could be left behind
    server.signal(signal.SIGTERM)

    assert server.process.wait(10) == 0
    assert not server.path.exists()
    server.start()
    server.kill()
    assert server.path.exists()                                 # a killed one leaves it, and the next replaces it
    server.start()


def test_a_path_where_a_server_lives_or_a_file_lies_is_refused(pool_server, tmp_path):
    server = pool_server()
    with pytest.raises(ConfigError, match="is running at"):
        PoolServer(server.path, EXTENT_BYTES)
    assert server.path.exists()
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket"):
        PoolServer(tmp_path / "notes", EXTENT_BYTES)
    with pytest.raises(ConfigError, match="cannot listen at"):
        PoolServer(tmp_path / ("long" * 40), EXTENT_BYTES)


# ---------------------------------------------------------------------------------------------- memory


def test_a_bit_that_flips_in_the_arena_is_found_and_its_block_is_dropped(pool_server, pool_client):
    server = pool_server()
    client = pool_client(server)
    client.put(items(0, 1, 2))
    with client.lease([key(1)])[0] as view:
        offset = view._offset
    server._index._arena.bytes_N[offset + 30_000] ^= 4

    into = places(3)
    assert len(client.fetch_prefix(keys(0, 1, 2), into)) == 1
    assert bytes(into[0]) == contents(0)
    eventually(lambda: figure(server, "damaged") == 1)
    assert client.exists(keys(0, 1, 2)) == [True, False, True]
    assert client.put(items(1)) == [OK]
    assert len(client.fetch_prefix(keys(0, 1, 2), into)) == 3


def test_a_view_of_damaged_bytes_is_a_miss(pool_server, pool_client):
    server = pool_server()
    client = pool_client(server)
    client.put(items(0))
    with client.lease([key(0)])[0] as view:
        offset = view._offset
    server._index._arena.bytes_N[offset + 20] ^= 1              # in the header: the length

    assert client.lease([key(0)]) == [None]
    eventually(lambda: figure(server, "damaged") == 1)


def test_a_machine_too_small_is_told_the_number_of_bytes_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=f"needs {1 << 50} bytes"):
        PoolServer(tmp_path / "cache", 1 << 50)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_cannot_be_reserved_refuses_the_start(tmp_path):
    script = ("import sys; from pathlib import Path; from tripool.pool.server import run_server; "
              "run_server('cache', Path(sys.argv[1]), 64 << 20)")
    limits = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # noqa: E731
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "cache")], cwd=ROOT, preexec_fn=limits,
                          capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode != 0
    assert f"needs {64 << 20} bytes of shared memory" in done.stderr
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------- strangers


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_turned_away(pool_server, pool_client):
    server = pool_server()
    server.path.chmod(0o666)
    server.path.parent.chmod(0o755)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.chdir(server.path.parent)
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(server.path.name)
            received, fds, _, _ = socket.recv_fds(stranger, 4096, 4)
            os.write(writing, received if not fds else b"it got the memory")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert b"user 65534 is not the user of this server" in pipe.read()
    os.wait()
    assert pool_client(server).put([item(1)]) == [OK]
