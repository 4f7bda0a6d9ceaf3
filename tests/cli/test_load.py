"""Case C25: the definitions of a benchmark, on streams whose times are known exactly.

The definitions are checked with times that are given (`played`), what goes over a real connection against the times at
which the server really sent (`run`), so that a busy machine fails no test.
"""

import asyncio
import itertools
import json

import pytest

from tests.cli.fake_server import Script, chat, fake_server, tokens
from tripool.cli.load import CHAT, Arrivals, Job, Limits, Listener, Outcome, Run, run_load, summarise
from tripool.core.errors import ConfigError


def played(*streams: list, limits: Limits | None = None):
    """Streams taken at exactly their times: the figures and the outcomes."""
    outcomes = []
    for events in streams:
        outcome = Outcome(due_s=0.0, sent_s=0.0)
        listener = Listener(outcome, keep_text=True)
        for at, event in events:
            listener.take((event if isinstance(event, str) else json.dumps(event)).encode(), at)
        listener.close()
        outcomes.append(outcome)
    return summarise(Run(outcomes, duration_s=2.0), limits), outcomes


def run(*scripts: Script, arrivals: Arrivals | None = None):
    """Send one job for each script over a connection; the figures, the outcomes and what the server saw."""

    async def body():
        async with fake_server(lambda path, body: scripts[body["number"]]) as (server, seen):
            jobs = [Job(CHAT, {"number": number}) for number in range(len(scripts))]
            done = await run_load(server, jobs, arrivals or Arrivals(), timeout_s=30, keep_text=True)
            return summarise(done), done.outcomes, seen

    return asyncio.run(body())


def test_the_first_gap_is_not_between_tokens():
    figures, _ = played(tokens(0.5, 0.02, 10))

    assert figures["ttft_ms"]["mean"] == pytest.approx(500)
    assert figures["itl_ms"]["mean"] == pytest.approx(20)
    assert figures["tpot_ms"]["mean"] == pytest.approx(20)
    assert figures["e2e_ms"]["mean"] == pytest.approx(500 + 9 * 20)


def test_chunks_of_tokens_have_a_gap_and_a_time_per_token():
    figures, _ = played(tokens(0.5, 0.02, 10, per_event=2))

    assert figures["gap_ms"]["mean"] == pytest.approx(40)
    assert figures["itl_ms"]["mean"] == pytest.approx(20)
    assert figures["tokens_per_event"] == 2
    assert figures["tpot_ms"]["mean"] == pytest.approx(4 * 40 / 9)


def test_running_counts_say_what_each_event_brought():
    figures, outcomes = played(tokens(0.5, 0.02, 5, per_event=2, running_usage=True))

    assert outcomes[0].event_tokens == [2, 4, 5]
    assert figures["gap_ms"]["mean"] == pytest.approx(40)
    assert [itl * 1e3 for itl in outcomes[0].itl_s] == pytest.approx([20, 40])      # the last event brought one token


@pytest.mark.parametrize("field_name", ["reasoning", "reasoning_content"])
def test_thoughts_are_output(field_name):
    figures, outcomes = played(tokens(0.5, 0.02, 6, field_name=field_name))

    assert figures["ttft_ms"]["mean"] == pytest.approx(500)
    assert figures["itl_ms"]["mean"] == pytest.approx(20)
    assert outcomes[0].text == "x" * 6


def test_a_thought_sent_under_both_names_is_counted_once():
    both = chat({"reasoning": "x", "reasoning_content": "x"})
    _, outcomes = played([(0.1, both), (0.2, chat({"content": "y"}, "stop")), (0.2, "[DONE]")])
    assert outcomes[0].text == "xy"
    assert outcomes[0].event_s == [0.1, 0.2]


def test_a_request_of_one_token_has_no_time_per_token():
    figures, _ = played(tokens(0.5, 0.02, 1))

    assert figures["ttft_ms"]["mean"] == pytest.approx(500)
    assert figures["tpot_ms"] is None
    assert figures["itl_ms"] is None
    assert figures["completed"] == 1


def test_over_a_connection_times_are_those_at_which_the_server_sent():
    script = Script(tokens(0.1, 0.02, 10))
    figures, outcomes, _ = run(script)

    sent_s = script.sent_s[1:11]           # after the role, before the finish
    delays_s = [arrived - sent for arrived, sent in zip(outcomes[0].event_s, sent_s, strict=True)]
    assert all(-0.001 < delay < 0.1 for delay in delays_s)
    assert figures["tpot_ms"]["mean"] == pytest.approx((sent_s[-1] - sent_s[0]) / 9 * 1e3, abs=10)


def test_token_counts_are_the_servers():
    figures, outcomes = played(tokens(0.01, 0.005, 7), tokens(0.01, 0.005, 3))

    assert (figures["prompt_tokens"], figures["output_tokens"], figures["cached_tokens"]) == (10, 10, 6)
    assert [each.finish for each in outcomes] == ["stop", "stop"]


