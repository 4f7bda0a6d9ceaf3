import json
from io import StringIO

import pytest
from rich.console import Console

from tests.cli.fake_server import Script, fake_server_beside, tripool
from tripool.cli.top import Look, compare, histogram, parse_metrics, quantile, render

METRICS = """# HELP tripool:time_to_first_token_seconds From the request's arrival to its first token.
# TYPE tripool:time_to_first_token_seconds histogram
tripool:time_to_first_token_seconds_bucket{le="0.1",model_name="tiny"} %d
tripool:time_to_first_token_seconds_bucket{le="0.2",model_name="tiny"} %d
tripool:time_to_first_token_seconds_bucket{le="+Inf",model_name="tiny"} %d
tripool:num_requests_total{model_name="tiny"} 4.0
"""


def info(generated: int = 0, output: int = 0, **gateway) -> dict:
    """A server's page: one prefill, one decode instance that has generated some tokens, one cache server."""
    def member(name: str, role: str, state: str = "up", cause: str = "") -> dict:
        return {"member": name, "role": role, "state": state, "boot_id": "b", "cause": cause, "num_running": 2,
                "num_waiting_tokens": 30, "num_free_blocks": 6, "num_blocks": 10}

    reports = {
        "prefill-0": {"num_waiting": 1, "num_free_blocks": 5, "num_held_blocks": 2, "num_cached_blocks": 2,
                      "num_quarantined_blocks": 1, "num_blocks": 10, "computed_tokens": 100, "pool_hit_tokens": 64},
        "decode-0": {"num_free_blocks": 9, "num_held_blocks": 1, "num_blocks": 10, "generated_tokens": generated},
    }
    phases = {"placing": 1, "prefill": 0, "handover": 0, "admitted": 0, "decode": 2, "retrying": 1}
    return {
        "version": "1", "model": "tiny", "max_model_len": 64, "status": {"status": "ready", "cause": ""},
        "members": [member("prefill-0", "prefill"), member("decode-0", "decode"),
                    member("decode-1", "decode", "down", "its process ended")],
        "settings": {"reports": reports,
                     "caches": {"cache-0": {"up": 1, "blocks": 3, "used_bytes": 2048, "capacity_bytes": 4096,
                                            "hits": 7}},
                     "gateway": {"phases": phases, "finished": {"stop": 3, "length": 1}, "failed": {},
                                 "retried": {"lost": 1}, "output_tokens": output, "prompt_tokens": 100,
                                 "cached_tokens": 25, **gateway}},
    }


def metrics(*counts: int) -> dict[str, float]:
    return parse_metrics(METRICS % counts)


def test_rates_are_what_came_between_two_looks():
    before = Look(10.0, info(generated=100, output=1000), metrics(0, 0, 0))
    now = Look(12.0, info(generated=150, output=1080), metrics(0, 0, 0))

    view = compare(before, now)

    assert view.tokens_rate == 40
    assert {row.member: row.tokens_rate for row in view.members} == {"prefill-0": 0, "decode-0": 25, "decode-1": 0}


def test_a_member_that_began_anew_has_no_negative_rate():
    view = compare(Look(0.0, info(generated=500), {}), Look(1.0, info(generated=20), {}))
    assert view.members[1].tokens_rate == 20


def test_a_look_shows_every_pool():
    view = compare(Look(0.0, info(), {}), Look(1.0, info(), {}))

    assert (view.running, view.waiting, view.finished, view.failed, view.retried) == (2, 2, 4, 0, 1)
    prefill = view.members[0]
    assert (prefill.blocks_free, prefill.blocks_held, prefill.blocks_cached, prefill.blocks) == (5, 3, 2, 10)
    assert (prefill.waiting, prefill.waiting_tokens, prefill.pool_hit_tokens) == (1, 30, 64)
    assert view.members[2].state == "down"
    assert (view.caches[0].up, view.caches[0].used_bytes, view.caches[0].hits) == (True, 2048, 7)


def test_percentiles_are_of_the_time_between_looks_where_something_happened():
    first, later = metrics(10, 10, 10), metrics(10, 14, 14)
    assert compare(Look(0, info(), first), Look(1, info(), later)).ttft_ms_p50 == pytest.approx(150)
    assert compare(Look(0, info(), first), Look(1, info(), first)).ttft_ms_p50 == pytest.approx(50)
    assert compare(Look(0, info(), {}), Look(1, info(), {})).ttft_ms_p50 is None


