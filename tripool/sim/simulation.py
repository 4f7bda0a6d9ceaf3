"""A deployment under a workload in virtual time: the production control plane on priced data planes.

Gateway, router, health and schedulers are those of `control`, unchanged; no decision is written twice. Around them
stand users who send the workload, data planes that price steps and copies, and whatever fails at given times. The
outcome is the same to the last byte for the same inputs and seed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tripool.control.gateway import Gateway
from tripool.control.health import Health
from tripool.control.router import Router
from tripool.control.scaling import Scaling
from tripool.control.scheduler import InstanceScheduler
from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.errors import ConfigError
from tripool.core.machine import Address, Message, Send
from tripool.core.messages import ROLES, Facts, Lost, Role, Tick
from tripool.sim.costs.state import StepCosts
from tripool.sim.dataplane import LoseRank, ReturnRank
from tripool.sim.demand import Demand, ExpertModel, LiveExperts, Popularity
from tripool.sim.fabric import ADDRESS as FABRIC
from tripool.sim.fabric import LEAST_SHARE, Fabric
from tripool.sim.failures import Failure, check_failures
from tripool.sim.host import SimHost
from tripool.sim.links import HealthyLinks
from tripool.sim.priced import HaltSteps, PricedPlane, ResumeSteps
from tripool.sim.pricing import ExchangeLinks, Planes, StepPrices
from tripool.sim.requests import Workload
from tripool.sim.servers import CacheServers
from tripool.sim.users import Users
from tripool.sim.world import Watcher, World

WARM_UP_S = 1.0
"""Before the first request, in which members come up."""

NOTICE_S = 0.001
"""After which the end of a process is noticed."""

NUM_SAMPLES = 400
"""About so many looks at everything, for timelines."""


@dataclass(frozen=True, slots=True)
class Rig:
    """What a deployment is simulated on: prices, planes, and how much each rank can hold."""

    costs: Mapping[Role, StepCosts]
    planes: Planes
    token_bytes: int                       # of a token's cache entries, of all layers
    cache_tokens: Mapping[Role, int] = field(default_factory=dict)     # of a rank, where the deployment says nothing
    max_model_len: int = 1 << 20
    npus_per_rank: float = 1.0             # 0.5 where a rank is one of two dies
    npu_hour_price: float = 0.0            # 0: not known
    currency: str = "$"
    acceptance: tuple[float, ...] = ()     # how likely the first draft of a step is right, the second, ...
    experts: Mapping[Role, ExpertModel] = field(default_factory=dict)  # of roles whose experts are simulated
    popularity: Popularity = field(default_factory=Popularity)
    load_s: Mapping[Role, float] = field(default_factory=dict)         # a life that begins later waits for its weights
    factors: Mapping[str, float] = field(default_factory=dict)         # corrections in these prices, by name
    api_s: float = 0.0                     # what HTTP and the gateway's own work add to a first token
    beside: Mapping[Role, float] = field(default_factory=dict)         # times as long as a step takes beside another's
    links: Mapping[Role, ExchangeLinks] = field(default_factory=dict)  # of roles whose ranks exchange over a plane

    @property
    def met_links(self) -> dict[Role, ExchangeLinks]:
        """Of roles whose exchange meets transfers that are fast enough to matter."""
        return {role: links for role, links in self.links.items()
                if self.planes.fastest_copy(links.plane) >= LEAST_SHARE * links.bytes_per_s}

    def __post_init__(self) -> None:
        if self.token_bytes < 1:
            raise ConfigError(f"token_bytes is {self.token_bytes}; the least is 1")
        if any(not 0 <= each <= 1 for each in self.acceptance):
            raise ConfigError(f"acceptance is {list(self.acceptance)}; each is a probability, from 0 to 1")
        if not self.api_s >= 0:
            raise ConfigError(f"api_s is {self.api_s}; give seconds, not negative")
        if any(not each >= 1 for each in self.beside.values()):
            raise ConfigError(f"beside is {dict(self.beside)}; others do not make steps faster: give at least 1")


@dataclass(slots=True)
class Sample:
    """Everything at one moment. Seconds and bytes are sums since the beginning."""

    at_s: float
    busy_s: dict[Role, float]
    num_rows: dict[Role, int]
    num_instances: dict[Role, int]         # that live, by the role they have now; all else is by that of their start
    num_open: dict[str, int]               # requests by the gateway's phase
    moved_bytes: dict[str, float]          # by plane
    pool_blocks: int
    busiest: dict[Role, tuple[float, int]]     # rank over the mean, by which steps were priced: summed, and how many


class Instance:
    """A production scheduler, whose data plane is told when the next step will be more than rows that decode, and at
    which prices: those of the role that it has then."""

    def __init__(self, scheduler: InstanceScheduler, plane: PricedPlane, prices: Mapping[Role, StepPrices]) -> None:
        self.scheduler = scheduler
        self.plane = plane
        self._prices = prices
        plane.has_plans = lambda: scheduler.has_plans

    def handle(self, message: Message, now: float) -> list[Send]:
        sends = self.scheduler.handle(message, now)
        self.plane.prices = self._prices[self.scheduler.role]
        if self.scheduler.has_plans and self.plane.is_ahead(now):
            self.plane.heard(now)
        return sends


class Simulation:
    """One run."""

    def __init__(self, deployment: Deployment, workload: Workload, rig: Rig, *, seed: int = 0,
                 failures: tuple[Failure, ...] = (), max_tokens: int = 1 << 16, concurrency: int = 0,
                 every_step: bool = False, watcher: Watcher | None = None) -> None:
        """`max_tokens` is the limit that every request brings: all that is known of its answer before it ends; with 0
        it is just as long as its answer. With a `concurrency`, so many requests are always on their way; else each
        comes at its time.

        Raises:
            ConfigError: the deployment cannot be simulated on this rig, or a failure names what is not there.
        """
        self.deployment, self.workload, self.rig = deployment, workload, rig
        self.seed, self.failures, self.max_tokens, self.concurrency = seed, failures, max_tokens, concurrency
        self.host = SimHost(HealthyLinks(rig.planes.planes[rig.planes.control].latency_s))
        self.gateway = Gateway(deployment.gateway)
        self.router = Router(deployment.gateway)
        self.health = Health(deployment)
        self.scaling = Scaling(deployment)
        self.instances: dict[Address, Instance] = {}             # of the living
        self.past: list[tuple[Role, Instance]] = []              # of ended lives
        self.roles: dict[Address, Role] = {}
        self.samples: list[Sample] = []
        self.struck: list[Failure] = []                          # of the failures, those that came before the end
        self.num_blocks = {role: self._rank_blocks(role) for role in ROLES if self._config(role).count}
        self.prices = {role: StepPrices(rig.costs[role]) for role in self.num_blocks}
        block_bytes = rig.token_bytes * deployment.block_tokens
        self.world = World(
            Fabric(rig.planes, self.host.post, self.host.withdraw),
            CacheServers(deployment.cache.count, deployment.cache.bytes // block_bytes),
            {}, self.host.post, block_bytes, acceptance=self._acceptance(), seed=seed,
            tell_every_s=0.0 if every_step else deployment.gateway.decode_deadline_s / 2, every_step=every_step,
            watcher=watcher)
        self.users = Users(workload, WARM_UP_S, max_tokens, self.world.outputs, self.host.post, concurrency,
                           api_s=rig.api_s)
        self._num_lives = 0
        self._demand = Demand(next(iter(rig.experts.values())), rig.popularity, seed) if rig.experts else None
        for address, machine in (("gateway", self.gateway), ("gateway/router", self.router),
                                 ("gateway/health", self.health), ("gateway/scaling", self.scaling),
                                 ("gateway/api", self.users), (FABRIC, self.world.fabric)):
            self.host.add(address, machine)
        for role in self.num_blocks:
            for index in range(self._config(role).count):
                self.roles[f"{role}-{index}"] = role
        check_failures(failures, {member: self._config(role).ranks for member, role in self.roles.items()},
                       self.world.servers.names, list(rig.planes.planes))

    # ------------------------------------------------------------ running

    def run(self, progress: Callable[[float, int], None] | None = None, until_s: float | None = None) -> None:
        """Run until every request has ended, or `until_s` seconds after the first could come.

        `progress` is told the simulated seconds and how many requests have ended.
        """
        collects = gc.isenabled()
        gc.disable()                           # nothing here is garbage in circles, and there is a lot to look through
        try:
            self._run(progress, until_s)
        finally:
            if collects:
                gc.enable()

    def _run(self, progress: Callable[[float, int], None] | None, until_s: float | None) -> None:
        for member in self.roles:
            self._start(member)
        self.users.start()
        moments = sorted([(each.begin_s, 1, index) for index, each in enumerate(self.failures)]
                         + [(each.end_s, 0, index) for index, each in enumerate(self.failures)
                            if each.end_s is not None])
        every_s = max((until_s or self.workload.span_s) / NUM_SAMPLES, 0.01)
        sample_s = 0.0
        self.host.run_until(WARM_UP_S)
        while not self.users.is_done and (until_s is None or sample_s <= until_s):
            self._sample(sample_s)
            if progress is not None:
                progress(sample_s, self.users.num_ended)
            sample_s += every_s
            while moments and moments[0][0] <= sample_s:
                at_s, begins, index = moments.pop(0)
                self.host.run_until(WARM_UP_S + at_s)
                self._strike(self.failures[index], bool(begins))
            self.host.run_until(WARM_UP_S + sample_s)
            if len(self.samples) >= 4 * NUM_SAMPLES:
                del self.samples[1::2]
                every_s *= 2
        self._sample(sample_s)
        assert not self.world.wrongs, self.world.wrongs[0]
        if progress is not None:
            progress(sample_s, self.users.num_ended)

    def lives(self) -> list[tuple[Role, Instance]]:
        """All instances there were, of past lives first."""
        return self.past + [(self.roles[member], instance) for member, instance in self.instances.items()]

    def _start(self, member: Address) -> None:
        role = self.roles[member]
        config = self._config(role)
        self._num_lives += 1
        boot_id = f"life-{self._num_lives}"
        facts = Facts("simulated", "simulated", "simulated", self.rig.max_model_len, self.deployment.block_tokens,
                      self.num_blocks[role] * config.ranks, config.ranks)
        load_s, experts = self.rig.load_s.get(role, 0.0), None
        if role in self.rig.experts and self._demand is not None:
            experts = LiveExperts(member, self.rig.experts[role], self._demand, self.world.wrongs,
                                  self.seed + self._num_lives)
        plane = PricedPlane(member, boot_id, facts, config, self.prices[role], self.world,
                            self.deployment.num_drafts(role), experts=experts,
                            load_s=load_s if self._num_lives > len(self.roles) else 0.0, rank_load_s=load_s,
                            beside=self.rig.beside.get(role, 1.0), links=self.rig.met_links.get(role))
        plane.halted = experts is not None and self.world.fabric.wires[experts.model.plane].is_lost
        instance = Instance(InstanceScheduler(member, role, config, self.deployment, boot_id), plane,
                            self.prices)
        self.instances[member] = instance
        self.host.add(member, instance)
        self.host.add(plane.address, plane)
        self.host.post(member, Tick("start"))

    def _strike(self, failure: Failure, begins: bool) -> None:
        """Something fails or comes back."""
        now, name = self.host.now, failure.name
        if begins:
            self.struck.append(failure)
        match failure.kind, begins:
            case "instance", True:
                if name in self.instances:
                    self._kill(name, now)
            case "instance", False:
                if name not in self.instances:
                    self._start(name)
            case "die", _:
                self.host.post(f"{name}/data", (LoseRank if begins else ReturnRank)(failure.rank))
            case "cache", True:
                self.world.servers.lose(name)
                self.world.fabric.lose_endpoint(name, now)
            case "cache", False:
                self.world.servers.restore(name)
            case "plane", True:
                self.world.fabric.lose_plane(name, now)
                self._tell_ranks(name, HaltSteps())
            case "plane", False:
                self.world.fabric.return_plane(name, now)
                self._tell_ranks(name, ResumeSteps())

    def _tell_ranks(self, plane: str, message: Message) -> None:
        """Whoever exchanges over this plane."""
        for member, instance in self.instances.items():
            experts = instance.plane.experts
            if experts is not None and experts.model.plane == plane:
                self.host.post(f"{member}/data", message)

    def _kill(self, member: Address, now: float) -> None:
        """A process dies. What it had said before is still on its way; its connections end a little later."""
        instance = self.instances.pop(member)
        self.past.append((self.roles[member], instance))
        latency_s = self.rig.planes.planes[self.rig.planes.control].latency_s
        for send in instance.plane.stop(now):
            self.host.post(send.to, send.message, now + latency_s)
        self.world.fabric.end_transfers_of(instance.plane.address, now)    # what others copy from it goes on
        self.host.kill(member)
        self.host.post("gateway/health", Lost(member, instance.scheduler.boot_id), now + max(NOTICE_S, 2 * latency_s))

    def _sample(self, at_s: float) -> None:
        now = self.host.now
        busy_s, num_rows = dict.fromkeys(self.num_blocks, 0.0), dict.fromkeys(self.num_blocks, 0)
        num_instances = dict.fromkeys(self.num_blocks, 0)
        for role, instance in self.lives():
            busy_s[role] += instance.plane.busy_s(now)
        for member, instance in self.instances.items():
            num_rows[self.roles[member]] += instance.plane.num_rows
            num_instances[instance.scheduler.role] += 1
        phases: dict[str, int] = dict(self.gateway.stats.phases.items())
        moved = {name: self.world.fabric.moved_bytes(name, now) for name in self.world.fabric.wires}
        busiest = dict.fromkeys(self.rig.experts, (0.0, 0))
        for role, instance in self.lives():
            experts = instance.plane.experts
            if experts is not None:
                total, count = busiest[role]
                busiest[role] = total + experts.sum_busiest, count + experts.num_priced
        self.samples.append(Sample(at_s, busy_s, num_rows, num_instances, phases, moved, self.world.servers.num_blocks,
                                   busiest))

    # ------------------------------------------------------------ sizes

    def _config(self, role: Role) -> InstanceConfig:
        config: InstanceConfig = getattr(self.deployment, role)
        return config

    def _rank_blocks(self, role: Role) -> int:
        """Blocks that a rank holds.

        Raises:
            ConfigError: nobody says how many, or what the steps of this role cost.
        """
        config = self._config(role)
        if role not in self.rig.costs:
            raise ConfigError(f"{role}.count is {config.count}, but the hardware says nothing of what its steps cost")
        tokens = config.cache_tokens or config.cache_bytes // self.rig.token_bytes or self.rig.cache_tokens.get(role, 0)
        if not tokens:
            raise ConfigError(f"{role}.cache_tokens is 0, and the hardware does not say how much a rank can hold; give "
                              f"{role}.cache_tokens or {role}.cache_bytes")
        if tokens < self.deployment.block_tokens:
            raise ConfigError(f"a {role} rank holds {tokens} tokens, less than one block of block_tokens "
                              f"{self.deployment.block_tokens}")
        return tokens // self.deployment.block_tokens

    def _acceptance(self) -> tuple[float, ...]:
        most = max((self.deployment.num_drafts(role) for role in self.num_blocks), default=0)
        if len(self.rig.acceptance) < most:
            raise ConfigError(f"num_speculative_tokens is {most}, but it is said of {len(self.rig.acceptance)} drafts "
                              "how likely they are right; give acceptance for each")
        return self.rig.acceptance
