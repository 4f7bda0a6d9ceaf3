"""Whether the processes of an instance's ranks live and do their part.

A process that ends is noticed at once (pidfd). One that is there but does nothing holds up all others, since every
step needs every rank; so their states are looked at many times a second. A rank is taken for dead when it is stopped,
or when in the midst of a step it neither computes nor waits in the exchange. A rank that is merely slow, or waits
for a core or for the disk, is left alone: the deadline of the step bounds that. What is counted are looks, not seconds,
so a machine that is suspended or overloaded makes the watcher slow too and nobody suspicious.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass

LOOK_S = 0.05
PATIENCE = 14
"""Looks in a row (0.7 s) at a rank that does nothing, after which it is given up."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the kernel says of a process."""

    state: str              # of its main thread: R, S, D, T, ...
    ticks: int              # of processor time, all threads

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"


def look_at(pid: int) -> Look | None:
    """One look; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Look(fields[0].decode(), int(fields[11]) + int(fields[12]))


class RankWatch:
    """Watches processes on a thread of its own, and says of each once that it is lost."""

    def __init__(self, is_expected: Callable[[int], bool], lost: Callable[[int, str], None]) -> None:
        """`is_expected`: whether others wait for a rank, and it is not in the exchange itself. `lost` is called on the
        thread, with a rank and the cause; the caller ends the process."""
        self._is_expected = is_expected
        self._lost = lost
        self._pidfds: dict[int, tuple[int, int]] = {}          # rank -> pidfd, pid
        self._changed = threading.Lock()
        threading.Thread(target=self._run, name="ranks", daemon=True).start()

    def add(self, rank: int, pid: int) -> None:
        """Watch a rank's process from now on."""
        with self._changed:
            self._pidfds[rank] = os.pidfd_open(pid), pid

    def _run(self) -> None:
        idle: dict[int, tuple[int, int]] = {}                  # rank -> ticks, looks without any more of them
        while True:
            with self._changed:
                watched = dict(self._pidfds)
            ended = select.select([fd for fd, _ in watched.values()], [], [], LOOK_S)[0]
            for rank, (fd, pid) in watched.items():
                cause = f"its process {pid} ended" if fd in ended else self._suspicion(rank, pid, idle)
                if cause:
                    idle.pop(rank, None)
                    with self._changed:
                        del self._pidfds[rank]
                    os.close(fd)
                    self._lost(rank, cause)

    def _suspicion(self, rank: int, pid: int, idle: dict[int, tuple[int, int]]) -> str:
        look = look_at(pid)
        if look is None:
            return f"its process {pid} ended"
        ticks, looks = idle.get(rank, (-1, 0))
        rests = look.is_stopped or (look.state == "S" and self._is_expected(rank))
        if not rests or look.ticks != ticks:
            idle[rank] = look.ticks, 0
            return ""
        idle[rank] = ticks, looks + 1
        if looks + 1 < PATIENCE:
            return ""
        return "its process is stopped" if look.is_stopped else "it does nothing while others wait for it"
