"""How messages travel between simulated processes: with what delay, and under faults not at all, twice, or late.

Within a process delivery is certain and in order. Between processes a healthy link delivers each message once,
in order, after a fixed latency. A faulty one draws what happens to each message from the generator it was
given. Links know names of processes and nothing of what they carry.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from tripool.core.machine import Address


class Links(Protocol):
    """Decides the delays after which copies of a message arrive: none, one or several."""

    def delays_s(self, source: Address, target: Address, now: float) -> tuple[float, ...]: ...


class HealthyLinks:
    """Every message arrives once, after one latency."""

    def __init__(self, latency_s: float = 100e-6) -> None:
        self._delays_s = (latency_s,)

    def delays_s(self, source: Address, target: Address, now: float) -> tuple[float, ...]:
        return self._delays_s


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How likely each fault is, for each message."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0                 # later messages overtake a delayed one
    max_delay_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which a process can neither be reached nor heard."""

    member: Address
    begin_s: float
    end_s: float


class FaultyLinks:
    """Links that lose, repeat, delay and reorder until `end_s`, and are healthy from then on."""

    def __init__(self, generator: random.Random, rates: FaultRates, outages: tuple[Outage, ...] = (),
                 end_s: float = float("inf"), latency_s: float = 0.001) -> None:
        self._random = generator
        self._rates = rates
        self._outages = outages
        self._end_s = end_s
        self._latency_s = latency_s

    def delays_s(self, source: Address, target: Address, now: float) -> tuple[float, ...]:
        rates, latency_s = self._rates, self._latency_s
        if now >= self._end_s:
            return (latency_s,)
        for outage in self._outages:
            if outage.begin_s <= now < outage.end_s and outage.member in (source, target):
                return ()
        dice = self._random.random()
        if dice < rates.drop:
            return ()
        dice -= rates.drop
        if dice < rates.duplicate:
            return latency_s, latency_s + self._random.random() * rates.max_delay_s
        dice -= rates.duplicate
        if dice < rates.delay:
            return (latency_s + self._random.random() * rates.max_delay_s,)
        return (latency_s,)
