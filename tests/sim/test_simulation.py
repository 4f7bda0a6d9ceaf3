"""The production control plane on priced data planes: what comes out is right, the same each time, and told in full."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.rigs import DECODE, HYBRID, NONE, PLANES, PREFILL, RIG, WORK, but, deployment, figures, simulate
from tripool.control.gateway import Gateway
from tripool.core.deployment import CacheConfig, GatewayConfig, InstanceConfig, ScalingConfig
from tripool.core.errors import ConfigError
from tripool.core.messages import Fetch, Prefill
from tripool.core.plan import BlockRef
from tripool.sim.dataplane import LoseRank
from tripool.sim.failures import Failure, check_failures, parse_failure
from tripool.sim.outcome import Slo
from tripool.sim.pricing import LinearCosts, Plane
from tripool.sim.requests import Workload, WorkRequest
from tripool.sim.simulation import Rig, Simulation
from tripool.sim.synthetic import SyntheticWork
from tripool.sim.traces import read_workload

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden_outcome.json"


def alone(num_prompt: int, num_output: int, *more: WorkRequest) -> Workload:
    return Workload("test", (WorkRequest(0.0, ((1, num_prompt),), num_output), *more))


def failures(*texts: str) -> tuple[Failure, ...]:
    return tuple(map(parse_failure, texts))


# ---------------------------------------------------------------- one request, by hand


def test_one_request_takes_what_its_steps_copies_and_messages_take():
    simulation = simulate(work=alone(1000, 11))

    [journey] = simulation.users.journeys
    control_s = PLANES.planes["vpc"].latency_s
    prefill_s = 0.010 + 1000 * 50e-6
    asked_s = 2e-6                                     # the pool, which has nothing
    assert journey.ttft_s == pytest.approx(control_s + asked_s + prefill_s + control_s, rel=1e-6)
    # Prefilled, then Placed and Admit within two more messages; 8 blocks of 128 tokens; 10 steps of one row.
    pull_s = 5e-6 + 8 * 128 * 70_000 / 25e9
    steps_s = 10 * (0.010 + 100e-6 + 1005 * 20e-9)
    assert journey.ended_s - journey.first_s == pytest.approx(control_s + pull_s + steps_s + control_s, rel=1e-3)
    assert (journey.num_tokens, journey.finish) == (11, "stop")


def test_what_http_adds_is_a_part_of_the_first_token_and_of_nothing_after_it():
    [plain] = simulate(work=alone(1000, 11)).users.journeys
    [served] = simulate(work=alone(1000, 11), rig=replace(RIG, api_s=0.002)).users.journeys

    assert served.ttft_s == pytest.approx(plain.ttft_s + 0.002)
    assert served.tpot_s == pytest.approx(plain.tpot_s)


def test_steps_take_longer_while_another_instance_of_the_machine_computes():
    crowded = replace(RIG, beside={"prefill": 1.5, "decode": 1.2})
    [plain] = simulate(work=alone(1000, 51)).users.journeys
    [lonely] = simulate(work=alone(1000, 51), rig=crowded).users.journeys
    assert (lonely.first_s, lonely.ended_s) == pytest.approx((plain.first_s, plain.ended_s))

    # While the first decodes, a second one is prefilled in one step.
    second = WorkRequest(0.2, ((2, 1000),), 1)
    simulation = simulate(work=alone(1000, 51, second), rig=crowded)
    prefill_s = 0.010 + 1000 * 50e-6
    assert simulation.users.journeys[1].ttft_s == pytest.approx(1.5 * prefill_s, abs=1e-3)
    slowed_s = simulation.prices["decode"].parts()["other instances", "measured"]
    assert slowed_s == pytest.approx(1.5 * prefill_s / 6, abs=0.004)         # a sixth of the time is the slowing down
    assert simulation.users.journeys[0].ended_s == pytest.approx(plain.ended_s + slowed_s)


def test_limits_can_be_as_long_as_answers():
    [journey] = simulate(work=alone(300, 7), max_tokens=0).users.journeys
    assert journey.num_tokens == 7


def test_a_request_of_one_token_ends_with_its_prefill():
    simulation = simulate(work=alone(300, 1))

    assert simulation.users.journeys[0].num_tokens == 1 and simulation.users.journeys[0].tpot_s is None
    assert figures(simulation)["pools"]["decode"]["steps"] == 0


def test_a_prompt_that_was_there_before_is_found_where_it_is():
    again = WorkRequest(5.0, ((1, 1024), (2, 10)), 5)
    prefill = but(PREFILL, count=1)
    here = simulate(deployment(prefill=prefill), alone(1024, 5, again))
    pooled = simulate(deployment(prefill=but(PREFILL, count=1, cache_tokens=4096)),
                      alone(1024, 5, WorkRequest(2.0, ((3, 4000),), 5), again))

    assert [each.num_cached for each in here.users.journeys] == [0, 1024]
    assert figures(here)["cache"]["instance_hit_tokens"] == 1024
    assert pooled.users.journeys[2].num_cached == 1024
    assert figures(pooled)["cache"]["pool_hit_tokens"] > 0


def test_nobody_who_decides_is_told_how_long_an_answer_will_be():
    told = []

    class Listening(Gateway):
        def handle(self, message, now):
            sends = super().handle(message, now)
            told.extend(send.message.request for send in sends if isinstance(send.message, Prefill))
            return sends

    def hear(num_output: int):
        made = Simulation(deployment(), alone(100, num_output), RIG)
        made.gateway.__class__ = Listening
        made.run()
        return told.pop()

    assert hear(3) == hear(30)


def test_a_limit_ends_a_request_before_its_answer_does():
    simulation = simulate(work=alone(100, 50), max_tokens=20)

    assert (simulation.users.journeys[0].num_tokens, simulation.users.journeys[0].finish) == (20, "length")


# ---------------------------------------------------------------- roles that change

EACH = InstanceConfig(count=2, max_num_seqs=16, max_num_batched_tokens=2048, cache_tokens=100_000)
FIXED = deployment(prefill=but(EACH, count=1), decode=but(EACH, count=3))
CHANGING = replace(FIXED, scaling=ScalingConfig(enabled=True, hold_s=1.0, cool_down_s=3.0))


def shifting() -> Workload:
    """Half a minute each of short prompts with long answers and of long prompts with short answers, and so on."""
    requests: list[WorkRequest] = []
    for part, (prompt, output) in enumerate(((200, 200), (6000, 8)) * 2):
        work = SyntheticWork(30.0, 6.0, prompt_tokens=prompt, output_tokens=output).draw(part)
        requests += [replace(each, at_s=each.at_s + 30.0 * part, parts=((len(requests) + index, each.num_prompt),))
                     for index, each in enumerate(work.requests)]
    return Workload("shifting", tuple(requests))


SHIFTING = shifting()


def test_roles_follow_a_mix_that_shifts_and_no_request_is_tried_again():
    fixed, changing = figures(simulate(FIXED, SHIFTING)), figures(simulate(CHANGING, SHIFTING))

    assert changing["roles"]["changes"] == {"to decode": 1, "to prefill": 3}
    requests = changing["requests"]
    assert requests["served"] == requests["sent"] and requests["retried"] == {} and requests["failed"] == {}
    assert changing["latency"]["ttft_s"]["mean"] < 0.1 * fixed["latency"]["ttft_s"]["mean"]
    assert changing["latency"]["tpot_s"]["p99"] < 0.2 * fixed["latency"]["tpot_s"]["p99"]
    both = zip(changing["timeline"]["prefill_instances"], changing["timeline"]["decode_instances"], strict=True)
    assert set(both) == {(1, 3), (2, 2), (3, 1)}
    assert "roles" not in fixed and "prefill_instances" not in fixed["timeline"]


def test_a_mix_that_does_not_shift_is_not_disturbed():
    work = SyntheticWork(60.0, 3.0, prompt_tokens=1000, output_tokens=100)
    simulation = simulate(CHANGING, work)

    assert figures(simulation)["roles"]["changes"] == {}
    assert figures(simulation)["latency"] == figures(simulate(FIXED, work))["latency"]


def test_steps_cost_what_they_do_in_the_role_that_an_instance_has():
    costs = {"prefill": LinearCosts(step_s=0.010, chunk_token_s=50e-6, level="measured"),
             "decode": LinearCosts(step_s=0.010, row_s=100e-6, level="residual")}
    parts = figures(simulate(CHANGING, SHIFTING, rig=replace(RIG, costs=costs)))["step_parts"]

    assert {each["part"] for each in parts["prefill"] if each["seconds"]} == {"step", "chunks"}
    assert {each["part"] for each in parts["decode"] if each["seconds"]} == {"step", "rows"}


# ---------------------------------------------------------------- fast is the same

CASES = {
    "two pools": dict(),
    "drafts": dict(made=deployment(decode=but(DECODE, num_speculative_tokens=2))),
    "hybrids": dict(made=deployment(prefill=NONE, decode=NONE, hybrid=but(HYBRID, num_speculative_tokens=1))),
    "ranks": dict(made=deployment(prefill=but(PREFILL, ranks=2, count=1), decode=but(DECODE, ranks=4, count=1))),
    "few blocks": dict(made=deployment(decode=but(DECODE, cache_tokens=6000)),
                       work=SyntheticWork(6.0, 6.0, prompt_tokens=500, output_tokens=600, spread=0.6)),
    "failures": dict(failures=failures("instance:decode-1@5.0123+3", "plane:rdma@9+2", "cache:cache-0@4+5")),
    "a lost die": dict(made=deployment(decode=but(DECODE, ranks=4, count=1, num_speculative_tokens=1)),
                       failures=failures("die:decode-0/2@5.0123+3")),
    "changing roles": dict(made=CHANGING, work=SHIFTING, failures=failures("instance:decode-0@60+1")),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps_taken_together_and_tokens_told_late_change_nothing(case):
    fast, slow = simulate(**case), simulate(**case, every_step=True)

    assert fast.host.num_events < slow.host.num_events
    assert figures(fast) == figures(slow)


def test_few_blocks_let_rows_step_back():
    assert figures(simulate(**CASES["few blocks"]))["pools"]["decode"]["stepped_back"] > 0


# ---------------------------------------------------------------- the same each time


def golden_run() -> str:
    made = deployment(decode=but(DECODE, num_speculative_tokens=1, ranks=2), hybrid=but(HYBRID, count=1))
    work = read_workload(DATA / "mooncake_excerpt.jsonl").faster(8.0)
    simulation = simulate(made, work, failures=failures("instance:prefill-0@2+1", "plane:ub@8+1"), seed=3)
    return json.dumps(figures(simulation, Slo(1.0, 0.02)), indent=1) + "\n"


def test_an_outcome_is_the_golden_one_to_the_last_byte():
    """A speed-up keeps this file. Whoever changes a decision or a definition writes it anew, and says why:
    `python -m tests.sim.test_simulation`."""
    assert golden_run() == GOLDEN.read_text()


def test_another_seed_is_another_outcome():
    assert figures(simulate(seed=1))["latency"] != figures(simulate(seed=2))["latency"]


# ---------------------------------------------------------------- figures


def test_figures_agree_with_each_other():
    simulation = simulate()
    told = figures(simulation, Slo(0.1, 0.011))
    journeys = simulation.users.journeys

    assert told["requests"] == {"sent": len(journeys), "served": len(journeys), "unfinished": 0, "failed": {},
                                "retried": {}, "causes": {}}
    tokens = told["workload"]["output_tokens"]
    assert sum(each.num_tokens for each in journeys) == tokens
    assert told["pools"]["decode"]["decode_tokens"] + len(journeys) == tokens
    assert told["latency"]["itl_s"]["count"] == tokens - len(journeys)
    cache = told["cache"]
    known = cache["instance_hit_tokens"] + cache["pool_hit_tokens"] + cache["computed_tokens"]
    assert 0 <= told["workload"]["prompt_tokens"] - known < 10       # a last token alone is computed like a decode row
    assert sum(each.num_cached for each in journeys) == cache["instance_hit_tokens"] + cache["pool_hit_tokens"] > 0
    for role, pool in told["pools"].items():
        busy_s = sum(part["seconds"] for part in told["step_parts"][role])
        assert pool["utilisation"] * told["duration_s"] * 2 == pytest.approx(busy_s, rel=1e-6)
    assert told["planes"]["rdma"]["bytes"] == 70_000 * 128 * sum(-(-each.num_prompt // 128) for each in journeys
                                                                if each.num_output > 1)
    assert told["planes"]["ub"]["bytes"] > 0 and told["planes"]["vpc"]["bytes"] == 0
    good = [each for each in journeys if each.ttft_s <= 0.1 and (each.tpot_s or 0) <= 0.011]
    assert told["goodput"]["requests"] == len(good) and 0 < len(good) < len(journeys)


def test_mean_and_percentiles_of_gaps_are_those_of_the_steps():
    told = figures(simulate(work=alone(1000, 101)))["latency"]["itl_s"]

    assert told["count"] == 100
    assert told["p50"] == pytest.approx(0.010 + 100e-6 + 1050 * 20e-9, rel=0.005)


def test_costs_are_npu_hours_by_what_they_were_spent_on():
    rig = replace(RIG, npus_per_rank=0.5, npu_hour_price=3.0)
    simulation = simulate(deployment(prefill=but(PREFILL, ranks=2)), rig=rig)
    told = figures(simulation)
    cost, hours = told["cost"], told["duration_s"] / 3600

    assert cost["npus"] == 2 * 2 * 0.5 + 2 * 0.5
    work = told["workload"]
    assert cost["per_million_input_tokens"] == pytest.approx(3.0 * 2.0 * hours / work["prompt_tokens"] * 1e6)
    assert cost["per_million_output_tokens"] == pytest.approx(3.0 * 1.0 * hours / work["output_tokens"] * 1e6)
    assert figures(simulate())["cost"]["per_million_total_tokens"] is None


def test_a_hybrids_cost_is_divided_by_the_time_of_prompts_and_rows():
    one = deployment(prefill=NONE, decode=NONE, hybrid=but(HYBRID, count=1))
    beside = WorkRequest(0.3, ((2, 1000),), 1)         # computed while the first decodes
    simulation = simulate(one, alone(1000, 101, beside))
    cost, work = figures(simulation)["cost"], figures(simulation)["workload"]

    prompts_s = 0.010 + 2 * 1000 * 50e-6               # rows would have taken the second step, too
    rows_s = 100 * (0.010 + 100e-6 + 1050 * 20e-9)
    paid = [cost[f"npu_hours_per_million_{name}_tokens"] * work[tokens]
            for name, tokens in (("input", "prompt_tokens"), ("output", "output_tokens"))]
    assert paid[0] / sum(paid) == pytest.approx(prompts_s / (prompts_s + rows_s), rel=0.001)


def test_what_prices_were_corrected_by_is_told_by_name():
    told = figures(simulate(rig=replace(RIG, factors={"pool.software": 1.25})))

    assert told["factors"] == {"simulation.context_rounding": 1 / 64, "pool.software": 1.25}


def test_so_many_requests_are_always_on_their_way():
    simulation = simulate(concurrency=5)
    journeys = simulation.users.journeys

    for each in journeys[5:]:
        assert sum(other.sent_s <= each.sent_s < other.ended_s for other in journeys) == 5
    assert all(each.is_served for each in journeys) and figures(simulation)["workload"]["concurrency"] == 5


# ---------------------------------------------------------------- edges


def test_no_request_is_no_trouble():
    told = figures(simulate(work=SyntheticWork(10.0, 0.0)), Slo(1.0, 0.1))

    assert told["requests"]["sent"] == 0 and told["goodput"]["share"] is None and told["duration_s"] == 0
    assert told["latency"]["ttft_s"] == {"count": 0} and told["cost"]["per_million_total_tokens"] is None


def test_a_burst_after_silence_is_served_like_one_without():
    burst = SyntheticWork(0.5, 40.0, prompt_tokens=800, output_tokens=30)
    late = simulate(work=replace(burst, start_s=300.0)).users.journeys
    soon = simulate(work=burst).users.journeys

    assert len(late) == len(soon) > 10
    assert [each.num_tokens for each in late] == [each.num_tokens for each in soon]
    assert max(each.e2e_s for each in late) == pytest.approx(max(each.e2e_s for each in soon), rel=0.05)


def test_a_prompt_that_no_instance_can_hold_fails_alone_and_says_why():
    simulation = simulate(work=alone(150_000, 5, WorkRequest(0.1, ((2, 500),), 5)))

    huge, other = simulation.users.journeys
    assert huge.status == 400 and "150000 tokens do not fit" in huge.error and other.is_served
    assert figures(simulation)["requests"]["failed"] == {"too_large": 1}


def test_a_lost_instance_costs_its_users_time_but_no_token():
    simulation = simulate(failures=failures("instance:decode-1@5.0123"))
    undisturbed = simulate()
    told = figures(simulation)

    assert told["requests"]["retried"]["member_down"] > 0 and told["requests"]["failed"] == {}
    assert all(each.num_tokens == each.num_output for each in simulation.users.journeys)
    assert figures(undisturbed)["latency"]["e2e_s"]["mean"] < told["latency"]["e2e_s"]["mean"]
    assert "decode-1" not in simulation.instances


def test_what_a_killed_instance_copies_ends_with_it_and_what_others_copy_from_it_goes_on():
    slow = replace(RIG, planes=replace(PLANES, planes={**PLANES.planes, "rdma": Plane(1e8)}))

    def under_way(failure: str) -> list[str]:
        """A pull takes 0.7 s."""
        simulation = simulate(deployment(prefill=but(PREFILL, count=1), decode=but(DECODE, count=1)), alone(1000, 5),
                              rig=slow, until_s=0.5, failures=failures(failure))
        return [flow.to for flow in simulation.world.fabric.wires["rdma"].flows()]

    assert under_way("instance:prefill-0@0.4") == ["decode-0/data"]
    assert under_way("instance:decode-0@0.4") == []


def test_an_instance_that_comes_back_serves_again():
    simulation = simulate(failures=failures("instance:decode-1@5+2"))

    assert simulation.instances["decode-1"].plane.num_decode_tokens > 0
    assert len(simulation.past) == 1


def test_pulls_over_a_lost_plane_fail_in_time_and_are_made_again():
    simulation = simulate(deployment(pull_deadline_s=1.0), failures=failures("plane:rdma@6+3"))
    told = figures(simulation)

    assert told["requests"]["retried"]["attempt_failed"] > 0
    assert told["requests"]["served"] == told["requests"]["sent"]


def test_without_the_pools_plane_prompts_are_computed():
    work = replace(WORK, share=1.0)
    without = figures(simulate(work=work, failures=failures("plane:ub@0")))
    with_it = figures(simulate(work=work))

    assert without["cache"]["pool_hit_tokens"] == 0 and without["cache"]["failed_fetches"] > 0
    assert with_it["cache"]["pool_hit_tokens"] > 0
    assert without["requests"]["served"] == without["requests"]["sent"]


def test_a_lost_cache_server_is_a_miss():
    simulation = simulate(work=replace(WORK, share=1.0), failures=failures("cache:cache-1@5"))
    told = figures(simulation)

    assert told["requests"]["served"] == told["requests"]["sent"] and told["requests"]["retried"] == {}
    assert simulation.world.servers.names == ["cache-0"]


def test_a_lost_die_costs_its_rows_another_attempt():
    made = deployment(decode=but(DECODE, ranks=4, count=1))
    simulation = simulate(made, failures=failures("die:decode-0/2@5"))
    told = figures(simulation)

    assert simulation.instances["decode-0"].scheduler.lost_ranks == [2]
    assert told["pools"]["decode"]["aborted_steps"] == 1
    assert told["requests"]["served"] == told["requests"]["sent"]
    assert all(each.num_tokens == each.num_output for each in simulation.users.journeys)


class CopiesSeen:
    """Notes every copy of a kind: when it began and ended, and why it failed."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seen: list[tuple[float, float, str]] = []

    def copy(self, kind, member, plane, begun_s, ended_s, num_bytes, cause):
        if kind == self.kind:
            self.seen.append((begun_s, ended_s, cause))

    def step(self, *what):
        pass


