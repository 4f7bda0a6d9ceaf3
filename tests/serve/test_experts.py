"""Instances of several ranks: what becomes of them when one is gone."""

import os
import signal

import psutil
import pytest

from tests.fleet import served

pytestmark = pytest.mark.timeout(300)


def ranks_of(pools, member):
    """Processes of the ranks beside the first, which is the member itself."""
    return [child.pid for child in psutil.Process(pools.fleet.pids[member]).children()
            if "tripool.serve.ranks" in child.cmdline()]


def test_a_rank_that_dies_takes_its_instance_with_it_and_the_stream_goes_on(oracle, prompts):
    prompt = prompts(1, seed=31, longest=60)[0]
    with served(hybrid=1, restart=True, instance={"ranks": 2, "redundant_experts": 2},
                faults={"hybrid-0": {"run": 0.05}}, gateway={"place_deadline_s": 90.0}) as pools:
        answer = []
        for token in pools.stream_ids(prompt, 30):
            answer.append(token)
            if len(answer) == 10:
                lost, = ranks_of(pools, "hybrid-0")
                os.kill(lost, signal.SIGKILL)
        assert len(answer) == 30
        oracle.check(prompt, answer)
        assert pools.fleet.processes["hybrid-0"].restarts == 1
        pools.assert_conserved()
