"""Where the model does not compute in the arena, blocks go down before others read them and up after they arrived."""

import asyncio
import os
import threading

import pytest
import torch

from tests.checkpoints import tiny_config
from tests.fleet import served
from tripool.core import messages as m
from tripool.core.plan import BlockRef
from tripool.core.shape import model_shape
from tripool.engine.cache import BlockCache, block_bytes
from tripool.pool.sdk import PoolClient
from tripool.pool.server import PoolServer
from tripool.serve.arena import Arena, PeerArena
from tripool.serve.dataplane import DataPlane, Peer
from tripool.serve.host import Host

SHAPE = model_shape(tiny_config("v3", mtp=1))
BLOCK_TOKENS = 8
NUM_BLOCKS = 6


class Memory:
    """An engine that only keeps blocks: in its arena, or staged."""

    def __init__(self, *, staged: bool) -> None:
        self.facts = m.Facts("test", "", "layout", 512, BLOCK_TOKENS, NUM_BLOCKS)
        arena = Arena("test", NUM_BLOCKS, block_bytes(SHAPE, BLOCK_TOKENS, torch.float32), "layout")
        self.cache = BlockCache(SHAPE, NUM_BLOCKS, BLOCK_TOKENS, torch.float32, memory=arena.payload,
                                generations=arena.generations, staged=staged)
        arena.seal()
        self.arenas = [arena]
        self.experts = None

    def compute(self, block: int, value: float) -> None:
        self.cache.data[block] = value

    def download(self, rank, blocks):
        self.cache.download(blocks)

    def upload(self, rank, blocks):
        self.cache.upload(blocks)


class Decode:
    """The data plane of an instance whose machine is the test."""

    def __init__(self, memory: Memory, pool: PoolClient | None, loop: asyncio.AbstractEventLoop) -> None:
        host = Host("decode-0", loop)
        self.answers: asyncio.Queue = asyncio.Queue()
        host.add_port("decode-0", self.answers.put_nowait)
        self.plane = DataPlane(host, "decode-0", lambda progress: memory, pool, lambda error: None,
                               verify_checksums=True)

    async def ask(self, verb):
        self.plane.take(verb)
        return await asyncio.wait_for(self.answers.get(), 20)


def do(memory: Memory, *verbs, pool: PoolClient | None = None, source: Memory | None = None) -> list:
    """Answers to verbs that are given one after another."""

    async def scenario():
        decode = Decode(memory, pool, asyncio.get_running_loop())
        if source is not None:
            decode.plane.peers["prefill-0"] = Peer("life", [PeerArena(os.dup(each.fd)) for each in source.arenas])
        try:
            assert await decode.ask(m.Load(1, 20.0)) == m.Loaded(1, memory.facts)
            return [await decode.ask(verb) for verb in verbs]
        finally:
            decode.plane.stop()

    return asyncio.run(scenario())