def test_what_a_lost_die_copies_ends_at_once_and_leaves_its_bandwidth_to_others():
    made = deployment(prefill=but(PREFILL, count=1), decode=but(DECODE, ranks=2, count=1), cache=CacheConfig(),
                      gateway=GatewayConfig(max_attempts=1))
    work = Workload("two are pulled by two dies from one", tuple(WorkRequest(0.0, ((each, 1280),), 4)
                                                                 for each in range(2)))
    slow = replace(RIG, planes=replace(PLANES, planes=PLANES.planes | {"rdma": Plane(RIG.token_bytes * 1280)}))
    pulls = CopiesSeen("Pull")
    simulation = simulate(made, work, rig=slow, failures=failures("die:decode-0/1@1"), watcher=pulls)

    lost_s = min(each.sent_s for each in simulation.users.journeys) + 1.0
    (begun_s, ended_s, cause), (other_s, other_ended_s, other_cause) = pulls.seen
    assert (ended_s, cause) == (pytest.approx(lost_s), "rank 1 of decode-0 is gone")
    half_s = lost_s - max(begun_s, other_s)                    # each alone takes a second
    assert other_cause == "" and half_s > 0.5
    assert other_ended_s - other_s == pytest.approx(1.0 + half_s / 2, abs=0.01)


