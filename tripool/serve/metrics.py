"""Counters and gauges of a member, for its own `/metrics` page and for `tripool top`.

Machines, data planes and cache servers count for themselves; this module only shows what they counted, by
name. `failures:pull` is the counter `failures` with the label `cause="pull"`, `exchange_sent_bytes:rank=1` the counter
`exchange_sent_bytes` with the label `rank="1"`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tripool.core.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from tripool.control.scheduler import InstanceScheduler
    from tripool.serve.dataplane import DataPlane
    from tripool.serve.process import ProcessSpec
    from tripool.serve.wire import ExpertReport

GAUGES = ("num_running", "num_waiting", "num_waiting_tokens", "num_handed_over", "num_free_blocks", "num_held_blocks",
          "num_cached_blocks", "num_quarantined_blocks", "num_blocks", "metrics_port",
          "blocks", "leased_blocks", "dropped_blocks", "reserved_blocks", "used_bytes", "capacity_bytes",
          "quarantined_bytes", "clients", "uptime_s", "up",
          "expert_map_version", "expert_load_max_over_mean", "expert_load_max_over_mean_before", "num_ranks",
          "num_live_ranks", "weight_bytes", "cache_bytes", "large_page_bytes", "resident_bytes", "shared_bytes",
          "drafts_rejected_in_a_row", "draft_alarm")


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


def memory_values(ranks: Mapping[int, Mapping[str, int]]) -> dict[str, float]:
    """Bytes in memory of each rank's process."""
    return {f"{name}:rank={rank}": float(count) for rank, counts in ranks.items() for name, count in counts.items()}


def expert_values(report: ExpertReport) -> dict[str, float]:
    """What dashboards get of an instance's experts: of layers the worst, of ranks each."""
    figures = report.figures
    num_ranks = len(report.placement.slots_per_rank) // 2
    values: dict[str, float] = {
        "expert_map_version": figures.version, "num_ranks": num_ranks,
        "num_live_ranks": num_ranks - len(figures.lost_ranks), "expert_layers_planned": figures.num_planned,
        "expert_layers_changed": figures.num_changed, "expert_layers_gated": figures.num_gated,
        "expert_layers_blocked": figures.num_blocked, "expert_moves": figures.num_moves,
        "expert_moved_bytes": figures.moved_bytes, "expert_moves_failed": figures.num_failures,
    }
    if figures.num_steps:
        values["expert_load_max_over_mean"] = max(figures.after, default=1.0)
    if figures.num_planned:
        values["expert_load_max_over_mean_before"] = max(figures.before, default=1.0)
    for rank, counts in enumerate(report.exchange):
        if counts:
            values |= {f"exchange_wait_seconds:rank={rank}": counts["waited_ns"] / 1e9,
                       f"exchange_sent_bytes:rank={rank}": counts["sent_bytes"],
                       f"exchange_sleeps:rank={rank}": counts["sleeps"]}
    return values


def split_name(name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The name of a value and the label that its key carries, if any."""
    name, _, detail = name.partition(":")
    if not detail:
        return name, ()
    label, given, value = detail.partition("=")
    return name, ((label, value) if given else ("cause", detail),)


class ValuesCollector(Collector):
    """Gives Prometheus the values of the moment, with the labels of the moment."""

    def __init__(self, labels: Callable[[], Mapping[str, str]], values: Callable[[], Mapping[str, float]]) -> None:
        self._labels = labels
        self._values = values

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        own = self._labels()
        for key, value in self._values().items():
            name, more = split_name(key)
            labels = {**own, **dict(more)}
            if name not in families:
                kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
                families[name] = kind(f"tripool:{name}", name.replace("_", " "), labels=list(labels))
            families[name].add_metric(list(labels.values()), value)     # type: ignore[attr-defined]
        yield from families.values()


def serve_metrics(spec: ProcessSpec, values: Callable[[], Mapping[str, float]],
                  role: Callable[[], str] | None = None) -> WSGIServer:
    """A member's own `/metrics` where the gateway listens, on a thread of its own; its port is `server_port`.

    `role` is asked for the role of the moment; without it, it is the one of the start.

    Raises:
        ConfigError: the port is taken.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(ValuesCollector(lambda: {"member": spec.member, "role": role() if role else spec.role,
                                               "model_name": spec.deployment.model.served_name}, values))
    try:
        server, _ = start_http_server(spec.metrics_port, addr=spec.deployment.gateway.host, registry=registry)
    except OSError as error:
        raise ConfigError(f"{spec.member} cannot serve metrics on port {spec.metrics_port}: {error.strerror}; "
                          "choose another --metrics-port") from error
    return server
