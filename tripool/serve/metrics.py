"""Counters and gauges of an instance, for `/metrics` and for `tripool top`.

The machine and the data plane count for themselves; this module only names what they counted. The names
keep the tails that dashboards of other servers use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from tripool.control.scheduler import InstanceScheduler
    from tripool.serve.dataplane import DataPlane
    from tripool.serve.process import ProcessSpec

GAUGES = ("num_running", "num_waiting", "num_waiting_tokens", "num_handed_over", "num_free_blocks", "num_held_blocks",
          "num_cached_blocks", "num_quarantined_blocks", "num_blocks")


def instance_values(scheduler: InstanceScheduler, data: DataPlane) -> dict[str, float]:
    """Everything countable of an instance, by name."""
    values: dict[str, float] = {}
    for source in (scheduler.stats, data.stats):
        for name, value in dataclasses.asdict(source).items():
            if isinstance(value, dict):
                values.update({f"{name}:{cause}": float(count) for cause, count in value.items()})
            else:
                values[name] = float(value)
    return values


class InstanceCollector(Collector):
    """Gives Prometheus the values of the moment."""

    def __init__(self, spec: ProcessSpec, scheduler: InstanceScheduler, data: DataPlane) -> None:
        self._labels = {"member": spec.member, "role": spec.role, "model_name": spec.deployment.model.served_name}
        self._scheduler = scheduler
        self._data = data

    @staticmethod
    def registry(spec: ProcessSpec, scheduler: InstanceScheduler, data: DataPlane) -> CollectorRegistry:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        registry.register(InstanceCollector(spec, scheduler, data))
        return registry

    def collect(self) -> Iterable[Metric]:
        for name, value in instance_values(self._scheduler, self._data).items():
            name, _, cause = name.partition(":")
            labels = {**self._labels, **({"cause": cause} if cause else {})}
            kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            family = kind(f"tripool:{name}", name.replace("_", " "), labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family
