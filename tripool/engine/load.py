"""From a model folder to a model that computes.

Says which element type is computed in, reads this rank's share of the weights and builds the model around its
exchange. It knows neither caches nor requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tripool.core.errors import ConfigError
from tripool.core.placement import Placement
from tripool.core.shape import ModelShape
from tripool.engine.checkpoint import Checkpoint, open_checkpoint
from tripool.engine.element_type import element_type, keeps_weights, rounds_rows, warnings_of
from tripool.engine.model.deepseek import DeepseekModel
from tripool.engine.model.layout import WeightSpec, moe_layers, weight_plan, whole_placement
from tripool.engine.model.products import packs_floats
from tripool.engine.model.stored import as_stored
from tripool.engine.ops import native
from tripool.engine.packed_cache import KeptWeights, PackedCache
from tripool.engine.parallel.exchange import Exchange, LocalExchange
from tripool.engine.weights import MODULUS, Progress, dummy_weights, load_weights

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KERNEL_DTYPES = (torch.float32, torch.bfloat16)
"""Rows that kernels for stored weights take."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One rank's model, and what is known about where it came from."""

    model: DeepseekModel
    shape: ModelShape
    dtype: torch.dtype
    weight_bytes: int        # in memory
    digest: int              # this rank's part; `weights.fingerprint(shape, digests of all ranks)` names the model
    loaded_bytes: int
    seconds: float
    warnings: tuple[str, ...]
    digests: Mapping[str, int] = field(default_factory=dict)      # of each tensor that was read; none of dummy weights


def check_device(device: str) -> None:
    """See that torch can compute on a device.

    Raises:
        ConfigError: it cannot; with what torch says.
    """
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:      # an AssertionError where torch was built without it
        said = str(error).partition("\n")[0]
        raise ConfigError(f"model.device is {device}, which torch {torch.__version__} cannot use here ({said}); use "
                          "cpu, or install the build of torch that fits the accelerator") from error


def compute_dtype(checkpoint: Checkpoint, dtype: str = "auto", *, deterministic: bool = False,
                  device: str = "cpu") -> torch.dtype:
    """`element_type` of a checkpoint, as torch calls it."""
    return DTYPES[element_type(checkpoint.dtype, checkpoint.shape, dtype, deterministic=deterministic, device=device,
                               stays=keeps_weights(checkpoint.quantisation.method))]


def load_model(folder: Path | Checkpoint, *, dtype: str = "auto", deterministic: bool = False, device: str = "cpu",
               load_format: str = "auto", exchange: Exchange | None = None, placement: Placement | None = None,
               rank: int = 0, threads: int = 2, drafts: bool = False, int8_head: bool = False,
               packed_root: Path | None = None, progress: Progress | None = None) -> LoadedModel:
    """Check a folder (or take one that has been checked), read the weights of one rank and build its model.

    Without an expert map, and without an exchange, it is the only rank. `drafts`: its MTP layer is to be run.
    `int8_head`: the output head is rounded to eight bits. `packed_root`: the folder in which packed weights are kept
    (see `packed_cache`).

    Raises:
        CheckpointError: the folder cannot be used; every problem is listed.
        ConfigError: the model is of no supported form.
    """
    checkpoint = folder if isinstance(folder, Checkpoint) else open_checkpoint(folder, threads=threads)
    for warning in checkpoint.warnings:
        log.warning("%s: %s", checkpoint.folder, warning)
    for note in checkpoint.notes:
        log.info("%s: %s", checkpoint.folder, note)
    shape = checkpoint.shape
    kind = compute_dtype(checkpoint, dtype, deterministic=deterministic, device=device)
    for warning in warnings_of(str(kind).removeprefix("torch."), device):
        log.warning("%s: %s", checkpoint.folder, warning)
    if int8_head and not packs_floats(kind, torch.device(device)):
        raise ConfigError("head_dtype is int8, which compiled kernels of the CPU multiply with rows of float32; here "
                          f"rows are {str(kind).removeprefix('torch.')} on {device}, and the kernels' level is "
                          f"{native.chosen_level()}: leave it out")
    plan = _plan(checkpoint, placement, rank, kind, device)
    start = time.perf_counter()
    kept = KeptWeights()
    if load_format == "dummy":
        weights = dummy_weights(plan, kind, device=device)
    else:
        if packed_root is not None and torch.device(device).type == "cpu" and native.chosen_level() >= 0:
            kept = _kept(packed_root, checkpoint, placement, rank, kind, int8_head, threads, progress)
        rest = [spec for spec in plan if spec.name not in kept]
        weights = load_weights(checkpoint, rest, kind, device=device, threads=threads,
                               progress=None if kept.num_bytes else progress)
    digests = {**kept.digests, **weights.digests}
    digest = weights.digest + sum(digests[source.tensor] for spec in plan if spec.name in kept
                                  for source in spec.sources if source.counted)
    seconds = time.perf_counter() - start
    tensors = weights.tensors                   # nothing else holds what is taken out of them
    tensors.update(kept.tensors)
    weight_bytes = sum(each.nbytes for each in (*tensors.values(), *kept.packed.values()))
    rounds = kind == torch.float32 and rounds_rows(checkpoint.dtype, dtype, deterministic=deterministic, device=device)
    model = DeepseekModel(shape, tensors, exchange or LocalExchange(), deterministic=deterministic, drafts=drafts,
                          int8_head=int8_head, rounds_rows=rounds, packed=kept.packed)
    if placement is not None:
        model.use_placement(placement, rank)
    return LoadedModel(model, shape, kind, weight_bytes, digest % MODULUS, kept.num_bytes + weights.num_bytes, seconds,
                       checkpoint.warnings, digests)


def _plan(checkpoint: Checkpoint, placement: Placement | None, rank: int, kind: torch.dtype,
          device: str) -> list[WeightSpec]:
    """What a rank holds, and in which types."""
    shape = checkpoint.shape
    plan = weight_plan(shape, placement, rank)
    if torch.device(device).type != "cpu" or kind not in KERNEL_DTYPES:
        return plan
    return as_stored(plan, checkpoint, floats=packs_floats(kind, torch.device(device)),
                     shared_in_slots=placement is not None and placement.num_experts > shape.num_routed_experts)


def _kept(root: Path, checkpoint: Checkpoint, placement: Placement | None, rank: int, kind: torch.dtype,
          int8_head: bool, threads: int, progress: Progress | None) -> KeptWeights:
    """What of a rank's weights can be had packed; none where nothing is."""
    shape = checkpoint.shape
    layers = moe_layers(shape)
    placement = placement or whole_placement(shape)
    everything = tuple(range(placement.num_experts))
    whole = Placement(1, len(everything), (len(everything),), (everything,) * len(layers))
    plan, floats = _plan(checkpoint, whole, 0, kind, "cpu"), packs_floats(kind, torch.device("cpu"))
    if not floats and all(spec.dtype != "int8" for spec in plan):
        return KeptWeights()
    held = {f"layers.{layer}.experts": placement.held_by(rank, index) for index, layer in enumerate(layers)}
    form = f"{str(kind).removeprefix('torch.')}-{placement.num_experts}"
    return PackedCache(root, checkpoint, plan, kind, form=form, floats=floats, int8_head=int8_head).load(
        held, threads=threads, progress=progress, complain=log.debug if rank else log.warning)
