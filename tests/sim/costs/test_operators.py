"""Operators against numbers that were reckoned by hand from the paper and from the model's published sizes."""

import dataclasses

import numpy as np
import pytest

from tripool.core.errors import ConfigError
from tripool.core.placement import even_geometry
from tripool.sim.costs.instance import Instance
from tripool.sim.costs.models import known_models, read_shape
from tripool.sim.costs.residuals import Residuals
from tripool.sim.costs.state import StepState
from tripool.sim.costs.states import NONE, decode_state, prefill_state
from tripool.sim.costs.steps import OperatorCosts
from tripool.sim.costs.work import Numbers, work_of
from tripool.sim.hardware.description import DecodeSplit, known_hardware, read_hardware

US = 1e-6
R1 = read_shape("deepseek-r1")
CM384 = read_hardware("cloudmatrix384")
DECODE = even_geometry(320, 256, num_redundant=32, num_shared_copies=32)
PREFILL = even_geometry(32, 256, num_redundant=32)


def decode(ranks: int = 320, geometry=DECODE, shape=R1, hardware=CM384, **how) -> OperatorCosts:
    options = {name: how.pop(name) for name in ("level", "residuals") if name in how}
    return OperatorCosts(Instance(shape, hardware, ranks, geometry, **how), **options)


def seconds(costs: OperatorCosts, state: StepState) -> float:
    return costs.step_time(state).total_s


def part(costs: OperatorCosts, state: StepState, name: str) -> float:
    return sum(each.seconds for each in costs.step_time(state).parts if each.name == name)


# ---------------------------------------------------------------- arithmetic


def test_the_weights_of_attention_are_those_of_the_published_model():
    work = work_of(R1)
    assert work.down_params == 11_010_048 + 4_128_768
    assert work.up_params == 37_748_736 + 16_777_216
    assert work.prolog_params + work.decode_output_params == 187_105_280
    assert work.expert_params == 44_040_192 and work.dense_params == 396_361_728


def test_one_query_token_costs_so_many_operations_for_each_token_it_sees():
    work = work_of(R1)
    assert work.absorbed_operations == 2 * 128 * (576 + 512)
    assert 48 * 2 * 4096 * work.absorbed_operations == pytest.approx(109.5e9, rel=1e-3)     # 109.5 GFLOP
    assert work.expanded_operations == 2 * 128 * (192 + 128)


def test_a_cached_token_takes_the_published_bytes():
    instance = Instance(R1, CM384, 320, DECODE)
    assert instance.entry_bytes() / 62 * 61 == 70_272


# ---------------------------------------------------------------- decode


def test_the_attention_core_of_48_requests_with_a_draft_takes_445_us():
    stages = decode().decode_stages(decode_state(320, 48, 4096, drafts=1))
    assert stages.attention["attention core"] == pytest.approx(445 * US, rel=0.01)


def test_reading_the_weights_of_attention_takes_139_us():
    stages = decode().decode_stages(decode_state(320, 24, 4096))
    assert stages.attention["MLAProlog"] + stages.attention["output projection"] == pytest.approx(139 * US, rel=0.01)


def test_a_short_context_waits_for_cache_entries_and_a_long_one_for_products():
    """Without drafts and with two of three cores the core still computes for longer than it reads; with a faster die
    it would wait for 226 MB at 1,346 GB/s."""
    fast = dataclasses.replace(CM384, die=dataclasses.replace(CM384.die, peak_16bit_tflops=3760))
    stages = decode(hardware=fast).decode_stages(decode_state(320, 48, 4096, drafts=1))
    assert stages.attention["attention core"] == pytest.approx(168 * US, rel=0.01)


def fixed_split() -> OperatorCosts:
    return decode(hardware=dataclasses.replace(CM384, decode_split=DecodeSplit(16, 8)))