def test_a_quantile_lies_within_its_bucket():
    buckets = [(0.1, 2.0), (0.2, 6.0), (float("inf"), 8.0)]
    assert quantile(buckets, 0.5) == pytest.approx(0.15)
    assert quantile(buckets, 0.25) == pytest.approx(0.1)
    assert quantile(buckets, 0.99) == 0.2            # beyond the last edge nothing is known
    assert quantile([], 0.5) is None


def test_label_sets_of_a_histogram_are_added_up():
    samples = {'x_bucket{le="1.0",a="1"}': 1.0, 'x_bucket{le="1.0",a="2"}': 2.0, 'x_bucket{le="+Inf",a="1"}': 5.0,
               'xy_bucket{le="1.0"}': 9.0}
    assert histogram(samples, "x") == [(1.0, 3.0), (float("inf"), 5.0)]


def with_experts(steps: int, wait_s: float, sent: int, **more) -> dict:
    """A server's page whose decode instance shares experts over two ranks."""
    page = info()
    page["settings"]["reports"]["decode-0"] |= {
        "steps": steps, "expert_map_version": 9, "num_ranks": 2, "num_live_ranks": 1, "expert_moves": 6,
        "expert_load_max_over_mean": 1.25, "exchange_wait_seconds:rank=0": wait_s, "exchange_wait_seconds:rank=1": 0.0,
        "exchange_sent_bytes:rank=0": sent, "exchange_sent_bytes:rank=1": sent, **more}
    return page


def test_experts_are_shown_with_what_an_exchange_costs():
    view = compare(Look(0.0, with_experts(100, 1.0, 0), {}), Look(2.0, with_experts(200, 1.4, 5000), {}))

    assert [row.member for row in view.experts] == ["decode-0"]
    row = view.experts[0]
    assert (row.map_version, row.ranks, row.lost_ranks, row.moved_experts) == (9, 2, 1, 6)
    assert (row.max_over_mean, row.max_over_mean_before) == (1.25, None)
    assert row.wait_ms_per_step == pytest.approx(2.0)        # of two ranks one waited 4 ms a step
    assert row.bytes_rate == 5000


def test_without_steps_nothing_is_said_of_their_waits():
    page = with_experts(100, 1.0, 0)
    assert compare(Look(0.0, page, {}), Look(1.0, page, {})).experts[0].wait_ms_per_step is None
    assert compare(Look(0.0, info(), {}), Look(1.0, info(), {})).experts == []


def test_drafts_that_were_right_are_shown_by_position():
    page = info()
    page["settings"]["reports"]["decode-0"] |= {"drafted_tokens:position=1": 40, "accepted_tokens:position=1": 30,
                                                "drafted_tokens:position=2": 40}
    view = compare(Look(0.0, page, {}), Look(1.0, page, {}))

    assert {row.member: row.drafts_right for row in view.members} == {
        "prefill-0": [], "decode-0": [0.75, 0.0], "decode-1": []}
    shown = Console(width=120, file=StringIO())
    shown.print(render(view))
    assert "75% 0%" in shown.file.getvalue()


def test_without_drafts_they_have_no_column():
    shown = Console(width=120, file=StringIO())
    shown.print(render(compare(Look(0.0, info(), {}), Look(1.0, info(), {}))))
    assert "pulls" in shown.file.getvalue() and "drafts" not in shown.file.getvalue()


def server(path, body):
    return Script(body=with_experts(5, 0.1, 2048)) if path == "/server_info" else Script(status=403, body={"error": {}})


def test_top_shows_it_once():
    with fake_server_beside(server) as (url, _):
        done = tripool("top", "--url", url, "--once")
    assert done.exit_code == 0, done.output
    for word in ("tiny", "ready", "prefill-0", "decode-0", "decode-1 is down: its process ended", "cache-0", "2.0 KiB",
                 "max/mean", "1.25", "wait/step"):
        assert word in done.stdout, word


def test_top_speaks_json_to_other_programs():
    with fake_server_beside(server) as (url, _):
        done = tripool("top", "--url", url, "--once", "--json")
    assert [each["member"] for each in json.loads(done.stdout)["members"]] == ["prefill-0", "decode-0", "decode-1"]
