"""Transfers over planes: bytes over bandwidth, shared among all that runs at one endpoint at the same time.

Each endpoint of a plane (a die, a cache server) divides its bandwidth evenly among what goes into or out of it; a
transfer is as fast as its slowest endpoint lets it. Whenever some begin or end, those they meet at their endpoints are
reckoned anew, once all that begins or ends at that moment is known: a step of many ranks stores many prompts at once.
One that will not end before its deadline fails there; over a plane that is lost, nothing moves.
The fabric knows names of endpoints and no blocks.

Where a plane also joins the ranks of an instance that steps, transfers meet its exchange on the links of these ranks.
An approximation: either has at least its fair share, the exchange counting as one transfer, and more where the other
side leaves more; an exchange is spread evenly over its step. Whoever steps is told when that changes (`LinksChanged`).
What takes less than `LEAST_SHARE` of a link is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from tripool.core.machine import Address, Message, Send
from tripool.core.messages import Fetch, Pull, Store
from tripool.core.value import value
from tripool.sim.pricing import Planes

Endpoint = tuple[str, int]                 # a member and its rank, or a cache server and 0
Copy = Fetch | Pull | Store
Post = Callable[[Address, Message, float], int]
Withdraw = Callable[[int], None]

ADDRESS: Address = "fabric"
LOAD = attrgetter("load")                  # of an end; asked so often that a loop of its own is too slow

LEAST_SHARE = 1 / 32
"""Of a link's bandwidth: transfers that cannot take as much do not meet an exchange."""