def test_failures_are_shown_by_cause_and_are_in_no_time():
    refused = Script(status=503, body={"error": {"message": "no member is up", "type": "unavailable"}})
    broken = Script([*tokens(0.2, 0.02, 5)[:3]], closes=True)
    spoiled = Script([(0.0, chat({"content": "a"})), (0.01, {"error": {"message": "lost"}}), (0.01, "[DONE]")])
    unfinished = Script([(0.0, chat({"content": "a"})), (0.01, "[DONE]")])
    garbled = Script([(0.0, "{not json"), (0.0, "[DONE]")])

    figures, outcomes, _ = run(Script(tokens(0.05, 0.02, 5)), refused, broken, spoiled, unfinished, garbled)

    assert (figures["requests"], figures["completed"], figures["failed"]) == (6, 1, 5)
    assert sum(figures["failures"].values()) == 5
    assert figures["failures"]["the server answered 503"] == 1
    assert figures["failures"]["error event: lost"] == 1
    assert figures["failures"]["the stream ended without a finish reason"] == 1
    assert any("closed" in cause for cause in figures["failures"])
    assert any("not what it should be" in cause for cause in figures["failures"])
    assert figures["ttft_ms"]["max"] == figures["ttft_ms"]["min"] == outcomes[0].ttft_s * 1e3
    assert figures["output_tokens"] == 5


def test_goodput_counts_what_keeps_the_stated_limits():
    fast, slow_start, slow = tokens(0.02, 0.01, 5), tokens(0.3, 0.01, 5), tokens(0.02, 0.06, 5)

    figures, _ = played(fast, slow_start, slow, limits=Limits(ttft_ms=150, tpot_ms=40))

    assert figures["goodput"] == {"limits": {"ttft_ms": 150, "tpot_ms": 40}, "requests": 1,
                                  "share": pytest.approx(1 / 3), "rate": pytest.approx(1 / 2.0)}


def test_a_failed_request_is_never_good():
    figures, _ = played([(0.01, chat({"content": "a"}))], limits=Limits(ttft_ms=1e9))
    assert figures["goodput"] == {"limits": {"ttft_ms": 1e9}, "requests": 0, "share": 0, "rate": 0}


def test_a_closed_loop_keeps_a_fixed_number_under_way():
    figures, _, seen = run(*[Script(tokens(0.02, 0.002, 3)) for _ in range(9)], arrivals=Arrivals(max_concurrency=3))

    assert figures["completed"] == 9
    assert seen.most_at_once == 3
    assert seen.connections == 3           # and the connections are kept


def test_progress_is_told_as_requests_end():
    told = []

    async def body():
        async with fake_server(lambda path, body: Script(tokens(0, 0, 2))) as (server, _):
            await run_load(server, [Job(CHAT, {})] * 3, Arrivals(), timeout_s=30, progress=told.append)

    asyncio.run(body())
    assert told == [1, 2, 3]


def test_an_open_loop_sends_when_due_whatever_the_answers_do():
    slow = [Script(tokens(1.0, 0.001, 2)) for _ in range(10)]
    figures, outcomes, seen = run(*slow, arrivals=Arrivals(rate=100, burstiness=1000))

    assert seen.most_at_once == 10
    assert all(each.sent_s >= each.due_s for each in outcomes)
    assert outcomes[-1].due_s - outcomes[0].due_s == pytest.approx(0.09, abs=0.02)
    assert figures["send_delay_ms"]["min"] >= 0


def test_arrivals_have_the_rate_and_the_burstiness_asked_for():
    def gaps(burstiness):
        times = Arrivals(rate=10, burstiness=burstiness, seed=1).times_s(4000)
        return [after - before for before, after in itertools.pairwise(times)]

    def variation(values):
        mean = sum(values) / len(values)
        return (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5 / mean

    assert sum(gaps(1)) / 3999 == pytest.approx(0.1, rel=0.05)
    assert variation(gaps(1)) == pytest.approx(1, rel=0.1)
    assert variation(gaps(0.25)) == pytest.approx(2, rel=0.15)
    assert variation(gaps(100)) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"burstiness": 0}, {"max_concurrency": -1}])
def test_impossible_arrivals_are_refused(wrong):
    with pytest.raises(ConfigError):
        Arrivals(**wrong)


def test_an_answer_that_ends_before_it_says_anything_is_no_failure_and_has_no_times():
    figures, _, _ = run(Script([(0.01, chat({}, "stop")), (0.01, "[DONE]")]))
    assert (figures["completed"], figures["failed"], figures["ttft_ms"]) == (1, 0, None)


def test_percentiles_lie_between_readings():
    outcomes = [Outcome(0.0, 0.0, event_s=[ms / 1e3]) for ms in (10, 20, 30, 40, 50)]
    figures = summarise(Run(outcomes, 1.0))
    assert figures["ttft_ms"]["p50"] == pytest.approx(30)
    assert figures["ttft_ms"]["p90"] == pytest.approx(46)
    assert figures["ttft_ms"]["mean"] == pytest.approx(30)
