"""The router: which experts a token goes to, and what their results count.

The correction bias takes part in the choice alone; weights are the scores without it. Groups that are not chosen are
minus infinity (zero would beat a negative score), and the lowest index wins a tie, on every rank and device.

T tokens · E experts · G groups · K picks
"""

from __future__ import annotations

import torch
from torch import Tensor

from tripool.core.shape import ModelShape
from tripool.engine.ops import native


def route(logit_TE: Tensor, bias_E: Tensor | None, shape: ModelShape, *,
          level: int | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and the float32 weights of their results."""
    level = native.level_for(logit_TE, level)
    if level < 0:
        return definition(logit_TE, bias_E, shape)
    num_tokens, num_experts = logit_TE.shape
    num_picks = shape.num_experts_per_token
    assert logit_TE.dtype == torch.float32 and num_experts == shape.num_routed_experts, "float32 logits of all experts"
    assert bias_E is None or (bias_E.dtype == torch.float32 and bias_E.shape == (num_experts,)), "a bias for each"
    assert num_picks <= num_experts, f"{num_picks} picks of {num_experts} experts"
    logit_TE = logit_TE.contiguous()
    expert_TK = torch.empty(num_tokens, num_picks, dtype=torch.int64)
    weight_TK = logit_TE.new_empty(num_tokens, num_picks)
    native.module().route(level, *routing_of(shape), logit_TE.data_ptr(), 0 if bias_E is None else bias_E.data_ptr(),
                          num_tokens, expert_TK.data_ptr(), weight_TK.data_ptr())
    return expert_TK, weight_TK


def routing_of(shape: ModelShape) -> tuple[int, ...]:
    """How a model routes, as compiled functions take it."""
    limited = _is_limited(shape)
    groups = shape.num_groups if limited else 1
    best = min(2, shape.num_routed_experts // groups) if shape.topk_method == "noaux_tc" else 1
    return (shape.num_routed_experts, shape.num_experts_per_token, shape.scoring != "sigmoid", groups,
            shape.num_chosen_groups if limited else 1, best, shape.norm_topk_prob,
            native.float_bits(shape.routed_scaling_factor))


def definition(logit_TE: Tensor, bias_E: Tensor | None, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    score_TE = logit_TE.sigmoid() if shape.scoring == "sigmoid" else logit_TE.softmax(-1)
    choice_TE = score_TE if bias_E is None else score_TE + bias_E
    if _is_limited(shape):
        choice_TE = _within_chosen_groups(choice_TE, shape)
    expert_TK = _highest(choice_TE, shape.num_experts_per_token)
    weight_TK = score_TE.gather(1, expert_TK)
    if shape.norm_topk_prob:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
    return expert_TK, weight_TK * shape.routed_scaling_factor


def _is_limited(shape: ModelShape) -> bool:
    """Do experts of some groups alone take part?"""
    return shape.topk_method != "greedy" and shape.num_chosen_groups < shape.num_groups


def _within_chosen_groups(choice_TE: Tensor, shape: ModelShape) -> Tensor:
    """The same, with experts of other groups at minus infinity."""
    choice_TGx = choice_TE.unflatten(1, (shape.num_groups, -1))
    if shape.topk_method == "noaux_tc":
        group_TG = choice_TGx.topk(min(2, choice_TGx.shape[-1]), dim=-1).values.sum(-1)
    else:
        group_TG = choice_TGx.amax(-1)
    barred_TG = torch.full_like(group_TG, -torch.inf)
    barred_TG.scatter_(1, _highest(group_TG, shape.num_chosen_groups), 0.0)
    return (choice_TGx + barred_TG.unsqueeze(-1)).flatten(1)


def _highest(score_TE: Tensor, num_picks: int) -> Tensor:
    """Indices of the highest scores; a stable sort, because `topk` leaves open who wins a tie."""
    return torch.sort(score_TE, dim=-1, descending=True, stable=True).indices[:, :num_picks]