def test_what_is_asked_of_a_die_whose_loss_is_not_known_yet_fails_at_once():
    fetches = CopiesSeen("Fetch")
    simulation = simulate(deployment(decode=but(DECODE, ranks=2)), alone(1000, 11), watcher=fetches)
    now, fetches.seen = simulation.host.now, []
    for message in (LoseRank(1), Fetch(10**6, 5.0, 1, (b"key",), (BlockRef(0, 1),)),
                    Fetch(10**6 + 1, 5.0, 0, (b"key",), (BlockRef(0, 1),))):
        simulation.host.post("decode-0/data", message)
    simulation.host.run_until(now + 1.0)

    asked_s = 2e-6
    assert fetches.seen == [(now, now, "rank 1 of decode-0 is gone"), (now, now + asked_s, "")]


def test_a_full_pool_drops_what_was_used_longest_ago():
    told = figures(simulate(deployment(cache=CacheConfig(count=1, bytes=1 << 28)),
                            replace(WORK, num_prefixes=0, prefix_tokens=0, share=0.0)))

    assert told["cache"]["pool_evicted_blocks"] > 0
    assert told["cache"]["pool_blocks"] == told["cache"]["pool_server_blocks"] == (1 << 28) // (70_000 * 128)


def test_requests_that_are_given_up_while_they_are_computed_end_with_an_error_and_leave_nothing():
    hasty = GatewayConfig(prefill_deadline_s=0.08, max_attempts=1, max_queued_tokens=10**9)
    simulation = simulate(deployment(gateway=hasty), replace(WORK, requests_per_s=20.0, duration_s=3.0))
    told = figures(simulation)

    assert told["requests"]["failed"]["prefill_deadline"] > 5
    assert told["requests"]["served"] + sum(told["requests"]["failed"].values()) == told["requests"]["sent"]
    assert told["goodput"]["requests"] == told["requests"]["served"] > 5


