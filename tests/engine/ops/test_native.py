"""Which level of an operation runs."""

import logging
import shutil
import sys

import pytest
import torch

from tests.engine.ops.builders import LEVELS, experts, generator, rows, weight
from tripool.engine.ops import levels, native
from tripool.engine.ops.expert_ffn import expert_ffn
from tripool.engine.ops.int8_linear import int8_linear
from tripool.engine.ops.levels import explained


@pytest.fixture
def fresh_choice():
    """The choice is made anew, in the test and after it."""
    native.chosen_level.cache_clear()
    yield
    native.chosen_level.cache_clear()


def test_where_there_is_a_compiler_operations_are_built():
    if sys.platform != "linux" or (shutil.which("c++") is None and shutil.which("g++") is None):
        pytest.skip("no compiler")
    assert native.is_built(), "run `make native` and read what the compiler says"


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_can_be_forced(level):
    assert native.best_level(level) == min(level, native.best_level())


def test_below_the_lowest_level_the_definition_runs():
    assert native.best_level(-1) == -1


def test_the_choice_is_made_once_and_logged(fresh_choice, caplog):
    with caplog.at_level(logging.INFO):
        assert native.chosen_level() == native.chosen_level() == native.best_level()
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith("native operations")
    assert not native.is_built() or explained(native.best_level()) in caplog.text


def test_a_processor_without_vectors_is_told_what_it_lacks(fresh_choice, monkeypatch, caplog):
    monkeypatch.setattr(native, "best_level", lambda cap=native.BEST: 0)
    monkeypatch.setattr(levels, "processor_flags", lambda: {"sse2"})
    assert native.chosen_level() == 0
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "native operations: plain (no AVX2 on this processor), several times slower")]


@pytest.mark.parametrize(("module", "complaint"), [(None, "not built"), (object(), "of another version")])
def test_without_the_module_operations_run_their_definitions(fresh_choice, monkeypatch, caplog, module, complaint):
    chance = generator(1)
    x, linear, stack = rows(3, 20, chance), weight(7, 20, chance), experts(3, 20, 9, chance)
    row, expert = torch.tensor([0, 2, 2]), torch.tensor([1, 1, 0])
    expected = int8_linear(x, linear, level=-1), expert_ffn(x, row, expert, stack, level=-1)

    monkeypatch.setattr(native, "_native", module)
    assert native.chosen_level() == -1
    assert torch.equal(int8_linear(x, linear), expected[0])
    assert torch.equal(expert_ffn(x, row, expert, stack), expected[1])
    assert [complaint in record.message for record in caplog.records] == [True]


@pytest.mark.skipif(not native.is_built(), reason="the native module is not built")
def test_a_level_that_gives_other_results_is_passed_over(fresh_choice, monkeypatch, caplog):
    monkeypatch.setattr(native, "best_level", lambda cap=native.BEST: cap)
    monkeypatch.setattr(native, "is_right", lambda level: level < 3)
    assert native.chosen_level() == 2
    assert ["AMX INT8" in record.message for record in caplog.records if record.levelno == logging.WARNING] == [True]


@pytest.mark.skipif(not native.is_built(), reason="the native module is not built")
@pytest.mark.parametrize("wrong", native.SAMPLE)
def test_what_is_tried_tells_a_wrong_level_from_a_right_one(monkeypatch, wrong):
    assert native.is_right(native.AMX_EMULATED)
    product = native._product
    monkeypatch.setattr(native, "_product", lambda level, kind, *shape: product(level, kind, *shape) + (
        level > 0 and kind == wrong))
    assert not native.is_right(native.AMX_EMULATED)


@pytest.mark.skipif(not native.is_built(), reason="the native module is not built")
@pytest.mark.parametrize("kind", native.SAMPLE)
def test_what_is_tried_is_a_product(kind):
    """Of rows as they are rounded, and weights of all their bits: in no order of additions is a sum rounded."""
    for shape in native.SAMPLE[kind]:
        y = native._product(0, kind, *shape)
        assert y.abs().max() > 2 ** 13 and (kind == "int8" or torch.equal(y, y.round())), "of integers"
        assert shape[1] * 2 ** 14 < 2 ** 24, "a float32 holds every sum"
