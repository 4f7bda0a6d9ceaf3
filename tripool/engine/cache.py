"""The paged latent cache of one rank: blocks of memory that the model writes and other processes may read.

A block is one contiguous extent, `[layers + MTP][tokens][latent + rotary]` and then the last hidden state computed
in it, so that it can be copied, pulled and summed as it lies. The memory may belong to a shared arena, whose
generation table says in which life each block is. Where the model does not compute in that memory, because it computes
on an accelerator, blocks are staged: each has a second place in host memory, and is copied down before others read it
there and up after others wrote it there. The cache does not know which request owns a block, nor who reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from tripool.core.errors import ConfigError
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

    `memory` is writable host bytes to lie in (a shared arena), else the cache has its own; `generations` is a table of
    unsigned 64-bit numbers, one per block. On an accelerator, and where told so, blocks are staged: the model computes
    in `data`, and `memory` is only where blocks come and go.
    """

    def __init__(self, shape: ModelShape, num_blocks: int, block_tokens: int, dtype: torch.dtype, *,
                 memory: memoryview | None = None, generations: memoryview | list[int] | None = None,
                 device: torch.device | str = "cpu", staged: bool = False) -> None:
        """Reserve what `memory` does not give.

        Raises:
            ConfigError: the device does not have it.
        """
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.dtype = dtype
        self.block_bytes = block_bytes(shape, block_tokens, dtype)
        size = (num_blocks, shape.block_elements(block_tokens))
        if memory is None:
            host = torch.zeros(size, dtype=dtype)
        else:
            assert memory.nbytes >= num_blocks * self.block_bytes, f"{memory.nbytes} bytes hold no {num_blocks} blocks"
            host = torch.frombuffer(memory, dtype=dtype, count=size[0] * size[1]).view(size)
        self._host = host
        self.is_staged = staged or torch.device(device).type != "cpu"
        self.data = _zeros_on(device, size, dtype) if self.is_staged else host
        self.generations: memoryview | list[int] = [0] * num_blocks if generations is None else generations
        assert len(self.generations) >= num_blocks, "the generation table is shorter than the cache"
        layer_elements = block_tokens * shape.entry_width
        self._layers = [
            self.data[:, layer * layer_elements:(layer + 1) * layer_elements].view(num_blocks, block_tokens, -1)
            for layer in range(shape.num_cached_layers)]
        self._hidden = self.data[:, shape.num_cached_layers * layer_elements:]
        self._bytes = memoryview(host.view(torch.uint8).numpy().reshape(-1)).cast("B")

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

    def download(self, blocks: Iterable[BlockId]) -> None:
        """Copy blocks to host memory, if the model's own are elsewhere. On return others can read them there.

        Like `upload` it may be called from any thread, for blocks that no step in progress writes.
        """
        if self.is_staged:
            for block in blocks:
                self._host[block].copy_(self.data[block])

    def upload(self, blocks: Iterable[BlockId]) -> None:
        """Copy blocks from host memory to where the model computes, if that is elsewhere. Later steps see them."""
        if self.is_staged:
            for block in blocks:
                self.data[block].copy_(self._host[block])

    def seal_block(self, block: BlockId) -> int:
        """Put a block where others can copy it; the checksum by which they prove the copy."""
        self.download((block,))
        return self.sum_block(block)

    def read_block(self, block: BlockId) -> memoryview:
        """The bytes of a block in host memory, in place."""
        return self._bytes[block * self.block_bytes:(block + 1) * self.block_bytes]

    def write_block(self, block: BlockId, contents: bytes | memoryview) -> None:
        """Fill a block in host memory with what `read_block` gave elsewhere."""
        assert len(contents) == self.block_bytes, f"{len(contents)} bytes are not a block of {self.block_bytes}"
        self._bytes[block * self.block_bytes:(block + 1) * self.block_bytes] = contents

    def sum_block(self, block: BlockId) -> int:
        """XXH3 of a block's whole extent in host memory."""
        return int(xxhash.xxh3_64_intdigest(self.read_block(block)))


def _zeros_on(device: torch.device | str, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    try:
        return torch.zeros(size, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        num_bytes = size[0] * size[1] * dtype.itemsize
        raise ConfigError(f"the block cache needs {num_bytes} bytes on {device}, which it does not have free; "
                          "lower cache_bytes, max_num_seqs or max_model_len") from error
