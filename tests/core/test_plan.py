"""Packed columns: what goes in comes out."""

from hypothesis import given
from hypothesis import strategies as st

from tripool.core.plan import TokenColumns, token_columns
from tripool.core.request import num_tokens, pack_tokens, unpack_tokens

ROWS = st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1),
                          st.lists(st.integers(-2**31, 2**31 - 1), max_size=5).map(pack_tokens)))


@given(ROWS)
def test_rows_come_back_from_columns(rows):
    assert token_columns(rows).rows() == rows


def test_no_rows_are_an_ordinary_case():
    assert TokenColumns().rows() == []


@given(st.lists(st.integers(-2**31, 2**31 - 1)))
def test_tokens_come_back_from_bytes(token_ids):
    packed = pack_tokens(token_ids)
    assert unpack_tokens(packed) == token_ids
    assert num_tokens(packed) == len(token_ids)
