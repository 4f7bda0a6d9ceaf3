"""Figures of a member: names, labels, and what is left out because it is not known."""

from array import array

from prometheus_client import CollectorRegistry, generate_latest

from tripool.control.experts import ExpertFigures
from tripool.core.placement import even_geometry, initial_placement
from tripool.serve.metrics import ValuesCollector, expert_values, memory_values, split_name
from tripool.serve.wire import KINDS, ExpertReport, FrameReader, encode

MAP = initial_placement(even_geometry(2, 4, num_redundant=1), 2).pack()
COUNTS = {"sleeps": 3, "wakes": 2, "waited_ns": 1_500_000_000, "sent_bytes": 4096}


def report(**changes) -> ExpertReport:
    values = dict(version=5, oldest_version=4, runnable=True, before=(1.75, 1.0), after=(1.25, 1.5), lost_ranks=(1,),
                  num_steps=200, num_planned=4, num_gated=1, num_changed=2, num_blocked=3, num_moves=4,
                  moved_bytes=4000, num_failures=0, cause="")
    exchange = changes.pop("exchange", (COUNTS, COUNTS))
    return ExpertReport("hybrid-0", ExpertFigures(**(values | changes)), 4, array("f", [1.5] * 8).tobytes(), MAP, MAP,
                        exchange)


def test_a_report_of_experts_crosses_a_link():
    assert list(FrameReader(KINDS).feed(encode("gateway/api", report()))) == [("gateway/api", report())]


def test_experts_are_told_by_their_worst_layer():
    values = expert_values(report())
    assert (values["expert_map_version"], values["num_ranks"], values["num_live_ranks"]) == (5, 2, 1)
    assert (values["expert_load_max_over_mean_before"], values["expert_load_max_over_mean"]) == (1.75, 1.5)
    assert (values["expert_moves"], values["expert_moved_bytes"]) == (4, 4000)
    assert (values["expert_layers_gated"], values["expert_layers_blocked"]) == (1, 3)


def test_what_is_not_known_has_no_figure():
    values = expert_values(report(num_steps=0, num_planned=0, exchange=({},)))
    assert not [name for name in values if "mean" in name or name.startswith("exchange")]


def test_each_rank_has_a_label():
    assert split_name("failures:pull") == ("failures", (("cause", "pull"),))
    assert split_name("exchange_sent_bytes:rank=1") == ("exchange_sent_bytes", (("rank", "1"),))
    assert split_name("steps") == ("steps", ())
    registry = CollectorRegistry()
    registry.register(ValuesCollector(lambda: {"member": "hybrid-0"},
                                      lambda: expert_values(report()) | {"failures:pull": 2.0}))
    page = generate_latest(registry).decode()
    assert 'tripool:exchange_wait_seconds_total{member="hybrid-0",rank="1"} 1.5' in page
    assert 'tripool:failures_total{cause="pull",member="hybrid-0"} 2.0' in page
    assert 'tripool:expert_load_max_over_mean{member="hybrid-0"} 1.5' in page


def test_the_memory_of_each_rank_is_a_gauge():
    registry = CollectorRegistry()
    registry.register(ValuesCollector(lambda: {"member": "hybrid-0"}, lambda: memory_values(
        {0: {"weight_bytes": 5, "resident_bytes": 9}, 1: {"weight_bytes": 7}})))
    page = generate_latest(registry).decode()
    assert 'tripool:weight_bytes{member="hybrid-0",rank="1"} 7.0' in page
    assert 'tripool:resident_bytes{member="hybrid-0",rank="0"} 9.0' in page
    assert "_total" not in page
