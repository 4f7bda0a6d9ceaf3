"""How long tokens take to their experts and back.

A decode step's exchange is fused with what cores do (FusedDispatch, FusedCombine, section 4.2.1): measured times for
so many ranks at one batch. Another batch is reckoned in two parts. What does not depend on tokens is the flags: the
barrier on own writes, a flag's way to a peer, the look at what has come. Flags to many peers do not wait for one
another, as nobody waits for a remote write. The rest of the measured time grows with the bytes. A prefill step's
exchange moves bytes at a rate, as copies beside the cores or as kernels on some of them.
"""

from __future__ import annotations

import math

import numpy as np

from tripool.core.shape import ModelShape
from tripool.sim.costs.rates import OperatorLevel
from tripool.sim.costs.work import Numbers, combine_bytes, dispatch_bytes
from tripool.sim.hardware.description import Hardware

NUM_FLAG_WAYS = 3
"""Own writes have arrived; the flag has; the peer's has."""


class ExchangeCosts:
    """Of one instance of so many ranks."""

    def __init__(self, shape: ModelShape, hardware: Hardware, numbers: Numbers, ranks: int,
                 level: OperatorLevel) -> None:
        self._hardware, self._level = hardware, level
        self._shape, self._ranks = shape, ranks
        self._plane = hardware.exchange_plane(ranks)
        self._picks = shape.num_experts_per_token
        self._bytes = {"dispatch": dispatch_bytes(shape, numbers), "combine": combine_bytes(shape, numbers)}
        self._fixed_s = NUM_FLAG_WAYS * hardware.exchange.flag_us * 1e-6
        self._per_byte_s = {op: self._measured_per_byte(op) for op in self._bytes}
        self._copies = self._copies_of_token()

    def fused_s(self, op: str, tokens: float, busiest: float = 1.0, share: float = 1.0) -> float:
        """Dispatch or combine of a decode step; `tokens` of the rank with the most, `busiest` of what arrives.

        `share` is what it has of its links: it waits for them where that is less than it asks for.
        """
        if self._ranks == 1:
            return 0.0
        sent = tokens * self._picks * self._bytes[op]
        wire = sent * busiest / (self._plane.die_gbps * share * 1e9)
        if self._level == "speed of light":
            return wire + self._plane.latency_us * 1e-6
        return self._fixed_s + max(sent * self._per_byte_s[op], wire)

    def bulk_s(self, op: str, tokens: float, busiest: float = 1.0, share: float = 1.0) -> float:
        """The same of a prefill step, for the rank with the most tokens to send or to take."""
        if self._ranks == 1:
            return 0.0
        bulk, plane = self._hardware.exchange.bulk, self._hardware.planes.scale_up
        moved = tokens * self._copies * self._bytes[op] * busiest
        inside = self._num_nodes == 1 and plane.spans == "node"
        gbps = plane.write_gbps if inside else bulk.dispatch_gbps if op == "dispatch" else bulk.combine_gbps
        if self._level == "speed of light":
            gbps = self._plane.die_gbps
        if share < 1.0:
            gbps = min(gbps, self._plane.die_gbps * share)
        startup_us = plane.engine_startup_us if bulk.mover == "engine" else plane.direct_startup_us
        return moved / (gbps * 1e9) + startup_us * 1e-6

    @property
    def _num_nodes(self) -> int:
        return math.ceil(self._ranks / self._hardware.dies_per_node)

    def _measured_per_byte(self, op: str) -> float:
        """Seconds for a byte sent, between the measured numbers of ranks and beyond the last one as it was there."""
        points = sorted((each for each in self._hardware.exchange.times if each.op == op), key=lambda each: each.ranks)
        rates = []
        for each in points:
            sent = each.tokens * each.picks * each.message_bytes
            rates.append(max(each.microseconds * 1e-6 - self._fixed_s, 0.0) / sent)
        return float(np.interp(math.log2(self._ranks), [math.log2(each.ranks) for each in points], rates))

    def _copies_of_token(self) -> float:
        """How often a token travels in a prefill: to each expert on another rank, or to each node with any of them."""
        shape, nodes = self._shape, self._num_nodes
        if self._hardware.exchange.bulk.copies == "expert":
            return self._picks * (1.0 - 1.0 / self._ranks)
        if nodes == 1:                     # once for each rank with a chosen expert
            return self._ranks * (1.0 - (1.0 - 1.0 / self._ranks) ** self._picks)
        groups = shape.num_groups
        if groups > 1 and groups % nodes == 0:
            per_node, chosen = groups // nodes, shape.num_chosen_groups
            missed = math.comb(groups - per_node, chosen) / math.comb(groups, chosen)
            return nodes * (1.0 - missed)
        return nodes * (1.0 - (1.0 - 1.0 / nodes) ** self._picks)
