"""How many instances prefill and how many decode: one changes its role where the load has long been uneven.

The load of a role is what its instances have to do over what they can take at once: of prefill, prompt tokens that
wait or are computed over the tokens of one full step; of decode, requests over slots, or blocks in use over blocks,
whichever is more. Both are told with every heartbeat, and both count what waits, not only what runs: a queue is what a
client sees first. At a load of 1 newcomers wait.

A role takes an instance from the other if it is short *and* the other can do without one, by its load as it would then
be. Where both are short nobody is helped by a change, and where neither is, nobody needs one. Changes are damped: both
must have been so without a break for `hold_s`; one instance changes at a time, the one with the least to finish; then,
and after any instance has come or gone, nothing changes for `cool_down_s`. A change that was undone at once shows that
the loads were misjudged, so the time after it is twice as long, up to `MOST_BACK_OFF` times, and half as long again
after one that was not. While an instance loads or drains its load is unknown, and nothing changes.

A change costs no request: the instance says that it drains, finishes its prompts or hands its rows on, and says that it
is up in its new role (`scheduler`). If the role it leaves becomes short meanwhile, or loses its last instance, it is
asked to stay. This machine knows members and loads; it knows no requests. `health` tells it all it knows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tripool.core.deployment import Deployment, InstanceConfig
from tripool.core.machine import Address, Message, Send
from tripool.core.messages import ChangeRole, MemberChanged, Role

MOST_BACK_OFF = 16
"""Cool-downs after a change that was undone again and again."""

ROLES_THAT_CHANGE: tuple[Role, ...] = ("prefill", "decode")


@dataclass(slots=True)
class ScalingStats:
    """Counters and gauges for metrics."""

    changes: dict[Role, int] = field(default_factory=dict)     # instances that came to a role from the other
    withdrawn: int = 0                                         # that were asked to stay after all
    loads: dict[Role, float] = field(default_factory=dict)     # of each role, as last looked at


class Scaling:
    """Decides which instance serves in which of the two roles."""

    def __init__(self, deployment: Deployment, *, address: Address = "gateway/scaling") -> None:
        self.config = deployment.scaling
        self.address = address
        self.stats = ScalingStats()
        self.members: dict[Address, MemberChanged] = {}        # as last heard of
        self.change: ChangeRole | None = None                  # under way
        self._instance: InstanceConfig = deployment.prefill    # and of decode: they are alike
        self._asked_s = 0.0
        self._is_withdrawn = False                             # it is to stay in its role after all
        self._num_asked = 0
        self._unheeded: dict[Address, ChangeRole] = {}         # what members were asked and did not do, or not yet
        self._needs: Role | None = None                        # the role that should get an instance,
        self._since_s = 0.0                                    # and since when
        self._quiet_until_s = 0.0
        self._back_off = 1                                     # times `cool_down_s`
        self._last_role: Role | None = None                    # to which an instance last changed,
        self._last_s = 0.0                                     # and when

    def handle(self, message: Message, now: float) -> list[Send]:
        if isinstance(message, MemberChanged) and message.role in ROLES_THAT_CHANGE:
            return self._heard(message, now)
        return []

    def load(self, role: Role) -> float:
        """What a role has to do over what its instances can take at once; without any, infinite."""
        ups = self._ups(role)
        if not ups:
            return math.inf
        return sum([self._prefill_load(each) if role == "prefill" else self._decode_load(each)
                    for each in ups]) / len(ups)

    # ------------------------------------------------------------ what is heard

    def _heard(self, member: MemberChanged, now: float) -> list[Send]:
        known = self.members.get(member.member)
        self.members[member.member] = member
        late = self._unheeded.get(member.member)
        if late is not None and self.change is None and member.state == "draining" and late.boot_id == member.boot_id:
            self.change, self._is_withdrawn = late, False      # it has heard after all: without us it drains for ever
            del self._unheeded[member.member]
        change = self.change
        if change is not None and change.member == member.member:
            return self._follow(change, member, now)
        if known is None or (known.boot_id, known.state, known.role) != (member.boot_id, member.state, member.role):
            self._be_quiet(now)
        return self._look(now)

    def _follow(self, change: ChangeRole, member: MemberChanged, now: float) -> list[Send]:
        """News of the member that is to change."""
        if member.boot_id != change.boot_id or member.state == "down":
            self._end_change(now)                              # whoever comes back does so in its first role
            return []
        if member.state == "draining":                         # `health` told the others before
            return self._look(now) or [Send(member.member, replace(change, heard=True))]
        if member.state == "loading":
            return []
        if member.role == change.role:
            self._count(change.role, now)
            self._end_change(now)
        elif now > self._asked_s + self.config.cool_down_s:    # it does not listen: it may have been started without
            self._unheeded[member.member] = change
            self._end_change(now)
        else:
            return [Send(member.member, change)]               # the first word may be lost
        return []

    # ------------------------------------------------------------ what is decided

    def _look(self, now: float) -> list[Send]:
        self.stats.loads = {role: self.load(role) for role in ROLES_THAT_CHANGE}
        change = self.change
        if change is not None:
            needs = _other(change.role) if self._regrets(change) else None
        else:
            needs = self._who_needs_one()
        if needs != self._needs:
            self._needs, self._since_s = needs, now
        if needs is None or now < self._since_s + self.config.hold_s:
            return []
        if change is not None:
            cause = f"{needs} has a load of {self.load(needs):.2f} now"
            return self._ask(self.members[change.member], needs, cause, now, withdraws=True)
        return self._begin(needs, now) if now >= self._quiet_until_s else []

    def _who_needs_one(self) -> Role | None:
        """The role that is short of instances, if the other can do without one."""
        if any(each.state in ("loading", "draining") for each in self.members.values()):
            return None
        for role in ROLES_THAT_CHANGE:
            if self._is_short(role) and self._can_spare(_other(role)):
                return role
        return None

    def _is_short(self, role: Role) -> bool:
        return self.load(role) >= self.config.short_load

    def _can_spare(self, role: Role) -> bool:
        num_left = len(self._ups(role)) - 1
        return num_left >= self._least(role) and self.load(role) * (num_left + 1) / num_left <= self.config.spare_load

    def _regrets(self, change: ChangeRole) -> bool:
        """Whether the role that the changing member leaves needs it after all."""
        leaves = _other(change.role)
        is_leaving = self.members[change.member].role == leaves
        return is_leaving and (self._is_short(leaves) or len(self._ups(leaves)) < self._least(leaves))

    def _least(self, role: Role) -> int:
        return self.config.min_prefill if role == "prefill" else self.config.min_decode

    def _begin(self, role: Role, now: float) -> list[Send]:
        other = _other(role)
        able = [each for each in self._ups(other)
                if each.member not in self._unheeded or self._unheeded[each.member].boot_id != each.boot_id]
        if not able:
            return []
        given = min(able, key=lambda each: (each.num_waiting_tokens if other == "prefill" else
                                            each.num_running + each.num_waiting, each.member))
        cause = f"{role} has a load of {self.load(role):.2f}, {other} of {self.load(other):.2f}"
        return self._ask(given, role, cause, now, withdraws=False)

    def _ask(self, member: MemberChanged, role: Role, cause: str, now: float, *, withdraws: bool) -> list[Send]:
        self._num_asked += 1
        self._asked_s, self._is_withdrawn, self._needs = now, withdraws, None
        self.change = ChangeRole(member.member, member.boot_id, self._num_asked, role, cause)
        return [Send(member.member, self.change)]

    # ------------------------------------------------------------ damping

    def _count(self, role: Role, now: float) -> None:
        """A member is up in the role that it was to have."""
        if self._is_withdrawn:
            self.stats.withdrawn += 1
            is_undone = True
        else:
            self.stats.changes[role] = self.stats.changes.get(role, 0) + 1
            soon_s = 2 * self._back_off * self.config.cool_down_s
            is_undone = self._last_role == _other(role) and now <= self._last_s + soon_s
            self._last_role, self._last_s = role, now
        self._back_off = min(2 * self._back_off, MOST_BACK_OFF) if is_undone else max(1, self._back_off // 2)

    def _end_change(self, now: float) -> None:
        self.change = None
        self._be_quiet(now)

    def _be_quiet(self, now: float) -> None:
        self._needs = None
        self._quiet_until_s = max(self._quiet_until_s, now + self.config.cool_down_s * self._back_off)

    # ------------------------------------------------------------ loads

    def _ups(self, role: Role) -> list[MemberChanged]:
        return [each for each in self.members.values() if each.role == role and each.state == "up"]

    def _prefill_load(self, member: MemberChanged) -> float:
        return member.num_waiting_tokens / (self._instance.max_num_batched_tokens * _living_ranks(member))

    def _decode_load(self, member: MemberChanged) -> float:
        """Requests in line will want blocks as those that run do."""
        if member.facts is None:
            return 0.0
        num_all, num_ranks = member.num_running + member.num_waiting, _living_ranks(member)
        in_use = 1.0 - member.num_free_blocks / (member.facts.num_rank_blocks * num_ranks)
        return max(num_all / (self._instance.num_slots * num_ranks),
                   in_use * num_all / max(member.num_running, 1))


def _living_ranks(member: MemberChanged) -> int:
    """Those of which free blocks are told, and to which requests go."""
    return member.facts.num_ranks - member.num_lost_ranks if member.facts is not None else 1


def _other(role: Role) -> Role:
    return "decode" if role == "prefill" else "prefill"
