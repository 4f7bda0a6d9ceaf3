"""The arithmetic of bench/questions."""

import pytest

import questions
from common import Report


def test_a_wider_instance_gives_an_npu_more():
    report = Report("?")
    [points] = questions.ask_size(report, 1.0).values()

    assert [dies for dies, _ in points] == [80, 160, 320, 640, 1280]
    rates = [rate for _, rate in points]
    assert rates == sorted(rates) and 1500 < rates[0] < rates[-1] < 2500
    assert all(figure["kind"] == "simulated" for figure in report.figures)


def test_what_isolation_saves_is_the_exchange_that_pulls_meet():
    told = {"workload": {"prompt_tokens": 164_000_000}, "pools": {"decode": {"steps": 1000}},
            "step_parts": {"decode": [{"part": "dispatch", "seconds": 1.0}, {"part": "combine", "seconds": 1.0},
                                      {"part": "expert FFN", "seconds": 6.0}]}}

    pulled_s = 1152 * 62 * 1e6 / 1e9           # all prompts, over 164 GB/s
    assert questions._stolen_s(told) == pytest.approx(pulled_s / 1000 * 2 / 8)