def test_two_microbatches_read_weights_twice_and_share_the_cores():
    stages = fixed_split().decode_stages(decode_state(320, 48, 4096, drafts=1, microbatches=2))
    assert stages.attention["MLAProlog"] + stages.attention["output projection"] == pytest.approx(278 * US, rel=0.01)
    assert stages.attention["attention core"] == pytest.approx(2 * 334 * US, rel=0.01)      # on 16 of 24 cores
    assert stages.layer_s == max(stages.streams)
    assert sum(stages.listed().values()) == pytest.approx(stages.layer_s)


def test_what_runs_beside_the_longer_stream_is_not_listed():
    costs = fixed_split()
    state = decode_state(320, 48, 4096, drafts=1, microbatches=2)
    assert part(costs, state, "dispatch") == 0.0
    short = decode_state(320, 48, 128, drafts=1, microbatches=2)
    assert part(costs, short, "dispatch") > 0.0 and part(costs, short, "MLAProlog") < part(costs, state, "MLAProlog")


@pytest.mark.parametrize("context", [16, 1024, 4096, 32768])
def test_cores_are_divided_so_that_no_other_division_is_faster(context):
    state = decode_state(320, 48, context, drafts=1, microbatches=2)
    chosen = decode().decode_stages(state)
    others = [decode(hardware=dataclasses.replace(CM384, decode_split=DecodeSplit(cores, 24 - cores)))
              .decode_stages(state).layer_s for cores in range(1, 24)]
    assert chosen.layer_s == pytest.approx(min(others))
    assert others.index(min(others)) + 1 == chosen.attention_cores


def test_the_exchange_at_the_measured_batch_takes_the_measured_time():
    for op, ranks, measured in (("dispatch", 8, 116), ("dispatch", 256, 152), ("combine", 64, 150)):
        geometry = even_geometry(ranks, 256)
        exchange = decode(ranks, geometry)._exchange
        assert exchange.fused_s(op, 128) == pytest.approx(measured * US, rel=1e-6)


def test_an_exchange_without_tokens_still_tells_every_peer():
    exchange = decode()._exchange
    assert exchange.fused_s("dispatch", 0) == pytest.approx(3 * 2.1 * US)
    assert decode(1, even_geometry(1, 256))._exchange.fused_s("dispatch", 100) == 0.0


def test_everybody_waits_for_the_rank_with_the_longest_contexts():
    costs, even = decode(), decode_state(320, 48, 4096)
    contexts = even.context_R.copy()
    contexts[17] *= 2
    uneven = dataclasses.replace(even, context_R=contexts)
    slow, usual = costs.decode_stages(uneven), costs.decode_stages(even)
    assert slow.attention["attention core"] == pytest.approx(2 * usual.attention["attention core"])
    assert slow.attention_mean_s == pytest.approx(usual.attention_mean_s * (1 + 1 / 320), rel=0.01)


def test_a_draft_adds_a_layer_and_a_head():
    costs = decode()
    plain, drafting = decode_state(320, 48, 4096), decode_state(320, 48, 4096, drafts=1)
    layer = costs.decode_stages(drafting).layer_s
    assert part(costs, drafting, "MTP layer") == pytest.approx(layer + 2 * 7168**2 / 1346e9, rel=0.02)
    assert part(costs, drafting, "head") == pytest.approx(2 * part(costs, plain, "head"))
    assert part(costs, decode_state(320, 48, 4096, drafts=3), "head") == pytest.approx(4 * part(costs, plain, "head"))


def test_a_cpu_that_launches_every_graph_costs_its_launches():
    told, alone = decode(device_sampling=False), decode()
    state = decode_state(320, 48, 4096, drafts=1)
    assert seconds(told, state) - seconds(alone, state) == pytest.approx(2 * 0.7e-3)


def test_residuals_are_parts_of_their_own():
    costs = decode(residuals=Residuals(layer_overhead=0.5, step_overhead_ms=2.0))
    state = decode_state(320, 48, 4096)
    bare = {each.name: each.seconds for each in decode().step_time(state).parts}
    breakdown = costs.step_time(state)
    by_name = {each.name: each for each in breakdown.parts}
    assert by_name["layer overhead"].level == by_name["step overhead"].level == "residual"
    assert by_name["step overhead"].seconds == 2e-3
    in_layers = sum(value for name, value in bare.items() if name not in ("head", "sampling"))
    assert by_name["layer overhead"].seconds == pytest.approx(0.5 * in_layers)
    assert {name: by_name[name].seconds for name in bare} == pytest.approx(bare)


