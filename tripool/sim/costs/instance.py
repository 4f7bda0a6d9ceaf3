"""An instance on a described machine: what is priced, and whether it fits into the memory of its dies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tripool.core.deployment import InstanceConfig
from tripool.core.errors import ConfigError
from tripool.core.placement import Geometry, even_geometry
from tripool.core.shape import ModelShape
from tripool.sim.costs.work import Numbers, combine_bytes, dispatch_bytes, entry_bytes
from tripool.sim.hardware.description import Hardware

GB = 1e9


@dataclass(frozen=True, slots=True)
class Instance:
    """Ranks that step together, one on each die. Checked when built.

    Raises:
        ConfigError: the machine has fewer dies, or the experts do not fit the ranks.
    """

    shape: ModelShape
    hardware: Hardware
    ranks: int
    geometry: Geometry | None = None       # expert slots; None: of a dense model
    numbers: Numbers = field(default_factory=Numbers)
    sequence_parallel: bool = False        # prefill attention as SP-TP-SP over all ranks (section 4.3.1)
    perfect_balance: bool = False          # every step asks of the experts exactly what the placement knew
    vector_routing: bool = False           # a prefill lays tokens out once and sums what comes back, on vector cores,
    #                                        with two microbatches beside matrix cores (DispatchCompute and
    #                                        CombineCompute, section 4.3.2); else CANN's double routing, in line
    device_sampling: bool = True           # False: a CPU launches each graph of a step and samples between them

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"ranks is {self.ranks}; give at least 1")
        if self.ranks > self.hardware.num_dies:
            raise ConfigError(f"ranks is {self.ranks}, and {self.hardware.name} has {self.hardware.num_dies} dies")
        if self.shape.num_routed_experts and self.geometry is None:
            raise ConfigError("geometry is missing: the model has experts")
        if self.geometry is not None and self.geometry.num_ranks != self.ranks:
            raise ConfigError(f"geometry is for {self.geometry.num_ranks} ranks, the instance has {self.ranks}")

    @property
    def num_moe_layers(self) -> int:
        """Among the main layers."""
        return sum(self.shape.is_moe(layer) for layer in range(self.shape.num_layers))

    @property
    def shared_is_placed(self) -> bool:
        """Whether copies of the shared expert have slots; else each rank computes it for its own tokens."""
        return self.geometry is not None and bool(self.geometry.shared_slots)

    # ------------------------------------------------------------ memory

    def weight_bytes(self) -> float:
        """Of the fullest rank, all layers, embedding and head."""
        shape, numbers = self.shape, self.numbers
        slots = max(self.geometry.slots_per_rank) if self.geometry else 0
        own_shared = 0 if self.shared_is_placed else shape.num_shared_experts
        total = 0.0
        for layer in range(shape.num_cached_layers):
            matrices = float(shape.attention_params())
            if shape.is_moe(layer):
                matrices += (slots + own_shared) * shape.expert_params()
                total += shape.hidden_size * shape.num_routed_experts * 4.0        # the gate, FP32
            else:
                matrices += 3 * shape.hidden_size * shape.intermediate_size
            total += matrices * numbers.weight_bytes
        total += shape.num_mtp_layers * 2 * shape.hidden_size**2 * numbers.weight_bytes
        tables = 1 if shape.tie_embeddings else 2
        return total + tables * shape.vocab_size * shape.hidden_size * numbers.table_bytes

    def exchange_buffer_bytes(self, tokens: int) -> float:
        """Static buffers for steps of up to so many tokens on a rank (section 4.2.1, equations 1 and 2)."""
        if self.ranks == 1 or self.geometry is None:
            return 0.0
        per_rank = tokens * min(self.shape.num_experts_per_token, max(self.geometry.slots_per_rank))
        message = dispatch_bytes(self.shape, self.numbers) + combine_bytes(self.shape, self.numbers)
        return self.ranks * per_rank * message

    def entry_bytes(self) -> float:
        """Of one token in all layers."""
        return entry_bytes(self.shape, self.numbers, self.shape.num_cached_layers)

    def cache_tokens(self, exchange_tokens: int) -> int:
        """How many tokens the cache of a rank can hold beside weights and buffers; 0 if those do not fit."""
        room = self.hardware.die.memory_gb * GB - self.weight_bytes() - self.exchange_buffer_bytes(exchange_tokens)
        return max(0, math.floor(room / self.entry_bytes()))

    def check_fits(self, cache_tokens: int, exchange_tokens: int) -> None:
        """See that a rank can hold weights, buffers and so many tokens.

        Raises:
            ConfigError: it cannot; with the bytes that are needed and that there are, per die.
        """
        parts = {"weights": self.weight_bytes(), "exchange buffers": self.exchange_buffer_bytes(exchange_tokens),
                 f"cache of {cache_tokens} tokens": cache_tokens * self.entry_bytes()}
        need, have = sum(parts.values()), self.hardware.die.memory_gb * GB
        if need > have:
            words = ", ".join(f"{name} {value / GB:.1f}" for name, value in parts.items())
            raise ConfigError(f"the model does not fit: each die of {self.hardware.name} has {have / GB:.1f} GB and "
                              f"{self.ranks} rank(s) need {need / GB:.1f} GB ({words})")


def instance_of(shape: ModelShape, hardware: Hardware, config: InstanceConfig, *,
                numbers: Numbers | None = None, sequence_parallel: bool = False, perfect_balance: bool = False,
                vector_routing: bool = False, device_sampling: bool = True) -> Instance:
    """The instance that a deployment describes.

    Raises:
        ConfigError: it needs more dies than there are, or its experts have no place.
    """
    geometry = None
    if shape.num_routed_experts:
        geometry = even_geometry(config.ranks, shape.num_routed_experts, num_redundant=config.redundant_experts,
                                 num_shared_copies=config.shared_expert_copies,
                                 num_groups=shape.num_groups if config.expert_nodes > 1 else 1,
                                 num_nodes=config.expert_nodes)
    return Instance(shape, hardware, config.ranks, geometry, numbers or Numbers(), sequence_parallel, perfect_balance,
                    vector_routing, device_sampling)
