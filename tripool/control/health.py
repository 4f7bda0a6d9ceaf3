"""Which members can serve: told by their heartbeats, checked against time.

A member is `down` when its process or link is gone, when it says nothing for `stall_s`, or when it is busy
and nothing moves for `stall_s`. A step of the engine may be long (one large chunk on a small machine), so
while one runs its own deadline is the bound instead. Silence of others never counts: a decode instance
whose prefill died is as ready as before. A process that comes back has a new boot id; its old life is
declared down before the new one is heard, so that whoever relied on it learns of its end first.

This machine knows members and their loads. It knows no requests, and it decides nothing about them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tripool.core.deployment import Deployment
from tripool.core.machine import Address, Message, Send
from tripool.core.messages import Drain, Facts, Heartbeat, Hello, Lost, MemberChanged, Role, State, Tick

MAX_PAST_LIVES = 64


@dataclass(slots=True)
class Member:
    """One life of one process, as far as it is known."""

    role: Role
    boot_id: str
    state: State                       # as told to the others
    said: State                        # as it says of itself
    heard_at: float
    progress: int
    moved_at: float                    # when it last had nothing to do, or progressed
    busy: bool = False
    in_step: bool = False
    draining: bool = False             # we asked it to
    facts: Facts | None = None
    load_fraction: float = 0.0
    num_running: int = 0
    num_waiting_tokens: int = 0
    num_free_blocks: int = 0
    line_room: int = 0
    num_waiting: int = 0
    num_lost_ranks: int = 0
    becomes: Role | None = None        # when it has finished what it has
    cause: str = ""


@dataclass(frozen=True, slots=True)
class HealthSnapshot:
    """Whether the deployment can serve a request now, and if not, why. Members are sorted by name."""

    ready: bool
    cause: str
    load_fraction: float
    facts: Facts | None
    members: tuple[MemberChanged, ...]


class Health:
    """Turns heartbeats and silence into `MemberChanged` for the router, the gateway and `scaling`, if it is on."""

    def __init__(self, deployment: Deployment, *, address: Address = "gateway/health", gateway: Address = "gateway",
                 router: Address = "gateway/router", scaling: Address = "gateway/scaling") -> None:
        self.heartbeat_s = deployment.heartbeat_s
        self.stall_s = deployment.stall_s
        self.run_deadline_s = deployment.run_deadline_s
        self.address = address
        self.gateway = gateway
        self.router = router
        self._told_loads = (router, scaling) if deployment.scaling.enabled else (router,)
        self.members: dict[Address, Member] = {}
        self._past_lives: dict[str, None] = {}      # boot ids that are over, oldest first
        self._check_at: float | None = None

    def handle(self, message: Message, now: float) -> list[Send]:
        match message:
            case Heartbeat():
                return self._heard(message, now)
            case Tick("check"):
                return self._check(now)
            case Hello(member, role, boot_id):
                return self._begin_life(member, role, boot_id, now) + self._keep_checking(now)
            case Lost(member, boot_id):
                return self._lost(member, boot_id)
            case Drain(member):
                return self._drain(member)
        return []

    def snapshot(self) -> HealthSnapshot:
        """For the readiness endpoint, metrics and `top`."""
        told = tuple(_changed(name, self.members[name]) for name in sorted(self.members))
        cause = self._why_not_ready()
        facts = next((each.facts for each in told if each.facts is not None and each.state in ("up", "draining")), None)
        computing = [member for member in self.members.values() if member.state != "down"]
        fraction = min((1.0 if member.said != "loading" else member.load_fraction for member in computing), default=0.0)
        return HealthSnapshot(cause == "", cause, fraction, facts, told)

    def _why_not_ready(self) -> str:
        """Empty if a hybrid is up, or a prefill and a decode instance that can read its blocks."""
        layouts: dict[Role, list[str]] = {"prefill": [], "decode": [], "hybrid": []}
        for member in self.members.values():
            if member.state == "up" and member.facts is not None:
                layouts[member.role].append(member.facts.layout)
        if layouts["hybrid"] or any(layout in layouts["decode"] for layout in layouts["prefill"]):
            return ""
        if layouts["prefill"] and layouts["decode"]:
            return "the prefill and decode instances that are up have different block layouts"
        if not self.members:
            return "no instance has joined yet"
        others = [f"{name} is {member.state}" + (f" ({member.cause})" if member.cause else "")
                  for name, member in sorted(self.members.items()) if member.state != "up"]
        missing = "decode" if layouts["prefill"] else "prefill" if layouts["decode"] else "prefill or hybrid"
        return f"no {missing} instance is up" + (": " + ", ".join(others) if others else "")

    # ------------------------------------------------------------ what members say

    def _begin_life(self, name: Address, role: Role, boot_id: str, now: float) -> list[Send]:
        known = self.members.get(name)
        if boot_id in self._past_lives or (known is not None and known.boot_id == boot_id):
            return []
        sends = []
        if known is not None:
            self._end_life(known.boot_id)
            if known.state != "down":
                known.state, known.cause = "down", "its process was replaced by a new one"
                sends += self._tell(name)
        self.members[name] = Member(role, boot_id, "loading", "loading", heard_at=now, progress=0, moved_at=now)
        return sends + self._tell(name)

    def _heard(self, beat: Heartbeat, now: float) -> list[Send]:
        if beat.boot_id in self._past_lives:
            return []
        sends: list[Send] = []
        known = self.members.get(beat.member)
        if known is None or known.boot_id != beat.boot_id:
            role = beat.role or (known.role if known is not None else None)
            if role is None:
                return []
            sends = self._begin_life(beat.member, role, beat.boot_id, now) + self._keep_checking(now)
        member = self.members[beat.member]
        member.busy = beat.num_running > 0       # who only waits may wait for others, as for blocks it handed over
        if beat.progress != member.progress or not member.busy:
            member.moved_at = now
        member.heard_at, member.said, member.progress = now, beat.state, beat.progress
        member.in_step, member.load_fraction = beat.in_step, beat.load_fraction
        member.facts = beat.facts or member.facts
        member.num_running, member.num_waiting_tokens = beat.num_running, beat.num_waiting_tokens
        member.num_free_blocks, member.line_room = beat.num_free_blocks, beat.line_room
        member.num_waiting, member.num_lost_ranks, member.becomes = beat.num_waiting, beat.num_lost_ranks, beat.becomes
        before = member.state, member.role
        member.role = beat.role or member.role
        member.state, member.cause = self._judge(member, now)
        is_news = (member.state, member.role) != before
        sends += self._tell(beat.member) if is_news else self._tell_load(beat.member)
        if member.draining and beat.state in ("up", "loading"):
            sends.append(Send(beat.member, Drain(beat.member)))       # the first one may be lost
        if beat.held:
            sends.append(Send(self.gateway, beat))
        return sends

    def _lost(self, name: Address, boot_id: str) -> list[Send]:
        """Down at once, though not for good: if only the link was gone, heartbeats of this life bring it back."""
        member = self.members.get(name)
        if member is None or member.boot_id != boot_id or member.state == "down":
            return []
        member.state, member.said, member.cause = "down", "down", "its process or link is gone"
        return self._tell(name)

    def _drain(self, name: Address) -> list[Send]:
        member = self.members.get(name)
        if member is None or member.draining:
            return []
        member.draining = True
        sends = [Send(name, Drain(name))]
        if member.state == "up":
            member.state, member.cause = "draining", "draining"
            sends += self._tell(name)
        return sends

    # ------------------------------------------------------------ time

    def _keep_checking(self, now: float) -> list[Send]:
        if self._check_at is not None or not self.members:
            return []
        self._check_at = now + self.heartbeat_s
        return [Send(self.address, Tick("check"), self.heartbeat_s)]

    def _check(self, now: float) -> list[Send]:
        # If this process itself slept, what others said meanwhile still waits to be heard; silence proves nothing.
        slept_s = now - self._check_at if self._check_at is not None else 0.0
        self._check_at = None
        sends = []
        for name, member in self.members.items():
            if slept_s > self.heartbeat_s:
                member.heard_at, member.moved_at = member.heard_at + slept_s, member.moved_at + slept_s
            if member.state == "down":
                continue
            before = member.state
            member.state, member.cause = self._judge(member, now)
            if member.state != before:
                sends += self._tell(name)
        return sends + self._keep_checking(now)

    def _judge(self, member: Member, now: float) -> tuple[State, str]:
        if now - member.heard_at > self.stall_s:
            return "down", f"no heartbeat for {self.stall_s:g} s"
        patience_s = self.run_deadline_s + self.stall_s if member.in_step else self.stall_s
        if member.busy and now - member.moved_at > patience_s:
            return "down", f"busy, but without progress for {patience_s:g} s"
        if member.said == "loading":
            return "loading", f"loading, {100 * member.load_fraction:.0f} %"
        if member.draining and member.said == "up":
            return "draining", "draining"
        if member.said == "draining":
            return "draining", f"draining, to serve as {member.becomes} then" if member.becomes else "draining"
        return member.said, ""

    # ------------------------------------------------------------ telling

    def _end_life(self, boot_id: str) -> None:
        self._past_lives[boot_id] = None
        if len(self._past_lives) > MAX_PAST_LIVES:
            del self._past_lives[next(iter(self._past_lives))]

    def _tell_load(self, name: Address) -> list[Send]:
        changed = _changed(name, self.members[name])
        return [Send(address, changed) for address in self._told_loads]

    def _tell(self, name: Address) -> list[Send]:
        sends = self._tell_load(name)
        return [*sends, replace(sends[0], to=self.gateway)]


def _changed(name: Address, member: Member) -> MemberChanged:
    return MemberChanged(name, member.role, member.boot_id, member.state, member.facts, member.num_running,
                         member.num_waiting_tokens, member.num_free_blocks, member.cause, member.line_room,
                         member.num_waiting, member.num_lost_ranks)
