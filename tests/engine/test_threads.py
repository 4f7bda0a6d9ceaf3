"""A rank's threads go to its kernels; torch has them only where there are no kernels."""

import pytest
import torch

from tripool.engine.ops import native
from tripool.engine.threads import set_rank_threads, set_threads


@pytest.fixture(autouse=True)
def as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    native.use_threads(1)


@pytest.mark.skipif(not native.is_built(), reason="the native module is not built")
def test_kernels_get_the_threads_of_a_rank():
    set_rank_threads(3)
    assert (native.num_threads(), torch.get_num_threads()) == (3, 1)


def test_torch_gets_them_where_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr(native, "chosen_level", lambda: -1)
    set_rank_threads(3)
    assert torch.get_num_threads() == 3


def test_tools_that_compute_with_torch_give_them_to_torch():
    set_threads(2)
    assert (native.num_threads(), torch.get_num_threads()) == (1, 2)
