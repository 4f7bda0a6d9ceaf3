"""The search in closed form: what it chooses, and what it says when nothing does."""

import re
from dataclasses import replace

import msgspec
import pytest

from tests.planner.builders import CLUSTER, GOALS, MACHINE, NUM_NODES, WORK, question, workload
from tripool.core.deployment import Deployment
from tripool.core.errors import ConfigError
from tripool.planner.fit import Machine
from tripool.planner.frontier import Point, frontier, points
from tripool.planner.goals import Budget, Goals, budget_of
from tripool.planner.search import Search
from tripool.planner.sensitivity import choose, variants
from tripool.planner.words import describe, differences, ratio
from tripool.serve.budget import blocks_per_rank
from tripool.sim.costs.models import read_shape
from tripool.sim.costs.table import FORMAT, Grid, RoleSteps, StepTable
from tripool.sim.hardware.description import read_hardware

HEAVY = replace(WORK, requests_per_s=50.0, prompt_tokens=600)


def dies_of(made: Deployment) -> int:
    return sum(config.count * config.ranks for config in (made.prefill, made.decode, made.hybrid))


@pytest.fixture(scope="module")
def heavy() -> Search:
    return Search(question(HEAVY))


def test_a_light_load_takes_one_instance_that_does_both():
    best = Search(question(replace(WORK, requests_per_s=2.0))).candidates()[0]

    assert not best.is_split and best.num_dies == 1


def test_a_heavier_load_takes_more_and_not_more_than_there_are(heavy):
    found = heavy.candidates()

    assert 2 <= found[0].num_dies <= NUM_NODES
    assert all(each.times >= 1.0 for each in found)
    assert [each.num_dies for each in found] == sorted(each.num_dies for each in found)
    assert any(each.is_split for each in found) and any(not each.is_split for each in found)


def test_the_most_of_a_workload_grows_with_what_may_be_spent():
    paces = [Search(question(HEAVY, most=True, num_dies=dies)).candidates()[0].times for dies in (2, 4, NUM_NODES)]

    assert paces == sorted(paces) and paces[2] > 2 * paces[0]


def test_a_deployment_has_the_blocks_and_the_queue_that_it_needs(heavy):
    made = next(each for each in heavy.candidates() if each.is_split).deployment
    demand = heavy.demand

    assert made.decode.cache_tokens >= made.decode.max_num_seqs * (demand.mean_prompt + demand.mean_output)
    assert made.decode.cache_tokens % made.block_tokens == 0
    assert made.gateway.max_queued_tokens >= demand.longest
    assert not made.decode.store_generated and made.cache.count == 0


@pytest.mark.parametrize("memory_gb", [None, 0.024])
def test_a_rank_holds_a_request_as_long_as_the_window_or_the_window_is_shorter(memory_gb):
    cluster = CLUSTER if memory_gb is None else replace(CLUSTER, die=replace(CLUSTER.die, memory_gb=memory_gb))
    machine = Machine(read_shape("tiny"), cluster)
    made = Search(replace(question(replace(WORK, requests_per_s=2.0)), machine=machine)).candidates()[0].deployment

    window = made.model.max_model_len or machine.shape.max_position
    assert bool(made.model.max_model_len) == bool(memory_gb), "the window is made shorter where it has to be"
    assert window > WORK.prompt_tokens + WORK.output_tokens
    for config in (made.prefill, made.decode, made.hybrid):
        if config.count:
            needed = blocks_per_rank(machine.shape, made, config, 1, window, free_bytes=0)
            assert needed * made.block_tokens == config.cache_tokens


def test_what_prompts_share_gets_a_pool_of_its_size():
    work = replace(HEAVY, num_prefixes=10, prefix_tokens=400, share=0.9)
    search = Search(question(work))
    made = search.candidates()[0].deployment

    assert search.demand.reused_share(search.pool_tokens) > 0.9 * search.demand.reused_share(10**9)
    assert made.cache.count >= 1 and made.cache.bytes >= 1 << 20
    small = Search(replace(question(work), budget=Budget(NUM_NODES, node_cache_bytes=1 << 20)))
    assert small.pool_tokens < search.pool_tokens


