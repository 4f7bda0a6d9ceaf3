"""Every choice of an expert is counted once, in the place where the expert map has it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.checkpoints import random_tensors, tiny_config
from tests.engine.driver import Driver
from tests.engine.model.builders import fused_weights, random_tokens
from tests.engine.test_microbatches import Failing
from tripool.core.placement import even_geometry, initial_placement
from tripool.core.shape import model_shape
from tripool.engine.model.deepseek import DeepseekModel

CONFIG = tiny_config("v3", mtp=1)
SHAPE = model_shape(CONFIG)
NUM_LAYERS = 3                                # two main ones and that of MTP, whose experts are not run


def model_with(num_shared_copies, deterministic=False):
    placement = initial_placement(even_geometry(1, SHAPE.num_routed_experts, num_shared_copies=num_shared_copies),
                                  NUM_LAYERS)
    weights = fused_weights(SHAPE, random_tensors(CONFIG), placement=placement)
    model = DeepseekModel(SHAPE, weights, Failing(), deterministic=deterministic)
    model.use_placement(placement, 0)
    return model


def watched(model):
    """The slow definition: each choice as it is made, counted one by one."""
    num_experts = SHAPE.num_routed_experts + int(model.moe_blocks[0].shared_by_map)
    counts = np.zeros((NUM_LAYERS, num_experts), int)
    for layer, block in enumerate(model.moe_blocks[:2]):
        def slots(expert_TK, layer=layer, table=block.slot_table, original=block.slot_table.slots):
            for row in expert_TK.tolist():
                for expert in row:
                    counts[layer, expert] += 1
            return original(expert_TK)
        block.slot_table.slots = slots
    return counts


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("num_shared_copies", [0, 1])
def test_loads_are_those_of_a_slow_count(num_shared_copies, num_microbatches):
    model = model_with(num_shared_copies)
    driver = Driver(model, num_microbatches=num_microbatches)
    counts = watched(model)
    tokens = 0
    for slot, length in enumerate((28, 1, 17)):
        driver.join(slot, random_tokens(length, seed=slot))
        driver.run({slot: 1000}, grows=driver.grow(driver.last))
        tokens += length + slot
    result = driver.run(reports_experts=True, grows=driver.grow(driver.last))
    tokens += 3
    found = np.frombuffer(result.expert_counts, "<i4").reshape(NUM_LAYERS, -1)
    assert np.array_equal(found, counts)
    assert found.sum(1).tolist() == [tokens * (3 + num_shared_copies)] * 2 + [0]
    if num_shared_copies:
        assert found[:2, -1].tolist() == [tokens] * 2

    counts[:] = 0
    assert driver.run(grows=driver.grow(driver.last)).expert_counts == b""
    result = driver.run(reports_experts=True, grows=driver.grow(driver.last))
    assert np.array_equal(np.frombuffer(result.expert_counts, "<i4").reshape(NUM_LAYERS, -1), counts)
    assert counts.sum() == 6 * 2 * (3 + num_shared_copies)


def test_a_step_that_was_given_up_counts_nothing():
    model = model_with(0)
    driver = Driver(model)
    driver.join(0, random_tokens(9))
    model.moe_blocks[0].exchange.countdown = 7
    assert driver.run({0: 9}).aborted
    driver.run({0: 9})
    result = driver.run(reports_experts=True)
    assert np.frombuffer(result.expert_counts, "<i4").sum() == 10 * 2 * 3


def test_a_rank_without_tokens_reports_zeros():
    driver = Driver(model_with(1))
    result = driver.run(reports_experts=True)
    assert result == replace(result, expert_counts=bytes(4 * NUM_LAYERS * 9))
