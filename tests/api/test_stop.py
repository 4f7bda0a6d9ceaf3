"""Stop strings: nothing of one leaks, nothing else is held back, and cutting the text elsewhere changes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripool.api.stop import StopMatcher

LETTERS = "abé"


def run(pieces, stops, include=False):
    """(what each piece let out, then what the end let out; the stop that was met)"""
    matcher = StopMatcher(stops, include)
    shown = [matcher.feed(piece) for piece in pieces]
    return [*shown, matcher.flush()], matcher.stop


def first_stop(text, stops):
    """By definition: the stop that is complete first; of those that end together the longest."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            return max(here, key=len), end
    return None, len(text)


@pytest.mark.parametrize(("stops", "include", "shown", "met"), [
    (["DEFG"], False, ["AB", "C", "", "", ""], "DEFG"),
    (["DEFG"], True, ["AB", "C", "", "DEFG", ""], "DEFG"),
    (["CDX"], False, ["AB", "", "CDEF", "G", ""], None),
    (["CDE", "CD"], False, ["AB", "", "", "", ""], "CD"),
    (["CD", "ABCD"], False, ["", "", "", "", ""], "ABCD"),
    (["FGH"], False, ["AB", "CD", "E", "", "FG"], None),
])
def test_four_tokens_with_stops_across_them(stops, include, shown, met):
    assert run(["AB", "CD", "EF", "G"], stops, include) == (shown, met)


@given(st.lists(st.text(LETTERS, max_size=4), max_size=12),
       st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=3, unique=True), st.booleans())
def test_the_text_ends_where_the_definition_says_however_it_is_cut(pieces, stops, include):
    text = "".join(pieces)
    met, end = first_stop(text, stops)
    shown, stop = run(pieces, stops, include)
    assert stop == met
    assert "".join(shown) == (text[:end] if met is None or include else text[:end - len(met)])


@given(st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=12),
       st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=3, unique=True))
def test_no_more_is_held_than_may_begin_a_stop(pieces, stops):
    matcher = StopMatcher(stops)
    fed = shown = ""
    for piece in pieces:
        fed += piece
        shown += matcher.feed(piece)
        if matcher.stop is None:
            held = fed[len(shown):]
            longest = max(length for stop in stops for length in range(len(stop)) if fed.endswith(stop[:length]))
            assert len(held) == longest