def test_what_uneven_loads_cost_is_a_part_of_its_own():
    even, uneven = (decode(32, PREFILL, residuals=Residuals(expert_skew=skew)) for skew in (0.0, 2.0))
    for state in (decode_state(32, 48, 1024), prefill_state(32, 1, 2048)):
        added = part(uneven, state, "expert skew")
        assert added > 0.0 and part(even, state, "expert skew") == 0.0
        assert part(uneven, state, "expert FFN") == pytest.approx(part(even, state, "expert FFN"))
        assert {each.level for each in uneven.step_time(state).parts if each.name == "expert skew"} == {"residual"}


def test_the_speed_of_light_is_faster_and_says_so():
    fast, real = decode(level="speed of light", residuals=Residuals(layer_overhead=9.0)), decode()
    for state in (decode_state(320, 48, 4096, drafts=1), decode_state(320, 4, 512)):
        assert seconds(fast, state) < seconds(real, state)
        assert {each.level for each in fast.step_time(state).parts} == {"speed of light"}


# ---------------------------------------------------------------- prefill


def test_prefill_of_4096_tokens_computes_half_a_square_of_pairs():
    layer = decode(32, PREFILL).prefill_layer(prefill_state(32, 2, 4096))
    operations = 2 * 4096 * 4097 / 2 * 2 * 128 * 320
    assert layer.attention["attention core"] == pytest.approx(operations / 245.9e12, rel=1e-3)      # 5.6 ms
    matrices = 2 * 187_105_280 * 8192 / (0.806 * 752e12)
    assert sum(layer.attention[name] for name in ("down projections", "up projections", "output projection")) \
        == pytest.approx(matrices, rel=0.01)


def test_sequence_parallel_attention_is_even_whatever_the_lengths():
    costs = decode(32, PREFILL, sequence_parallel=True)
    even = prefill_state(32, 1, 4096)
    lengths = np.array([8192 if rank % 2 else 0 for rank in range(32)])
    uneven = dataclasses.replace(even, chunk_tokens_C=lengths)
    one, other = costs.prefill_layer(even), costs.prefill_layer(uneven)
    assert one.attention["down projections"] == other.attention["down projections"]
    alone = decode(32, PREFILL).prefill_layer(uneven)
    assert alone.attention["down projections"] == pytest.approx(2 * other.attention["down projections"], rel=0.02)


def test_the_two_collectives_of_sequence_parallel_attention_carry_what_was_down_projected_and_the_heads():
    layer = decode(32, PREFILL, sequence_parallel=True).prefill_layer(prefill_state(32, 2, 4096))
    gathered = 32 * 8192 * (1536 + 576 * 2) * 31 / 32
    heads = 8192 * 128 * 128 * 2 * 31 / 32
    assert layer.attention["all-gather"] == pytest.approx(gathered / 135e9 + 20 * US)
    assert layer.attention["all-to-all"] == pytest.approx(heads / 135e9 + 20 * US)


def test_a_cached_prefix_is_seen_and_expanded_but_not_computed():
    costs = decode(32, PREFILL)
    whole, rest = (costs.prefill_layer(prefill_state(32, 2, 4096, cached=cached)) for cached in (0, 3072))
    assert rest.attention["down projections"] == pytest.approx(whole.attention["down projections"] / 4, rel=0.03)
    assert rest.attention["attention core"] > whole.attention["attention core"] / 4
    assert rest.attention["up projections"] > whole.attention["up projections"] / 4


