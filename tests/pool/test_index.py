"""The index of blocks: what is visible, what is held, what goes."""

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.pool.builders import contents, key
from tripool.pool.arena import HEADER_BYTES, Mapping, block_header, checksum_of, create_arena
from tripool.pool.index import Block, BlockIndex, Holder
from tripool.pool.wire import Status

PAGE = 4096
ONE = PAGE - HEADER_BYTES          # data of a block that takes one page


def small_arena(num_pages: int) -> Mapping:
    fd = create_arena("test", num_pages * PAGE)
    try:
        return Mapping(fd, num_pages * PAGE, writable=True)
    finally:
        os.close(fd)


class Pool:
    """An index with one writer and one reader; holds are numbered for them."""

    def __init__(self, num_pages: int, **options: float) -> None:
        self.arena = small_arena(num_pages)
        self.index = BlockIndex(self.arena, **{"max_held_fraction": 1.0, **options})
        self.writer, self.reader = Holder("writer"), Holder("reader")
        self.last_hold = 0
        self.now = 0.0

    def reserve(self, number: int, num_bytes: int = ONE, holder: Holder | None = None) -> Status | int:
        self.last_hold += 1
        outcome = self.index.reserve(holder or self.writer, self.last_hold, key(number), num_bytes, self.now)
        return self.last_hold if isinstance(outcome, Block) else outcome

    def put(self, number: int, num_bytes: int = ONE) -> Status:
        hold = self.reserve(number, num_bytes)
        if isinstance(hold, Status):
            return hold
        return self.index.seal(self.writer, hold, 1)

    def lease(self, number: int) -> int | None:
        self.last_hold += 1
        return self.last_hold if self.index.lease(self.reader, self.last_hold, key(number)) else None

    def there(self, *numbers: int) -> list[bool]:
        return [self.index.exists(key(number)) for number in numbers]

    def check(self) -> None:
        self.index.check([self.writer, self.reader])


def test_a_block_is_visible_only_when_it_is_sealed():
    pool = Pool(4)
    hold = pool.reserve(1)
    assert pool.there(1) == [False] and pool.lease(1) is None
    assert pool.index.seal(pool.writer, hold, 5) is Status.OK
    assert pool.there(1) == [True] and pool.lease(1) is not None


def test_a_header_is_written_at_the_seal_and_wiped_before_the_room_is_given_away():
    pool = Pool(1)
    pool.put(1)
    assert pool.arena.header(0) == block_header(key(1), 1, ONE, 1)
    assert isinstance(pool.reserve(2), int)
    assert pool.arena.header(0) == bytes(HEADER_BYTES)


def test_every_life_of_a_slot_has_a_generation_of_its_own():
    pool = Pool(1)
    generations = []
    for number in range(3):
        pool.put(number)
        pool.lease(number)
        block = next(iter(pool.reader.blocks.values()))
        generations.append(block.generation)
        pool.index.release_all(pool.reader)
    assert generations == [1, 2, 3]


def test_the_longest_unused_block_goes_first():
    pool = Pool(3)
    for number in (1, 2, 3):
        pool.put(number)
    pool.index.release(pool.reader, pool.lease(1))
    pool.put(4)
    assert pool.there(1, 2, 3, 4) == [True, False, True, True]


def test_asking_whether_a_block_exists_does_not_keep_it():
    pool = Pool(2)
    pool.put(1)
    pool.put(2)
    pool.there(1, 1, 1)
    pool.put(3)
    assert pool.there(1, 2, 3) == [False, True, True]


def test_a_leased_block_stays_and_goes_after_its_last_lease():
    pool = Pool(1)
    pool.put(1)
    first, second = pool.lease(1), pool.lease(1)
    assert pool.put(2) is Status.NO_SPACE
    pool.index.release(pool.reader, first)
    assert pool.put(2) is Status.NO_SPACE
    pool.index.release(pool.reader, second)
    assert pool.put(2) is Status.OK


def test_releasing_a_lease_twice_does_not_end_somebody_elses():
    pool = Pool(1)
    pool.put(1)
    first, _ = pool.lease(1), pool.lease(1)
    for _ in range(3):
        pool.index.release(pool.reader, first)
    assert pool.put(2) is Status.NO_SPACE
    pool.check()


def test_the_hold_of_one_client_means_nothing_to_another():
    pool = Pool(2)
    hold = pool.reserve(1)
    pool.index.release(pool.reader, hold)
    assert pool.index.seal(pool.reader, hold, 1) is Status.LOST
    assert pool.index.seal(pool.writer, hold, 1) is Status.OK


def test_sealing_twice_is_refused():
    pool = Pool(2)
    hold = pool.reserve(1)
    pool.index.seal(pool.writer, hold, 1)
    assert pool.index.seal(pool.writer, hold, 1) is Status.LOST
    lease = pool.lease(1)
    assert pool.index.seal(pool.reader, lease, 1) is Status.LOST
    pool.check()


def test_a_large_block_takes_the_place_of_several_small_ones():
    pool = Pool(4)
    for number in range(4):
        pool.put(number)
    assert pool.put(9, 3 * PAGE) is Status.OK
    assert pool.there(0, 1, 2, 3, 9) == [False, False, False, False, True]


def test_a_block_that_could_never_fit_evicts_nothing():
    pool = Pool(4)
    for number in range(4):
        pool.put(number)
    assert pool.put(9, 4 * PAGE) is Status.NO_SPACE       # the header does not fit any more
    pool.lease(2)
    assert pool.put(9, 2 * PAGE) is Status.NO_SPACE       # a leased block is in the way
    assert pool.there(0, 1, 2, 3) == [True] * 4
    assert pool.index.counters.evictions == 0


