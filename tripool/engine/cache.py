"""The paged latent cache of one rank: blocks of memory that the model writes and other processes may read.

A block is one contiguous extent, `[layers + MTP][tokens][latent + rotary]` and then the last hidden state computed
in it, so that it can be copied, pulled and summed as it lies. The memory may belong to a shared arena, whose
generation table says in which life each block is. The cache does not know which request owns a block, nor who reads.
"""

from __future__ import annotations

import hashlib

import torch
import xxhash
from torch import Tensor

from tripool.core.plan import BlockId, BlockRef
from tripool.core.shape import BLOCK_LAYOUT_VERSION, ModelShape


def block_bytes(shape: ModelShape, block_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one block."""
    return shape.block_elements(block_tokens) * dtype.itemsize


def layout_digest(shape: ModelShape, block_tokens: int, dtype: torch.dtype) -> str:
    """Names what a block's bytes mean. Two caches with one digest can copy each other's blocks."""
    facts = {
        "version": BLOCK_LAYOUT_VERSION, "layers": shape.num_layers, "mtp_layers": shape.num_mtp_layers,
        "latent": shape.kv_lora_rank, "rotary": shape.qk_rope_head_dim, "hidden": shape.hidden_size,
        "block_tokens": block_tokens, "dtype": str(dtype).removeprefix("torch."),
    }
    text = "\n".join(f"{name}={value}" for name, value in facts.items())
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"tripool-layout").hexdigest()


class BlockCache:
    """The blocks of one rank.

    `memory` is writable bytes to lie in (a shared arena), else the cache has its own; `generations` is a table of
    unsigned 64-bit numbers, one per block. On an accelerator the blocks lie there, and `memory` is not used.
    """

    def __init__(self, shape: ModelShape, num_blocks: int, block_tokens: int, dtype: torch.dtype, *,
                 memory: memoryview | None = None, generations: memoryview | list[int] | None = None,
                 device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.dtype = dtype
        self.block_bytes = block_bytes(shape, block_tokens, dtype)
        size = (num_blocks, shape.block_elements(block_tokens))
        if memory is None or torch.device(device).type != "cpu":
            self.data = torch.zeros(size, dtype=dtype, device=device)
        else:
            assert memory.nbytes >= num_blocks * self.block_bytes, f"{memory.nbytes} bytes hold no {num_blocks} blocks"
            self.data = torch.frombuffer(memory, dtype=dtype, count=size[0] * size[1]).view(size)
        self.generations: memoryview | list[int] = [0] * num_blocks if generations is None else generations
        assert len(self.generations) >= num_blocks, "the generation table is shorter than the cache"
        layer_elements = block_tokens * shape.entry_width
        self._layers = [
            self.data[:, layer * layer_elements:(layer + 1) * layer_elements].view(num_blocks, block_tokens, -1)
            for layer in range(shape.num_cached_layers)]
        self._hidden = self.data[:, shape.num_cached_layers * layer_elements:]
        self._bytes = None if self.data.device.type != "cpu" else memoryview(
            self.data.view(torch.uint8).numpy().reshape(-1)).cast("B")

    def entries(self, layer: int) -> Tensor:
        """View `[num_blocks, block_tokens, W]` of one layer; MTP layers follow the main ones."""
        return self._layers[layer]

    @property
    def hidden(self) -> Tensor:
        """View `[num_blocks, D]`: the final-normed hidden state of the last token computed in each block."""
        return self._hidden

    def publish(self, fresh: BlockRef) -> None:
        """Say that a block is about to get new contents: readers of its former life must fail from now on."""
        self.generations[fresh.block] = fresh.generation

    def read_block(self, block: BlockId) -> memoryview:
        """The bytes of a block, in place where the cache lies in host memory."""
        if self._bytes is None:
            return memoryview(self.data[block].cpu().view(torch.uint8).numpy()).cast("B")
        return self._bytes[block * self.block_bytes:(block + 1) * self.block_bytes]

    def write_block(self, block: BlockId, contents: bytes | memoryview) -> None:
        """Fill a block with what `read_block` gave elsewhere."""
        assert len(contents) == self.block_bytes, f"{len(contents)} bytes are not a block of {self.block_bytes}"
        if self._bytes is None:
            host = torch.frombuffer(bytearray(contents), dtype=self.dtype)
            self.data[block].copy_(host)
        else:
            self._bytes[block * self.block_bytes:(block + 1) * self.block_bytes] = contents

    def sum_block(self, block: BlockId) -> int:
        """The checksum by which a copy of the block is proved: XXH3 of its whole extent."""
        return int(xxhash.xxh3_64_intdigest(self.read_block(block)))
