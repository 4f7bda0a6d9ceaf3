"""What makes two blocks the same: a change of anything that shapes their bytes is a miss, and going back is a hit."""

import pytest

from tests.pool.builders import contents, places
from tripool.core.keys import block_keys, namespace_key, root_key
from tripool.pool.sdk import PutStatus

SETTING = {"model": "tiny", "weights": "fingerprint-1", "dtype": "float32", "quantisation": "none",
           "block_tokens": "64", "layers": "0-6", "rank": "0/1", "layout": "1"}
TOKENS = bytes(range(256)) * 4            # 256 tokens of four bytes: 16 blocks of 16


def chain(setting: dict[str, str], salt: bytes = b"") -> list[bytes]:
    return block_keys(root_key(namespace_key(setting), salt), TOKENS, 16)


def fill(client, keys: list[bytes]) -> list[PutStatus]:
    return client.put([(each, memoryview(contents(each.hex())), None) for each in keys])


def num_hits(client, keys: list[bytes]) -> int:
    """Whole blocks of a chain, each of which must be what was put under its own key."""
    into = places(len(keys))
    count = len(client.fetch_prefix(keys, into))
    assert all(bytes(into[i]) == contents(keys[i].hex()) for i in range(count))
    return count


@pytest.mark.parametrize("changed", sorted(SETTING))
def test_a_changed_setting_misses_and_the_first_one_hits_again_after_a_restart_of_the_engines(
        pool_server, pool_client, changed):
    server = pool_server(num_blocks=40)
    engine = pool_client(server)
    assert fill(engine, chain(SETTING)) == [PutStatus.OK] * 16
    engine.close()

    other = pool_client(server)                                   # the pool stayed up
    setting = {**SETTING, changed: "another"}
    assert num_hits(other, chain(setting)) == 0
    assert fill(other, chain(setting)) == [PutStatus.OK] * 16
    other.close()

    again = pool_client(server)
    assert num_hits(again, chain(SETTING)) == 16
    assert num_hits(again, chain(setting)) == 16
    assert server.metrics()["duplicates"] == 0


def test_tenants_do_not_see_each_others_blocks(pool_server, pool_client):
    client = pool_client(pool_server())
    fill(client, chain(SETTING, b"tenant a"))
    assert num_hits(client, chain(SETTING, b"tenant b")) == 0
    assert num_hits(client, chain(SETTING, b"tenant a")) == 16
