"""Requests of a workload: when they come, how long they are, and what their prompts share. Not what they say.

A trace has lengths and names of prompt parts, no tokens. Tokens are made up from those names: a part of one name is
always the same tokens, parts of different names never are, so that prompts share exactly the leading blocks that the
trace says, whatever the block size. They are made when a request comes, because those of a whole trace would fill the
memory. How much a request will answer is known to the simulated engine alone; whoever decides sees a limit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tripool.core.request import Limits, Request, RequestId, Sampling, TokenBytes

END_TOKEN = (1 << 31) - 1
"""Ends every answer."""

FIRST_ANSWER_TOKEN = 1 << 30
"""From here on tokens are of answers, below of prompts."""

TOKEN = struct.Struct("<i")


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """One request of a workload. Its prompt is a run of parts: a name, and how many tokens."""

    at_s: float
    parts: tuple[tuple[int, int], ...]
    num_output: int

    @property
    def num_prompt(self) -> int:
        return sum(count for _, count in self.parts)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they come, and a word on where they are from."""

    source: str
    requests: tuple[WorkRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output for request in self.requests)

    @property
    def span_s(self) -> float:
        """When the last one comes."""
        return self.requests[-1].at_s if self.requests else 0.0

    def first(self, count: int) -> Workload:
        """The same, shorter."""
        return Workload(self.source, self.requests[:count])

    def faster(self, times: float) -> Workload:
        """The same requests, coming `times` as fast."""
        return Workload(self.source, tuple(WorkRequest(each.at_s / times, each.parts, each.num_output)
                                           for each in self.requests))


def prompt_tokens(parts: Iterable[tuple[int, int]]) -> TokenBytes:
    """Tokens of a prompt."""
    return b"".join([TOKEN.pack(name) * count for name, count in parts])


def answer_token(request_id: RequestId) -> bytes:
    """Every token of a request's answer but the last: no two requests share what they were answered."""
    return TOKEN.pack(FIRST_ANSWER_TOKEN + request_id % (FIRST_ANSWER_TOKEN - 1))


def make_request(request_id: RequestId, work: WorkRequest, max_tokens: int) -> Request:
    """What a gateway is given."""
    limits = Limits(max(max_tokens, 1), stop_token_ids=(END_TOKEN,))
    return Request(request_id, prompt_tokens(work.parts), Sampling(seed=request_id), limits)


def split_prompt(names: Sequence[int], num_tokens: int, part_tokens: int) -> tuple[tuple[int, int], ...]:
    """Parts of equal length, of which the last may be shorter."""
    last = num_tokens - part_tokens * (len(names) - 1)
    return tuple((name, part_tokens) for name in names[:-1]) + ((names[-1], last),)
