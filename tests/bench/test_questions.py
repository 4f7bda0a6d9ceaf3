"""The arithmetic of bench/questions."""

import pytest

import questions
from common import Report
from tripool.core.errors import ConfigError
from tripool.sim.outcome import Slo


def test_a_wider_instance_gives_an_npu_more():
    report = Report("?")
    [points] = questions.ask_size(report, 1.0).values()

    assert [dies for dies, _ in points] == [80, 160, 320, 640, 1280]
    rates = [rate for _, rate in points]
    assert rates == sorted(rates) and 1500 < rates[0] < rates[-1] < 2500
    assert all(figure["kind"] == "simulated" for figure in report.figures)


def test_what_isolation_saves_is_what_transfers_add_to_a_step():
    told = {"pools": {"decode": {"steps": 1000}},
            "step_parts": {"decode": [{"part": "dispatch", "seconds": 1.0},
                                      {"part": "exchange beside transfers", "seconds": 6.0}]}}
    assert questions._added_s(told) == 0.006
    del told["step_parts"]["decode"][1]
    assert questions._added_s(told) == 0.0


def test_each_plot_has_one_unit(monkeypatch):
    assert all(y_name for _, _, _, y_name in questions.QUESTIONS.values())
    monkeypatch.setattr(questions, "pooled", lambda nodes, _: {"cache": {"pool_hit_share": nodes / 100},
                                                               "latency": {"ttft_s": {"mean": 1 / nodes}}})
    [hits], [firsts] = (ask(Report("?"), 1.0).values() for ask in (questions.ask_cpus, questions.ask_cpus_ttft))
    assert hits == [(nodes, nodes) for nodes, _ in hits] and max(y for _, y in hits) == 48
    assert firsts == [(nodes, 1000 / nodes) for nodes, _ in hits]


def test_plots_that_cannot_be_written_are_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(questions, "QUESTIONS", {"pull": (lambda *_: pytest.fail("it ran"), "", "", "")})
    (tmp_path / "file").touch()
    monkeypatch.setattr("sys.argv", ["questions.py", "--plots", str(tmp_path / "file")])
    with pytest.raises(ConfigError, match="--plots is"):
        questions.main()


def setting(tpot_ms: float, num_rows: int) -> questions.Setting:
    return questions.Setting(288, 48, 3, tpot_ms * questions.ACCEPTED_XDS / 1e3, num_rows)


def test_the_best_setting_gives_most_of_those_within_the_goal():
    slow, wide, narrow = setting(60.0, 90_000), setting(50.0, 60_000), setting(40.0, 30_000)
    assert questions.best_of([slow, wide, narrow]) == wide
    assert questions.best_of([slow, setting(55.0, 10)]) == setting(55.0, 10)
    assert wide.share == 0.375
    assert wide.tokens_per_s_die == pytest.approx(60_000 / 0.050 / 768)


def test_experts_lie_as_evenly_as_their_slots_allow():
    few, more = questions.experts_on(288)
    assert [each._balance.slots_per_rank for each in (few, more)] == [1.0, 2.0]
    assert more._balance.even <= 1.1                       # the published placement, 32 copies of the shared one


def test_mixes_take_turns_and_no_prompt_comes_twice():
    work = questions._in_turn([(4.0, 400, 10), (8.0, 50, 90)], 30.0)

    first = [each for each in work.requests if each.at_s < 30.0]
    second = work.requests[len(first):]
    assert 80 < len(first) < 160 < len(second) < 320 and max(each.at_s for each in second) < 60.0
    assert sum(each.num_prompt for each in first) / len(first) == pytest.approx(400, rel=0.1)
    assert sum(each.num_output for each in second) / len(second) == pytest.approx(90, rel=0.1)
    names = [name for each in work.requests for name, _ in each.parts]
    assert len(set(names)) == len(names)


def test_what_keeps_the_goals_is_told_by_when_it_was_sent(monkeypatch):
    simulation = questions._with_roles(questions._in_turn([(4.0, 512, 4), (4.0, 4096, 4)], 4.0), 3)
    ttft_s = sorted(each.ttft_s for each in simulation.users.journeys)
    monkeypatch.setattr(questions, "GOALS", Slo(ttft_s=ttft_s[len(ttft_s) // 2]))

    points = questions._good_over_time(simulation, 4.0)

    assert points[0] == (2.0, 100.0) and points[-1][0] == 6.0 and points[-1][1] < 50.0
