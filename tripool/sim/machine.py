"""A deployment on a described machine: what its steps and copies cost there, and what its dies can hold.

This is where `tripool simulate`, `plan` and the benchmarks meet: a deployment, the shape of a model and a hardware file
become the `Rig` that a `Simulation` runs on. Planes are those of the hardware, by the names it gives them: one carries
blocks from prefill to decode, one those of the pool, and the management plane what processes tell one another.
"""

from __future__ import annotations

import math

from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.messages import Role
from tripool.core.shape import ModelShape
from tripool.sim.costs.deployment import PAPER, DeploymentCosts, Style, deployment_costs
from tripool.sim.costs.rates import OperatorLevel
from tripool.sim.costs.residuals import NONE, Residuals
from tripool.sim.costs.state import Level
from tripool.sim.costs.steps import OperatorCosts
from tripool.sim.costs.transfers import PlaneKind, TransferCosts
from tripool.sim.demand import ExpertModel, Popularity
from tripool.sim.hardware.description import Hardware
from tripool.sim.pricing import ExchangeLinks, Plane, Planes, PoolEnds
from tripool.sim.simulation import Rig

GB = 1e9
US = 1e-6

EXPERT_DRIFT_S = 600.0
"""Assumed, where experts are asked unevenly for long at all: nobody publishes how fast that changes."""


def rig_of(deployment: Deployment, shape: ModelShape, hardware: Hardware, *, style: Style = PAPER,
           residuals: Residuals = NONE, level: OperatorLevel | None = None, acceptance: tuple[float, ...] = (),
           pull_plane: PlaneKind = "scale_out", pool_plane: PlaneKind = "scale_up",
           expert_spread: float = 0.0, expert_drift_s: float = EXPERT_DRIFT_S,
           npu_hour_price: float | None = None) -> Rig:
    """What a deployment of a model is simulated on.

    `level`: None takes the hardware's measured steps, if its file names any, and else its operators at the efficiency
    of each. `acceptance`: how likely the first draft of a step is right, the second, ... `expert_spread` and
    `expert_drift_s`: how unevenly experts are asked for long, and for how long (`Popularity`); what single requests ask
    of them is uneven besides, by `residuals`. `npu_hour_price`: the hardware's own if None.

    Raises:
        ConfigError: the deployment needs more dies or more memory than there are (with the bytes, per die), its pool
            cannot be read over the plane, or a table of steps is wrong.
    """
    if hardware.steps and level is None:
        residuals = NONE                   # what was measured needs no correction
    costs = deployment_costs(deployment, shape, hardware, style=style, residuals=residuals, level=level)
    first = next(iter(costs.instances.values()))
    skew = 0.0 if style.perfect_balance or level == "speed of light" else residuals.expert_skew
    popularity = Popularity(0.0 if style.perfect_balance else expert_spread, expert_drift_s, skew)
    price = hardware.package.usd_per_hour if npu_hour_price is None else npu_hour_price
    return Rig(costs.steps, _planes(hardware, costs.transfers, pull_plane, pool_plane, bool(deployment.cache.count)),
               token_bytes=round(first.entry_bytes()), cache_tokens=costs.cache_tokens,
               max_model_len=deployment.model.max_model_len or shape.max_position,
               npus_per_rank=1.0 / hardware.package.dies, npu_hour_price=price or 0.0, acceptance=acceptance,
               experts=_experts(deployment, costs, residuals), popularity=popularity,
               load_s=_load_s(costs, hardware, from_pool=bool(deployment.cache.count) and pool_plane == "scale_up"),
               factors=_factors(costs, residuals, popularity), api_s=costs.measured.api_s if costs.measured else 0.0,
               beside=costs.measured.beside if costs.measured else {}, links=_links(costs))


def _planes(hardware: Hardware, transfers: TransferCosts, pull: PlaneKind, pool: PlaneKind, has_pool: bool) -> Planes:
    kinds = {"scale_up": hardware.planes.scale_up, "scale_out": hardware.planes.scale_out,
             "management": hardware.planes.management}
    planes: dict[str, Plane] = {}
    level: Level = "measured" if hardware.steps else "efficiency"
    for wire in kinds.values():            # of one name: one network
        planes.setdefault(wire.name, Plane(wire.read_gbps * GB, max(wire.latency_us, wire.engine_startup_us) * US,
                                           level=level))
    ends = None
    if has_pool:
        reader, handling = transfers.reader_gbps(pool), transfers.handling_gbps(pool)
        ends = PoolEnds(die_bytes_per_s=GB / (1.0 / reader + 1.0 / handling),
                        server_bytes_per_s=transfers.memory_gbps(pool) * GB)
    return Planes(planes, kinds[pull].name, kinds[pool].name, kinds["management"].name, ends)


def _links(costs: DeploymentCosts) -> dict[Role, ExchangeLinks]:
    """Of roles whose ranks exchange; what was measured of whole steps says nothing of links."""
    found = {}
    for role, instance in costs.instances.items():
        prices = costs.steps[role]
        if isinstance(prices, OperatorCosts) and instance.geometry is not None and instance.ranks > 1:
            wire = instance.hardware.exchange_plane(instance.ranks)
            found[role] = ExchangeLinks(wire.name, wire.die_gbps * GB, prices.level)
    return found


def _load_s(costs: DeploymentCosts, hardware: Hardware, *, from_pool: bool) -> dict[Role, float]:
    """How long a rank that begins anew waits for its weights: from the pool's memory, else from disks of its node."""
    seconds = {}
    for role, instance in costs.instances.items():
        readers = min(instance.ranks, hardware.dies_per_node)
        seconds[role] = costs.transfers.load_s(instance.weight_bytes(), readers=readers,
                                               source="pool" if from_pool else "disk")
    return seconds


def _experts(deployment: Deployment, costs: DeploymentCosts, residuals: Residuals) -> dict[Role, ExpertModel]:
    """Of all roles whose experts are spread over ranks."""
    models = {}
    for role, instance in costs.instances.items():
        if instance.geometry is None or instance.ranks == 1:
            continue
        config: InstanceConfig = getattr(deployment, role)
        wire = instance.hardware.exchange_plane(instance.ranks)
        room = config.exchange_tokens or max(config.most_decode_tokens, config.max_num_batched_tokens)
        models[role] = ExpertModel(
            instance.geometry, instance.num_moe_layers, instance.shape.num_experts_per_token,
            round(instance.shape.expert_params() * instance.numbers.weight_bytes),
            OperatorCosts(instance, residuals=residuals).seconds_per_expert_token, room,
            wire.read_gbps * GB, wire.name)
    return models


def _factors(costs: DeploymentCosts, residuals: Residuals, popularity: Popularity) -> dict[str, float]:
    """Corrections and assumptions that these prices contain. Of measured steps, and at the speed of light, fewer."""
    used = {} if math.isinf(residuals.pool_gbps) else {"pool_gbps": residuals.pool_gbps}
    if any(isinstance(each, OperatorCosts) and each.residuals is residuals for each in costs.steps.values()):
        used |= {name: getattr(residuals, name) for name in ("layer_overhead", "step_overhead_ms")}
        used |= {"expert_skew": popularity.skew}
    if popularity.spread:
        used |= {"expert_spread": popularity.spread, "expert_drift_s": popularity.drift_s}
    return used | (costs.measured.factors if costs.measured else {})
