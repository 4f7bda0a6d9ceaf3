"""A simulation as a trace that Perfetto and chrome://tracing open: steps, copies and requests as bars over time.

A process of the trace is an instance, a plane or the requests. So that a long run stays readable (and fits the
browser), events of a window of time are kept, and no more than `most_events`; what was left out is said in the trace.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tripool.core.machine import Address
from tripool.sim.simulation import WARM_UP_S
from tripool.sim.users import Journey

MOST_EVENTS = 300_000


class Spans:
    """Watches data planes."""

    def __init__(self, first_s: float = 0.0, last_s: float = float("inf"), most_events: int = MOST_EVENTS) -> None:
        self.first_s, self.last_s, self.most_events = first_s, last_s, most_events
        self.num_left_out = 0              # in the window, but too many
        self.num_outside = 0
        self._events: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}

    def step(self, member: Address, begun_s: float, ended_s: float, num_rows: int, num_chunk_tokens: int,
             num_steps: int) -> None:
        """An instance took a step, or several alike."""
        name = "prefill" if num_chunk_tokens else "decode"
        self._add(member, 0, name if num_steps == 1 else f"{name} × {num_steps}", begun_s, ended_s,
                  {"rows": num_rows, "prompt tokens": num_chunk_tokens, "steps": num_steps})

    def copy(self, kind: str, member: Address, plane: str, begun_s: float, ended_s: float, num_bytes: float,
             cause: str) -> None:
        """Blocks were copied, or were not for the cause."""
        seconds = ended_s - begun_s
        told: dict[str, Any] = {"bytes": num_bytes, "GB/s": round(num_bytes / seconds / 1e9, 3) if seconds > 0 else 0.0}
        if cause:
            told["failed"] = cause
        self._add(f"plane {plane}", 0, f"{kind} {member}", begun_s, ended_s, told, alone=False)

    def journeys(self, journeys: list[Journey]) -> None:
        """Requests, from sending to the first token and from there to the end."""
        for number, each in enumerate(journeys, start=1):
            if each.ended_s < 0:
                continue
            told: dict[str, Any] = {"prompt tokens": each.num_prompt, "output tokens": each.num_tokens,
                                    "cached tokens": each.num_cached}
            if each.error:
                told["error"] = each.error
            first_s = each.first_s if each.first_s >= 0 else each.ended_s
            self._add("requests", number, "to first token", each.sent_s, first_s, told, alone=False)
            self._add("requests", number, "decode", first_s, each.ended_s, told, alone=False)

    def as_json(self) -> bytes:
        """Chrome's trace event format."""
        names = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
                 for name, process in self._processes.items()]
        other = {"source": "tripool simulate", "events left out": self.num_left_out + self.num_outside}
        return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": names + self._events, "otherData": other})

    def _add(self, process: str, number: int, name: str, begun_s: float, ended_s: float, told: dict[str, Any], *,
             alone: bool = True) -> None:
        """A bar. Where several of a process may overlap, they are not `alone`: each gets a line of its own."""
        begun_s, ended_s = begun_s - WARM_UP_S, ended_s - WARM_UP_S
        if ended_s < self.first_s or begun_s > self.last_s:
            self.num_outside += 1
            return
        if len(self._events) >= self.most_events:
            self.num_left_out += 1
            return
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        at_us, lasts_us = round(begun_s * 1e6, 3), round((ended_s - begun_s) * 1e6, 3)
        event = {"name": name, "pid": pid, "tid": 0, "ts": at_us, "args": told}
        if alone:
            self._events.append(event | {"ph": "X", "dur": lasts_us})
            return
        number = number or len(self._events) + 1_000_000_000
        self._events.append(event | {"ph": "b", "cat": process, "id": number})
        self._events.append({"name": name, "pid": pid, "tid": 0, "ts": round(at_us + lasts_us, 3), "ph": "e",
                             "cat": process, "id": number})
