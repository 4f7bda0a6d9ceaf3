"""What each of some ranks does in `test_exchange`: a process of its own that leaves its results in a file.

All ranks know every row, and each computes its own; a step may have nothing for one of them, and of four ranks two
have nothing ever.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import random_tensors, tiny_config
from tests.engine.model.builders import build_model, fused_weights, new_cache, new_row, pack_batch, random_tokens, step
from tests.engine.parallel.direct_ranks import opened
from tripool.core.shape import model_shape
from tripool.engine.model.deepseek import DeepseekModel
from tripool.engine.model.moe import MixtureOfExperts
from tripool.engine.model.products import Weights
from tripool.engine.ops.tiles import whole
from tripool.engine.parallel.exchange import CollectiveExchange, Exchange
from tripool.engine.parallel.groups import file_store, join_group
from tripool.engine.parallel.segment import Geometry

CONFIG = tiny_config("v3", mtp=1)
LENGTHS = (60, 33, 50)                      # of three rows
RANK_OF_ROW = (0, 0, 1)
# Tokens of each row in each step. Rank 1 rests in the second, rank 0 in the fourth.
STEPS = ((30, 20, 9), (10, 12, 0), (1, 1, 20), (0, 0, 20), (1, 0, 1), (18, 0, 0))
SCALES = (1.0, 2.5)


def rows_of(rank: int | None) -> list[int]:
    """Rows of a rank; of all without one."""
    return [row for row, owner in enumerate(RANK_OF_ROW) if rank in (None, owner)]


def run_steps(model: DeepseekModel, rank: int | None) -> dict[str, Tensor]:
    """The hidden states of each row over all steps."""
    cache, mine = new_cache(model), rows_of(rank)
    rows = [new_row(random_tokens(LENGTHS[row], seed=row), start_block=10 * row) for row in mine]
    parts: dict[int, list[Tensor]] = {row: [] for row in mine}
    for counts in STEPS:
        taken = [counts[row] for row in mine]
        batch = step(rows, taken, num_decode_rows=int(taken[0] == 1)) if any(taken) else pack_batch([])
        for row, part in zip(mine, model.forward(batch, cache).split(taken), strict=True):
            parts[row].append(part)
    return {f"row{row}": torch.cat(parts[row]) for row in mine}


def block_outputs(exchange: Exchange, rank: int, num_ranks: int) -> dict[str, Tensor]:
    """One block of experts under two routed scales; ranks have different numbers of tokens, one of them none."""
    results = {}
    for scale in SCALES:
        shape = dataclasses.replace(model_shape(CONFIG), routed_scaling_factor=scale)
        weights = fused_weights(shape, random_tensors(CONFIG), rank, num_ranks)
        block = MixtureOfExperts(shape, Weights(weights), 1, exchange, whole, False)
        for name, num_tokens in (("some", 5 + 40 * rank), ("none", 7 * rank)):
            x = block_input(name, rank, num_tokens)
            results[f"{name}.{scale}"] = block(x)
            results[f"{name}.{scale}.shared"] = block.shared(x)
    return results


def block_input(name: str, rank: int, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + rank)
    return torch.randn(num_tokens, CONFIG["hidden_size"], generator=generator)


def layout(num_ranks: int, row_format: str) -> Geometry:
    """Of a direct exchange, small enough that some steps take several rounds."""
    share = CONFIG["n_routed_experts"] // num_ranks
    return Geometry((share,) * num_ranks, 16, CONFIG["num_experts_per_tok"], CONFIG["hidden_size"], row_format,
                    "float32")


def collective(rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    group = join_group(rank, num_ranks, file_store(folder / "store", num_ranks), timeout_s=60)
    compute(rank, num_ranks, folder, CollectiveExchange(group, CONFIG["n_routed_experts"]))


def direct(rank: int, num_ranks: int, folder: Path, place: str, row_format: str) -> None:
    compute(rank, num_ranks, folder, opened(place, layout(num_ranks, row_format), rank))


def compute(rank: int, num_ranks: int, folder: Path, exchange: Exchange) -> None:
    results = block_outputs(exchange, rank, num_ranks)
    for deterministic in (False, True):
        model = build_model(CONFIG, deterministic=deterministic, exchange=exchange, rank=rank, num_ranks=num_ranks)
        hidden = run_steps(model, rank)
        results |= {f"{name}.{'deterministic' if deterministic else 'fast'}": value for name, value in hidden.items()}
    save_file({name: value.contiguous() for name, value in results.items()}, folder / f"rank{rank}.safetensors")


def leave_early(rank: int, num_ranks: int, folder: Path) -> None:
    """Rank 1 goes without a word after joining; rank 0 notes what becomes of its exchange."""
    group = join_group(rank, num_ranks, file_store(folder / "store", num_ranks), timeout_s=3)
    if rank == 1:
        return
    exchange = CollectiveExchange(group, 8)
    try:
        exchange.dispatch(torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64))
    except RuntimeError as error:
        (folder / "noted").write_text(str(error))
