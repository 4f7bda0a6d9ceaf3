"""A request as the machines see it: token ids, how to sample, when to stop.

Text, templates, tools and stop strings belong to `api`; they never come this far. Token ids travel
packed (little-endian int32), so that a long prompt is one object on the wire and in a hash.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from tripool.core.value import value

RequestId = int
"""Made by the gateway, never taken from a request's body. Fits 63 bits."""

TokenBytes = bytes
"""Token ids, packed as little-endian int32."""

TOKEN_BYTES = 4


def pack_tokens(token_ids: Iterable[int]) -> TokenBytes:
    """Pack token ids into little-endian int32."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(tokens: TokenBytes) -> list[int]:
    """The token ids of a packed sequence."""
    packed = array("i")
    packed.frombytes(tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def num_tokens(tokens: TokenBytes) -> int:
    """How many token ids a packed sequence holds."""
    return len(tokens) // TOKEN_BYTES


@value(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Penalties count the prompt (repetition) or the output (presence, frequency)."""

    temperature: float = 1.0              # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0                        # 0 keeps every token
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0                         # always set: the gateway draws one when the client does not
    num_logprobs: int = -1                # -1: none; 0: of the chosen token; k: and of the k best
    num_prompt_logprobs: int = -1         # likewise for each prompt token; such a request takes no cached prefix
    drafts: bool = True                   # may be drafted for where the instance drafts; its tokens are the same


@value(frozen=True, slots=True)
class Limits:
    """When a request ends by itself. Counts are of output tokens."""

    max_tokens: int
    min_tokens: int = 0                   # until then, no stop token may be chosen
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence included, unless it is to be ignored


@value(frozen=True, slots=True)
class Request:
    """One sequence to generate. `n` choices of one API call are n requests with derived seeds."""

    request_id: RequestId
    prompt: TokenBytes
    sampling: Sampling
    limits: Limits
    salt: bytes = b""                     # of the tenant, set from the credential
    priority: int = 0                     # smaller runs earlier
    reply_to: str = "gateway"             # address of the machine that keeps the record

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES
