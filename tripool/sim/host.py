"""The event loop of a whole simulated system: messages in order of time, and a virtual clock.

The same machines run under `serve.host`; this one runs all processes at once, as fast as they decide. Events
at the same time are handled in the order in which they were sent, so a run is repeated exactly by repeating
its inputs. Messages between machines of one process are certain; those between processes go over `links`.
A process can be killed (what it had in hand is gone), stopped (it handles nothing; what arrives waits), and
begun again as a new life.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import count

from tripool.core.machine import Address, Machine, Message, Send
from tripool.core.timeline import Record
from tripool.sim.links import HealthyLinks, Links

Watch = Callable[[Address, Message, list[Send], float], None]
Due = tuple[float, int, Address, Message, int]
"""A message, with its time and number before it and behind it the life that it is meant for (-1: any)."""

WINDOWS_PER_S = 8
"""Messages of the present window alone are kept in order. Those ahead are not: tens of thousands are timers, few of
which ever matter. A power of two, so that a window ends exactly where the next one begins."""


class SimHost:
    """Runs machines, whatever process they belong to, in virtual time."""

    def __init__(self, links: Links | None = None, *, watch: Watch | None = None,
                 record: Callable[[Record], None] | None = None) -> None:
        self.now = 0.0
        self.num_events = 0
        self._links = links or HealthyLinks()
        self._watch = watch
        self._record = record
        self._machines: dict[Address, Machine] = {}
        self._lives: dict[Address, int] = {}              # of each process, to tell a new one from the old
        self._stopped: dict[Address, list[tuple[Address, Message, int]]] = {}
        self._heap: list[Due] = []                        # what is due in the present window
        self._window = 0
        self._ahead: defaultdict[int, list[Due]] = defaultdict(list)    # by window, in the order of sending
        self._ready: deque[tuple[Address, Message, int]] = deque()      # due now, after what the heap has for now
        self._numbers = count(1)                          # of what goes to the heap, so that ties keep their order
        self._withdrawn: dict[int, None] = {}             # numbers
        self._members: dict[Address, Address] = {}        # of addresses, as `member_of` says

    def add(self, address: Address, machine: Machine) -> None:
        self._machines[address] = machine
        self._lives.setdefault(member_of(address), 0)

    def post(self, to: Address, message: Message, at_s: float | None = None) -> int:
        """Deliver a message from outside at a given time (now, if none), whatever life the process is in.

        Returns a number by which it may be withdrawn; 0 if it is due already.
        """
        return self._keep(self.now if at_s is None else at_s, to, message, -1)

    def withdraw(self, number: int) -> None:
        """A message that was posted and not yet delivered will not be."""
        if number:
            self._withdrawn[number] = None

    def kill(self, member: Address) -> None:
        """End a process: its machines are gone, and with them its timers and whatever waits inside it."""
        for address in [each for each in self._machines if member_of(each) == member]:
            del self._machines[address]
        self._lives[member] += 1
        self._stopped.pop(member, None)

    def stop(self, member: Address) -> None:
        """Freeze a process. What arrives meanwhile waits for it."""
        self._stopped.setdefault(member, [])

    def resume(self, member: Address) -> None:
        """Let a frozen process go on, with all that has come for it."""
        for to, message, life in self._stopped.pop(member, []):
            self._keep(self.now, to, message, life)

    def run_until(self, end_s: float) -> None:
        """Handle everything that is due before `end_s`, then let the clock stand there."""
        self._run(None, end_s)
        self.now = max(self.now, end_s)

    def run_while(self, unfinished: Callable[[], bool], *, end_s: float) -> bool:
        """Handle events while something is unfinished, at most until `end_s`. Returns whether all was finished."""
        return self._run(unfinished, end_s)

    def _run(self, unfinished: Callable[[], bool] | None, end_s: float) -> bool:
        """The loop. Names are local and small steps written out: all that is simulated goes through here."""
        heap, ready, machines, members, lives, stopped = (self._heap, self._ready, self._machines, self._members,
                                                          self._lives, self._stopped)
        pop, keep, delays_s = heapq.heappop, self._keep, self._links.delays_s
        withdrawn, record, watch = self._withdrawn, self._record, self._watch
        now = self.now
        while unfinished is None or unfinished():
            if ready and not (heap and heap[0][0] <= now):
                to, message, life = ready.popleft()
            else:
                if not heap:
                    self._open_next_window()
                if not heap or heap[0][0] > end_s:
                    return False
                now, number, to, message, life = pop(heap)
                self.now = now
                if withdrawn and number in withdrawn:
                    del withdrawn[number]
                    continue
            source = members.get(to) or self._member(to)
            if life >= 0 and life != lives.get(source):
                continue                                   # meant for a life that is over
            if stopped and source in stopped:
                stopped[source].append((to, message, life))
                continue
            machine = machines.get(to)
            if machine is None:
                continue
            self.num_events += 1
            sends = machine.handle(message, now)
            if record is not None:
                record(Record(now, to, message, tuple(sends)))
            for send in sends:
                address, at_s = send.to, now + send.delay_s
                target = members.get(address) or self._member(address)
                if target == source:
                    if at_s == now:
                        ready.append((address, send.message, lives.get(target, 0)))
                    else:
                        keep(at_s, address, send.message, lives.get(target, 0))
                    continue
                for delay_s in delays_s(source, target, now):
                    keep(at_s + delay_s, address, send.message, -1)
            if watch is not None:
                watch(to, message, sends, now)
        return True

    def _member(self, address: Address) -> Address:
        """The process of an address, which is reckoned once."""
        member = self._members[address] = member_of(address)
        return member

    def _keep(self, at_s: float, to: Address, message: Message, life: int) -> int:
        """Keep a message until its time. Returns its number, or 0 if it is due already."""
        if at_s <= self.now:
            self._ready.append((to, message, life))
            return 0
        number, window = next(self._numbers), int(at_s * WINDOWS_PER_S)
        if window <= self._window:
            heapq.heappush(self._heap, (at_s, number, to, message, life))
        else:
            self._ahead[window].append((at_s, number, to, message, life))
        return number

    def _open_next_window(self) -> None:
        """Go on to the next window in which something is due, if there is any."""
        if self._ahead:
            while self._window not in self._ahead:
                self._window += 1
            self._heap += self._ahead.pop(self._window)
            heapq.heapify(self._heap)


def member_of(address: Address) -> Address:
    """The process that an address belongs to."""
    return address.partition("/")[0]
