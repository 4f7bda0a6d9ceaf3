"""A request inside one instance: how far it has come and what it holds.

Only its scheduler changes it. Once its row decodes, the engine alone knows its tokens; they come back with `Left`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from tripool.core.messages import Grant
from tripool.core.plan import BlockId, Slot
from tripool.core.request import TOKEN_BYTES, Request, Sampling, TokenBytes


class Phase(Enum):
    """Where a sequence stands. The value is what metrics call it."""

    WAITING = "waiting"        # holds nothing
    FETCHING = "fetching"      # slot and blocks; the pool is filling some
    PULLING = "pulling"        # slot and blocks; they are copied from a prefill instance
    READY = "ready"            # slot and blocks; joins the engine with its first chunk
    COMPUTING = "computing"    # a row of the engine with tokens to compute
    DECODING = "decoding"      # a row of the engine that emits tokens in every step
    HANDED = "handed over"     # blocks, without a slot, that wait to be pulled


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt of one request."""

    request: Request
    attempt: int
    arrival: int                          # order of coming to this instance; kept when it steps back
    since_s: float
    tokens: TokenBytes                    # prompt and emitted, as far as known here
    decodes: bool                         # False: handed over after its next token
    grant: Grant | None = None            # still to be pulled, or to be released
    turn: int = 0                         # of the `Admit` that brought it
    prompt_scored: bool = False           # prompt log-probabilities went out already
    phase: Phase = Phase.WAITING
    ended: bool = False                   # nobody waits for it; what it holds goes with the next answer
    leaving: bool = False                 # its row is asked to leave the engine
    stepped_back: bool = False
    moves: bool = False                   # when its row has left, it goes on at another instance
    num_passed: int = 0                   # younger ones that began while this one lacked room
    rank: int = -1
    slot: Slot = -1
    blocks: list[BlockId] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)     # of its leading full blocks
    num_computed: int = 0                 # positions with cache entries; not counted any more while it decodes
    num_registered: int = 0               # leading blocks whose keys were offered to the allocator
    num_published: int = 0                # leading blocks whose generations the data plane was told
    num_sealed: int = 0                   # leading blocks that a plan asked to sum, or that needed none
    num_reused: int | None = 0            # prompt tokens taken from a cache; None once reported
    look_ahead: int = 0                   # blocks that its rank keeps in mind for it
    most_positions: int = field(init=False)   # that it could ever have, if it went on to its last allowed token

    def __post_init__(self) -> None:
        # The last token is emitted but never computed.
        last = self.request.num_prompt_tokens + self.request.limits.max_tokens - 1
        self.most_positions = max(self.num_tokens, last)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_to_compute(self) -> int:
        return len(self.tokens) // TOKEN_BYTES - self.num_computed

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: the more urgent, then the older."""
        return self.request.priority, self.arrival

    @property
    def in_engine(self) -> bool:
        return self.phase in (Phase.COMPUTING, Phase.DECODING)

    @property
    def is_decode_row(self) -> bool:
        """Whether it decodes from the step on in which it joins, and that step leaves nothing to note, to tell or to
        store: all but its last token was computed elsewhere, or here before."""
        return self.decodes and self.num_to_compute == 1 and self.num_reused is None and not self.keys

    @property
    def takes_prefix(self) -> bool:
        """Whether cached context may stand in for computing: not while prompt log-probabilities are owed."""
        return self.prompt_scored or self.request.sampling.num_prompt_logprobs < 0

    @property
    def sampling(self) -> Sampling:
        """As the engine is to be told: prompt log-probabilities are asked for once."""
        if self.prompt_scored and self.request.sampling.num_prompt_logprobs >= 0:
            return replace(self.request.sampling, num_prompt_logprobs=-1)
        return self.request.sampling

    def num_blocks_to_start(self, block_tokens: int) -> int:
        """Blocks for all known tokens and, where it decodes, for the next one."""
        positions = min(self.num_tokens + 1, self.most_positions) if self.decodes else self.num_tokens
        return -(-positions // block_tokens)

    def num_blocks_to_come(self, block_tokens: int) -> int:
        """Blocks it could still ask for, if it went on to its last allowed token."""
        if not self.decodes:
            return 0
        held = len(self.blocks) or self.num_blocks_to_start(block_tokens)
        return max(0, -(-self.most_positions // block_tokens) - held)
