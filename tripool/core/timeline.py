"""What happened, in order: every message a machine took, and what it said to it.

A machine's decisions depend on its messages alone, so a recorded run, live or simulated, can be played
to fresh machines, which must say the same again. Whoever records decides where the records are kept;
this module knows no files and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tripool.core.machine import Address, Machine, Message, Send


@dataclass(frozen=True, slots=True)
class Record:
    """One message handled by one machine. A recorder keeps them in the order in which they were handled."""

    now: float
    address: Address
    message: Message
    sends: tuple[Send, ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A place where a replay decided otherwise: number `index` of the records."""

    index: int
    record: Record
    sends: tuple[Send, ...]            # what the machine said this time

    def __str__(self) -> str:
        kind = type(self.record.message).__name__
        return (f"record {self.index}: {self.record.address} at {self.record.now:.6f} s answered {kind} with "
                f"{list(self.sends)}, where it had said {list(self.record.sends)}")


def replay(machines: Mapping[Address, Machine], records: Iterable[Record]) -> list[Mismatch]:
    """Give recorded messages to fresh machines, at the recorded times, and list where they decide otherwise.

    Records of addresses that are not among `machines` are passed over, so that a part of a system can be replayed.
    """
    mismatches = []
    for index, record in enumerate(records):
        machine = machines.get(record.address)
        if machine is None:
            continue
        sends = tuple(machine.handle(record.message, record.now))
        if sends != record.sends:
            mismatches.append(Mismatch(index, record, sends))
    return mismatches
