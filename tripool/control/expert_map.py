"""The expert map of one instance, as its scheduler uses it: which version a plan names, and who moves experts.

The scheduler owns it. It tells what happens (steps, answers, ranks that come and go), the `Rebalancer` in it decides,
and what that wants done goes out with the scheduler's own messages. Every plan repeats the changes that no step has
yet proved to have reached the ranks, so a step that fails loses none.
"""

from __future__ import annotations

from collections.abc import Sequence

from tripool.control.experts import (
    LiveVersions,
    MapInUse,
    NewMap,
    Rebalancer,
    RebalanceSettings,
    StepReport,
    Unservable,
)
from tripool.control.outbox import Outbox
from tripool.core.deployment import InstanceConfig
from tripool.core.machine import Address, Message
from tripool.core.messages import ExpertFacts, ExpertsMoved, Failed, MoveExperts, RankBack, RankLost
from tripool.core.placement import MapChange, unpack
from tripool.core.plan import Section, StepPlan, StepResult

REPORT_STEPS = 16
"""Steps between two reports of how often each expert was chosen: a report of a large model has tens of kilobytes."""

MOVE_BYTES_PER_S = 1e9
"""Assumed of a rank that copies experts while it serves, when moves are weighed."""


class ExpertMap:
    """Empty until the model is loaded; and for a model without experts it stays so, but for its lost ranks."""

    def __init__(self, member: Address, config: InstanceConfig, outbox: Outbox) -> None:
        self.rebalancer: Rebalancer | None = None
        self.cause = ""                             # why no step can run, or why no expert can be brought back
        self._member = member
        self._config = config
        self._outbox = outbox
        self._room_tokens = 0
        self._lost: dict[int, None] = {}
        self._live = LiveVersions(0)
        self._told_oldest = 0
        self._changes: list[MapChange] = []         # since the last step that was taken
        self._report_steps = min(REPORT_STEPS, config.rebalance_steps)
        self._num_steps = 0                         # taken since the last report

    @property
    def runnable(self) -> bool:
        """Whether every expert is in a slot."""
        return self.rebalancer is None or self.rebalancer.runnable

    @property
    def has_changes(self) -> bool:
        """Whether the next plan brings changes."""
        return bool(self._changes)

    def loaded(self, experts: ExpertFacts | None) -> None:
        """The model is there, and spread over the ranks like this."""
        if experts is None:
            return
        config, placement, geometry = self._config, unpack(experts.placement), experts.geometry
        settings = RebalanceSettings(
            expert_bytes=experts.expert_bytes, seconds_per_token=experts.seconds_per_token,
            bytes_per_s=MOVE_BYTES_PER_S, half_life_steps=config.rebalance_steps,
            min_steps=min(100, config.rebalance_steps), interval_steps=config.rebalance_steps,
            automatic=config.rebalance and geometry.num_ranks > 1 and geometry.num_redundant > 0)
        self.rebalancer = Rebalancer(geometry, placement, settings, address=self._member, scheduler=self._member,
                                     dataplane=f"{self._member}/data", new_verb_id=self._outbox.verb_id)
        self._live = LiveVersions(placement.version)
        self._told_oldest = placement.version
        self._room_tokens = experts.room_tokens

    # ------------------------------------------------------------ steps

    def plan(self, step: int, sections: Sequence[Section], most_tokens: int) -> StepPlan:
        """A plan that names the newest map. `most_tokens`: of the rank that has most in this step."""
        halves = 2 if self._config.microbatches and len(sections) > 1 and 1 < most_tokens <= self._room_tokens else 1
        reports = self.rebalancer is not None and self._num_steps + 1 >= self._report_steps
        return StepPlan(step, tuple(sections), self._live.newest, tuple(self._changes), tuple(sorted(self._lost)),
                        halves, reports)

    def started(self, verb_id: int) -> None:
        """A `Run` was sent with the last plan."""
        self._live.started(verb_id)

    def ended(self, verb_id: int, result: StepResult | None, now: float) -> None:
        """It was answered; `result` is None if it failed."""
        version = self._live.ended(verb_id)
        if result is not None and not result.aborted:
            self._changes = [each for each in self._changes if each.version > version]
            self._num_steps += 1
        if self.rebalancer is None:
            return
        if result is not None and result.expert_counts:
            self.tell(StepReport(self._live.oldest, self._num_steps, result.expert_counts), now)
            self._num_steps = 0
            self._told_oldest = self._live.oldest
        self._tell_oldest(now)

    # ------------------------------------------------------------ ranks and moves

    def rank_lost(self, lost: RankLost, now: float) -> None:
        """A rank is gone, and what was in its slots."""
        self._lost[lost.rank] = None
        self.tell(lost, now)

    def rank_back(self, back: RankBack, now: float) -> None:
        """A new process has the rank."""
        self._lost.pop(back.rank, None)
        self.tell(back, now)

    def moved(self, answer: ExpertsMoved | Failed, now: float) -> None:
        """A `MoveExperts` was answered."""
        self.tell(answer, now)

    def tell(self, message: Message, now: float) -> None:
        """Let the rebalancer decide, and do what it says."""
        if self.rebalancer is None:
            return
        for send in self.rebalancer.handle(message, now):
            match send.message:
                case NewMap(change, _, _, _, cause):
                    self._changes.append(change)
                    self._live.take(change.version)
                    self.cause = cause
                case Unservable(cause):
                    self.cause = cause
                case MoveExperts():
                    self._outbox.ask(send.message)
                case _:
                    self._outbox.send(send.to, send.message, send.delay_s)
        self._tell_oldest(now)

    def _tell_oldest(self, now: float) -> None:
        if self._live.oldest > self._told_oldest:
            self._told_oldest = self._live.oldest
            self.tell(MapInUse(self._told_oldest), now)
