"""Attention and experts on dies of their own: who sets the pace, and what the way between them costs."""

import pytest

from tripool.core.errors import ConfigError
from tripool.sim.costs.apart import step_apart
from tripool.sim.costs.residuals import Residuals
from tripool.sim.costs.states import decode_state
from tripool.sim.costs.steps import OperatorCosts
from tripool.sim.reproduce.settings import xdeepserve

EXPERTS = OperatorCosts(xdeepserve())
LAYERS = 62                                # with the one that drafts


def test_attention_sets_the_pace_where_few_domains_share_the_experts():
    step = step_apart(EXPERTS, domain_dies=160, domains=1, rows=48, context=3072)
    alone = EXPERTS.decode_stages(decode_state(288, 48, 3072, drafts=1)).attention_s

    assert step.attention_s == alone
    assert LAYERS * 2 * alone < step.iteration_s < 1.1 * LAYERS * 2 * alone


def test_experts_set_the_pace_where_many_domains_share_them():
    three, six = (step_apart(EXPERTS, domain_dies=160, domains=count, rows=48, context=128) for count in (3, 6))
    slowest = max(three.away_s, three.back_s, three.experts_s)

    assert (six.away_s, six.back_s, six.experts_s) == (three.away_s, three.back_s, three.experts_s)
    assert six.iteration_s - three.iteration_s == pytest.approx(LAYERS * 2 * 3 * slowest)


def test_tokens_of_a_small_domain_go_one_hop_further_and_those_of_a_large_one_meet_at_few_dies():
    small, even, large = (step_apart(EXPERTS, domain_dies=dies, domains=1, rows=48, context=3072)
                          for dies in (144, 288, 576))

    hop_s = 96 * 8 * 0.5 / 135e9
    assert small.away_s - even.away_s == pytest.approx(hop_s * 7680)
    assert small.back_s - even.back_s == pytest.approx(hop_s * 14336)
    flags_s = 3 * 2.1e-6
    assert large.away_s - flags_s == pytest.approx(2 * (even.away_s - flags_s))
    assert small.experts_s < even.experts_s < large.experts_s


def test_what_cores_do_and_the_exchange_take_longer_within_a_layer():
    bare, real = (step_apart(OperatorCosts(xdeepserve(), residuals=residuals), 160, 3, 48, 3072)
                  for residuals in (Residuals(), Residuals(layer_overhead=0.5)))

    for name in ("away_s", "back_s", "experts_s", "attention_s"):
        assert getattr(real, name) == pytest.approx(1.5 * getattr(bare, name))


def test_both_sides_have_something():
    with pytest.raises(ConfigError, match="2 domains of 0 dies"):
        step_apart(EXPERTS, domain_dies=0, domains=2, rows=48, context=3072)
