"""What a machine is, for the simulator: dies, packages, nodes, planes, and how well operators do on them.

A machine is one TOML file. Those of this folder are known by name; a path is taken wherever a name is, so a user adds a
machine with one file and no code. There is no default machine, and an unknown name is an error. Bandwidth is per
direction, in 10^9 bytes a second. A die is the unit of everything that computes: where an accelerator is a package
of two, what is published per package has been divided before it was written down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tripool.core.deployment import build, read_table
from tripool.core.errors import ConfigError

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Die:
    """What computes. A rank of an instance runs on one."""

    peak_16bit_tflops: float               # dense matrix products of BF16 or FP16
    peak_8bit_tops: float                  # of INT8 or FP8, whichever the machine has
    memory_gb: float                       # 10^9 bytes
    memory_gbps: float
    matrix_cores: int                      # AIC of an Ascend die, SM of a GPU: what a microbatch split divides
    vector_cores: int                      # AIV of an Ascend die; a GPU's SM do both
    tile_rows: int = 128                   # a matrix product computes rows in multiples of this

    def __post_init__(self) -> None:
        _positive(self, "peak_16bit_tflops", "peak_8bit_tops", "memory_gb", "memory_gbps", "matrix_cores",
                  "vector_cores", "tile_rows")


@dataclass(frozen=True, slots=True)
class Package:
    """What is bought and counted: an NPU of two dies, a GPU of one."""

    name: str
    dies: int
    die_to_die_gbps: float | None = None   # between two dies of one package
    usd_per_hour: float | None = None      # None: nobody published a price

    def __post_init__(self) -> None:
        _positive(self, "dies")
        _positive_if_known(self, "die_to_die_gbps", "usd_per_hour")


@dataclass(frozen=True, slots=True)
class Node:
    """A server."""

    packages: int
    cpu_sockets: int
    host_memory_gb: float | None = None    # of all sockets; None: not published

    def __post_init__(self) -> None:
        _positive(self, "packages", "cpu_sockets")
        _positive_if_known(self, "host_memory_gb")


@dataclass(frozen=True, slots=True)
class Switches:
    """Two levels of switches in sub-planes that never meet. Each node has one L1 chip in each sub-plane."""

    subplanes: int
    l1_uplinks: int                        # of an L1 chip, one to each L2 chip of its sub-plane
    l2_chips: int                          # in a sub-plane of the full machine
    l2_ports: int
    port_gbps: float
    chips_per_switch: int = 1              # chips that are sold, and counted by the paper's Table 10, as one switch

    def __post_init__(self) -> None:
        _positive(self, "subplanes", "l1_uplinks", "l2_chips", "l2_ports", "port_gbps", "chips_per_switch")


@dataclass(frozen=True, slots=True)
class Plane:
    """One network. `spans` says who can reach whom: dies of a node, of the machine, or of any machine."""

    name: str
    spans: str                             # node, machine, beyond
    die_gbps: float                        # of one die's links
    read_gbps: float                       # what one die reaches when it reads from another node
    write_gbps: float
    latency_us: float                      # of one small write to another node
    host_read_gbps: float = 0.0            # a die reads memory of a CPU; 0: it cannot
    socket_gbps: float = 0.0               # of one CPU socket; 0: CPUs have no link of their own
    node_gbps: float = 0.0                 # shared by all of a node; 0: not shared
    direct_startup_us: float = 0.0         # the cores write themselves (AIV-direct)
    engine_startup_us: float = 0.0         # a copy engine does it (SDMA, DMA of a network card)
    switches: Switches | None = None

    def __post_init__(self) -> None:
        if self.spans not in ("node", "machine", "beyond"):
            raise ConfigError(f"spans is {self.spans!r}; known are node, machine, beyond")
        _positive(self, "die_gbps", "read_gbps", "write_gbps")
        _not_negative(self, "latency_us", "host_read_gbps", "socket_gbps", "node_gbps", "direct_startup_us",
                      "engine_startup_us")


@dataclass(frozen=True, slots=True)
class Planes:
    """The three networks of a supernode; a cluster of servers has them too, with other names and sizes."""

    scale_up: Plane                        # UB, NVLink: exchange of experts, the cache pool
    scale_out: Plane                       # RDMA: hand-over from prefill to decode
    management: Plane                      # VPC: storage and the outer world


@dataclass(frozen=True, slots=True)
class Storage:
    """Where weights come from when nobody has them in memory."""

    bucket_gbps: float                     # of the object store, shared by everybody who reads one model
    disk_gbps: float                       # of a node's disks

    def __post_init__(self) -> None:
        _positive(self, "bucket_gbps", "disk_gbps")


@dataclass(frozen=True, slots=True)
class ExchangeTime:
    """One measured dispatch or combine. `tokens` of each rank, each to `picks` experts."""

    op: str                                # dispatch, combine
    ranks: int
    microseconds: float
    tokens: int = 128
    picks: int = 8
    message_bytes: int = 0                 # of one token to one expert

    def __post_init__(self) -> None:
        if self.op not in ("dispatch", "combine"):
            raise ConfigError(f"op is {self.op!r}; known are dispatch and combine")
        _positive(self, "ranks", "microseconds", "tokens", "picks", "message_bytes")


@dataclass(frozen=True, slots=True)
class BulkExchange:
    """How a prefill's tokens travel: many megabytes at a time."""

    copies: str                            # expert: one for each chosen expert · node: one for each node with any
    mover: str                             # engine: beside the cores · cores: takes a share of them
    dispatch_gbps: float
    combine_gbps: float
    cores: int = 0                         # matrix cores that the mover keeps from computing

    def __post_init__(self) -> None:
        if self.copies not in ("expert", "node"):
            raise ConfigError(f"copies is {self.copies!r}; known are expert and node")
        if self.mover not in ("engine", "cores"):
            raise ConfigError(f"mover is {self.mover!r}; known are engine and cores")
        _positive(self, "dispatch_gbps", "combine_gbps")
        _not_negative(self, "cores")


