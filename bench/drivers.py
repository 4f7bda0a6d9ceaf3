"""Engines in processes of their own, as `bench/peers/protocol.py` describes, seen from the bench.

Between its turns an engine is stopped: threads that wait for work in a loop would take a core from the others.

    with Engine("transformers", [sys.executable, "bench/peers/drive_transformers.py", ...]) as engine:
        engine.ask({"prefill": ids})["seconds"]
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT

PEERS = ROOT / "bench" / "peers"
START_S, ANSWER_S, END_S = 900.0, 900.0, 20.0
LAST_LINES = 3                 # of what it printed, when it is gone


class EngineFailed(Exception):
    """It could not start, is gone, or could not do what was asked; says why."""


class Engine:
    """One engine with its model loaded."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start it and wait until it is loaded.

        Raises:
            EngineFailed: it could not start.
        """
        self.name = name
        self.most_bytes = 0
        self._rest = b""
        self._log = tempfile.TemporaryFile(prefix="tripool-bench-")        # noqa: SIM115 - closed by `close`
        # A group and no session of its own: the kernel shares cores between sessions first, whatever their priority.
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                                             env={**os.environ, **(environment or {})}, process_group=0)
        except OSError as error:
            raise EngineFailed(f"{command[0]}: {error.strerror}") from error
        try:
            self.about = self._receive(START_S)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Put a request and wait for its answer.

        Raises:
            EngineFailed: with what the engine said.
        """
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise EngineFailed(self._end()) from None
        try:
            answer = self._receive(ANSWER_S)
        finally:
            self._signal(signal.SIGSTOP)
        self.most_bytes = max(self.most_bytes, self._memory())
        return answer

    def _receive(self, seconds: float) -> dict[str, Any]:
        line = self._line(time.monotonic() + seconds)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            self._stop()
            raise EngineFailed(f"it answered {line[:200]!r}") from None
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer

    def _line(self, deadline: float) -> bytes:
        stream = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._stop()
                    raise EngineFailed("it did not answer in time")
                data = os.read(stream, 1 << 16)
                if not data:
                    raise EngineFailed(self._end())
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _end(self) -> str:
        """Why it is gone."""
        self._stop()
        self._log.seek(0)
        printed = self._log.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with {self._process.returncode}; last: " + " | ".join(printed[-LAST_LINES:])

    def _memory(self) -> int:
        """Bytes in memory of all processes of its group, what they share counted once."""
        total = 0
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(entry.name)) == self._process.pid:
                    lines = (entry / "smaps_rollup").read_text().splitlines()
                    total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            except (OSError, ValueError):          # it ended meanwhile
                continue
        return total

    def _signal(self, number: signal.Signals) -> None:
        """To it and its children."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass

    def _stop(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it; its children too."""
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.close()
        except OSError:                            # it is gone, and something was left to write
            pass
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
        self._stop()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
