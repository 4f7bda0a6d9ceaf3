"""From one model folder to another with INT8 weights: file by file, resumable, complete or absent.

Beside the folder that is asked for a hidden one is filled; it is renamed when everything is in it and has been checked
like any model folder. One piece of the model is in memory at a time. What was decided once (calibration rows, the
basis of the residual stream, factors that a whole layer shares) is kept with the files that follow from it, so that a
conversion that goes on after an interruption goes on with the same numbers.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tripool.core.errors import CheckpointError, ConfigError
from tripool.core.shape import ModelShape
from tripool.engine.checkpoint import CHECKSUM_FILE, INDEX_FILE, Checkpoint, FileIdentity, StoredTensor, open_checkpoint
from tripool.engine.model.layout import Source, WeightSpec
from tripool.engine.weights import STORED_DTYPES, read_again
from tripool.quant.blocks import WORTH, Converted, Figure, absorbed_input, alone, attention, feed_forward, input_error
from tripool.quant.calibrate import Calibration, LayerRows, Texts, calibrate, digest_of
from tripool.quant.forward import Model
from tripool.quant.policy import becomes_int8, quantization_config
from tripool.quant.recipe import Recipe
from tripool.quant.rotation import ResidualRotation
from tripool.quant.shards import Shard, ShardFile, shards_of, sync_folder, write_json
from tripool.quant.units import SCALE, Unit, units_of

FORMAT_VERSION = 2
SHARD_BYTES = 4 << 30
COPY_BYTES = 8 << 20
SPARE_BYTES = 64 << 20           # disk space beyond what files take
LARGEST_COPIED = 64 << 20        # of files beside the weights: tokenizer, templates, licence
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".part")
TRIED_EXPERTS = 4                # whose products decide how far a layer's outliers move
TRIED_LAYERS = 6                 # whose products decide whether the residual stream is turned
SLACK_BYTES = 96 << 20           # of the memory: buffers, and what the allocator keeps

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Options:
    """How a folder is converted."""

    recipe: Recipe = field(default_factory=Recipe)
    memory_bytes: int = 8 << 30      # that the conversion may take, beyond the process itself
    shard_bytes: int = SHARD_BYTES
    threads: int = 2
    restart: bool = False            # throw away what an interrupted conversion left


@dataclass(frozen=True, slots=True)
class RotationChoice:
    """Whether the residual stream was turned, and why: mean errors of the products that read it, either way."""

    used: bool
    reason: str
    error_as_it_was: float | None = None
    error_turned: float | None = None


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was done."""

    source: str
    folder: str
    recipe: Recipe
    rotation: RotationChoice
    figures: list[Figure]
    read_bytes: int
    written_bytes: int
    int8_bytes: int
    dropped: tuple[str, ...]         # tensors that the model does not need
    resumed_files: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def convert(source: Path | Checkpoint, folder: Path, options: Options | None = None, *, texts: Texts = (),
            progress: Progress = lambda words, part: None) -> Conversion:
    """Write `folder`, which must not be there yet. `texts` are token ids to calibrate with; without, nothing is run.

    Raises:
        CheckpointError: the source cannot be used, or what came out is not what was planned.
        ConfigError: there is no room, in memory or on the disk; the folder is there; or an interrupted conversion with
            other settings is in the way.
    """
    options = options or Options()
    begun = time.monotonic()
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, threads=options.threads)
    check_source(checkpoint)
    folder = folder.absolute()
    if folder.exists():
        raise ConfigError(f"{folder} is there already; give another folder, or remove it")
    if not folder.parent.is_dir():
        raise ConfigError(f"there is no folder {folder.parent} to write {folder.name} in; make it first")
    units = units_of(checkpoint.shape, checkpoint.tensors, options.recipe)
    _check_memory(checkpoint, units, options, calibrated=bool(texts))
    shards = shards_of(units, options.shard_bytes)
    work = folder.parent / f".{folder.name}.partial"
    with _workplace(work, _plan_of(checkpoint, options, texts, shards), options.restart), _disk_errors(folder):
        job = _Job(checkpoint, work, options, units, progress)
        waiting = [shard for shard in shards if not job.is_written(shard)]
        _check_disk(folder, sum(shard.num_bytes for shard in waiting))
        job.calibrate(texts)
        job.choose_rotation()
        for shard in shards:
            if shard in waiting:
                job.write(shard)
        figures = job.finish(shards, folder)
    known = {name for unit in units for name in unit.names}
    scales = {scale.name for tensor in checkpoint.tensors.values() if (scale := checkpoint.scale_of(tensor))}
    planned = [each for unit in units for each in unit.planned]
    return Conversion(
        str(checkpoint.folder), str(folder), options.recipe, job.rotation, figures,
        sum(unit.read_bytes for unit in units),
        sum(each.num_bytes for each in planned), sum(each.num_bytes for each in planned if each.dtype == "I8"),
        tuple(sorted(checkpoint.tensors.keys() - known - scales)), len(shards) - len(waiting), time.monotonic() - begun)


