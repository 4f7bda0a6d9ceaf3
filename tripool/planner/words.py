"""A deployment in a line, and what two deployments differ in."""

from __future__ import annotations

from dataclasses import fields

from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.messages import ROLES
from tripool.sim.hardware.description import Hardware


def describe(deployment: Deployment, hardware: Hardware) -> str:
    """Its pools: how many instances of how many ranks, and on how many NPUs."""
    dies, name = hardware.package.dies, hardware.package.name
    pools = []
    for role in ROLES:
        config: InstanceConfig = getattr(deployment, role)
        if config.count:
            pools.append(f"{config.count} × {config.ranks} {role}")
    total = sum(getattr(deployment, role).count * getattr(deployment, role).ranks for role in ROLES)
    return f"{' + '.join(pools)} rank(s), {total / dies:g} {name}(s)"


def ratio(deployment: Deployment) -> str:
    """Ranks that prefill to ranks that decode."""
    prefill, decode = (config.count * config.ranks for config in (deployment.prefill, deployment.decode))
    return f"{prefill}:{decode}" if prefill else "-"


def differences(one: Deployment, other: Deployment) -> list[tuple[str, str, str]]:
    """Names of fields, and what each of two deployments has there; queues and deadlines of the gateway are left out."""
    found = []
    for room in (*ROLES, "cache"):
        mine, theirs = getattr(one, room), getattr(other, room)
        if not mine.count and not theirs.count:
            continue
        for each in fields(mine):
            left, right = getattr(mine, each.name), getattr(theirs, each.name)
            absent = [not config.count and each.name != "count" for config in (mine, theirs)]
            if left != right and not all(absent):
                found.append((f"{room}.{each.name}", "-" if absent[0] else str(left), "-" if absent[1] else str(right)))
    if one.block_tokens != other.block_tokens:
        found.append(("block_tokens", str(one.block_tokens), str(other.block_tokens)))
    return found
