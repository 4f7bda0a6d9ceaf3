"""Whether every node of a switched plane can send at full rate to every other, and what its switches cost.

The paper's scale-up plane (section 3.3): each node has one L1 chip in each sub-plane, an L1 chip has one link to each
L2 chip of its sub-plane, and sub-planes never meet. L2 chips of a smaller machine can be fewer, because several links
of an L1 chip may go to one L2 chip; they come in whole switches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tripool.core.errors import ConfigError
from tripool.sim.hardware.description import Hardware, Switches


@dataclass(frozen=True, slots=True)
class SwitchUse:
    """Switches of the second level that a machine of so many nodes needs."""

    nodes: int
    num_switches: int
    utilisation: float                     # links in use over links there are


def switch_use(switches: Switches, nodes: int) -> SwitchUse:
    """The paper's Table 10: a sub-plane needs as many ports of the second level as its L1 chips have uplinks.

    Raises:
        ConfigError: more nodes than the second level has ports for.
    """
    if nodes < 1:
        raise ConfigError(f"nodes is {nodes}; give at least 1")
    if nodes > switches.l2_ports * switches.l2_chips // switches.l1_uplinks:
        raise ConfigError(f"{nodes} nodes need {nodes * switches.l1_uplinks} ports of the second level in each "
                          f"sub-plane, and there are {switches.l2_ports * switches.l2_chips}")
    links = nodes * switches.l1_uplinks
    per_subplane = math.ceil(links / (switches.l2_ports * switches.chips_per_switch))
    ports = per_subplane * switches.chips_per_switch * switches.l2_ports
    return SwitchUse(nodes, per_subplane * switches.subplanes, links / ports)


def blocking(hardware: Hardware) -> list[str]:
    """Why the scale-up plane is not non-blocking; empty if it is, or has no switches."""
    plane = hardware.planes.scale_up
    switches = plane.switches
    if switches is None:
        return []
    wrong = []
    up_gbps = switches.subplanes * switches.l1_uplinks * switches.port_gbps
    need_gbps = hardware.dies_per_node * plane.die_gbps
    if up_gbps < need_gbps:
        wrong.append(f"a node's dies send {need_gbps:g} GB/s, its L1 chips have uplinks for {up_gbps:g} GB/s")
    if switches.l1_uplinks != switches.l2_chips:
        wrong.append(f"an L1 chip has {switches.l1_uplinks} uplinks for {switches.l2_chips} L2 chips of its sub-plane, "
                     "so that some pairs of nodes share a link more than others")
    if hardware.nodes > switches.l2_ports:
        wrong.append(f"an L2 chip has {switches.l2_ports} ports for {hardware.nodes} nodes")
    return wrong
