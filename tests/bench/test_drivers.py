"""Engines in processes of their own: what they are asked, what they answer, how they fail."""

import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import drivers
from drive_transformers import Transformers
from drive_tripool import Tripool
from drivers import Engine, EngineFailed
from tests.checkpoints import tiny_config, write_checkpoint

FAKE = """
import os, sys, time
sys.path.insert(0, {peers!r})
import protocol

class Fake:
    about = dict(engine="fake", version="1", weights="none", pid=os.getpid())

    def __init__(self):
        if "no model" in sys.argv:
            raise FileNotFoundError("there is no model\\nat all")
        print("a library prints")

    def prefill(self, prompt):
        os.write(1, b"it prints again")
        if not prompt:
            raise ValueError("nothing to compute")
        if prompt == [13]:
            print("thirteen", file=sys.stderr)
            os._exit(3)
        if prompt == [60]:
            time.sleep(60)
        return 0.5

    def decode(self, prompts, forced):
        return [0.1 for _ in forced[0]]

protocol.run(Fake)
"""


@pytest.fixture
def fake(tmp_path):
    script = tmp_path / "drive_fake.py"
    script.write_text(textwrap.dedent(FAKE).format(peers=str(drivers.PEERS)))
    return [sys.executable, str(script)]


def test_a_driver_answers_whatever_its_library_prints(fake):
    with Engine("fake", fake) as engine:
        assert engine.about.pop("pid") > 0
        assert engine.about == {"ready": True, "engine": "fake", "version": "1", "weights": "none"}
        assert engine.ask({"prefill": [1]}) == {"seconds": 0.5}
        assert engine.ask({"decode": [[1], [2]], "forced": [[3, 4], [5, 6]]}) == {"seconds": [0.1, 0.1]}
        assert engine.most_bytes > 0


def test_an_engine_is_stopped_when_it_is_not_asked(fake):
    def stops(engine):
        ends = time.monotonic() + 10                       # a signal takes a moment
        while time.monotonic() < ends:
            if Path(f"/proc/{engine.about['pid']}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return True
        return False

    with Engine("fake", fake) as engine:
        assert stops(engine)
        engine.ask({"prefill": [1]})
        assert stops(engine)


def test_what_goes_wrong_is_said_and_the_driver_goes_on(fake):
    with Engine("fake", fake) as engine:
        with pytest.raises(EngineFailed, match="ValueError: nothing to compute"):
            engine.ask({"prefill": []})
        with pytest.raises(EngineFailed, match="as many forced tokens"):
            engine.ask({"decode": [[1], [2]], "forced": [[3, 4], [5]]})
        with pytest.raises(EngineFailed, match="decode_and_count"):
            engine.ask({"decode": [[1]], "forced": [[3]], "count_experts": True})
        assert engine.ask({"prefill": [1]}) == {"seconds": 0.5}
        assert not engine.is_gone


def test_a_driver_that_cannot_start_says_why_in_a_line(fake):
    with pytest.raises(EngineFailed, match=r"^FileNotFoundError: there is no model$"):
        Engine("fake", [*fake, "no model"])
    with pytest.raises(EngineFailed, match="No such file"):
        Engine("fake", ["/nowhere/bin/python"])


def test_of_a_driver_that_is_gone_the_last_lines_are_told(fake):
    with Engine("fake", fake) as engine:
        with pytest.raises(EngineFailed, match=r"ended with 3; .*thirteen"):
            engine.ask({"prefill": [13]})
        assert engine.is_gone
        with pytest.raises(EngineFailed, match="ended with 3"):
            engine.ask({"prefill": [1]})


def test_nobody_waits_for_ever(fake, monkeypatch):
    monkeypatch.setattr(drivers, "ANSWER_S", 0.1)
    with Engine("fake", fake) as engine, pytest.raises(EngineFailed, match="in time"):
        engine.ask({"prefill": [60]})


# ---------------------------------------------------------------- the two that are written in this environment

PROMPTS = [[5, 6, 7, 8], [100, 3, 50, 9], [9, 9, 9, 9]]
FORCED = [[20, 21, 22], [30, 31, 32], [9, 200, 9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint(folder, tiny_config("v3"), dtype="float32", num_shards=1)
    return folder


@pytest.fixture(scope="module")
def largest(folder):
    """Of each row, the most likely token after its prompt and after each forced token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    ids = torch.tensor([prompt + forced for prompt, forced in zip(PROMPTS, FORCED, strict=True)])
    with torch.inference_mode():
        return model(ids).logits[:, len(PROMPTS[0]) - 1:].argmax(-1).tolist()


def test_our_engine_computes_the_forced_tokens(folder, largest):
    driver = Tripool(str(folder), threads=1, rows=4, context=128)
    force, chosen = driver.forced._force, []

    def watched(slots_N, start_N, token_NJ):
        chosen.append(token_NJ[:, 0].copy())
        force(slots_N, start_N, token_NJ)

    driver.forced._force = watched
    for _ in range(2):                          # the second time nothing is left of the first
        chosen.clear()
        seconds, distinct = driver.decode_and_count(PROMPTS, FORCED)
        assert len(seconds) == 3
        assert min(seconds) > 0
        assert 3 <= distinct <= 8               # picks of one token, and all experts
        rows = torch.tensor([step.tolist() for step in chosen if len(step) == len(PROMPTS)]).T.tolist()
        assert rows == largest
    assert driver.prefill(PROMPTS[0]) > 0
    with pytest.raises(RuntimeError, match="did not stay together"):
        driver.decode([[7] * 100] * 4, [[8]] * 4)         # more than a step takes
    driver.offline.close()


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")      # its new name is not in older versions
def test_transformers_computes_the_forced_tokens(folder, largest, monkeypatch):
    driver = Transformers(str(folder), 1, "auto")
    step, chosen = driver._step, []

    def watched(*args):
        chosen.append(step(*args))
        return chosen[-1]

    monkeypatch.setattr(driver, "_step", watched)
    assert len(driver.decode(PROMPTS, FORCED)) == 3
    assert torch.stack(chosen).T.tolist() == largest
    assert driver.prefill(PROMPTS[0]) > 0
    with pytest.raises(ValueError, match="one length"):
        driver.decode([[1], [2, 3]], [[4], [5]])
