"""A backend that follows a script: fixed tokens in a fixed chunking, with delays, failures and silence.

It keeps the contract of `api.backend` - one final output, limits and stop tokens obeyed, an iteration that
ends when it is closed - and remembers what was asked of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from tripool.api.backend import BackendStatus, Sample
from tripool.api.schema import MemberExperts
from tripool.core.messages import Facts, MemberChanged, Output
from tripool.core.plan import TokenLogprobs
from tripool.core.request import Request, pack_tokens, unpack_tokens

FACTS = Facts(model="tiny", fingerprint="f00d", layout="1", max_model_len=128, block_tokens=16, num_blocks=100)


@dataclass(frozen=True)
class Script:
    """What one request gets."""

    tokens: Sequence[int]
    chunk: int = 1                       # tokens in one output; 0: all at once
    delay_s: float = 0.0                 # before each output
    fail_after: int | None = None        # tokens, then an error
    hang_after: int | None = None        # tokens, then silence until closed
    lose_after: int | None = None        # tokens, then the iteration ends without a last output
    error: str = "decode-0 is gone and nobody is left to go on"
    status: int = 503
    retry_after_s: float | None = 2.0
    num_cached: int = 0


def logprob_of(token_id: int) -> float:
    return -0.125 - (token_id % 8) / 4


def scored(request: Request, start: int, token_ids: Sequence[int], num_top: int) -> TokenLogprobs:
    """Log-probabilities that depend on the token alone. The token itself is the best of the top ones."""
    top_ids = tuple(tuple([each, *range(num_top - 1)][:num_top]) for each in token_ids)
    return TokenLogprobs(
        request.request_id,
        1,
        start,
        tuple(logprob_of(each) for each in token_ids),
        top_ids,
        tuple(
            tuple(logprob_of(each) - rank for rank in range(len(row)))
            for each, row in zip(token_ids, top_ids, strict=True)
        ),
    )


class ScriptedStream:
    """What comes of one request."""

    def __init__(self, request: Request, script: Script) -> None:
        self.request = request
        self.queued_s = 0.001
        self.num_sent = 0
        self.closed = asyncio.Event()
        self._outputs = self._play(request, script)

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        if self.closed.is_set():
            raise StopAsyncIteration
        following = asyncio.ensure_future(anext(self._outputs))
        closing = asyncio.ensure_future(self.closed.wait())
        try:
            await asyncio.wait((following, closing), return_when=asyncio.FIRST_COMPLETED)
            if self.closed.is_set():
                raise StopAsyncIteration
            try:
                return following.result()
            except StopAsyncIteration:
                raise StopAsyncIteration from None
        finally:
            following.cancel()
            closing.cancel()

    def close(self) -> None:
        self.closed.set()

    async def _play(self, request: Request, script: Script) -> AsyncIterator[Output]:
        limits, request_id = request.limits, request.request_id
        tokens, finish, stop_token = list(script.tokens)[:limits.max_tokens], "length", None
        for at, token_id in enumerate(tokens):
            if token_id in limits.stop_token_ids and at >= limits.min_tokens:
                tokens, finish, stop_token = tokens[:at + 1], "stop", token_id
                break
        if finish == "length" and len(tokens) < limits.max_tokens:
            finish = "stop"
        width = script.chunk or max(len(tokens), 1)
        prompt = unpack_tokens(request.prompt)
        at = 0
        while at < len(tokens) or not tokens:
            if script.delay_s:
                await asyncio.sleep(script.delay_s)
            for limit, then in ((script.fail_after, "fail"), (script.hang_after, "hang"), (script.lose_after, "lose")):
                if limit is not None and at >= limit:
                    if then == "fail":
                        yield Output(
                            request_id, error=script.error, status=script.status, retry_after_s=script.retry_after_s
                        )
                    elif then == "hang":
                        await asyncio.Event().wait()
                    return
            here = tokens[at:at + width]
            first = at == 0
            at += len(here)
            last = at >= len(tokens)
            self.num_sent += len(here)
            sampling = request.sampling
            yield Output(
                request_id,
                pack_tokens(here),
                logprobs=scored(request, at - len(here), here, sampling.num_logprobs)
                if sampling.num_logprobs >= 0
                else None,
                prompt_logprobs=(
                    scored(request, 1, prompt[1:], sampling.num_prompt_logprobs)
                    if first and sampling.num_prompt_logprobs >= 0
                    else None
                ),
                finish=finish if last else None,
                stop_token=stop_token if last else None,  # type: ignore[arg-type]
                num_cached_tokens=script.num_cached if first else None,
            )
            if last:
                return


@dataclass
class ScriptedBackend:
    """`script` is what every request gets, or says what each gets."""

    script: Script | Callable[[Request], Script]
    ready: bool = True
    draining: bool = False
    loaded: bool = True
    streams: list[ScriptedStream] = field(default_factory=list)
    num_flushed: int = 0
    told_experts: Sequence[MemberExperts] = ()
    rebalanced: list[str] = field(default_factory=list)

    def new_request_id(self) -> int:
        self._last_id = getattr(self, "_last_id", 0) + 1
        return self._last_id

    def open(self, request: Request) -> ScriptedStream:
        script = self.script if isinstance(self.script, Script) else self.script(request)
        self.streams.append(ScriptedStream(request, script))
        return self.streams[-1]

    def status(self) -> BackendStatus:
        member = MemberChanged("prefill-0", "prefill", "boot", "up" if self.ready else "loading",
                               FACTS if self.loaded else None, num_free_blocks=75)
        return BackendStatus(
            ready=self.ready, draining=self.draining, cause="" if self.ready else "prefill-0 is loading",
            load_fraction=1.0 if self.loaded else 0.25, facts=FACTS if self.loaded else None, members=(member,),
            num_waiting=3, num_running=4, settings={"placement_version": 1})

    def samples(self) -> list[Sample]:
        return [
            Sample("pool_hits_total", "Blocks found in the pool.", "counter", 7.0, (("tier", "memory"),)),
            Sample("member_up", "Told by the API too.", "gauge", 1.0, (("member", "prefill-0"), ("role", "prefill"))),
        ]

    async def flush_cache(self) -> int:
        self.num_flushed += 1
        return 5

    async def experts(self, members: Sequence[str]) -> list[MemberExperts]:
        return [each for each in self.told_experts if each.member in members]

    def rebalance(self, members: Sequence[str]) -> list[str]:
        names = [each.member for each in self.told_experts if each.member in members]
        self.rebalanced += names
        return names

    @property
    def requests(self) -> list[Request]:
        return [stream.request for stream in self.streams]

    @property
    def last(self) -> Request:
        return self.requests[-1]

    def all_closed(self) -> bool:
        return all(stream.closed.is_set() for stream in self.streams)
