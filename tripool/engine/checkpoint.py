"""What a model folder holds, checked in full before a byte of weights is read or allocated.

Every shard's header is held against its file, the index against the shards, and the tensors against what the model
needs; all problems are collected and raised together, each naming its file and tensor. Safetensors only: nothing in
a folder is executed. The checks know names, shapes and sizes, and read no weights (but for a checksum list).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripool.core.errors import CheckpointError, ConfigError
from tripool.core.shape import ModelShape, model_shape
from tripool.engine.model.layout import Source, shared_tensors, weight_plan
from tripool.engine.quantisation import SCALE_SUFFIXES, Quantisation, read_quantisation

INDEX_FILE = "model.safetensors.index.json"
CHECKSUM_FILE = "checksums.json"          # {"model-00001-of-00002.safetensors": "sha256 in hex", ...}
LARGEST_HEADER_BYTES = 100_000_000        # the limit of the safetensors format
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2,
              "I8": 1, "U8": 1, "U16": 2, "U32": 4, "U64": 8, "BOOL": 1}
READABLE = ("BF16", "F16", "F32", "F8_E4M3", "I8")
MOST_NAMED = 8                            # names in one line of a message; the rest is counted


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """By which a file is known to be the one that was checked."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes are."""

    name: str
    file: Path
    dtype: str                            # as the format spells it: BF16, F16, F32, F8_E4M3, ...
    shape: tuple[int, ...]
    start: int                            # offset in the file
    num_bytes: int
    identity: FileIdentity                # of the file, when it was checked


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that has passed every check."""

    folder: Path
    config: Mapping[str, Any]
    shape: ModelShape
    tensors: Mapping[str, StoredTensor]
    quantisation: Quantisation            # as the configuration states it
    warnings: tuple[str, ...]
    notes: tuple[str, ...]                # what is as it may be, but not always is

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of each stored element type."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.dtype] += tensor.num_bytes
        return dict(sorted(counts.items()))

    def dtype_of(self, tensor: str) -> str:
        """The element type in which a tensor is stored."""
        return self.tensors[tensor].dtype

    def scale_of(self, stored: StoredTensor) -> StoredTensor | None:
        """What the numbers of a tensor are to be multiplied by; None if they are the weights themselves."""
        suffix = SCALE_SUFFIXES.get(stored.dtype)
        return self.tensors[stored.name + suffix] if suffix else None

    @property
    def dtype(self) -> str:
        """The element type to compute in unless told otherwise: the configuration's, bfloat16 for quantised weights."""
        named = str(self.config.get("torch_dtype") or self.config.get("dtype") or "bfloat16").removeprefix("torch.")
        return named if named in ("float32", "bfloat16", "float16") else "bfloat16"


def describe_checkpoint(folder: Path) -> Checkpoint:
    """What a folder holds; nothing is allocated, and checksums are not computed.

    Raises:
        CheckpointError: with every problem found.
    """
    return open_checkpoint(folder, verify_checksums=False)


def open_checkpoint(folder: Path, *, verify_checksums: bool = True, threads: int = 2) -> Checkpoint:
    """Check a folder in full. A checksum list is verified where there is one.

    Raises:
        CheckpointError: with every problem found.
    """
    if not folder.is_dir():
        raise CheckpointError(str(folder), ["there is no such folder"])
    problems: list[str] = []
    warnings: list[str] = []
    notes: list[str] = []
    config = read_json(folder / "config.json", problems)
    shape, quantisation = None, None
    try:
        if config is not None:
            shape = model_shape(config)
            quantisation = read_quantisation(config)
    except (ConfigError, TypeError, ValueError) as error:
        problems.append(f"config.json: {error}")
    tensors = _read_shards(folder, problems, warnings)
    if shape is not None and quantisation is not None:
        shape = _without_absent_mtp(shape, tensors, warnings)
        _check_inventory(shape, tensors, quantisation, problems, warnings, notes)
    if verify_checksums and (folder / CHECKSUM_FILE).exists():
        _verify_checksums(folder, threads, problems)
    if problems or shape is None or quantisation is None or config is None:
        raise CheckpointError(str(folder), problems)
    return Checkpoint(folder, config, shape, tensors, quantisation, tuple(warnings), tuple(notes))


