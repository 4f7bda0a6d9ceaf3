"""The model's logits equal the reference's, however a prompt is cut; in deterministic mode its bits equal its own."""

import math

import pytest
import torch

from tests.checkpoints import YARN, random_tensors, tiny_config
from tests.engine.model.builders import (
    BLOCK_TOKENS,
    build_model,
    hidden_in_chunks,
    new_cache,
    new_row,
    pack_batch,
    random_tokens,
    relative_error,
    step,
)
from tests.engine.model.reference import build_reference, reference_logits
from tripool.core.errors import ConfigError
from tripool.core.shape import model_shape
from tripool.engine.model import context

# Two orders of summation in float32 over a few layers differ by about 1e-6; the issue asks for 1e-4.
TOLERANCE = 2e-5
ORIGINAL = 64
YARN_40 = YARN | {"factor": 40.0, "original_max_position_embeddings": ORIGINAL}
MSCALES = {
    "1-1": {"mscale": 1.0, "mscale_all_dim": 1.0},
    "0.707-0.707": {"mscale": 0.707, "mscale_all_dim": 0.707},
    "1-0": {"mscale": 1.0, "mscale_all_dim": 0},
    "absent": {},
}
NUM_TOKENS = 230         # well past the original context


def yarn_config(family, mscales, **changes):
    scaling = {key: value for key, value in YARN_40.items() if "mscale" not in key} | MSCALES[mscales]
    return tiny_config(family, rope_scaling=scaling, max_position_embeddings=40 * ORIGINAL, **changes)


@pytest.fixture(scope="module", params=[
    ("v3", "1-1"), ("v3", "0.707-0.707"), ("v3", "1-0"), ("v3", "absent"),
    ("v2", "0.707-0.707"), ("v2", "1-0"), ("v2-lite", "0.707-0.707"), ("v2-lite", "absent"),
], ids=lambda param: "-".join(param))
def compared(request, tmp_path_factory):
    """(model, tokens, the reference's logits) of a family under YaRN."""
    config = yarn_config(*request.param, mtp=1 if request.param[0] == "v3" else 0)
    reference, tensors = build_reference(config, tmp_path_factory.mktemp("checkpoint"))
    tokens = random_tokens(NUM_TOKENS)
    return build_model(config, tensors=tensors), tokens, reference_logits(reference, tokens)


