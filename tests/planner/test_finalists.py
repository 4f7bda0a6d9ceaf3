"""Finalists keep the goals in simulation, are mended when they do not, and hold on a trace that nobody planned for."""

from dataclasses import replace

import pytest

from tests.planner.builders import GOALS, MACHINE, WORK, question, workload
from tripool.core.deployment import Deployment
from tripool.planner.finalists import Plan, _at_another_pace, _is_behind, _of_another_size, confirm, settle
from tripool.planner.search import Search
from tripool.planner.traffic import Traffic
from tripool.planner.trial import Outcome, Trial, Workers, simulate, trial_seconds
from tripool.sim.synthetic import SyntheticWork

HEAVY = replace(WORK, requests_per_s=40.0, prompt_tokens=600, output_tokens=10)
HERE = Workers(1)


@pytest.fixture(scope="module")
def heavy() -> Search:
    return Search(question(HEAVY))


@pytest.fixture(scope="module")
def found(heavy):
    return settle(heavy, HERE, heavy.candidates())


def told(share: float, late: float = 0.0, slow: float = 0.0, ttft_s: float = 0.9, tpot_s: float = 0.01) -> Outcome:
    return Outcome(None, share, late, slow, 0.0, ttft_s, tpot_s, 10.0, 100.0, 0.0, 2.0, {})  # type: ignore[arg-type]


def test_every_plan_keeps_the_goals_in_its_own_simulation(heavy, found):
    assert found.plans
    for plan in found.plans:
        again = simulate(MACHINE, heavy.question.traffic, GOALS, plan.outcome.trial)
        assert again == plan.outcome and again.share >= GOALS.share
    sizes = [plan.candidate.num_dies for plan in found.plans]
    assert sizes == sorted(sizes)


def test_the_closed_form_is_not_far_from_the_simulation(heavy, found):
    best = found.plans[0]
    closed = next(each for each in heavy.candidates() if each.is_split == best.candidate.is_split)

    assert abs(best.candidate.num_dies - closed.num_dies) <= 1


def test_more_is_asked_of_what_keeps_the_goals_and_less_of_what_does_not():
    search = Search(question(HEAVY, most=True, num_dies=3))
    candidate = search.candidates()[0]

    def then(kept: float | None, missed: float | None) -> float | None:
        """The next pace, after one that kept the goals and one that missed them."""
        plans = [pace and Plan(replace(candidate, times=pace), told(share)) for pace, share in ((kept, 0.95),
                                                                                               (missed, 0.5))]
        other = _at_another_pace(search, *plans)
        return other and other.times

    assert then(2.0, None) > 2.0 > then(None, 2.0)
    assert then(2.0, 2.42) == pytest.approx(2.2)
    assert then(2.0, 2.02) is None
    keeps = Plan(replace(candidate, predicted=3.0, times=2.0), told(0.95))
    assert _is_behind(keeps.candidate, keeps, [keeps, Plan(replace(candidate, times=3.1), told(0.95))])
    assert not _is_behind(keeps.candidate, keeps, [keeps, Plan(replace(candidate, times=2.9), told(0.95))])
    assert not _is_behind(keeps.candidate, None, [Plan(replace(candidate, times=3.1), told(0.95))])
    best = settle(search, HERE, [candidate]).plans[0]
    assert best.outcome.share >= GOALS.share
    assert best.outcome.goodput == pytest.approx(search.question.traffic.requests_per_s * candidate.predicted, rel=0.35)