def test_with_two_microbatches_the_exchange_of_a_prefill_runs_beside_the_cores():
    costs = decode(32, PREFILL)
    one, two = (costs.prefill_layer(prefill_state(32, 2, 4096, microbatches=count)) for count in (1, 2))
    assert {"dispatch", "combine"} <= set(one.experts) and two.experts["exchange, left over"] == 0.0
    assert seconds(costs, prefill_state(32, 2, 4096, microbatches=2)) < seconds(costs, prefill_state(32, 2, 4096))


def test_vector_cores_lay_tokens_out_beside_matrix_cores_if_the_instance_is_built_so():
    state = prefill_state(32, 2, 4096, microbatches=2)
    inside, beside = (decode(32, PREFILL, vector_routing=each) for each in (False, True))
    assert seconds(inside, state) - seconds(beside, state) == pytest.approx(part(inside, state, "routing"))
    double, single = (part(each, prefill_state(32, 2, 4096), "routing") for each in (inside, beside))
    assert single * 1345.6e9 == pytest.approx(58 * 8192 * (8 * 3 + 9 * 2) * 7168, rel=1e-3)
    assert double > 2 * single


def test_on_gpus_the_exchange_of_a_prefill_takes_cores():
    h800 = read_hardware("h800")
    costs = decode(32, even_geometry(32, 256, num_redundant=32, num_groups=8, num_nodes=4), hardware=h800)
    one, two = (costs.prefill_layer(prefill_state(32, 4, 4096, microbatches=count)) for count in (1, 2))
    assert two.attention["attention core"] == pytest.approx(one.attention["attention core"] * 132 / 108)


# ---------------------------------------------------------------- shapes of instances


def test_one_rank_attention_and_320_ranks_of_experts_is_the_usual_shape():
    instance = Instance(R1, CM384, 320, DECODE)
    assert instance.shared_is_placed and instance.num_moe_layers == 58
    assert seconds(OperatorCosts(instance), decode_state(320, 48, 4096, drafts=1)) > 0.02


@pytest.mark.parametrize("ranks", [3, 24, 100, 300])
def test_ranks_that_do_not_divide_the_experts_work_too(ranks):
    geometry = even_geometry(ranks, 256, num_redundant=7 if ranks < 256 else ranks - 256)
    costs = decode(ranks, geometry)
    assert costs._balance.even >= 1.0
    assert seconds(costs, decode_state(ranks, 8, 1024)) > seconds(costs, decode_state(ranks, 4, 1024))


def test_a_step_without_rows_costs_its_flags_and_its_overhead():
    state = decode_state(320, 0, 0)
    flags = 58 * 2 * 3 * 2.1e-6            # in each layer with experts, of dispatch and combine
    assert seconds(decode(), state) == pytest.approx(flags)
    assert seconds(decode(residuals=Residuals(step_overhead_ms=1.0)), state) == pytest.approx(1e-3 + flags)


def test_ranks_without_rows_take_part():
    rows = np.zeros(320, np.int64)
    rows[5] = 48
    state = StepState(rows, rows * 4096, np.zeros(320, np.int64), NONE, NONE, NONE)
    assert 0.0 < seconds(decode(), state) < seconds(decode(), decode_state(320, 48, 4096))


def test_a_dense_model_has_no_exchange():
    dense = dataclasses.replace(R1, num_routed_experts=0, num_shared_experts=0, first_dense_layers=61)
    costs = decode(4, None, shape=dense)
    names = {each.name for each in costs.step_time(decode_state(4, 8, 1024, drafts=1)).parts}
    assert {"MLAProlog", "dense FFN", "MTP layer"} <= names and not names & {"gate", "dispatch", "expert FFN"}
    assert seconds(costs, prefill_state(4, 1, 512)) > 0.0


# ---------------------------------------------------------------- rows and chunks in one step


def both(rows: StepState, chunks: StepState) -> StepState:
    return StepState(rows.rows_R, rows.context_R, rows.drafts_R, chunks.chunk_rank_C, chunks.chunk_first_C,
                     chunks.chunk_tokens_C, rows.num_microbatches)


