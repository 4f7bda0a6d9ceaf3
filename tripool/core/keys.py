"""Names of cache blocks: a chain of hashes over token blocks.

A key says what a block's bytes are: whose they are (tenant salt), which model and layout wrote them
(namespace), and every token from the first to the block's last. Fields are tagged and length-delimited,
so that no two different inputs are encoded alike. Two blocks with one key hold interchangeable bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from tripool.core.request import TOKEN_BYTES, TokenBytes

KEY_BYTES = 32
KEY_LENGTH = KEY_BYTES.to_bytes(8, "little")
BLOCK = b"tripool-block"
CHAIN = blake2b(digest_size=KEY_BYTES, person=BLOCK)
"""To be copied, which takes less than to make another."""


def namespace_key(fields: Mapping[str, str]) -> bytes:
    """Digest of what makes blocks interchangeable: model fingerprint, dtype, layout version, block tokens, ..."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"tripool-ns")
    for name in sorted(fields):
        for part in (name.encode(), fields[name].encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def root_key(namespace: bytes, salt: bytes) -> bytes:
    """Where a tenant's chains begin."""
    return _digest(b"tripool-root", namespace, salt)


def block_keys(root: bytes, tokens: TokenBytes, block_tokens: int) -> list[bytes]:
    """The key of each full block of `tokens`; a partial block at the end has none."""
    width = block_tokens * TOKEN_BYTES
    parent_length, block_length = len(root).to_bytes(8, "little"), width.to_bytes(8, "little")
    keys, parent = [], root
    for at in range(0, len(tokens) - width + 1, width):
        # `_digest(BLOCK, parent, block)`, written out: prompts have hundreds of blocks.
        digest = CHAIN.copy()
        digest.update(b"".join((parent_length, parent, block_length, tokens[at:at + width])))
        parent = digest.digest()
        parent_length = KEY_LENGTH
        keys.append(parent)
    return keys


def _digest(tag: bytes, *parts: bytes) -> bytes:
    told = b"".join([piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)])
    return blake2b(told, digest_size=KEY_BYTES, person=tag).digest()
