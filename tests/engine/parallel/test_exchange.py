"""An instance of some ranks, experts split over all of them, gives what one process gives, by every exchange."""

import os

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import random_tensors
from tests.engine.model.builders import build_model, fused_weights, relative_error
from tests.engine.parallel import ranks
from tests.engine.parallel.builders import PLENTY, finish, start
from tripool.core.shape import model_shape
from tripool.engine.model.moe import MixtureOfExperts
from tripool.engine.model.products import Weights
from tripool.engine.ops.tiles import whole
from tripool.engine.parallel.exchange import LocalExchange
from tripool.engine.parallel.segment import create_segment


def computed_directly(folder, num_ranks, row_format):
    """What each rank computed over shared memory."""
    fd = create_segment(ranks.layout(num_ranks, row_format), PLENTY)
    try:
        processes = start(ranks.direct, num_ranks, folder, f"/proc/{os.getpid()}/fd/{fd}", row_format)
        assert finish(processes) == [0] * num_ranks
    finally:
        os.close(fd)
    return [load_file(folder / f"rank{rank}.safetensors") for rank in range(num_ranks)]


@pytest.fixture(scope="module", params=["collective", "direct"])
def two_ranks(tmp_path_factory, request):
    """What each rank computed."""
    folder = tmp_path_factory.mktemp("ranks")
    if request.param == "direct":
        return computed_directly(folder, 2, "float32")
    assert finish(start(ranks.collective, 2, folder)) == [0, 0]
    return [load_file(folder / f"rank{rank}.safetensors") for rank in (0, 1)]


def test_two_ranks_give_the_hidden_states_of_one_process(two_ranks):
    alone = ranks.run_steps(build_model(ranks.CONFIG), rank=None)
    for row, rank in enumerate(ranks.RANK_OF_ROW):
        assert relative_error(two_ranks[rank][f"row{row}.fast"], alone[f"row{row}"]) < 2e-5


def test_in_deterministic_mode_they_give_the_same_bits(two_ranks):
    alone = ranks.run_steps(build_model(ranks.CONFIG, deterministic=True), rank=None)
    for row, rank in enumerate(ranks.RANK_OF_ROW):
        assert torch.equal(two_ranks[rank][f"row{row}.deterministic"], alone[f"row{row}"])


@pytest.mark.parametrize("name", ["some", "none"])
def test_over_two_ranks_the_routed_scale_is_applied_once_and_to_the_routed_part_alone(two_ranks, name):
    for rank, results in enumerate(two_ranks):
        shared = [results[f"{name}.{scale}.shared"] for scale in ranks.SCALES]
        routed = [results[f"{name}.{scale}"] - shared[0] for scale in ranks.SCALES]
        assert torch.equal(*shared)
        assert torch.allclose(routed[1], 2.5 * routed[0], rtol=1e-5, atol=1e-6)
        weights = fused_weights(model_shape(ranks.CONFIG), random_tensors(ranks.CONFIG))
        alone = MixtureOfExperts(model_shape(ranks.CONFIG), Weights(weights), 1, LocalExchange(), whole, False)
        x = ranks.block_input(name, rank, shared[0].shape[0])
        assert torch.allclose(results[f"{name}.2.5"], alone(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_ranks", "row_format"), [(4, "int8"), (8, "int8"), (8, "float32")])
def test_more_ranks_give_the_bits_of_a_process_that_sends_the_same_rows(tmp_path, num_ranks, row_format):
    """As they are, or quantised early. Half or more of the ranks never have a token of their own."""
    found = computed_directly(tmp_path, num_ranks, row_format)
    exchange = LocalExchange(quantised=row_format == "int8")
    alone = ranks.run_steps(build_model(ranks.CONFIG, deterministic=True, exchange=exchange), rank=None)
    for row, rank in enumerate(ranks.RANK_OF_ROW):
        assert torch.equal(found[rank][f"row{row}.deterministic"], alone[f"row{row}"])
    exact = ranks.run_steps(build_model(ranks.CONFIG, deterministic=True), rank=None)
    assert torch.equal(alone["row0"], exact["row0"]) == (row_format == "float32")       # it does quantise


def test_a_rank_that_is_gone_is_an_error_and_not_a_wait(tmp_path):
    assert finish(start(ranks.leave_early, 2, tmp_path)) == [0, 0]
    assert (tmp_path / "noted").read_text()
