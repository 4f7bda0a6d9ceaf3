"""Weights from a checked checkpoint into the tensors that the model computes with.

Every byte is read once, by several threads, straight into its final place where the element types agree; else by way
of a small buffer that stays in the processor's cache. The destination is one arena of large pages, because faulting
small pages in costs more than reading. While a piece is still in the cache it is hashed: the fingerprint names the
contents, whatever the files are called and however tensors are dealt out to them, and parts of it add up over ranks.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from tripool.core.errors import CheckpointError
from tripool.core.shape import ModelShape
from tripool.engine.checkpoint import Checkpoint, FileIdentity, StoredTensor
from tripool.engine.memory import large_pages
from tripool.engine.model.layout import SCALE, WeightSpec

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
                 "I8": torch.int8}
BATCH_BYTES = 32 << 20       # read by one thread before it reports: a large model has many small tensors
STRIDE_BYTES = 512 << 10     # read, hashed and converted at a time: fits the processor's second cache
ALIGNMENT_BYTES = 64
MODULUS = 1 << 128


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Tensors by the names of `layout.weight_plan`."""

    tensors: dict[str, Tensor]
    digest: int                  # this rank's part of the fingerprint
    num_bytes: int               # read from files
    seconds: float
    digests: Mapping[str, int] = field(default_factory=dict)      # of each checkpoint tensor that was read