def test_a_run_can_be_cut_short():
    simulation = simulate(until_s=5.0)

    told = figures(simulation)
    assert told["requests"]["unfinished"] > 0 and simulation.users.num_ended > 0
    assert told["duration_s"] == pytest.approx(5.0, abs=0.02)
    assert told["throughput"]["requests_per_s"] == pytest.approx(simulation.users.num_ended / 5.0, rel=0.01)


def test_a_run_can_be_cut_short_before_any_request_ends():
    told = figures(simulate(work=alone(1000, 200), until_s=0.5))

    assert told["requests"]["unfinished"] == 1 and told["throughput"]["total_tokens_per_s"] == 0
    assert told["duration_s"] == pytest.approx(0.5, abs=0.02)
    assert 0 < told["pools"]["prefill"]["utilisation"] < told["pools"]["decode"]["utilisation"] < 1
    assert told["cost"]["npu_hours"] > 0


# ---------------------------------------------------------------- what cannot be simulated


@pytest.mark.parametrize(("change", "told"), [
    (dict(made=deployment(prefill=but(PREFILL, cache_tokens=0))), "prefill.cache_tokens is 0"),
    (dict(made=deployment(prefill=but(PREFILL, cache_tokens=100))), "less than one block of block_tokens 128"),
    (dict(rig=replace(RIG, costs={"prefill": LinearCosts(1.0)})), "decode.count is 2, but the hardware says nothing"),
    (dict(made=deployment(decode=but(DECODE, num_speculative_tokens=3))), "said of 2 drafts how likely"),
    (dict(failures=failures("instance:decode-9@5")), "there is no instance 'decode-9'"),
    (dict(failures=failures("die:decode-0/1@5")), "decode-0 has 1 rank"),
])
def test_what_cannot_be_simulated_is_told_before_anything_starts(change, told):
    with pytest.raises(ConfigError, match=told):
        simulate(**change)


