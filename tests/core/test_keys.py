"""Keys: the same everywhere, and different for whatever differs."""

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from tripool.core.keys import KEY_BYTES, block_keys, namespace_key, root_key
from tripool.core.request import pack_tokens

FACTS = {"fingerprint": "f", "layout": "l", "block_tokens": "4"}
TOKENS = pack_tokens(range(10))
GOLDEN = ("import tripool.core.keys as k; from tripool.core.request import pack_tokens; "
          "r = k.root_key(k.namespace_key({'fingerprint': 'f', 'layout': 'l', 'block_tokens': '4'}), b'salt'); "
          "print(k.block_keys(r, pack_tokens(range(10)), 4)[-1].hex())")


def chain(facts=FACTS, salt=b"salt", tokens=TOKENS, block_tokens=4):
    return block_keys(root_key(namespace_key(facts), salt), tokens, block_tokens)


def test_only_whole_blocks_have_keys():
    assert [len(key) for key in chain()] == [KEY_BYTES, KEY_BYTES]
    assert chain(tokens=pack_tokens(range(3))) == []


def test_a_key_depends_on_every_token_before_its_end():
    other = chain(tokens=pack_tokens([9, *range(1, 10)]))
    assert other[0] != chain()[0]
    assert other[1] != chain()[1]
    late = chain(tokens=pack_tokens([*range(7), 99, 8, 9]))
    assert late[0] == chain()[0]
    assert late[1] != chain()[1]


def test_tenants_models_and_layouts_have_keys_of_their_own():
    keys = [chain(), chain(salt=b""), chain(salt=b"other"), *(chain({**FACTS, name: "x"}) for name in FACTS)]
    assert len({each[0] for each in keys}) == len(keys)


def test_text_cannot_move_from_one_field_to_another():
    assert namespace_key({"a": "bc"}) != namespace_key({"ab": "c"})
    assert namespace_key({"a": "", "b": "x"}) != namespace_key({"a": "x", "b": ""})


def test_keys_are_the_same_in_every_process():
    expected = chain()[-1].hex()
    for seed in ("0", "1", "random"):
        done = subprocess.run([sys.executable, "-c", GOLDEN], env={**os.environ, "PYTHONHASHSEED": seed},
                              capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
    assert expected == "ec603b4157072ceb29c764586b2d14fcc4745ab4f0043f169a0a71e78b052741"


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 9), st.integers(0, 40))
def test_a_longer_text_keeps_the_keys_of_its_beginning(tokens, block_tokens, cut):
    whole, begun = chain(tokens=pack_tokens(tokens), block_tokens=block_tokens), \
        chain(tokens=pack_tokens(tokens[:cut]), block_tokens=block_tokens)
    assert whole[:len(begun)] == begun
