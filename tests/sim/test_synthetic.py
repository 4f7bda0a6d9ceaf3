"""Made-up workloads are what their numbers say, and the same for the same seed."""

import pytest

from tripool.core.errors import ConfigError
from tripool.sim.synthetic import SyntheticWork


def test_a_workload_has_its_rate_its_lengths_and_its_shared_prefixes():
    workload = SyntheticWork(100.0, 20.0, prompt_tokens=1000, output_tokens=200, spread=0.5, num_prefixes=4,
                             prefix_tokens=256, share=0.5).draw(1)

    count = len(workload.requests)
    assert 1850 < count < 2150
    assert 900 < workload.num_prompt_tokens / count < 1100 and 185 < workload.num_output_tokens / count < 215
    shared = [each.parts[0] for each in workload.requests if len(each.parts) == 2]
    assert 0.45 < len(shared) / count < 0.55
    assert sorted(set(shared)) == [(prefix, 256) for prefix in range(4)]
    assert all(each.at_s <= later.at_s for each, later in zip(workload.requests, workload.requests[1:], strict=False))


def test_lengths_without_a_spread_are_all_alike():
    workload = SyntheticWork(5.0, 10.0, prompt_tokens=77, output_tokens=9).draw(3)

    assert {(each.num_prompt, each.num_output) for each in workload.requests} == {(77, 9)}


def test_bursts_come_in_their_seconds_and_leave_the_mean_as_it_is():
    workload = SyntheticWork(1000.0, 5.0, burst_every_s=100.0, burst_s=10.0, burst_times=4.0).draw(2)

    inside = sum(each.at_s % 100.0 < 10.0 for each in workload.requests)
    assert 4700 < len(workload.requests) < 5300
    assert 0.36 < inside / len(workload.requests) < 0.44


def test_the_same_seed_draws_the_same_workload():
    work = SyntheticWork(10.0, 10.0, spread=0.4)

    assert work.draw(7) == work.draw(7) != work.draw(8)


def test_no_rate_is_no_request():
    assert SyntheticWork(10.0, 0.0).draw(1).requests == ()


@pytest.mark.parametrize(("wrong", "told"), [
    (dict(prompt_tokens=0), "prompt_tokens is 0"),
    (dict(requests_per_s=-1.0), "requests_per_s is -1"),
    (dict(requests_per_s=float("inf")), "requests_per_s is inf; give a finite number"),
    (dict(share=0.5), "there are 0 prefixes"),
    (dict(share=0.5, num_prefixes=2, prefix_tokens=2000), "a prompt has 1024"),
    (dict(burst_every_s=10.0, burst_s=2.0, burst_times=6.0), "burst_times is 6, .* at most 5 times the mean rate"),
    (dict(burst_every_s=10.0, burst_s=2.0), "burst_times is 1, .* are more than 1"),
    (dict(burst_s=2.0), "burst_s is 2 .* burst_every_s is 0: no burst ever begins; give burst_every_s, too"),
    (dict(burst_times=3.0), "burst_times is 3, but burst_every_s is 0"),
    (dict(num_prefixes=4), "there are 4 prefixes of 0 tokens, but share is 0.*; give share, too"),
    (dict(prefix_tokens=512), "there are 0 prefixes of 512 tokens, but share is 0"),
    (dict(burst_every_s=10.0), "burst_s is 0, but burst_every_s is 10; give burst_s more than 0"),
    (dict(burst_every_s=10.0, burst_s=10.0), "burst_s is 10, .* less than that"),
])
def test_numbers_that_cannot_be_are_told(wrong, told):
    with pytest.raises(ConfigError, match=told):
        SyntheticWork(**{"duration_s": 10.0, "requests_per_s": 1.0, **wrong})
