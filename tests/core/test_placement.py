"""The expert map says where every expert is, and refuses to lose or double one."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.core.errors import ConfigError, WireError
from tripool.core.placement import (
    DISK,
    EMPTY,
    Edit,
    Geometry,
    MapChange,
    Move,
    PackedPlacement,
    Placement,
    choose,
    difference,
    even_geometry,
    initial_layer,
    initial_placement,
    lie_side_by_side,
    pack_edits,
    unpack,
    unpack_edits,
)


def placement(*layers, slots=(2, 2), num_experts=3, version=1):
    return Placement(version, num_experts, tuple(slots), tuple(tuple(layer) for layer in layers))


@st.composite
def geometries(draw, max_ranks=6, max_experts=8):
    """Any geometry that can be: uneven slots, ranks without one, with and without a shared expert, groups on nodes."""
    if draw(st.booleans()):
        num_routed = draw(st.integers(1, max_experts))
        slots = draw(st.lists(st.integers(0, num_routed), min_size=1, max_size=max_ranks)
                     .filter(lambda each: sum(each) >= num_routed))
        shared = []
        if draw(st.booleans()):
            hosts = draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
            at = 0
            for rank, hosts_shared in enumerate(hosts):
                if hosts_shared:
                    shared.append(at + draw(st.integers(0, slots[rank])))
                    slots[rank] += 1
                at += slots[rank]
        return Geometry(tuple(slots), num_routed, tuple(shared))
    num_nodes = draw(st.integers(2, 3))
    num_groups = num_nodes * draw(st.integers(1, 2))
    num_routed = num_groups * draw(st.integers(1, 3))
    per_node, needed = draw(st.integers(1, 3)), num_routed // num_nodes
    node = st.lists(st.integers(0, needed), min_size=per_node, max_size=per_node).filter(lambda s: sum(s) >= needed)
    slots = [count for _ in range(num_nodes) for count in draw(node)]
    return Geometry(tuple(slots), num_routed, (), num_groups, num_nodes)


@st.composite
def placements(draw):
    geometry = draw(geometries())
    layers = []
    for _ in range(draw(st.integers(1, 3))):
        renamed = draw(st.permutations(range(geometry.num_experts)))
        layers.append(tuple(renamed[expert] for expert in initial_layer(geometry)))
    return Placement(draw(st.integers(1, 9)), geometry.num_experts, geometry.slots_per_rank, tuple(layers))


# ---------------------------------------------------------------- geometry


@pytest.mark.parametrize(("build", "names"), [
    (lambda: Geometry((2, 2), 5), "4 expert slots on 2 ranks cannot hold 5 routed experts .* 5 slots are needed"),
    (lambda: Geometry((2, 2), 4, (0,)), "4 routed experts and 1 copies of the shared one: 5 slots"),
    (lambda: Geometry((5, 1), 4), "rank 0 has 5 slots for routed experts, but at most 4"),
    (lambda: Geometry((), 4), "slots_per_rank is"),
    (lambda: Geometry((3, -1), 2), "slots_per_rank is"),
    (lambda: Geometry((4,), 0), "num_routed is 0"),
    (lambda: Geometry((3, 3), 4, (0, 1)), "shared_slots 0 and 1 are both on rank 0"),
    (lambda: Geometry((3, 3), 4, (3, 0)), "must ascend"),
    (lambda: Geometry((3, 3), 4, (6,)), "must ascend and be below 6"),
    (lambda: even_geometry(6, 12, num_groups=4, num_nodes=4), "num_nodes is 4, which does not divide 6 ranks"),
    (lambda: even_geometry(6, 12, num_groups=5, num_nodes=2), "num_groups is 5, which does not divide 12 experts"),
    (lambda: even_geometry(6, 12, num_groups=4, num_nodes=3), "num_nodes is 3, which does not divide 4 expert groups"),
    (lambda: Geometry((2, 2, 4, 4), 12, (), 4, 2), "node 0 has 4 slots .* must hold 6 .* give it 2 more"),
    (lambda: even_geometry(2, 4, num_redundant=6), "rank 0 has 5 slots"),
    (lambda: even_geometry(4, 4, num_shared_copies=5), "num_shared_copies is 5, more than the 4 ranks"),
    (lambda: even_geometry(0, 4), "num_ranks is 0"),
])
def test_an_impossible_geometry_is_refused_with_what_would_do(build, names):
    with pytest.raises(ConfigError, match=names):
        build()


def test_ranks_may_have_no_slot_at_all():
    geometry = even_geometry(9, 2, num_shared_copies=5)

    assert geometry.slots_per_rank == (1, 1, 1, 1, 1, 1, 1, 0, 0)
    assert geometry.shared_slots == (0, 1, 2, 4, 5)
    initial_placement(geometry, 1).check()


def test_the_decode_instance_of_the_paper_has_one_expert_on_each_die():
    geometry = even_geometry(320, 256, num_redundant=32, num_shared_copies=32)
    layer = initial_layer(geometry)

    assert geometry.slots_per_rank == (1,) * 320
    assert geometry.shared_slots == tuple(range(0, 320, 10))
    assert layer.count(256) == 32
    assert [layer.count(expert) for expert in range(256)] == [2] * 32 + [1] * 224
    assert (geometry.num_experts, geometry.num_redundant) == (257, 32)


def test_the_prefill_instance_of_the_paper_has_nine_routed_experts_on_each_die():
    geometry = even_geometry(32, 256, num_redundant=32, num_groups=8, num_nodes=4)
    layer = initial_layer(geometry)

    assert geometry.slots_per_rank == (9,) * 32
    for node in range(4):
        there = layer[node * 72:(node + 1) * 72]
        assert sorted(dict.fromkeys(there)) == list(range(64 * node, 64 * node + 64))


@pytest.mark.parametrize(("num_ranks", "redundant", "copies"), [(18, 1, 1), (19, 1, 2), (20, 2, 2)])
def test_sixteen_experts_scale_the_paper_down(num_ranks, redundant, copies):
    geometry = even_geometry(num_ranks, 16, num_redundant=redundant, num_shared_copies=copies)

    assert geometry.slots_per_rank == (1,) * num_ranks
    initial_placement(geometry, 2).check()


def test_the_first_placement_divides_evenly_and_fills_up_with_copies():
    assert initial_layer(Geometry((3, 5), 6)) == [0, 1, 2, 3, 4, 5, 0, 1]
    assert initial_layer(Geometry((3, 2, 1), 4)) == [0, 1, 2, 2, 0, 3]
    assert initial_layer(Geometry((3, 3), 4, (1, 3))) == [0, 4, 1, 4, 2, 3]


@given(geometries())
def test_every_geometry_has_a_first_placement(geometry):
    placement = initial_placement(geometry, 2)

    placement.check()
    assert EMPTY not in placement.layers[0]
    assert all(placement.layers[0][slot] == geometry.num_routed for slot in geometry.shared_slots)


# ---------------------------------------------------------------- the map


@pytest.mark.parametrize(("layers", "names"), [
    ([(0, 1, 2, 0), (0, 1, 1, 0)], "layer 1: expert 2 is in no slot; name it in an empty slot"),
    ([(0, 1, 2, 2)], "layer 0: expert 2 is in slots 2 and 3, both of rank 1; put the copy on another rank"),
    ([(0, 1, 2, 3)], "layer 0, slot 3: there is no expert 3"),
    ([(0, 1, 2, -2)], "layer 0, slot 3: there is no expert -2"),
    ([(0, 1, 2)], "layer 0 of the map has 3 slots, the ranks have 4"),
])
def test_a_map_that_would_lose_or_double_an_expert_is_refused(layers, names):
    with pytest.raises(ConfigError, match=names):
        placement(*layers).check()


def test_slots_may_be_empty_and_a_partial_map_may_miss_experts():
    placement((0, 1, 2, EMPTY)).check()
    partial = placement((0, 1, EMPTY, EMPTY))

    partial.check(partial=True)
    assert partial.missing() == [(0, 2)]


def test_ranks_own_ranges_of_slots_and_copies_are_listed_ascending():
    at = placement((3, 0, 1, 2, 0, 1), slots=(1, 0, 3, 2), num_experts=4)

    assert [at.rank_of(slot) for slot in range(6)] == at.rank_of_slots() == [0, 2, 2, 2, 3, 3]
    assert [list(at.slots_of_rank(rank)) for rank in range(4)] == [[0], [], [1, 2, 3], [4, 5]]
    assert at.copies(0) == [[1, 4], [2, 5], [3], [0]]
    assert at.slots_of(0, 1) == (2, 5)


def test_tokens_take_turns_over_the_copies():
    assert [choose((4, 7, 9), position) for position in range(5)] == [4, 7, 9, 4, 7]
    assert [choose((4, 7, 9), 0, rank) for rank in range(4)] == [4, 7, 9, 4]
    assert placement((0, 1, 2, 0)).choose(0, 0, position=1, source_rank=2) == 3


@given(st.integers(1, 7), st.integers(0, 6), st.integers(0, 1000), st.integers(0, 300))
def test_copies_get_equal_numbers_of_tokens(num_copies, num_rounds, position, rank):
    copies = tuple(range(10, 10 + num_copies))
    chosen = [choose(copies, position + step, rank) for step in range(num_rounds * num_copies)]

    assert [chosen.count(slot) for slot in copies] == [num_rounds] * num_copies


def test_the_difference_is_one_move_for_each_slot_that_gets_another_expert():
    old = placement((0, 1, 2, 0), (0, 1, 2, 0))
    new = placement((0, 1, 2, 0), (2, 1, 0, EMPTY))

    assert difference(old, new) == [Move(1, 2, 0, 2), Move(1, 0, 2, 0)]


def test_moves_of_one_expert_take_turns_over_its_copies_and_a_lost_one_comes_from_disk():
    old = Placement(1, 3, (2, 2, 2), ((0, EMPTY, 0, EMPTY, 1, EMPTY),))
    new = Placement(2, 3, (2, 2, 2), ((0, 1, 0, 2, 1, 0),))

    assert difference(old, new) == [Move(0, 4, 1, 1), Move(0, DISK, 3, 2), Move(0, 0, 5, 0)]


def test_two_moves_of_an_expert_with_two_copies_have_two_sources():
    old, new = (Placement(1, 2, (1,) * 5, (layer,)) for layer in ((0, 0, 1, 1, 1), (0, 0, 1, 0, 0)))

    assert [move.from_slot for move in difference(old, new)] == [0, 1]


# ---------------------------------------------------------------- as it travels


@given(placements())
def test_a_map_comes_back_as_it_was_sent(sent):
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.pack()), type=PackedPlacement)

    assert unpack(packed) == sent


@given(placements(), st.data())
@settings(max_examples=50)
def test_a_change_turns_one_version_into_the_next(before, data):
    edits = {}
    for _ in range(data.draw(st.integers(0, 4))):
        layer = data.draw(st.integers(0, len(before.layers) - 1))
        slot = data.draw(st.integers(0, before.num_slots - 1))
        edits[layer, slot] = data.draw(st.integers(EMPTY, before.num_experts - 1))
    change = MapChange(before.version, before.version + 1, pack_edits([Edit(*at, to) for at, to in edits.items()]))

    after = before.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(change), type=MapChange))

    assert after.version == before.version + 1
    for layer, experts in enumerate(after.layers):
        for slot, expert in enumerate(experts):
            assert expert == edits.get((layer, slot), before.layers[layer][slot])


@pytest.mark.parametrize(("change", "names"), [
    (MapChange(4, 5, b""), "from version 4 to 5 does not fit version 1"),
    (MapChange(1, 1, b""), "from version 1 to 1 does not fit"),
    (MapChange(1, 2, pack_edits([Edit(1, 0, 0)])), "layer 1, slot 0, expert 0"),
    (MapChange(1, 2, pack_edits([Edit(0, 4, 0)])), "layer 0, slot 4, expert 0"),
    (MapChange(1, 2, pack_edits([Edit(0, 0, 3)])), "layer 0, slot 0, expert 3"),
    (MapChange(1, 2, pack_edits([Edit(0, 0, -2)])), "layer 0, slot 0, expert -2"),
    (MapChange(1, 2, pack_edits([Edit(0, -1, 0)])), "layer 0, slot -1, expert 0"),
    (MapChange(1, 2, b"12345"), "5 bytes"),
])
def test_a_change_that_does_not_fit_is_refused(change, names):
    with pytest.raises(WireError, match=names):
        placement((0, 1, 2, 0)).apply(change)


@pytest.mark.parametrize("spoil", [
    lambda p: PackedPlacement(p.version, p.num_experts, p.slots_per_rank, p.experts[:-1]),
    lambda p: PackedPlacement(p.version, p.num_experts, p.slots_per_rank, p.experts[:-2]),
    lambda p: PackedPlacement(p.version, p.num_experts, b"", p.experts),
    lambda p: PackedPlacement(p.version, 2, p.slots_per_rank, p.experts),
    lambda p: PackedPlacement(p.version, p.num_experts, p.slots_per_rank, b"\1\0" * 4),
])
def test_a_packed_map_that_is_none_is_refused(spoil):
    with pytest.raises(WireError):
        unpack(spoil(placement((0, 1, 2, 0)).pack()))


def test_edits_come_back_as_they_were_packed():
    edits = [Edit(57, 319, EMPTY), Edit(0, 0, 256)]

    assert unpack_edits(pack_edits(edits)) == edits


def test_experts_lie_side_by_side_where_each_slot_holds_the_next_one():
    assert all(lie_side_by_side(held) for held in ((), (0,), (3,), (2, 3, 4)))
    assert not any(lie_side_by_side(held) for held in ((EMPTY,), (EMPTY, 0, 1), (1, 0), (0, 0), (0, 2), (0, 1, EMPTY)))
    assert [placement((0, 1, 2, EMPTY)).held_by(rank, 0) for rank in (0, 1)] == [(0, 1), (2, EMPTY)]
