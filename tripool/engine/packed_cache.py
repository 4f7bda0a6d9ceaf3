"""Packed weights are kept in files, so that the next start maps them instead of reading and packing the checkpoint.

A file holds one layer with all of its experts (`ends` holds what is in no layer), as the model multiplies by it. So it
serves every rank of every instance of a host, whatever experts they have, and as all map the same file, its pages are
in memory once. A rank whose experts do not lie side by side in the file has a copy of them; and so has one, page by
page, of an expert that moves in.

A file appears by being renamed, under a lock that ends with its holder: it is whole or not there, and processes that
start together share the work. It says what it was made from: the checkpoint's files as they were when checked (name,
size, time of change, inode), what was read of them into which place, and how this code packs. If that is not what is
wanted now, the file is made again; so there is never more than one of a layer and form.

It has a checksum of each matrix, and each start checks all that it maps. That reads it into memory, which has to be
anyhow, and takes a small part of the time of packing. So nobody waits for the disk when a file is written: what a crash
of the machine or a bad disk leaves behind costs one more packing. The digests of the checkpoint's tensors, which name
the model, are kept with what was made of them.

A file that is mapped may be removed, but not written. Where none can be written, weights are packed in memory, as
without a folder.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from tripool import __version__
from tripool.engine.checkpoint import Checkpoint
from tripool.engine.memory import mapped_file
from tripool.engine.model.layout import SCALE, WeightSpec
from tripool.engine.model.products import EXPANSION, Packed, packed_ahead
from tripool.engine.ops.float_linear import FloatWeight, ScaledWeight
from tripool.engine.ops.int8_linear import Int8Weight
from tripool.engine.ops.packed import in_slots
from tripool.engine.weights import ALIGNMENT_BYTES, Progress, bytes_of, held_dtype, load_weights

log = logging.getLogger(__name__)

MAGIC = b"tripool packed 1"
HEAD_BYTES = len(MAGIC) + 8 + 16           # with length and digest of the header behind it
PAGE_BYTES = 4096
MOST_VIEWS = 1024                          # that Linux takes in one call
SPARE_BYTES = 1 << 30                      # that stay free on the disk
DTYPES = {str(each).removeprefix("torch."): each for each in (
    torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int32)}

Held = Mapping[str, Sequence[int]]
"""For each stack of experts, by its name without the last part: the expert in each slot, below zero for none."""


class _Unusable(OSError):
    """A file is absent, or of something else."""


class _Damaged(_Unusable):
    """It is not what was written; the text says how."""


@dataclass(slots=True)
class KeptWeights:
    """What of a rank's weights came from files."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    packed: dict[str, Packed] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)   # of the checkpoint's tensors, of all ranks' experts
    num_bytes: int = 0                                      # that were checked

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.packed or f"{name}.{EXPANSION[0]}" in self.packed


