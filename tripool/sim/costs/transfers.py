"""How long bytes take between pools: cached context, weights, and the hand-over from prefill to decode.

The cache pool's software handles bytes at a rate of its own (a residual), in series with the wire: look-ups, leases,
laying blocks out. Memory that is pooled over the scale-up plane is read by a die directly; over the management plane
bytes land in memory of their own host first and are handled there a second time (section 4.4.1, and 5.4.3: UB or VPC).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tripool.core.errors import ConfigError
from tripool.sim.costs.residuals import NONE, Residuals
from tripool.sim.hardware.description import Hardware, Plane

PlaneKind = Literal["scale_up", "scale_out", "management"]


class TransferCosts:
    """Of one machine. Bytes are those of one die; all dies of a node do the same at the same time."""

    def __init__(self, hardware: Hardware, *, residuals: Residuals = NONE) -> None:
        self._hardware, self._residuals = hardware, residuals

    def reader_gbps(self, plane: PlaneKind) -> float:
        """What one die gets of a plane to read the pool with, when nothing else limits it.

        Raises:
            ConfigError: dies cannot read memory of CPUs over it.
        """
        wire: Plane = getattr(self._hardware.planes, plane)
        if plane != "scale_up":
            return _shared(wire, self._hardware.dies_per_node)
        if not wire.host_read_gbps:
            raise ConfigError(f"{self._hardware.name}: planes.scale_up.host_read_gbps is 0, so that no pool can be "
                              "read over it; choose the management plane")
        return wire.host_read_gbps

    def memory_gbps(self, plane: PlaneKind) -> float:
        """What the memory of one node gives to all who read it over a plane."""
        wire: Plane = getattr(self._hardware.planes, plane)
        if plane == "scale_up":
            return wire.socket_gbps * self._hardware.node.cpu_sockets or wire.host_read_gbps
        return wire.node_gbps or wire.read_gbps * self._hardware.dies_per_node

    def wire_gbps(self, plane: PlaneKind) -> float:
        """What one die gets of the plane on which the pool is read."""
        read, wire = self.reader_gbps(plane), self._hardware.planes.scale_up
        if plane != "scale_up" or not wire.socket_gbps:
            return read
        return min(read, self.memory_gbps(plane) / self._hardware.dies_per_node)

    def handling_gbps(self, plane: PlaneKind) -> float:
        """What the pool's software gets through for one die: twice over the management plane, where bytes land in
        memory of the die's own host first."""
        return self._residuals.pool_gbps / (2 if plane == "management" else 1)

    def fetch_s(self, num_bytes: float, plane: PlaneKind = "scale_up") -> float:
        """Cached context from the pool."""
        if num_bytes <= 0.0:
            return 0.0
        wire: Plane = getattr(self._hardware.planes, plane)
        return (num_bytes / (self.wire_gbps(plane) * 1e9) + num_bytes / (self.handling_gbps(plane) * 1e9)
                + wire.engine_startup_us * 1e-6)

    def store_s(self, num_bytes: float, plane: PlaneKind = "scale_up") -> float:
        """Context to the pool: as long as a fetch, behind the request's back."""
        return self.fetch_s(num_bytes, plane)

    def load_s(self, num_bytes: float, *, readers: int = 1, source: str = "pool") -> float:
        """A die's weights from the pool's memory (as large copies, which its software does not slow), from the disks of
        its node, or from the object store, which `readers` dies share.

        Raises:
            ConfigError: there is no such source.
        """
        storage, hardware = self._hardware.storage, self._hardware
        if source == "pool":
            plane = hardware.planes.scale_up
            return num_bytes / (self.wire_gbps("scale_up") * 1e9) + plane.engine_startup_us * 1e-6
        if source == "disk":
            return num_bytes * min(readers, hardware.dies_per_node) / (storage.disk_gbps * 1e9)
        if source == "bucket":
            return num_bytes * readers / (storage.bucket_gbps * 1e9)
        raise ConfigError(f"source is {source!r}; known are pool, disk and bucket")

    def hand_over_s(self, num_bytes: float, *, sharing: int = 1, plane: str = "scale_out") -> float:
        """A request's cache from a prefill rank to a decode rank, while `sharing` of them read that prefill rank."""
        wire: Plane = getattr(self._hardware.planes, plane)
        return num_bytes * max(1, sharing) / (wire.read_gbps * 1e9) + wire.engine_startup_us * 1e-6


def _shared(plane: Plane, dies: int) -> float:
    return min(plane.read_gbps, plane.node_gbps / dies) if plane.node_gbps else plane.read_gbps


@dataclass(frozen=True, slots=True)
class ConnectionMap:
    """Which prefill rank a decode rank reads (section 4.3.3). All ranks of a prefill group hold the same entries.

    Raises:
        ConfigError: the sizes do not divide.
    """

    prefill_tp: int
    decode_tp: int
    decode_dp: int

    def __post_init__(self) -> None:
        if self.prefill_tp % self.decode_tp:
            raise ConfigError(f"prefill_tp is {self.prefill_tp}, which decode_tp {self.decode_tp} does not divide")
        if self.decode_dp % self.ratio:
            raise ConfigError(f"decode_dp is {self.decode_dp}, which the ratio {self.ratio} of prefill_tp and "
                              "decode_tp does not divide")

    @property
    def ratio(self) -> int:
        return self.prefill_tp // self.decode_tp

    @property
    def group_size(self) -> int:
        """Decode ranks that read one prefill rank."""
        return self.decode_dp // self.ratio

    def prefill_rank(self, decode_dp_rank: int, decode_tp_rank: int = 0) -> int:
        return decode_dp_rank // self.group_size * self.decode_tp + decode_tp_rank


@dataclass(frozen=True, slots=True)
class ModelLoading:
    """How long instances wait for weights, by where these are kept (the paper's Table 1)."""

    cold_start_s: float
    warm_start_s: float | None             # None: there is nothing to start from
    memory_copies: float                   # of the model, in host memory
    hit_rate: float                        # when an instance changes to another model
    switch_s: float


def model_loading(strategy: str, *, instances: int, read_s: float, warm_s: float, models: int) -> ModelLoading:
    """`read_s`: one instance alone reads the model from storage; `warm_s`: from memory; `models` that take turns.

    Without a cache all instances read at once and share the storage. With a cache in each node an instance finds the
    model it held last, one of `models`. With a pool one reads and all find it.
    """
    if strategy == "no cache":
        return ModelLoading(instances * read_s, None, 0.0, 0.0, read_s)
    if strategy == "local DRAM":
        hit = 1.0 / models
        return ModelLoading(instances * read_s, warm_s, instances, hit, hit * warm_s + (1.0 - hit) * read_s)
    if strategy == "EMS":
        return ModelLoading(read_s, warm_s, 1.0, 1.0, warm_s)
    raise ConfigError(f"strategy is {strategy!r}; known are no cache, local DRAM and EMS")
