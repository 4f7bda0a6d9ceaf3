"""What `/experts` tells of an instance's experts: load of each, its places, and the load of each rank that follows.

An instance reports its expert map and the tokens that its experts got; loads of ranks are worked out here, when
somebody looks. What is not known yet is null.
"""

from __future__ import annotations

from array import array

from tripool.api.schema import ExchangeCounts, LayerExperts, MemberExperts
from tripool.control.balance import rank_loads
from tripool.core.placement import unpack
from tripool.serve.wire import ExpertReport

DIGITS = 4              # of a load; more would be noise


def member_experts(report: ExpertReport) -> MemberExperts:
    """An instance's report, for people and their programs. Takes milliseconds for a large instance.

    Raises:
        WireError: its map is none.
    """
    figures, first, placement = report.figures, unpack(report.first), unpack(report.placement)
    num_layers, num_experts = len(placement.layers), placement.num_experts
    loads = array("f")
    loads.frombytes(report.loads)
    rank_of, num_ranks = placement.rank_of_slots(), placement.num_ranks
    layers = []
    for layer in range(num_layers):
        of_experts = list(loads[layer * num_experts:(layer + 1) * num_experts])
        has_load = any(of_experts)                  # a layer of MTP has none while nothing is drafted
        was_seen = has_load and layer < figures.num_planned      # the rebalancer looks at layers in order
        layers.append(LayerExperts(
            loads=_short(of_experts),
            slots=list(placement.layers[layer]),
            rank_loads=_short(rank_loads(placement.layers[layer], of_experts, rank_of, num_ranks)),
            first_rank_loads=_short(rank_loads(first.layers[layer], of_experts, rank_of, num_ranks)),
            max_over_mean=round(figures.after[layer], DIGITS) if has_load else None,
            max_over_mean_before=round(figures.before[layer], DIGITS) if was_seen else None))
    return MemberExperts(
        member=report.member, map_version=figures.version, runnable=figures.runnable, num_steps=figures.num_steps,
        num_experts=num_experts, num_routed=report.num_routed, slots_per_rank=list(placement.slots_per_rank),
        layers=layers, lost_ranks=list(figures.lost_ranks), layers_planned=figures.num_planned,
        layers_changed=figures.num_changed, layers_gated=figures.num_gated, layers_blocked=figures.num_blocked,
        num_moves=figures.num_moves, moved_bytes=figures.moved_bytes, num_failures=figures.num_failures,
        cause=figures.cause,
        exchange=[ExchangeCounts(counts["waited_ns"] / 1e9, counts["sent_bytes"], counts["sleeps"], counts["wakes"])
                  if counts else None for counts in report.exchange])


def _short(values: list[float]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]
