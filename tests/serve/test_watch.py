"""Processes that end, stop, hang or only take their time."""

import queue
import signal
import subprocess
import sys
import time

import pytest

from tripool.serve.watch import LOOK_S, PATIENCE, RankWatch, look_at

NOTICED_S = 1.0          # within which a rank that does nothing has to be noticed on a machine that is not overloaded
SLEEPS = "import time; print(flush=True); time.sleep(60)"
COMPUTES = "print(flush=True)\nwhile True: pass"


class Ranks:
    """One process under watch, and what is said of it."""

    def __init__(self, program, *, expected=False):
        self.expected = expected
        self.lost = queue.SimpleQueue()
        self.process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        self.process.stdout.readline()
        self.watch = RankWatch(lambda rank: self.expected, lambda rank, cause: self.lost.put((rank, cause)))
        self.watch.add(3, self.process.pid)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def cause(self, within_s=30.0):
        rank, cause = self.lost.get(timeout=within_s)
        assert rank == 3
        return cause

    def is_left_alone(self):
        time.sleep(2 * PATIENCE * LOOK_S)
        return self.lost.empty()


def test_patience_ends_within_the_second():
    assert PATIENCE * LOOK_S < NOTICED_S


def test_a_process_that_ends_is_lost():
    with Ranks(SLEEPS) as ranks:
        ranks.process.kill()
        assert "ended" in ranks.cause()


def test_a_process_that_is_stopped_is_lost_whether_or_not_anybody_waits_for_it():
    with Ranks(SLEEPS) as ranks:
        ranks.process.send_signal(signal.SIGSTOP)
        assert "stopped" in ranks.cause()


def test_a_process_that_goes_on_in_time_is_kept():
    with Ranks(SLEEPS) as ranks:
        for _ in range(3):
            ranks.process.send_signal(signal.SIGSTOP)
            time.sleep(PATIENCE * LOOK_S / 3)
            ranks.process.send_signal(signal.SIGCONT)
            time.sleep(3 * LOOK_S)
        assert ranks.is_left_alone()


def test_a_process_that_sleeps_is_lost_only_while_others_wait_for_it():
    with Ranks(SLEEPS) as ranks:
        assert ranks.is_left_alone()
        ranks.expected = True
        assert "does nothing" in ranks.cause()


def test_a_process_that_computes_is_slow_but_not_lost():
    with Ranks(COMPUTES, expected=True) as ranks:
        assert ranks.is_left_alone()


def test_one_process_after_another_is_watched():
    with Ranks(SLEEPS) as first:
        with Ranks(SLEEPS) as second:
            first.watch.add(5, second.process.pid)
            second.process.kill()
            assert first.lost.get(timeout=30.0)[0] == 5
        first.process.kill()
        assert first.lost.get(timeout=30.0)[0] == 3


@pytest.mark.parametrize("state", ["R", "S"])
def test_a_look_tells_state_and_processor_time(state):
    with Ranks(COMPUTES if state == "R" else SLEEPS) as ranks:
        deadline = time.monotonic() + 10
        while look_at(ranks.process.pid).state != state and time.monotonic() < deadline:
            time.sleep(0.01)
        assert look_at(ranks.process.pid).state == state
    assert look_at(ranks.process.pid) is None
