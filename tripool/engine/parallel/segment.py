"""The memory through which the ranks of one host exchange rows: its layout, its making, its mapping.

One sealed memfd per instance, handed to each rank as a descriptor. For every pair (destination, source) it has a
region for dispatch and one for combine, each twice: exchanges alternate, so that a fast rank never overwrites what a
slow one still reads. A region has one writer, which makes a late or stopped rank harmless: what it still writes lies
where nobody looks. Sizes follow the paper's formula (4.2.1), with room for `capacity` tokens of a rank at a time.

    header                   magic, layout, highest aborted epoch + 1
    lines [rank]             bell and waiting (a futex), joined epoch
    flags [kind, parity, destination, source]        tag << 24 | rows written; rows, pairs and rounds announced
    dispatch [parity, destination, source]           packets: row, then scale and metadata, in steps of 512 bytes
    combine [parity, destination, source]            rows of results

It knows layout and bytes. Who waits for what is in `csrc/exchange.cpp` and, slowly, in `definition`.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from tripool.core.deployment import InstanceConfig
from tripool.core.errors import ConfigError
from tripool.core.placement import Placement
from tripool.core.shape import ModelShape

HEADER = struct.Struct("<16s48x")
MAGIC = b"tripool ranks 1\0"
ABORT_OFFSET = 64
LAYOUT_OFFSET = 128
LAYOUT_BYTES = 32
PAGE = 4096
CACHE_LINE = 64
PACKET_STEP = 512                       # the paper pads scale and metadata to 512 bytes: 7,168 + 512 = 7,680
TAIL_BYTES = 16                         # scale, source rank, token, number of pairs; then 8 bytes for each pair
MAX_RANKS = 64
DEFAULT_CAPACITY = 256                  # decode steps are smaller, and a prefill's go in rounds
MAX_CAPACITY = 1 << 20                  # of the 24 bits in which rows are counted

LINE = np.dtype({"names": ["bell", "waiting", "joined"], "formats": ["<u4", "<u4", "<u4"], "offsets": [0, 4, 64],
                 "itemsize": 2 * CACHE_LINE})
FLAG = np.dtype({"names": ["word", "rows", "pairs", "rounds"], "formats": ["<u8", "<u4", "<u4", "<u4"],
                 "offsets": [0, 8, 12, 16], "itemsize": CACHE_LINE})

FORMATS = ("float32", "bfloat16", "int8")      # of elements, in the order of `csrc/exchange.h`
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}

WORDS = ("base", "rank", "epoch", "live", "spin", "num_ranks", "capacity", "num_picks", "width", "row_format",
         "row_bytes", "tail_offset", "packet_bytes", "result_bytes", "result_stride", "fan", "lines_offset",
         "flags_offset", "dispatch_offset", "combine_offset", "dispatch_region", "combine_region", "sleeps", "wakes",
         "waited_ns", "sent_bytes")
"""A rank's context: the integers that every native call reads, in the order of `csrc/exchange.h`."""

COUNTERS = WORDS[-4:]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def buffer_bytes(num_ranks: int, capacity: int, num_picks: int, num_slots: int, packet_bytes: int,
                 result_bytes: int) -> tuple[int, int]:
    """What one rank receives into, for dispatch and for combine, before doubling: the paper's formula (4.2.1).

    Ranks x tokens x bytes. A token goes once to a rank, however many of its experts are there (the paper sends it to
    each expert; with one expert on a die that is the same), and comes back once from each expert.
    """
    return (num_ranks * capacity * packet_bytes,
            num_ranks * capacity * min(num_picks, num_slots) * result_bytes)


def packet_size(width: int, row_format: str, num_picks: int) -> int:
    """Bytes of a row with its scale and metadata."""
    return _up(_up(width * ITEM_BYTES[row_format], 16) + TAIL_BYTES + 8 * num_picks, PACKET_STEP)


