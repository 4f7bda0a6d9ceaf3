"""Consistent hashing: stable, even, and moving no more than it must."""

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pool.builders import key
from tests.pool.conftest import ROOT
from tripool.pool.ring import Ring

KEYS = [key(number) for number in range(500)]
names = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=1, max_size=8, unique=True)

GOLDEN = ["cache-2", "cache-0", "cache-0", "cache-0", "cache-0", "cache-1", "cache-0", "cache-2"]


def places(ring: Ring) -> list[str | None]:
    return [ring.server(each) for each in KEYS]


def test_keys_are_where_they_have_always_been():
    ring = Ring(["cache-0", "cache-1", "cache-2"])
    assert [ring.server(key(number)) for number in range(8)] == GOLDEN


def test_another_process_with_another_hash_seed_agrees():
    script = ("from tests.pool.builders import key; from tripool.pool.ring import Ring; "
              "ring = Ring(['cache-2', 'cache-0', 'cache-1']); print([ring.server(key(i)) for i in range(8)])")
    for seed in ("1", "2"):
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env={"PYTHONHASHSEED": seed},
                              capture_output=True, text=True, check=True)
        assert done.stdout.strip() == repr(GOLDEN)


def test_an_empty_ring_keeps_nothing():
    assert Ring([]).server(key(0)) is None


def test_every_server_has_about_its_share():
    ring = Ring(f"cache-{i}" for i in range(8))
    counts = [places(ring).count(name) for name in ring.names]
    assert 0.5 * 62.5 < min(counts) <= max(counts) < 1.6 * 62.5


@settings(max_examples=25)
@given(names, st.text(st.characters(codec="utf-8"), min_size=1, max_size=12))
def test_a_new_server_takes_keys_for_itself_and_moves_no_others(old, new):
    before, after = places(Ring(old)), places(Ring([*old, new]))
    assert all(now in (then, new) for then, now in zip(before, after, strict=True))


@settings(max_examples=25)
@given(names)
def test_a_server_that_leaves_moves_only_what_it_had(old):
    before, after = places(Ring(old)), places(Ring(old[1:]))
    assert all(then in (now, old[0]) for then, now in zip(before, after, strict=True))


@settings(max_examples=10)
@given(st.permutations([f"cache-{i}" for i in range(6)]))
def test_the_order_of_names_does_not_matter(shuffled):
    assert places(Ring(shuffled)) == places(Ring(sorted(shuffled)))
