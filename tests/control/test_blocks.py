"""The allocator gives out each block once, loses none, and remembers what cached ones hold."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tripool.control.blocks import BlockAllocator

NUM_BLOCKS = 6


def allocator(num_blocks=NUM_BLOCKS):
    return BlockAllocator(num_blocks)


def cached(blocks, key):
    """A block that nobody counts on and that is known under `key`."""
    (block,) = blocks.allocate(1)
    blocks.register([block], [key])
    blocks.release(block)
    return block


def test_a_new_allocator_has_only_free_blocks():
    blocks = allocator(4)

    assert (blocks.num_free, blocks.num_held, blocks.num_quarantined, blocks.num_cached) == (4, 0, 0, 0)
    assert blocks.num_available == 4


def test_more_blocks_than_there_are_cannot_be_given_out():
    blocks = allocator(2)
    blocks.allocate(1)

    with pytest.raises(AssertionError, match="2 blocks asked for, 1 there"):
        blocks.allocate(2)


def test_a_generation_grows_each_time_a_block_is_given_out():
    blocks = allocator(1)
    generations = []
    for _ in range(3):
        (ref,) = blocks.refs(blocks.allocate(1))
        generations.append(ref.generation)
        blocks.release(ref.block)

    assert generations == [1, 2, 3]


def test_a_block_is_not_released_twice():
    blocks = allocator()
    (block,) = blocks.allocate(1)
    blocks.release(block)

    with pytest.raises(AssertionError, match="released twice"):
        blocks.release(block)


def test_a_registered_block_stays_cached_and_is_found_by_its_key():
    blocks = allocator()
    block = cached(blocks, b"a")

    assert blocks.num_cached == 1
    assert blocks.match([b"a"]) == [block]


def test_only_the_leading_run_of_keys_is_matched():
    blocks = allocator()
    first, _, third = cached(blocks, b"a"), cached(blocks, b"x"), cached(blocks, b"c")

    assert blocks.match([b"a", b"b", b"c"]) == [first]
    assert blocks.match([b"c", b"a"]) == [third, first]


def test_a_cached_block_that_is_held_again_keeps_its_generation_and_checksum():
    blocks = allocator()
    block = cached(blocks, b"a")
    blocks.set_checksums([(block, 77)])
    before = blocks.refs([block])

    blocks.hold(block)

    assert (blocks.refs([block]), blocks.checksums([block])) == (before, [77])
    assert (blocks.num_held, blocks.num_cached) == (1, 0)


def test_free_blocks_go_before_cached_ones():
    blocks = allocator(3)
    kept = cached(blocks, b"a")

    assert kept not in blocks.allocate(2)
    assert blocks.match([b"a"]) == [kept]


def test_the_cached_block_left_alone_for_longest_is_evicted_first():
    blocks = allocator(3)
    held = blocks.allocate(3)
    blocks.register(held, [b"a", b"b", b"c"])
    blocks.release(*held)
    blocks.hold(held[0])
    blocks.release(held[0])                   # "a" was used last

    assert blocks.allocate(1) == [held[1]]
    assert blocks.match([b"b"]) == []
    assert blocks.match([b"a"]) == [held[0]]


def test_an_evicted_block_forgets_its_checksum_and_its_place_in_the_pool():
    blocks = allocator(1)
    block = cached(blocks, b"a")
    blocks.set_checksums([(block, 5)])
    blocks.set_pooled([block], True)
    assert blocks.unpooled([b"a"], [block]) == []

    blocks.allocate(1)
    blocks.register([block], [b"b"])

    assert blocks.checksums([block]) == [None]
    assert blocks.unpooled([b"b"], [block]) == [(b"b", block)]


def test_a_block_that_is_known_under_another_key_is_not_offered_to_the_pool():
    blocks = allocator()
    first, second = blocks.allocate(2)
    blocks.register([first, second], [b"a", b"a"])

    assert blocks.unpooled([b"a", b"a"], [first, second]) == [(b"a", first)]


def test_a_shared_block_is_held_until_the_last_release():
    blocks = allocator()
    (block,) = blocks.allocate(1)
    blocks.register([block], [b"a"])
    blocks.hold(block)

    blocks.release(block)
    assert blocks.num_held == 1
    blocks.release(block)
    assert (blocks.num_held, blocks.num_cached) == (0, 1)


def test_a_second_block_of_the_same_contents_is_not_known_under_the_key():
    blocks = allocator()
    first, second = blocks.allocate(2)

    blocks.register([first, second], [b"a", b"a"])
    blocks.release(second)

    assert blocks.match([b"a"]) == [first]
    assert blocks.num_free == NUM_BLOCKS - 1


def test_a_quarantined_block_comes_back_only_with_the_answer():
    blocks = allocator(1)
    (block,) = blocks.allocate(1)

    blocks.quarantine(block)
    assert (blocks.num_quarantined, blocks.num_available) == (1, 0)
    blocks.unpin(block)
    assert (blocks.num_quarantined, blocks.num_free) == (0, 1)


def test_a_cached_block_that_a_verb_names_cannot_be_evicted():
    blocks = allocator(1)
    block = cached(blocks, b"a")

    blocks.pin(block)

    assert blocks.num_available == 0
    assert blocks.match([b"a"]) == [block]
    blocks.unpin(block)
    assert blocks.num_cached == 1


def test_a_free_block_cannot_be_shared():
    blocks = allocator(1)

    with pytest.raises(AssertionError, match="is free and cannot be shared"):
        blocks.hold(0)


def test_forgetting_the_cache_frees_what_nobody_holds_and_keeps_what_is_shared():
    blocks = allocator(3)
    cached(blocks, b"a")
    (held,) = blocks.allocate(1)
    blocks.register([held], [b"b"])

    assert blocks.forget_cached() == 1
    assert blocks.match([b"a"]) == []
    assert blocks.match([b"b"]) == [held]
    assert blocks.num_cached == 0


class AnyOrder(RuleBasedStateMachine):
    """Holders, verbs and keys in any order, beside a model that only counts."""

    holds = Bundle("holds")
    pins = Bundle("pins")

    def __init__(self):
        super().__init__()
        self.blocks = allocator()
        self.held = {}                                     # block -> how often
        self.pinned = {}
        self.generations = dict.fromkeys(range(NUM_BLOCKS), 0)

    @rule(target=holds, count=st.integers(1, 3))
    def allocate(self, count):
        if count > self.blocks.num_available:
            return multiple()
        refs = self.blocks.refs(self.blocks.allocate(count))
        for ref in refs:
            assert not self.held.get(ref.block) and not self.pinned.get(ref.block), "given out while in use"
            assert ref.generation > self.generations[ref.block], "the generation did not grow"
            self.generations[ref.block] = ref.generation
            self.held[ref.block] = 1
        return multiple(*[ref.block for ref in refs])

    @rule(block=consumes(holds))
    def release(self, block):
        self.held[block] -= 1
        self.blocks.release(block)

    @rule(target=pins, block=consumes(holds))
    def quarantine(self, block):
        self.held[block] -= 1
        self.pinned[block] = self.pinned.get(block, 0) + 1
        self.blocks.quarantine(block)
        return block

    @rule(target=pins, block=holds)
    def pin(self, block):
        if not self.held.get(block):
            return multiple()
        self.pinned[block] = self.pinned.get(block, 0) + 1
        self.blocks.pin(block)
        return block

    @rule(block=consumes(pins))
    def unpin(self, block):
        self.pinned[block] -= 1
        self.blocks.unpin(block)

    @rule(block=holds, key=st.sampled_from([b"a", b"b", b"c"]))
    def register(self, block, key):
        if self.held.get(block):
            known, has_another = self.blocks.match([key]), self.blocks.key(block) not in (None, key)
            self.blocks.register([block], [key])
            assert self.blocks.match([key]) == (known or ([] if has_another else [block]))

    @rule(target=holds, key=st.sampled_from([b"a", b"b", b"c"]))
    def reuse(self, key):
        matched = self.blocks.match([key])
        for block in matched:
            before = self.blocks.refs([block])
            self.blocks.hold(block)
            self.held[block] = self.held.get(block, 0) + 1
            assert self.blocks.refs([block]) == before, "a reused block is not a new one"
        return multiple(*matched)

    @rule()
    def forget(self):
        before = self.blocks.num_free + self.blocks.num_cached
        self.blocks.forget_cached()
        assert (self.blocks.num_free, self.blocks.num_cached) == (before, 0)

    @invariant()
    def every_block_is_accounted_for_once(self):
        self.blocks.check()
        held = sum(count > 0 for count in self.held.values())
        quarantined = sum(count > 0 and not self.held.get(block) for block, count in self.pinned.items())
        assert (self.blocks.num_held, self.blocks.num_quarantined) == (held, quarantined)
        assert self.blocks.num_free + self.blocks.num_cached == NUM_BLOCKS - held - quarantined


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40)