@dataclass(frozen=True)
class Geometry:
    """What the ranks of an instance have to agree on."""

    slots_of_rank: tuple[int, ...]       # expert slots of each rank, which may differ
    capacity: int                        # tokens that a rank sends at a time; larger batches go in rounds
    num_picks: int
    width: int
    row_format: str = "int8"             # of what is dispatched: int8 with a scale, or rows as they are
    result_format: str = "bfloat16"      # of what comes back

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= MAX_RANKS:
            raise ConfigError(f"a direct exchange takes 1 to {MAX_RANKS} ranks, not {self.num_ranks}")
        if not 1 <= self.capacity <= MAX_CAPACITY:
            raise ConfigError(f"the exchange's capacity is {self.capacity} tokens; it takes 1 to {MAX_CAPACITY}")
        if min(self.slots_of_rank) < 0 or self.num_slots < 1:
            raise ConfigError(f"{self.slots_of_rank} are no numbers of expert slots")
        if self.row_format not in FORMATS or self.result_format not in ("float32", "bfloat16"):
            raise ConfigError(f"rows of {self.row_format} and results of {self.result_format} cannot be exchanged")
        assert self.num_picks > 0 and self.width > 0, "an exchange moves something"

    @property
    def num_ranks(self) -> int:
        return len(self.slots_of_rank)

    @property
    def num_slots(self) -> int:
        return sum(self.slots_of_rank)

    @property
    def first_slot(self) -> tuple[int, ...]:
        """Rank r owns slots first_slot[r] to first_slot[r + 1]."""
        return tuple(accumulate(self.slots_of_rank, initial=0))

    @property
    def fan(self) -> int:
        """The most results that one rank returns for one token."""
        return min(self.num_picks, max(self.slots_of_rank))

    @property
    def packet_bytes(self) -> int:
        return packet_size(self.width, self.row_format, self.num_picks)

    @property
    def result_bytes(self) -> int:
        return _up(self.width * ITEM_BYTES[self.result_format], CACHE_LINE)

    @property
    def receive_bytes(self) -> tuple[int, int]:
        """Dispatch and combine buffer of one rank, before doubling."""
        return buffer_bytes(self.num_ranks, self.capacity, self.num_picks, max(self.slots_of_rank),
                            self.packet_bytes, self.result_bytes)

    @property
    def total_bytes(self) -> int:
        """The whole segment."""
        return self.layout["total"]

    @cached_property
    def layout(self) -> dict[str, int]:
        """The words of a context that follow from the geometry, and the total."""
        ranks, row_bytes = self.num_ranks, self.width * ITEM_BYTES[self.row_format]
        dispatch_region = self.capacity * self.packet_bytes
        combine_region = self.capacity * self.fan * self.result_bytes
        lines = PAGE
        flags = lines + ranks * LINE.itemsize
        dispatch = _up(flags + 4 * ranks * ranks * FLAG.itemsize, PAGE)
        combine = _up(dispatch + 2 * ranks * ranks * dispatch_region, PAGE)
        return dict(num_ranks=ranks, capacity=self.capacity, num_picks=self.num_picks, width=self.width,
                    row_format=FORMATS.index(self.row_format), row_bytes=row_bytes,
                    tail_offset=_up(row_bytes, 16), packet_bytes=self.packet_bytes,
                    result_bytes=self.width * ITEM_BYTES[self.result_format], result_stride=self.result_bytes,
                    fan=self.fan, lines_offset=lines, flags_offset=flags, dispatch_offset=dispatch,
                    combine_offset=combine, dispatch_region=dispatch_region, combine_region=combine_region,
                    total=_up(combine + 2 * ranks * ranks * combine_region, PAGE))

    @property
    def signature(self) -> bytes:
        """What stands in the header, so that a rank of another mind is refused."""
        text = (f"{self.capacity} {self.num_picks} {self.width} {self.row_format} {self.result_format} "
                + " ".join(map(str, self.slots_of_rank))).encode()
        return hashlib.sha256(text).digest()


def exchange_geometry(shape: ModelShape, config: InstanceConfig, placement: Placement,
                      dtype: str) -> Geometry:
    """What the ranks of an instance agree on, from its model, its settings, its expert map and its element type.

    Raises:
        ConfigError: ranks or tokens are more than an exchange takes.
    """
    largest = config.max_num_batched_tokens + config.most_decode_tokens
    capacity = config.exchange_tokens or min(largest, max(DEFAULT_CAPACITY, config.most_decode_tokens))
    kind = "bfloat16" if dtype == "bfloat16" else "float32"
    return Geometry(
        slots_of_rank=placement.slots_per_rank, capacity=capacity,
        num_picks=shape.num_experts_per_token + placement.num_experts - shape.num_routed_experts,
        width=shape.hidden_size, row_format="int8" if config.exchange_rows == "int8" else kind, result_format=kind)


