"""A whole deployment in one virtual host: gateway, router, health, instances with their data planes, and a client.

Everything but the data planes and the client is what runs in production. A member can die and come back as a
new life, like a process; its connections then end, which health is told. A rank of a living member can die and come
back too, which the member alone is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tripool.control.gateway import Gateway
from tripool.control.health import Health
from tripool.control.router import Router
from tripool.control.scaling import Scaling
from tripool.control.scheduler import InstanceScheduler
from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.machine import Address, Message, Send
from tripool.core.messages import ROLES, Cancel, Lost, Output, Role, Submit, Tick
from tripool.core.request import TOKEN_BYTES, Request, RequestId
from tripool.sim.dataplane import LoseRank, ReturnRank, Sabotage, SimDataPlane, ToyPrice, VerbFaults, toy_facts
from tripool.sim.experts import SimExperts, ToyMixture
from tripool.sim.host import SimHost
from tripool.sim.memory import SimMemory
from tripool.sim.toy import expected_output, toy_logprob
from tripool.sim.workload import Arrival


@dataclass(slots=True)
class Stream:
    """What a client has received for one request."""

    request: Request
    expected: bytes
    expected_finish: str
    tokens: bytearray = field(default_factory=bytearray)
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0
    cancelled: bool = False
    ended_at: float | None = None
    finish: str | None = None
    error: str | None = None
    status: int = 200
    num_cached_tokens: int | None = None


class SimClient:
    """All clients. They know what they must get, and note whatever else they get."""

    def __init__(self) -> None:
        self.streams: dict[RequestId, Stream] = {}
        self.wrongs: list[str] = []
        self.num_open = 0

    def expect(self, arrival: Arrival) -> None:
        """A request that is going to be submitted."""
        tokens, finish = expected_output(arrival.request)
        self.streams[arrival.request.request_id] = Stream(arrival.request, tokens, finish,
                                                          cancelled=arrival.cancel_at_s is not None)
        self.num_open += 1

    def handle(self, message: Message, now: float) -> list[Send]:
        if isinstance(message, Output):
            self._receive(message, now)
        return []

    def _receive(self, output: Output, now: float) -> None:
        stream = self.streams[output.request_id]
        request_id = output.request_id
        if stream.ended_at is not None:
            self.wrongs.append(f"request {request_id} got more after its end: {output}")
            return
        have = len(stream.tokens)
        stream.tokens += output.tokens
        if stream.expected[have:len(stream.tokens)] != output.tokens:
            self.wrongs.append(f"request {request_id} got wrong tokens from number {have // TOKEN_BYTES} on")
        self._check_logprobs(stream, output, have // TOKEN_BYTES)
        if output.num_cached_tokens is not None:
            if stream.num_cached_tokens not in (None, output.num_cached_tokens):
                self.wrongs.append(f"request {request_id} was told two counts of cached tokens")
            stream.num_cached_tokens = output.num_cached_tokens
        if output.finish is not None or output.error is not None:
            self._end(stream, output, now)

    def _check_logprobs(self, stream: Stream, output: Output, number: int) -> None:
        request_id = output.request_id
        if output.logprobs is not None:
            wanted = tuple(toy_logprob(each) for each in range(number, number + len(output.tokens) // TOKEN_BYTES))
            if (output.logprobs.start, output.logprobs.chosen) != (number, wanted):
                self.wrongs.append(f"request {request_id} got log-probabilities of other tokens")
            stream.num_logprobs += len(wanted)
        if output.prompt_logprobs is not None:
            if output.prompt_logprobs.start != stream.num_prompt_logprobs + 1:
                self.wrongs.append(f"request {request_id} got prompt log-probabilities out of order")
            stream.num_prompt_logprobs += len(output.prompt_logprobs.chosen)

    def _end(self, stream: Stream, output: Output, now: float) -> None:
        stream.ended_at, stream.finish, stream.error, stream.status = now, output.finish, output.error, output.status
        self.num_open -= 1
        request_id = output.request_id
        if output.finish == "abort" and not stream.cancelled:
            self.wrongs.append(f"request {request_id} was aborted, though its client waits")
        if output.status == 429 and len(stream.tokens) > TOKEN_BYTES:
            self.wrongs.append(f"request {request_id} was told to come again, in the middle of its stream")
        if output.finish in ("stop", "length"):
            if (bytes(stream.tokens), output.finish) != (stream.expected, stream.expected_finish):
                self.wrongs.append(f"request {request_id} ended early, or for another reason: {output.finish}")
            if stream.request.sampling.num_logprobs >= 0 and stream.num_logprobs * TOKEN_BYTES != len(stream.tokens):
                self.wrongs.append(f"request {request_id} lacks log-probabilities")
            wanted = stream.request.num_prompt_tokens - 1
            if stream.request.sampling.num_prompt_logprobs >= 0 and stream.num_prompt_logprobs != wanted:
                self.wrongs.append(f"request {request_id} lacks prompt log-probabilities")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks of one rank, by role."""

    prefill: int
    decode: int
    hybrid: int
    others: Mapping[Address, int] = field(default_factory=dict)      # of members unlike the rest of their role

    def of(self, member: Address, role: Role) -> int:
        by_role = {"prefill": self.prefill, "decode": self.decode, "hybrid": self.hybrid}
        return self.others.get(member, by_role[role])


