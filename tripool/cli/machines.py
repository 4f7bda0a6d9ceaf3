"""The machine that a command is given, and what its user has to know of it before anything is priced."""

from __future__ import annotations

from tripool.cli.screen import err
from tripool.sim.hardware.description import Hardware, read_hardware
from tripool.sim.hardware.topology import blocking


def hardware_of(name_or_path: str) -> Hardware:
    """A machine by its name or by the path of its file. Where its switches block, that is told: prices do not know it.

    Raises:
        ConfigError: nothing was named, it is unknown, or its file is wrong.
    """
    hardware = read_hardware(name_or_path)
    for reason in blocking(hardware):
        err.print(f"{hardware.planes.scale_up.name} of {hardware.name} can block: {reason}. Exchange and copies are "
                  "priced as if it could not", markup=False)
    return hardware