@pytest.mark.parametrize("how", [{}, {"sequence_parallel": True, "vector_routing": True},
                                 {"residuals": Residuals(0.5, 2.0, 2.0)}, {"level": "speed of light"}])
@pytest.mark.parametrize(("num_rows", "tokens"), [(1, 16), (64, 64), (96, 16), (8, 512), (96, 2048)])
def test_a_step_of_rows_and_chunks_takes_longer_than_each_and_less_than_both(how, num_rows, tokens):
    costs = decode(32, PREFILL, **how)
    rows, chunks = decode_state(32, num_rows, 1024, drafts=1), prefill_state(32, 1, tokens)
    alone = [seconds(costs, each) for each in (rows, chunks)]

    assert max(alone) < seconds(costs, both(rows, chunks)) < 0.99 * sum(alone)


def test_weights_that_rows_and_chunks_need_are_read_once():
    """Few tokens of both: each product waits for its weights, of which only kv_b is there in two forms."""
    costs, work = decode(32, PREFILL), work_of(R1)
    rows, chunks = decode_state(32, 4, 1024), prefill_state(32, 1, 16)
    layer = costs.prefill_layer(both(rows, chunks))

    products = sum(layer.attention[name] for name in ("down projections", "up projections", "MLAProlog",
                                                      "output projection"))
    once = work.down_params + work.up_params + work.output_params
    twice = work.absorbed_key_params + work.absorbed_value_params
    assert products == pytest.approx((once + twice) / 1345.6e9, rel=1e-3)
    apart = [costs.prefill_layer(chunks).experts["expert FFN"], costs.decode_stages(rows).experts_s]
    assert layer.experts["expert FFN"] == pytest.approx(max(apart), rel=0.01)


def test_attention_cores_of_rows_and_chunks_run_one_after_the_other():
    costs = decode(32, PREFILL)
    rows, chunks = decode_state(32, 48, 4096), prefill_state(32, 2, 1024)
    cores = [costs.decode_stages(rows).attention["attention core"],
             costs.prefill_layer(chunks).attention["attention core"]]
    assert costs.prefill_layer(both(rows, chunks)).attention["attention core"] == pytest.approx(sum(cores))


def test_tokens_of_rows_and_chunks_travel_together():
    costs = decode(32, PREFILL)
    rows, chunks = decode_state(32, 48, 4096), prefill_state(32, 1, 256)
    for op in ("dispatch", "combine"):
        alone = [part(costs, each, op) for each in (rows, chunks)]
        saved = 58 * 3 * 2.1 * US          # the flags of an exchange of their own
        assert part(costs, both(rows, chunks), op) == pytest.approx(sum(alone) - saved, rel=0.01)


def test_the_rank_with_most_of_rows_and_chunks_decides():
    costs = decode(32, PREFILL)
    on_first, on_last = np.zeros(32, np.int64), np.zeros(32, np.int64)
    on_first[0] = on_last[31] = 64
    chunk = StepState(on_first * 0, on_first * 0, on_first * 0, np.array([31]), np.array([0]), np.array([256]))
    apart, together = (both(StepState(rows, rows * 1024, rows * 0, NONE, NONE, NONE), chunk)
                       for rows in (on_first, on_last))
    assert seconds(costs, together) > 1.05 * seconds(costs, apart)


def test_beside_chunks_rows_draft_as_alone_and_are_launched_and_sampled_with_them():
    costs = decode(32, PREFILL, device_sampling=False, residuals=Residuals(step_overhead_ms=2.0))
    rows, chunks = decode_state(32, 48, 1024, drafts=1), prefill_state(32, 2, 256)
    mixed = both(rows, chunks)
    for name in ("MTP layer", "host launch", "step overhead"):
        assert part(costs, mixed, name) == pytest.approx(part(costs, rows, name))
    assert part(costs, mixed, "sampling") == pytest.approx(part(costs, rows, "sampling")
                                                           + part(costs, chunks, "sampling"))


