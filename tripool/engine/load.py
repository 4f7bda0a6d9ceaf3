"""From a model folder to a model that computes.

Says which element type is computed in, reads this rank's share of the weights and builds the model around its
exchange. It knows neither caches nor requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tripool.core.errors import ConfigError
from tripool.core.placement import Placement
from tripool.core.shape import ModelShape
from tripool.engine.checkpoint import Checkpoint, open_checkpoint
from tripool.engine.element_type import conversion, element_type, keeps_weights
from tripool.engine.model.deepseek import DeepseekModel
from tripool.engine.model.layout import weight_plan
from tripool.engine.model.stored import as_stored
from tripool.engine.ops import native
from tripool.engine.parallel.exchange import Exchange, LocalExchange
from tripool.engine.weights import Progress, dummy_weights, load_weights

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
               rank: int = 0, threads: int = 2, drafts: bool = False,
               progress: Progress | None = None) -> LoadedModel:
    """Check a folder (or take one that has been checked), read the weights of one rank and build its model.

    Without an expert map, and without an exchange, it is the only rank. `drafts`: its MTP layer is to be run.

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
    if slow := conversion(str(kind).removeprefix("torch."), device):
        log.warning("%s: %s", checkpoint.folder, slow)
    plan = weight_plan(shape, placement, rank)
    if torch.device(device).type == "cpu" and kind in KERNEL_DTYPES:
        plan = as_stored(plan, checkpoint, floats=kind == torch.float32 and native.chosen_level() >= 0,
                         shared_in_slots=placement is not None and placement.num_experts > shape.num_routed_experts)
    if load_format == "dummy":
        weights = dummy_weights(plan, kind, device=device)
    else:
        weights = load_weights(checkpoint, plan, kind, device=device, threads=threads, progress=progress)
    weight_bytes = sum(tensor.nbytes for tensor in weights.tensors.values())
    model = DeepseekModel(shape, weights.tensors, exchange or LocalExchange(), deterministic=deterministic,
                          drafts=drafts)
    if placement is not None:
        model.use_placement(placement, rank)
    return LoadedModel(model, shape, kind, weight_bytes, weights.digest, weights.num_bytes, weights.seconds,
                       checkpoint.warnings, weights.digests)