def test_an_instance_is_given_back_or_added_where_it_is_short(heavy):
    split = next(each for each in heavy.candidates() if each.is_split)
    made = replace(split.deployment, prefill=replace(split.deployment.prefill, count=2, ranks=1),
                   decode=replace(split.deployment.decode, count=2, ranks=1))
    split = replace(split, deployment=made)

    def counts(outcome: Outcome, best: Plan | None = None) -> tuple[int, int] | None:
        other = _of_another_size(heavy, Plan(split, outcome), best)
        return other and (other.deployment.prefill.count, other.deployment.decode.count)

    assert counts(told(0.95, ttft_s=0.9, tpot_s=0.01)) == (2, 1)
    assert counts(told(0.95, ttft_s=0.1, tpot_s=0.018)) == (1, 2)
    assert counts(told(0.5, late=0.5)) == (3, 2)
    assert counts(told(0.5, slow=0.5)) == (2, 3)
    assert counts(told(0.5, slow=0.5), best=Plan(split, told(0.95))) is None
    fixed = replace(split, is_fixed=True)
    assert _of_another_size(heavy, Plan(fixed, told(0.5)), None) is None


def test_a_trace_is_confirmed_whole_and_the_plan_holds_for_what_it_has_not_seen():
    work = SyntheticWork(40.0, 30.0, prompt_tokens=500, output_tokens=10, spread=0.5).draw(5)
    first, second = (replace(work, requests=tuple(replace(each, at_s=each.at_s - begin) for each in work.requests
                                                  if begin <= each.at_s < begin + 20.0)) for begin in (0.0, 20.0))
    search = Search(question(first))
    settled = settle(search, HERE, search.candidates()[:1])
    plan = confirm(search, HERE, settled).plans[0]

    assert plan.outcome.trial.whole or plan.outcome.trial.seconds >= first.span_s
    unseen = simulate(MACHINE, Traffic(second), GOALS, replace(plan.outcome.trial, whole=True))
    assert unseen.goodput == pytest.approx(plan.outcome.goodput, rel=0.10)


def test_somebodys_own_deployment_is_simulated_as_it_is(heavy):
    mine = heavy.candidates()[0].deployment
    given = heavy.given(mine)
    settled = settle(heavy, HERE, [given])

    assert given.is_fixed and given.predicted >= 1.0
    assert [plan.deployment for plan in (*settled.plans, *settled.failed)] == [mine]


def test_somebodys_own_hybrid_is_expected_to_decode_too():
    search = Search(question(replace(WORK, output_tokens=200)))
    design, rows = search.hybrid[0]
    made = Deployment(hybrid=replace(design.config, max_num_seqs=rows, count=2))

    assert search.given(made).predicted == pytest.approx(design.most_times(GOALS, 2), rel=0.05)


def test_a_trial_lasts_until_queues_would_show():
    traffic = Traffic(WORK)

    assert trial_seconds(traffic, 1e-3, GOALS, 40) == 300 / 1e-3
    assert trial_seconds(traffic, 1e6, GOALS, 40) == 4000 / 1e6
    assert 6 * GOALS.ttft_s <= trial_seconds(traffic, 300.0, GOALS, 40) < 10


def test_whoever_comes_while_instances_fill_is_not_asked(heavy):
    deployment = heavy.candidates()[0].deployment
    outcome = simulate(MACHINE, Traffic(WORK, seed=3), GOALS, Trial(deployment, 20.0, 9.0))

    assert outcome.requests_per_s == pytest.approx(20.0, rel=0.25)      # over the seconds that count
    assert 0 < outcome.output_tokens_per_s <= 1.25 * 20.0 * 40

    # All at once, so that most are late; and when they are gone one after the other.
    crowd = [(0.001 * number, [(number, 600)], 10) for number in range(200)]
    calm = [(10.0 + 0.5 * number, [(1000 + number, 600)], 10) for number in range(20)]
    traffic = Traffic(workload(*crowd, *calm))
    trial = Trial(deployment, traffic.requests_per_s, 20.0)
    assert simulate(MACHINE, traffic, GOALS, trial).share == 1.0
    assert simulate(MACHINE, traffic, GOALS, replace(trial, whole=True)).share < 0.9


def test_calls_are_answered_in_their_order_by_processes_too():
    heard: list[int] = []
    with Workers(2) as workers:
        assert workers.each(pow, [(2, 3), (3, 2), (5, 1)], heard.append) == [8, 9, 5]
    assert heard == [1, 2, 3]
    assert HERE.each(pow, [(2, 3)]) == [8]