def test_a_prompt_too_long_for_the_goal_is_judged_by_the_steps_that_suit_it_best():
    long = replace(WORK, requests_per_s=0.1, prompt_tokens=3500, output_tokens=2)

    def least_s(goal_s: float) -> float:
        with pytest.raises(ConfigError, match="cannot be met") as caught:
            Search(question(long, goals=Goals(goal_s, 0.1)))
        return float(re.search(r"takes ([\d.]+) s when it is alone", str(caught.value)).group(1))

    least = least_s(0.1)
    assert least_s(0.99 * least) == least
    assert Search(question(long, goals=Goals(1.5 * least, 0.1))).candidates()


def test_what_is_too_seldom_to_be_tried_or_a_goal_that_nobody_waits_for_is_refused():
    with pytest.raises(ConfigError, match=r"requests_per_s is 1e-05; the least that is planned for is 0.001"):
        question(replace(WORK, requests_per_s=1e-5))
    with pytest.raises(ConfigError, match=r"ttft_s is 1000000000.0; .* at most 600"):
        Goals(1e9, 0.05)


@pytest.mark.parametrize(("goals", "words"), [
    (Goals(1.0, 1e-5), r"TPOT 1e-05 s cannot be met by 90% of the .*one row on each takes 0\.\d+ s a token"),
    (Goals(1e-5, 0.02), r"TTFT 1e-05 s cannot be met by 90% of the .* a prompt of 300 tokens.* when it is alone"),
])
def test_a_goal_that_no_size_meets_is_named_with_what_binds(goals, words):
    with pytest.raises(ConfigError, match=words):
        Search(question(goals=goals))


def test_a_load_that_is_too_much_says_how_much_each_pool_would_carry():
    with pytest.raises(ConfigError, match=r"2 CPUs do not serve 2e\+04 requests/s within the goals. With all of "
                                          r"them, prefill alone would carry \d+.* --most"):
        Search(question(replace(WORK, requests_per_s=20_000.0), num_dies=2)).candidates()


def test_two_pools_that_do_not_fit_together_say_how_much_both_take():
    work = replace(HEAVY, requests_per_s=70.0)
    with pytest.raises(ConfigError, match=r"6 CPUs do not serve 70 .* Both take at least 7 CPUs, 4 to prefill and 3"):
        Search(question(work, goals=Goals(1.0, 0.002))).candidates()
    more = question(work, goals=Goals(1.0, 0.002), num_dies=7)
    assert Search(replace(more, machine=replace(MACHINE, hardware=replace(CLUSTER, nodes=7)))).candidates()[0].is_split


def test_where_only_hybrids_were_measured_nothing_is_said_of_other_pools(tmp_path):
    grids = Grid([1, 8], [[1e-3, 2e-3], [3e-3, 5e-3]], context=[0, 100]), Grid([16, 512], [[0.0, 2e-3], [0.02, 0.04]],
                                                                               first=[0, 100])
    table = StepTable(FORMAT, "here", "tiny", "today", {"hybrid": RoleSteps(0.001, *grids)})
    (tmp_path / "steps.json").write_bytes(msgspec.json.encode(table))
    measured = replace(MACHINE, hardware=replace(CLUSTER, steps=str(tmp_path / "steps.json")))

    assert not any(each.is_split for each in Search(replace(question(replace(WORK, requests_per_s=0.5)),
                                                            machine=measured)).candidates())
    with pytest.raises(ConfigError, match=r"With all of them, instances that do both would carry \d[\d.]*\. Give more"):
        Search(replace(question(replace(WORK, requests_per_s=2000.0)), machine=measured)).candidates()


def test_a_request_that_no_rank_holds_is_named():
    small = Machine(read_shape("tiny"), replace(CLUSTER, die=replace(CLUSTER.die, memory_gb=0.021)))
    work = workload((0.0, [(1, 100)], 10), (1.0, [(2, 3100)], 900))

    with pytest.raises(ConfigError, match=r"request 2 has 3100 \+ 900 tokens, and a rank of .* beside its weights"):
        Search(replace(question(work), machine=small))


def test_a_request_longer_than_the_window_is_named():
    work = workload((0.0, [(1, 100)], 10), (1.0, [(2, 10**6)], 9))

    with pytest.raises(ConfigError, match=r"request 2 has 1000000 \+ 9 tokens, and the model's context window is"):
        Search(question(work))


def test_a_model_that_does_not_fit_says_the_bytes_of_a_die():
    large = Machine(read_shape("deepseek-r1"), read_hardware("cloudmatrix384"))

    with pytest.raises(ConfigError, match=r"no instance of up to 8 dies .* has 64.0 GB and 8 rank\(s\) need \d+"):
        Search(replace(question(), machine=large, budget=Budget(8)))


