"""An expert that moves is the one that loading would have put there, or it does not move."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
import torch

from tests.checkpoints import tiny_config, write_checkpoint
from tests.engine.driver import Driver
from tests.engine.model.builders import random_tokens
from tripool.core.errors import CheckpointError
from tripool.core.placement import EMPTY, Placement, even_geometry, initial_placement
from tripool.core.shape import model_shape
from tripool.engine import relocate
from tripool.engine.checkpoint import open_checkpoint
from tripool.engine.load import load_model
from tripool.engine.relocate import ExpertLoader

CONFIG = tiny_config("v3", mtp=1)
NUM_LAYERS = 3                                # two main ones and that of MTP
IN_ORDER = (*range(8), 8)                     # of one rank, with a slot for the shared expert
TURNED_ROUND = (8, *range(7, -1, -1))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def placement_of(layer, version=1):
    return Placement(version, 9, (len(layer),), (tuple(layer),) * NUM_LAYERS)


def loaded(checkpoint, layer, dtype="float32", deterministic=False, **options):
    return load_model(checkpoint, dtype=dtype, deterministic=deterministic, placement=placement_of(layer), **options)


def loader_of(checkpoint, found, **options):
    return ExpertLoader(checkpoint, checkpoint.shape, found.dtype, found.model, digests=found.digests, **options)


def stacks(found, layer):
    experts = found.model.moe_blocks[layer].experts
    return [experts.slot(slot) for slot in range(experts.num_experts)]


@pytest.mark.parametrize(("stored", "computed", "deterministic"), [
    ("float32", "float32", False), ("bfloat16", "float32", False), ("float8", "float32", False),
    ("float16", "bfloat16", False), ("bfloat16", "bfloat16", False), ("float8", "bfloat16", False),      # turned
    ("int8", "float32", False), ("int8", "bfloat16", False), ("int8", "float32", True),                  # packed
    ("float32", "float32", True), ("bfloat16", "float32", True), ("float8", "float32", True)])     # as they lie
def test_every_expert_that_moves_is_what_loading_would_have_put_there(tmp_path, stored, computed, deterministic):
    write_checkpoint(tmp_path, CONFIG, dtype=stored)
    checkpoint = open_checkpoint(tmp_path)
    moved, wanted = (loaded(checkpoint, layer, computed, deterministic) for layer in (IN_ORDER, TURNED_ROUND))
    loader = loader_of(checkpoint, moved)
    for layer in range(NUM_LAYERS):
        for slot, expert in enumerate(TURNED_ROUND):
            loader.load(layer, slot, expert)
    moved.model.use_placement(placement_of(TURNED_ROUND, 2), 0)
    for layer in range(NUM_LAYERS - 1):
        for ours, theirs in zip(stacks(moved, layer), stacks(wanted, layer), strict=True):
            assert all(torch.equal(*each) for each in zip(ours, theirs, strict=True))
    assert moved.model.moe_blocks[NUM_LAYERS - 1] is None           # MTP: nothing is kept, nothing was done


def test_experts_may_move_while_steps_run_and_no_token_changes(tmp_path):
    """C19: into empty slots, in a thread of their own; each map is used from the step on after its moves."""
    write_checkpoint(tmp_path, CONFIG, dtype="float32")
    checkpoint = open_checkpoint(tmp_path)
    start = (*range(8), 8, EMPTY, EMPTY)
    found = loaded(checkpoint, start, deterministic=True)
    loader, driver, still = loader_of(checkpoint, found), Driver(found.model), Driver(
        loaded(checkpoint, start, deterministic=True).model)
    for each in (driver, still):
        each.join(0, random_tokens(25))
        each.prefill(0, [10, 1000])
    layer, free = list(start), [9, 10]
    for version, expert in enumerate((3, 8, 0, 5, 7), start=2):
        slot = free.pop(0)
        moving = threading.Thread(target=lambda slot=slot, expert=expert: [
            loader.load(index, slot, expert) for index in range(NUM_LAYERS)])
        moving.start()
        while moving.is_alive():
            driver.decode(1)
            still.decode(1)
        moving.join()
        free.append(layer.index(expert))
        layer[layer.index(expert)] = EMPTY
        layer[slot] = expert
        found.model.use_placement(placement_of(layer, version), 0)
        for garbage in free:                                        # nobody reads what no map names
            for index in range(NUM_LAYERS - 1):
                for tensor in found.model.moe_blocks[index].experts.slot(garbage):
                    tensor.fill_(torch.nan)
        driver.decode(2)
        still.decode(2)
    assert driver.output == still.output and len(driver.output[100]) > 11


def test_a_move_that_is_interrupted_leaves_the_old_map_usable_and_may_begin_again(tmp_path, monkeypatch):
    """C19: wherever it was interrupted, while reading or half-way through writing."""
    write_checkpoint(tmp_path, CONFIG, dtype="float32")
    checkpoint = open_checkpoint(tmp_path)
    start = (*range(8), 8, EMPTY)
    found, still = (loaded(checkpoint, start, deterministic=True) for _ in range(2))
    loader, driver, reference = loader_of(checkpoint, found), Driver(found.model), Driver(still.model)
    monkeypatch.setattr(relocate, "COPIED_ELEMENTS", 512)
    for each in (driver, reference):
        each.join(0, random_tokens(25))
        each.prefill(0)

    class Interrupted(Exception):
        pass

    for rests in (1, 3, 5, 8):
        left = iter(range(rests))

        def rest(left=left):
            if next(left, None) is None:
                raise Interrupted

        monkeypatch.setattr(relocate, "_rest", rest)
        with pytest.raises(Interrupted):
            loader.load(0, 9, 4)
        driver.decode(2)
        reference.decode(2)
    monkeypatch.setattr(relocate, "_rest", lambda: None)
    loader.load(0, 9, 4)
    layers = ((0, 1, 2, 3, EMPTY, 5, 6, 7, 8, 4), start, start)
    found.model.use_placement(replace(placement_of(start, 2), layers=layers), 0)
    driver.decode(3)
    reference.decode(3)
    assert driver.output == reference.output


def tensor_file(checkpoint, name="model.layers.1.mlp.experts.4.up_proj.weight"):
    return checkpoint.tensors[name]


def test_a_file_that_has_been_written_since_is_refused_by_name(tmp_path):
    write_checkpoint(tmp_path, CONFIG)
    checkpoint = open_checkpoint(tmp_path)
    found = loaded(checkpoint, IN_ORDER)
    before = [tensor.clone() for tensor in stacks(found, 0)[2]]
    stored = tensor_file(checkpoint)
    with stored.file.open("r+b") as file:
        file.seek(stored.start)
        file.write(b"\x01\x02")
    os.utime(stored.file, ns=(0, stored.identity.mtime_ns + 1_000_000))
    with pytest.raises(CheckpointError, match=f"{stored.file.name}.* is not the file that was checked"):
        loader_of(checkpoint, found).load(0, 2, 4)
    assert all(torch.equal(*each) for each in zip(before, stacks(found, 0)[2], strict=True))


def test_contents_that_were_changed_behind_the_files_back_are_refused_by_their_digest(tmp_path):
    write_checkpoint(tmp_path, CONFIG)
    checkpoint = open_checkpoint(tmp_path)
    found = loaded(checkpoint, IN_ORDER)
    stored = tensor_file(checkpoint)
    with stored.file.open("r+b") as file:
        file.seek(stored.start)
        byte = file.read(1)
        file.seek(stored.start)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(stored.file, ns=(stored.identity.mtime_ns, stored.identity.mtime_ns))
    before = [tensor.clone() for tensor in stacks(found, 0)[2]]
    with pytest.raises(CheckpointError, match=f"{stored.file.name}: {stored.name} has not the contents"):
        loader_of(checkpoint, found).load(0, 2, 4)
    assert all(torch.equal(*each) for each in zip(before, stacks(found, 0)[2], strict=True))


@pytest.mark.parametrize("how", ["replaced", "gone", "cut off"])
def test_a_file_that_is_another_or_none_is_refused_by_name(tmp_path, how):
    write_checkpoint(tmp_path, CONFIG)
    checkpoint = open_checkpoint(tmp_path)
    found = loaded(checkpoint, IN_ORDER)
    stored = tensor_file(checkpoint)
    if how == "replaced":
        copy = tmp_path / "copy"
        copy.write_bytes(stored.file.read_bytes())
        os.utime(copy, ns=(stored.identity.mtime_ns, stored.identity.mtime_ns))
        copy.rename(stored.file)
    elif how == "gone":
        stored.file.unlink()
    else:
        os.truncate(stored.file, stored.start + 4)
    with pytest.raises(CheckpointError, match=stored.file.name):
        loader_of(checkpoint, found).load(0, 2, 4)


def test_random_weights_stay_what_they_are(tmp_path):
    write_checkpoint(tmp_path, CONFIG)
    checkpoint = open_checkpoint(tmp_path)
    found = loaded(checkpoint, IN_ORDER, load_format="dummy")
    before = [tensor.clone() for tensor in stacks(found, 0)[2]]
    loader_of(checkpoint, found, load_format="dummy").load(0, 2, 4)
    assert all(torch.equal(*each) for each in zip(before, stacks(found, 0)[2], strict=True))


def test_a_map_that_changes_one_layer_makes_one_table(tmp_path):
    write_checkpoint(tmp_path, CONFIG)
    found = loaded(open_checkpoint(tmp_path), IN_ORDER)
    tables = [block.slot_table for block in found.model.moe_blocks[:2]]
    old = placement_of(IN_ORDER)
    found.model.use_placement(replace(old, version=2, layers=(IN_ORDER, TURNED_ROUND, IN_ORDER)), 0)
    assert found.model.moe_blocks[0].slot_table is tables[0]
    assert found.model.moe_blocks[1].slot_table is not tables[1]
    found.model.use_placement(old, 1)                               # another rank begins elsewhere: all are new
    assert found.model.moe_blocks[0].slot_table is not tables[0]


def test_a_map_in_which_a_rank_is_lost_names_the_slots_of_others(tmp_path):
    write_checkpoint(tmp_path, CONFIG)
    shape = model_shape(CONFIG)
    placement = initial_placement(even_geometry(2, 8, num_redundant=8), NUM_LAYERS)
    found = load_model(open_checkpoint(tmp_path), placement=placement, dtype="float32")
    lost = tuple(EMPTY if slot >= 8 else expert for slot, expert in enumerate(placement.layers[0]))
    found.model.use_placement(replace(placement, version=2, layers=(lost,) * NUM_LAYERS), 0)
    experts = torch.arange(shape.num_routed_experts).repeat(3, 1)
    assert found.model.moe_blocks[0].slot_table.slots(experts).max() < 8


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_row_more_takes_some_time(tmp_path, load_format, deterministic):
    write_checkpoint(tmp_path, CONFIG)
    found = loaded(open_checkpoint(tmp_path), IN_ORDER, load_format=load_format, deterministic=deterministic)
    assert 0 < found.model.seconds_per_token() < 1e-3
