"""Why a request cannot begin or go on at an instance. It looks at both and changes neither."""

from __future__ import annotations

from dataclasses import dataclass

from tripool.control.sequence import Sequence
from tripool.core.machine import Address
from tripool.core.messages import Facts, Grant, Role, State


@dataclass(frozen=True, slots=True)
class Failure:
    """Why not: a word for the counter, a sentence for people, and whether to try elsewhere."""

    label: str
    cause: str
    retry: bool = True

    @property
    def is_full(self) -> bool:
        """Whether room is all that is missing, so that the same instance may take the request later."""
        return self.label == "full"

    @property
    def spares_the_grant(self) -> bool:
        """Whether the grant of the request is as good for another instance."""
        return self.retry and self.label != "grant"


def refusal(sequence: Sequence, member: Address, role: Role, state: State, facts: Facts | None,
            line_room: int) -> Failure | None:
    """Why an instance cannot take a request, not even into its line; None if it can."""
    grant = sequence.grant
    if state != "up" or facts is None:
        return Failure(state, f"{member} is {state}")
    if (grant is not None) != (role == "decode"):
        return Failure("role", f"{member} is a {role} instance and takes no such request")
    if grant is not None and grant.layout != facts.layout:
        return Failure("layout", f"the blocks of {grant.source} have another layout than those of {member}")
    if grant is not None and not _fits_tokens(grant, sequence, facts.block_tokens):
        return Failure("grant", f"the blocks granted by {grant.source} do not fit the request's tokens")
    if not sequence.tokens:
        return Failure("empty", "a request needs at least one token", retry=False)
    if sequence.num_tokens >= facts.max_model_len:
        return Failure("window", f"{sequence.num_tokens} tokens leave no room in the context window of "
                                 f"{facts.max_model_len}", retry=False)
    failure = never_fits(sequence, member, facts)
    if failure is None and grant is not None and line_room <= 0:
        return Failure("full", f"{member} is full: as many requests wait there as it may keep waiting")
    return failure


def never_fits(sequence: Sequence, member: Address, facts: Facts) -> Failure | None:
    """A request whose known tokens alone are more than a rank can hold."""
    if sequence.num_blocks_to_start(facts.block_tokens) <= facts.num_rank_blocks:
        return None
    return Failure("cache", f"{sequence.num_tokens} tokens need more cache than {_cache_size(member, facts)}",
                   retry=False)


def outgrown(member: Address, facts: Facts) -> Failure:
    """A request that has a whole rank to itself and still lacks a block."""
    return Failure("cache", f"the request needs more cache than {_cache_size(member, facts)}", retry=False)


def _fits_tokens(grant: Grant, sequence: Sequence, block_tokens: int) -> bool:
    return (0 < grant.num_tokens < sequence.num_tokens
            and len(grant.parts) == -(-grant.num_tokens // block_tokens))


def _cache_size(member: Address, facts: Facts) -> str:
    return (f"the {facts.num_rank_blocks * facts.block_tokens} tokens ({facts.num_rank_blocks} blocks of "
            f"{facts.block_tokens}) that a rank of {member} has")
