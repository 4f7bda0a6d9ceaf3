"""What each rank does in `test_instance`: whole steps with an executor, and blocks of experts, under several maps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import random_tensors, tiny_config
from tests.engine.driver import Driver
from tests.engine.model.builders import fused_weights, random_tokens
from tests.engine.parallel.builders import CAPACITY, COUNTS
from tests.engine.parallel.direct_ranks import opened
from tripool.core.placement import EMPTY, Placement, difference, even_geometry, initial_placement
from tripool.core.request import Sampling
from tripool.core.shape import model_shape
from tripool.engine.checkpoint import open_checkpoint
from tripool.engine.load import load_model
from tripool.engine.model.deepseek import DeepseekModel
from tripool.engine.model.moe import MixtureOfExperts
from tripool.engine.model.products import Weights
from tripool.engine.model.turns import all_to_the_end
from tripool.engine.ops.tiles import in_tiles
from tripool.engine.parallel.exchange import CollectiveExchange, Exchange
from tripool.engine.parallel.groups import file_store, join_group
from tripool.engine.parallel.segment import Geometry
from tripool.engine.relocate import ExpertLoader

CONFIG = tiny_config("v3", mtp=1)
SHAPE = model_shape(CONFIG)
NUM_LAYERS = 3                               # with experts, that of MTP included
ROOM = 64                                    # tokens of a rank: all its steps fit
SCALES = (1.0, 2.5)
SAMPLED = Sampling(temperature=0.8, top_p=0.95, presence_penalty=0.3, seed=42, num_logprobs=5, num_prompt_logprobs=1)
GREEDY = Sampling(temperature=0.0, num_logprobs=5, num_prompt_logprobs=1)
LENGTHS = (21, 5, 24, 1, 11, 9)              # of rows; row r is rank r's, as far as there are ranks
# Steps: which rows join, and the chunk of each; rows that are through decode. Of four ranks one has nothing at first.
STEPS = [((0, 1), {0: 10, 1: 5}), ((2,), {0: 11, 2: 7}), ((4,), {2: 17, 4: 11}), ((3, 5), {3: 1, 5: 4}),
         ((), {5: 5}), ((), {}), ((), {})]

FORMATS = {"direct": ("float32", "int8"), "collective": ("float32",)}      # of rows

Make = Callable[[str, Placement, str], Exchange]
"""By its name (the same on all ranks), the map, and the form of the rows."""


def maps(num_ranks: int) -> dict[str, Placement]:
    """Each rank computes the shared expert, or it has slots; each expert is there once, or some have copies."""
    geometries = {
        f"{shared}.{copies}": even_geometry(num_ranks, SHAPE.num_routed_experts, num_redundant=copies,
                                            num_shared_copies=max(1, num_ranks // 2) if shared == "map" else 0)
        for shared in ("own", "map") for copies in ((0, 4) if num_ranks > 1 else (0,))}
    return {name: initial_placement(geometry, NUM_LAYERS) for name, geometry in geometries.items()}


def crowded(num_ranks: int) -> Placement:
    """All that tokens choose in `crowding` is on rank 0."""
    slots = {1: (8,), 2: (4, 4), 4: (4, 2, 1, 1)}[num_ranks]
    return Placement(1, 8, slots, (tuple(range(8)),) * NUM_LAYERS)


def layout(placement: Placement, rows: str, capacity: int = ROOM) -> Geometry:
    picks = SHAPE.num_experts_per_token + placement.num_experts - SHAPE.num_routed_experts
    return Geometry(placement.slots_per_rank, capacity, picks, SHAPE.hidden_size, rows, "float32")


def layouts(num_ranks: int) -> dict[str, Geometry]:
    """Of every segment that the ranks need."""
    found = {f"{name}.{rows}": layout(placement, rows) for name, placement in maps(num_ranks).items()
             for rows in ("float32", "int8")}
    return found | {"crowded.float32": layout(crowded(num_ranks), "float32", CAPACITY),
                    "moving.float32": layout(moving(num_ranks)[0], "float32")}


# --- whole steps ---------------------------------------------------------------------------------------------------


def model_of(placement: Placement, rank: int, exchange: Exchange, deterministic: bool) -> DeepseekModel:
    weights = fused_weights(SHAPE, random_tensors(CONFIG), rank, placement=placement)
    model = DeepseekModel(SHAPE, weights, exchange, deterministic=deterministic)
    model.use_placement(placement, rank)
    return model


def play(model: DeepseekModel, rank: int, num_ranks: int, num_microbatches: int,
         between: Callable[[int], None] = lambda step: None) -> dict[str, Tensor]:
    """The tokens of this rank's rows, and what their logits said, as they came."""
    driver = Driver(model, num_microbatches=num_microbatches)
    said: dict[str, list[float]] = {}
    for number, (joins, chunks) in enumerate(STEPS):
        between(number)
        for row in joins:
            if row % num_ranks == rank:
                driver.join(row, random_tokens(LENGTHS[row], seed=row), sampling=SAMPLED if row % 2 else GREEDY)
        result = driver.run({row: size for row, size in chunks.items() if row % num_ranks == rank},
                            grows=driver.grow(driver.last))
        for emitted in result.emitted:
            for kind in ("logprobs", "prompt_logprobs"):
                for each in getattr(emitted, kind):
                    numbers = said.setdefault(f"{kind}.{each.request_id - 100}", [])
                    numbers += [*each.chosen, *(value for top in each.top_values for value in top)]
    tokens = {f"tokens.{request - 100}": torch.tensor(output) for request, output in driver.output.items()}
    return tokens | {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in said.items()}