@dataclass(slots=True, eq=False)
class End:
    """An endpoint of a plane while something runs there."""

    name: Endpoint
    load: float = 0.0                      # transfers, each as far as its bytes pass here
    flows: dict[Flow, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Flow:
    """One transfer. `ends` are where it meets others, and which part of its bytes passes through each."""

    plane: str
    num_blocks: int
    num_bytes: float
    ends: tuple[tuple[End, float], ...]
    to: Address                            # who is told of its end
    verb: Copy                             # for which it is made
    begun_s: float
    deadline_s: float                      # a moment
    left_bytes: float = 0.0
    rate: float = -1.0                     # bytes a second
    since_s: float = 0.0                   # when `left_bytes` was true
    places: tuple[End, ...] = ()           # the ends alone
    due_s: float = -1.0                    # of the last timer
    timer: int = 0                         # its number, while it is under way
    version: int = 0                       # of its timers; older ones mean nothing
    fails: bool = False                    # in this moment, whatever else becomes known of it
    over: bool = False


@value(frozen=True, slots=True)
class FlowDue:
    """A timer to whoever began the transfer: it has arrived, or failed for the cause."""

    flow: Flow
    version: int
    cause: str = ""


@value(frozen=True, slots=True)
class Reckon:
    """A timer to the fabric itself: the present moment's beginnings and ends are known."""


@value(frozen=True, slots=True)
class LinksChanged:
    """To whoever steps: transfers take more or less of its ranks' links from now on."""


@dataclass(slots=True)
class Exchange:
    """What the ranks of an instance exchange while it steps."""

    bytes_per_s: float                     # of a link
    to: Address                            # who steps
    part: float = 0.0                      # of the time, in which tokens are on their way
    num_met: int = 0                       # transfers that are fast enough to matter

    def leaves(self, load: float, bytes_per_s: float) -> float:
        """For transfers of this load, which could have so much of the link without it."""
        return (1.0 - self.part) * bytes_per_s + self.part * min(bytes_per_s, self.bytes_per_s * load / (1.0 + load))


@dataclass(slots=True)
class Wire:
    """A plane, and what runs over it."""

    name: str
    bytes_per_s: float
    latency_s: float
    flow_bytes_per_s: float
    is_lost: bool = False
    moved_bytes: float = 0.0
    num_flows: int = 0
    ends: dict[Endpoint, End] = field(default_factory=dict)            # where something runs
    empty: dict[Flow, None] = field(default_factory=dict)              # transfers of nothing: they meet nobody
    exchanges: dict[Address, Exchange] = field(default_factory=dict)   # by member

    def flows(self) -> list[Flow]:
        """All that run over it."""
        return list({flow: None for end in self.ends.values() for flow in end.flows})


class Fabric:
    """All planes of a deployment."""

    def __init__(self, planes: Planes, post: Post, withdraw: Withdraw) -> None:
        self.planes = planes
        self.wires = {name: Wire(name, plane.bytes_per_s, plane.latency_s, plane.flow_bytes_per_s)
                      for name, plane in planes.planes.items()}
        self._post, self._withdraw = post, withdraw
        self._changed: dict[End, Wire] = {}                # at this moment
        self._told: dict[Address, None] = {}               # who steps, and was met by what ended at this moment
        self._is_asked = False                             # to reckon

    def handle(self, message: Message, now: float) -> list[Send]:
        """Reckon anew whatever meets what began or ended at this moment."""
        changed, self._changed, self._is_asked = self._changed, {}, False
        met: dict[Flow, Wire] = {}
        for end, wire in changed.items():
            met.update(dict.fromkeys(end.flows, wire))
        for flow, wire in met.items():
            self._reckon(wire, flow, now)
        told, self._told = self._told, {}
        for flow, wire in met.items():
            told |= dict.fromkeys([exchange.to for exchange in _met_by(wire, flow)])
        for to in told:
            self._post(to, LinksChanged(), now)
        return []

    # ------------------------------------------------------------ exchanges

    def join(self, member: Address, plane: str, bytes_per_s: float, to: Address) -> None:
        """A member's ranks exchange over a plane when they step, from now on; `to` is told when links change."""
        met = self.wires[plane].exchanges.get(member)                  # of a former life, whose transfers may go on
        self.wires[plane].exchanges[member] = Exchange(bytes_per_s, to, num_met=met.num_met if met is not None else 0)

    def exchange(self, member: Address, plane: str, part: float, now: float) -> None:
        """The member steps, with tokens on their way for this part of the time; 0: it does not."""
        wire = self.wires[plane]
        exchange = wire.exchanges[member]
        if part == exchange.part:
            return
        exchange.part = part
        if exchange.num_met:
            self._change(wire, [end for name, end in wire.ends.items() if name[0] == member], now)

    def link_share(self, member: Address, plane: str) -> float:
        """What transfers leave of the link of the rank where that is least."""
        wire, left = self.wires[plane], 1.0
        exchange = wire.exchanges[member]
        for name, end in wire.ends.items() if exchange.num_met else ():
            if name[0] == member:
                taken = sum([max(flow.rate, 0.0) * share for flow in end.flows
                             for at, share in flow.ends if at is end])
                left = min(left, max(1.0 / (1.0 + end.load), 1.0 - taken / exchange.bytes_per_s))
        return left

    # ------------------------------------------------------------ transfers

    def begin(self, plane: str, num_blocks: int, block_bytes: int, ends: Iterable[tuple[Endpoint, float]], to: Address,
              verb: Copy, now: float) -> Flow:
        """Begin a transfer; `to` gets a `FlowDue` when it has ended, and asks `take` whether it is true."""
        wire, num_bytes = self.wires[plane], num_blocks * block_bytes
        wire.num_flows += 1
        if not num_bytes and not wire.is_lost:
            flow = Flow(plane, 0, 0, (), to, verb, now, now + verb.deadline_s, rate=0.0, since_s=now)
            wire.empty[flow] = None
            self._set_timer(flow, now + wire.latency_s, "")
            return flow
        there = tuple([(wire.ends.get(name) or wire.ends.setdefault(name, End(name)), share) for name, share in ends])
        flow = Flow(plane, num_blocks, num_bytes, there, to, verb, now, now + verb.deadline_s, num_bytes, since_s=now,
                    places=tuple([end for end, _ in there]))
        for end, share in there:
            end.flows[flow] = None
            end.load += share
        met = _met_by(wire, flow)
        for exchange in met:
            exchange.num_met += 1
        if met or any(len(end.flows) > 1 for end, _ in there):
            self._change(wire, [end for end, _ in there], now)
        else:
            self._reckon(wire, flow, now)
        return flow

    def take(self, due: FlowDue, now: float) -> bool:
        """Whether the transfer is over with this timer. Then it is."""
        flow = due.flow
        if flow.over or due.version != flow.version:
            return False
        wire, flow.timer = self.wires[flow.plane], 0
        self._settle(wire, flow, now)
        if not due.cause:
            wire.moved_bytes += flow.left_bytes
            flow.left_bytes = 0.0
        self.drop(flow, now)
        return True

    def drop(self, flow: Flow, now: float) -> None:
        """It is over, however it ended."""
        if flow.over:
            return
        flow.over = True
        wire, others = self.wires[flow.plane], list[End]()
        if not flow.ends:
            del wire.empty[flow]
        for exchange in _met_by(wire, flow):
            exchange.num_met -= 1
            self._told[exchange.to] = None
            self._change(wire, [], now)
        for end, share in flow.ends:
            del end.flows[flow]
            if end.flows:
                end.load -= share
                others.append(end)
            else:
                del wire.ends[end.name]
        if others:
            self._change(wire, others, now)

    def lose_plane(self, plane: str, now: float) -> None:
        """Nothing moves over it any more."""
        self.wires[plane].is_lost = True
        self._reckon_all(self.wires[plane], now)

    def return_plane(self, plane: str, now: float) -> None:
        """It carries again, also what waits."""
        self.wires[plane].is_lost = False
        self._reckon_all(self.wires[plane], now)

    def end_transfers_of(self, to: Address, now: float) -> None:
        """Whoever made them is gone: they end as far as they came, and nobody is told."""
        for wire in self.wires.values():
            for flow in (*wire.flows(), *wire.empty):
                if flow.to == to:
                    self._settle(wire, flow, now)
                    self._withdraw(flow.timer)
                    self.drop(flow, now)

    def fail_transfers_of(self, to: Address, rank: int, cause: str, now: float) -> None:
        """The rank that made them is gone, and whoever asked for them is told now. What others copy from it goes on."""
        for wire in self.wires.values():
            for flow in (*wire.flows(), *wire.empty):
                if flow.to == to and flow.verb.rank == rank:
                    self._fail(flow, cause, now)

    def lose_endpoint(self, member: str, now: float) -> None:
        """What comes from or goes to a process fails, now that it is gone."""
        for wire in self.wires.values():
            gone = {flow: None for end in wire.ends.values() if end.name[0] == member for flow in end.flows}
            for flow in gone:
                self._fail(flow, f"{member} is gone", now)

    def moved_bytes(self, plane: str, now: float) -> float:
        """Bytes that were carried so far, those of transfers under way included."""
        wire = self.wires[plane]
        for flow in wire.flows():
            self._settle(wire, flow, now)
        return wire.moved_bytes

    # ------------------------------------------------------------ rates

    def _change(self, wire: Wire, ends: list[End], now: float) -> None:
        """Where some meet, loads are others from now on."""
        if not self._is_asked:
            self._is_asked = True
            self._post(ADDRESS, Reckon(), now)
        for end in ends:
            self._changed[end] = wire

    def _reckon_all(self, wire: Wire, now: float) -> None:
        for flow in wire.flows():
            self._reckon(wire, flow, now)

    def _reckon(self, wire: Wire, flow: Flow, now: float) -> None:
        """A flow's rate, and with it when it ends."""
        if flow.fails:
            return
        rate = 0.0 if wire.is_lost else wire.bytes_per_s / max(map(LOAD, flow.places))
        for end in flow.places if wire.exchanges else ():
            exchange = wire.exchanges.get(end.name[0])
            if exchange is not None and exchange.part:
                rate = min(rate, exchange.leaves(end.load, wire.bytes_per_s) / end.load)
        if 0 < wire.flow_bytes_per_s < rate:
            rate = wire.flow_bytes_per_s
        if rate == flow.rate:
            return
        self._settle(wire, flow, now)
        was_moving, flow.rate = flow.rate > 0, rate
        if not flow.left_bytes and was_moving and rate:
            return                             # its last byte is on the way
        arrives_s = now + wire.latency_s + flow.left_bytes / rate if rate else float("inf")
        due_s = min(arrives_s, flow.deadline_s)
        if due_s != flow.due_s:
            late = f"it did not end within {flow.deadline_s - flow.begun_s:g} s" if arrives_s > due_s else ""
            self._set_timer(flow, due_s, late)

    def _fail(self, flow: Flow, cause: str, now: float) -> None:
        if not flow.fails:
            flow.fails = True
            self._set_timer(flow, now, cause)

    def _settle(self, wire: Wire, flow: Flow, now: float) -> None:
        moved = min(max(flow.rate, 0.0) * (now - flow.since_s), flow.left_bytes)
        flow.left_bytes -= moved
        flow.since_s = now
        wire.moved_bytes += moved

    def _set_timer(self, flow: Flow, at_s: float, cause: str) -> None:
        self._withdraw(flow.timer)
        flow.version += 1
        flow.due_s = at_s
        flow.timer = self._post(flow.to, FlowDue(flow, flow.version, cause), at_s)


def _met_by(wire: Wire, flow: Flow) -> list[Exchange]:
    """The exchanges that a transfer meets, and is fast enough to matter to."""
    if not wire.exchanges or not flow.ends:
        return []
    most = wire.bytes_per_s / max([share for _, share in flow.ends])
    return [exchange for end, _ in flow.ends if (exchange := wire.exchanges.get(end.name[0])) is not None
            and most >= LEAST_SHARE * exchange.bytes_per_s]
