"""Prices for everything that a deployment file describes, on a machine that is named.

This is what `simulate` and `plan` call. A deployment that the machine has no dies for, or whose model does not fit into
a die, is refused before anything is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.errors import ConfigError
from tripool.core.messages import ROLES, Role
from tripool.core.shape import ModelShape
from tripool.sim.costs.instance import Instance, instance_of
from tripool.sim.costs.rates import OperatorLevel
from tripool.sim.costs.residuals import NONE, Residuals
from tripool.sim.costs.state import StepCosts
from tripool.sim.costs.steps import OperatorCosts
from tripool.sim.costs.table import StepTable, read_table
from tripool.sim.costs.transfers import TransferCosts
from tripool.sim.costs.work import Numbers
from tripool.sim.hardware.description import Hardware


@dataclass(frozen=True, slots=True)
class Style:
    """How the described instances are programmed; what a deployment file does not say."""

    numbers: Numbers = field(default_factory=Numbers)
    sequence_parallel: bool = False        # prefill attention as SP-TP-SP (section 4.3.1)
    vector_routing: bool = False           # section 4.3.2
    perfect_balance: bool = False          # experts are asked for exactly what their placement knew
    device_sampling: bool = True           # section 4.2.4


PAPER = Style(sequence_parallel=True, vector_routing=True)
"""As CloudMatrix-Infer does it."""


@dataclass(frozen=True, slots=True)
class DeploymentCosts:
    """Prices of one deployment."""

    instances: dict[Role, Instance]        # by role
    steps: dict[Role, StepCosts]
    cache_tokens: dict[Role, int]          # of a rank: what the file says, else what its die has room for
    transfers: TransferCosts
    num_dies: int                          # of all instances together
    measured: StepTable | None = None      # where steps come from it


def deployment_costs(deployment: Deployment, shape: ModelShape, hardware: Hardware, *, style: Style = PAPER,
                     residuals: Residuals = NONE, level: OperatorLevel | None = None) -> DeploymentCosts:
    """Prices for each role of a deployment. Without a level steps cost what was measured of them, if the hardware's
    file names a table, and else what their operators do at the efficiency of each.

    Raises:
        ConfigError: too few dies, a model that does not fit (with the bytes needed and had, per die), cache servers
            that do not, experts without a place, or a wrong table of steps.
    """
    instances: dict[Role, Instance] = {}
    steps: dict[Role, StepCosts] = {}
    cache_tokens, num_dies = {}, 0
    measured = read_table(Path(hardware.steps)) if hardware.steps and level is None else None
    for role in ROLES:
        config: InstanceConfig = getattr(deployment, role)
        if not config.count:
            continue
        num_dies += config.count * config.ranks
        instance = instance_of(shape, hardware, config, numbers=style.numbers,
                               sequence_parallel=style.sequence_parallel, perfect_balance=style.perfect_balance,
                               vector_routing=style.vector_routing, device_sampling=style.device_sampling)
        cache_tokens[role] = _cache_tokens(instance, config, role)
        instances[role] = instance
        steps[role] = measured.of(role) if measured else OperatorCosts(instance, level=level or "efficiency",
                                                                       residuals=residuals)
    if num_dies > hardware.num_dies:
        raise ConfigError(f"the deployment needs {num_dies} dies, and {hardware.name} has {hardware.num_dies} "
                          f"({hardware.nodes} nodes of {hardware.dies_per_node})")
    servers, memory_gb = -(-deployment.cache.count // hardware.nodes), hardware.node.host_memory_gb
    if memory_gb is not None and servers * deployment.cache.bytes > memory_gb * 1e9:
        raise ConfigError(f"cache.bytes is {deployment.cache.bytes}, and a node of {hardware.name} with {servers} of "
                          f"{deployment.cache.count} cache servers has {memory_gb:g} GB of memory in all")
    return DeploymentCosts(instances, steps, cache_tokens, TransferCosts(hardware, residuals=residuals), num_dies,
                           measured)


def _cache_tokens(instance: Instance, config: InstanceConfig, role: str) -> int:
    exchanged = config.exchange_tokens or config.most_decode_tokens
    told = config.cache_tokens or int(config.cache_bytes / instance.entry_bytes())
    try:
        instance.check_fits(told or 1, exchanged)
    except ConfigError as error:
        raise ConfigError(f"{role}: {error}") from error
    return told or instance.cache_tokens(exchanged)
