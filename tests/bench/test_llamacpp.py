"""What drives llama.cpp, without llama.cpp: a script stands in for the Python of its environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from peers.drive_llamacpp import gguf, server_command


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def environment(folder: Path, converter: str) -> Path:
    """An environment whose Python does `converter`; it is given CONVERTER MODEL --outfile PATH --outtype WEIGHTS."""
    python = folder / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{converter}\n")
    python.chmod(0o755)
    return folder / "env"


def test_a_checkpoint_is_converted_once_for_each_form(tmp_path: Path, checkpoint: Path):
    env = environment(tmp_path, f'echo "$6" >> {tmp_path / "runs"}; cp "$2/model.safetensors" "$4"')

    made = [gguf(env, checkpoint, weights) for weights in ("bf16", "q8_0", "bf16")]

    assert made[0] == made[2] != made[1]
    assert made[0].read_bytes() == b"weights"
    assert (tmp_path / "runs").read_text().split() == ["bf16", "q8_0"]


def test_a_checkpoint_that_changed_is_converted_anew(tmp_path: Path, checkpoint: Path):
    env = environment(tmp_path, 'cp "$2/model.safetensors" "$4"')
    before = gguf(env, checkpoint, "bf16")
    (checkpoint / "model.safetensors").write_bytes(b"other weights")

    assert gguf(env, checkpoint, "bf16").read_bytes() == b"other weights"
    assert before.read_bytes() == b"weights"


def test_a_conversion_that_failed_leaves_nothing_that_looks_finished(tmp_path: Path, checkpoint: Path):
    env = environment(tmp_path, 'echo half > "$4"; exit 3')

    with pytest.raises(subprocess.CalledProcessError):
        gguf(env, checkpoint, "bf16")

    assert not list((env / "gguf").glob("*.gguf"))


def test_every_slot_of_the_server_has_the_context_that_was_asked_for(tmp_path: Path, checkpoint: Path):
    env = environment(tmp_path, 'touch "$4"')

    command = server_command(env, checkpoint, "q8_0", port=8123, threads=2, parallel=32, context=512)

    assert command[command.index("--parallel") + 1] == "32"
    assert command[command.index("--ctx-size") + 1] == str(32 * 512)
    assert command[command.index("--model") + 1] == str(gguf(env, checkpoint, "q8_0"))
