"""Seeded schedules of faults over the real control plane, with every invariant checked after each event.

A schedule is drawn from one number: how many members of each role and how small their caches are, which requests
come and which clients give up, which processes are killed (and come back as a new life), stopped for a while or
drained, which ranks are lost and come back, when operators have experts moved and whereto, whether instances change
between prefill and decode and how readily, what links between processes lose, repeat, delay and reorder, and which
verbs fail or are slow. Faults end after a while; from then on every request must end within a bound, after that nobody
may hold anything, and whoever comes then must be served.

    python -m tripool.sim.chaos --schedules 500          seeds 0 to 499
    python -m tripool.sim.chaos --seed 17                one of them, told in full
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from tripool.control.scheduler import InstanceScheduler
from tripool.core.deployment import CacheConfig, Deployment, GatewayConfig, InstanceConfig, ScalingConfig
from tripool.core.machine import Address, Message, Send
from tripool.core.messages import ROLES, Drain, Heartbeat, MemberChanged, Rebalance, Tick
from tripool.core.placement import EMPTY, Placement, initial_placement
from tripool.sim.cluster import SimCluster, Sizes
from tripool.sim.dataplane import Sabotage, ToyPrice, VerbFaults
from tripool.sim.experts import ToyMixture
from tripool.sim.host import SimHost
from tripool.sim.links import FaultRates, FaultyLinks, Outage
from tripool.sim.workload import Arrival, SyntheticLoad

BLOCK_TOKENS = 4
FAULTS_S = 5.0                 # faults happen before
MOST_S = 30.0                  # all requests have ended: the longest deadline, and then some attempts without faults
LAST_REQUESTS = 3              # that come when all is over
SETTLE_S = 8.0                 # forgotten attempts have come to light: their age in heartbeats, and a message or two
TOLD_EVENTS = 40

PRICE = ToyPrice(step_s=0.02, chunk_token_s=0.0005, decode_row_s=0.0005, copy_s=0.002, block_s=0.0005, load_s=0.3,
                 move_bytes_per_s=20e6)


class Violation(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Blow:
    """Something that happens to a process: it is killed, stopped or drained, and goes on or begins anew at `end_s`.

    One that is leaving was told so itself: others learn it with its next heartbeat.
    """

    kind: str
    member: Address
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class RankLoss:
    """A rank of a member dies, and comes back at `end_s` if its member lives by then."""

    member: Address
    rank: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that happens in one run, drawn from its seed."""

    seed: int
    deployment: Deployment
    sizes: Sizes
    pool_blocks: int
    arrivals: list[Arrival]
    blows: list[Blow]
    mixture: ToyMixture
    losses: list[RankLoss]
    rebalances: list[tuple[float, Address, Rebalance]]
    rates: FaultRates
    outages: tuple[Outage, ...]
    verb_fail: float
    verb_slow: float
    move_fail: float
    give_up: float

    def describe(self) -> str:
        """For whoever looks at a failure."""
        deployment = self.deployment
        lines = [f"schedule {self.seed}: {deployment.prefill.count} prefill, {deployment.decode.count} decode, "
                 f"{deployment.hybrid.count} hybrid; blocks {self.sizes}; pool of {self.pool_blocks} blocks",
                 f"  roles {deployment.scaling if deployment.scaling.enabled else 'are fixed'}",
                 f"  drafts {deployment.decode.num_speculative_tokens} in decode, "
                 f"{deployment.hybrid.num_speculative_tokens} in hybrid",
                 f"  ranks {deployment.prefill.ranks}, {deployment.decode.ranks}, {deployment.hybrid.ranks}; "
                 f"{self.mixture}",
                 f"  links {self.rates}, verbs fail {self.verb_fail:.3f} slow {self.verb_slow:.3f}, moves fail "
                 f"{self.move_fail:.3f}, steps are given up {self.give_up:.3f}"]
        lines += [f"  {each.begin_s:.3f} to {each.end_s:.3f} s: {each.member} lacks rank {each.rank}"
                  for each in self.losses]
        lines += [f"  {at_s:.3f} s: {member} is told to rebalance" for at_s, member, _ in self.rebalances]
        lines += [f"  {blow.begin_s:.3f} to {blow.end_s:.3f} s: {blow.member} {blow.kind}" for blow in self.blows]
        lines += [f"  {each.begin_s:.3f} to {each.end_s:.3f} s: {each.member} unreachable" for each in self.outages]
        return "\n".join(lines)