class SimCluster:
    """Builds a deployment on a host, and lets its members die and come back."""

    def __init__(self, host: SimHost, deployment: Deployment, sizes: Sizes, *, pool_blocks: int = 1 << 30,
                 price: ToyPrice | None = None, faults: VerbFaults | None = None,
                 sabotage: Sabotage | None = None, mixture: ToyMixture | None = None) -> None:
        self.host = host
        self.deployment = deployment
        self.gateway = Gateway(deployment.gateway)
        self.router = Router(deployment.gateway)
        self.health = Health(deployment)
        self.scaling = Scaling(deployment)
        self.client = SimClient()
        self.schedulers: dict[Address, InstanceScheduler] = {}      # of the living
        self.planes: dict[Address, SimDataPlane] = {}
        self.memory = SimMemory(pool_blocks)
        self.roles: dict[Address, Role] = {}
        self._sizes = sizes
        self._price = price
        self._faults = faults
        self._sabotage = sabotage
        self._mixture = mixture or ToyMixture()
        self._num_lives = 0
        for address, machine in (("gateway", self.gateway), ("gateway/router", self.router),
                                 ("gateway/health", self.health), ("gateway/scaling", self.scaling),
                                 ("gateway/api", self.client)):
            host.add(address, machine)
        for role in ROLES:
            for index in range(self._config(role).count):
                self.roles[f"{role}-{index}"] = role

    def start_all(self) -> None:
        for member in self.roles:
            self.start(member)

    def start(self, member: Address) -> None:
        """A process begins, with a boot id that was never used."""
        role = self.roles[member]
        config = self._config(role)
        self._num_lives += 1
        boot_id = f"life-{self._num_lives}"
        scheduler = InstanceScheduler(member, role, config, self.deployment, boot_id)
        facts = toy_facts(self._sizes.of(member, role), self.deployment.block_tokens, num_ranks=config.ranks)
        experts = SimExperts(member, self._mixture, self._mixture.geometry(config), self.memory.wrongs)
        plane = SimDataPlane(member, boot_id, facts, self.memory, experts=experts,
                             num_drafts=self.deployment.num_drafts(role), price=self._price, faults=self._faults,
                             sabotage=self._sabotage)
        self.schedulers[member], self.planes[member] = scheduler, plane
        self.host.add(member, scheduler)
        self.host.add(plane.address, plane)
        self.host.post(member, Tick("start"))

    def kill(self, member: Address, notice_s: float = 0.001) -> None:
        """A process dies. Its connection ends, which the gateway's host sees a little later."""
        scheduler = self.schedulers.pop(member)
        del self.planes[member]
        self.host.kill(member)
        self.host.post("gateway/health", Lost(member, scheduler.boot_id), self.host.now + notice_s)

    def lose_rank(self, member: Address, rank: int) -> None:
        """The process of a rank dies, if the member has loaded. The first rank cannot: it is the member's own."""
        self.host.post(f"{member}/data", LoseRank(rank))

    def return_rank(self, member: Address, rank: int) -> None:
        """If it is lost, it begins anew."""
        self.host.post(f"{member}/data", ReturnRank(rank))

    def submit(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.client.expect(arrival)
            self.host.post("gateway", Submit(arrival.request), arrival.at_s)
            if arrival.cancel_at_s is not None:
                self.host.post("gateway", Cancel(arrival.request.request_id), arrival.cancel_at_s)

    @property
    def wrongs(self) -> list[str]:
        """Everything that should not have happened, as far as clients and data planes saw it."""
        return self.client.wrongs + self.memory.wrongs

    def check_idle(self) -> None:
        """Nobody holds anything; raises AssertionError with a sentence."""
        assert not self.gateway.entries, f"the gateway still has requests {list(self.gateway.entries)}"
        assert not self.router.attempts, f"the router still has requests {list(self.router.attempts)}"
        assert not self.router.num_queued and not self.router.num_queued_tokens, "the router's queue is not empty"
        for member, scheduler in self.schedulers.items():
            assert scheduler.is_idle, f"{member} still has requests {list(scheduler.sequences)} or verbs or rows"
            scheduler.check_invariants()
            self._check_ranks(member, scheduler)
            for rank in scheduler.ranks:
                blocks = rank.blocks
                assert not blocks.num_held and not blocks.num_quarantined, \
                    f"{member} still holds {blocks.num_held} and quarantines {blocks.num_quarantined} blocks"
                assert blocks.num_free + blocks.num_cached == blocks.num_blocks, f"{member} has lost blocks"

    def _check_ranks(self, member: Address, scheduler: InstanceScheduler) -> None:
        """It is known who is lost; and with all ranks there, every expert is in a slot."""
        lost, rebalancer = sorted(self.planes[member].lost), scheduler.rebalancer
        assert scheduler.lost_ranks == lost, f"{member} takes ranks {scheduler.lost_ranks} for lost; it is {lost}"
        assert lost or rebalancer is None or rebalancer.runnable, f"{member} can run no step, though no rank is lost"

    def _config(self, role: Role) -> InstanceConfig:
        return {"prefill": self.deployment.prefill, "decode": self.deployment.decode,
                "hybrid": self.deployment.hybrid}[role]