def check_source(checkpoint: Checkpoint) -> None:
    """See that a folder is not converted twice.

    Raises:
        ConfigError: it holds INT8 weights.
    """
    done = [tensor.name for tensor in checkpoint.tensors.values() if tensor.dtype == "I8"]
    if done:
        raise ConfigError(f"{checkpoint.folder} is INT8 already ({len(done)} tensors, first {done[0]}); quantise the "
                          "checkpoint that it was made from")


def running_bytes(checkpoint: Checkpoint) -> int:
    """About what running a model takes here: float32 weights, and a copy while they are laid out anew."""
    return 8 * checkpoint.shape.params(mtp=True) + SLACK_BYTES


def _check_memory(checkpoint: Checkpoint, units: Iterable[Unit], options: Options, *, calibrated: bool) -> None:
    compensation = options.recipe.compensation and calibrated
    largest = max(units, key=lambda unit: unit.working_bytes(compensation=compensation))
    needed = largest.working_bytes(compensation=compensation) + SLACK_BYTES
    if needed > options.memory_bytes:
        hint = "; without compensation it takes less" if compensation else ""
        raise ConfigError(f"converting {largest.name} takes about {needed >> 20} MiB, and memory is limited to "
                          f"{options.memory_bytes >> 20} MiB: raise --memory{hint}")
    running = running_bytes(checkpoint)
    if calibrated and running > options.memory_bytes:
        raise ConfigError(f"calibration runs the model, which takes about {running >> 20} MiB, and memory is limited "
                          f"to {options.memory_bytes >> 20} MiB: raise --memory, or convert with --calibration none")


def _check_disk(folder: Path, num_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder.parent).free
    if num_bytes + SPARE_BYTES > free_bytes:
        raise ConfigError(f"{folder} needs {(num_bytes + SPARE_BYTES) >> 20} MiB of disk space and {free_bytes >> 20} "
                          "MiB are free there; make room, or give another place")


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(f"the disk of {folder} is full; make room and run the same command again: what is done "
                              "is kept") from error
        raise ConfigError(f"{folder} could not be written ({error}); the same command goes on where this one "
                          "stopped") from error


def _plan_of(checkpoint: Checkpoint, options: Options, texts: Texts, shards: Iterable[Shard]) -> dict[str, Any]:
    """All that decides what comes out; a conversion goes on only if nothing of it has changed."""
    files = {tensor.file.name: [tensor.identity.size, tensor.identity.mtime_ns]
             for tensor in checkpoint.tensors.values()}
    return {"version": FORMAT_VERSION, "source": str(checkpoint.folder.resolve()), "files": dict(sorted(files.items())),
            "recipe": asdict(options.recipe), "calibration": digest_of(texts),
            "shards": {shard.file: shard.num_bytes for shard in shards}}


@contextmanager
def _workplace(work: Path, plan: Mapping[str, Any], restart: bool) -> Iterator[None]:
    """The hidden folder, ours alone. Kept if work in it was interrupted."""
    if restart and work.exists():
        shutil.rmtree(work)
    (work / "model").mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another conversion is writing in {work}") from error
        note = work / "plan.json"
        if note.exists():
            before = json.loads(note.read_text())
            changed = [key for key in plan if before.get(key) != plan[key]]
            if changed:
                raise ConfigError(f"{work} holds an interrupted conversion that differs in {', '.join(changed)}; give "
                                  "--restart to throw it away, or the settings it was begun with")
        else:
            write_json(note, plan)
        try:
            yield
        except BaseException:
            if not any(work.glob("*.safetensors*")):        # nothing that would be worth going on with
                shutil.rmtree(work)
            raise
    shutil.rmtree(work)


