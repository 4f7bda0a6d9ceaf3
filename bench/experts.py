"""What do balanced experts, microbatches and spare ranks bring to an instance of several ranks?

A model with 32 experts on two ranks decodes a full batch; its router prefers the 8 experts that live on the first rank
(skewed), or none. Maps, moves and microbatches take turns in one instance, so a slow minute of the machine meets all.

- balance: step time with all hot experts on one rank, and after the rebalancer has copied them into redundant slots.
- moves: step time while experts are being copied into unused slots without a pause, and in peace.
- microbatches: step time with one batch and with two halves, of which one computes while the other travels.
- losses: a served instance under load; one of its ranks is killed, stopped or delayed, 20 times at random. How long
  until the next token after each blow, and whether every token is that of an undisturbed run.

    make bench NAME=experts ARGS='--json out/experts.json'
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import psutil
from torch import Tensor

from common import Report, flags, in_turn, median
from tests.checkpoints import tiny_config, write_checkpoint
from tests.fleet import Served, served
from tripool.control.balance import max_over_mean
from tripool.core.deployment import Deployment, InstanceConfig, ModelConfig
from tripool.core.messages import Output, Rebalance
from tripool.core.placement import EMPTY, Move, Placement
from tripool.core.plan import StepPlan, StepResult
from tripool.core.request import Limits, Request, Sampling, pack_tokens
from tripool.serve.dataplane import step_aside
from tripool.serve.offline import Offline

NUM_RANKS = 2
NUM_EXPERTS = 32
NUM_HOT = 8
NUM_REDUNDANT = 4              # an eighth of the experts, as in the paper (32 of 256)
ROWS = 64                      # of each rank
MODEL = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 4,
         "n_group": 1, "topk_group": 1, "kv_lora_rank": 64, "q_lora_rank": 64, "max_position_embeddings": 2048}
LOSS_RANKS = 3
LOSS_REDUNDANT = 16            # the embedded model's experts have room on two of the three ranks


def write_model(folder: Path, *, skewed: bool) -> None:
    """A random model; a skewed one has a router that always chooses among the first experts."""
    def tilt(name: str, tensor: Tensor) -> Tensor:
        if skewed and name.endswith("e_score_correction_bias"):
            tensor[:NUM_HOT] += 10.0
        return tensor
    write_checkpoint(folder, tiny_config("v3", **MODEL), change=tilt)


class Bench:
    """An instance in this process that decodes a full batch, and the time of each of its steps."""

    def __init__(self, folder: Path) -> None:
        config = InstanceConfig(count=1, ranks=NUM_RANKS, threads=1, max_num_seqs=ROWS, redundant_experts=NUM_REDUNDANT,
                                rebalance=False, enable_prefix_caching=False, max_num_batched_tokens=2048)
        self.offline = Offline(Deployment(model=ModelConfig(path=str(folder)), hybrid=config))
        self.ranks = self.offline.ranks
        self.halves = 1
        self._step = self.ranks.run
        self.ranks.run = self._timed                 # type: ignore[method-assign]
        self._times: list[float] = []
        self._numbers = count(1)                     # of requests

    def _timed(self, plan: StepPlan) -> StepResult:
        plan = replace(plan, num_microbatches=self.halves)
        begun = time.perf_counter()
        result = self._step(plan)
        if sum(rank.num_decode_tokens for rank in result.ranks) == NUM_RANKS * ROWS:
            self._times.append((time.perf_counter() - begun) * 1e3)
        return result

    def decode(self, num_steps: int) -> list[float]:
        """Milliseconds of full decode steps, after a few to warm up."""
        self._times = []
        generator = random.Random(1)
        asked = [Request(next(self._numbers), pack_tokens([generator.randrange(3, 320) for _ in range(8)]),
                         Sampling(temperature=0.0), Limits(num_steps + 8)) for _ in range(NUM_RANKS * ROWS)]
        self.offline.generate(asked, _nobody)
        return self._times[4:]

    @property
    def placement(self) -> Placement:
        rebalancer = self.offline.scheduler.rebalancer
        assert rebalancer is not None
        return rebalancer.placement

    def imbalance(self) -> float:
        """Of the worst layer: load of the busiest rank over the mean."""
        rebalancer = self.offline.scheduler.rebalancer
        assert rebalancer is not None
        rank_of = rebalancer.geometry.rank_of_slots()
        return max(max_over_mean(experts, rebalancer.stats.layer(layer), rank_of, [True] * NUM_RANKS)
                   for layer, experts in enumerate(self.placement.layers))

    def use(self, goal: Placement | None) -> None:
        """Have the experts moved to this map, or (None) to the one that the rebalancer finds."""
        self.offline.tell(Rebalance(goal.pack() if goal is not None else None))
        self.decode(8)

    def one_sided(self) -> Placement:
        """No copies: every expert where it lives without redundancy, so that all hot ones are on one rank."""
        placement = self.placement
        layers = []
        for _ in placement.layers:
            layer = [EMPTY] * placement.num_slots
            for rank in range(NUM_RANKS):
                share = NUM_EXPERTS // NUM_RANKS
                for index, slot in zip(range(share), placement.slots_of_rank(rank), strict=False):
                    layer[slot] = rank * share + index
            layers.append(tuple(layer))
        return replace(placement, layers=tuple(layers))


def _nobody(output: Output) -> None:
    assert output.error is None, output.error


def balance(report: Report, bench: Bench, rounds: int, steps: int) -> None:
    one_sided = bench.one_sided()
    times: dict[str, list[float]] = {"before": [], "after": []}
    ratios: dict[str, list[float]] = {"before": [], "after": []}
    for _, name in in_turn(["before", "after"], rounds):
        bench.use(one_sided if name == "before" else None)
        times[name].append(median(bench.decode(steps)))
        ratios[name].append(bench.imbalance())
    report.figure("experts.max_over_mean_before", max(ratios["before"]), "ratio", samples=ratios["before"])
    report.figure("experts.max_over_mean_after", max(ratios["after"]), "ratio", samples=ratios["after"], bar="<= 1.15")
    for name in ("before", "after"):
        report.figure(f"experts.step_ms_{name}", median(times[name]), "ms", samples=times[name])
    gains = [before / after for before, after in zip(times["before"], times["after"], strict=True)]
    report.figure("experts.eplb_step_gain_ep2", median(gains), "ratio", "derived", samples=gains, bar=">= 1.15")


def moves(report: Report, bench: Bench, rounds: int, steps: int) -> None:
    bench.use(bench.one_sided())
    placement = bench.placement
    spare = [[slot for slot in placement.slots_of_rank(rank) if placement.layers[0][slot] == EMPTY]
             for rank in range(NUM_RANKS)]
    times: dict[str, list[float]] = {"peace": [], "moving": []}
    moved = [0]
    for _, name in in_turn(["peace", "moving"], rounds):
        ended = threading.Event()

        def move_on(ended: threading.Event = ended) -> None:
            step_aside()
            number = 0
            while not ended.is_set():
                number += 1
                bench.ranks.move([Move(number % len(placement.layers), 0, slots[number % len(slots)],
                                       number % NUM_EXPERTS) for slots in spare])
                moved[0] += NUM_RANKS

        mover = threading.Thread(target=move_on)
        if name == "moving":
            mover.start()
        times[name].append(median(bench.decode(steps)))
        ended.set()
        if name == "moving":
            mover.join()
    ratios = [moving / peace for peace, moving in zip(times["peace"], times["moving"], strict=True)]
    report.figure("experts.rebalance_slowdown", median(ratios), "ratio", "derived", samples=ratios, bar="<= 1.2")
    report.figure("experts.moved_while_measured", moved[0], "experts", samples=moved)


def microbatches(report: Report, bench: Bench, rounds: int, steps: int, name: str) -> None:
    times: dict[int, list[float]] = {1: [], 2: []}
    for _, halves in in_turn(["1", "2"], rounds):
        bench.halves = int(halves)
        times[bench.halves].append(median(bench.decode(steps)))
    bench.halves = 1
    gains = [one / two for one, two in zip(times[1], times[2], strict=True)]
    report.figure(f"experts.microbatch_gain_ep2{name}", median(gains), "ratio", "derived", samples=gains)


# ---------------------------------------------------------------- losses


def ranks_of(pools: Served, member: str) -> list[int]:
    """Processes of the ranks beside the first."""
    found = []
    for child in psutil.Process(pools.fleet.pids[member]).children():
        with suppress(psutil.Error):                          # it ends just now
            if "tripool.serve.rank" in child.cmdline():
                found.append(child.pid)
    return found


@contextmanager
def load(pools: Served, prompts: list[list[int]], num_tokens: int) -> Iterator[tuple[list[float], list[list[int]]]]:
    """Streams without end: times at which tokens came, and every finished answer."""
    arrived: list[float] = []
    answers: list[list[int]] = []
    ended = threading.Event()

    def ask(first: int) -> None:
        number = first
        while not ended.is_set():
            answer = []
            for token in pools.stream_ids(prompts[number % len(prompts)], num_tokens):
                arrived.append(time.monotonic())
                answer.append(token)
            answers.append([number % len(prompts), *answer])
            number += 1

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, first) for first in range(8)]
        try:
            yield arrived, answers
        finally:
            ended.set()
            for each in asked:
                each.result()


def losses(report: Report, num_blows: int) -> None:
    generator = random.Random(7)
    prompts = [[generator.randrange(3, 500) for _ in range(generator.randrange(4, 60))] for _ in range(24)]
    recovery: list[float] = []
    with served(hybrid=1, instance={"ranks": LOSS_RANKS, "redundant_experts": LOSS_REDUNDANT, "max_num_seqs": 8},
                gateway={"place_deadline_s": 90.0}) as pools:
        expected = [pools.token_ids(prompt, 40, ignore_eos=True) for prompt in prompts]
        with load(pools, prompts, 40) as (arrived, answers):
            for number in range(num_blows):
                pools.wait_for(lambda: len(ranks_of(pools, "hybrid-0")) == LOSS_RANKS - 1
                               and pools.reports()["hybrid-0"]["num_live_ranks"] == LOSS_RANKS, 120)
                time.sleep(generator.uniform(0.5, 1.5))
                victim = generator.choice(ranks_of(pools, "hybrid-0"))
                kind = ("killed", "stopped", "delayed")[number % 3]
                begun = time.monotonic()
                os.kill(victim, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
                if kind == "delayed":
                    time.sleep(generator.uniform(0.1, 1.2))
                    try:
                        os.kill(victim, signal.SIGCONT)
                    except ProcessLookupError:
                        pass                                  # given up meanwhile
                time.sleep(6.0)
                times = [begun, *(each for each in list(arrived) if each > begun)]
                recovery.append(max(later - earlier for earlier, later in pairwise(times)))
                print(f"blow {number + 1}: {kind}, longest silence {recovery[-1]:.2f} s", file=sys.stderr)
        wrong = sum(token != right for number, *answer in answers
                    for token, right in zip(answer, expected[number], strict=True))
        restarts = pools.fleet.processes["hybrid-0"].restarts
    report.figure("experts.rank_loss_recovery_s", max(recovery), "s", samples=recovery, bar="<= 5")
    report.figure("experts.rank_loss_recovery_s_p50", statistics.median(recovery), "s", samples=recovery)
    report.figure("experts.rank_loss_wrong_tokens", wrong, "tokens", samples=[wrong], bar="<= 0", restarts=restarts)
    report.figure("experts.rank_loss_answers", len(answers), "answers", samples=[len(answers)])


def main() -> None:
    parser = flags(__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", default=["steps", "losses"], choices=["steps", "losses"])
    args = parser.parse_args()
    rounds, steps, num_blows = (5, 12, 3) if args.quick else (7, 24, 20)
    report = Report(__doc__.splitlines()[0], {
        "ranks": NUM_RANKS, "experts": NUM_EXPERTS, "hot": NUM_HOT, "redundant": NUM_REDUNDANT, "rows_per_rank": ROWS,
        "model": MODEL, "rounds": rounds, "steps": steps, "blows": num_blows, "ranks_of_losses": LOSS_RANKS,
        "redundant_of_losses": LOSS_REDUNDANT})
    if "steps" in args.parts:
        for skewed in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                write_model(Path(folder), skewed=skewed)
                bench = Bench(Path(folder))
                with closing(bench.offline):
                    bench.decode(4)
                    if skewed:
                        balance(report, bench, rounds, steps)
                        moves(report, bench, rounds, steps)
                        bench.use(bench.one_sided())
                    microbatches(report, bench, rounds, steps, "_skewed" if skewed else "")
    if "losses" in args.parts:
        losses(report, num_blows)
    report.write(args.json)


if __name__ == "__main__":
    main()