def test_drafts_are_tried_where_it_is_said_how_likely_they_are():
    machine = replace(MACHINE, settings={"acceptance": (0.95,)})
    work = replace(HEAVY, requests_per_s=10.0, prompt_tokens=100, output_tokens=200)
    with_drafts = Search(replace(question(work), machine=machine, num_drafts=1))

    assert {fit.config.num_speculative_tokens for fit in with_drafts.decode_fits} == {0, 1}
    assert {fit.config.num_speculative_tokens for fit in Search(question(work)).decode_fits} == {0}

    found = Search(replace(question(work, goals=Goals(1.0, 0.0017)), machine=machine, num_drafts=1))
    assert 1 in {fit.num_drafts for fit, _ in found.hybrid}
    for is_split in (True, False):
        assert any("1 draft(s)" in point.words for point in points(found) if point.is_split == is_split)


@pytest.mark.parametrize(("num_drafts", "machine", "words"), [
    (1, Machine(replace(MACHINE.shape, num_mtp_layers=0), CLUSTER), "the model has no MTP layer"),
    (9, MACHINE, "acceptance of 9 drafts is given; the most that are made is 8"),
])
def test_drafts_that_nobody_makes_are_refused(num_drafts, machine, words):
    with pytest.raises(ConfigError, match=words):
        replace(question(), num_drafts=num_drafts, machine=machine)


def test_budgets_are_packages_or_money():
    supernode = read_hardware("cloudmatrix384")

    assert budget_of(supernode).num_dies == 768
    assert budget_of(supernode, npus=10).num_dies == 20
    assert budget_of(supernode, price_per_hour=25.0, npu_hour_price=2.5).num_dies == 20
    for given, words in (({"npus": 400}, "has 384"), ({"npus": 1, "price_per_hour": 1.0}, "one of them"),
                         ({"price_per_hour": 5.0}, "does not say what one NPU costs"),
                         ({"price_per_hour": 1.0, "npu_hour_price": 2.0}, "one NPU costs 2")):
        with pytest.raises(ConfigError, match=words):
            budget_of(supernode, **given)


@pytest.mark.parametrize("wrong", [{"ttft_s": 0.0}, {"tpot_s": float("inf")}, {"share": 1.0}])
def test_goals_are_times_and_a_share(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Goals(**({"ttft_s": 1.0, "tpot_s": 0.05, "share": 0.9} | wrong))


# ---------------------------------------------------------------------- front, what if, words


def test_the_front_holds_what_nothing_else_beats():
    made = [Point(0.01, 10.0, True, "fast"), Point(0.02, 30.0, True, "both"), Point(0.03, 20.0, False, "beaten"),
            Point(0.04, 40.0, False, "much")]

    assert [point.words for point in frontier(made)] == ["fast", "both", "much"]


def test_more_speed_for_users_is_less_for_a_cpu(heavy):
    front = frontier(points(heavy))

    assert len(front) > 3
    assert front[0].tokens_per_s_per_user > front[-1].tokens_per_s_per_user
    assert front[0].tokens_per_s_per_npu < front[-1].tokens_per_s_per_npu


def test_a_fifth_more_load_takes_no_less():
    asked = dict(variants(question(HEAVY)))
    less, more = (choose(words, asked[words]) for words in ("load × 0.8", "load × 1.2"))

    assert dies_of(less.deployment) <= dies_of(more.deployment)
    assert "TPOT goal × 0.8" in asked and "load × 0.8" not in dict(variants(question(most=True)))
    impossible = choose("too tight", question(goals=replace(GOALS, tpot_s=1e-5)))
    assert impossible.deployment is None and "TPOT" in impossible.cause


def test_deployments_are_told_in_words(heavy):
    split = next(each for each in heavy.candidates() if each.is_split).deployment
    other = replace(split, decode=replace(split.decode, max_num_seqs=7))

    prefill, decode = split.prefill, split.decode
    assert describe(split, CLUSTER) == (f"{prefill.count} × {prefill.ranks} prefill + {decode.count} × {decode.ranks} "
                                        f"decode rank(s), {dies_of(split)} CPU(s)")
    assert ratio(split) == f"{prefill.count * prefill.ranks}:{decode.count * decode.ranks}"
    assert differences(split, other) == [("decode.max_num_seqs", str(split.decode.max_num_seqs), "7")]
