"""One hybrid instance inside the calling process: no server, no other process, no thread.

`tripool generate` and the benches use it. It is the same machine and the same engine as in a server, driven
by a plain loop: a message goes to the machine, a `Run` goes to the engine, and the answer is the next message.
"""

from __future__ import annotations

import queue
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from tripool.control.scheduler import InstanceScheduler
from tripool.core import messages as m
from tripool.core.deployment import CacheConfig, Deployment
from tripool.core.errors import ConfigError, TripoolError
from tripool.core.machine import Message
from tripool.core.plan import Emitted
from tripool.core.request import Request, RequestId
from tripool.serve.budget import threads_per_rank, usable_cores
from tripool.serve.models import resolve
from tripool.serve.process import ProcessSpec, new_boot_id
from tripool.serve.ranks import Ranks

MEMBER = "hybrid-0"
DATA = f"{MEMBER}/data"
LOST_RANK_S = 60.0

OnOutput = Callable[[m.Output], None]


class Offline:
    """A model, loaded, that answers requests one call at a time."""

    def __init__(self, deployment: Deployment, progress: Callable[[float], None] = lambda fraction: None) -> None:
        """Load the model.

        Raises:
            CheckpointError: the folder cannot be used.
            ConfigError: a setting does not fit the model or the machine.
        """
        deployment, self.checkpoint = resolve(deployment)
        self.deployment = replace(deployment, hybrid=replace(deployment.hybrid, count=1),
                                  prefill=replace(deployment.prefill, count=0),
                                  decode=replace(deployment.decode, count=0), cache=CacheConfig(count=0))
        config = self.deployment.hybrid
        threads = threads_per_rank(self.deployment, config, usable_cores(), event_loops=False)
        self._runtime = tempfile.TemporaryDirectory(prefix="tripool-")
        spec = ProcessSpec(MEMBER, "hybrid", self.deployment, self._runtime.name, threads=threads)
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()      # from other threads
        self.ranks = Ranks(spec, config, progress, lost=lambda rank, cause: self._inbox.put(m.RankLost(rank, cause)),
                           back=lambda rank, held: self._inbox.put(m.RankBack(rank, held)))
        self.scheduler = InstanceScheduler(MEMBER, "hybrid", config, self.deployment, new_boot_id())
        self._queue: deque[Message] = deque()
        self._on_output: OnOutput = lambda output: None
        self._open: set[RequestId] = set()
        self._post(m.Tick("start"))

    @property
    def facts(self) -> m.Facts:
        return self.ranks.facts

    def generate(self, requests: Iterable[Request], on_output: OnOutput) -> None:
        """Answer all requests together, telling outputs as they come; a request's last has `finish` or `error`."""
        self._on_output = on_output
        for request in requests:
            self._open.add(request.request_id)
            self._queue.append(m.Prefill(request, 1))
        self._pump()
        while self._open:                        # nothing can run before a lost rank is back
            try:
                self._post(self._inbox.get(timeout=LOST_RANK_S))
            except queue.Empty:
                raise ConfigError(f"{len(self._open)} requests wait for a rank that does not come back") from None

    def tell(self, message: Message) -> None:
        """Tell the instance something, between two calls or from another thread."""
        self._inbox.put(message)

    def _post(self, message: Message) -> None:
        self._queue.append(message)
        self._pump()

    def _pump(self) -> None:
        while self._queue or not self._inbox.empty():
            while not self._inbox.empty():
                self._queue.append(self._inbox.get())
            for send in self.scheduler.handle(self._queue.popleft(), time.monotonic()):
                if send.to == DATA:
                    self._queue.append(self._answer(send.message))
                elif send.to == MEMBER:
                    continue                     # heartbeats: nobody listens
                else:
                    self._deliver(send.message)

    def _answer(self, verb: Message) -> Message:
        match verb:
            case m.Load():
                return m.Loaded(verb.verb_id, self.ranks.facts, self.ranks.experts)
            case m.Run():
                begun = time.perf_counter()
                try:
                    result = self.ranks.run(verb.plan)
                except TripoolError as error:
                    self.ranks.reset()
                    return m.Failed(verb.verb_id, str(error))
                return m.Ran(verb.verb_id, replace(result, seconds=time.perf_counter() - begun))
            case m.MoveExperts():
                try:
                    self.ranks.move(verb.moves)
                except TripoolError as error:
                    return m.Failed(verb.verb_id, str(error))
                return m.ExpertsMoved(verb.verb_id)
            case _:
                return m.Failed(verb.verb_id, "there is no pool here")

    def _deliver(self, message: Message) -> None:
        if isinstance(message, m.AttemptFailed):
            self._give(m.Output(message.request_id, error=message.cause, status=500))
        elif isinstance(message, m.Tokens):
            ends = {done.request_id: done for done in message.done}
            for emitted in message.emitted:
                self._deliver_rows(emitted, ends)
            for done in ends.values():
                self._give(m.Output(done.request_id, finish=done.reason, stop_token=done.stop_token))

    def _deliver_rows(self, emitted: Emitted, ends: dict[RequestId, m.Done]) -> None:
        logprobs = {each.request_id: each for each in emitted.logprobs}
        for request_id, _, _, tokens in emitted.columns.rows():
            done = ends.pop(request_id, None)
            self._give(m.Output(request_id, tokens, logprobs.get(request_id), finish=done.reason if done else None,
                                stop_token=done.stop_token if done else None))

    def _give(self, output: m.Output) -> None:
        if output.finish or output.error:
            self._open.discard(output.request_id)
        self._on_output(output)

    def close(self) -> None:
        """Give the memory back."""
        self.ranks.close()
        self._runtime.cleanup()


