"""Figures about requests, measured where clients meet the system, in the Prometheus form.

Names keep the tails that dashboards of other servers know. A choice counts as a request. Times are of the
HTTP side: they include queueing, hand-over and every attempt. Gaps between tokens are measured between
outputs, so that a step which brings several tokens is one gap. What members know comes from the backend at
the moment of a scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tripool.api.backend import Backend, Sample

disable_created_metrics()   # type: ignore[no-untyped-call]   # a time of birth for each series: nobody reads them

PREFIX = "tripool:"
LONG_S = tuple(map(float, (
    "0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 10 20 40 80 160 320 640 1280"
).split()))
GAP_S = tuple(map(float, (
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 10 20 40 80 160"
).split()))
LENGTHS = tuple(float(2**power) for power in range(18))

CAUSES = {400: "invalid", 401: "unauthorized", 403: "forbidden", 404: "not_found", 413: "too_large", 429: "queue_full",
          499: "client_gone", 500: "internal", 503: "unavailable", 504: "deadline"}


class Histogram(Collector):
    """Counts by size. Filled by one event loop it needs no lock, most of what the library's own costs a token."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, dict(labels), bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        running = list(accumulate(self._counts))
        buckets = [(str(bound), float(count)) for bound, count in zip((*self._bounds, "+Inf"), running, strict=True)]
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family


class ApiMetrics:
    """Counters and histograms of one HTTP side, in a registry of its own."""

    def __init__(self, backend: Backend, model_name: str) -> None:
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._registry.register(_BackendCollector(backend, model_name))
        self._model_name = model_name

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, text, {"model_name": model_name}, bounds)
            self._registry.register(made)
            return made

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, ["model_name", *labels], registry=self._registry)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", LONG_S
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between one output of a request and the next.", GAP_S
        )
        self.end_to_end = histogram("e2e_request_latency_seconds", "From the request's arrival to its end.", LONG_S)
        self.queue_time = histogram(
            "request_queue_time_seconds", "From the request's arrival to its first placement.", LONG_S
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From the first placement to the first token.", LONG_S
        )
        self.decode_time = histogram("request_decode_time_seconds", "From the first token to the end.", LONG_S)
        self.inference_time = histogram(
            "request_inference_time_seconds", "From the first placement to the end.", LONG_S
        )
        self.prompt_length = histogram("request_prompt_tokens", "Tokens of a prompt.", LENGTHS)
        self.output_length = histogram("request_generation_tokens", "Tokens of an output.", LENGTHS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered requests.").labels(model_name)
        self.generation_tokens = counter("generation_tokens", "Tokens generated.").labels(model_name)
        self.cached_tokens = counter("cached_tokens", "Prompt tokens whose cache entries were reused.").labels(
            model_name
        )
        self.cache_queries = counter("prefix_cache_queries", "Prompt tokens looked for in the cache.").labels(
            model_name
        )
        self.cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the cache.").labels(model_name)
        self._successes = counter("request_success", "Requests that ended as asked.", "finished_reason")
        self._failures = counter("request_failure", "Requests that ended with an error, by cause.", "cause")
        self._aborts = counter(
            "num_aborted_requests", "Requests given up by their client or an operator, by phase.", "phase"
        )
        self._requests = counter("num_requests", "Requests received.").labels(model_name)
        self._http = Counter(
            "http_requests", "HTTP requests answered.", ["method", "handler", "status"], registry=self._registry
        )

    def received(self, num_requests: int) -> None:
        self._requests.inc(num_requests)

    def succeeded(self, reason: str) -> None:
        self._successes.labels(self._model_name, reason).inc()

    def failed(self, status: int) -> None:
        self._failures.labels(self._model_name, CAUSES.get(status, "other")).inc()

    def aborted(self, phase: str) -> None:
        self._aborts.labels(self._model_name, phase).inc()

    def answered(self, method: str, handler: str, status: int) -> None:
        self._http.labels(method, handler, str(status)).inc()

    def page(self) -> bytes:
        """Everything, in the text form of Prometheus."""
        return generate_latest(self._registry)


class _BackendCollector(Collector):
    """Asks the backend at each scrape."""

    def __init__(self, backend: Backend, model_name: str) -> None:
        self._backend, self._model_name = backend, model_name

    def describe(self) -> Iterable[Metric]:
        """Nothing: so that registering does not ask a backend that is not up yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        for sample in (*self._members(), *self._backend.samples()):
            if (sample.name, sample.labels) in seen:  # a series told twice spoils the whole scrape
                continue
            seen.add((sample.name, sample.labels))
            names = ["model_name", *(name for name, _ in sample.labels)]
            if sample.name not in families:
                kind = CounterMetricFamily if sample.kind == "counter" else GaugeMetricFamily
                families[sample.name] = kind(PREFIX + sample.name.removesuffix("_total"), sample.help, labels=names)
            values = dict(sample.labels)
            family = families[sample.name]
            full = PREFIX + sample.name.removesuffix("_total") + ("_total" if sample.kind == "counter" else "")
            family.add_sample(full, {"model_name": self._model_name, **values}, sample.value)
        yield from families.values()

    def _members(self) -> Iterator[Sample]:
        status = self._backend.status()
        yield Sample("num_requests_waiting", "Requests waiting to be placed.", "gauge", status.num_waiting)
        yield Sample("num_requests_running", "Requests placed and not ended.", "gauge", status.num_running)
        yield Sample("ready", "1 if a request sent now would be served.", "gauge", float(status.ready))
        for member in status.members:
            labels = (("member", member.member), ("role", member.role))
            yield Sample("member_up", "1 if the member takes work.", "gauge", float(member.state == "up"), labels)
            if member.facts is not None and member.facts.num_blocks:
                used = 1.0 - member.num_free_blocks / member.facts.num_blocks
                yield Sample("kv_cache_usage_perc", "Blocks in use, 0 to 1.", "gauge", used, labels)
