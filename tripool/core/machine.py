"""The contract of everything that decides: messages in, messages out, time as an argument.

A machine owns its state and is driven by a host: `serve.host` with a wall clock, `sim.host` with a
virtual one. It reads no clock, draws from no global generator, iterates no set, and breaks ties by an
id, so that the same messages at the same times give the same decisions.
"""

from __future__ import annotations

from typing import Any, Protocol

from tripool.core.value import value

Address = str
"""`member/part`: a process and a machine in it, for example `decode-0/scheduler`. A bare member name
means its main machine."""

Message = Any
"""One of the dataclasses of `core.messages`."""


@value(frozen=True, slots=True)
class Send:
    """A message on its way. With a delay it is a timer: a message to oneself, or a later word to another."""

    to: Address
    message: Message
    delay_s: float = 0.0


class Machine(Protocol):
    """A decision-maker."""

    def handle(self, message: Message, now: float) -> list[Send]:
        """Take one message at time `now` (seconds) and say what is to be sent."""
        ...
