"""The router: the choice of its definition at every level, ties and numbers that are none included."""

import dataclasses

import pytest
import torch

from tests.checkpoints import tiny_config
from tests.engine.ops.builders import LEVELS, ROWS, generator, same
from tripool.core.shape import model_shape
from tripool.engine.ops.router import definition, route

V3 = model_shape(tiny_config("v3"))
SHAPES = {
    "v3": dataclasses.replace(V3, num_routed_experts=64, num_groups=8, num_chosen_groups=3, num_experts_per_token=8),
    "one expert a group": dataclasses.replace(V3, num_routed_experts=6, num_groups=6, num_chosen_groups=4,
                                              num_experts_per_token=3),
    "fewer in groups than picks": dataclasses.replace(V3, num_routed_experts=8, num_groups=4, num_chosen_groups=1,
                                                      num_experts_per_token=5),
    "v2": dataclasses.replace(model_shape(tiny_config("v2")), num_routed_experts=40, num_groups=8, num_chosen_groups=3,
                              num_experts_per_token=6),
    "v2-lite": dataclasses.replace(model_shape(tiny_config("v2-lite")), num_routed_experts=13,
                                   num_experts_per_token=13),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("level", LEVELS)
def test_the_choice_is_that_of_the_definition(level, shape):
    for num_tokens in ROWS:
        for kind in ("far apart", "many ties"):
            chance = generator(num_tokens, shape.num_routed_experts)
            logits = torch.randn(num_tokens, shape.num_routed_experts, generator=chance) * 3
            logits = logits.round() if kind == "many ties" else logits
            for bias in (None, (torch.randn(shape.num_routed_experts, generator=chance)).round() / 4):
                experts, weights = route(logits, bias, shape, level=level)
                expected_experts, expected_weights = definition(logits, bias, shape)
                assert experts.dtype == torch.int64 and torch.equal(experts, expected_experts), (num_tokens, kind)
                assert torch.allclose(weights, expected_weights, rtol=1e-5, atol=1e-30)
                lowest = route(logits, bias, shape, level=0)
                assert torch.equal(experts, lowest[0]) and same(weights, lowest[1])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("level", LEVELS)
def test_extremes_and_what_is_not_a_number_are_chosen_as_defined(level, shape):
    """In any case experts that there are: what follows reads weights by these numbers."""
    chance = generator(9)
    logits = torch.randn(200, shape.num_routed_experts, generator=chance)
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 200.0, -200.0, 0.0, -0.0, 3e38, -3e38])
    where = torch.rand(logits.shape, generator=chance) < 0.3
    logits[where] = odd[torch.randint(0, len(odd), (int(where.sum()),), generator=chance)]
    logits[0] = torch.nan
    experts, weights = route(logits, None, shape, level=level)
    expected_experts, expected_weights = definition(logits, None, shape)
    assert torch.equal(experts, expected_experts)
    assert torch.allclose(weights, expected_weights, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("level", LEVELS)
def test_scores_are_accurate(level):
    """Four units in the last place; weights of one pick that are not normalised are scores."""
    sigmoid = dataclasses.replace(V3, num_routed_experts=1, num_groups=1, num_chosen_groups=1, num_experts_per_token=1,
                                  norm_topk_prob=False, routed_scaling_factor=1.0)
    logits = torch.linspace(-110, 110, 10_001).unsqueeze(-1)
    found = route(logits, None, sigmoid, level=level)[1].double()
    assert torch.allclose(found, logits.double().sigmoid(), rtol=4 * 2.0**-23, atol=2.0**-126)


@pytest.mark.parametrize("level", LEVELS)
def test_a_token_does_not_depend_on_its_company(level):
    logits = torch.randn(30, 64, generator=generator(5))
    experts, weights = route(logits, None, SHAPES["v3"], level=level)
    alone = [route(logits[row:row + 1], None, SHAPES["v3"], level=level) for row in range(30)]
    assert torch.equal(torch.cat([each[0] for each in alone]), experts)
    assert torch.equal(torch.cat([each[1] for each in alone]), weights)


def test_what_does_not_fit_is_refused():
    logits = torch.zeros(2, 64)
    for wrong in (
        lambda: route(logits[:, :63], None, SHAPES["v3"], level=0),
        lambda: route(logits, torch.zeros(63), SHAPES["v3"], level=0),
        lambda: route(logits, torch.zeros(64).double(), SHAPES["v3"], level=0),
    ):
        with pytest.raises(AssertionError):
            wrong()