@pytest.fixture
def pool(tmp_path):
    server = PoolServer(tmp_path / "cache", 1 << 20, max_held_fraction=1.0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    client = PoolClient({"cache": server.path}, timeout_s=20.0)
    yield client
    client.close()
    server.stop()
    thread.join(10)


def key(number: int) -> bytes:
    return bytes([number]) * 32


@pytest.mark.parametrize("staged", [False, True])
def test_a_sealed_block_is_pulled_to_where_the_model_computes(staged):
    prefill, decode = Memory(staged=staged), Memory(staged=staged)
    prefill.cache.publish(BlockRef(4, 7))
    prefill.compute(4, 2.5)
    decode.compute(2, -1.0)

    checksum = prefill.cache.seal_block(4)
    grant = m.Grant("prefill-0", "life", "layout", BLOCK_TOKENS, (m.Part(0, 4, 7, checksum),))
    answers = do(decode, m.Pull(2, 20.0, 0, grant, (BlockRef(1, 3),)), source=prefill)

    assert answers == [m.Pulled(2)]
    assert decode.cache.data[1].eq(2.5).all()
    assert decode.cache.data[2].eq(-1.0).all()
    assert decode.arenas[0].generations[1] == 3


def test_a_pull_reads_the_life_that_granted_it_though_the_next_one_came_meanwhile():
    prefill, decode = Memory(staged=False), Memory(staged=False)
    prefill.cache.publish(BlockRef(4, 7))
    prefill.compute(4, 2.5)
    grant = m.Grant("prefill-0", "life", "layout", BLOCK_TOKENS, (m.Part(0, 4, 7, prefill.cache.seal_block(4)),))

    async def scenario():
        asked = Decode(decode, None, asyncio.get_running_loop())
        asked.plane.peers["prefill-0"] = Peer("life", [PeerArena(os.dup(each.fd)) for each in prefill.arenas])
        try:
            await asked.ask(m.Load(1, 20.0))
            goes_on = threading.Event()
            asked.plane._copies.submit(goes_on.wait, 20.0)         # the pull waits in line
            asked.plane.take(m.Pull(2, 20.0, 0, grant, (BlockRef(1, 3),)))
            asked.plane.peers["prefill-0"] = Peer("next life")
            goes_on.set()
            return await asyncio.wait_for(asked.answers.get(), 20)
        finally:
            asked.plane.stop()

    assert asyncio.run(scenario()) == m.Pulled(2)
    assert decode.cache.data[1].eq(2.5).all()


def test_a_block_that_is_not_sealed_is_not_where_others_read():
    """What the other tests rest on: staged memory is other memory."""
    prefill = Memory(staged=True)
    prefill.compute(4, 2.5)
    assert not any(prefill.arenas[0].block(4))


def test_a_pull_that_fails_leaves_the_model_its_blocks():
    prefill, decode = Memory(staged=True), Memory(staged=True)
    prefill.compute(4, 2.5)
    decode.compute(1, -1.0)
    prefill.cache.seal_block(4)
    grant = m.Grant("prefill-0", "life", "layout", BLOCK_TOKENS, (m.Part(0, 4, 0, checksum=12345),))

    answers = do(decode, m.Pull(2, 20.0, 0, grant, (BlockRef(1, 3),)), source=prefill)

    assert isinstance(answers[0], m.Failed)
    assert decode.cache.data[1].eq(-1.0).all()


@pytest.mark.parametrize("staged", [False, True])
def test_stored_blocks_are_those_that_the_model_computed_and_fetched_ones_reach_it(pool, staged):
    first, second = Memory(staged=staged), Memory(staged=staged)
    for block in range(3):
        first.compute(block, 10.0 + block)
        second.compute(5 - block, -1.0)

    store = m.Store(2, 20.0, 0, (key(0), key(1)), (BlockRef(0, 0), BlockRef(1, 0)))
    assert do(first, store, pool=pool) == [m.Stored(2, 2)]
    fetch = m.Fetch(3, 20.0, 0, (key(0), key(1), key(2)), (BlockRef(5, 1), BlockRef(4, 1), BlockRef(3, 1)))
    fetched, = do(second, fetch, pool=pool)

    assert fetched.num_blocks == 2
    assert fetched.checksums == (second.cache.sum_block(5), second.cache.sum_block(4))
    assert second.cache.data[5].eq(10.0).all()
    assert second.cache.data[4].eq(11.0).all()
    assert second.cache.data[3].eq(-1.0).all()


@pytest.mark.timeout(240)
def test_a_staged_deployment_gives_the_tokens_of_a_plain_forward_pass(oracle, prompts):
    """Seals, pulls, stores and fetches: the follow-up finds in the pool what the decode instance generated."""
    staged = {name: {"staged": 1.0} for name in ("prefill-0", "decode-0")}
    with served(prefill=1, decode=1, cache=1, faults=staged, model_fields={"max_model_len": 512}) as pools:
        asked = prompts(6, seed=30)
        for prompt in asked:
            oracle.check(prompt, pools.token_ids(prompt, 8))
        prompt = prompts(1, seed=31, shortest=100)[0]
        answer = pools.token_ids(prompt, 140)
        oracle.check(prompt, answer)
        pools.wait_for(lambda: pools.reports()["decode-0"]["stored_blocks"] > 0)
        follow_up = [*prompt, *answer, 20, 30]
        before = pools.reports()["prefill-0"]["pool_hit_tokens"]
        oracle.check(follow_up, pools.token_ids(follow_up, 8))
        pools.wait_for(lambda: pools.reports()["prefill-0"]["pool_hit_tokens"] > before)
        pools.assert_conserved()
