"""What one instance can do, in closed form."""

from dataclasses import replace

import numpy as np
import pytest

from tests.planner.builders import GOALS, MACHINE, WORK, workload
from tripool.core.errors import ConfigError
from tripool.planner.fit import DecodeFit, HybridFit, Machine, PrefillFit, fastest, waited_part
from tripool.planner.goals import Goals
from tripool.planner.space import Layout, instance
from tripool.planner.traffic import Demand
from tripool.sim.costs.models import read_shape
from tripool.sim.costs.residuals import fitted_residuals
from tripool.sim.costs.state import StepState
from tripool.sim.costs.states import decode_state, prefill_state
from tripool.sim.hardware.description import read_hardware
from tripool.sim.synthetic import SyntheticWork

R1 = Machine(read_shape("deepseek-r1"), read_hardware("cloudmatrix384"),
             {"acceptance": (0.7,), "residuals": fitted_residuals()})
PAPER_WORK = Demand(SyntheticWork(10.0, 100.0, prompt_tokens=4096, output_tokens=256).draw(1), 128)


def prefill(tokens: int = 8192, halves: bool = False) -> PrefillFit:
    config = instance(Layout(32, 32), step_tokens=tokens, microbatches=halves)
    return PrefillFit(PAPER_WORK, R1.priced("prefill", config), config, 0)


def decode(drafts: int = 1) -> DecodeFit:
    config = instance(Layout(320, 32, 32), rows=64, drafts=drafts, microbatches=True)
    return DecodeFit(PAPER_WORK, R1.priced("decode", config), config, Goals(4.0, 0.05))


def test_a_full_prefill_step_is_priced_as_it_is_simulated():
    fit = prefill()
    costs = R1.priced("prefill", fit.config).costs

    assert fit.full_tokens == 32 * 8192
    assert fit.full_s == pytest.approx(costs.step_time(prefill_state(32, 2, 4096)).total_s, rel=0.02)


def test_microbatches_make_a_prefill_faster_on_the_supernode():
    assert prefill(halves=True).tokens_per_s > 1.1 * prefill().tokens_per_s


def test_a_step_takes_as_long_as_what_came_during_the_last_one():
    fit = prefill()

    for tokens_per_s in (0.0, 0.3 * fit.tokens_per_s, 0.7 * fit.tokens_per_s):
        step_s = fit.step_s(tokens_per_s)
        assert step_s == pytest.approx(fit.base_s + fit.token_s * tokens_per_s * step_s, rel=1e-6)
    assert fit.step_s(2 * fit.tokens_per_s) == fit.full_s


def test_more_instances_keep_a_faster_pace_and_a_tighter_goal_a_slower_one():
    fit = prefill()
    one, four = (fit.most_times(Goals(4.0, 0.05), count) for count in (1, 4))

    assert 3.9 < four / one < 4.6                       # a longer line fluctuates less
    assert fit.most_times(Goals(1.0, 0.05), 4) < four
    assert fit.most_times(Goals(1e-3, 0.05), 4) == 0.0


def test_the_rows_of_a_decode_rank_are_the_most_that_keep_the_goal():
    fit, goals = decode(), Goals(4.0, 0.05)
    rows = fit.rows_within(goals)

    assert fit.keeps(goals, rows) and not fit.keeps(goals, rows + 1)
    assert 38 <= rows <= 56                             # the paper has 48 at 49.4 ms (Table 4)
    assert fit.rows_within(Goals(4.0, 0.03)) < rows
    assert fit.rows_within(Goals(4.0, 0.001)) == 0


def test_rows_are_priced_as_they_are_simulated():
    fit = decode()
    state = decode_state(320, 48, 4096 + 128, drafts=1, microbatches=2)

    assert fit.step_s(48) == pytest.approx(fit.priced.costs.step_time(state).total_s, rel=0.03)
    assert fit.tokens_per_step == pytest.approx(1.7)
    assert decode(drafts=0).tokens_per_step == 1.0


def test_a_pace_needs_as_many_rows_as_littles_law_says():
    fit, goals = decode(), Goals(4.0, 0.05)
    rows = fit.rows_within(goals)
    times = fit.most_times(goals, 1, rows)

    assert times * PAPER_WORK.requests_per_s * 256 * fit.tpot_s(rows) == pytest.approx(320 * rows, rel=0.1)


def test_memory_bounds_rows():
    config = instance(Layout(16), rows=8, drafts=1)
    fit = DecodeFit(PAPER_WORK, R1.priced("decode", config), config, Goals(4.0, 10.0))

    assert fit.most_rows == fit.memory_rows < 20


