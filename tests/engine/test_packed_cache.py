"""Weights that were packed once are mapped by the next start: the same bits, or else they are packed again."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.checkpoints import tiny_config, write_checkpoint
from tests.engine.model.builders import hidden_in_chunks, new_cache, new_row, random_tokens
from tripool.core.placement import EMPTY, Placement
from tripool.engine import load, packed_cache
from tripool.engine.checkpoint import open_checkpoint
from tripool.engine.load import load_model
from tripool.engine.ops import native
from tripool.engine.relocate import ExpertLoader

pytestmark = pytest.mark.skipif(native.best_level() < 0, reason="without compiled kernels nothing is packed")

CONFIG = tiny_config("v3", mtp=1)
MOE_LAYERS = 3                   # with that of MTP
FILES = ["ends.packed", "layers.0.packed", "layers.1.packed", "layers.2.packed", "layers.3.packed"]
TOKENS = random_tokens(40)
FLAGS = {"dtype": "float32", "drafts": True}


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path / "model", CONFIG)
    return tmp_path / "model"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")


def hidden(found):
    return hidden_in_chunks(found.model, new_cache(found.model), new_row(TOKENS), (40,), 0)


def weights_of(found) -> list[torch.Tensor]:
    """Everything that is multiplied by."""
    model, made = found.model, [found.model.head, found.model.mtp_entries[0].join_in]
    layers = [*model.layers, model.mtp_layer.layer] if model.mtp_layer else model.layers
    for attention in [layer.attention for layer in layers] + [model.mtp_entries[0].attention]:
        made += [each for each in (attention.query_and_entry_in, attention.query_out, attention.out, attention.entry_in)
                 if each is not None]
    tensors = [part for each in made for part in (each.weight.parts if hasattr(each, "weight") else [each.weight_NK])]
    blocks = [block for block in model.moe_blocks if block is not None]
    for block in blocks:
        tensors += [part for slot in range(block.experts.num_experts) for part in block.experts.slot(slot)]
    for each in [layer.dense for layer in layers if hasattr(layer, "dense")] + [block.shared for block in blocks]:
        if hasattr(each, "stack"):
            tensors += [*each.stack.gate_up.parts, *each.stack.down.parts]
    expansions = [layer.attention.expansion for layer in layers]
    tensors += [part for each in expansions for weight in (each.latent_of_key, each.key, each.value)
                for part in weight.parts]
    return [*tensors, model.embed_VD, model.norm_D]


def same(one, other) -> bool:
    ours, theirs = weights_of(one), weights_of(other)
    return len(ours) == len(theirs) and all(torch.equal(*each) for each in zip(ours, theirs, strict=True))


def nothing_is_packed(monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("something was read or packed")

    monkeypatch.setattr(packed_cache, "load_weights", refuse)
    monkeypatch.setattr(packed_cache, "_write", refuse)


@pytest.mark.parametrize(("stored", "flags"), [
    ("int8", {}), ("int8", {"dtype": "bfloat16"}), ("int8", {"deterministic": True}), ("bfloat16", {}),
    ("float32", {}), ("float8", {}), ("bfloat16", {"int8_head": True}), ("int8", {"int8_head": True})])
def test_what_is_mapped_is_what_would_be_packed(tmp_path, root, monkeypatch, stored, flags):
    write_checkpoint(tmp_path / "model", CONFIG, dtype=stored)
    checkpoint, flags = open_checkpoint(tmp_path / "model"), FLAGS | ({"dtype": "auto"} if flags else {}) | flags
    packed = load_model(checkpoint, **flags)
    made = load_model(checkpoint, packed_root=root, **flags)
    nothing_is_packed(monkeypatch)
    mapped = load_model(checkpoint, packed_root=root, **flags)
    ends = "ends-int8.packed" if flags.get("int8_head") else "ends.packed"
    assert [path.name for path in files(root)] == [ends if name == "ends.packed" else name for name in FILES]
    for found in (made, mapped):
        assert same(found, packed) and torch.equal(hidden(found), hidden(packed))
        assert (found.digest, found.digests) == (packed.digest, packed.digests)


def test_nothing_is_kept_where_nothing_is_packed(tmp_path, root):
    write_checkpoint(tmp_path / "model", CONFIG)
    for flags in ({"dtype": "bfloat16"}, {"dtype": "float16"}, {"dtype": "float32", "load_format": "dummy"}):
        load_model(tmp_path / "model", packed_root=root, **flags)
    assert not root.exists()


SLOTS = {"in order": ((0, 1, 2), (3, 4, 5), (6, 7)),
         "copies, and the shared expert in slots": ((8, 0, 1, 2, EMPTY), (3, 4, 8, 0, 5), (EMPTY, 6, 7, 3))}


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("stored", ["int8", "bfloat16"])
def test_ranks_with_different_experts_have_one_file_of_a_layer(tmp_path, root, monkeypatch, stored, slots):
    write_checkpoint(tmp_path, CONFIG, dtype=stored)
    layer = tuple(expert for rank in SLOTS[slots] for expert in rank)
    placement = Placement(1, 1 + max(layer), tuple(map(len, SLOTS[slots])), (layer,) * MOE_LAYERS)
    flags = {"dtype": "float32", "placement": placement}
    load_model(tmp_path, packed_root=root, rank=1, **flags)
    sizes = [path.stat().st_size for path in files(root)]
    nothing_is_packed(monkeypatch)
    for rank, own in enumerate(SLOTS[slots]):
        mapped, packed = (load_model(tmp_path, rank=rank, packed_root=each, **flags) for each in (root, None))
        assert mapped.digest == packed.digest
        for ours, theirs in zip(mapped.model.moe_blocks[:2], packed.model.moe_blocks[:2], strict=True):
            for slot, expert in enumerate(own):
                assert expert == EMPTY or all(torch.equal(*each) for each in zip(
                    ours.experts.slot(slot), theirs.experts.slot(slot), strict=True))
        storage = mapped.model.moe_blocks[0].experts.stack.down.data.untyped_storage().nbytes()
        assert (storage in sizes) == (slots == "in order")         # side by side they are where the file is


def test_an_expert_moves_into_memory_of_its_own(folder, root):
    checkpoint = open_checkpoint(folder)
    load_model(checkpoint, packed_root=root, **FLAGS)
    before = {path: path.read_bytes() for path in files(root)}
    found, other, untouched = (load_model(checkpoint, packed_root=each, **FLAGS) for each in (root, root, None))
    loader = ExpertLoader(checkpoint, checkpoint.shape, found.dtype, found.model, digests=found.digests)
    for layer in range(MOE_LAYERS):
        loader.load(layer, 2, 5)
    for ours, theirs in zip(found.model.moe_blocks, untouched.model.moe_blocks, strict=True):
        for slot, expert in ((2, 5), (5, 5), (1, 1), (3, 3)):
            assert all(torch.equal(*each) for each in zip(ours.experts.slot(slot), theirs.experts.slot(expert),
                                                          strict=True))
    assert same(other, untouched)
    assert {path: path.read_bytes() for path in files(root)} == before


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "empty": lambda path: path.write_bytes(b""),
    "something else": lambda path: path.write_bytes(b"\xff" * 100_000),
    "a bit of the header": lambda path: flip(path, 200),
    "a bit of an expert": lambda path: flip(path, path.stat().st_size - 5000),
    "zeros, as after a crash": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again_with_one_warning(folder, root, caplog, monkeypatch, damage):
    checkpoint = open_checkpoint(folder)
    packed, _ = load_model(checkpoint, **FLAGS), load_model(checkpoint, packed_root=root, **FLAGS)
    whole = {path: path.read_bytes() for path in files(root)}
    broken = next(path for path in files(root) if path.name == "layers.1.packed")
    DAMAGE[damage](broken)
    with caplog.at_level(logging.WARNING):
        found = load_model(checkpoint, packed_root=root, **FLAGS)
    assert same(found, packed)
    assert [str(broken) in record.message for record in caplog.records] == [True], caplog.text
    assert {path: path.read_bytes() for path in files(root)} == whole


@pytest.mark.parametrize("change", ["weights", "time", "replaced", "quantisation", "packing"])
def test_what_was_made_from_something_else_is_not_used(folder, root, caplog, monkeypatch, change):
    load_model(folder, packed_root=root, **FLAGS)
    if change == "weights":
        write_checkpoint(folder, CONFIG, seed=1)
    elif change == "quantisation":
        write_checkpoint(folder, CONFIG, dtype="int8")
    elif change == "packing":
        monkeypatch.setattr(packed_cache, "packing", lambda: "another order")
    else:
        shard = folder / "model-00001-of-00002.safetensors"
        if change == "replaced":
            status = shard.stat()
            (folder / "copy").write_bytes(shard.read_bytes())
            (folder / "copy").rename(shard)
            os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
        else:
            os.utime(shard, ns=(0, 1_000_000_000))
    written = []
    real = packed_cache._write
    monkeypatch.setattr(packed_cache, "_write", lambda path, *rest: (written.append(path.name), real(path, *rest)))
    with caplog.at_level(logging.WARNING):
        assert same(load_model(folder, packed_root=root, **FLAGS), load_model(folder, **FLAGS))
    assert written and caplog.records == [] and [path.name for path in files(root)] == FILES
    assert change in ("time", "replaced") or sorted(written) == FILES


def test_a_matrix_packed_otherwise_has_another_name(monkeypatch):
    before = packed_cache.packing.__wrapped__()
    for file in ("packed", "float_linear"):
        monkeypatch.setattr(f"tripool.engine.ops.{file}.BLOCK", 8)
    assert packed_cache.packing.__wrapped__() != before


def no_folder(root, monkeypatch):
    root.write_text("a file")


def read_only(root, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **kwargs):
        if flags & os.O_CREAT and str(path).startswith(str(root)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest, **kwargs)

    monkeypatch.setattr(os, "open", refuse)


def too_little_space(root, monkeypatch):
    monkeypatch.setattr(packed_cache, "SPARE_BYTES", 1 << 60)


def full_while_writing(root, monkeypatch):
    real = packed_cache.bytes_of
    calls = iter(range(200))

    def until_full(tensor):
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(tensor)

    monkeypatch.setattr(packed_cache, "bytes_of", until_full)


@pytest.mark.parametrize("trouble", [no_folder, read_only, too_little_space, full_while_writing])
def test_where_nothing_can_be_written_weights_are_packed_in_memory_with_one_notice(folder, root, caplog, monkeypatch,
                                                                                  trouble):
    packed = load_model(folder, **FLAGS)
    trouble(root, monkeypatch)
    with caplog.at_level(logging.WARNING):
        found = load_model(folder, packed_root=root, **FLAGS)
    assert same(found, packed) and (found.digest, found.digests) == (packed.digest, packed.digests)
    assert ["packed weights are not kept" in record.message for record in caplog.records] == [True], caplog.text
    assert all(path.suffix == ".packed" for path in (files(root) if root.is_dir() else []))
    caplog.clear()
    halves = Placement(1, 8, (4, 4), (tuple(range(8)),) * MOE_LAYERS)
    with caplog.at_level(logging.WARNING):
        load_model(folder, packed_root=root, dtype="float32", placement=halves, rank=1)
    assert caplog.records == []                     # the first rank has said it


def test_files_that_are_there_need_no_lock(folder, root, monkeypatch):
    load_model(folder, packed_root=root, **FLAGS)
    read_only(root, monkeypatch)
    nothing_is_packed(monkeypatch)
    load_model(folder, packed_root=root, **FLAGS)


def test_how_far_loading_is_is_told_with_files_and_without(folder, root):
    for _ in range(2):
        calls: list[tuple[int, int]] = []
        load_model(folder, packed_root=root, progress=lambda done, total, calls=calls: calls.append((done, total)),
                   **FLAGS)
        assert len(calls) == len(FILES) and calls == sorted(calls) and calls[-1][0] == calls[-1][1]


KILLED = """
import os, pathlib, signal, sys
from tripool.engine.load import load_model
rename = pathlib.Path.rename
pathlib.Path.rename = lambda self, target: (
    os.kill(os.getpid(), signal.SIGKILL) if "layers.1" in self.name else rename(self, target))
