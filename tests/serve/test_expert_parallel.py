"""However experts are spread, moved and reached, a request's tokens are those of one process."""

import itertools
import random
from contextlib import closing

import psutil
import pytest

from tests.checkpoints import tiny_config, write_checkpoint
from tripool.core.deployment import Deployment, InstanceConfig, ModelConfig
from tripool.core.messages import Rebalance
from tripool.core.placement import EMPTY
from tripool.core.request import Limits, Request, Sampling, pack_tokens, unpack_tokens
from tripool.serve.offline import Offline

pytestmark = pytest.mark.timeout(600)

NUM_REQUESTS = 100
NUM_TOKENS = 10


def requests():
    generator = random.Random(3)
    return [Request(number, pack_tokens([generator.randrange(3, 320) for _ in range(generator.randrange(1, 30))]),
                    Sampling(temperature=0.0, seed=number), Limits(NUM_TOKENS)) for number in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "model"
    write_checkpoint(folder, tiny_config("v3", n_routed_experts=16, mtp=1))
    return folder


def offline(folder, ranks=1, **fields):
    config = InstanceConfig(count=1, ranks=ranks, threads=1, max_num_seqs=8, max_num_batched_tokens=48,
                            cache_tokens=4096, **fields)
    return Offline(Deployment(model=ModelConfig(path=str(folder), deterministic=True), hybrid=config, block_tokens=16))


def answers(engine, asked):
    found = {each.request_id: [] for each in asked}

    def take(output):
        assert output.error is None, output.error
        found[output.request_id] += unpack_tokens(output.tokens)

    engine.generate(asked, take)
    return found


@pytest.fixture(scope="module")
def expected(folder):
    with closing(offline(folder)) as engine:
        return answers(engine, requests())


def random_map(rebalancer, generator):
    """Every expert somewhere, some with copies, some slots empty; the shared expert stays where it is."""
    placement, geometry = rebalancer.placement, rebalancer.geometry
    layers = []
    for named in placement.layers:
        layer = [EMPTY] * len(named)
        for slot in geometry.shared_slots:
            layer[slot] = geometry.num_routed
        free = {rank: [slot for slot in placement.slots_of_rank(rank) if layer[slot] == EMPTY]
                for rank in range(placement.num_ranks)}
        experts = list(range(geometry.num_routed))
        generator.shuffle(experts)
        more = [generator.randrange(geometry.num_routed) for _ in range(geometry.num_redundant)]
        for expert in experts + more:
            there = {placement.rank_of(slot) for slot, held in enumerate(layer) if held == expert}
            ranks = [rank for rank, slots in free.items() if slots and rank not in there]
            if ranks:
                layer[free[generator.choice(ranks)].pop()] = expert
        layers.append(tuple(layer))
    return placement.__class__(placement.version, placement.num_experts, placement.slots_per_rank, tuple(layers))


def move_at_every_step(engine):
    """From now on the instance is told to take another map after each step."""
    generator, run, rebalancer = random.Random(5), engine.ranks.run, engine.scheduler.rebalancer

    def run_and_tell(plan):
        engine.tell(Rebalance(random_map(rebalancer, generator).pack()))
        return run(plan)

    engine.ranks.run = run_and_tell


QUICK = [
    (2, {"redundant_experts": 2, "microbatches": True, "num_speculative_tokens": 2}),
    (4, {"redundant_experts": 16, "exchange_tokens": 8, "shared_expert_copies": 2}),
]
MORE = [
    (1, {}),
    (2, {"redundant_experts": 2, "microbatches": True}),
    (4, {"redundant_experts": 16, "num_speculative_tokens": 1}),
    (2, {"redundant_experts": 0}),
    (2, {"redundant_experts": 0, "microbatches": True, "exchange": "collective"}),
    (2, {"redundant_experts": 16}),
    (2, {"redundant_experts": 2, "exchange": "collective"}),
    (4, {"redundant_experts": 0, "microbatches": True}),
    (4, {"redundant_experts": 2, "microbatches": True, "exchange_tokens": 8}),
    (4, {"redundant_experts": 16, "microbatches": True, "exchange": "collective"}),
    (8, {"redundant_experts": 0}),
    (8, {"redundant_experts": 2, "microbatches": True}),
    (8, {"redundant_experts": 16, "exchange": "collective"}),
    (20, {"redundant_experts": 2, "shared_expert_copies": 2}),         # the paper's EP320, a sixteenth of its experts
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]


@pytest.mark.parametrize(("ranks", "fields"), CASES)
def test_tokens_equal_those_of_one_process_while_experts_move_at_every_step(folder, expected, ranks, fields):
    """Case C19 among others."""
    with closing(offline(folder, ranks, **fields)) as engine:
        move_at_every_step(engine)
        assert answers(engine, requests()) == expected
        figures = engine.scheduler.rebalancer.figures()
    if ranks > 1 and fields["redundant_experts"]:
        assert figures.num_moves > 20, "hardly anything moved; the test proves nothing"
    else:
        assert figures.num_moves == 0


def test_early_int8_with_moving_experts_gives_what_one_process_gives_that_quantises_the_same_rows(folder):
    asked = requests()[:30]
    with closing(offline(folder, exchange_rows="int8")) as engine:
        expected = answers(engine, asked)
    with closing(offline(folder, 2, exchange_rows="int8", redundant_experts=4)) as engine:
        move_at_every_step(engine)
        assert answers(engine, asked) == expected


@pytest.mark.parametrize(("num_turns", "num_tokens"), [(1, 40), pytest.param(20, 100, marks=pytest.mark.slow)])
def test_ranks_without_requests_take_every_step_and_rest_when_there_is_none(folder, num_turns, num_tokens):
    """Case C17: requests one at a time go to the first rank (2,000 steps of them in `make test-all`); then to all."""
    generator, numbers = random.Random(11), itertools.count()

    def ask(count, num_tokens):
        return [Request(next(numbers), pack_tokens([generator.randrange(3, 320) for _ in range(5)]),
                        Sampling(temperature=0.0), Limits(num_tokens)) for _ in range(count)]

    def same(engine, reference, asked):
        assert answers(engine, asked) == answers(reference, asked)

    with closing(offline(folder, 4)) as engine, closing(offline(folder)) as reference:
        for _ in range(num_turns):
            same(engine, reference, ask(1, num_tokens))
        assert not any(rank.slots for rank in engine.scheduler.ranks[1:])
        same(engine, reference, ask(30, 8))
        assert engine.ranks.num_steps == [engine.scheduler.stats.steps] * 4
        assert engine.scheduler.stats.steps >= num_turns * num_tokens
        others = [psutil.Process(other.process.pid) for other in engine.ranks.others.values()]
        before = sum(sum(each.cpu_times()[:2]) for each in others)
        psutil.cpu_percent(2.0)
        assert sum(sum(each.cpu_times()[:2]) for each in others) - before < 0.2
