"""Who is chosen, with what weight, and that every form of the experts computes the same."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.checkpoints import random_tensors, tiny_config
from tests.engine.model.builders import build_model, fused_weights, relative_error
from tripool.core.shape import model_shape
from tripool.engine.model.moe import EVERY_EXPERT_ROWS, Experts, MixtureOfExperts, Router
from tripool.engine.model.products import TorchMatrix, Weights
from tripool.engine.ops.tiles import in_tiles, whole
from tripool.engine.ops.weighted_sum import weighted_sum
from tripool.engine.parallel.exchange import Arrived, LocalExchange

# 8 experts in 4 groups of 2, of which 2 groups and 3 experts are chosen
V3 = model_shape(tiny_config("v3"))
V2 = model_shape(tiny_config("v2"))


def choose(logits, bias, shape=V3):
    gate = TorchMatrix(torch.zeros(shape.num_routed_experts, 4))
    router = Router(shape, gate, None if bias is None else torch.tensor(bias))
    experts, weights = router.choose(torch.tensor([logits]))
    return experts[0].tolist(), weights[0]


def test_the_bias_chooses_and_never_weighs():
    logits = [0.0, 1.0, 2.0, 0.5, -1.0, 0.2, 0.1, -0.3]
    unbiased, _ = choose(logits, [0.0] * 8)
    experts, weights = choose(logits, [0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 2.0])
    assert 4 not in unbiased and experts == [4, 7, 5]
    score = torch.sigmoid(torch.tensor(logits))[experts]
    assert torch.allclose(weights, score / score.sum() * V3.routed_scaling_factor)


def test_a_negative_score_in_a_chosen_group_beats_every_unchosen_group():
    # Zero in place of minus infinity would pick experts of the other groups.
    bias = [-5.0, -5.0, -6.0, -6.0, -9.0, -9.0, -9.0, -9.0]
    experts, _ = choose([0.3] * 8, bias)
    assert sorted(experts) == [0, 1, 2]


def test_a_group_is_scored_by_the_sum_of_its_top_two():
    # Group 1 has the single best expert; groups 0 and 2 have better pairs.
    score = torch.tensor([0.6, 0.6, 0.9, 0.01, 0.55, 0.55, 0.1, 0.1])
    experts, _ = choose(score.logit().tolist(), [0.0] * 8)
    assert experts == [0, 1, 4]


def test_v2_scores_a_group_by_its_best_and_does_not_normalise():
    logits = [1.0, 0.9, 2.0, -3.0, 0.0, 0.0, 0.0, 0.0]
    experts, weights = choose(logits, None, V2)
    assert experts == [2, 0, 1]
    assert torch.allclose(weights, torch.tensor(logits).softmax(-1)[experts] * V2.routed_scaling_factor)


def test_v2_lite_takes_the_best_of_all_experts():
    shape = model_shape(tiny_config("v2-lite"))
    experts, _ = choose([0.0, 5.0, 0.0, 4.0, 0.0, 3.0, 0.0, 0.0], None, shape)
    assert experts == [1, 3, 5]


def test_the_lowest_index_wins_a_tie_inside_a_group_and_between_groups():
    assert choose([0.5] * 8, [0.0] * 8)[0] == [0, 1, 2]
    assert choose([0.1, 0.1, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7], [0.0] * 8)[0] == [2, 3, 4]
    assert choose([0.1, 0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.9], None, V2)[0] == [4, 5, 6]


def test_ties_fall_alike_in_any_batch_and_way_of_running():
    router = Router(V3, TorchMatrix(torch.zeros(8, 4)), torch.zeros(8))
    for num_tokens in (1, 2, 15, 33, 200):
        for run in (whole, in_tiles):
            experts, _ = run(router, torch.ones(num_tokens, 4))
            assert experts.tolist() == [[0, 1, 2]] * num_tokens


def test_biases_a_thousandth_apart_are_told_apart_in_a_bfloat16_model():
    config = tiny_config("v3")
    tensors = random_tensors(config)
    bias = 6.9 + 0.001 * torch.tensor([3.0, 1.0, 2.0, 0.0, 7.0, 5.0, 6.0, 4.0])
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = bias
        if name.endswith("mlp.gate.weight"):
            tensors[name] = torch.zeros_like(tensors[name])
    model = build_model(config, tensors=tensors, dtype=torch.bfloat16)
    for layer in model.layers[1:]:
        router = layer.feed_forward.router
        assert router.bias_E.dtype == router.gate.weight_NK.dtype == torch.float32
        experts, _ = router(torch.ones(5, model.shape.hidden_size, dtype=torch.bfloat16))
        assert experts.tolist() == [[4, 6, 5]] * 5


def test_a_bias_of_lower_precision_is_refused():
    with pytest.raises(AssertionError, match="correction bias"):
        Router(V3, TorchMatrix(torch.zeros(8, 4)), torch.zeros(8, dtype=torch.bfloat16))


def random_experts(num_rows, *, num_experts=8, num_picks=3, width=20, inner=12):
    generator = torch.Generator().manual_seed(num_rows)
    gate_up = torch.randn(num_experts, 2 * inner, width, generator=generator)
    down = torch.randn(num_experts, width, inner, generator=generator)
    x = torch.randn(num_rows, width, generator=generator)
    picks = [torch.randperm(num_experts, generator=generator)[:num_picks] for _ in range(num_rows)]
    return gate_up, down, x, torch.stack(picks) if picks else torch.zeros(0, num_picks, dtype=torch.int64)


def slow_experts(gate_up, down, x, picks):
    result = torch.zeros(*picks.shape, x.shape[1])
    for row in range(picks.shape[0]):
        for pick, expert in enumerate(picks[row].tolist()):
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            result[row, pick] = down[expert] @ (F.silu(gate) * up)
    return result


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, EVERY_EXPERT_ROWS, EVERY_EXPERT_ROWS + 1, 70, 300])
def test_every_form_of_the_experts_computes_their_definition(num_rows):
    gate_up, down, x, picks = random_experts(num_rows)
    wanted = slow_experts(gate_up, down, x, picks)
    fast, tiled = Experts(gate_up, down, 3, whole, False), Experts(gate_up, down, 3, in_tiles, True)
    results = [fast(Arrived(x, picks)), fast.one_by_one(x, picks), tiled(Arrived(x, picks))]
    if num_rows:
        results += [fast.copied(x, picks), fast.every_expert(x, picks), fast.grouped(x, picks)]
    for result in results:
        assert result.shape == wanted.shape
        assert torch.allclose(result, wanted, rtol=1e-4, atol=1e-4)


def test_a_row_may_arrive_for_one_expert_alone():
    gate_up, down, x, picks = random_experts(40)
    wanted = slow_experts(gate_up, down, x, picks[:, :1])
    experts = Experts(gate_up, down, 3, whole, False)
    for form in (experts.copied, experts.every_expert, experts.grouped, experts.one_by_one):
        assert torch.allclose(form(x, picks[:, :1]), wanted, rtol=1e-4, atol=1e-4)


def test_results_are_weighed_in_the_order_of_the_picks():
    y = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])
    assert weighted_sum(y, torch.tensor([[0.5, 2.0]])).tolist() == [[20.5, 41.0]]


@pytest.mark.parametrize("run", [whole, in_tiles])
@pytest.mark.parametrize("num_tokens", [1, 9, 40])
def test_the_routed_scale_is_applied_once_and_to_the_routed_part_alone(run, num_tokens):
    config = tiny_config("v3")
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(1))
    routed, shared = {}, {}
    for scale in (1.0, 2.5):
        shape = dataclasses.replace(model_shape(config), routed_scaling_factor=scale)
        weights = Weights(fused_weights(shape, random_tensors(config)))
        block = MixtureOfExperts(shape, weights, 1, LocalExchange(), run, run is in_tiles)
        shared[scale] = block.run(block.shared, x)
        routed[scale] = block(x) - shared[scale]
    assert torch.equal(shared[1.0], shared[2.5])
    assert relative_error(routed[2.5], 2.5 * routed[1.0]) < 1e-5
