"""What every layer of one forward pass needs to know, worked out once.

Where each token's entry goes, which blocks each row reads, which blocks begin and whose hidden state is kept: all
of it follows from the batch alone and is the same in every layer, so layers build no indices.

T tokens · R rows · B blocks · P rotary pairs · D decode rows · Q tokens of each of them
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from tripool.engine.batch import Batch
from tripool.engine.ops import native
from tripool.engine.ops.layer import AttentionStep
from tripool.engine.ops.native import FLOATS

GROUP_ELEMENTS = 1 << 19
"""What a group of decode rows gathers on a CPU: two megabytes of float32 stay in cache between the gather and the two
products that read them (a third faster than all of 32 rows at once). An accelerator takes all rows at once."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows that follow one another, tokens `start` to `stop`, as the compiled kernel reads them."""

    start: int
    stop: int
    block_RB: Tensor
    first_R: Tensor
    count_R: Tensor
    first_seen: int           # positions before it are barred


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """For torch: decode rows of equally many tokens that attend together, with tables cut to the longest of them."""

    start: int                # tokens from here
    stop: int
    block_DB: Tensor          # flat
    barred_DQN: Tensor        # 0 for a position the token may see, minus infinity for others


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one request, `start` to `stop` in the batch, standing at positions from `first`."""

    start: int
    stop: int
    first: int
    block_B: Tensor           # as many as hold its positions
    paged: PagedRows | None   # the same for the kernel, where there is one

    @property
    def num_positions(self) -> int:
        return self.first + self.stop - self.start


@dataclass(frozen=True, slots=True)
class ForwardContext:
    rotary_TP: Tensor
    block_T: Tensor           # where each token's entry goes:
    offset_T: Tensor          # the block, and the position in it
    paged: PagedRows | None   # rows that attend together: those that decode, in deterministic work all
    decode: list[DecodeRows]  # the former, where there is no kernel
    rows: list[Row]           # all others
    fresh_blocks: Tensor      # blocks that this batch starts and does not fill
    kept_tokens: Tensor       # the last token of this batch in each block, whose hidden state the block keeps
    step: AttentionStep | None    # the same for layers that attend in one call, if all tokens attend as `paged` says


def forward_context(batch: Batch, rotary: Tensor, entries: Tensor, *, one_by_one: bool,
                    first_seen: int = 0) -> ForwardContext:
    """`entries` are those of any layer; `one_by_one` treats decode rows like others, as deterministic work does.

    Positions before `first_seen` are seen by no decode row.
    """
    block_tokens = entries.shape[1]
    paged = _paged(batch, first_seen) if has_kernel(entries) else None
    together = batch.num_rows if one_by_one else batch.num_decode_rows
    num_decode = together if paged is not None or not one_by_one else 0
    rotary_TP = rotary.index_select(0, batch.position_T)
    block_T = batch.block_table_RB[batch.row_T, batch.position_T // block_tokens]
    offset_T = batch.position_T % block_tokens
    step = None
    if paged is not None and together == batch.num_rows and entries.dtype == torch.float32:
        step = AttentionStep(rotary_TP, block_T, offset_T, paged.block_RB, paged.first_R, paged.count_R, first_seen,
                             entries)
    return ForwardContext(
        rotary_TP=rotary_TP,
        block_T=block_T,
        offset_T=offset_T,
        paged=None if paged is None else _cut(paged, batch, 0, together, 0),
        decode=[] if paged is not None else _decode_groups(batch, num_decode, entries, first_seen),
        rows=_rows(batch, num_decode, block_tokens, paged),
        fresh_blocks=_fresh_blocks(batch, block_tokens),
        kept_tokens=_kept_tokens(batch, block_tokens),
        step=step,
    )


def has_kernel(entries: Tensor) -> bool:
    """Are these entries read by compiled code?"""
    return entries.device.type == "cpu" and entries.dtype in FLOATS and native.chosen_level() >= 0


def _paged(batch: Batch, first_seen: int) -> PagedRows:
    """All rows."""
    first_R, count_R = (torch.tensor(each, dtype=torch.int64) for each in (batch.first_R, batch.count_R))
    return PagedRows(0, batch.num_tokens, batch.block_table_RB.contiguous(), first_R, count_R, first_seen)


def _cut(paged: PagedRows, batch: Batch, start: int, stop: int, start_token: int) -> PagedRows:
    """Rows `start` to `stop` of all."""
    return PagedRows(start_token, start_token + sum(batch.count_R[start:stop]), paged.block_RB[start:stop],
                     paged.first_R[start:stop], paged.count_R[start:stop], paged.first_seen)


def _decode_groups(batch: Batch, num_rows: int, entries: Tensor, first_seen: int) -> list[DecodeRows]:
    """Consecutive rows of one length, as many together as gather a group's elements."""
    _, block_tokens, width = entries.shape
    most_blocks = max(1, GROUP_ELEMENTS // (block_tokens * width)) if entries.device.type == "cpu" else sys.maxsize
    groups: list[DecodeRows] = []
    start, start_token, longest = 0, 0, 0

    def close(stop: int) -> None:
        nonlocal start, start_token, longest
        groups.append(_decode_rows(batch, start, stop, start_token, longest, entries, first_seen))
        start_token += (stop - start) * batch.count_R[start]
        start, longest = stop, 0

    for row in range(num_rows):
        num_blocks = (batch.first_R[row] + batch.count_R[row] - 1) // block_tokens + 1
        if row > start and (batch.count_R[row] != batch.count_R[start]
                            or (row + 1 - start) * max(longest, num_blocks) > most_blocks):
            close(row)
        longest = max(longest, num_blocks)
    if num_rows:
        close(num_rows)
    return groups


def _decode_rows(batch: Batch, start: int, stop: int, start_token: int, num_blocks: int, entries: Tensor,
                 first_seen: int) -> DecodeRows:
    block_tokens, device = entries.shape[1], entries.device
    stop_token = start_token + (stop - start) * batch.count_R[start]
    block_DB = batch.block_table_RB[start:stop, :num_blocks]
    position_DQ = batch.position_T[start_token:stop_token].view(stop - start, -1)
    # Past its end a row reads its own first block again: what another request wrote, were it NaN, must not reach it.
    own_DB = torch.arange(num_blocks, device=device) <= position_DQ[:, -1:] // block_tokens
    block_DB = torch.where(own_DB, block_DB, block_DB[:, :1])
    position_N = torch.arange(num_blocks * block_tokens, device=device)
    barred_DQN = torch.zeros(*position_DQ.shape, len(position_N), dtype=entries.dtype, device=device)
    barred_DQN.masked_fill_(position_N > position_DQ.unsqueeze(-1), -torch.inf)
    if first_seen:
        barred_DQN[..., :first_seen] = -torch.inf
    return DecodeRows(start_token, stop_token, block_DB.flatten(), barred_DQN)


def _rows(batch: Batch, skipped: int, block_tokens: int, paged: PagedRows | None) -> list[Row]:
    rows, start = [], sum(batch.count_R[:skipped])
    for row in range(skipped, batch.num_rows):
        first, count = batch.first_R[row], batch.count_R[row]
        if count:
            num_blocks = (first + count - 1) // block_tokens + 1
            rows.append(Row(start, start + count, first, batch.block_table_RB[row, :num_blocks],
                            None if paged is None else _cut(paged, batch, row, row + 1, start)))
            start += count
    return rows


def _fresh_blocks(batch: Batch, block_tokens: int) -> Tensor:
    rows, columns = [], []
    for row, (first, count) in enumerate(zip(batch.first_R, batch.count_R, strict=True)):
        end = first + count
        if count and end % block_tokens and end // block_tokens * block_tokens >= first:
            rows.append(row)
            columns.append(end // block_tokens)
    return batch.block_table_RB[rows, columns]


def _kept_tokens(batch: Batch, block_tokens: int) -> Tensor:
    kept, start = [], 0
    for first, count in zip(batch.first_R, batch.count_R, strict=True):
        ends = range(first + block_tokens - 1 - first % block_tokens, first + count - 1, block_tokens)
        kept += [start + end - first for end in ends]
        if count:
            kept.append(start + count - 1)
        start += count
    return torch.tensor(kept, dtype=torch.int64, device=batch.token_T.device)
