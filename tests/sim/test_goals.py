"""Goals that nobody can keep are told before anything runs, with the request that comes nearest."""

import pytest

from tests.sim.rigs import COSTS, HYBRID, NONE, but, deployment
from tripool.core.errors import ConfigError
from tripool.sim.goals import check_goals
from tripool.sim.outcome import Slo
from tripool.sim.requests import Workload, WorkRequest

ALL = {"prefill": COSTS, "decode": COSTS, "hybrid": COSTS}
WORK = Workload("test", (WorkRequest(0.0, ((1, 9000),), 5), WorkRequest(1.0, ((1, 9000), (2, 400)), 5)))


def check(slo: Slo, made=None, work: Workload = WORK) -> None:
    check_goals(made or deployment(), ALL, work, slo)


def test_the_first_token_takes_at_least_what_is_new_to_everybody():
    least_s = 0.010 + 400 * 50e-6
    check(Slo(ttft_s=least_s * 1.001))
    with pytest.raises(ConfigError, match=r"request 2 comes nearest, with 400 tokens .* prefill instance .* 0\.03 s"):
        check(Slo(ttft_s=least_s * 0.999))


def test_a_long_prompt_takes_several_steps():
    alone = Workload("test", WORK.requests[:1])
    least_s = 3 * 0.010 + 9000 * 50e-6               # 4,096 tokens in a step
    check(Slo(ttft_s=least_s * 1.001), work=alone)
    with pytest.raises(ConfigError, match="with 9000 tokens"):
        check(Slo(ttft_s=least_s * 0.999), work=alone)


def test_tokens_come_no_faster_than_a_step_with_one_row():
    least_s = 0.010 + 100e-6 + 9000 * 20e-9
    check(Slo(tpot_s=least_s * 1.001))
    with pytest.raises(ConfigError, match="a single row of 9000 tokens"):
        check(Slo(tpot_s=least_s * 0.999))
    drafting = deployment(prefill=NONE, decode=NONE, hybrid=but(HYBRID, num_speculative_tokens=1))
    check(Slo(tpot_s=least_s * 0.6), drafting)        # two tokens in a step, if the draft is right
    with pytest.raises(ConfigError, match="a step of a hybrid instance"):
        check(Slo(tpot_s=least_s * 0.4), drafting)


def test_a_request_of_one_token_keeps_any_pace():
    check(Slo(tpot_s=1e-9), work=Workload("test", (*WORK.requests, WorkRequest(2.0, ((3, 5),), 1))))


def test_no_request_keeps_every_goal():
    check(Slo(1e-9, 1e-9), work=Workload("test", ()))
