"""The forms of attention are one mathematics: each equals a definition that expands everything."""

import pytest
import torch

from tests.checkpoints import tiny_config, write_checkpoint
from tests.engine.model.builders import (
    BLOCK_TOKENS,
    build_model,
    new_cache,
    new_row,
    random_tokens,
    relative_error,
    step,
)
from tripool.engine import element_type
from tripool.engine.load import load_model
from tripool.engine.model import context, mla
from tripool.engine.model.layers import softmax_scale
from tripool.engine.ops import native
from tripool.engine.ops.rms_norm import rms_norm

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["v3", "v2", "v2-lite", "v3-int8"])
def attention_over_a_prompt(request, tmp_path_factory):
    """(model, its first attention, a cache that holds a prompt, the prompt's row, queries' inputs)."""
    if request.param.endswith("int8"):
        folder = tmp_path_factory.mktemp("model")
        write_checkpoint(folder, tiny_config("v3"), dtype="int8")
        model = load_model(folder, dtype="float32").model
    else:
        model = build_model(tiny_config(request.param))
    cache, row = new_cache(model), new_row(random_tokens(200))
    model.forward(step([row], [200]), cache)
    inputs = rms_norm(model.embed_VD[row.tokens].float(), model.layers[0].input_norm_D, model.shape.rms_norm_eps)
    return model, model.layers[0].attention, cache, row, inputs


def defined(model, attention, cache, row, query_Hx, position):
    """One query over its context: keys and values of every head written out."""
    shape = model.shape
    entries = cache.entries(0)[row.blocks].flatten(0, 1)[:position + 1]
    latent, rotary = entries.split([shape.kv_lora_rank, shape.qk_rope_head_dim], dim=-1)
    keys, values = attention.expansion.keys_and_values(latent)
    results = []
    for head in range(shape.num_heads):
        key, value = keys[:, head], values[:, head]
        logits = torch.cat([key, rotary], dim=-1) @ query_Hx[head] * softmax_scale(shape)
        results.append(logits.softmax(-1) @ value)
    return torch.stack(results)


CHUNKS = [(0, 200), (0, 1), (31, 3), (32, 31), (100, 40), (48, 150), (199, 1)]


@pytest.fixture(params=[True, False], ids=["kernel", "torch"])
def compiled(request, monkeypatch):
    """Compiled kernels run, or torch does."""
    if not request.param:
        monkeypatch.setattr(context, "has_kernel", lambda entries: False)
    elif not native.is_built():
        pytest.skip("the native module is not built")
    return request.param


@pytest.mark.parametrize(("first", "count"), CHUNKS)
def test_a_chunk_attends_as_defined_in_every_form(attention_over_a_prompt, compiled, first, count):
    model, attention, cache, row, inputs = attention_over_a_prompt
    entries, blocks = cache.entries(0), row.blocks[:(first + count - 1) // BLOCK_TOKENS + 1]
    batch = step([type(row)(row.tokens[:first + count], blocks, num_computed=first)], [count])
    forward = context.forward_context(batch, model.rotary, entries, one_by_one=False)
    exact = context.forward_context(batch, model.rotary, entries, one_by_one=True)
    projected_THx, _ = attention.project(inputs[first:first + count])
    query_THn, query_THr = projected_THx.tensor_split([model.shape.qk_nope_head_dim], dim=-1)
    query_THr = attention.rotate(query_THr, forward.rotary_TP)
    query_THx, query_THW = torch.cat([query_THn, query_THr], -1), attention.absorb(query_THn, query_THr)
    wanted = torch.stack([defined(model, attention, cache, row, query_THx[i], first + i) for i in range(count)])

    expanded = attention._expanded(query_THn, query_THr, forward.rows[0], entries)
    absorbed = attention.expand_value(attention._absorbed_chunk(query_THW, forward.rows[0], entries))
    alone = attention.expand_value(attention._paged(query_THW, exact.paged, entries) if compiled else
                                   attention._one_by_one(query_THW, exact.rows, entries))

    assert (forward.rows[0].paged is not None) == (exact.paged is not None) == compiled
    for form in (expanded, absorbed, alone):
        assert relative_error(form, wanted) < TOLERANCE


def test_a_short_chunk_behind_a_prefix_is_absorbed_and_a_long_one_expanded(monkeypatch, compiled):
    model = build_model(tiny_config("v3", num_hidden_layers=1))
    model.one_call = model.layers[0].attention_call = None
    attention, cache = model.layers[0].attention, new_cache(model)
    seen = []
    decoding = "_paged" if compiled else "_absorbed"
    for name in ("_absorbed_chunk", "_expanded", decoding):
        def noted(*args, form=getattr(attention, name), name=name):
            seen.append(name)
            return form(*args)

        monkeypatch.setattr(attention, name, noted)
    row = new_row(random_tokens(200))
    for count, decode in ((5, 0), (5, 0), (100, 0), (1, 1)):
        model.forward(step([row], [count], decode), cache)
    chunk = ["_absorbed_chunk", "_paged"] if compiled else ["_absorbed_chunk"]
    assert seen == ["_expanded", *chunk, "_expanded", decoding]


@pytest.mark.skipif(not native.is_built(), reason="the native module is not built")
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_all_forms_round_where_rows_are_rounded(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(element_type, "processor_flags", lambda: set(element_type.BF16_PRODUCTS))
    write_checkpoint(tmp_path, tiny_config("v3", num_hidden_layers=1))
    model, asked = load_model(tmp_path, dtype=dtype).model, []
    model.one_call = model.layers[0].attention_call = None
    for name in ("absorbed_attention", "expanded_attention"):
        def noted(*args, form=getattr(mla, name), name=name, **named):
            asked.append((name, named["rounds"]))
            return form(*args, **named)

        monkeypatch.setattr(mla, name, noted)
    cache, row = new_cache(model), new_row(random_tokens(110))
    for count, decode in ((100, 0), (5, 0), (1, 1)):
        model.forward(step([row], [count], decode), cache)
    rounds = dtype == "auto"
    assert asked == [("expanded_attention", rounds), ("absorbed_attention", rounds), ("absorbed_attention", rounds)]