load_model(pathlib.Path(sys.argv[1]), dtype="float32", packed_root=pathlib.Path(sys.argv[2]))
"""


def test_who_is_killed_leaves_nothing_that_looks_finished_and_those_who_start_together_pack_each_layer_once(
        folder, root, monkeypatch):
    done = subprocess.run([sys.executable, "-c", KILLED, folder, root], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in files(root)] == ["ends.packed", "layers.0.packed", "layers.1.unfinished"]
    made = []
    real = packed_cache._write
    monkeypatch.setattr(packed_cache, "_write", lambda path, *rest: (made.append(path.name), real(path, *rest)))
    packed = load_model(folder, **FLAGS)
    with ThreadPoolExecutor(3) as pool:             # the lock is between openings of a file, in whichever process
        found = list(pool.map(lambda _: load_model(folder, packed_root=root, **FLAGS), range(3)))
    assert sorted(made) == FILES[2:] == [path.name for path in files(root)][2:]
    assert all(same(each, packed) for each in found)


def test_random_weights_and_other_devices_leave_the_folder_alone(folder, root, monkeypatch):
    monkeypatch.setattr(load, "PackedCache", None)
    load_model(folder, packed_root=root, load_format="dummy")
    monkeypatch.setattr(native, "chosen_level", lambda: -1)
    load_model(folder, packed_root=root, **FLAGS)
