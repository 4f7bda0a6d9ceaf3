"""From a model folder to a model that computes.

Says which element type is computed in, reads this rank's share of the weights and builds the model around its
exchange. It knows neither caches nor requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from tripool.core.errors import ConfigError
from tripool.core.shape import ModelShape
from tripool.engine.checkpoint import Checkpoint, open_checkpoint
from tripool.engine.model.deepseek import DeepseekModel
from tripool.engine.model.layout import weight_plan
from tripool.engine.parallel.exchange import Exchange, LocalExchange
from tripool.engine.weights import Progress, dummy_weights, load_weights

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One rank's model, and what is known about where it came from."""

    model: DeepseekModel
    shape: ModelShape
    dtype: torch.dtype
    digest: int              # this rank's part; `weights.fingerprint(shape, digests of all ranks)` names the model
    loaded_bytes: int
    seconds: float
    warnings: tuple[str, ...]


def compute_dtype(checkpoint: Checkpoint, dtype: str = "auto", *, deterministic: bool = False) -> torch.dtype:
    """The element type of weights and cache: as told, the checkpoint's own, or float32 where bits must not vary."""
    if deterministic:
        return torch.float32
    return DTYPES[checkpoint.dtype if dtype == "auto" else dtype]


def load_model(folder: Path | Checkpoint, *, dtype: str = "auto", deterministic: bool = False, device: str = "cpu",
               load_format: str = "auto", exchange: Exchange | None = None, rank: int = 0, num_ranks: int = 1,
               threads: int = 2, progress: Progress | None = None) -> LoadedModel:
    """Check a folder (or take one that has been checked), read the weights of one rank and build its model.

    Raises:
        CheckpointError: the folder cannot be used; every problem is listed.
        ConfigError: the ranks do not divide the experts, or the model is of no supported form.
    """
    checkpoint = folder if isinstance(folder, Checkpoint) else open_checkpoint(folder, threads=threads)
    for warning in checkpoint.warnings:
        log.warning("%s: %s", checkpoint.folder, warning)
    shape = checkpoint.shape
    if num_ranks > 1 and shape.num_routed_experts % num_ranks:
        raise ConfigError(f"ranks is {num_ranks}, which does not divide n_routed_experts {shape.num_routed_experts}")
    kind = compute_dtype(checkpoint, dtype, deterministic=deterministic)
    plan = weight_plan(shape, rank, num_ranks)
    if load_format == "dummy":
        weights = dummy_weights(plan, kind, device=device)
    else:
        weights = load_weights(checkpoint, plan, kind, device=device, threads=threads, progress=progress,
                               counts_shared=rank == 0)
    model = DeepseekModel(shape, weights.tensors, exchange or LocalExchange(), deterministic=deterministic)
    return LoadedModel(model, shape, kind, weights.digest, weights.num_bytes, weights.seconds, checkpoint.warnings)