def read_json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """A JSON object from a file, or None and a problem."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None
    if not isinstance(value, dict):
        problems.append(f"{path.name} is not a JSON object")
        return None
    return value


# --- files ---------------------------------------------------------------------------------------------------------


def _read_shards(folder: Path, problems: list[str], warnings: list[str]) -> dict[str, StoredTensor]:
    """Every tensor of the folder, from the shards that the index names, or from all of them without an index."""
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    index: dict[str, str] | None = None
    if (folder / INDEX_FILE).exists():
        index = _read_index(folder / INDEX_FILE, problems)
    named = present if index is None else sorted(set(index.values()))
    if not named:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        hint = f"; {_some(pickles)} would have to be converted, pickled weights are never opened" if pickles else ""
        problems.append(f"there is no .safetensors file{hint}")
    contents: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted({*named, *present}):
        if name in present:
            contents[name] = _read_header(folder / name, problems)
        else:
            lost = sorted(tensor for tensor, shard in (index or {}).items() if shard == name)
            problems.append(f"{name} is missing, which the index names for {len(lost)} tensor(s): {_some(lost)}")
    return _join_shards(contents, index, problems, warnings)


def _read_index(path: Path, problems: list[str]) -> dict[str, str] | None:
    content = read_json(path, problems)
    if content is None:
        return None
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) and name == os.path.basename(name) for name in weight_map.values()):
        problems.append(f"{path.name} has no weight_map from tensors to files of this folder")
        return None
    return weight_map


def _join_shards(contents: Mapping[str, dict[str, StoredTensor]], index: dict[str, str] | None, problems: list[str],
                 warnings: list[str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    if index is None:
        for shard, stored in contents.items():
            for name in sorted(stored.keys() & tensors.keys()):
                problems.append(f"{shard}: {name} is in {tensors[name].file.name} too")
            tensors.update(stored)
        return tensors
    for name, shard in index.items():
        if shard not in contents:
            continue                                  # said already: the file is missing
        if name in contents[shard]:
            tensors[name] = contents[shard][name]
        else:
            problems.append(f"{shard}: {name} is not in this file, though the index says so")
    for shard, stored in contents.items():
        unnamed = sorted(stored.keys() - index.keys())
        if unnamed and shard in index.values():
            warnings.append(f"{shard}: {len(unnamed)} tensor(s) that the index does not name: {_some(unnamed)}")
        elif unnamed:
            problems.append(f"{shard} is not in the index, but holds {len(unnamed)} tensor(s) that no other "
                            f"file has: {_some(unnamed)}")
        elif shard not in index.values():
            warnings.append(f"{shard} is not in the index and is ignored")
    return tensors


def _read_header(path: Path, problems: list[str]) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, held against the file's size."""
    try:
        with path.open("rb") as file:
            identity = FileIdentity.of(os.fstat(file.fileno()))
            size = identity.size
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, LARGEST_HEADER_BYTES):
                problems.append(f"{path.name} is truncated: its header does not fit into {size} bytes")
                return {}
            header = json.loads(file.read(header_bytes))
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} has no readable header: {error}")
        return {}
    if not isinstance(header, dict):
        problems.append(f"{path.name} has a header that is not a JSON object")
        return {}
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        try:
            tensors[name] = _stored(name, path, entry, 8 + header_bytes, identity)
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"{path.name}: {name} has a malformed entry: {error}")
    _check_extents(path, list(tensors.values()), 8 + header_bytes, size, problems)
    return tensors


def _stored(name: str, path: Path, entry: Mapping[str, Any], data_start: int, identity: FileIdentity) -> StoredTensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("its shape and offsets are not whole numbers")
    expected = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
    if dtype in ITEM_BYTES and end - begin != expected:
        raise ValueError(f"{dtype} of shape {list(shape)} takes {expected} bytes, but the offsets span {end - begin}")
    return StoredTensor(name, path, dtype, shape, data_start + begin, end - begin, identity)


def _check_extents(path: Path, tensors: list[StoredTensor], data_start: int, size: int, problems: list[str]) -> None:
    cut = sorted(tensor.name for tensor in tensors if tensor.start + tensor.num_bytes > size)
    end, last = data_start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.num_bytes)):
        if tensor.start < end:
            problems.append(f"{path.name}: {tensor.name} overlaps {last}")
        elif tensor.start > end:
            problems.append(f"{path.name}: {tensor.start - end} bytes between {last} and {tensor.name} are no tensor's")
        end, last = max(end, tensor.start + tensor.num_bytes), tensor.name
    if cut:
        problems.append(f"{path.name} is truncated: it has {size} of {end} bytes; cut off are {_some(cut)}")
    elif size > end:
        problems.append(f"{path.name} has {size - end} bytes after its last tensor, {last}")


# --- tensors -------------------------------------------------------------------------------------------------------


def _without_absent_mtp(shape: ModelShape, tensors: Mapping[str, StoredTensor], warnings: list[str]) -> ModelShape:
    """A checkpoint saved without its MTP layers still names them in its configuration; it is served without them."""
    layers = range(shape.num_layers, shape.num_cached_layers)
    if not layers or any(name.startswith(f"model.layers.{layer}.") for layer in layers for name in tensors):
        return shape
    warnings.append(f"config.json names {len(layers)} MTP layer(s), but no tensor of them is there: no drafting")
    return dataclasses.replace(shape, num_mtp_layers=0)