@pytest.mark.parametrize("text", ["decode-1@5", "instance:decode-1", "instance:decode-1/2@5", "die:decode-0@5",
                                  "plane:rdma@soon", "pump:x@1", "plane:rdma@1.2.3"])
def test_a_failure_that_is_not_understood_is_told(text):
    with pytest.raises(ConfigError, match="the failure"):
        parse_failure(text)


def test_a_failure_is_written_as_it_is_read():
    for text in ("instance:decode-1@60+30", "die:decode-0/3@60", "cache:cache-2@10+5", "plane:rdma@100"):
        assert str(parse_failure(text)) == text
    check_failures(failures("die:decode-0/3@60"), {"decode-0": 4}, [], [])


@pytest.mark.parametrize(("wrong", "told"), [
    (lambda: LinearCosts(), "steps would take no time"),
    (lambda: LinearCosts(step_s=-1.0), "step_s is -1"),
    (lambda: Rig({}, PLANES, token_bytes=0), "token_bytes is 0"),
    (lambda: Rig({}, PLANES, token_bytes=1, acceptance=(1.5,)), "acceptance is"),
    (lambda: replace(PLANES, pool="moon"), "pool is 'moon', which is no plane"),
])
def test_prices_that_cannot_be_are_told(wrong, told):
    with pytest.raises(ConfigError, match=told):
        wrong()


def test_the_rank_with_most_to_do_decides_how_long_a_step_takes():
    two = InstanceConfig(count=1, ranks=2, max_num_seqs=8, max_num_batched_tokens=4096, cache_tokens=100_000)
    simulation = simulate(deployment(prefill=two), alone(50, 2, WorkRequest(0.001, ((2, 3000),), 2),
                                                         WorkRequest(0.001, ((3, 100),), 2)))

    pool = figures(simulation)["pools"]["prefill"]
    assert pool["steps"] == 2                          # the first, then both others together
    assert pool["mean_step_s"] * 2 == pytest.approx(2 * 0.010 + (50 + 3000) * 50e-6)


if __name__ == "__main__":
    GOLDEN.write_text(golden_run())
