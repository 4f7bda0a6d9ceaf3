"""What a workload asks for: at any pace, beside a pool of any size."""

import numpy as np
import pytest

from tests.planner.builders import workload
from tripool.core.errors import ConfigError
from tripool.planner.traffic import Demand, Traffic, busiest_stretch, leading_hits
from tripool.sim.requests import Workload
from tripool.sim.synthetic import SyntheticWork

A, B, C = (1, 64), (2, 64), (3, 64)


def test_a_prompt_finds_its_beginning_where_another_had_it():
    found = leading_hits([[A, B], [A, C], [A, B, C], [B, A]], 64, 10_000)

    assert found.tolist() == [0, 64, 128, 0]            # the last begins otherwise, so nothing of it is the same


def test_at_least_one_token_is_left_to_compute():
    assert leading_hits([[A, B], [A, B]], 64, 10_000).tolist() == [0, 64]
    assert leading_hits([[A, B], [A, B]], 32, 10_000).tolist() == [0, 96]


def test_a_small_pool_forgets_what_was_used_longest_ago():
    prompts = [[A], [B], [C], [A, C]]

    assert leading_hits(prompts, 64, 3 * 64).tolist()[-1] == 64
    assert leading_hits(prompts, 64, 2 * 64).tolist()[-1] == 0
    assert leading_hits(prompts, 64, 0).tolist()[-1] == 0


def test_waiting_is_that_of_a_line_served_in_order():
    work = SyntheticWork(30.0, 8.0, prompt_tokens=500, output_tokens=5, spread=0.8).draw(3)
    demand = Demand(work, 64)
    for times, rate in ((1.0, 4500.0), (2.0, 6000.0)):
        left, slow, before_s = 0.0, [], 0.0
        for each in work.requests:
            left = max(0.0, left - rate * (each.at_s / times - before_s))
            slow.append(left / rate)
            left, before_s = left + each.num_prompt, each.at_s / times
        assert demand.waiting_s(times, rate, 0) == pytest.approx(slow, abs=1e-9)


def test_rows_that_decode_are_as_many_as_littles_law_says_and_more_in_a_burst():
    even = Demand(workload(*((0.1 * each, [(each, 10)], 100) for each in range(1000))), 64)
    times = sorted([0.2 * each for each in range(500)] + [20.0 * (each // 100) for each in range(500)])
    burst = Demand(workload(*((at_s, [(each, 10)], 100) for each, at_s in enumerate(times))), 64)

    assert even.most_rows(1.0, 0.05, 0.5) == pytest.approx(50, rel=0.05)        # 10 a second, 5 s each
    assert even.most_rows(2.0, 0.05, 0.5) == pytest.approx(100, rel=0.05)
    assert burst.most_rows(1.0, 0.05, 0.9) > 1.5 * even.most_rows(1.0, 0.05, 0.9)


def test_contexts_are_those_of_rows_at_a_random_moment():
    demand = Demand(workload((0.0, [(1, 100)], 1000), (1.0, [(2, 5000)], 10)), 64)

    # The first has 100 times as many tokens to wait for, so it is found 100 times as often: halfway, at 600.
    assert demand.contexts.mean() == pytest.approx((1000 * 600 + 10 * 5005) / 1010, rel=0.02)


def test_the_busiest_stretch_is_that_with_the_most_tokens():
    work = workload((0.0, [(1, 10)], 1), (5.0, [(2, 10)], 1), (10.0, [(3, 500)], 1), (11.0, [(4, 500)], 1),
                    (30.0, [(5, 10)], 1))

    chosen = busiest_stretch(work, 4.0)

    assert [(each.at_s, each.num_prompt) for each in chosen.requests] == [(0.0, 500), (1.0, 500)]
    assert busiest_stretch(work, 60.0) is work


def test_a_pace_can_be_chosen_of_a_trace_and_of_what_is_made_up():
    trace = Traffic(workload(*((float(each), [(each, 10)], 1) for each in range(101))))
    made_up = Traffic(SyntheticWork(60.0, 5.0), seed=2)

    assert trace.at(2.02, 1000.0).span_s == pytest.approx(50.0, rel=0.02)
    assert len(made_up.at(50.0, 20.0).requests) == pytest.approx(1000, rel=0.1)


def test_longer_prompts_keep_what_they_share():
    trace = Traffic(workload((0.0, [A, B], 5), (1.0, [A, C], 5)))

    longer, shorter = trace.longer(1.5).source, trace.longer(0.25).source

    assert isinstance(longer, Workload) and isinstance(shorter, Workload)
    assert [each.parts for each in longer.requests] == [(A, (2, 128)), (A, (3, 128))]
    assert [each.num_prompt for each in shorter.requests] == [32, 32]


def test_no_requests_are_nothing_to_plan_for():
    with pytest.raises(ConfigError, match="without requests"):
        Traffic(SyntheticWork(60.0, 0.0))
    with pytest.raises(ConfigError, match="no request"):
        Traffic(Workload("empty", ()))


def test_a_pool_saves_what_prompts_share_up_to_its_size():
    demand = Demand(SyntheticWork(60.0, 10.0, prompt_tokens=1024, output_tokens=5, num_prefixes=50, prefix_tokens=512,
                                  share=1.0).draw(1), 128)
    shares = [demand.reused_share(tokens) for tokens in (0, 20_000, demand.distinct_tokens)]

    assert shares[0] == 0.0 and shares[1] < shares[2]
    assert shares[2] == pytest.approx(0.5, abs=0.06)                            # all but the first of each prefix
    assert np.all(demand.reused_N(demand.distinct_tokens) % 128 == 0)
