"""What the paper leaves open about its supernode, asked of the simulator.

`pull`: what TPOT is when the cache goes from prefill to decode over UB, RDMA or VPC. Over UB a pull and the exchange of
experts, which every step waits for, share the links of a die: what isolation saves is what this adds to steps. `pool`:
UB, VPC, or one network for RDMA and VPC (section 6.1.1) under the pool and the pulls. `cpus`: how much it brings to
pool the memory of more CPUs (6.1.3), in context that is found; `cpus-ttft`: in TTFT. `size`: what a larger supernode
gives an instance that spreads its experts wider (6.1.2). `split`: attention and experts on dies of their own (6.2.1),
as xDeepServe does: throughput of a die over the part of them that has the experts, beside attention and experts
together at the same TPOT; `split-tpot`: TPOT of the same. `roles`: what it brings that instances change between prefill
and decode with the load (4.1, 6.2.2; `control/scaling`), where the mix of requests shifts and where it stays.

    make bench NAME=questions ARGS='--plots docs/tour --json bench/results/questions.json'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from common import Report, flags
from tripool.cli.files import make_folder
from tripool.cli.simulate_page import plot
from tripool.core.deployment import CacheConfig, Deployment, GatewayConfig, InstanceConfig, ScalingConfig
from tripool.core.placement import even_geometry
from tripool.sim.costs.apart import step_apart
from tripool.sim.costs.instance import Instance
from tripool.sim.costs.loads import balance_of
from tripool.sim.costs.models import read_shape
from tripool.sim.costs.residuals import fitted_residuals
from tripool.sim.costs.states import decode_state
from tripool.sim.costs.steps import OperatorCosts
from tripool.sim.costs.transfers import PlaneKind
from tripool.sim.hardware.description import read_hardware
from tripool.sim.machine import rig_of
from tripool.sim.outcome import Slo, outcome
from tripool.sim.reproduce.predictions import ACCEPTED_XDS, Predictions
from tripool.sim.reproduce.settings import DIES, xdeepserve
from tripool.sim.reproduce.tables import published
from tripool.sim.requests import Workload, WorkRequest
from tripool.sim.simulation import WARM_UP_S, Simulation
from tripool.sim.synthetic import SyntheticWork

QUESTION = __doc__.splitlines()[0]
PLANES: dict[PlaneKind, str] = {"scale_up": "UB", "scale_out": "RDMA", "management": "VPC"}
PREFILL = InstanceConfig(count=4, ranks=32, redundant_experts=32, expert_nodes=2, max_num_seqs=8,
                         max_num_batched_tokens=16384)
DECODE = InstanceConfig(count=1, ranks=160, redundant_experts=64, max_num_seqs=64, enable_prefix_caching=False)
GATEWAY = GatewayConfig(max_queued_requests=100_000, max_queued_tokens=10**10, place_deadline_s=600.0,
                        prefill_deadline_s=600.0)
POOL = CacheConfig(count=16, bytes=512 << 30, fetch_deadline_s=60.0, store_deadline_s=60.0)
POOLED_NODES = (2, 4, 8, 16, 48)
ROWS = 48                                  # on a die, in `size`
CONTEXT = 4096
SHARED = "exchange beside transfers"       # a part of steps
SPLIT_DIES = 768                           # all of a supernode, as xDeepServe divides them
SPLIT_CONTEXT, SPLIT_TPOT_MS = 3072, 50.0  # half of the way from 2,048 in to 2,048 out, and its goal
SPLIT_ROWS = range(8, 100, 4)
SHOWN_ROWS = (24, 48, 72)
EXPERT_DIES = (96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 448, 512)
DOMAINS = (1, 2, 3, 4)

EACH = InstanceConfig(ranks=32, redundant_experts=32, max_num_seqs=32, max_num_batched_tokens=4096,
                      enable_prefix_caching=False)
NUM_INSTANCES = 6                          # in `roles`, of 32 dies each; half of them prefill at first
LONG_PROMPTS = (56.0, 4096, 128)           # requests/s, tokens of a prompt, of an answer
LONG_ANSWERS = (80.0, 512, 1024)
STEADY = (90.0, 2048, 512)
PATIENT = replace(GATEWAY, decode_deadline_s=600.0)
GOALS = Slo(ttft_s=3.0, tpot_s=0.06)

Lines = Mapping[str, list[tuple[float, float]]]


def simulate(work: Workload, *, pull: PlaneKind = "scale_out", pool: PlaneKind = "scale_up",
             cache: CacheConfig = POOL) -> dict[str, Any]:
    """One run of DeepSeek-R1 on CloudMatrix384; experts are priced where they begin."""
    made = Deployment(prefill=PREFILL, decode=DECODE, cache=cache, gateway=GATEWAY, block_tokens=128, heartbeat_s=1.0,
                      pull_deadline_s=60.0)
    rig = rig_of(made, read_shape("deepseek-r1"), read_hardware("cloudmatrix384"), residuals=fitted_residuals(),
                 pull_plane=pull, pool_plane=pool)
    simulation = Simulation(made, work, replace(rig, experts={}))
    simulation.run()
    return outcome(simulation, Slo())


def ask_pull(report: Report, seconds: float) -> Lines:
    """TPOT over the rate of requests, by plane."""
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in PLANES.values()}
    for rate in (5.0, 20.0, 60.0):
        work = SyntheticWork(seconds, rate, prompt_tokens=4096, output_tokens=64).draw(1)
        for kind, name in PLANES.items():
            told = simulate(work, pull=kind)
            tpot_s = told["latency"]["tpot_s"]["mean"]
            lines[name].append((rate, tpot_s * 1e3))
            report.figure(f"questions.pull_{name.lower()}_tpot_ms_r{rate:g}", tpot_s * 1e3, "ms", "simulated")
            if kind == "scale_up":
                report.figure(f"questions.pull_isolation_saves_ms_per_step_r{rate:g}", _added_s(told) * 1e3, "ms",
                              "simulated")
    return lines


def _added_s(told: Mapping[str, Any]) -> float:
    """By so much transfers on the plane of its exchange made a step of the decode instance longer."""
    added_s = sum(part["seconds"] for part in told["step_parts"]["decode"] if part["part"] == SHARED)
    return float(added_s / max(told["pools"]["decode"]["steps"], 1))


def ask_pool(report: Report, seconds: float) -> Lines:
    """Mean TTFT over the part of the prompt that is shared, by the network of the pool."""
    networks: dict[str, tuple[PlaneKind, PlaneKind]] = {
        "UB, pulls over RDMA": ("scale_out", "scale_up"), "VPC, pulls over RDMA": ("scale_out", "management"),
        "RDMA and VPC as one": ("scale_out", "scale_out")}
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in networks}
    for reuse in (0.25, 0.5, 0.9):
        work = SyntheticWork(seconds, 12.0, prompt_tokens=4096, output_tokens=32, num_prefixes=12,
                             prefix_tokens=int(4096 * reuse), share=1.0).draw(1)
        for name, (pull, pool) in networks.items():
            told = simulate(work, pull=pull, pool=pool)
            ttft_ms = told["latency"]["ttft_s"]["mean"] * 1e3      # some find context where they are: a median jumps
            lines[name].append((reuse, ttft_ms))
            key = name.split(",")[0].lower().replace(" ", "_")
            report.figure(f"questions.pool_{key}_ttft_mean_ms_reuse{reuse:g}", ttft_ms, "ms", "simulated",
                          from_pool=told["cache"]["pool_hit_share"])
    return lines


@cache
def pooled(nodes: int, seconds: float) -> dict[str, Any]:
    """The memory of so many nodes is pooled, of 4 GB each for this."""
    work = SyntheticWork(2 * seconds, 12.0, prompt_tokens=4096, output_tokens=32, num_prefixes=150,
                         prefix_tokens=3584, share=1.0).draw(1)
    return simulate(work, cache=replace(POOL, count=nodes, bytes=4 << 30))


def ask_cpus(report: Report, seconds: float) -> Lines:
    """Hits in the pool over the number of nodes."""
    hits = []
    for nodes in POOLED_NODES:
        hit = pooled(nodes, seconds)["cache"]["pool_hit_share"]
        hits.append((float(nodes), 100 * hit))
        report.figure(f"questions.cpus_of_{nodes}_nodes_hits", hit, "share", "simulated")
    return {"from the pool": hits}


def ask_cpus_ttft(report: Report, seconds: float) -> Lines:
    """Mean TTFT of the same; a median is of those that find nothing."""
    firsts = []
    for nodes in POOLED_NODES:
        ttft_ms = pooled(nodes, seconds)["latency"]["ttft_s"]["mean"] * 1e3
        firsts.append((float(nodes), ttft_ms))
        report.figure(f"questions.cpus_of_{nodes}_nodes_ttft_mean_ms", ttft_ms, "ms", "simulated")
    return {"mean TTFT": firsts}


def ask_size(report: Report, _seconds: float) -> Lines:
    """Tokens per second of an NPU over the dies of one decode instance; a larger one is a machine with more nodes."""
    hardware, shape = read_hardware("cloudmatrix384"), read_shape("deepseek-r1")
    points = []
    for ranks in (80, 160, 320, 640, 1280):
        larger = replace(hardware, nodes=max(hardware.nodes, -(-ranks // hardware.dies_per_node)))
        redundant = max(ranks // 8, 32)
        geometry = even_geometry(ranks, 256, num_redundant=redundant if ranks <= 320 else ranks - 256 - ranks // 10,
                                 num_shared_copies=ranks // 10)
        costs = OperatorCosts(Instance(shape, larger, ranks, geometry), residuals=fitted_residuals())
        step_s = costs.step_time(decode_state(ranks, ROWS, CONTEXT, drafts=1, microbatches=2)).total_s
        rate = ROWS * 2 * 1.7 / step_s
        points.append((float(ranks), rate))
        report.figure(f"questions.size_{ranks}_dies_tokens_per_s_npu", rate, "tokens/s", "simulated",
                      tpot_ms=step_s / 1.7 * 1e3, note="exchange beyond 256 ranks as at 256" if ranks > 256 else "")
    return {"tokens/s per NPU": points}


@dataclass(frozen=True)
class Setting:
    """Attention and experts on dies of their own, or together on all (then without domains), and what comes of it."""

    expert_dies: int
    rows: int                              # of a die with attention, in one of two microbatches; together of a die
    domains: int
    step_s: float
    num_rows: int                          # on all dies

    @property
    def share(self) -> float:
        return self.expert_dies / SPLIT_DIES

    @property
    def tpot_ms(self) -> float:
        return self.step_s / ACCEPTED_XDS * 1e3

    @property
    def tokens_per_s_die(self) -> float:
        return self.num_rows * ACCEPTED_XDS / self.step_s / SPLIT_DIES


def experts_on(dies: int) -> list[OperatorCosts]:
    """Experts on as many dies, in as few slots as hold them and in one more on each, with as many copies of the shared
    one as make these the most even."""
    found = []
    least = -(-(256 + dies // 12) // dies)
    for slots in (least, least + 1):
        counts = [shared for shared in range(dies // 12, dies // 6 + 1, max(dies // 96, 1))
                  if 256 + shared <= slots * dies]
        geometries = [even_geometry(dies, 256, num_redundant=slots * dies - 256 - shared, num_shared_copies=shared)
                      for shared in counts]
        even = min(geometries, key=lambda each: balance_of(each, 8, 0.0).even)
        found.append(OperatorCosts(replace(xdeepserve(), ranks=dies, geometry=even), residuals=fitted_residuals()))
    return found


@cache
def apart(expert_dies: int) -> list[Setting]:
    """For each number of rows what gives most: of the ways to place experts, and of the divisions into domains."""
    settings = []
    ways = experts_on(expert_dies)
    for rows in SPLIT_ROWS:
        tried = []
        for costs in ways:
            for domains in DOMAINS:
                dies = (SPLIT_DIES - expert_dies) // domains
                step_s = step_apart(costs, dies, domains, rows, SPLIT_CONTEXT).iteration_s
                tried.append(Setting(expert_dies, rows, domains, step_s, 2 * rows * dies * domains))
        settings.append(max(tried, key=lambda each: each.tokens_per_s_die))
    return settings


@cache
def together() -> list[Setting]:
    """One instance on all dies, with one microbatch or two."""
    states = [decode_state(SPLIT_DIES, rows, SPLIT_CONTEXT, drafts=1, microbatches=halves)
              for rows in range(4, 2 * max(SPLIT_ROWS), 4) for halves in (1, 2)]
    return [Setting(SPLIT_DIES, int(state.rows_R[0]), 0, costs.step_time(state).total_s, int(state.rows_R.sum()))
            for costs in experts_on(SPLIT_DIES) for state in states]


def best_of(settings: Iterable[Setting]) -> Setting:
    """The one that gives most within the goal; where none is, the quickest."""
    known = list(settings)
    within = [each for each in known if each.tpot_ms <= SPLIT_TPOT_MS]
    if not within:
        return min(known, key=lambda each: each.tpot_ms)
    return max(within, key=lambda each: each.tokens_per_s_die)


def ask_split(report: Report, _seconds: float) -> Lines:
    """Throughput of a die over the part of the dies that has the experts, by rows and as the goal allows."""
    lines: dict[str, list[tuple[float, float]]] = {f"{2 * rows} rows": [] for rows in SHOWN_ROWS}
    found = []
    for expert_dies in EXPERT_DIES:
        for each in apart(expert_dies):
            if each.rows in SHOWN_ROWS:
                lines[f"{2 * each.rows} rows"].append((100 * each.share, each.tokens_per_s_die))
        found.append(best_of(apart(expert_dies)))
        report.figure(f"questions.split_{expert_dies}_expert_dies_tokens_per_s_die", found[-1].tokens_per_s_die,
                      "tokens/s", "simulated", tpot_ms=found[-1].tpot_ms, rows_of_an_attention_die=2 * found[-1].rows,
                      domains=found[-1].domains, dies=SPLIT_DIES)
    best, one = best_of(found), best_of(together())
    lines[f"{SPLIT_TPOT_MS:g} ms"] = [(100 * each.share, each.tokens_per_s_die) for each in found]
    lines["best"] = [(100 * best.share, 0.0), (100 * best.share, best.tokens_per_s_die)]
    ends = 100 * min(EXPERT_DIES) / SPLIT_DIES, 100 * max(EXPERT_DIES) / SPLIT_DIES
    lines["together"] = [(end, one.tokens_per_s_die) for end in ends]
    told = published("derived")["xdeepserve_decode/1/tokens_per_s_per_chip"] / DIES
    share = 100 * 288 / SPLIT_DIES
    lines["published"] = [(share - 1, told), (share + 1, told)]
    report.figure("questions.split_best_share", best.share, "share", "simulated", expert_dies=best.expert_dies,
                  rows_of_an_attention_die=2 * best.rows, domains=best.domains)
    report.figure("questions.split_best_tokens_per_s_die", best.tokens_per_s_die, "tokens/s", "simulated",
                  tpot_ms=best.tpot_ms)
    report.figure("questions.split_together_tokens_per_s_die", one.tokens_per_s_die, "tokens/s", "simulated",
                  tpot_ms=one.tpot_ms, rows_of_a_die=one.rows, note="exchange of 768 ranks as of 256")
    report.figure("questions.split_gain", best.tokens_per_s_die / one.tokens_per_s_die, "ratio", "simulated")
    step = Predictions(fitted_residuals()).disaggregated()
    theirs = Setting(288, 48, 3, step.iteration_s, 96 * 480)
    report.figure("questions.split_xdeepserve_setting_tokens_per_s_die", theirs.tokens_per_s_die, "tokens/s",
                  "simulated", tpot_ms=theirs.tpot_ms, attention_us=step.attention_s * 1e6)
    report.figure("questions.split_xdeepserve_published_tokens_per_s_die", told, "tokens/s", "published",
                  version="arXiv 2508.02520, 7.1: 2,400 of a chip of two dies; a layer takes 2 x 0.7 ms",
                  tpot_ms=published("derived")["xdeepserve_decode/1/tpot_ms"])
    return lines


def ask_split_tpot(report: Report, _seconds: float) -> Lines:
    """TPOT of the same, by rows."""
    lines: dict[str, list[tuple[float, float]]] = {f"{2 * rows} rows": [] for rows in SHOWN_ROWS}
    for expert_dies in EXPERT_DIES:
        for each in apart(expert_dies):
            if each.rows in SHOWN_ROWS:
                lines[f"{2 * each.rows} rows"].append((100 * each.share, each.tpot_ms))
                report.figure(f"questions.split_{expert_dies}_expert_dies_{2 * each.rows}_rows_tpot_ms", each.tpot_ms,
                              "ms", "simulated", tokens_per_s_die=each.tokens_per_s_die, domains=each.domains)
    lines["goal"] = [(points[0], SPLIT_TPOT_MS) for points in lines[f"{2 * SHOWN_ROWS[0]} rows"]]
    return lines


def ask_roles(report: Report, seconds: float) -> Lines:
    """Requests that keep the goals, over time, where long prompts and long answers take turns: with roles that change,
    with the split at the start, and with the best one. A load that does not shift is asked as well."""
    part_s = 18 * seconds
    shifting = _in_turn([LONG_PROMPTS, LONG_ANSWERS] * 2, part_s)
    splits = range(1, NUM_INSTANCES)
    found = {num_prefill: _with_roles(shifting, num_prefill) for num_prefill in splits}
    best = max(splits, key=lambda num_prefill: outcome(found[num_prefill], GOALS)["goodput"]["requests"])
    first = NUM_INSTANCES // 2
    adaptive = _with_roles(shifting, first, seconds)
    for num_prefill in splits:
        _tell_roles(report, f"shifting_fixed_{num_prefill}_{NUM_INSTANCES - num_prefill}", found[num_prefill])
    _tell_roles(report, "shifting_adaptive", adaptive)
    steady = _in_turn([STEADY], 2 * part_s)
    _tell_roles(report, f"steady_fixed_{first}_{first}", _with_roles(steady, first))
    _tell_roles(report, "steady_adaptive", _with_roles(steady, first, seconds))
    return {"roles that change": _good_over_time(adaptive, part_s / 9),
            f"{first} + {first}, as at the start": _good_over_time(found[first], part_s / 9),
            f"{best} + {NUM_INSTANCES - best}, the best that is fixed": _good_over_time(found[best], part_s / 9)}


def _in_turn(mixes: list[tuple[float, int, int]], part_s: float) -> Workload:
    """So many seconds of each mix, one after the other."""
    requests: list[WorkRequest] = []
    for part, (rate, prompt, output) in enumerate(mixes):
        work = SyntheticWork(part_s, rate, prompt_tokens=prompt, output_tokens=output, spread=0.3).draw(part)
        requests += [replace(each, at_s=part * part_s + each.at_s, parts=((len(requests) + index, each.num_prompt),))
                     for index, each in enumerate(work.requests)]
    return Workload("mixes in turn", tuple(requests))


def _with_roles(work: Workload, num_prefill: int, seconds: float = 0.0) -> Simulation:
    """One run; with `seconds` roles change, as patiently as by default where these are 10."""
    scaling = ScalingConfig(enabled=True, hold_s=seconds / 2, cool_down_s=3 * seconds) if seconds else ScalingConfig()
    made = Deployment(prefill=replace(EACH, count=num_prefill), decode=replace(EACH, count=NUM_INSTANCES - num_prefill),
                      gateway=PATIENT, scaling=scaling, block_tokens=128, pull_deadline_s=60.0)
    rig = rig_of(made, read_shape("deepseek-r1"), read_hardware("cloudmatrix384"), residuals=fitted_residuals())
    simulation = Simulation(made, work, replace(rig, experts={}))
    simulation.run()
    return simulation


def _tell_roles(report: Report, name: str, simulation: Simulation) -> None:
    told = outcome(simulation, GOALS)
    latency = {f"{kind}_{each}_ms": told["latency"][f"{kind}_s"][each] * 1e3
               for kind in ("ttft", "tpot") for each in ("p50", "p99")}
    changes = {"changes": told["roles"]["changes"], "withdrawn": told["roles"]["withdrawn"]} if "roles" in told else {}
    report.figure(f"questions.roles_{name}_goodput", told["goodput"]["requests_per_s"], "requests/s", "simulated",
                  share=told["goodput"]["share"], **latency, **changes)


def _good_over_time(simulation: Simulation, window_s: float) -> list[tuple[float, float]]:
    """Of the requests that were sent in a window, the percentage that kept the goals."""
    sent: dict[int, list[bool]] = {}
    for each in simulation.users.journeys:
        sent.setdefault(int((each.sent_s - WARM_UP_S) / window_s), []).append(GOALS.is_kept_by(each))
    return [((window + 0.5) * window_s, 100 * sum(good) / len(good)) for window, good in sorted(sent.items())]


QUESTIONS = {"pull": (ask_pull, "P to D: mean TPOT", "requests/s", "ms"),
             "pool": (ask_pool, "The pool's network: mean TTFT", "shared part of a prompt", "ms"),
             "cpus": (ask_cpus, "Pooled CPUs: context from the pool", "nodes", "% of prompt tokens"),
             "cpus-ttft": (ask_cpus_ttft, "Pooled CPUs: mean TTFT", "nodes", "ms"),
             "size": (ask_size, "Larger supernodes", "dies of one instance", "tokens/s"),
             "split": (ask_split, "Attention and experts apart: throughput of a die", "% for experts",
                       "tokens/s"),
             "split-tpot": (ask_split_tpot, "Attention and experts apart: TPOT", "% for experts", "ms"),
             "roles": (ask_roles, "Requests in time, roles fixed or not", "seconds", "%")}


def main() -> None:
    parser = flags(QUESTION)
    parser.add_argument("--only", choices=tuple(QUESTIONS), help="one of them")
    parser.add_argument("--plots", metavar="FOLDER", help="a picture of each, as SVG")
    args = parser.parse_args()
    if args.plots:
        make_folder(Path(args.plots), "--plots")
    seconds = 1.0 if args.quick else 10.0
    report = Report(QUESTION, {"hardware": "cloudmatrix384", "model": "deepseek-r1", "seconds": seconds})
    for name, (ask, title, x_name, y_name) in QUESTIONS.items():
        if args.only not in (None, name):
            continue
        lines = ask(report, seconds)
        if args.plots and lines:
            Path(args.plots, f"question-{name}.svg").write_text(plot(title, lines, x_name, y_name) + "\n")
    report.write(args.json)


if __name__ == "__main__":
    main()
