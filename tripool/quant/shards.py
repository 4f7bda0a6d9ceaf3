"""Files of the output: laid out before their contents are known, filled piece by piece, whole or not there.

A file is written under another name, made durable, and gets its own name last, together with a note of its contents'
SHA-256. After an interruption a file with its note is as good as written; anything else is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripool.engine.checkpoint import ITEM_BYTES
from tripool.quant.units import Planned, Unit


@dataclass(frozen=True, slots=True)
class Shard:
    """One file and the pieces of the model in it."""

    file: str
    units: tuple[Unit, ...]

    @property
    def planned(self) -> list[Planned]:
        """Its tensors; wide elements first, so that all are aligned."""
        planned = [each for unit in self.units for each in unit.planned]
        return sorted(planned, key=lambda each: -ITEM_BYTES[each.dtype])

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.planned)


def shards_of(units: Sequence[Unit], shard_bytes: int) -> list[Shard]:
    """Pieces dealt out in order to files of at most so many bytes, but at least one piece each."""
    groups: list[list[Unit]] = [[]]
    room = shard_bytes
    for unit in units:
        if groups[-1] and unit.written_bytes > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(unit)
        room -= unit.written_bytes
    if len(groups) == 1:
        return [Shard("model.safetensors", tuple(groups[0]))]
    return [Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(group))
            for number, group in enumerate(groups, start=1)]


class ShardFile:
    """A file that is being filled."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        self.path = folder / shard.file
        self._part = folder / f"{shard.file}.part"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for planned in shard.planned:
            header[planned.name] = {"dtype": planned.dtype, "shape": list(planned.shape),
                                    "data_offsets": [end, end + planned.num_bytes]}
            self._places[planned.name] = (end, planned.num_bytes)
            end += planned.num_bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(self._descriptor, 0, self._start + end)
            self._write(0, memoryview(len(text).to_bytes(8, "little") + text))
        except OSError:
            self.close()
            raise
        self._unfilled = dict(self._places)

    def put(self, name: str, parts: Iterable[memoryview]) -> None:
        """Fill a tensor, from its first byte to its last."""
        at, num_bytes = self._unfilled.pop(name)
        begun = at
        for part in parts:
            self._write(self._start + at, part)
            at += len(part)
        assert at - begun == num_bytes, f"{name} was planned with {num_bytes} bytes and has {at - begun}"

    def finish(self) -> str:
        """Make it durable and give it its name; the SHA-256 of its contents."""
        assert not self._unfilled, f"not written: {', '.join(self._unfilled)}"
        os.fsync(self._descriptor)
        self.close()
        with self._part.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._part.rename(self.path)
        return digest

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _write(self, at: int, part: memoryview) -> None:
        done = 0
        while done < len(part):
            done += os.pwrite(self._descriptor, part[done:], at + done)


def write_json(path: Path, value: Any) -> None:
    """A small file, whole or not there."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def sync_folder(folder: Path) -> None:
    """Names are durable too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