@dataclass(slots=True)
class Tally:
    """What the schedules brought about, to see that they reach what they are meant to reach."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, count: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + count

    def merge(self, other: Tally) -> None:
        for name, count in other.counts.items():
            self.add(name, count)

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))


# ---------------------------------------------------------------- drawing a schedule


def draw_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    generator = random.Random(seed)
    deployment = _with_drafts(_draw_deployment(generator), random.Random(f"drafts of {seed}"))
    deployment = _with_changing_roles(deployment, random.Random(f"roles of {seed}"))
    mixture = ToyMixture(num_layers=generator.randint(1, 3), num_routed=generator.choice((4, 6, 8)),
                         room_tokens=generator.choice((4, 64)))
    configs = {f"{role}-{index}": getattr(deployment, role) for role in ROLES
               for index in range(getattr(deployment, role).count)}
    members = list(configs)
    load = SyntheticLoad(
        num_requests=generator.choice((6, 10, 14, 30)), requests_per_s=generator.choice((4.0, 10.0, 40.0)),
        prompt_tokens=(1, 16), output_tokens=(1, 36), num_prefixes=2, prefix_tokens=(4, 12), share=0.6,
        cancel=generator.choice((0.0, 0.15, 0.4)), cancel_after_s=(0.0, 1.5), logprobs=0.2,
        priorities=generator.choice((1, 1, 2)))
    harshness = generator.choice((0.0, 0.3, 1.0))
    return Schedule(
        seed, deployment,
        _draw_sizes(generator),
        pool_blocks=generator.choice((1, 20, 200)),
        arrivals=load.arrivals(generator),
        blows=_draw_blows(generator, members),
        mixture=mixture,
        losses=_draw_losses(generator, configs),
        rebalances=_draw_rebalances(generator, configs, mixture),
        rates=FaultRates(drop=harshness * generator.random() * 0.06, duplicate=harshness * generator.random() * 0.1,
                         delay=harshness * generator.random() * 0.15, max_delay_s=generator.choice((0.05, 0.5, 3.0))),
        outages=tuple(_draw_outage(generator, members) for _ in range(generator.choice((0, 0, 0, 1, 2)))),
        verb_fail=generator.choice((0.0, 0.0, 0.02, 0.08)), verb_slow=generator.choice((0.0, 0.05, 0.2)),
        move_fail=generator.choice((0.0, 0.1, 0.5)), give_up=generator.choice((0.0, 0.02, 0.1)))


def _draw_deployment(generator: random.Random) -> Deployment:
    num_prefill, num_decode, num_hybrid = generator.randint(1, 3), generator.randint(1, 3), generator.randint(0, 2)
    if generator.random() < 0.1:
        num_prefill, num_decode, num_hybrid = 0, 0, generator.randint(1, 2)

    def instance(count: int) -> InstanceConfig:
        ranks = generator.choice((1, 1, 1, 2, 3, 4))
        return InstanceConfig(count=count, ranks=ranks, exchange="collective" if ranks > 1 else "local",
                              redundant_experts=generator.choice((0, 1, 4)) if ranks > 1 else 0,
                              shared_expert_copies=generator.choice((0, 0, 1, 2)) if ranks > 1 else 0,
                              rebalance=generator.random() < 0.9, rebalance_steps=generator.choice((3, 10, 40)),
                              microbatches=generator.random() < 0.5,
                              max_num_seqs=generator.choice((1, 1, 2, 3, 6)),
                              max_num_batched_tokens=generator.randint(6, 24),
                              enable_prefix_caching=generator.random() < 0.85,
                              store_generated=generator.random() < 0.5)

    return Deployment(
        gateway=GatewayConfig(max_attempts=5, max_queued_requests=generator.choice((6, 100)), place_deadline_s=3.0,
                              prefill_deadline_s=7.0, decode_deadline_s=5.0),
        prefill=instance(num_prefill), decode=instance(num_decode), hybrid=instance(num_hybrid),
        cache=CacheConfig(count=generator.choice((0, 1, 1)), fetch_deadline_s=0.4, store_deadline_s=0.6),
        block_tokens=BLOCK_TOKENS, heartbeat_s=0.5, stall_s=2.0, run_deadline_s=2.0, pull_deadline_s=0.5)


def _with_drafts(deployment: Deployment, generator: random.Random) -> Deployment:
    """In some schedules some draft, each role as it likes."""
    if generator.random() < 0.6:
        return deployment
    drafts = {role: generator.choice((1, 2, 5)) if generator.random() < 0.4 else 0
              for role in ROLES}
    return replace(deployment, **{role: replace(getattr(deployment, role), num_speculative_tokens=count)
                                  for role, count in drafts.items()})


def _with_changing_roles(deployment: Deployment, generator: random.Random) -> Deployment:
    """In some schedules roles change, far more readily than anybody would have them: at any queue at all."""
    if not deployment.prefill.count or generator.random() < 0.6:
        return deployment
    spare_load = generator.choice((0.05, 0.3, 0.8))
    scaling = ScalingConfig(enabled=True, short_load=spare_load + 0.01, spare_load=spare_load,
                            hold_s=generator.choice((0.01, 0.2)), cool_down_s=generator.choice((0.05, 0.5)))
    return replace(deployment, scaling=scaling,
                   prefill=replace(deployment.prefill, count=generator.choice((1, 2, 3))),
                   decode=replace(deployment.prefill, count=generator.choice((2, 2, 3))))


def _draw_sizes(generator: random.Random) -> Sizes:
    """Small ones; the longest request needs 16 blocks."""
    prefill, decode, hybrid = (generator.choice((16, 17, 20, 30)) for _ in range(3))
    return Sizes(prefill, decode, hybrid)


def _draw_blows(generator: random.Random, members: list[Address]) -> list[Blow]:
    """Kills and stops, no two of one member at once."""
    blows = []
    for member in [*members, "gateway"]:
        kinds = ("stopped",) if member == "gateway" else ("killed", "stopped") * 2 + ("drained", "leaving")
        at_s = generator.uniform(0.0, FAULTS_S)
        while generator.random() < (0.2 if member == "gateway" else 0.4) and at_s < FAULTS_S:
            end_s = at_s + generator.choice((0.05, 0.5, 1.5, 3.0)) * (0.5 + generator.random())
            blows.append(Blow(generator.choice(kinds), member, at_s, end_s))
            at_s = end_s + generator.uniform(0.1, 2.0)
    return blows


def _draw_losses(generator: random.Random, configs: dict[Address, InstanceConfig]) -> list[RankLoss]:
    """One rank after the other or several at once; some are away until faults end."""
    losses = []
    for member, config in configs.items():
        for rank in range(1, config.ranks):
            at_s = generator.uniform(0.0, FAULTS_S)
            while generator.random() < 0.35 and at_s < FAULTS_S:
                end_s = min(FAULTS_S, at_s + generator.choice((0.05, 0.5, 1.5, FAULTS_S)))
                losses.append(RankLoss(member, rank, at_s, end_s))
                at_s = end_s + generator.uniform(0.4, 1.5)
    return losses


def _draw_rebalances(generator: random.Random, configs: dict[Address, InstanceConfig],
                     mixture: ToyMixture) -> list[tuple[float, Address, Rebalance]]:
    """What operators want: the best placement, one of their own, or one that is for another instance."""
    rebalances = []
    for member, config in configs.items():
        while generator.random() < (0.4 if config.ranks > 1 else 0.05):
            wanted = generator.choice(("best", "own", "own", "own", "other"))
            goal = None
            if wanted == "own":
                goal = _draw_placement(generator, config, mixture).pack()
            elif wanted == "other":
                goal = _draw_placement(generator, InstanceConfig(ranks=config.ranks + 1), mixture).pack()
            rebalances.append((generator.uniform(0.5, FAULTS_S), member, Rebalance(goal)))
    return rebalances


def _draw_placement(generator: random.Random, config: InstanceConfig, mixture: ToyMixture) -> Placement:
    """The first one with experts by other names, in each layer."""
    first = initial_placement(mixture.geometry(config), mixture.num_layers)
    layers = []
    for experts in first.layers:
        names = generator.sample(range(mixture.num_routed), mixture.num_routed) + [mixture.num_routed, -1]
        layers.append(tuple(names[expert] for expert in experts))
    return Placement(first.version, first.num_experts, first.slots_per_rank, tuple(layers))


def _draw_outage(generator: random.Random, members: list[Address]) -> Outage:
    begin_s = generator.uniform(0.0, FAULTS_S)
    return Outage(generator.choice(members), begin_s, begin_s + generator.uniform(0.1, 3.0))


# ---------------------------------------------------------------- running one


class Checker:
    """Looks at what an event may have changed, right after it."""

    def __init__(self, tally: Tally) -> None:
        self.cluster: SimCluster | None = None
        self.told: deque[tuple[float, Address, Message, list[Send]]] = deque(maxlen=TOLD_EVENTS)
        self.tally = tally
        self._unrunnable: dict[Address, str] = {}           # instances with experts in no slot, and in which life

    def __call__(self, address: Address, message: Message, sends: list[Send], now: float) -> None:
        cluster = self.cluster
        assert cluster is not None, "watching no cluster"
        if not isinstance(message, Heartbeat | MemberChanged | Tick) and not address.endswith("/data"):
            self.told.append((now, address, message, sends))
        if cluster.client.wrongs or cluster.memory.wrongs:
            raise Violation(cluster.wrongs[0])
        if address == "gateway":
            cluster.gateway.check_invariants()
        elif address == "gateway/router":
            cluster.router.check_invariants()
        elif (scheduler := cluster.schedulers.get(address)) is not None:
            check_instance(cluster, address, scheduler)
            check_map(cluster, address, scheduler)
            self._count_unrunnable(address, scheduler)

    def _count_unrunnable(self, member: Address, scheduler: InstanceScheduler) -> None:
        if scheduler.rebalancer is None or scheduler.rebalancer.runnable:
            self._unrunnable.pop(member, None)
        elif self._unrunnable.get(member) != scheduler.boot_id:
            self._unrunnable[member] = scheduler.boot_id
            self.tally.add("without an expert")


def check_instance(cluster: SimCluster, member: Address, scheduler: InstanceScheduler) -> None:
    """Blocks and slots add up, and nothing that the data plane may touch is free to be given out."""
    scheduler.check_invariants()
    plane = cluster.planes[member]
    for rank in scheduler.ranks:
        for block in plane.named_blocks(rank.index):
            if not rank.blocks.num_refs(block) and not rank.blocks.num_pins(block):
                raise Violation(f"{member} would give out block {block}, which its data plane may still touch")


def check_map(cluster: SimCluster, member: Address, scheduler: InstanceScheduler) -> None:
    """Every slot that the newest map names holds its expert, but for those of ranks whose end is not yet told."""
    rebalancer, experts = scheduler.rebalancer, cluster.planes[member].experts
    if rebalancer is None or experts is None:
        return
    for layer, (named, held) in enumerate(zip(rebalancer.placement.layers, experts.held, strict=True)):
        for slot, (expert, there) in enumerate(zip(named, held, strict=True)):
            if expert not in (EMPTY, there) and not experts.is_lost(rebalancer.placement.rank_of(slot)):
                raise Violation(f"{member} names expert {expert} in slot {slot} of layer {layer}, where there is "
                                f"{there}")


def run_schedule(schedule: Schedule, tally: Tally, *, sabotage: Sabotage | None = None,
                 tamper: Callable[[SimCluster], None] | None = None) -> list[str]:
    """Run one schedule. Returns the last events, for the story of a failure.

    Raises:
        Violation: an invariant does not hold. Its notes tell the schedule and the last events.
    """
    # The generators of faults are apart from the one the schedule was drawn from, and from each other.
    links = FaultyLinks(random.Random(schedule.seed * 2 + 1), schedule.rates, schedule.outages, FAULTS_S)
    faults = VerbFaults(random.Random(schedule.seed * 2 + 2), schedule.verb_fail, schedule.verb_slow, 1.0, FAULTS_S,
                        schedule.move_fail, schedule.give_up)
    checker = Checker(tally)
    host = SimHost(links, watch=checker)
    cluster = SimCluster(host, schedule.deployment, schedule.sizes, pool_blocks=schedule.pool_blocks, price=PRICE,
                         faults=faults, sabotage=sabotage, mixture=schedule.mixture)
    checker.cluster = cluster
    try:
        _run(schedule, host, cluster, tally, tamper)
    except Exception as error:
        story = [_tell(event) for event in checker.told]
        violation = error if isinstance(error, Violation) else Violation(f"{type(error).__name__}: {error}")
        violation.add_note("\n".join([schedule.describe(), *story]))
        raise violation from error
    return [_tell(event) for event in checker.told]


def _run(schedule: Schedule, host: SimHost, cluster: SimCluster, tally: Tally,
         tamper: Callable[[SimCluster], None] | None) -> None:
    cluster.submit(schedule.arrivals)
    cluster.start_all()
    if tamper is not None:
        tamper(cluster)
    for at_s, member, rebalance in schedule.rebalances:
        host.post(member, rebalance, at_s)
    happenings: list[Blow | RankLoss] = [*schedule.blows, *schedule.losses]
    moments = [(each.begin_s, 1, each) for each in happenings] + [(each.end_s, 0, each) for each in happenings]
    for at_s, begins, happening in sorted(moments, key=lambda moment: moment[:2]):
        host.run_until(at_s)
        if isinstance(happening, RankLoss):
            (cluster.lose_rank if begins else cluster.return_rank)(happening.member, happening.rank)
        else:
            _strike(host, cluster, happening, bool(begins), tally)
    _wait(host, cluster, MOST_S)
    _settle(host, cluster)
    _serve_some_more(schedule.seed, host, cluster)
    for member in cluster.schedulers:
        _count_life(cluster, member, tally)
    _count_ends(cluster, tally)
    tally.add("events", host.num_events)


def _strike(host: SimHost, cluster: SimCluster, blow: Blow, begins: bool, tally: Tally) -> None:
    if blow.kind == "stopped":
        (host.stop if begins else host.resume)(blow.member)
    elif blow.kind in ("drained", "leaving") and begins:
        host.post("gateway/health" if blow.kind == "drained" else blow.member, Drain(blow.member))
    else:
        if begins or blow.kind != "killed":
            _count_life(cluster, blow.member, tally)
            cluster.kill(blow.member)
        if not begins:
            cluster.start(blow.member)
    tally.add(blow.kind, begins)


def _wait(host: SimHost, cluster: SimCluster, end_s: float) -> None:
    if not host.run_while(lambda: cluster.client.num_open > 0, end_s=end_s):
        late = [number for number, stream in cluster.client.streams.items() if stream.ended_at is None]
        raise Violation(f"requests {late} did not end within {end_s:g} s")
    for number, stream in cluster.client.streams.items():
        if stream.status == 500:                           # every instance has room for the longest
            raise Violation(f"request {number} was given up for good: {stream.error}")


def _serve_some_more(seed: int, host: SimHost, cluster: SimCluster) -> None:
    """Everybody is back, so nothing stands in the way of a few more requests."""
    for member, plane in cluster.planes.items():
        if plane.lost:
            raise Violation(f"{member} still lacks ranks {list(plane.lost)}")
    if any(scheduler.state != "up" for scheduler in cluster.schedulers.values()):
        return                                             # a late word to drain has reached another life
    first_id = max(cluster.client.streams) + 1
    load = SyntheticLoad(LAST_REQUESTS, 1000.0, prompt_tokens=(1, 16), output_tokens=(1, 8), prefix_tokens=(4, 12))
    arrivals = [replace(each, at_s=host.now) for each in load.arrivals(random.Random(seed), first_id)]
    cluster.submit(arrivals)
    _wait(host, cluster, host.now + SETTLE_S)
    for each in arrivals:
        if cluster.client.streams[each.request.request_id].error is not None:
            raise Violation(f"request {each.request.request_id} came when all was over, but was told: "
                            f"{cluster.client.streams[each.request.request_id].error}")
    _settle(host, cluster)


def _settle(host: SimHost, cluster: SimCluster) -> None:
    """Wait until nobody holds anything, which must come."""
    end_s = max(host.now, FAULTS_S) + SETTLE_S
    while True:
        host.run_until(host.now + 1.0)
        try:
            cluster.check_idle()
            return
        except AssertionError:
            if host.now >= end_s:
                raise


def _count_life(cluster: SimCluster, member: Address, tally: Tally) -> None:
    """Of a life that is over, or will go on uncounted."""
    stats = cluster.schedulers[member].stats
    tally.add("stepped back", stats.preemptions)
    tally.add("changed roles", stats.role_changes)
    tally.add("refused as full", stats.failures.get("full", 0))
    tally.add("drafted", sum(stats.drafted_tokens.values()))
    tally.add("accepted drafts", sum(stats.accepted_tokens.values()))
    plane, rebalancer = cluster.planes[member], cluster.schedulers[member].rebalancer
    tally.add("stale pulls", plane.num_stale_pulls)
    tally.add("lost ranks", plane.num_lost_ranks)
    tally.add("steps given up", plane.num_steps_given_up)
    tally.add("steps given up in part", plane.num_steps_given_up_in_part)
    tally.add("plans behind a loss", plane.num_stale_plans)
    tally.add("steps in halves", plane.num_halved_steps)
    tally.add("failed moves", plane.num_failed_moves)
    tally.add("moved experts", plane.experts.num_moved if plane.experts is not None else 0)
    if rebalancer is not None and rebalancer.geometry.num_ranks > 1:
        tally.add("map versions", rebalancer.version - 1)


def _count_ends(cluster: SimCluster, tally: Tally) -> None:
    stats = cluster.gateway.stats
    tally.add("schedules")
    tally.add("retries", sum(stats.retried.values()))
    tally.add("placed elsewhere", stats.placed_elsewhere)
    tally.add("withdrawn changes", cluster.scaling.stats.withdrawn)
    tally.add("handed on", stats.handed_on)
    tally.add("forgotten attempts", stats.forgotten_attempts)
    tally.add("reused tokens", stats.cached_tokens)
    for stream in cluster.client.streams.values():
        tally.add(f"ended: {stream.finish or 'error ' + str(stream.status)}")


def _tell(event: tuple[float, Address, Message, list[Send]]) -> str:
    now, address, message, sends = event
    said = ", ".join(f"{type(send.message).__name__}>{send.to}" for send in sends)
    return f"  {now:9.4f} {address:16} {_brief(message)}" + (f"  -> {said}" if said else "")


def _brief(message: Any, limit: int = 120) -> str:
    text = repr(message)
    return text if len(text) <= limit else text[:limit] + " ..."


# ---------------------------------------------------------------- command line


def try_schedule(seed: int, *, told: bool = False) -> tuple[Tally, str]:
    """Run the schedule of a seed: what it brought about, and the story of a violation, if there was one."""
    schedule, tally = draw_schedule(seed), Tally()
    try:
        story = run_schedule(schedule, tally)
    except Violation as violation:
        notes = "\n".join(getattr(violation, "__notes__", ()))
        where = "".join(traceback.format_exception(violation.__cause__)) if violation.__cause__ is not None else ""
        return tally, (f"{notes}\n{where}\nVIOLATION in schedule {seed}: {violation}\n"
                       f"replay it with: python -m tripool.sim.chaos --seed {seed}\n")
    if told:
        sys.stdout.write("\n".join([schedule.describe(), *story]) + "\n")
    return tally, ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tripool.sim.chaos", description="Seeded fault schedules over the "
                                     "control plane in virtual time. Prints one seed if an invariant breaks.")
    parser.add_argument("--schedules", type=int, default=500, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run only this schedule, and tell its last events")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many run at once")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        tally, violation = try_schedule(options.seed, told=True)
    else:
        tally, violation = Tally(), ""
        with ProcessPoolExecutor(options.processes) as pool:
            seeds = range(options.first, options.first + options.schedules)
            for each, violation in pool.map(try_schedule, seeds, chunksize=10):
                tally.merge(each)
                if violation:
                    pool.shutdown(cancel_futures=True)
                    break
    sys.stdout.write(violation or f"no violation: {tally}\n")
    return 1 if violation else 0


if __name__ == "__main__":
    sys.exit(main())