# --- blocks of experts ---------------------------------------------------------------------------------------------


def block_input(rank: int, num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, SHAPE.hidden_size, generator=torch.Generator().manual_seed(100 * rank + num_tokens))


def scaled_block(placement: Placement, rank: int, exchange: Exchange, scale: float) -> MixtureOfExperts:
    shape = dataclasses.replace(SHAPE, routed_scaling_factor=scale)
    weights = fused_weights(shape, random_tensors(CONFIG), rank, placement=placement)
    model = DeepseekModel(shape, weights, exchange)
    model.use_placement(placement, rank)
    block = model.moe_blocks[0]
    assert block is not None
    return block


def scaled(name: str, placement: Placement, rank: int, exchange: Exchange) -> dict[str, Tensor]:
    """C10: a block under both scales, in one go and in two microbatches."""
    found, x = {}, block_input(rank, 5 + 7 * rank)
    for scale in SCALES:
        block = scaled_block(placement, rank, exchange, scale)
        found[f"scaled.{name}.{scale}.1"] = block(x)
        halves = [block.in_turns(part) for part in (x[:3], x[3:])]
        found[f"scaled.{name}.{scale}.2"] = torch.cat(all_to_the_end(halves))
    return found


def crowding_block(placement: Placement, rank: int, exchange: Exchange) -> MixtureOfExperts:
    """Every token chooses three of the first four experts."""
    tensors = random_tensors(CONFIG)
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.tensor([10.0] * 4 + [0.0] * 4)
    weights = fused_weights(SHAPE, tensors, rank, placement=placement)
    return MixtureOfExperts(SHAPE, Weights(weights), 1, exchange, in_tiles, True)


def crowd_counts(num_ranks: int, turn: int, rank: int) -> int:
    """Tokens of a rank: first all have equally many, then each another number."""
    return COUNTS[turn % 6] if turn < 6 else COUNTS[(turn + rank) % 6]


def crowding(num_ranks: int, rank: int, exchange: Exchange) -> dict[str, Tensor]:
    """C18: 0, 1, C - 1, C, C + 1, 3 C tokens, all of them for one rank; halves as large as fit."""
    block = crowding_block(crowded(num_ranks), rank, exchange)
    found = {f"crowd.{turn}": block(block_input(rank, crowd_counts(num_ranks, turn, rank))) for turn in range(12)}
    halves = [block.in_turns(block_input(rank, count)) for count in (CAPACITY, (0, 1, CAPACITY - 1)[rank % 3])]
    return found | {f"crowd.half{half}": y for half, y in enumerate(all_to_the_end(halves))}


# --- experts that move ---------------------------------------------------------------------------------------------


