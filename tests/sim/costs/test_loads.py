import numpy as np
import pytest

from tripool.core.placement import even_geometry
from tripool.sim.costs.loads import ExpertBalance

DECODE = even_geometry(320, 256, num_redundant=32, num_shared_copies=32)
PREFILL = even_geometry(32, 256, num_redundant=32)


def test_even_loads_leave_the_grain_of_the_placement():
    """288 slots for 256 experts: most have one copy, and a rank of one slot has 256 / 288 of it in the mean."""
    balance = ExpertBalance(DECODE, 8, skew=0.0)
    mean = (256 + 32) / 320                # the shared expert is asked 32 times as often as a routed one
    assert balance.even == pytest.approx(1 / mean)
    assert ExpertBalance(PREFILL, 8, 0.0).even == pytest.approx(1.0, abs=0.03)


def test_loads_that_the_placement_knew_are_balanced_and_others_are_not():
    """The same load vector, once known to the placement that runs and once not."""
    popularity = np.exp(np.random.default_rng(1).standard_normal(256))
    knew = ExpertBalance(PREFILL, 8, 0.0, popularity)
    blind = ExpertBalance(PREFILL, 8, 0.0)
    assert knew.even < 1.05
    assert blind.max_over_mean(popularity[None, :])[0] > 1.5


def test_groups_on_nodes_balance_less():
    popularity = np.ones(256)
    popularity[:32] = 6.0                  # one group is hot
    nodes = even_geometry(32, 256, num_redundant=32, num_groups=8, num_nodes=4)
    assert ExpertBalance(nodes, 8, 0.0, popularity).even > ExpertBalance(PREFILL, 8, 0.0, popularity).even + 0.2


def test_many_requests_together_are_more_even_than_few():
    balance = ExpertBalance(PREFILL, 8, skew=1.5)
    few, some, many = (balance.busiest(count) for count in (16, 128, 65536))
    assert few > some > many > 1.0
    assert many < 1.05


def test_deviations_shrink_with_the_square_root_of_the_requests():
    balance = ExpertBalance(PREFILL, 8, skew=1.5)
    assert balance.busiest(2048) == pytest.approx(1 + (balance.busiest(512) - 1) / 2, rel=0.01)
    assert balance.busiest(64) == pytest.approx(1 + (balance.busiest(256) - 1) * 2, rel=0.1)


def test_a_wider_spread_is_less_even_and_the_same_every_time():
    assert ExpertBalance(PREFILL, 8, 2.0).busiest(128) > ExpertBalance(PREFILL, 8, 1.0).busiest(128)
    assert ExpertBalance(PREFILL, 8, 2.0).busiest(100) == ExpertBalance(PREFILL, 8, 2.0).busiest(100)