class PackedCache:
    """The files of one checkpoint in one form."""

    def __init__(self, root: Path, checkpoint: Checkpoint, plan: Sequence[WeightSpec], dtype: torch.dtype, *, form: str,
                 floats: bool, int8_head: bool = False) -> None:
        """`plan` is that of a rank with all experts in order; what has another `form` lies elsewhere. `floats`: they
        are packed, too, not INT8 alone. `int8_head`: the output head is rounded."""
        path = str(checkpoint.folder.resolve())
        self.folder = root / f"{os.path.basename(path)}-{_name(path)[:8]}" / form
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._floats = floats
        self._int8_head = int8_head
        ends = "ends-int8" if int8_head else "ends"
        self._layers: dict[str, list[WeightSpec]] = {}
        for spec in plan:
            layer = ".".join(spec.name.split(".")[:2]) if spec.name.startswith("layers.") else ends
            self._layers.setdefault(layer, []).append(spec)

    def load(self, held: Held, *, threads: int = 2, progress: Progress | None = None,
             complain: Callable[..., None] = log.warning) -> KeptWeights:
        """Weights of a rank, from files that are there or are now made; what cannot be kept is left out, said once.

        Raises:
            CheckpointError: the checkpoint could not be read, or has changed since it was checked.
        """
        found, missing, damaged = KeptWeights(), list(self._layers), list[str]()
        total = sum(math.prod(spec.shape) for specs in self._layers.values() for spec in specs)
        done = 0

        def took(layer: str) -> None:
            nonlocal done
            missing.remove(layer)
            done += sum(math.prod(spec.shape) for spec in self._layers[layer])
            if progress is not None:
                progress(done, total)

        for layer in list(missing):
            try:
                self._take(layer, held, found, threads)
                took(layer)
            except OSError:
                continue
        if not missing:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check_space(missing)
            for wait in (False, True):              # first what nobody else is making
                for layer in list(missing):
                    with self._locked(layer, wait) as is_ours:
                        if is_ours:
                            self._take_or_make(layer, held, found, threads, damaged)
                            took(layer)
            log.info("packed weights are kept in %s", self.folder)
        except OSError as error:
            complain("packed weights are not kept in %s, so each start packs them again: %s", self.folder,
                     error.strerror or error)
        if damaged:
            log.warning("packed weights were damaged and are packed again: %s", ", ".join(damaged))
        return found

    def _take_or_make(self, layer: str, held: Held, found: KeptWeights, threads: int, damaged: list[str]) -> None:
        try:
            self._take(layer, held, found, threads)        # somebody else may have made it meanwhile
            return
        except _Damaged as error:
            damaged.append(f"{self._path(layer)} {error}")
        except _Unusable:
            pass
        specs = self._layers[layer]
        read = load_weights(self._checkpoint, specs, self._dtype, threads=threads)
        shape = self._checkpoint.shape
        entries = packed_ahead(read.tensors, [spec.name for spec in specs if spec.is_matrix], floats=self._floats,
                               int8_head=self._int8_head, num_heads=shape.num_heads, key_width=shape.qk_nope_head_dim)
        _write(self._path(layer), self._key(layer), entries, read.digests)
        del entries
        self._take(layer, held, found, threads)

    def _path(self, layer: str) -> Path:
        return self.folder / f"{layer}.packed"

    def _key(self, layer: str) -> str:
        """Names what a file is made from, and how."""
        specs, tensors = self._layers[layer], self._checkpoint.tensors
        stored = [tensors[source.tensor] for spec in specs for source in spec.sources]
        scales = [self._checkpoint.scale_of(each) for each in stored]
        return _name(repr((__version__, packing(), self._dtype, self._floats, specs, self._checkpoint.quantisation,
                           [(each.name, each.dtype, each.file.name, each.start, each.identity)
                            for each in (*stored, *scales) if each is not None])))

    @contextmanager
    def _locked(self, layer: str, wait: bool) -> Iterator[bool]:
        """One process at a time makes a file; the kernel lets go of its lock when it ends."""
        lock = os.open(self.folder / f"{layer}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = True
            except BlockingIOError:
                is_ours = False
            yield is_ours
        finally:
            os.close(lock)

    def _check_space(self, layers: Iterable[str]) -> None:
        needed = sum(math.prod(spec.shape) * held_dtype(spec, self._dtype).itemsize
                     for layer in layers if not self._path(layer).exists() for spec in self._layers[layer])
        free = shutil.disk_usage(self.folder).free
        if free < needed + SPARE_BYTES:
            raise OSError(errno.ENOSPC, f"they take {needed >> 20} MiB, and {free >> 20} MiB are free, of which "
                                        f"{SPARE_BYTES >> 20} stay so")

    def _take(self, layer: str, held: Held, found: KeptWeights, threads: int) -> None:
        """Map a file and check what of it this rank has.

        Raises:
            OSError: it cannot be read, or is absent, damaged or made from something else (`_Unusable`).
        """
        mapped, header, start = _open(self._path(layer), self._key(layer))
        data = torch.frombuffer(mapped, dtype=torch.uint8)[start:]
        checks: list[tuple[Tensor, str]] = []
        taken: dict[str, Tensor | Packed] = {}
        for name, entry in header["entries"].items():
            slots = held.get(name.rpartition(".")[0])
            parts = []
            for part in entry["parts"]:
                dtype, offset = DTYPES[part["dtype"]], part["offset"]
                num_bytes = math.prod(part["shape"]) * dtype.itemsize
                tensor = data[offset:offset + num_bytes].view(dtype).view(part["shape"])
                matrices = range(tensor.shape[0]) if slots is None else sorted({each for each in slots if each >= 0})
                checks += [(tensor[i], part["sums"][i]) for i in matrices] if entry["packed"] else (
                    [(tensor, part["sums"][0])])
                parts.append(tensor if slots is None else in_slots(tensor, slots))
            if not entry["packed"]:
                taken[name] = parts[0]
            else:
                num_outputs, num_inputs = entry["packed"]
                made_of = {1: FloatWeight, 2: ScaledWeight, 3: Int8Weight}[len(parts)]
                taken[name] = made_of(parts[0], num_outputs, num_inputs, *parts[1:])
        with ThreadPoolExecutor(max(1, threads)) as pool:
            shares = [checks[first::threads] for first in range(threads)]
            if not all(pool.map(lambda share: all(_sum(tensor) == kept for tensor, kept in share), shares)):
                raise _Damaged("has other contents than were written")
        found.tensors.update({name: each for name, each in taken.items() if isinstance(each, Tensor)})
        found.packed.update({name: each for name, each in taken.items() if not isinstance(each, Tensor)})
        found.digests.update({name: int(digest, 16) for name, digest in header["digests"].items()})
        found.num_bytes += sum(each.nbytes for each, _ in checks)


# --- a file --------------------------------------------------------------------------------------------------------


def _write(path: Path, key: str, entries: Mapping[str, Tensor | Packed], digests: Mapping[str, int]) -> None:
    """Put a file in its place, whole or not at all. The caller is alone in the folder."""
    described, data, end = {}, list[memoryview](), 0
    for name, entry in entries.items():
        is_packed = not isinstance(entry, Tensor)
        rows = []
        for part in entry.parts if is_packed else (entry,):
            part = part.contiguous()
            rows.append({"dtype": str(part.dtype).removeprefix("torch."), "shape": list(part.shape), "offset": end,
                         "sums": [_sum(each) for each in (part if is_packed else (part,))]})
            filled = -part.nbytes % ALIGNMENT_BYTES
            data += [bytes_of(part), memoryview(bytes(filled))]
            end += part.nbytes + filled
        described[name] = {"packed": [entry.num_outputs, entry.num_inputs] if is_packed else [], "parts": rows}
    header = json.dumps({"key": key, "bytes": end, "entries": described,
                         "digests": {name: f"{digest:x}" for name, digest in digests.items()}}).encode()
    unfinished = path.with_suffix(".unfinished")
    try:
        head = MAGIC + len(header).to_bytes(8, "little") + xxhash.xxh3_128(header).digest() + header
        with unfinished.open("wb", buffering=0) as file:
            _write_all(file.fileno(), [memoryview(head.ljust(_data_start(len(header)), b"\0")), *data])
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _write_all(descriptor: int, views: list[memoryview]) -> None:
    """In few calls: the kernel makes large pages of what one call brings, not across calls."""
    while views:
        written = os.writev(descriptor, views[:MOST_VIEWS])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]