def load_weights(checkpoint: Checkpoint, plan: list[WeightSpec], dtype: torch.dtype, *, device: str = "cpu",
                 threads: int = 2, progress: Progress | None = None) -> LoadedWeights:
    """Read a rank's weights.

    Raises:
        CheckpointError: a file could not be read, or has changed since it was checked.
    """
    start = time.perf_counter()
    tensors = allocate(plan, dtype, device)
    files = _Files()
    pieces = sorted(_pieces(checkpoint, plan, tensors), key=lambda p: (p.stored.file, p.stored.start, p.begin))
    total = sum(piece.num_bytes for piece in pieces)
    read: dict[str, dict[int, bytes]] = {}
    try:
        with ThreadPoolExecutor(max(1, threads), thread_name_prefix="weights") as pool:
            futures = {pool.submit(_read_all, batch, files, checkpoint): batch for batch in _batches(pieces)}
            done = 0
            try:
                for future in as_completed(futures):
                    for piece, digest in zip(futures[future], future.result(), strict=True):
                        read.setdefault(piece.stored.name, {})[piece.begin] = digest
                        done += piece.num_bytes
                    if progress is not None:
                        progress(done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except OSError as error:
        raise CheckpointError(str(checkpoint.folder), [f"{error.filename}: {error.strerror or error}"]) from error
    finally:
        files.close()
    counted = [source.tensor for spec in plan for source in spec.sources if source.counted]
    digests = {name: _tensor_digest(checkpoint.tensors[name], pieces) for name, pieces in read.items()}
    total_digest = sum(digests[name] for name in counted) % MODULUS
    return LoadedWeights(tensors, total_digest, total, time.perf_counter() - start, digests)


def read_again(checkpoint: Checkpoint, plan: list[WeightSpec], dtype: torch.dtype,
               breathe: Callable[[], None]) -> LoadedWeights:
    """Read some tensors while the model computes: by this thread, `breathe` is called every few hundred kilobytes.

    Raises:
        CheckpointError: a file could not be read, or is not the one that was checked.
    """
    start = time.perf_counter()
    tensors = {name: torch.empty(size, dtype=kind) for spec in plan for name, size, kind in _held(spec, dtype)}
    files, landing = _Files(), torch.empty(STRIDE_BYTES, dtype=torch.uint8)
    read: dict[str, dict[int, bytes]] = {}
    pieces = list(_pieces(checkpoint, plan, tensors))
    try:
        for piece in pieces:
            digest = _read(piece, landing, files, checkpoint, breathe)
            read.setdefault(piece.stored.name, {})[piece.begin] = digest
        files.check()
    except OSError as error:
        raise CheckpointError(str(checkpoint.folder), [f"{error.filename}: {error.strerror or error}"]) from error
    finally:
        files.close()
    digests = {name: _tensor_digest(checkpoint.tensors[name], parts) for name, parts in read.items()}
    return LoadedWeights(tensors, sum(digests.values()) % MODULUS, sum(piece.num_bytes for piece in pieces),
                         time.perf_counter() - start, digests)


def dummy_weights(plan: list[WeightSpec], dtype: torch.dtype, *, device: str = "cpu", seed: int = 0) -> LoadedWeights:
    """Random weights to measure with: norms of one, everything else small and repeating."""
    start = time.perf_counter()
    tensors = allocate(plan, dtype, device)
    generator = torch.Generator().manual_seed(seed)
    noise = (torch.randn(1 << 20, generator=generator) * 0.02).to(device)
    for spec in plan:
        flat = tensors[spec.name].view(-1)
        if spec.dtype == "int8":
            flat.copy_(torch.randint(-127, 128, (noise.numel(),), generator=generator).repeat(
                -(-flat.numel() // noise.numel()))[:flat.numel()])
            tensors[spec.name + SCALE].fill_(0.02 / 64)
            continue
        if len(spec.shape) == 1 and not spec.name.endswith("bias"):
            flat.fill_(1)
            continue
        for at in range(0, flat.numel(), noise.numel()):
            flat[at:at + noise.numel()].copy_(noise[:min(noise.numel(), flat.numel() - at)])
    return LoadedWeights(tensors, seed, 0, time.perf_counter() - start)


def fingerprint(shape: ModelShape, digests: Iterable[int]) -> str:
    """Names a model: its shape and the contents of all its weights, from the digests of all ranks."""
    text = f"{shape!r} {sum(digests) % MODULUS:032x}"
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"tripool-weights").hexdigest()


def allocate(plan: Iterable[WeightSpec], dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Empty tensors of a plan; on the host in arenas of large pages.

    Matrices of one layer share an arena, so that their memory is free when the last of them has been packed anew; all
    that stays as it was read has an arena of its own.
    """
    plan = list(plan)
    if torch.device(device).type != "cpu":
        return {name: torch.empty(size, dtype=kind, device=device) for spec in plan
                for name, size, kind in _held(spec, dtype)}
    arenas: dict[str, list[Held]] = {}
    for spec in plan:
        first, *rest = _held(spec, dtype)
        owner = ".".join(spec.name.split(".")[:2]) if spec.is_matrix else ""
        arenas.setdefault(owner, []).append(first)
        arenas.setdefault("", []).extend(rest)
    return {name: tensor for held in arenas.values() for name, tensor in _arena(held).items()}


def _arena(held: Sequence[Held]) -> dict[str, Tensor]:
    places, end = [], 0
    for _, size, kind in held:
        places.append(end)
        end += -(-math.prod(size) * kind.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    arena = large_pages(end)
    return {name: torch.frombuffer(arena, dtype=kind, count=math.prod(size), offset=place).view(size)
            for (name, size, kind), place in zip(held, places, strict=True)}


Held = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and element type of a tensor in memory."""


def _held(spec: WeightSpec, dtype: torch.dtype) -> Iterator[Held]:
    """What a tensor of the plan takes: itself, and in INT8 its scales."""
    yield spec.name, spec.shape, held_dtype(spec, dtype)
    if spec.dtype == "int8":
        yield spec.name + SCALE, spec.shape[:-1], torch.float32


def held_dtype(spec: WeightSpec, dtype: torch.dtype) -> torch.dtype:
    """The element type of a tensor, where `dtype` is computed in."""
    return {"model": dtype, "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}[spec.dtype]


# --- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a stored tensor and where it goes."""

    stored: StoredTensor
    begin: int                   # first byte of the piece in the tensor
    num_bytes: int
    target: Tensor               # flat, the elements of this piece
    scale: StoredTensor | None   # of FP8 and INT8: then the piece is the whole tensor
    scale_target: Tensor | None = None       # where they go if numbers are to stay as they are


def _pieces(checkpoint: Checkpoint, plan: Iterable[WeightSpec],
            tensors: Mapping[str, Tensor]) -> Iterator[_Piece]:
    for spec in plan:
        for source in spec.sources:
            stored = checkpoint.tensors[source.tensor]
            target = tensors[spec.name][source.into].view(-1)
            scale = checkpoint.scale_of(stored)
            if scale is not None:
                kept = tensors[spec.name + SCALE][source.into] if spec.dtype == "int8" else None
                yield _Piece(stored, 0, stored.num_bytes, target, scale, kept)
                continue
            item_bytes = STORED_DTYPES[stored.dtype].itemsize
            for begin in range(0, stored.num_bytes, BATCH_BYTES):
                size = min(BATCH_BYTES, stored.num_bytes - begin)
                first = begin // item_bytes
                yield _Piece(stored, begin, size, target[first:first + size // item_bytes], None)


def _batches(pieces: Iterable[_Piece]) -> list[list[_Piece]]:
    """Neighbours in the files together, each batch about as large as the largest piece."""
    batches: list[list[_Piece]] = []
    room = 0
    for piece in pieces:
        if piece.num_bytes > room:
            batches.append([])
            room = BATCH_BYTES
        batches[-1].append(piece)
        room -= piece.num_bytes
    return batches


class _Files:
    """Open descriptors, one per shard, shared by all threads."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}
        self._checked: dict[str, FileIdentity] = {}
        self._lock = threading.Lock()

    def read_into(self, stored: StoredTensor, begin: int, view: memoryview) -> None:
        """Fill a view with the bytes of a stored tensor from `begin` on."""
        name = str(stored.file)
        with self._lock:
            if name not in self._descriptors:
                self._descriptors[name] = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
                self._checked[name] = stored.identity
            descriptor = self._descriptors[name]
        filled = 0
        while filled < len(view):
            num = os.preadv(descriptor, [view[filled:]], stored.start + begin + filled)
            if not num:
                raise OSError(0, f"ended within {stored.name}, it has changed while loading", name)
            filled += num

    def check(self) -> None:
        """After reading: all that was read came from the files that were checked, and their names still mean them."""
        for name, descriptor in self._descriptors.items():
            for status in (os.fstat(descriptor), os.stat(name)):
                if FileIdentity.of(status) != self._checked[name]:
                    raise OSError(0, "is not the file that was checked at the start, it has been written or replaced",
                                  name)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def _read_all(pieces: Iterable[_Piece], files: _Files, checkpoint: Checkpoint) -> list[bytes]:
    landing = torch.empty(STRIDE_BYTES, dtype=torch.uint8)
    return [_read(piece, landing, files, checkpoint) for piece in pieces]


def _read(piece: _Piece, landing: Tensor, files: _Files, checkpoint: Checkpoint,
          breathe: Callable[[], None] = lambda: None) -> bytes:
    """Read one piece to its place, if need be by way of `landing`; the digest of its stored bytes."""
    if piece.scale is not None:
        return _read_scaled(piece, piece.scale, files, checkpoint, breathe)
    dtype = STORED_DTYPES[piece.stored.dtype]
    in_place = piece.target.dtype == dtype and piece.target.device.type == "cpu"
    view = bytes_of(piece.target if in_place else landing)
    digest = xxhash.xxh3_128()
    for at in range(0, piece.num_bytes, STRIDE_BYTES):
        size = min(STRIDE_BYTES, piece.num_bytes - at)
        part = view[at:at + size] if in_place else view[:size]
        files.read_into(piece.stored, piece.begin + at, part)
        digest.update(part)
        if not in_place:
            first, count = at // dtype.itemsize, size // dtype.itemsize
            piece.target[first:first + count].copy_(landing.view(dtype)[:count])
        breathe()
    return bytes(digest.digest())


def _read_scaled(piece: _Piece, scale: StoredTensor, files: _Files, checkpoint: Checkpoint,
                 breathe: Callable[[], None]) -> bytes:
    """E4M3 numbers times the scale of their block, or INT8 numbers times that of their row, or with scales beside them.

    Raises:
        CheckpointError: a scale is not a number that can be multiplied by.
    """
    rows, columns = piece.stored.shape
    target = piece.target.view(rows, columns)
    widens = piece.scale_target is None
    quantised = torch.empty((rows, columns), dtype=STORED_DTYPES[piece.stored.dtype]) if widens else target
    scales = torch.empty(scale.shape, dtype=STORED_DTYPES[scale.dtype])
    digest = xxhash.xxh3_128()
    for stored, landing in ((piece.stored, quantised), (scale, scales)):
        view = bytes_of(landing)
        for at in range(0, len(view), STRIDE_BYTES):
            part = view[at:at + STRIDE_BYTES]
            files.read_into(stored, at, part)
            digest.update(part)
            breathe()
    if not scales.isfinite().all():
        raise CheckpointError(str(checkpoint.folder), [f"{scale.file.name}: {scale.name} is not finite everywhere"])
    if piece.scale_target is not None:
        piece.scale_target.copy_(scales.view(-1))
        return bytes(digest.digest())
    high, wide = checkpoint.quantisation.scale_tile(piece.stored.dtype, columns)
    stride = high if high > 1 else max(1, STRIDE_BYTES // columns)
    for first in range(0, rows, stride):
        part_RC = quantised[first:first + stride].float()
        scale_RC = scales[first // high:-(-(first + part_RC.shape[0]) // high)].float()
        if wide < columns:
            scale_RC = scale_RC.repeat_interleave(wide, 1)[:, :columns]
        target[first:first + stride].copy_(part_RC * scale_RC)
        breathe()
    return bytes(digest.digest())


def bytes_of(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _tensor_digest(stored: StoredTensor, pieces: Mapping[int, bytes]) -> int:
    """A number for a tensor's name, type, shape and contents; the numbers of all tensors are summed in any order."""
    digest = hashlib.blake2b(f"{stored.name} {stored.dtype} {stored.shape}".encode(), digest_size=16,
                             person=b"tripool-tensor")
    for begin in sorted(pieces):
        digest.update(pieces[begin])
    return int.from_bytes(digest.digest(), "little")
