"""What an instance says, and which of its verbs are still unanswered.

Every verb has an id of its own and is taken off exactly once, by whichever answer comes first.
"""

from __future__ import annotations

from collections.abc import Iterator

from tripool.control.sequence import Sequence
from tripool.core.machine import Address, Message, Send
from tripool.core.messages import (
    ExpertsMoved,
    Failed,
    Fetch,
    Fetched,
    Load,
    Loaded,
    MoveExperts,
    Pull,
    Pulled,
    Ran,
    Run,
    Store,
    Stored,
)

Verb = Load | MoveExperts | Fetch | Pull | Run | Store
Answer = Loaded | ExpertsMoved | Fetched | Pulled | Ran | Stored | Failed


class Outbox:
    """Messages on their way out, and verbs that wait for an answer."""

    def __init__(self, data: Address) -> None:
        self._data = data
        self._sends: list[Send] = []
        self._num_verbs = 0
        self._unanswered: dict[int, tuple[Verb, Sequence | None]] = {}

    @property
    def unanswered(self) -> Iterator[Verb]:
        """Verbs that wait for an answer, oldest first."""
        return (verb for verb, _ in self._unanswered.values())

    @property
    def awaits_answers(self) -> bool:
        return bool(self._unanswered)

    def send(self, to: Address, message: Message, delay_s: float = 0.0) -> None:
        self._sends.append(Send(to, message, delay_s))

    def verb_id(self) -> int:
        """An id that no verb has had."""
        self._num_verbs += 1
        return self._num_verbs

    def ask(self, verb: Verb, sequence: Sequence | None = None) -> None:
        """Ask the data plane, on behalf of a sequence or of the whole instance."""
        self._unanswered[verb.verb_id] = (verb, sequence)
        self.send(self._data, verb)

    def take(self, answer: Answer) -> tuple[Verb, Sequence | None] | None:
        """What was asked, and for whom; None if the verb is unknown or was answered already."""
        return self._unanswered.pop(answer.verb_id, None)

    def empty(self) -> list[Send]:
        """Everything said since the last call."""
        sends, self._sends = self._sends, []
        return sends
