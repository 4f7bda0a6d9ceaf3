"""The kernels' threads: the pool itself, by a small program (threads.cpp), and operations that share their work."""

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.engine.ops.builders import LEVELS, compiler_library, experts, generator, rows, weight
from tripool.engine.ops import native
from tripool.engine.ops.expert_ffn import expert_ffn
from tripool.engine.ops.int8_linear import int8_linear
from tripool.engine.parallel.quantise import quantise

HERE = Path(__file__).parent
POOL = Path(native.__file__).parent / "csrc" / "threads.cpp"
CHECKS = ("once", "together", "one_part", "ends", "nested", "callers", "taken", "child", "sleeps", "rounding", "memory")
THREADS = (1, 2, 3, 7)
needs_native = pytest.mark.skipif(not native.is_built(), reason="the native module is not built")


@pytest.fixture(autouse=True)
def one_thread_again():
    yield
    native.use_threads(1)


def built(folder: Path, *flags: str) -> Path:
    """The program with the checks."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler, which the package can do without")
    program = folder / "threads"
    subprocess.run([compiler, "-std=c++17", "-O1", "-pthread", *flags, HERE / "threads.cpp", POOL, "-o", program],
                   check=True)
    return program


def complaints(program: Path, *checks: str) -> str:
    """Without what is preloaded here: an address sanitizer's allocator may be locked in a child of several threads."""
    alone = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([program, *checks], capture_output=True, text=True, timeout=60, env=alone)
    return "" if (done.returncode, done.stdout.split()) == (0, list(checks)) else done.stdout + done.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return built(tmp_path_factory.mktemp("threads"))


@pytest.mark.parametrize("check", CHECKS)
def test_the_pool_does_what_it_promises(program, check):
    assert complaints(program, check) == ""


@pytest.mark.slow
def test_the_pool_has_no_races(tmp_path):
    """`child` is left out: a sanitizer does not follow a fork of several threads."""
    if not compiler_library("libtsan.so"):
        pytest.skip("there is no C++ compiler with a thread sanitizer")
    checked = built(tmp_path, "-g", "-fsanitize=thread")
    assert complaints(checked, *(each for each in CHECKS if each not in ("child", "sleeps"))) == ""


def work(level: int):
    """Calls of operations: no rows, few, odd numbers and many, small and large weights, each form of rows."""
    chance = generator(level, 1)
    linears = [weight(*shape, chance) for shape in ((5, 7), (700, 513), (33, 7168))]
    stacks = [(experts(*shape, chance), shape) for shape in ((3, 9, 5), (6, 257, 330))]
    calls = []
    for num_rows in (0, 1, 2, 17, 90, 300) if level else (0, 1, 2, 17):
        for linear in linears:
            x = rows(num_rows, linear.num_inputs, chance)
            for given, scale in ((x, None), (x.bfloat16(), None), quantise(x)):
                calls.append(lambda given=given, linear=linear, scale=scale:
                             int8_linear(given, linear, scale_T=scale, level=level))
        for stack, (num_experts, width, _) in stacks:
            x = rows(num_rows, width, chance)
            row = torch.arange(num_rows).repeat_interleave(6)
            expert = torch.randint(0, num_experts, (len(row),), generator=chance)
            for given, scale in ((x, None), quantise(x)):
                calls.append(lambda given=given, scale=scale, row=row, expert=expert, stack=stack:
                             expert_ffn(given, row, expert, stack, scale_M=scale, level=level))
    return calls


def bits(calls) -> list[bytes]:
    return [call().numpy().tobytes() for call in calls]


@pytest.mark.parametrize("level", LEVELS)
def test_results_do_not_depend_on_the_number_of_threads(level):
    calls = work(level)
    expected = bits(calls)
    for number in THREADS:
        native.use_threads(number)
        assert native.num_threads() == number
        assert bits(calls) == expected, number


@needs_native
def test_an_operation_makes_the_threads_it_needs_and_one_thread_needs_no_others():
    calls = work(native.chosen_level())
    assert num_workers() == 0
    native.use_threads(3)
    assert num_workers() == 0
    bits(calls)
    assert num_workers() == 2
    native.use_threads(1)
    assert num_workers() == 0


@needs_native
def test_no_operation_has_less_than_one_thread():
    with pytest.raises(AssertionError, match="0 threads"):
        native.use_threads(0)


@needs_native
def test_several_threads_may_call_operations_while_their_number_changes():
    calls = work(native.chosen_level())
    expected = bits(calls)
    found: dict[int, list[bytes]] = {}

    def call(number: int) -> None:
        found[number] = bits(calls)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for each in callers:
        each.start()
    for number in (2, 3, 1, 7, 2):
        native.use_threads(number)
    for each in callers:
        each.join()
    assert [found[number] == expected for number in range(3)] == [True] * 3


@needs_native
def test_a_forked_child_has_threads_of_its_own():
    calls = work(native.chosen_level())
    native.use_threads(3)
    expected = bits(calls)
    child = os.fork()
    if not child:
        good = False
        try:
            before = num_workers()
            good = before == 0 and bits(calls) == expected and num_workers() == 2
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bits(calls) == expected


@needs_native
def test_denormals_are_on_all_threads_as_the_caller_has_them():
    chance = generator(5)
    linear, x = weight(1500, 64, chance), rows(64, 64, chance).abs().clamp(1e-3, 1.0)
    linear.scale.fill_(1e-42)
    kept = int8_linear(x, linear)
    assert kept.count_nonzero() > 0 and kept.abs().max() < torch.finfo(torch.float32).tiny
    native.use_threads(3)
    try:
        torch.set_flush_denormal(True)
        assert all(int8_linear(x, linear).count_nonzero() == 0 for _ in range(20))
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(int8_linear(x, linear), kept) for _ in range(20))


def num_workers() -> int:
    """Threads of the pool besides the caller; one that has ended may be seen for a moment more."""
    found = -1
    for _ in range(100):
        before, found = found, sum(map(is_worker, Path("/proc/self/task").iterdir()))
        if before == found:
            break
        time.sleep(0.02)
    return found


def is_worker(task: Path) -> bool:
    try:
        return (task / "comm").read_text() == "tripool kernels\n"
    except OSError:
        return False                  # it is gone
