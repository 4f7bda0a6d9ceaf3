"""One step of the engine: what each rank is asked to do, and what a gateway is told of it.

A plan is a difference: it names rows that join, leave, grow or compute a chunk of their known tokens, and a step costs
nothing for rows that merely decode. Who grows and who steps back is settled before; this module turns the books of a
rank into its section of the plan, and tokens into one message per gateway.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tripool.control import prefill
from tripool.control.rank import Rank
from tripool.control.sequence import Phase, Sequence
from tripool.core.machine import Address
from tripool.core.messages import Done, Tokens
from tripool.core.plan import BlockId, BlockRef, Chunk, Emitted, Grow, Join, Section
from tripool.core.request import RequestId

Share = tuple[Sequence, int]
"""A row and how many of its known tokens it computes in a step."""


def plan_section(rank: Rank, grows: list[Grow], fresh: list[BlockRef], budget: int,
                 block_tokens: int) -> tuple[Section, list[Share]]:
    """A rank's part of the next plan. `fresh` are the blocks that `grows` gives out; `budget` bounds its tokens."""
    if not rank.prefilling and not rank.leaving:
        return Section(fresh=tuple(fresh), grows=tuple(grows)), []       # as on most ranks of many
    planned, shares = _share_budget(rank, budget), list[Share]()
    joins, chunks, seals = [], [], []
    for sequence, count in planned:
        if sequence.phase is Phase.READY:
            joins.append(_join(sequence))
            fresh += rank.blocks.refs(sequence.blocks[sequence.num_published:])
            sequence.phase = Phase.COMPUTING
        if sequence.is_decode_row:
            rank.decode(sequence)
            continue
        shares.append((sequence, count))
        if sequence.num_to_compute > 1:       # the last known token alone makes a decode row, which is not named
            chunks.append(Chunk(sequence.slot, count))
        if not sequence.decodes:
            seals += _seal(rank, sequence, count, block_tokens)
    leaves = tuple(rank.leaving)
    for sequence in rank.leaving.values():
        if sequence.moves and not sequence.ended:          # rows leave before anything is computed
            seals += [block for block, _, checksum in rank.blocks.proofs(sequence.blocks) if checksum is None]
    rank.leaving.clear()
    return Section(leaves, tuple(fresh), tuple(joins), tuple(grows), tuple(chunks), tuple(seals)), shares


def _share_budget(rank: Rank, budget: int) -> list[Share]:
    """Rows that only decode are counted, not listed."""
    if not rank.prefilling:
        return []
    last = [row for row in rank.prefilling.values() if row.num_to_compute == 1]
    others = [row for row in rank.prefilling.values() if row.num_to_compute > 1]
    return [(row, 1) for row in last] + prefill.split_budget(others, budget - rank.num_decode_tokens - len(last))


def _join(sequence: Sequence) -> Join:
    request = sequence.request
    return Join(sequence.slot, request.request_id, sequence.attempt, request.reply_to, sequence.tokens,
                request.num_prompt_tokens, sequence.num_computed, tuple(sequence.blocks), sequence.sampling,
                request.limits, sequence.decodes)


def _seal(rank: Rank, sequence: Sequence, count: int, block_tokens: int) -> list[BlockId]:
    """Blocks that this step completes and that somebody will pull: full ones, and the last one at the end."""
    computed = sequence.num_computed + count
    end = -(-computed // block_tokens) if computed == sequence.num_tokens else computed // block_tokens
    blocks = sequence.blocks[sequence.num_sealed:end]
    sequence.num_sealed = end
    return [block for block, known in zip(blocks, rank.blocks.checksums(blocks), strict=True) if known is None]


@dataclass(slots=True)
class Parcel:
    """What one step has for one gateway, in the making."""

    emitted: list[Emitted] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    cached: list[tuple[RequestId, int, int]] = field(default_factory=list)

    def tokens(self, source: Address) -> Tokens:
        return Tokens(source, tuple(self.emitted), tuple(self.done), tuple(self.cached))
