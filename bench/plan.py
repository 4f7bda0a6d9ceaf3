"""Does the planner find a deployment as good as the paper's, how fast, and does a plan hold on what it has not seen?

`paper`: prompts of 4,096 tokens with answers of 256 (the paper's Table 4), the most of them within TTFT 4 s and TPOT 50
ms on 256 NPUs, against 6 prefill instances of 16 NPUs and one decode instance of 160 (section 5.1), with whichever
budget of a step serves it best. Both are simulated, at paces that go up until the goals are missed.

`online`: the same question for a mix that keeps the paper's two pools about equally busy, in closed form alone.

`unseen`: the plan for the first half of a trace, simulated under the second half. What is predicted of that is the
share of good requests; how many come, no plan can know.

    make bench NAME=plan ARGS='--trace conversation_trace.jsonl --json bench/results/plan.json'
"""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from pathlib import Path

from common import Report, flags
from tripool.core.deployment import Deployment, GatewayConfig, InstanceConfig
from tripool.planner.finalists import Found, confirm, settle
from tripool.planner.fit import Machine
from tripool.planner.goals import Budget, Goals, budget_of
from tripool.planner.search import Candidate, Question, Search
from tripool.planner.sensitivity import choose, variants
from tripool.planner.traffic import Traffic
from tripool.planner.trial import Workers, simulate
from tripool.planner.words import describe, differences
from tripool.serve.budget import usable_cores
from tripool.sim.costs.models import read_shape
from tripool.sim.costs.residuals import fitted_residuals
from tripool.sim.hardware.description import read_hardware
from tripool.sim.requests import Workload
from tripool.sim.synthetic import SyntheticWork
from tripool.sim.traces import read_workload

BARS = {"plan.paper_workload_ratio": ">= 1", "plan.seconds": "<= 120", "plan.unseen_error": "<= 0.10"}
NPUS = 256
GOALS = Goals(ttft_s=4.0, tpot_s=0.05, share=0.9)
PAPER_WORK = SyntheticWork(60.0, 100.0, prompt_tokens=4096, output_tokens=256)

# The mix of DeepSeek's day (open-infra-index, day 6): 56.3 % of 608 tokens in for 168 out came from a cache.
ONLINE_WORK = SyntheticWork(60.0, 100.0, prompt_tokens=4096, output_tokens=1132, num_prefixes=100, prefix_tokens=2304,
                            share=1.0)
STEP_TOKENS = (4096, 8192, 16384)
NO_CAPS = GatewayConfig(max_queued_requests=100_000, max_queued_tokens=10**9)
MADE_UP_TRACE = SyntheticWork(900.0, 4.0, prompt_tokens=8192, output_tokens=300, spread=0.8, num_prefixes=200,
                              prefix_tokens=2048, share=0.6, burst_every_s=60.0, burst_s=10.0, burst_times=2.0)


def machine() -> Machine:
    return Machine(read_shape("deepseek-r1"), read_hardware("cloudmatrix384"),
                   {"residuals": fitted_residuals(), "acceptance": (0.7,)})


