"""A load generator with stated definitions: what is sent when, and what the answers' times mean.

Open loop: requests are sent at times drawn beforehand, whether or not earlier ones were answered. Closed loop: a fixed
number of requests is under way at any time. Times are the client's, taken when bytes arrive. Of one request

    ttft    from sending to the first event that carries output, a thought among them
    gap     between two such events that follow each other; the wait for the first is no gap
    itl     a gap divided by the tokens it brought: equal to `gap` when each event carries one token
    tpot    (end - first) / (tokens - 1), where end is the last such event; a request of one token has none
    e2e     from sending to the last such event

Token counts are the server's (`usage`). How many tokens an event carries is taken from the running counts where the
server sends them; otherwise a request's tokens are divided evenly over its events. Failed requests are counted by cause
and are in no figure of time. A request is good if all stated limits hold for it; goodput is good requests per second.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tripool.cli.client import END_OF_EVENTS, Client, Server, refusal
from tripool.core.errors import ConfigError, TripoolError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PERCENTILES = (50, 90, 99)
TIMES = ("ttft", "itl", "gap", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send: a path and a body without the stream settings."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When jobs are sent. `rate` is per second, infinite for all at once; `burstiness` 1 is a Poisson process, less is
    burstier, more is steadier; `max_concurrency` 0 is no limit."""

    rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ConfigError(f"the request rate is {self.rate}; give a positive number of requests per second, or inf")
        if self.burstiness <= 0:
            raise ConfigError(f"burstiness is {self.burstiness}; give a positive number (1 is a Poisson process)")
        if self.max_concurrency < 0:
            raise ConfigError(f"max concurrency is {self.max_concurrency}; give 0 (no limit) or more")

    def times_s(self, count: int) -> list[float]:
        """When each job is due, from the start: gaps are gamma-distributed with mean 1 / rate."""
        if self.rate == float("inf"):
            return [0.0] * count
        generator, at, times = random.Random(self.seed), 0.0, []
        for _ in range(count):
            times.append(at)
            at += generator.gammavariate(self.burstiness, 1.0 / (self.rate * self.burstiness))
        return times


@dataclass(slots=True)
class Outcome:
    """What became of one job. Times are seconds of the client's clock."""

    due_s: float
    sent_s: float = 0.0
    event_s: list[float] = field(default_factory=list)          # arrival of each event that carried output
    event_tokens: list[int] = field(default_factory=list)       # running token count at each, where the server says so
    num_prompt: int = 0
    num_tokens: int = 0
    num_cached: int = 0
    num_reasoning: int = 0
    finish: str | None = None
    failure: str | None = None                                  # the cause; None: it ended well
    text: str = ""                                              # only with `keep_text`

    @property
    def ttft_s(self) -> float:
        return self.event_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.event_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        return (self.event_s[-1] - self.event_s[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.event_s, self.event_s[1:], strict=False)]

    @property
    def itl_s(self) -> list[float]:
        """Time per token of every gap."""
        if len(self.event_tokens) == len(self.event_s):
            brought = [after - before for before, after in zip(self.event_tokens, self.event_tokens[1:], strict=False)]
            return [gap / tokens for gap, tokens in zip(self.gaps_s, brought, strict=True) if tokens > 0]
        per_event = max(1.0, self.num_tokens / len(self.event_s)) if self.event_s else 1.0
        return [gap / per_event for gap in self.gaps_s]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a good request keeps to, in milliseconds; None is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def given(self) -> dict[str, float]:
        named = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}
        return {name: value for name, value in named.items() if value is not None}

    def hold(self, outcome: Outcome) -> bool:
        tpot_s = outcome.tpot_s
        return ((self.ttft_ms is None or outcome.ttft_s * 1e3 <= self.ttft_ms)
                and (self.tpot_ms is None or tpot_s is None or tpot_s * 1e3 <= self.tpot_ms)
                and (self.e2e_ms is None or outcome.e2e_s * 1e3 <= self.e2e_ms))


@dataclass(slots=True)
class Run:
    """All outcomes of one load, in the order of the jobs."""

    outcomes: list[Outcome]
    duration_s: float

    @property
    def ended_well(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.failure is None]


# ------------------------------------------------------------------------------- reading a stream
# Only what is counted is decoded; the rest of an event is skipped over.


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"")

    @property
    def output(self) -> str:
        text = self.content or self.reasoning or self.reasoning_content or ""
        return text or ("" if bytes(self.tool_calls) in (b"", b"null", b"[]") else " ")


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def output(self) -> str:
        return self.delta.output if self.delta is not None else self.text or ""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = 0


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Error(msgspec.Struct):
    message: str = "no reason given"


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class Listener:
    """Takes the events of one stream into an outcome."""

    def __init__(self, outcome: Outcome, keep_text: bool) -> None:
        self._outcome = outcome
        self._texts: list[str] | None = [] if keep_text else None
        self._ended = False

    def take(self, data: bytes, now: float) -> None:
        outcome = self._outcome
        if data == END_OF_EVENTS:
            self._ended = True
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            outcome.failure = f"an event is not what it should be: {error}"
            return
        if event.error is not None:
            outcome.failure = f"error event: {event.error.message}"
            return
        carried = False
        for choice in event.choices:
            output = choice.output
            if output:
                carried = True
                if self._texts is not None:
                    self._texts.append(output)
            if choice.finish_reason:
                outcome.finish = choice.finish_reason
        usage = event.usage
        if usage is not None:
            outcome.num_prompt, outcome.num_tokens = usage.prompt_tokens, usage.completion_tokens or 0
            if usage.prompt_tokens_details is not None:
                outcome.num_cached = usage.prompt_tokens_details.cached_tokens or 0
            if usage.completion_tokens_details is not None:
                outcome.num_reasoning = usage.completion_tokens_details.reasoning_tokens or 0
        if carried:
            outcome.event_s.append(now)
            if usage is not None:
                outcome.event_tokens.append(outcome.num_tokens)

    def close(self) -> None:
        """The stream is over: was it whole?"""
        outcome = self._outcome
        if self._texts is not None:
            outcome.text = "".join(self._texts)
        if outcome.failure is not None:
            return
        if not self._ended:
            outcome.failure = "the stream ended without its terminator"
        elif outcome.finish is None:
            outcome.failure = "the stream ended without a finish reason"