class _Job:
    """One conversion."""

    def __init__(self, checkpoint: Checkpoint, work: Path, options: Options, units: list[Unit],
                 progress: Progress) -> None:
        self.checkpoint = checkpoint
        self.shape: ModelShape = checkpoint.shape
        self.work = work
        self.options = options
        self.recipe = options.recipe
        self.units = units
        self.progress = progress
        self.calibration = Calibration(None)
        self.rotation = RotationChoice(False, "not asked for")
        self._residual: ResidualRotation | None = None
        self._norms: dict[str, Tensor] = {}
        self.all_bytes = sum(unit.read_bytes for unit in units)
        self.done_bytes = 0
        self._layer_rows: tuple[int, LayerRows] | None = None

    # --- what is there

    def is_written(self, shard: Shard) -> bool:
        """Whether an earlier run wrote this file; seen by its contents, not by its name."""
        note, file = self._note(shard), self.work / "model" / shard.file
        if not note.exists() or not file.exists():
            return False
        with file.open("rb") as content:
            written: bool = _sha256(content) == json.loads(note.read_text())["sha256"]
        if written:
            self.done_bytes += sum(unit.read_bytes for unit in shard.units)
        return written

    def _note(self, shard: Shard) -> Path:
        return self.work / f"{shard.file}.json"

    # --- steps

    def calibrate(self, texts: Texts) -> None:
        path = self.work / "calibration.safetensors"
        if not texts:
            return
        if path.exists():
            self.calibration = Calibration(path)
            return
        self.progress("running the model over the calibration texts", 0.0)
        rows = calibrate(Model(self.checkpoint, threads=self.options.threads), texts)
        self.calibration = Calibration.write(path, rows)

    def choose_rotation(self) -> None:
        """Decide once for the whole model, by products of some layers with and without."""
        note = self.work / "rotation.json"
        if not self.recipe.rotation:
            return
        if self.shape.tie_embeddings:
            self.rotation = RotationChoice(False, "the head is the embedding table, which cannot be both")
        elif note.exists():
            self.rotation = RotationChoice(**json.loads(note.read_text()))
        else:
            self.progress("trying another basis", 0.0)
            with torch.inference_mode():
                before, after = self._reading_error(), self._reading_error(ResidualRotation(self.shape, self._norm))
            used = after <= WORTH * before
            self.rotation = RotationChoice(used, "errors are lower" if used else "it brings too little", before, after)
            write_json(note, asdict(self.rotation))
        self._residual = ResidualRotation(self.shape, self._norm) if self.rotation.used else None
        self._layer_rows = None

    def _reading_error(self, residual: ResidualRotation | None = None) -> float:
        """Mean error of products that read the residual stream, over some layers, in a basis."""
        self._residual, self._layer_rows = residual, None
        errors = []
        for layer in range(0, self.shape.num_layers, -(-self.shape.num_layers // TRIED_LAYERS)):
            rows = self._rows(layer)
            units = [unit for unit in self.units if unit.layer == layer]
            attended = next(unit for unit in units if unit.kind == "attention")
            gated = next(unit for unit in units if _gated(unit))
            readers = [name for name in attended.names
                       if name.endswith(("q_a_proj.weight", "q_proj.weight", "kv_a_proj_with_mqa.weight"))]
            for names, x_ND in ((readers, rows.attention_ND), (_gated(gated)[:2], rows.feed_forward_ND)):
                errors.append(input_error(x_ND, list(self._read(list(names)).values()), self.recipe))
        return sum(errors) / len(errors)

    def write(self, shard: Shard) -> None:
        file = ShardFile(self.work / "model", shard)
        figures: list[Figure] = []
        try:
            for unit in shard.units:
                self.progress(unit.name, self.done_bytes / max(1, self.all_bytes))
                if unit.in_parts or (unit.kind == "alone" and self._residual is None and unit.planned[0].dtype != "I8"):
                    self._copy(unit, file)
                else:
                    figures += self._convert(unit, file)
                self.done_bytes += unit.read_bytes
            digest = file.finish()
        finally:
            file.close()
        write_json(self._note(shard), {"sha256": digest, "figures": [asdict(figure) for figure in figures]})

    def finish(self, shards: list[Shard], folder: Path) -> list[Figure]:
        """What is not weights, a check of all that has been written, and the name."""
        self.progress("checking what was written", 1.0)
        model = self.work / "model"
        notes = {shard.file: json.loads(self._note(shard).read_text()) for shard in shards}
        wanted = {shard.file for shard in shards}
        for stray in model.iterdir():
            if stray.name not in wanted:
                stray.unlink()
        planned = {each.name: (each.dtype, each.shape) for shard in shards for each in shard.planned}
        if len(shards) > 1:
            write_json(model / INDEX_FILE, {
                "metadata": {"total_size": sum(shard.num_bytes for shard in shards)},
                "weight_map": {each.name: shard.file for shard in shards for each in shard.planned}})
        write_json(model / CHECKSUM_FILE, {file: note["sha256"] for file, note in notes.items()})
        self._copy_files(model)
        config = {key: value for key, value in self.checkpoint.config.items() if key != "compression_config"}
        kept = [name for name in (source.name for unit in self.units for source in unit.tensors)
                if not becomes_int8(name, mixed_precision=self.recipe.mixed_precision)]
        write_json(model / "config.json", {**config, "quantization_config": quantization_config(kept)})
        written = open_checkpoint(model, threads=self.options.threads)
        found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in written.tensors.values()}
        if found != planned:
            raise CheckpointError(str(model), [f"{name} is not what was planned"
                                               for name in sorted(planned.keys() | found.keys())
                                               if planned.get(name) != found.get(name)])
        sync_folder(model)
        model.rename(folder)
        sync_folder(folder.parent)
        return [Figure(**figure) for shard in shards for figure in notes[shard.file]["figures"]]

    def _copy_files(self, model: Path) -> None:
        ours = ("config.json", INDEX_FILE, CHECKSUM_FILE, "README.md")
        for path in sorted(self.checkpoint.folder.iterdir()):
            if (path.is_file() and path.name not in ours and not path.name.startswith(".")
                    and path.suffix not in NOT_COPIED and path.stat().st_size <= LARGEST_COPIED):
                shutil.copyfile(path, model / path.name)

    # --- one piece

    def _copy(self, unit: Unit, file: ShardFile) -> None:
        for stored in unit.tensors:
            if stored.dtype == "F8_E4M3":
                file.put(stored.name, [_bytes_of(self._read([stored.name])[stored.name].bfloat16())])
            elif self._residual is None:
                file.put(stored.name, self._parts_of(stored, COPY_BYTES))
            else:
                file.put(stored.name, self._turned_parts(stored, self._residual))

    def _turned_parts(self, stored: StoredTensor, residual: ResidualRotation) -> Iterator[memoryview]:
        """Some rows at a time."""
        dtype, width = STORED_DTYPES[stored.dtype], stored.shape[-1]
        row_bytes = width * dtype.itemsize
        for part in self._parts_of(stored, max(1, COPY_BYTES // row_bytes) * row_bytes):
            rows = torch.frombuffer(bytearray(part), dtype=dtype).view(-1, *stored.shape[1:])
            yield _bytes_of(residual.tensor(stored.name, rows.float()).to(dtype))

    def _parts_of(self, stored: StoredTensor, part_bytes: int) -> Iterator[memoryview]:
        with stored.file.open("rb") as source:
            if FileIdentity.of(os.fstat(source.fileno())) != stored.identity:
                raise CheckpointError(str(self.checkpoint.folder), [f"{stored.file.name} has changed meanwhile"])
            source.seek(stored.start)
            left = stored.num_bytes
            while left:
                part = source.read(min(part_bytes, left))
                if not part:
                    raise CheckpointError(str(self.checkpoint.folder), [f"{stored.file.name} ended early"])
                left -= len(part)
                yield memoryview(part)

    def _convert(self, unit: Unit, file: ShardFile) -> list[Figure]:
        weights = self._read(unit.names)
        with torch.inference_mode():
            done = self._quantise(unit, weights)
        weights.clear()
        for planned in unit.planned:
            if planned.dtype == "I8":
                file.put(planned.name, [_bytes_of(done.int8[planned.name].q_OI)])
            elif planned.name.endswith(SCALE) and planned.name.removesuffix(SCALE) in done.int8:
                file.put(planned.name, [_bytes_of(done.int8[planned.name.removesuffix(SCALE)].scale_O)])
            else:
                value = done.kept[planned.name].to(STORED_DTYPES[planned.dtype])
                if not value.isfinite().all():
                    raise CheckpointError(str(self.checkpoint.folder), [
                        f"{planned.name} has numbers that are not finite in {planned.dtype}"])
                file.put(planned.name, [_bytes_of(value)])
        return done.figures

    def _quantise(self, unit: Unit, weights: dict[str, Tensor]) -> Converted:
        prefix = f"model.layers.{unit.layer}"
        if unit.kind == "alone":
            (name,) = unit.names
            if unit.planned[0].dtype != "I8":
                return Converted(kept=dict(weights))
            return alone(name, weights[name], self.recipe)
        if unit.kind == "attention":
            return attention(self.shape, prefix, weights, self._rows(unit.layer), self.recipe)
        rows = self._rows(unit.layer)
        factor_D, strength = self._factors(unit.layer, rows)
        gated_names = _gated(unit)
        done = Converted()
        if gated_names:
            x_ND = rows.feed_forward_ND[rows.rows_of(unit.expert)]
            done = feed_forward(gated_names, weights, x_ND, factor_D, strength, rows.imagined, self.recipe)
        for name, value in weights.items():
            if name in gated_names:
                continue
            if name.endswith("post_attention_layernorm.weight"):
                value = value / factor_D
            elif name.endswith(".gate.weight"):
                value = value * factor_D
                if becomes_int8(name, mixed_precision=self.recipe.mixed_precision):
                    rounded = alone(name, value, self.recipe)
                    done.int8 |= rounded.int8
                    done.figures += rounded.figures
                    continue
            done.kept[name] = value
        return done

    def _rows(self, layer: int) -> LayerRows:
        if self._layer_rows is not None and self._layer_rows[0] == layer:
            return self._layer_rows[1]
        prefix = f"model.layers.{layer}"
        norms = [f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"]
        attention_norm_D, feed_forward_norm_D = (self._norm(name) for name in norms)
        rows = self.calibration.layer(layer, attention_norm_D, feed_forward_norm_D)
        if self._residual is not None:
            rows = replace(rows, attention_ND=self._residual.rows(rows.attention_ND, attention_norm_D),
                           feed_forward_ND=self._residual.rows(rows.feed_forward_ND, feed_forward_norm_D))
        self._layer_rows = (layer, rows)
        return rows

    def _factors(self, layer: int, rows: LayerRows) -> tuple[Tensor, float]:
        """What a layer's feed-forward input is divided by: decided once, with all its experts' weights in view."""
        note = self.work / f"factors-{layer:05d}.json"
        if note.exists():
            found = json.loads(note.read_text())
            return torch.exp2(torch.tensor(found["exponents"], dtype=torch.float32)), found["strength"]
        most_D = torch.zeros(self.shape.hidden_size)
        tried: list[Tensor] = []
        for unit in self.units:
            names = _gated(unit) if unit.layer == layer and unit.kind != "attention" else ()
            for name in names[:2] if self.recipe.absorption else ():
                weight_FD = self._read([name])[name]
                most_D = torch.maximum(most_D, weight_FD.abs().amax(0))
                if len(tried) < self._most_tried(unit):
                    tried.append(weight_FD)
        factor_D, strength = absorbed_input(rows.feed_forward_ND, tried, most_D, self.recipe)
        write_json(note, {"strength": strength, "exponents": factor_D.log2().round().int().tolist()})
        return factor_D, strength

    def _most_tried(self, unit: Unit) -> int:
        """Gate and up of some experts, as many as memory takes."""
        matrix_bytes = 4 * max(tensor.shape[0] * tensor.shape[1] for tensor in unit.tensors if len(tensor.shape) == 2)
        room = (self.options.memory_bytes - SLACK_BYTES) // (2 * matrix_bytes) - 3
        return max(1, min(2 * TRIED_EXPERTS, room))

    def _norm(self, name: str) -> Tensor:
        """A norm's weights, as the source has them."""
        if name not in self._norms:
            self._norms |= self._stored([name])
        return self._norms[name]

    def _read(self, names: list[str]) -> dict[str, Tensor]:
        """Tensors in float32, in the basis that was chosen."""
        stored = self._stored(names)
        if self._residual is None:
            return stored
        return {name: self._residual.tensor(name, value) for name, value in stored.items()}

    def _stored(self, names: list[str]) -> dict[str, Tensor]:
        """Tensors in float32, as the source has them."""
        tensors = self.checkpoint.tensors
        plan = [WeightSpec(name, tensors[name].shape, (Source(name, tensors[name].shape),)) for name in names]
        return dict(read_again(self.checkpoint, plan, torch.float32, lambda: None).tensors)


def _gated(unit: Unit) -> tuple[str, str, str] | tuple[()]:
    """Names of a unit's gate, up and down."""
    found = [name for kind in ("gate_proj", "up_proj", "down_proj") for name in unit.names
             if name.endswith(f".{kind}.weight")]
    return (found[0], found[1], found[2]) if len(found) == 3 else ()


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def _sha256(file: Any) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()