def papers(step_tokens: int, cache: Deployment | None = None) -> Deployment:
    """Section 5.1: EP32 with 8 routed experts, a redundant and the shared one on each die; EP320 with one on each."""
    prefill = InstanceConfig(count=6, ranks=32, redundant_experts=32, expert_nodes=2, microbatches=True,
                             max_num_seqs=max(8, step_tokens // 1024), max_num_batched_tokens=step_tokens,
                             store_generated=False)
    decode = InstanceConfig(count=1, ranks=320, redundant_experts=32, shared_expert_copies=32, microbatches=True,
                            num_speculative_tokens=1, max_num_seqs=48, max_num_batched_tokens=96,
                            enable_prefix_caching=False, store_generated=False)
    made = Deployment(gateway=NO_CAPS, prefill=prefill, decode=decode, block_tokens=128)
    return replace(made, cache=cache.cache) if cache is not None else made


def best_of_papers(search: Search, cache: Deployment | None = None) -> Candidate:
    return max((search.given(papers(tokens, cache)) for tokens in STEP_TOKENS), key=lambda each: each.predicted)


def cpu_seconds() -> float:
    """Of this process and of those it has ended."""
    return sum(used.ru_utime + used.ru_stime
               for used in (resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def bench_paper(report: Report, quick: bool) -> None:
    question = Question(machine(), Traffic(PAPER_WORK), GOALS, budget_of(machine().hardware, NPUS), most=True,
                        num_drafts=1)
    begun, used = time.perf_counter(), cpu_seconds()
    with Workers(usable_cores()) as workers:
        search = Search(question)
        candidates = [*search.candidates()[:1 if quick else None], best_of_papers(search)]
        found = settle(search, workers, candidates)
        changes = [] if quick else workers.each(choose, list(variants(question)))
    seconds, used = time.perf_counter() - begun, cpu_seconds() - used
    plans = {each.candidate.is_fixed: each for each in reversed((*found.plans, *found.failed))}
    ours, theirs = plans[False], plans[True]
    report.figure("plan.paper_workload_ratio", ours.outcome.goodput / theirs.outcome.goodput, "x", "simulated",
                  bar=BARS["plan.paper_workload_ratio"], ours=describe(ours.deployment, question.machine.hardware),
                  differs=[list(row) for row in differences(ours.deployment, theirs.deployment)],
                  if_changed={each.words: describe(each.deployment, question.machine.hardware)
                              for each in changes if each.deployment is not None})
    report.figure("plan.seconds", seconds, "s", samples=[seconds], bar=BARS["plan.seconds"])
    report.figure("plan.cpu_seconds", used, "s", samples=[used])
    for name, plan in (("ours", ours), ("paper", theirs)):
        report.figure(f"plan.{name}_requests_per_s", plan.outcome.goodput, "requests/s", "simulated")
        report.figure(f"plan.{name}_closed_form_requests_per_s",
                      plan.candidate.predicted * question.traffic.requests_per_s, "requests/s", "derived")
        report.figure(f"plan.{name}_good_share", plan.outcome.share, "part", "simulated")


def bench_online(report: Report) -> None:
    """A workload that keeps the paper's prefill and decode about equally busy; too long to be simulated here."""
    question = Question(machine(), Traffic(ONLINE_WORK), GOALS, budget_of(machine().hardware, NPUS), most=True,
                        num_drafts=1)
    search = Search(question)
    best = search.candidates()[0]
    theirs = best_of_papers(search, best.deployment)
    report.figure("plan.online_mix_ratio", best.predicted / theirs.predicted, "x", "derived",
                  ours=describe(best.deployment, question.machine.hardware),
                  note="closed form: not simulated")


def bench_unseen(report: Report, trace: str, quick: bool) -> None:
    work = read_workload(Path(trace)) if trace else MADE_UP_TRACE.draw(1)
    if quick:
        work = work.first(len(work.requests) // 4)
    middle_s = work.span_s / 2
    halves = [Workload(work.source, tuple(replace(each, at_s=each.at_s - begin_s) for each in work.requests
                                          if begin_s <= each.at_s < begin_s + middle_s))
              for begin_s in (0.0, middle_s)]
    question = Question(machine(), Traffic(halves[0]), GOALS, Budget(2 * NPUS), num_drafts=1)
    search = Search(question)
    with Workers(usable_cores()) as workers:
        found: Found = confirm(search, workers, settle(search, workers, search.candidates()))
    plan = found.plans[0]
    unseen = simulate(question.machine, Traffic(halves[1]), GOALS, replace(plan.outcome.trial, whole=True))
    predicted = plan.outcome.share * unseen.requests_per_s
    report.figure("plan.unseen_error", abs(predicted / unseen.goodput - 1), "part", "simulated",
                  bar=BARS["plan.unseen_error"], plan=describe(plan.deployment, question.machine.hardware),
                  trace=work.source)
    report.figure("plan.seen_good_share", plan.outcome.share, "part", "simulated")
    report.figure("plan.unseen_good_share", unseen.share, "part", "simulated")
    report.figure("plan.seen_goodput", plan.outcome.goodput, "requests/s", "simulated")
    report.figure("plan.unseen_goodput", unseen.goodput, "requests/s", "simulated")


def main() -> None:
    parser = flags(__doc__.splitlines()[0])
    parser.add_argument("--trace", metavar="FILE", default="", help="a trace to be planned on its first half; without "
                        "it one is made up")
    parser.add_argument("--only", choices=("paper", "online", "unseen"), help="one of the three")
    args = parser.parse_args()
    report = Report(__doc__.splitlines()[0], {
        "npus": NPUS, "ttft_s": GOALS.ttft_s, "tpot_s": GOALS.tpot_s, "share": GOALS.share, "acceptance": 0.7,
        "paper_workload": "4,096 + 256 tokens, Poisson", "processes": usable_cores(), "quick": args.quick})
    if args.only in (None, "paper"):
        bench_paper(report, args.quick)
    if args.only in (None, "online"):
        bench_online(report)
    if args.only in (None, "unseen"):
        bench_unseen(report, args.trace, args.quick)
    report.write(args.json)


if __name__ == "__main__":
    main()
