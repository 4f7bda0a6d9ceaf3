"""Latent attention: every level agrees with its definition, and with itself to the bit in any company."""

import pytest
import torch

from tests.engine.ops.builders import LEVELS, generator
from tripool.engine.ops import native
from tripool.engine.ops.mla import absorbed_attention, expanded_attention

# Sums of some hundred products in float32 in two orders; of bfloat16 results only the last place may differ.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
FORMATS = tuple(TOLERANCE)
# Where a score's last place decides how a weight is rounded, the weight is off by one in 2**8 of itself.
ROUNDED = {torch.float32: 4e-3, torch.bfloat16: 1.5e-2}
BOTH = pytest.mark.parametrize("rounds", [False, True], ids=["floats", "rounded"])
SMALL, ODD, LARGE = (4, 64, 16), (3, 21, 6), (16, 512, 64)
"""Heads, latent width, rotary width."""


class Paged:
    """Rows in a paged cache of three layers, of which the middle one holds them. What no row has written is NaN."""

    def __init__(self, heads_and_widths, rows, *, block_tokens=16, dtype=torch.float32, entry_dtype=None, seed=0):
        (heads, self.latent, rotary), self.rows, chance = heads_and_widths, rows, generator(seed)
        width = self.latent + rotary
        needed = [-(-(first + count) // block_tokens) for first, count in rows]
        num_blocks = sum(needed) + 1
        cache = torch.full((num_blocks, 3 * block_tokens * width), torch.nan, dtype=entry_dtype or dtype)
        self.entries = cache[:, block_tokens * width:2 * block_tokens * width].view(num_blocks, block_tokens, width)
        ids = torch.randperm(num_blocks, generator=generator(seed, 1))
        self.block_RB = torch.full((len(rows), max(needed, default=0)), num_blocks - 1)
        self.first_R = torch.tensor([first for first, _ in rows], dtype=torch.int64)
        self.count_R = torch.tensor([count for _, count in rows], dtype=torch.int64)
        for row, (first, count) in enumerate(rows):
            mine, ids = ids[:needed[row]], ids[needed[row]:]
            self.block_RB[row, :needed[row]] = mine
            written = torch.randn(first + count, width, generator=chance).to(cache.dtype)
            for position, entry in enumerate(written):
                self.entries[mine[position // block_tokens], position % block_tokens] = entry
        self.query_THW = torch.randn(sum(count for _, count in rows), heads, width, generator=chance).to(dtype)

    def attend(self, level=None, first_seen=0, rows=slice(None), query=None, rounds=False):
        return absorbed_attention(self.query_THW if query is None else query, self.entries, self.block_RB[rows],
                                  self.first_R[rows], self.count_R[rows], scale=0.3 / self.latent ** 0.5,
                                  latent=self.latent, first_seen=first_seen, rounds=rounds, level=level)

    def alone(self, row, token, level, rounds):
        """One token of a row in a call of its own."""
        start = int(self.count_R[:row].sum()) + token
        return absorbed_attention(self.query_THW[start:start + 1], self.entries, self.block_RB[row:row + 1],
                                  self.first_R[row:row + 1] + token, torch.ones(1, dtype=torch.int64),
                                  scale=0.3 / self.latent ** 0.5, latent=self.latent, rounds=rounds, level=level)


def assert_close(found, wanted, rounds):
    tolerance = (ROUNDED if rounds else TOLERANCE)[found.dtype]
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.fixture
def threads():
    """Sets the number of threads, and sets it back."""
    before = native.num_threads()
    yield native.use_threads
    native.use_threads(before)


ROWS = {
    "none": (),
    "one position": ((0, 1),),
    "no tokens": ((5, 0), (3, 1), (0, 0)),
    "decode": ((0, 1), (15, 1), (16, 1), (63, 1), (64, 1), (200, 1)),
    "verify": ((7, 4), (60, 9), (100, 2)),
    "chunk": ((37, 40), (0, 70)),
}


@BOTH
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("widths", [SMALL, ODD, LARGE], ids=["small", "odd", "large"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_absorbed_attention_is_as_defined(level, widths, rows, rounds):
    for dtype in FORMATS:
        for entry_dtype in FORMATS:
            paged = Paged(widths, rows, dtype=dtype, entry_dtype=entry_dtype)
            for first_seen in (0, 1):
                if first_seen and any(first == 0 for first, _ in rows):
                    continue
                found, wanted = (paged.attend(each, first_seen, rounds=rounds) for each in (level, -1))
                assert found.shape == (len(paged.query_THW), widths[0], widths[1]) and found.dtype == dtype
                assert not found.isnan().any()
                assert_close(found, wanted, rounds)


@BOTH
@pytest.mark.parametrize("level", LEVELS)
def test_a_long_context_is_as_defined(level, rounds):
    paged = Paged(LARGE, ((3000, 3),), block_tokens=64)
    for first_seen in (0, 130, 131):
        assert_close(*(paged.attend(each, first_seen, rounds=rounds) for each in (level, -1)), rounds)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_multiplied_is_rounded_and_nothing_else(level):
    """Far nearer to the rounding definition than that is to the one that does not round."""
    paged, prefill = Paged(LARGE, ((40, 9), (200, 1), (0, 12))), expanded(SMALL, 100, 7)
    paged.query_THW *= 8                           # weights of very different sizes
    for found, wanted, plain in (
        [paged.attend(each, rounds=rounds) for each, rounds in ((level, True), (-1, True), (-1, False))],
        [expanded_attention(**prefill, rounds=rounds, level=each)
         for each, rounds in ((level, True), (-1, True), (-1, False))],
    ):
        assert (found - wanted).abs().mean() < 0.05 * (plain - wanted).abs().mean()


@BOTH
@pytest.mark.parametrize("level", LEVELS)
def test_scores_far_apart_leave_the_highest(level, rounds):
    """A maximum that grows late and far: what came before has no weight left, and nothing overflows."""
    paged = Paged(SMALL, ((150, 1),))
    highest = paged.block_RB[0, 140 // 16], 140 % 16
    paged.query_THW[:] = 100.0
    paged.entries[paged.block_RB[0, :10]] = -100.0
    paged.entries[highest] = 100.0
    found = paged.attend(level, rounds=rounds)
    assert torch.equal(found, torch.full_like(found, 100.0))


@BOTH
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("widths", [SMALL, ODD, (24, 64, 8)], ids=["small", "odd", "many heads"])
def test_a_token_has_the_same_bits_in_any_company(level, widths, rounds):
    paged = Paged(widths, ((7, 9), (70, 1), (0, 30), (200, 5)))
    together = paged.attend(level, rounds=rounds)
    token = 0
    for row, (_, count) in enumerate(paged.rows):
        here = together[token:token + count]
        query = paged.query_THW[token:token + count]
        alone = paged.attend(level, rows=slice(row, row + 1), query=query, rounds=rounds)
        assert torch.equal(alone, here), "the row alone"
        for each in range(count):
            assert torch.equal(paged.alone(row, each, level, rounds)[0], here[each]), "the token alone"
        token += count


@BOTH
@pytest.mark.parametrize("level", LEVELS)
def test_bits_do_not_depend_on_the_size_of_blocks(level, rounds):
    results = [Paged(SMALL, ((190, 3),), block_tokens=size).attend(level, rounds=rounds)
               for size in (1, 16, 24, 64, 256)]
    assert all(torch.equal(each, results[0]) for each in results)


@BOTH
@pytest.mark.parametrize("level", LEVELS)
def test_bits_do_not_depend_on_the_number_of_threads(level, rounds, threads):
    decode, prefill = Paged(LARGE, ((300, 3), (40, 1))), expanded(SMALL, 40, 70)
    results = []
    for count in (1, 2, 3, 7):
        threads(count)
        results.append((decode.attend(level, rounds=rounds), expanded_attention(**prefill, rounds=rounds, level=level)))
    assert all(torch.equal(each, first) for result in results
               for each, first in zip(result, results[0], strict=True))


@BOTH
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("widths", "rows", "first_seen"), [
    (LARGE, ((300, 1),), 0), (LARGE, ((127, 1), (0, 0), (65, 1)), 1), (ODD, ((150, 1), (3, 1)), 70),
    (SMALL, ((63, 2),), 0)])
def test_threads_that_share_a_row_leave_its_bits(level, rounds, widths, rows, first_seen, threads):
    paged = Paged(widths, rows)
    threads(1)
    alone = paged.attend(level, first_seen, rounds=rounds)
    for count in (2, 3, 5, 16):
        threads(count)
        assert torch.equal(paged.attend(level, first_seen, rounds=rounds), alone), count


@BOTH
@pytest.mark.parametrize("level", [*LEVELS, -1])
def test_a_token_that_may_see_nothing_gets_zeros(level, rounds):
    paged = Paged(SMALL, ((0, 3),))
    found = paged.attend(level, first_seen=2, rounds=rounds)
    assert not found[:2].any() and found[2].any()


@BOTH
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("position", [66, 67])
def test_an_entry_that_is_not_finite_spoils_those_who_see_it_and_no_others(level, position, rounds):
    paged = Paged(SMALL, ((60, 9), (5, 1)))
    paged.entries[paged.block_RB[0, position // 16], position % 16, 3] = torch.nan
    spoiled = paged.attend(level, rounds=rounds).isnan()
    unspoiled = position - 60
    assert spoiled.all(-1).all(-1).tolist() == [False] * unspoiled + [True] * (9 - unspoiled) + [False]
    assert not spoiled[:unspoiled].any()


def expanded(heads_and_widths, first, count, *, dtype=torch.float32, n=12, v=20):
    """Keys and values as the model has them: parts of one product, after which other rows follow."""
    (heads, latent, rotary), chance = heads_and_widths, generator(first, count)

    def drawn(*shape):
        return torch.randn(*shape, generator=chance).to(dtype)

    key, value = drawn(first + count, heads, n + v).split([n, v], dim=-1)
    return {"query_CHn": drawn(count, heads, n + rotary)[..., :n], "query_CHr": drawn(count, heads, rotary),
            "key_NHn": key, "key_Nr": drawn(first + count, latent + rotary)[:, latent:], "value_NHv": value,
            "first": first, "scale": 0.3}


@BOTH
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 1), (5, 0), (0, 64), (0, 65), (63, 2), (100, 7), (40, 200)])
def test_expanded_attention_is_as_defined(level, first, count, rounds):
    for dtype in FORMATS:
        for widths, n, v in ((SMALL, 16, 32), (ODD, 7, 13)):
            given = expanded(widths, first, count, dtype=dtype, n=n, v=v)
            found, wanted = (expanded_attention(**given, rounds=rounds, level=each) for each in (level, -1))
            assert found.shape == (count, widths[0], v) and found.dtype == dtype
            assert_close(found, wanted, rounds)


@BOTH
@pytest.mark.parametrize("level", LEVELS)
def test_a_prompt_may_be_cut_anywhere(level, rounds):
    """Tokens of a prompt have their bits whatever chunk they came in."""
    whole, cut = expanded(SMALL, 0, 150), 83
    late = {name: each[cut:] if name.startswith("query") else each for name, each in whole.items()} | {"first": cut}
    found, wanted = (expanded_attention(**each, rounds=rounds, level=level) for each in (late, whole))
    assert torch.equal(found, wanted[cut:])


def test_what_does_not_fit_is_refused():
    paged, prefill = Paged(SMALL, ((20, 2), (3, 1))), expanded(SMALL, 3, 4)
    entries, blocks, first, count = paged.entries, paged.block_RB, paged.first_R, paged.count_R

    def attend(query=paged.query_THW, entries=entries, blocks=blocks, first=first, count=count, latent=64):
        return absorbed_attention(query, entries, blocks, first, count, scale=1.0, latent=latent)

    for wrong in (
        lambda: attend(query=paged.query_THW[:2]),
        lambda: attend(query=paged.query_THW[..., 1:]),
        lambda: attend(query=paged.query_THW.double()),
        lambda: attend(entries=entries[:, :, 1:]),
        lambda: attend(blocks=blocks + 100),
        lambda: attend(blocks=blocks - 100),
        lambda: attend(blocks=blocks.int()),
        lambda: attend(blocks=blocks[:1]),
        lambda: attend(first=first + 32),
        lambda: attend(first=first - 21),
        lambda: attend(latent=0),
        lambda: expanded_attention(**prefill | {"first": 4}),
        lambda: expanded_attention(**prefill | {"key_Nr": prefill["key_Nr"][:, 1:]}),
        lambda: expanded_attention(**prefill | {"value_NHv": prefill["value_NHv"].double()}),
    ):
        with pytest.raises(AssertionError):
            wrong()
