"""Small questions for the planner: the embedded model on a few described CPUs."""

from dataclasses import replace

from tripool.planner.fit import Machine
from tripool.planner.goals import Budget, Goals
from tripool.planner.search import Question
from tripool.planner.traffic import Traffic
from tripool.sim.costs.models import read_shape
from tripool.sim.hardware.description import read_hardware
from tripool.sim.requests import Workload, WorkRequest
from tripool.sim.synthetic import SyntheticWork

NUM_NODES = 6
CLUSTER = replace(read_hardware("cpu"), name="cluster", nodes=NUM_NODES)
MACHINE = Machine(read_shape("tiny"), CLUSTER)
GOALS = Goals(ttft_s=1.0, tpot_s=0.02, share=0.9)
WORK = SyntheticWork(10.0, 20.0, prompt_tokens=300, output_tokens=40)


def question(work: SyntheticWork | Workload = WORK, *, goals: Goals = GOALS, num_dies: int = NUM_NODES,
             **more: object) -> Question:
    return Question(MACHINE, Traffic(work, seed=1), goals, Budget(num_dies), **more)


def workload(*requests: tuple[float, list[tuple[int, int]], int]) -> Workload:
    """Requests as time, parts of the prompt, tokens of the answer."""
    return Workload("by hand", tuple(WorkRequest(at_s, tuple(parts), output) for at_s, parts, output in requests))
