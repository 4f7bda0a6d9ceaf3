"""What a decode step costs where attention and experts have dies of their own (section 6.2.1; arXiv 2508.02520).

Attention dies stand in domains that take turns at the experts. A die has two microbatches: while experts compute one of
them, attention computes the other. Experts serve one domain at a time (section 5.2 there), three streams of theirs take
in, compute and give back: in each layer they have two turns for each domain, and the longest of the three sets their
pace. What is slower, attention or experts, is the pace of all; one way to the experts and back is left at the end.
Where a domain has fewer dies than the experts, it exchanges by way of as many of these, the trampolines (section 3.3
there): what belongs to the others goes one hop further.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tripool.core.errors import ConfigError
from tripool.sim.costs.exchange import ExchangeCosts
from tripool.sim.costs.state import StepState
from tripool.sim.costs.states import decode_state
from tripool.sim.costs.steps import OperatorCosts
from tripool.sim.costs.work import combine_bytes, dispatch_bytes

NUM_MICROBATCHES = 2


@dataclass(frozen=True, slots=True)
class ApartStep:
    """One step, seconds. The first four are of one layer and one microbatch of a domain."""

    away_s: float                          # from attention to experts
    back_s: float
    experts_s: float
    attention_s: float
    iteration_s: float


def step_apart(experts: OperatorCosts, domain_dies: int, domains: int, rows: int, context: int,
               drafts: int = 1) -> ApartStep:
    """A step of `domains` of so many attention dies each, with `rows` of each die in a microbatch.

    `experts` prices the instance whose dies have the experts; attention is priced with it, as it is the same anywhere.

    Raises:
        ConfigError: there is nothing on one of the two sides.
    """
    if min(domain_dies, domains, rows) < 1:
        raise ConfigError(f"{domains} domains of {domain_dies} dies with {rows} rows each: give at least one of all")
    instance, slow = experts.instance, 1.0 + experts.residuals.layer_overhead
    shape, numbers, ranks = instance.shape, instance.numbers, instance.ranks
    tokens, scale = rows * (1 + drafts), domain_dies / ranks       # one domain's tokens at a time, on all dies
    stages = experts.decode_stages(decode_state(ranks, rows, context, drafts=drafts))
    exchange = ExchangeCosts(shape, instance.hardware, numbers, ranks, experts.level)
    hop_s = (tokens * shape.num_experts_per_token * max(0.0, 1 - scale)
             / (instance.hardware.planes.scale_up.write_gbps * 1e9))
    sent = tokens * max(1.0, scale)        # where there are fewer dies with experts, each of these has more to take in
    away = (exchange.fused_s("dispatch", sent) + hop_s * dispatch_bytes(shape, numbers)) * slow
    back = (exchange.fused_s("combine", sent) + hop_s * combine_bytes(shape, numbers)) * slow
    arriving = np.full(ranks, max(1, round(rows * scale)), np.int64)
    turn = experts.decode_stages(replace(decode_state(ranks, rows, 0), rows_R=arriving, drafts_R=drafts * arriving))
    outside = _outside_layers(experts, decode_state(ranks, NUM_MICROBATCHES * rows, context, drafts=drafts))
    turns = NUM_MICROBATCHES * domains * max(away, turn.experts_s, back)
    iteration = (shape.num_cached_layers * max(NUM_MICROBATCHES * stages.attention_s, turns)
                 + away + turn.experts_s + back + outside)
    return ApartStep(away, back, turn.experts_s, stages.attention_s, iteration)


def _outside_layers(costs: OperatorCosts, state: StepState) -> float:
    """Heads, sampling and overhead of a step."""
    names = ("head", "sampling", "step overhead")
    return sum(part.seconds for part in costs.step_time(state).parts if part.name in names)
