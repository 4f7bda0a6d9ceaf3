"""What a request must get where there is no model: tokens and scores that anybody can reckon.

A token is a function of the request's seed and its number alone, as it is in the real engine in deterministic mode.
"""

from __future__ import annotations

import struct
import zlib

from tripool.core.messages import FinishReason
from tripool.core.request import Limits, Request, TokenBytes, pack_tokens

VOCAB = 1000
STOP_TOKEN = 7
SEED_AND_NUMBER = struct.Struct("<qq")


def next_token(seed: int, number: int, limits: Limits) -> int:
    """Output token `number` of a request with this seed."""
    token = zlib.crc32(SEED_AND_NUMBER.pack(seed, number)) % VOCAB
    while number < limits.min_tokens and token in limits.stop_token_ids:
        token = (token + 1) % VOCAB
    return token


def expected_output(request: Request) -> tuple[TokenBytes, FinishReason]:
    """All tokens that a request must get, and why they end."""
    tokens: list[int] = []
    while len(tokens) < request.limits.max_tokens:
        tokens.append(next_token(request.sampling.seed, len(tokens), request.limits))
        if tokens[-1] in request.limits.stop_token_ids:
            return pack_tokens(tokens), "stop"
    return pack_tokens(tokens), "length"


def guesses_right(seed: int, number: int) -> bool:
    """Whether a draft of output token `number` is right: two of three are."""
    return zlib.crc32(SEED_AND_NUMBER.pack(number, seed)) % 3 > 0


def toy_logprob(number: int) -> float:
    """A log-probability that can be recognised."""
    return -float(number % 13) / 8