def test_flush_forgets_everything_and_memory_under_lease_comes_back_later():
    pool = Pool(3)
    pool.put(1)
    pool.put(2)
    lease = pool.lease(1)
    assert pool.index.flush() == 2
    assert pool.there(1, 2) == [False, False]
    assert pool.index.figures()["dropped_blocks"] == 1
    pool.check()
    assert pool.put(1) is Status.OK                       # beside the old one, which is still read
    pool.index.release(pool.reader, lease)
    assert pool.index.figures()["used_bytes"] == PAGE
    pool.check()


def test_a_suspected_block_is_dropped_only_when_it_is_damaged():
    pool = Pool(2)
    hold = pool.reserve(1)
    offset = pool.writer.blocks[hold].offset
    data = pool.arena.data(offset, ONE)
    data[:] = bytearray(contents(1, ONE))
    pool.index.seal(pool.writer, hold, checksum_of(data))
    pool.index.suspect(key(1))
    assert pool.there(1) == [True]
    data[7] ^= 1
    pool.index.suspect(key(1))
    assert pool.there(1) == [False]
    pool.index.suspect(key(1))
    assert pool.index.counters.damaged == 1


def test_a_client_holds_at_most_its_fraction():
    pool = Pool(8, max_held_fraction=0.5)
    for number in range(4):
        pool.put(number)
    for _ in range(4):
        assert pool.lease(0) is not None                  # a block counts once, however often it is leased
    assert [pool.lease(number) is not None for number in (1, 2, 3)] == [True, True, True]
    pool.put(4)
    assert pool.lease(4) is None
    assert pool.index.counters.capped == 1


@pytest.mark.parametrize("seconds_later", [0.5, 1.5])
def test_a_key_is_busy_while_its_writer_is_fresh(seconds_later):
    pool = Pool(4, busy_s=1.0)
    pool.reserve(1)
    pool.now += seconds_later
    outcome = pool.reserve(1, holder=pool.reader)
    assert (outcome is Status.BUSY) == (seconds_later < 1.0)


class IndexUnderAnyOrder(RuleBasedStateMachine):
    """Clients do anything in any order; what is held never changes, and everything idle can be used again."""

    NUM_PAGES = 12

    def __init__(self) -> None:
        super().__init__()
        self.arena = small_arena(self.NUM_PAGES)
        self.index = BlockIndex(self.arena, busy_s=0.0, max_held_fraction=1.0)
        self.holders = [Holder(name) for name in "abc"]
        self.last_hold = 0
        self.leased: dict[tuple[int, int], tuple[int, bytes]] = {}     # (holder, hold) -> (offset, header)
        self.reserved: dict[tuple[int, int], bytes] = {}

    def next_hold(self) -> int:
        self.last_hold += 1
        return self.last_hold

    @rule(who=st.integers(0, 2), number=st.integers(0, 9), num_bytes=st.integers(1, 5 * PAGE))
    def reserve(self, who: int, number: int, num_bytes: int) -> None:
        hold = self.next_hold()
        there = self.index.exists(key(number))
        outcome = self.index.reserve(self.holders[who], hold, key(number), num_bytes, now=0.0)
        assert (outcome is Status.EXISTS) == there
        if isinstance(outcome, Block):
            self.reserved[who, hold] = key(number)

    @rule(who=st.integers(0, 2), number=st.integers(0, 9))
    def lease(self, who: int, number: int) -> None:
        hold = self.next_hold()
        there = self.index.exists(key(number))
        block = self.index.lease(self.holders[who], hold, key(number))
        assert (block is not None) == there
        if block is not None:
            self.leased[who, hold] = block.offset, self.arena.header(block.offset)

    @rule(chance=st.randoms(use_true_random=False))
    def seal(self, chance) -> None:
        if self.reserved:
            who, hold = chance.choice(list(self.reserved))
            name = self.reserved.pop((who, hold))
            expected = Status.EXISTS if self.index.exists(name) else Status.OK
            assert self.index.seal(self.holders[who], hold, checksum=hold) is expected
            assert self.index.exists(name)

    @rule(chance=st.randoms(use_true_random=False))
    def release(self, chance) -> None:
        if self.leased or self.reserved:
            who, hold = chance.choice([*self.leased, *self.reserved])
            self.index.release(self.holders[who], hold)
            self.leased.pop((who, hold), None)
            self.reserved.pop((who, hold), None)

    @rule(who=st.integers(0, 2))
    def die(self, who: int) -> None:
        self.index.release_all(self.holders[who])
        self.leased = {each: block for each, block in self.leased.items() if each[0] != who}
        self.reserved = {each: name for each, name in self.reserved.items() if each[0] != who}

    @rule()
    def flush(self) -> None:
        self.index.flush()

    @invariant()
    def what_is_leased_stays(self) -> None:
        for offset, header in self.leased.values():
            assert self.arena.header(offset) == header != bytes(HEADER_BYTES)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.index.check(self.holders)

    def teardown(self) -> None:
        for holder in self.holders:
            self.index.release_all(holder)
        biggest = self.NUM_PAGES * PAGE - HEADER_BYTES
        assert isinstance(self.index.reserve(self.holders[0], self.next_hold(), key("new"), biggest, 0.0), Block)


TestIndex = IndexUnderAnyOrder.TestCase
TestIndex.settings = settings(max_examples=40, stateful_step_count=40)
