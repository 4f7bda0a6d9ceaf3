"""An instance of two ranks, experts split over both, gives what one process gives."""

import multiprocessing

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import random_tensors
from tests.engine.model.builders import build_model, fused_weights, relative_error
from tests.engine.parallel import ranks
from tripool.core.shape import model_shape
from tripool.engine.model.moe import MixtureOfExperts
from tripool.engine.ops.tiles import whole
from tripool.engine.parallel.exchange import LocalExchange


def run_ranks(target, folder, num_ranks=2):
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=target, args=(rank, num_ranks, folder)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each rank computed."""
    folder = tmp_path_factory.mktemp("ranks")
    assert run_ranks(ranks.main, folder) == [0, 0]
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
        alone = MixtureOfExperts(model_shape(ranks.CONFIG), weights, 1, LocalExchange(), whole, False)
        x = ranks.block_input(name, rank, shared[0].shape[0])
        assert torch.allclose(results[f"{name}.2.5"], alone(x), rtol=1e-5, atol=1e-5)


def test_a_rank_that_is_gone_is_an_error_and_not_a_wait(tmp_path):
    assert run_ranks(ranks.leave_early, tmp_path) == [0, 0]
    assert (tmp_path / "noted").read_text()
