"""The event loop of one process: gives messages to machines and carries away what they say.

The same machines run under `sim.host`; this one has a wall clock and real links. Everything happens on
one asyncio loop, so a machine is never entered twice at once. Messages between machines of this process
are handed over directly; the rest goes to the links, batched until the queue is empty.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tripool.core.machine import Address, Machine, Send
from tripool.core.timeline import Record

log = logging.getLogger(__name__)

Port = Callable[[Any], None]
"""Takes a message on the loop: a data plane, the HTTP side."""


class Host:
    """Machines and ports of one process, by address."""

    def __init__(self, member: Address, loop: asyncio.AbstractEventLoop,
                 record: Callable[[Record], None] | None = None, on_bug: Callable[[], None] = lambda: None) -> None:
        """`on_bug` is called when a machine raises: its state can no longer be trusted."""
        self.member = member
        self.loop = loop
        self.send_out: Callable[[Address, Any], None] = self._no_route
        self.flush_out: Callable[[], None] = lambda: None
        self._machines: dict[Address, Machine] = {}
        self._ports: dict[Address, Port] = {}
        self._queue: deque[tuple[Address, Any]] = deque()
        self._draining = False
        self._record = record
        self._on_bug = on_bug

    def add_machine(self, address: Address, machine: Machine) -> None:
        self._machines[address] = machine

    def add_port(self, address: Address, port: Port) -> None:
        self._ports[address] = port

    def post(self, to: Address, message: Any) -> None:
        """Deliver a message; on the loop's thread only."""
        self._queue.append((to, message))
        if not self._draining:
            self._drain()

    def post_threadsafe(self, to: Address, message: Any) -> None:
        """Deliver a message from another thread."""
        self.loop.call_soon_threadsafe(self.post, to, message)

    def _drain(self) -> None:
        self._draining = True
        try:
            while self._queue:
                to, message = self._queue.popleft()
                machine = self._machines.get(to)
                if machine is not None:
                    now = time.monotonic()        # the loop's own clock counts milliseconds
                    try:
                        sends = machine.handle(message, now)
                    except Exception:
                        log.exception("%s failed on %s", to, type(message).__name__)
                        self._on_bug()
                        continue
                    if self._record is not None:
                        self._record(Record(now, to, message, tuple(sends)))
                    for send in sends:
                        self._dispatch(send)
                elif (port := self._ports.get(to)) is not None:
                    port(message)
                elif to.partition("/")[0] == self.member:
                    log.warning("no machine at %s for %s", to, type(message).__name__)
                else:
                    self.send_out(to, message)
        finally:
            self._draining = False
        self.flush_out()

    def _dispatch(self, send: Send) -> None:
        if send.delay_s > 0:
            self.loop.call_later(send.delay_s, self.post, send.to, send.message)
        else:
            self._queue.append((send.to, send.message))

    def _no_route(self, to: Address, message: Any) -> None:
        log.warning("no link to %s for %s", to, type(message).__name__)