def create_segment(geometry: Geometry, free_bytes: int, name: str = "ranks") -> int:
    """A new memfd for an instance, all of it reserved, that can neither shrink nor grow; its descriptor.

    Raises:
        ConfigError: it does not fit into `free_bytes`, or the machine does not give it.
    """
    total = geometry.total_bytes
    remedy = "lower the exchange's capacity or the number of ranks"
    if total > free_bytes:              # asked first: the kernel would take all there is before it says no
        raise ConfigError(f"the exchange needs {total} bytes of shared memory and this machine has {free_bytes} free; "
                          + remedy)
    fd = os.memfd_create(f"tripool-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, total)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"the exchange needs {total} bytes of shared memory, which this machine does not give "
                          f"({error.strerror}); {remedy}") from error
    os.pwrite(fd, HEADER.pack(MAGIC), 0)
    os.pwrite(fd, geometry.signature, LAYOUT_OFFSET)
    return fd


class Segment:
    """A mapping of an instance's segment. It lasts as long as this object and what was made of it."""

    def __init__(self, fd: int, geometry: Geometry) -> None:
        """Map it, pre-faulted; the descriptor stays the caller's.

        Raises:
            ConfigError: it is of another geometry or another version.
        """
        size = os.fstat(fd).st_size
        if size != geometry.total_bytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ConfigError(f"the exchange's memory has {size} bytes, not the {geometry.total_bytes} that this rank "
                              "expects, or may still shrink: the ranks do not agree")
        self.geometry = geometry
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.memory: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        if (bytes(self.memory[:len(MAGIC)]) != MAGIC
                or bytes(self.memory[LAYOUT_OFFSET:LAYOUT_OFFSET + LAYOUT_BYTES]) != geometry.signature):
            raise ConfigError("the exchange's memory was laid out by another version or for other experts: "
                              "the ranks do not agree")
        layout, ranks = geometry.layout, geometry.num_ranks
        self.aborted = self._view(ABORT_OFFSET, 4).view("<u4")
        self.lines = self._view(layout["lines_offset"], ranks * LINE.itemsize).view(LINE)
        self.flags = self._view(layout["flags_offset"], 4 * ranks * ranks * FLAG.itemsize).view(FLAG).reshape(
            2, 2, ranks, ranks)
        self.dispatch = self._view(layout["dispatch_offset"], 2 * ranks * ranks * layout["dispatch_region"]).reshape(
            2, ranks, ranks, geometry.capacity, geometry.packet_bytes)
        self.combine = self._view(layout["combine_offset"], 2 * ranks * ranks * layout["combine_region"]).reshape(
            2, ranks, ranks, geometry.capacity * geometry.fan, geometry.result_bytes)

    def _view(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        return self.memory[offset:offset + num_bytes]


class Context:
    """One rank's view of the segment, and the words that native calls read."""

    def __init__(self, segment: Segment, rank: int, spin: int) -> None:
        assert 0 <= rank < segment.geometry.num_ranks, f"there is no rank {rank}"
        self.segment = segment
        self.geometry = segment.geometry
        self.rank = rank
        self.words: NDArray[np.int64] = np.zeros(len(WORDS), np.int64)
        self.address = self.words.ctypes.data
        layout = segment.geometry.layout
        values = dict(layout, base=segment.memory.ctypes.data, rank=rank, spin=spin)
        self.words[:] = [values.get(name, 0) for name in WORDS]

        self.enter(0, range(segment.geometry.num_ranks))

    def enter(self, epoch: int, live: Iterable[int]) -> None:
        """Be in an epoch, with the ranks that take part in it, this one among them."""
        self.epoch = epoch
        self.live = sorted(live)
        self.words[WORDS.index("epoch")] = epoch
        self.words[WORDS.index("live")] = np.uint64(sum(1 << rank for rank in self.live)).astype(np.int64)

    @property
    def is_aborted(self) -> bool:
        return int(self.segment.aborted[0]) > self.epoch

    @property
    def counted(self) -> dict[str, int]:
        """Sleeps and wakes of this rank, nanoseconds that it waited for others, and bytes that it wrote to others."""
        return dict(zip(COUNTERS, self.words[-len(COUNTERS):].tolist(), strict=True))

    def count(self, name: str, more: int) -> None:
        """Add to a counter (native calls do so themselves)."""
        self.words[WORDS.index(name)] += more


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
