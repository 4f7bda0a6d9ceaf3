"""Real deployments for tests: processes that can be killed, stopped and slowed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

import tripool
from tripool.core.deployment import CacheConfig, Deployment, GatewayConfig, InstanceConfig, ModelConfig
from tripool.serve.launch import Fleet, LaunchOptions, launch

TINY = Path(tripool.__file__).parent / "models" / "tiny"
READY_S = 150.0


class Served:
    """A running deployment, seen from outside."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.url = fleet.url
        self.http = httpx.Client(base_url=fleet.url, timeout=60.0)

    def complete(self, prompt: str | Sequence[int], max_tokens: int = 16, **fields: Any) -> dict[str, Any]:
        """A completion, greedy unless said otherwise."""
        body = {"model": "tripool-tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True, **fields}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def token_ids(self, prompt: Sequence[int], max_tokens: int = 16, **fields: Any) -> list[int]:
        return list(self.complete(list(prompt), max_tokens, **fields)["choices"][0]["token_ids"])

    def stream(self, prompt: Sequence[int], max_tokens: int = 16, **fields: Any) -> Iterator[dict[str, Any]]:
        """The events of a streamed completion, the terminator left out; it must be there unless we stop reading."""
        body = {"model": "tripool-tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True, "stream": True, **fields}
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield json.loads(line[6:])
        raise AssertionError("the stream ended without its terminator")

    def stream_ids(self, prompt: Sequence[int], max_tokens: int = 16, **fields: Any) -> Iterator[int]:
        """The token ids of a streamed completion, as they come; an error event fails the test."""
        for event in self.stream(prompt, max_tokens, **fields):
            assert "error" not in event, event
            for choice in event["choices"]:
                yield from choice.get("token_ids") or ()

    def health(self) -> int:
        return self.http.get("/health").status_code

    def wait_for(self, condition: Callable[[], Any], deadline_s: float = 30.0) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, f"not so within {deadline_s} s"
            time.sleep(0.05)

    def state(self, member: str) -> str:
        return next((each["state"] for each in self.info()["members"] if each["member"] == member), "absent")

    def info(self) -> dict[str, Any]:
        return dict(self.http.get("/server_info").json())

    def reports(self) -> dict[str, dict[str, float]]:
        """Counters of each instance, a moment old."""
        return dict(self.info()["settings"]["reports"])

    def kill(self, member: str) -> None:
        os.kill(self.fleet.pids[member], signal.SIGKILL)

    def revive(self, member: str) -> None:
        """Wait until a member that was killed is up again."""
        self.wait_for(lambda: self.fleet.processes[member].restarts > 0)
        self.wait_for(lambda: self.state(member) == "up", READY_S)

    def pause(self, member: str) -> None:
        os.kill(self.fleet.pids[member], signal.SIGSTOP)

    def resume(self, member: str) -> None:
        os.kill(self.fleet.pids[member], signal.SIGCONT)

    def assert_conserved(self, deadline_s: float = 15.0) -> None:
        """After a while of idleness nothing is held: free + cached = total on every instance."""
        # Reports are a moment old: after this they hold all that was done.
        time.sleep(3 * self.fleet.deployment.heartbeat_s)
        end = time.monotonic() + deadline_s
        while True:
            reports = self.reports()
            leaks = {name: values for name, values in reports.items()
                     if values["num_free_blocks"] + values["num_cached_blocks"] != values["num_blocks"]
                     or values["num_running"] or values["num_waiting"] or values["num_handed_over"]}
            if reports and not leaks:
                return
            assert time.monotonic() < end, f"still held after {deadline_s} s of idleness: {leaks}"
            time.sleep(0.2)


@contextlib.contextmanager
def served(*, prefill: int = 0, decode: int = 0, hybrid: int = 0, cache: int = 0, model: Path = TINY,
           deterministic: bool = True, restart: bool = False, faults: Mapping[str, Mapping[str, float]] | None = None,
           instance: Mapping[str, Any] | None = None, gateway: Mapping[str, Any] | None = None,
           record_dir: Path | None = None, model_fields: Mapping[str, Any] | None = None,
           cluster_key: str = "", **settings: Any) -> Iterator[Served]:
    """A deployment on this machine, ready; everything is gone afterwards."""
    each = InstanceConfig(threads=1, **(instance or {}))
    deployment = Deployment(
        model=ModelConfig(path=str(model), deterministic=deterministic, served_name="tripool-tiny",
                          **(model_fields or {})),
        gateway=GatewayConfig(port=0, **(gateway or {})),
        prefill=replace(each, count=prefill), decode=replace(each, count=decode), hybrid=replace(each, count=hybrid),
        cache=CacheConfig(count=cache, bytes=64 << 20), **{"shutdown_s": 10.0, **settings})
    options = LaunchOptions(restart=restart, faults=faults or {}, log_level="warning",
                            cluster_key=cluster_key,
                            record_dir=str(record_dir) if record_dir else "")
    with launch(deployment, options) as fleet:
        fleet.wait_ready(READY_S)
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                fleet.watch()

        watcher = threading.Thread(target=watch, daemon=True)
        if restart:
            watcher.start()
        try:
            yield Served(fleet)
        finally:
            ended.set()
            if restart:
                watcher.join()