def test_what_does_not_fit_says_how_many_bytes_are_missing():
    with pytest.raises(ConfigError, match=r"^the model does not fit: each die .* has 64.0 GB and 4 rank\(s\) need"):
        R1.priced("decode", instance(Layout(4), rows=8))


def test_a_hybrid_step_is_longer_the_faster_requests_come():
    demand = Demand(WORK.draw(1), 128)
    config = instance(Layout(1), rows=1, step_tokens=512)
    priced = MACHINE.priced("hybrid", config)
    fit = HybridFit(demand, PrefillFit(demand, priced, config, 0), DecodeFit(demand, priced, config, GOALS))
    most = fit.most_times(GOALS, 1)

    assert 0 < fit.step_s(0.2 * most, 1)[0] < fit.step_s(0.9 * most, 1)[0] <= GOALS.tpot_s
    assert fit.most_times(GOALS, 2) > 1.9 * most
    assert fit.most_times(replace(GOALS, tpot_s=1e-5), 1) == 0.0


@pytest.mark.parametrize("tokens", [64, 512, 8192])
def test_a_prompt_that_is_alone_takes_what_its_chunks_cost_one_after_the_other(tokens):
    work = SyntheticWork(10.0, 1.0, prompt_tokens=3800).draw(1)
    config = instance(Layout(1), step_tokens=tokens)
    priced = MACHINE.priced("hybrid", config)
    chunks = [(first, min(tokens, 3800 - first)) for first in range(0, 3800, tokens)]
    alone_s = sum(priced.costs.step_time(StepState(*np.zeros((3, 1), int), np.zeros(1, int), np.array([first]),
                                                   np.array([count]))).total_s for first, count in chunks)
    demand = Demand(work, 128)
    prefill = PrefillFit(demand, priced, config, 0)

    assert prefill.alone_s(0.9) == pytest.approx(alone_s, rel=0.07)      # the last chunk is shorter
    hybrid = HybridFit(demand, prefill, DecodeFit(demand, priced, config, GOALS))
    assert not hybrid.keeps(Goals(0.9 * alone_s, 1.0), 1e-3, 1)
    assert hybrid.keeps(Goals(1.5 * alone_s, 1.0), 1e-3, 1), "nobody waits where hardly anybody comes"


def test_who_comes_between_steps_waits_for_none():
    assert waited_part(0.9, 0.0) == waited_part(0.9, 0.09) == 0.0
    assert waited_part(0.9, 0.2) == pytest.approx(0.5)
    assert waited_part(0.9, 1.0) == waited_part(0.9, 7.0) == pytest.approx(0.9)


def test_rows_and_chunks_of_a_hybrid_are_priced_as_they_are_simulated():
    config = instance(Layout(32, 32), rows=1, step_tokens=2048)
    priced = R1.priced("hybrid", config)
    parts = PrefillFit(PAPER_WORK, priced, config, 0), DecodeFit(PAPER_WORK, priced, config, Goals(4.0, 0.5))
    fit, rows, chunks = HybridFit(PAPER_WORK, *parts), decode_state(32, 16, 4096 + 128), prefill_state(32, 1, 2048)
    mixed = replace(rows, chunk_rank_C=chunks.chunk_rank_C, chunk_first_C=chunks.chunk_first_C + 1024,
                    chunk_tokens_C=chunks.chunk_tokens_C)

    assert fit.mixed_s(16, full=True) == pytest.approx(priced.costs.step_time(mixed).total_s, rel=0.05)
    assert parts[1].step_s(16) < fit.mixed_s(16, full=False) < fit.mixed_s(16, full=True)
    assert fit.mixed_s(16, full=True) < parts[1].step_s(16) + parts[0].full_s


def test_reuse_leaves_less_to_compute_and_has_to_be_fetched():
    work = workload(*((0.1 * each, [(0, 1024), (each + 1, 512)], 20) for each in range(200)))
    demand = Demand(work, 128)
    config = instance(Layout(1), step_tokens=512)
    with_pool, without = (PrefillFit(demand, MACHINE.priced("prefill", config), config, tokens)
                          for tokens in (1 << 20, 0))

    assert with_pool.mean_computed < 0.4 * without.mean_computed
    assert with_pool.most_times(GOALS, 1) > 2 * without.most_times(GOALS, 1)
    assert with_pool.fetch_N[0] == 0 < with_pool.fetch_N[1]


def test_the_fastest_pace_is_found_between_none_and_the_most():
    assert fastest(lambda times: times <= 3.3, 10.0) == pytest.approx(3.3, rel=0.01)
    assert fastest(lambda times: True, 10.0) == 10.0
    assert fastest(lambda times: False, 10.0) == 0.0