def moving(num_ranks: int) -> list[Placement]:
    """C19: maps of steps one after another, with copies, and slots that are empty for a while."""
    first = initial_placement(even_geometry(num_ranks, SHAPE.num_routed_experts, num_redundant=4 * (num_ranks > 1),
                                            num_shared_copies=max(1, num_ranks // 2)), NUM_LAYERS)
    placements = [first]
    for version in range(2, 6):
        layers = []
        for index, layer in enumerate(placements[-1].layers):
            experts, rank_of = list(layer), first.rank_of_slots()
            spare = [slot for slot, expert in enumerate(experts) if expert == EMPTY or experts.count(expert) > 1]
            for slot in spare[(version + index) % 2::2]:
                here = {experts[other] for other in range(len(experts)) if rank_of[other] == rank_of[slot]}
                wanted = (slot + version + index) % SHAPE.num_routed_experts
                if experts[slot] == EMPTY:
                    experts[slot] = EMPTY if wanted in here else wanted
                elif experts.count(experts[slot]) > 1:
                    experts[slot] = EMPTY
            layers.append(tuple(experts))
        placements.append(dataclasses.replace(first, version=version, layers=tuple(layers)))
        placements[-1].check()
    return placements


def moved(rank: int, num_ranks: int, checkpoint_folder: Path, exchange: Exchange) -> dict[str, Tensor]:
    """The tokens of rows during whose steps experts move."""
    checkpoint, placements = open_checkpoint(checkpoint_folder), moving(num_ranks)
    found = load_model(checkpoint, dtype="float32", deterministic=True, exchange=exchange, placement=placements[0],
                       rank=rank)
    loader = ExpertLoader(checkpoint, found.shape, found.dtype, found.model, digests=found.digests)
    own = placements[0].slots_of_rank(rank)

    def move(step: int) -> None:
        if not 0 < step < len(placements):
            return
        for each in difference(placements[step - 1], placements[step]):
            if each.to_slot in own:
                loader.load(each.layer, each.to_slot - own.start, each.expert)
        found.model.use_placement(placements[step], rank)

    played = play(found.model, rank, num_ranks, 2, move)
    return {f"moved.{name}": value for name, value in played.items()}


# --- the processes -------------------------------------------------------------------------------------------------


def maps_of(num_ranks: int, row_formats: tuple[str, ...]) -> list[str]:
    """All, or the plainest and the fullest of them for the exchange that has one form of rows."""
    names = list(maps(num_ranks))
    return names if len(row_formats) > 1 else [names[0], names[-1]]


def modes(num_ranks: int, name: str, rows: str) -> tuple[str, ...]:
    """In which whole steps are run: in INT8 with one map alone, whose numbers one process can repeat."""
    if rows == "float32":
        return ("exact",)
    return ("exact", "fast") if name == list(maps(num_ranks))[num_ranks > 1] else ()


def compute(rank: int, num_ranks: int, folder: Path, checkpoint_folder: Path, make: Make,
            row_formats: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    results: dict[str, Tensor] = {}
    for name in maps_of(num_ranks, row_formats):
        placement = maps(num_ranks)[name]
        for rows in row_formats:
            exchange = make(f"{name}.{rows}", placement, rows)
            results |= scaled(f"{name}.{rows}", placement, rank, exchange)
            for mode in modes(num_ranks, name, rows):
                model = model_of(placement, rank, exchange, mode == "exact")
                for microbatches in (1, 2):
                    played = play(model, rank, num_ranks, microbatches)
                    results |= {f"{name}.{rows}.{mode}.{microbatches}.{key}": value for key, value in played.items()}
    results |= crowding(num_ranks, rank, make("crowded.float32", crowded(num_ranks), "float32"))
    results |= moved(rank, num_ranks, checkpoint_folder,
                     make("moving.float32", moving(num_ranks)[0], "float32"))
    save_file({name: value.contiguous() for name, value in results.items()}, folder / f"rank{rank}.safetensors")


def directly(rank: int, num_ranks: int, folder: Path, checkpoint_folder: Path, places: Mapping[str, str]) -> None:
    made = layouts(num_ranks)
    compute(rank, num_ranks, folder, checkpoint_folder,
            lambda name, placement, rows: opened(places[name], made[name], rank), FORMATS["direct"])


def collectively(rank: int, num_ranks: int, folder: Path, checkpoint_folder: Path) -> None:
    group = join_group(rank, num_ranks, file_store(folder / "store", num_ranks), timeout_s=60)
    compute(rank, num_ranks, folder, checkpoint_folder,
            lambda name, placement, rows: CollectiveExchange(group, placement.slots_per_rank), FORMATS["collective"])