def assert_equal_at_every_position(logits, wanted):
    for position in (0, 1, ORIGINAL // 2, ORIGINAL, 2 * ORIGINAL, wanted.shape[0] - 1):
        assert relative_error(logits[position], wanted[position]) < TOLERANCE, f"position {position}"
    assert relative_error(logits, wanted) < TOLERANCE


def test_prefill_gives_the_references_logits(compared):
    model, tokens, wanted = compared
    hidden = hidden_in_chunks(model, new_cache(model), new_row(tokens), [NUM_TOKENS])
    assert_equal_at_every_position(model.logits(hidden), wanted)


def test_chunked_prefill_gives_the_references_logits(compared):
    model, tokens, wanted = compared
    hidden = hidden_in_chunks(model, new_cache(model), new_row(tokens), [1, 30, 16, 100, NUM_TOKENS - 147])
    assert_equal_at_every_position(model.logits(hidden), wanted)


def test_absorbed_decode_gives_the_references_logits(compared):
    model, tokens, wanted = compared
    for prefilled in (1, 40, 190):
        hidden = hidden_in_chunks(model, new_cache(model), new_row(tokens), [prefilled], num_decoded=36)
        error = relative_error(model.logits(hidden)[prefilled:], wanted[prefilled:prefilled + 36])
        assert error < TOLERANCE, f"after {prefilled} tokens"


def test_a_prefix_computed_for_another_request_gives_the_references_logits(compared):
    model, tokens, wanted = compared
    cache, shared = new_cache(model), 5 * BLOCK_TOKENS
    first = new_row(tokens[:shared] + random_tokens(40, seed=1))
    hidden_in_chunks(model, cache, first, [shared + 40])
    second = new_row(tokens, start_block=30)
    second.blocks[:5] = first.blocks[:5]
    second.num_computed = shared

    hidden = hidden_in_chunks(model, cache, second, [100], num_decoded=4)

    assert relative_error(model.logits(hidden), wanted[shared:shared + 104]) < TOLERANCE


def test_rows_that_decode_and_rows_that_prefill_share_a_batch(compared):
    model, tokens, wanted = compared
    cache = new_cache(model)
    rows = [new_row(tokens, start_block=start) for start in (0, 15, 30)]
    model.forward(step(rows, [70, 20, 3]), cache)

    hidden = model.forward(step(rows, [1, 1, 30], num_decode_rows=2), cache)

    expected = torch.cat([wanted[70:71], wanted[20:21], wanted[3:33]])
    assert relative_error(model.logits(hidden), expected) < TOLERANCE


@pytest.mark.parametrize("blocks_at_once", [1, 5, 8, 100])
def test_without_a_kernel_decode_rows_may_attend_in_groups_of_any_size(monkeypatch, blocks_at_once):
    monkeypatch.setattr(context, "has_kernel", lambda entries: False)
    model = build_model(tiny_config("v3"))
    lengths = (40, 3, 90, 16, 17, 60)
    wanted, cache = [], new_cache(model)
    for index, length in enumerate(lengths):
        alone = new_row(random_tokens(length + 1, seed=index))
        wanted.append(hidden_in_chunks(model, new_cache(model), alone, [length + 1])[-1])
    rows = [new_row(random_tokens(length + 1, seed=index), start_block=10 * index)
            for index, length in enumerate(lengths)]
    model.forward(step(rows, lengths), cache)
    monkeypatch.setattr(context, "GROUP_ELEMENTS", blocks_at_once * BLOCK_TOKENS * model.shape.entry_width)

    hidden = model.forward(step(rows, [1] * 6, num_decode_rows=6), cache)

    assert relative_error(hidden, torch.stack(wanted)) < TOLERANCE


def test_without_yarn_the_logits_are_the_references(tmp_path):
    config = tiny_config("v3")
    reference, tensors = build_reference(config, tmp_path)
    tokens = random_tokens(100)
    model = build_model(config, tensors=tensors)
    hidden = hidden_in_chunks(model, new_cache(model), new_row(tokens), [80], num_decoded=20)
    assert relative_error(model.logits(hidden), reference_logits(reference, tokens)) < TOLERANCE


def test_the_rotary_layout_is_the_checkpoints(tmp_path):
    interleaved, half_split = yarn_config("v3", "1-1"), yarn_config("v3", "1-1", rope_interleave=False)
    tokens = random_tokens(150)
    for stated, other in ((interleaved, half_split), (half_split, interleaved)):
        reference, tensors = build_reference(stated, tmp_path / str(stated.get("rope_interleave", True)))
        wanted = reference_logits(reference, tokens)
        errors = []
        for config in (stated, other):
            model = build_model(config, tensors=tensors)
            hidden = hidden_in_chunks(model, new_cache(model), new_row(tokens), [100], num_decoded=50)
            errors.append(relative_error(model.logits(hidden), wanted))
        assert errors[0] < TOLERANCE
        assert errors[1] > 1e-2, "the other layout must not pass for this one"


def test_attention_bias_and_tied_embeddings_follow_the_reference(tmp_path):
    tokens = random_tokens(60)
    for name, config in (("low-rank", tiny_config("v3", attention_bias=True, tie_word_embeddings=True)),
                         ("full-rank", tiny_config("v2-lite", attention_bias=True))):
        reference, tensors = build_reference(config, tmp_path / name)
        model = build_model(config, tensors=tensors)
        hidden = hidden_in_chunks(model, new_cache(model), new_row(tokens), [50], num_decoded=10)
        assert relative_error(model.logits(hidden), reference_logits(reference, tokens)) < TOLERANCE, name


def test_bfloat16_stays_near_float32():
    config = tiny_config("v3", mtp=1)
    tokens = random_tokens(60)
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(config, dtype=dtype)
        hidden = hidden_in_chunks(model, new_cache(model), new_row(tokens), [50], num_decoded=10)
        logits.append(model.logits(hidden))
    assert logits[1].dtype == torch.float32
    # bfloat16 keeps 8 bits; a pick near the border may differ, which moves single rows: compare the typical one.
    difference = (logits[0] - logits[1]).abs().amax(-1) / logits[0].abs().amax(-1)
    assert float(difference.median()) < 0.05


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_without_tokens_is_an_ordinary_step(deterministic):
    model = build_model(tiny_config("v3", mtp=1), deterministic=deterministic)
    cache = new_cache(model, garbage=False)
    hidden = model.forward(pack_batch([]), cache)
    assert hidden.shape == (0, model.shape.hidden_size)
    assert model.logits(hidden).shape == (0, model.shape.vocab_size)
    assert not cache.data.any()


def test_a_row_without_tokens_changes_nothing():
    model = build_model(tiny_config("v3", mtp=1))
    cache, tokens = new_cache(model), random_tokens(40)
    wanted = hidden_in_chunks(model, new_cache(model), new_row(tokens), [40])
    resting, working = new_row(random_tokens(20, seed=2)), new_row(tokens, start_block=10)
    model.forward(step([resting, working], [20, 10]), cache)

    hidden = model.forward(step([resting, working], [0, 30]), cache)

    assert relative_error(hidden, wanted[10:]) < TOLERANCE


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_another_request_left_behind_never_reaches_a_row(deterministic):
    model = build_model(tiny_config("v3", mtp=1), deterministic=deterministic)
    cache = new_cache(model)                        # every block holds not-a-number
    long, short = new_row(random_tokens(90)), new_row(random_tokens(10, seed=1), start_block=20)
    model.forward(step([long, short], [80, 5]), cache)
    tokens_and_tables = [row.take(1) for row in (long, short)]
    foreign = 50
    padded = [(tokens, first, blocks + [foreign] * (6 - len(blocks))) for tokens, first, blocks in tokens_and_tables]

    hidden = model.forward(pack_batch(padded, num_decode_rows=2), cache)

    assert torch.isfinite(hidden).all()
    assert torch.isnan(cache.data[foreign]).all()


def test_the_unwritten_end_of_a_block_is_zeros():
    model = build_model(tiny_config("v3", mtp=1))
    cache, row = new_cache(model), new_row(random_tokens(40))
    hidden_in_chunks(model, cache, row, [20], num_decoded=2)
    for layer in range(model.shape.num_cached_layers):
        entries = cache.entries(layer)[row.blocks[1]]
        assert entries[:6].any(-1).all()
        assert not entries[6:].any()


# ---- MTP entries


def slow_mtp_entry(config, tensors, hidden, tokens, position):
    """By the definition: this token's embedding and the final hidden state before it, joined, normed, projected."""
    name, shape = f"model.layers.{config['num_hidden_layers']}", model_shape(config)

    def norm(x, weight):
        return x / torch.sqrt((x * x).mean() + shape.rms_norm_eps) * tensors[weight]

    embedding = tensors["model.embed_tokens.weight"][tokens[position]]
    before = hidden[position - 1] if position else torch.zeros(shape.hidden_size)
    joined = torch.cat([norm(embedding, f"{name}.enorm.weight"), norm(before, f"{name}.hnorm.weight")])
    x = norm(tensors[f"{name}.eh_proj.weight"] @ joined, f"{name}.input_layernorm.weight")
    entry = tensors[f"{name}.self_attn.kv_a_proj_with_mqa.weight"] @ x
    latent = norm(entry[:shape.kv_lora_rank], f"{name}.self_attn.kv_a_layernorm.weight")
    rotated = []
    for pair in range(shape.qk_rope_head_dim // 2):
        angle = position * shape.rope_theta ** (-2 * pair / shape.qk_rope_head_dim)
        a, b = entry[shape.kv_lora_rank + 2 * pair:shape.kv_lora_rank + 2 * pair + 2].tolist()
        rotated += [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
    return torch.cat([latent, torch.tensor(rotated)])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("chunks", "num_decoded"), [([45], 0), ([7, 9, 20, 9], 0), ([10, 7], 28), ([1], 44)])
def test_mtp_entries_follow_their_definition(chunks, num_decoded, deterministic):
    config = tiny_config("v3", mtp=1)
    tensors, tokens = random_tensors(config), random_tokens(45)
    model = build_model(config, tensors=tensors, deterministic=deterministic)
    cache, row = new_cache(model), new_row(tokens)

    hidden = hidden_in_chunks(model, cache, row, chunks, num_decoded)

    entries = cache.entries(model.shape.num_layers)[row.blocks].flatten(0, 1)
    wanted = torch.stack([slow_mtp_entry(config, tensors, hidden, tokens, position) for position in range(45)])
    assert relative_error(entries[:45], wanted) < TOLERANCE


def test_mtp_entries_of_rows_in_one_batch_do_not_mix():
    config = tiny_config("v3", mtp=1)
    tensors = random_tensors(config)
    model = build_model(config, tensors=tensors)
    cache = new_cache(model)
    rows = [new_row(random_tokens(40, seed=seed), start_block=10 * seed) for seed in range(3)]
    hidden_of_row = [[], [], []]
    for counts, num_decode_rows in (([20, 16, 5], 0), ([1, 1, 30], 2), ([1, 0, 5], 0)):
        hidden = model.forward(step(rows, counts, num_decode_rows), cache)
        for index, part in enumerate(hidden.split(counts)):
            hidden_of_row[index].append(part)
    for index, row in enumerate(rows):
        hidden = torch.cat(hidden_of_row[index])
        entries = cache.entries(model.shape.num_layers)[row.blocks].flatten(0, 1)
        for position in range(row.num_computed):
            wanted = slow_mtp_entry(config, tensors, hidden, row.tokens, position)
            assert relative_error(entries[position], wanted) < TOLERANCE, f"row {index}, position {position}"


def test_a_block_keeps_the_hidden_state_of_its_last_token():
    model = build_model(tiny_config("v3", mtp=1))
    cache, row = new_cache(model), new_row(random_tokens(60))
    hidden = hidden_in_chunks(model, cache, row, [40], num_decoded=3)
    for block, last in zip(row.blocks, (15, 31, 42), strict=False):
        assert torch.equal(cache.hidden[block], hidden[last])


def test_more_than_one_mtp_layer_is_refused():
    with pytest.raises(ConfigError, match="num_nextn_predict_layers is 2"):
        build_model(tiny_config("v3", mtp=2))


# ---- deterministic mode: not near, but the same bits


@pytest.fixture(scope="module", params=["v3", "v2", "v2-lite"])
def deterministic(request):
    """(model, tokens, hidden states and entries of the prompt computed alone and at once)."""
    model = build_model(yarn_config(request.param, "0.707-0.707", mtp=1 if request.param == "v3" else 0),
                        deterministic=True)
    tokens = random_tokens(120, seed=3)
    cache, row = new_cache(model), new_row(tokens)
    hidden = hidden_in_chunks(model, cache, row, [120])
    return model, tokens, hidden, cache.data[row.blocks].clone()


@pytest.mark.parametrize(("chunks", "num_decoded"), [
    ([1, 2, 50, 67], 0), ([16] * 7 + [8], 0), ([119], 1), ([100], 20), ([15, 2], 103)])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(deterministic, chunks, num_decoded):
    model, tokens, wanted, wanted_blocks = deterministic
    cache, row = new_cache(model), new_row(tokens)
    hidden = hidden_in_chunks(model, cache, row, chunks, num_decoded)
    assert torch.equal(hidden, wanted)
    assert torch.equal(model.logits(hidden[-1:]), model.logits(wanted)[-1:])
    assert torch.equal(cache.data[row.blocks], wanted_blocks)


def test_bits_do_not_depend_on_the_company(deterministic):
    model, tokens, wanted, wanted_blocks = deterministic
    cache = new_cache(model, num_blocks=200)
    rows = [new_row(random_tokens(110, seed=seed), start_block=10 * seed) for seed in range(6)]
    rows.insert(3, new_row(tokens, start_block=100))
    model.forward(step(rows, [13, 40, 1, 30, 7, 22, 60]), cache)
    first = model.forward(step(rows, [1, 1, 1, 1, 1, 1, 1], num_decode_rows=7), cache)
    second = model.forward(step(rows, [1, 1, 1, 70, 5, 0, 40], num_decode_rows=3), cache)
    third = model.forward(step(rows, [0, 0, 0, 19, 0, 0, 0]), cache)

    assert torch.equal(torch.cat([first[3:4], second[3:73], third]), wanted[30:])
    assert torch.equal(cache.data[rows[3].blocks], wanted_blocks)


def test_bits_do_not_depend_on_a_cached_prefix(deterministic):
    model, tokens, wanted, _ = deterministic
    cache, shared = new_cache(model), 4 * BLOCK_TOKENS
    first = new_row(tokens[:shared] + random_tokens(30, seed=9))
    hidden_in_chunks(model, cache, first, [10, shared + 20])
    second = new_row(tokens, start_block=20)
    second.blocks[:4] = first.blocks[:4]
    second.num_computed = shared
    assert torch.equal(hidden_in_chunks(model, cache, second, [50], num_decoded=6), wanted[shared:])


def test_bits_do_not_depend_on_the_number_of_threads(deterministic):
    model, tokens, wanted, _ = deterministic
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(hidden_in_chunks(model, new_cache(model), new_row(tokens), [30], 2), wanted[:32])
    finally:
        torch.set_num_threads(threads)


def test_deterministic_work_is_float32():
    with pytest.raises(ConfigError, match="deterministic mode needs float32"):
        build_model(tiny_config("v3"), deterministic=True, dtype=torch.bfloat16)