@dataclass(frozen=True, slots=True)
class Exchange:
    """Expert exchange of a decode step (`times`) and of a prefill step (`bulk`)."""

    flag_us: float                         # one flag's way to a peer, which it tells that all tokens have come
    times: tuple[ExchangeTime, ...]
    bulk: BulkExchange

    def __post_init__(self) -> None:
        _not_negative(self, "flag_us")
        for op in ("dispatch", "combine"):
            if not any(each.op == op for each in self.times):
                raise ConfigError(f"times has no {op}")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The share of a peak that operators reach when they run alone. Curves are [rows, share] in ascending rows."""

    projection: tuple[tuple[float, ...], ...]    # 8-bit products of a layer, of the 8-bit peak
    expert: tuple[tuple[float, ...], ...]        # the same of an expert's tokens
    weights: float                               # of the memory's bandwidth, where weights are what is waited for
    attention: float                             # of the 16-bit peak
    attention_memory: float                      # of the memory's bandwidth, where cache entries are waited for
    vector: float                                # of the memory's bandwidth: norms, quantisation, routing

    def __post_init__(self) -> None:
        for name in ("projection", "expert"):
            curve = getattr(self, name)
            rows = [point[0] for point in curve]
            if not curve or any(len(point) != 2 for point in curve) or rows != sorted(set(rows)):
                raise ConfigError(f"{name} is {curve!r}; give [rows, share] pairs in ascending rows")
            for _, share in curve:
                _share(name, share)
        for name in ("weights", "attention", "attention_memory", "vector"):
            _share(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class DecodeSplit:
    """With two microbatches attention and experts run side by side: who gets which cores."""

    attention_cores: int                   # 0: both take turns on all cores, only the exchange runs beside them
    expert_cores: int
    adaptive: bool = False                 # the same cores, divided anew for every step so that both take as long

    def __post_init__(self) -> None:
        _not_negative(self, "attention_cores", "expert_cores")
        if bool(self.attention_cores) != bool(self.expert_cores):
            raise ConfigError(f"attention_cores is {self.attention_cores} and expert_cores is {self.expert_cores}; "
                              "give both, or 0 for both")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine."""

    name: str
    nodes: int
    die: Die
    package: Package
    node: Node
    planes: Planes
    storage: Storage
    exchange: Exchange
    efficiency: Efficiency
    decode_split: DecodeSplit
    graph_launch_ms: float                 # a CPU launches one compiled graph
    steps: str = ""                        # a file of measured steps, beside this one (`costs/table.py`); then nothing
    #                                        is reckoned of operators

    def __post_init__(self) -> None:
        _positive(self, "nodes")
        _not_negative(self, "graph_launch_ms")
        cores = self.decode_split.attention_cores + self.decode_split.expert_cores
        if cores > self.die.matrix_cores:
            raise ConfigError(f"decode_split has {cores} cores, but a die has {self.die.matrix_cores} matrix cores")
        if self.exchange.bulk.cores >= self.die.matrix_cores:
            raise ConfigError(f"exchange.bulk.cores is {self.exchange.bulk.cores}, which leaves none of "
                              f"{self.die.matrix_cores} matrix cores to compute")

    @property
    def dies_per_node(self) -> int:
        return self.node.packages * self.package.dies

    def exchange_plane(self, ranks: int) -> Plane:
        """Over which so many ranks, one on each die, exchange: scale-up if it joins all of them."""
        near = self.planes.scale_up.spans != "node" or ranks <= self.dies_per_node
        return self.planes.scale_up if near else self.planes.scale_out

    @property
    def num_packages(self) -> int:
        return self.nodes * self.node.packages

    @property
    def num_dies(self) -> int:
        return self.nodes * self.dies_per_node

    @property
    def num_cpus(self) -> int:
        return self.nodes * self.node.cpu_sockets


def known_hardware() -> list[str]:
    """Names of the machines that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_hardware(name_or_path: str) -> Hardware:
    """A machine by its name or by the path of its file.

    Raises:
        ConfigError: nothing was named, it is unknown, or its file is wrong; the message names the key.
    """
    if not name_or_path:
        raise ConfigError(f"no hardware was named; give one of {', '.join(known_hardware())}, or a TOML file")
    path = Path(name_or_path)
    if path.suffix != ".toml":
        if name_or_path not in known_hardware():
            raise ConfigError(f"there is no hardware {name_or_path!r}; known are {', '.join(known_hardware())}, and a "
                              "machine of your own is a TOML file whose path you give")
        path = FOLDER / f"{name_or_path}.toml"
    hardware = hardware_of(read_table(path), str(path))
    return replace(hardware, steps=str(path.parent / hardware.steps)) if hardware.steps else hardware


def hardware_of(table: dict[str, object], source: str) -> Hardware:
    """A machine from the table of its file.

    Raises:
        ConfigError: a key is unknown, missing or out of range.
    """
    return build(Hardware, table, source)


def _positive(value: object, *names: str) -> None:
    for name in names:
        if not getattr(value, name) > 0:
            raise ConfigError(f"{name} is {getattr(value, name)}; it must be positive")


def _positive_if_known(value: object, *names: str) -> None:
    _positive(value, *[name for name in names if getattr(value, name) is not None])


def _not_negative(value: object, *names: str) -> None:
    for name in names:
        if getattr(value, name) < 0:
            raise ConfigError(f"{name} is {getattr(value, name)}; it must not be negative")


def _share(name: str, share: float) -> None:
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"{name} has the share {share}; it must be above 0 and at most 1")