def test_two_microbatches_cut_rows_and_chunks_as_a_prefill():
    costs = decode(32, PREFILL)
    one, two = (both(decode_state(32, 32, 1024, microbatches=count), prefill_state(32, 1, 2048))
                for count in (1, 2))
    assert costs.prefill_layer(two).experts["exchange, left over"] == 0.0
    assert seconds(costs, two) < seconds(costs, one)


# ---------------------------------------------------------------- memory


def test_the_decode_die_of_the_paper_holds_what_it_holds():
    instance = Instance(R1, CM384, 320, DECODE)
    assert instance.exchange_buffer_bytes(96) == 645 * 2**20                # section 4.2.1: 225 MB and 420 MB
    assert instance.weight_bytes() / 1e9 == pytest.approx(15.3 + 3.7 + 0.33 + 0.43, rel=0.02)
    instance.check_fits(48 * 4352, 96)


def test_a_model_that_does_not_fit_is_told_with_the_bytes_of_a_die():
    with pytest.raises(ConfigError, match=r"each die of cloudmatrix384 has 64\.0 GB and 8 rank\(s\) need 10\d\.\d GB "
                                          r"\(weights 10\d\.\d, exchange buffers"):
        Instance(R1, CM384, 8, even_geometry(8, 256)).check_fits(4096, 16)
    assert Instance(R1, CM384, 8, even_geometry(8, 256)).cache_tokens(16) == 0


def test_an_instance_larger_than_the_machine_is_refused():
    with pytest.raises(ConfigError, match="ranks is 800, and cloudmatrix384 has 768 dies"):
        Instance(R1, CM384, 800, even_geometry(800, 256, num_redundant=544))
    with pytest.raises(ConfigError, match="geometry is for 32 ranks, the instance has 320"):
        Instance(R1, CM384, 320, PREFILL)
    with pytest.raises(ConfigError, match="geometry is missing"):
        Instance(R1, CM384, 4)


def test_an_int8_latent_takes_half_the_room_and_half_the_time():
    small = Numbers(latent_bytes=1)
    assert Instance(R1, CM384, 320, DECODE, small).entry_bytes() == 62 * (512 + 128)
    state = decode_state(320, 48, 4096, drafts=1)
    whole, half = (decode(numbers=each).decode_stages(state) for each in (Numbers(), small))
    expected = whole.attention["attention core"] * (64 + 1024 / 2) / 1088
    assert half.attention["attention core"] == pytest.approx(expected)


def test_an_unknown_model_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no model was named"):
        read_shape("")
    with pytest.raises(ConfigError, match="there is no model 'deepseek-r9'"):
        read_shape("deepseek-r9")
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ConfigError, match="not JSON"):
        read_shape(str(tmp_path))


# ---------------------------------------------------------------- every machine


@pytest.mark.parametrize("name", known_hardware())
@pytest.mark.parametrize("model", known_models())
def test_every_machine_prices_every_model_that_comes_along(name, model):
    hardware, shape = read_hardware(name), read_shape(model)
    ranks = min(8, hardware.num_dies)
    costs = decode(ranks, even_geometry(ranks, shape.num_routed_experts), shape=shape, hardware=hardware)
    fast = decode(ranks, even_geometry(ranks, shape.num_routed_experts), shape=shape, hardware=hardware,
                  level="speed of light")
    for state in (decode_state(ranks, 4, 256), decode_state(ranks, 4, 256, drafts=2, microbatches=2),
                  prefill_state(ranks, 1, 512, cached=64), prefill_state(ranks, 1, 512, microbatches=2)):
        breakdown = costs.step_time(state)
        assert 0.0 < fast.step_time(state).total_s < breakdown.total_s
        assert all(part.seconds > 0.0 for part in breakdown.parts)
        assert len({part.name for part in breakdown.parts}) == len(breakdown.parts)


@pytest.mark.parametrize("change", [dict(rows=8), dict(context=8192), dict(drafts=1)])
def test_more_work_takes_longer(change):
    costs, less = decode(), dict(rows=4, context=4096)
    assert seconds(costs, decode_state(320, **(less | change))) > seconds(costs, decode_state(320, **less))
