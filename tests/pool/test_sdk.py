"""The pool as an instance uses it: puts, prefixes, views, over one server and several."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pool.builders import BLOCK_BYTES, contents, eventually, item, items, key, keys, places
from tripool.core.errors import StaleBlockError
from tripool.pool.arena import checksum_of
from tripool.pool.link import Link
from tripool.pool.sdk import PoolClient, PutStatus

OK, EXISTS = PutStatus.OK, PutStatus.EXISTS


def leased_blocks(server) -> int:
    return server.metrics()["leased_blocks"]


@pytest.mark.parametrize("num_servers", [1, 3])
def test_what_was_put_is_fetched(pool_server, pool_client, num_servers):
    client = pool_client(*(pool_server(f"cache-{i}") for i in range(num_servers)))
    assert client.put(items(*range(12))) == [OK] * 12
    into = places(12)

    checksums = client.fetch_prefix(keys(*range(12)), into)

    assert [bytes(place) for place in into] == [contents(number) for number in range(12)]
    assert checksums == [checksum_of(memoryview(contents(number))) for number in range(12)]


def test_a_prefix_ends_at_the_first_miss(pool_server, pool_client):
    client = pool_client(*(pool_server(f"cache-{i}") for i in range(3)))
    client.put(items(0, 1, 2, 4, 5))
    into = places(6)
    assert len(client.fetch_prefix(keys(0, 1, 2, 3, 4, 5), into)) == 3
    assert bytes(into[3]) == bytes(BLOCK_BYTES)
    assert client.fetch_prefix(keys(3, 4), places(2)) == []
    assert client.fetch_prefix([], []) == []


def test_another_process_reads_what_one_process_put(pool_server, actor):
    server = pool_server()
    writer, reader = actor(server), actor(server)
    assert writer.do("put", 0, 1, 2) == ["OK"] * 3
    writer.kill()
    assert reader.do("fetch", 0, 1, 2, 3) == 3


def test_the_first_bytes_of_a_key_stay(pool_server, pool_client):
    client = pool_client(pool_server())
    client.put(items(1))
    assert client.put([(key(1), memoryview(b"other bytes"), None)]) == [EXISTS]
    into = places(1)
    client.fetch_prefix([key(1)], into)
    assert bytes(into[0]) == contents(1)


def test_a_checksum_that_the_caller_knows_is_taken_and_a_wrong_one_is_found_at_the_read(pool_server, pool_client):
    client = pool_client(pool_server())
    data = memoryview(contents(1))
    client.put([(key(1), data, checksum_of(data)), (key(2), data, checksum_of(data) ^ 1)])
    assert client.fetch_prefix(keys(1, 2), places(2)) == [checksum_of(data)]


def test_blocks_of_several_sizes_live_together(pool_server, pool_client):
    client = pool_client(pool_server())
    sizes = [1, 100, 4032, 4033, BLOCK_BYTES, 3 * BLOCK_BYTES]
    assert client.put([item(n, size) for n, size in enumerate(sizes)]) == [OK] * 6
    into = [memoryview(bytearray(size)) for size in sizes]
    assert len(client.fetch_prefix(keys(*range(6)), into)) == 6
    assert [bytes(place) for place in into] == [contents(n, size) for n, size in enumerate(sizes)]


def test_a_block_of_another_size_than_its_place_is_a_miss(pool_server, pool_client):
    client = pool_client(pool_server())
    client.put([item(0), item(1, 100)])
    assert len(client.fetch_prefix(keys(0, 1), places(2))) == 1
    assert client.metrics()["wrong_size"] == 1


def test_tensors_of_any_type_are_bytes_here(pool_server, pool_client):
    client = pool_client(pool_server())
    source = np.arange(1000, dtype=np.float32)
    client.put([(key(1), memoryview(source), None)])
    target = np.zeros((10, 100), dtype=np.float32)
    assert len(client.fetch_prefix([key(1)], [memoryview(target)])) == 1
    assert (target.ravel() == source).all()


def test_when_room_is_needed_a_chain_loses_its_end_first(pool_server, pool_client):
    client = pool_client(pool_server(num_blocks=8))
    client.put(items(*range(8)))
    client.put(items("new", "newer"))
    assert client.exists(keys(*range(8))) == [True] * 6 + [False] * 2
    client.fetch_prefix(keys(*range(6)), places(6))
    client.put(items("third", "fourth", "fifth"))
    assert client.exists(keys(*range(6))) == [True] * 5 + [False]
    assert client.exists(keys("new", "newer", "third", "fourth", "fifth")) == [False, False, True, True, True]


# ---------------------------------------------------------------------------------------------- views


def test_a_view_shows_the_block_where_it_lies_and_cannot_change_it(pool_server, pool_client):
    server = pool_server()
    client = pool_client(server)
    client.put(items(1))
    with client.lease([key(1)])[0] as view:
        assert bytes(view.data) == contents(1)
        assert view.data.readonly
        assert view.checksum == checksum_of(view.data)
        assert leased_blocks(server) == 1
        view.verify()
    eventually(lambda: leased_blocks(server) == 0)


def test_a_lease_tells_hits_from_misses(pool_server, pool_client):
    client = pool_client(*(pool_server(f"cache-{i}") for i in range(2)))
    client.put(items(0, 2))
    views = client.lease(keys(0, 1, 2, 3))
    assert [view is not None for view in views] == [True, False, True, False]
    assert bytes(views[2].data) == contents(2)


def test_a_lease_lasts_while_anything_made_of_its_bytes_does(pool_server, pool_client):
    server = pool_server()
    client = pool_client(server)
    client.put(items(1, 2, 3))
    views = client.lease(keys(1, 2, 3))
    part, array = views[0].data[10:20], np.frombuffer(views[1].data, np.uint8)
    for view in views:
        view.close()
        view.close()
    eventually(lambda: leased_blocks(server) == 2)
    assert bytes(part) == contents(1)[10:20] and bytes(array) == contents(2)
    del part
    eventually(lambda: leased_blocks(server) == 1)
    del array
    eventually(lambda: leased_blocks(server) == 0)


def test_a_forgotten_view_gives_its_lease_back(pool_server, pool_client):
    server = pool_server()
    client = pool_client(server)
    client.put(items(1))
    views = client.lease([key(1)])
    assert leased_blocks(server) == 1
    del views
    gc.collect()
    eventually(lambda: leased_blocks(server) == 0)


def test_views_are_sampled_as_asked(pool_server, pool_client):
    server = pool_server()
    client = pool_client(server, verify_every=3)
    client.put(items(*range(6)))
    views = client.lease(keys(*range(6)))
    for view in views:
        server._index._arena.bytes_N[view._offset + 1000] ^= 1
        view.close()
    again = client.lease(keys(*range(6)))
    assert [view is None for view in again] == [False, False, True, False, False, True]
    with pytest.raises(StaleBlockError):
        again[0].verify()


def test_asking_whether_blocks_exist_takes_no_lease(pool_server, pool_client):
    server = pool_server()
    client = pool_client(server)
    client.put(items(1))
    assert client.exists(keys(1, 2)) == [True, False]
    assert leased_blocks(server) == 0
    assert server.metrics()["hits"] == server.metrics()["misses"] == 0


# ---------------------------------------------------------------------------------------------- servers


def test_flush_forgets_the_blocks_of_all_servers(pool_server, pool_client):
    client = pool_client(*(pool_server(f"cache-{i}") for i in range(3)))
    client.put(items(*range(20)))
    assert client.flush() == 20
    assert client.fetch_prefix(keys(*range(20)), places(20)) == []
    assert client.put(items(*range(20))) == [OK] * 20


def test_a_client_of_nobody_misses_everything(pool_client, tmp_path):
    for client in (pool_client(), PoolClient({"cache": tmp_path / "absent"}, timeout_s=1.0)):
        with client:
            assert client.put(items(1)) == [PutStatus.LOST]
            assert client.fetch_prefix(keys(1), places(1)) == []
            assert client.lease(keys(1)) == [None]
            assert client.exists(keys(1)) == [False]
            assert client.flush() == 0


def test_a_server_that_comes_late_is_found(server_process, pool_client, tmp_path):
    with PoolClient({"cache": tmp_path / "cache"}, timeout_s=20.0) as client:
        assert client.put(items(1)) == [PutStatus.LOST]
        server_process()
        eventually(lambda: client.put(items(1)) == [OK])


def test_servers_come_and_go(pool_server, pool_client):
    servers = [pool_server(f"cache-{i}", num_blocks=60) for i in range(3)]
    client = pool_client(*servers[:2])
    client.put(items(*range(50)))

    client.set_servers({server.name: server.path for server in servers})
    eventually(lambda: client.metrics()["servers_up"] == 3)
    moved = client.exists(keys(*range(50))).count(False)
    assert 0 < moved < 35                                 # about a third
    assert moved == sum(client._members.ring.server(key(number)) == "cache-2" for number in range(50))

    client.set_servers({server.name: server.path for server in servers[:2]})
    assert client.exists(keys(*range(50))) == [True] * 50
    eventually(lambda: servers[2].metrics()["clients"] == 0)


def test_a_client_that_only_reads_cannot_put(pool_server, pool_client):
    server = pool_server()
    pool_client(server).put(items(1))
    reader = pool_client(server, writes=False)
    assert len(reader.fetch_prefix([key(1)], places(1))) == 1
    assert reader.put(items(2)) == [PutStatus.LOST]
    eventually(lambda: server.metrics()["reserved_blocks"] == 0)


def test_data_that_cannot_be_copied_leaves_no_half_put(pool_server, pool_client):
    server = pool_server()
    client = pool_client(server)
    with pytest.raises(BufferError, match="contiguous"):
        client.put([item(1), (key(2), memoryview(contents(2))[::2], None)])
    eventually(lambda: server.metrics()["reserved_blocks"] == 0)
    assert client.put(items(1, 2)) == [OK, OK]


def test_batches_longer_than_a_message_are_cut(pool_server, pool_client, monkeypatch):
    monkeypatch.setattr("tripool.pool.sdk.MAX_KEYS", 5)
    client = pool_client(*(pool_server(f"cache-{i}") for i in range(2)))
    assert client.put(items(*range(13))) == [OK] * 13
    into = places(13)
    assert len(client.fetch_prefix(keys(*range(13)), into)) == 13
    assert [bytes(place) for place in into] == [contents(number) for number in range(13)]
    assert client.exists(keys(*range(14))) == [True] * 13 + [False]
    assert [view is not None for view in client.lease(keys(*range(14)))] == [True] * 13 + [False]


def test_a_deadline_that_has_passed_asks_nobody_and_drops_no_connection(pool_server, pool_client):
    client = pool_client(pool_server())
    client.put(items(1))
    assert client.exists([key(1)], timeout_s=0.0) == [False]
    assert client.fetch_prefix([key(1)], places(1), timeout_s=-1.0) == []
    assert client.metrics()["servers_up"] == 1
    assert client.exists([key(1)]) == [True]


def test_many_threads_share_a_client(pool_server, pool_client):
    servers = [pool_server(f"cache-{i}", num_blocks=6) for i in range(3)]
    client = pool_client(*servers)

    def work(seed: int) -> int:
        chance, wrong = np.random.default_rng(seed), 0
        for _ in range(25):
            first = int(chance.integers(0, 20))
            numbers = range(first, first + 5)
            client.put(items(*numbers))
            into = places(5)
            count = len(client.fetch_prefix(keys(*numbers), into))
            wrong += sum(bytes(into[i]) != contents(first + i) for i in range(count))
            for number, view in zip(numbers, client.lease(keys(*numbers)), strict=True):
                if view is not None:
                    with view:
                        wrong += bytes(view.data) != contents(number)
        return wrong

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [0] * 6
    assert client.metrics().get("unanswered", 0) == 0
    for server in servers:
        eventually(lambda server=server: leased_blocks(server) == 0 and server.metrics()["reserved_blocks"] == 0)
        server.check()


def test_releases_are_told_at_once_while_the_link_is_free_and_later_when_it_is_not(pool_server, pool_client):
    server = pool_server()
    client = pool_client(server)
    client.put(items(1))
    link: Link = client._members.links["cache"]
    view = client.lease([key(1)])[0]
    with link._lock:                                      # as if another thread waited for an answer
        closer = threading.Thread(target=view.close)
        closer.start()
        closer.join(10)
        assert not closer.is_alive()                      # it did not wait
        assert leased_blocks(server) == 1
    assert client.exists([key(1)]) == [True]
    eventually(lambda: leased_blocks(server) == 0)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3)), min_size=1, max_size=12), st.integers(1, 12))
def test_whatever_was_put_is_fetched_right_or_not_at_all(shared_client, puts, count):
    client, server = shared_client
    for number, pages in puts:
        client.put([item(f"{number}/{pages}", pages * BLOCK_BYTES // 2)])
    asked = puts[:count]
    into = [memoryview(bytearray(pages * BLOCK_BYTES // 2)) for _, pages in asked]
    arrived = len(client.fetch_prefix([key(f"{number}/{pages}") for number, pages in asked], into))
    for i, (number, pages) in enumerate(asked[:arrived]):
        assert bytes(into[i]) == contents(f"{number}/{pages}", pages * BLOCK_BYTES // 2)
    server.check()


@pytest.fixture
def shared_client(pool_server, pool_client):
    server = pool_server(num_blocks=10)
    return pool_client(server), server