# ------------------------------------------------------------------------------- sending


async def send(client: Client, job: Job, outcome: Outcome, *, timeout_s: float, keep_text: bool = False) -> None:
    """Send one job and take what comes back into `outcome`; never raises for what the server does."""
    body = {**job.body, "stream": True, "stream_options": {"include_usage": True}}
    listener = Listener(outcome, keep_text)
    outcome.sent_s = time.perf_counter()
    try:
        answer = await client.ask("POST", job.path, body, take_event=listener.take, timeout_s=timeout_s)
        if answer.status != 200:
            outcome.failure = str(refusal(answer)).split(": ")[0]
        else:
            listener.close()
    except TimeoutError:
        outcome.failure = f"no end after {timeout_s:g} s"
    except (ConnectionError, TripoolError) as error:
        outcome.failure = str(error)


async def run_load(server: Server, jobs: Sequence[Job], arrivals: Arrivals, *, timeout_s: float = 600.0,
                   keep_text: bool = False, progress: Callable[[int], None] = lambda ended: None) -> Run:
    """Send all jobs and wait for the last answer; `progress` is told how many have ended."""
    due_s = arrivals.times_s(len(jobs))
    room = asyncio.Semaphore(arrivals.max_concurrency) if arrivals.max_concurrency else None
    async with Client(server) as client:
        start_s = time.perf_counter()
        outcomes = [Outcome(start_s + due) for due in due_s]
        ended = 0

        async def one(job: Job, outcome: Outcome) -> None:
            nonlocal ended
            try:
                await send(client, job, outcome, timeout_s=timeout_s, keep_text=keep_text)
            finally:
                ended += 1
                progress(ended)
                if room is not None:
                    room.release()

        async with asyncio.TaskGroup() as tasks:
            for job, outcome in zip(jobs, outcomes, strict=True):
                wait_s = outcome.due_s - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                if room is not None:
                    await room.acquire()
                    if arrivals.rate == float("inf"):
                        outcome.due_s = time.perf_counter()      # a closed loop sends when there is room
                tasks.create_task(one(job, outcome))
        return Run(outcomes, time.perf_counter() - start_s)


# ------------------------------------------------------------------------------- figures


def summarise(run: Run, limits: Limits | None = None) -> dict[str, Any]:
    """The figures of a run; times in milliseconds."""
    good = run.ended_well
    failures: dict[str, int] = {}
    for each in run.outcomes:
        if each.failure is not None:
            failures[each.failure] = failures.get(each.failure, 0) + 1
    spoke = [each for each in good if each.event_s]      # an answer may end before it says anything
    num_tokens, num_prompt = sum(each.num_tokens for each in good), sum(each.num_prompt for each in good)
    events = sum(len(each.event_s) for each in good)
    figures: dict[str, Any] = {
        "requests": len(run.outcomes), "completed": len(good), "failed": len(run.outcomes) - len(good),
        "failures": dict(sorted(failures.items())), "duration_s": run.duration_s,
        "prompt_tokens": num_prompt, "cached_tokens": sum(each.num_cached for each in good),
        "output_tokens": num_tokens, "reasoning_tokens": sum(each.num_reasoning for each in good),
        "tokens_per_event": num_tokens / events if events else None,
        "request_rate": len(good) / run.duration_s, "output_rate": num_tokens / run.duration_s,
        "total_rate": (num_tokens + num_prompt) / run.duration_s,
    }
    late_s = [each.sent_s - each.due_s for each in run.outcomes if each.sent_s]
    readings = {
        "ttft": [each.ttft_s for each in spoke], "e2e": [each.e2e_s for each in spoke],
        "tpot": [tpot for each in spoke if (tpot := each.tpot_s) is not None],
        "itl": [itl for each in spoke for itl in each.itl_s], "gap": [gap for each in spoke for gap in each.gaps_s],
    }
    for name in TIMES:
        figures[f"{name}_ms"] = spread_ms(readings[name])
    figures["send_delay_ms"] = spread_ms(late_s)      # behind its due time: the client's limit or the machine's
    if limits is not None:
        kept = [each for each in spoke if limits.hold(each)]
        figures["goodput"] = {"limits": limits.given, "requests": len(kept),
                              "share": len(kept) / max(1, len(run.outcomes)), "rate": len(kept) / run.duration_s}
    return figures


def spread_ms(readings_s: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; nothing if there are no readings."""
    if not readings_s:
        return None
    ordered = sorted(readings_s)
    spread = {"mean": statistics.fmean(ordered) * 1e3, "min": ordered[0] * 1e3, "max": ordered[-1] * 1e3}
    for percent in PERCENTILES:
        spread[f"p{percent}"] = percentile(ordered, percent) * 1e3
    return spread


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted readings, linear between neighbours."""
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
