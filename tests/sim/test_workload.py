"""Made-up loads are what their numbers say, and the same for the same seed."""

import random

from tripool.sim.workload import SyntheticLoad


def test_a_load_has_its_size_its_rate_and_its_lengths():
    load = SyntheticLoad(2000, 50.0, prompt_tokens=(8, 20), prefix_tokens=(16, 16), share=0.5, output_tokens=(2, 9),
                         cancel=0.25)
    arrivals = load.arrivals(random.Random(1), first_id=100)

    lengths = [each.request.num_prompt_tokens for each in arrivals]
    assert [each.request.request_id for each in arrivals] == list(range(100, 2100))
    assert 36.0 < arrivals[-1].at_s < 44.0                            # 2000 at 50 a second
    assert min(lengths) >= 8 and max(lengths) <= 36
    assert 900 < sum(length > 20 for length in lengths) < 1100        # those that begin with a shared prefix
    assert {each.request.limits.max_tokens for each in arrivals} == set(range(2, 10))
    assert 400 < sum(each.cancel_at_s is not None for each in arrivals) < 600


def test_the_same_seed_draws_the_same_load():
    load = SyntheticLoad(50, 10.0)

    assert load.arrivals(random.Random(7)) == load.arrivals(random.Random(7))
    assert load.arrivals(random.Random(7)) != load.arrivals(random.Random(8))