def _open(path: Path, key: str) -> tuple[mmap.mmap, dict[str, Any], int]:
    """A file in memory, its header, and where its data begin."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _Unusable from None
    try:
        head, size = os.pread(descriptor, HEAD_BYTES, 0), os.fstat(descriptor).st_size
        length = int.from_bytes(head[len(MAGIC):-16], "little")
        if len(head) < HEAD_BYTES or not head.startswith(MAGIC) or length > size:
            raise _Damaged("is no file of packed weights")
        text = os.pread(descriptor, length, HEAD_BYTES)
        if xxhash.xxh3_128(text).digest() != head[-16:]:
            raise _Damaged("has another header than was written")
        header = json.loads(text)
        if header["key"] != key:
            raise _Unusable
        start = _data_start(length)
        if size != start + header["bytes"]:
            raise _Damaged(f"has {size} bytes, not {start + header['bytes']}")
        return mapped_file(descriptor, size), header, start
    finally:
        os.close(descriptor)


def _data_start(header_bytes: int) -> int:
    return -(-(HEAD_BYTES + header_bytes) // PAGE_BYTES) * PAGE_BYTES


def _sum(tensor: Tensor) -> str:
    return xxhash.xxh3_64(bytes_of(tensor)).hexdigest()


def _name(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"tripool-packed").hexdigest()


@functools.cache
def packing() -> str:
    """Names the order in which matrices are packed, by how it turns out on small ones: with a change of the code it
    changes by itself."""
    numbers = (torch.arange(2 * 38 * 18) * 7919 % 65521 % 256 - 128).view(2, 38, 18).to(torch.int8)
    digest = xxhash.xxh3_128()
    for dtype in (torch.int8, torch.bfloat16, torch.float32):
        tensors = {"a.gate_up": numbers.to(dtype), "a.down": numbers[0].view(2, 18, 19).to(dtype),
                   "b": numbers[0].to(dtype)}
        tensors |= {"attention.latent": numbers[1].to(dtype), "head": numbers[0].to(dtype)}
        if dtype == torch.int8:
            tensors |= {name + SCALE: each.float().sum(-1) for name, each in tensors.items()}
        matrices = [name for name in tensors if not name.endswith(SCALE)]
        for entry in packed_ahead(tensors, matrices, floats=True, int8_head=dtype != torch.int8, num_heads=2,
                                  key_width=10).values():
            for part in entry.parts:
                digest.update(bytes_of(part.contiguous()))
    return digest.hexdigest()
