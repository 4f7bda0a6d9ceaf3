"""Values compare, hash, match and print as frozen dataclasses do."""

from dataclasses import replace

from tripool.core.machine import Send
from tripool.core.plan import BlockRef


def test_values_are_equal_and_hash_alike_if_their_fields_do():
    assert BlockRef(1, 2) == BlockRef(1, 2) != BlockRef(1, 3)
    assert len({BlockRef(1, 2), BlockRef(1, 2), BlockRef(1, 3)}) == 2


def test_a_value_is_changed_by_making_another():
    first = Send("a", "hello")
    second = replace(first, to="b")

    assert (first.to, second.to, second.message) == ("a", "b", "hello")


def test_values_can_be_taken_apart_and_printed():
    match Send("a", 5, 0.5):
        case Send(to, message, delay_s):
            assert (to, message, delay_s) == ("a", 5, 0.5)
    assert repr(BlockRef(1, 2)) == "BlockRef(block=1, generation=2)"