def _check_inventory(shape: ModelShape, tensors: Mapping[str, StoredTensor], quantisation: Quantisation,
                     problems: list[str], warnings: list[str], notes: list[str]) -> None:
    needed = [source for spec in weight_plan(shape) for source in spec.sources]
    missing = [source.tensor for source in needed if source.tensor not in tensors]
    if missing:
        problems.append(f"{len(missing)} tensor(s) are missing: {_some(missing)}")
    known = {source.tensor for source in needed}
    shared = shared_tensors(shape)
    present = [source for source in [*needed, *shared] if source.tensor in tensors]
    for source in present:
        known.add(source.tensor)
        _check_tensor(source, tensors, problems)
        _check_scales(source, tensors, quantisation, known, problems)
    _check_method(present, tensors, quantisation, problems)
    absent = [source.tensor for source in shared if source.tensor not in tensors]
    if absent:
        notes.append(f"{_some(absent)}: not stored, shared with the main embedding and head")
    extra = sorted(name for name in tensors if name not in known)
    by_file: dict[str, list[str]] = {}
    for name in extra:
        by_file.setdefault(tensors[name].file.name, []).append(name)
    for file, names in by_file.items():
        warnings.append(f"{file}: {len(names)} tensor(s) that the model does not need: {_some(names)}")


def _check_tensor(source: Source, tensors: Mapping[str, StoredTensor], problems: list[str]) -> None:
    stored = tensors[source.tensor]
    where = f"{stored.file.name}: {source.tensor}"
    if stored.shape != source.shape:
        problems.append(f"{where} has shape {list(stored.shape)}, the configuration needs {list(source.shape)}")
    if stored.dtype not in READABLE:
        problems.append(f"{where} has element type {stored.dtype}; readable are {', '.join(READABLE)}")


def _check_scales(source: Source, tensors: Mapping[str, StoredTensor], quantisation: Quantisation, known: set[str],
                  problems: list[str]) -> None:
    stored = tensors[source.tensor]
    where = f"{stored.file.name}: {source.tensor}"
    suffix = SCALE_SUFFIXES.get(stored.dtype)
    others = [source.tensor + each for each in SCALE_SUFFIXES.values() if each != suffix]
    for name in others:
        if name in tensors:
            known.add(name)
            problems.append(f"{tensors[name].file.name}: {name} are scales, but {source.tensor} is {stored.dtype} and "
                            "has none: the folder is quantised by halves")
    if suffix is None:
        return
    scale_name = source.tensor + suffix
    known.add(scale_name)
    kind = quantisation.kind_of(stored.dtype)
    scale = tensors.get(scale_name)
    if len(source.shape) != 2:
        problems.append(f"{where} is {kind} but not a matrix, so that it has no scales")
    elif scale is None:
        problems.append(f"{where} is {kind}, but its scales {scale_name} are in no file")
    else:
        expected, meaning = quantisation.scale_shape(stored.dtype, source.shape)
        if scale.shape != expected:
            problems.append(f"{scale.file.name}: {scale_name} has shape {list(scale.shape)}, {meaning} needs "
                            f"{list(expected)}")
        if scale.dtype not in ("F32", "BF16", "F16"):
            problems.append(f"{scale.file.name}: {scale_name} has element type {scale.dtype}, not F32")


def _check_method(present: list[Source], tensors: Mapping[str, StoredTensor], quantisation: Quantisation,
                  problems: list[str]) -> None:
    """The tensors' element types against what the configuration says of them."""
    integers = [source.tensor for source in present if tensors[source.tensor].dtype == "I8"]
    if integers and quantisation.method != "compressed-tensors":
        problems.append(f"{len(integers)} tensor(s) are INT8, but config.json has no quantization_config that says how "
                        f"(quant_method compressed-tensors): {_some(integers)}")
    if quantisation.method == "compressed-tensors":
        floats = [source.tensor for source in present
                  if quantisation.covers(source.tensor) and tensors[source.tensor].dtype != "I8"]
        if floats:
            problems.append(f"quantization_config names {len(floats)} tensor(s) that are not INT8 in the files (nor in "
                            f"its ignore list): {_some(floats)}")


def _verify_checksums(folder: Path, threads: int, problems: list[str]) -> None:
    expected = read_json(folder / CHECKSUM_FILE, problems)
    if expected is None:
        return

    def check(item: tuple[str, Any]) -> str | None:
        name, digest = item
        path = folder / name
        if name != os.path.basename(name) or not path.is_file():
            return f"{name} is missing, which {CHECKSUM_FILE} names"
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        return None if found == str(digest).lower() else f"{name} is damaged: its SHA-256 is {found}, not {digest}"

    with ThreadPoolExecutor(threads) as pool:
        problems += [problem for problem in pool.map(check, sorted(expected.items())) if problem]


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
