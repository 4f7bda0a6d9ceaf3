"""What one step of an instance does, and what came of it.

A plan is a difference: the engine keeps a row for each slot (its tokens, position, block table,
sampling), and a plan says who joins, who leaves, which rows compute a chunk of their tokens and which
get blocks. Rows whose tokens are all computed but the last are decode rows, however they came to be so
(by joining, by a chunk that left one token, by sampling); they take part in every step without being
named, as long as they own a block to write to. There is one section per rank, because the ranks of an
instance run data-parallel attention and step together.
"""

from __future__ import annotations

from array import array

from tripool.core.machine import Address
from tripool.core.placement import MapChange
from tripool.core.request import Limits, RequestId, Sampling, TokenBytes
from tripool.core.value import value

Slot = int
BlockId = int


@value(frozen=True, slots=True)
class BlockRef:
    """A block of one rank's cache in one life. The generation grows each time the block is given new contents."""

    block: BlockId
    generation: int


@value(frozen=True, slots=True)
class Join:
    """A request takes a slot. `blocks` already hold the first `num_computed` positions."""

    slot: Slot
    request_id: RequestId
    attempt: int
    reply_to: Address
    tokens: TokenBytes        # prompt and the tokens emitted so far
    num_prompt: int           # how many of them are the prompt
    num_computed: int         # positions whose cache entries exist; at most num_tokens - 1
    blocks: tuple[BlockId, ...]
    sampling: Sampling
    limits: Limits
    decodes: bool             # False: the row leaves with its next sampled token (a prefill instance)


@value(frozen=True, slots=True)
class Chunk:
    """A row computes its next `num_tokens` known tokens; when none is left it samples one."""

    slot: Slot
    num_tokens: int


@value(frozen=True, slots=True)
class Grow:
    """A row gets more blocks at the end of its table."""

    slot: Slot
    blocks: tuple[BlockId, ...]


@value(frozen=True, slots=True)
class Section:
    """One rank's part of a plan. Applied in this order: leaves, fresh, joins, grows, the forward pass, seals."""

    leaves: tuple[Slot, ...] = ()             # each is answered by a `Left` in the result
    fresh: tuple[BlockRef, ...] = ()          # blocks for new contents: generations to publish before the first write
    joins: tuple[Join, ...] = ()
    grows: tuple[Grow, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    seals: tuple[BlockId, ...] = ()           # blocks to checksum after the forward pass, to be pulled from then on


IDLE_SECTION = Section()
"""Of a rank whose rows only decode. An instance may have hundreds of those in a step, so they are known by identity."""


@value(frozen=True, slots=True)
class StepPlan:
    """One step of all ranks of an instance. Every rank takes every step; an empty section is an ordinary case."""

    step: int
    sections: tuple[Section, ...]             # of a lost rank: empty
    map_version: int = 0                      # of the expert map
    map_changes: tuple[MapChange, ...] = ()   # since the last step that was taken, oldest first; known ones are skipped
    lost_ranks: tuple[int, ...] = ()         # take no part
    num_microbatches: int = 1                 # 2: each rank's rows in two halves, one computes while the other travels
    reports_experts: bool = False             # results say how often each expert was chosen since they last did


@value(frozen=True, slots=True)
class TokenColumns:
    """Emitted tokens of many requests as packed columns, forwarded unread from the engine to the gateway.

    Row i emitted `counts[i]` tokens, the first of which is output number `starts[i]` of the request.
    """

    request_ids: bytes = b""   # int64
    attempts: bytes = b""      # int32
    starts: bytes = b""        # int32
    counts: bytes = b""        # int32
    tokens: bytes = b""        # int32, sum(counts) of them

    def rows(self) -> list[tuple[RequestId, int, int, bytes]]:
        """(request_id, attempt, start, tokens) of each row."""
        rows, at = [], 0
        for request_id, attempt, start, count in zip(
            memoryview(self.request_ids).cast("q"), memoryview(self.attempts).cast("i"),
            memoryview(self.starts).cast("i"), memoryview(self.counts).cast("i"), strict=True,
        ):
            rows.append((request_id, attempt, start, self.tokens[at:at + 4 * count]))
            at += 4 * count
        return rows


def token_columns(rows: list[tuple[RequestId, int, int, bytes]]) -> TokenColumns:
    """Pack rows of (request_id, attempt, start, tokens); the inverse of `TokenColumns.rows`."""
    return TokenColumns(
        request_ids=array("q", [row[0] for row in rows]).tobytes(),
        attempts=array("i", [row[1] for row in rows]).tobytes(),
        starts=array("i", [row[2] for row in rows]).tobytes(),
        counts=array("i", [len(row[3]) // 4 for row in rows]).tobytes(),
        tokens=b"".join(row[3] for row in rows),
    )


@value(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log, of the raw distribution) of one request's tokens, one entry per token."""

    request_id: RequestId
    attempt: int
    start: int                                              # output number of the first; for prompts, its position
    chosen: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_values: tuple[tuple[float, ...], ...] = ()


@value(frozen=True, slots=True)
class Left:
    """A row that is gone from the engine: it stopped by itself (`reason`), or the plan asked for it (None)."""

    slot: Slot
    reason: str | None         # "stop" or "length"
    tokens: TokenBytes         # prompt and all emitted tokens
    num_computed: int          # positions whose cache entries exist
    stop_token: int | None = None


@value(frozen=True, slots=True)
class Emitted:
    """What one rank's rows emitted for one gateway."""

    reply_to: Address
    columns: TokenColumns
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@value(frozen=True, slots=True)
class RankResult:
    """What came of one section.

    Where the step was given up (`aborted`) it brought no token: every row, those that joined with this plan included,
    has left the engine and is in `left` as it was before the forward pass; generations that the plan made known are
    published. A rank that is gone has an empty result.
    """

    emitted: tuple[Emitted, ...] = ()
    left: tuple[Left, ...] = ()
    need: tuple[Slot, ...] = ()               # rows that will lack a block to write to within the next step
    sums: tuple[tuple[BlockId, int], ...] = ()   # (block, xxh3_64) of each sealed block
    num_chunk_tokens: int = 0
    num_decode_tokens: int = 0                # that decode rows emitted
    aborted: bool = False
    expert_counts: bytes = b""                # of this rank's tokens, on its way to `StepResult.expert_counts`
    want: tuple[Slot, ...] = ()               # rows that will draft less for lack of a block
    num_drafted: tuple[int, ...] = ()         # drafts that were verified: first ones, second ones, ...
    num_accepted: tuple[int, ...] = ()        # those of them that became tokens


IDLE_RESULT = RankResult()
"""Of a rank that did nothing, or has nothing to tell yet; likewise."""


@value(frozen=True, slots=True)
class StepResult:
    """What came of a plan: one result per section, in order.

    When a rank is lost, others may have been through with the step; so each says for itself whether it took it.
    """

    step: int
    ranks: tuple[RankResult, ...]
    seconds: float = 0.0                      # time in the engine, for metrics
    aborted: str = ""                         # why ranks gave the step up, if any did
    expert_counts: bytes = b""                # int32 tokens of all ranks per MoE layer and logical expert, if asked for
