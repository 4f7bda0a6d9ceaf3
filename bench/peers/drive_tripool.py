"""Drives this project's engine: machine, scheduler, executor and sampler as in a server, in one process.

Forced tokens come in where tokens are chosen: the engine chooses as ever, and then they take the place. A step lasts
from the end of the step before it to its own end, so scheduling and the delivery of tokens are part of it. All prompts
of a decode request are computed in one step, so that the rows stay together: what waits for it is a request of one
token.

    python bench/peers/drive_tripool.py --model FOLDER --threads 2
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

import protocol
from tripool import __version__
from tripool.core.deployment import Deployment, InstanceConfig, ModelConfig
from tripool.core.messages import Output
from tripool.core.plan import StepPlan, StepResult
from tripool.core.request import Limits, Request, Sampling, pack_tokens
from tripool.engine.checkpoint import open_checkpoint
from tripool.engine.executor import Chosen, Executor
from tripool.engine.ops import native
from tripool.engine.ops.choose import Bools
from tripool.engine.ops.step import Taken
from tripool.serve.offline import Offline

Ints = npt.NDArray[np.int64]

PROMPT_TOKENS = 64                 # of a decode request, as the bench asks; decides how many tokens a step may take
KINDS = {"compressed-tensors": "int8", "fp8": "fp8"}
FREE = -1                          # the sampler's own choice stands


class ForcedTokens:
    """Rows choose as ever, then get the forced token where there is one. A request's seed is its row.

    N rows of a step · B rows of a request · J forced tokens
    """

    def __init__(self, executor: Executor) -> None:
        self._executor, self._choose, self._at_once = executor, executor._choose, executor._at_once
        self.forced_BJ = np.empty((0, 0), np.int64)
        self.num_forced = 0
        executor._choose = self.choose           # type: ignore[method-assign]
        if self._at_once is not None:
            executor._at_once = self.step

    def choose(self, logits_XV: Tensor, logit_N: Ints, slots_N: Ints, num_drafts_N: Ints) -> tuple[Chosen, Bools]:
        chosen, stopped_N = self._choose(logits_XV, logit_N, slots_N, num_drafts_N)
        self._force(slots_N, chosen.start_N, chosen.token_NJ)
        return chosen, stopped_N

    def step(self, loads_LE: Ints) -> Taken | None:
        assert self._at_once is not None, "there was a call to replace"
        taken = self._at_once(loads_LE)
        if taken is not None:
            self._force(taken.slots_N, taken.start_N, taken.token_NJ)
        return taken

    def _force(self, slots_N: Ints, start_N: Ints, token_NJ: Ints) -> None:
        """No request has stop tokens, so nothing ends by another token."""
        row_N = self._executor.sampler._draw["seed"][slots_N].astype(np.int64)
        forced_N = (row_N != FREE) & (start_N < self.forced_BJ.shape[1])
        slots, tokens = slots_N[forced_N], self.forced_BJ[row_N[forced_N], start_N[forced_N]]
        token_NJ[forced_N, 0] = tokens
        self._executor._token_SL[slots, self._executor._num_tokens[slots] - 1] = tokens
        self.num_forced += len(tokens)


class Steps:
    """Takes the steps of an instance's ranks and notes when each ended."""

    def __init__(self, offline: Offline) -> None:
        self._run = offline.ranks.run
        self.counts_experts = False
        self.ended: list[float] = []
        self.results: list[StepResult] = []
        offline.ranks.run = self        # type: ignore[method-assign]

    def __call__(self, plan: StepPlan) -> StepResult:
        result = self._run(replace(plan, reports_experts=True) if self.counts_experts else plan)
        self.ended.append(time.perf_counter())
        self.results.append(result)
        return replace(result, expert_counts=b"")       # nobody else asked for them

    def begin(self, counts_experts: bool = False) -> None:
        self.counts_experts = counts_experts
        self.ended, self.results = [], []


class Tripool:
    def __init__(self, folder: str, threads: int, rows: int, context: int, head_dtype: str = "auto") -> None:
        checkpoint = open_checkpoint(Path(folder))
        shape = checkpoint.shape
        context = min(context, shape.max_position)
        self.offline = Offline(Deployment(
            model=ModelConfig(path=folder, max_model_len=context, head_dtype=head_dtype),
            hybrid=InstanceConfig(count=1, threads=threads, max_num_seqs=rows + 1,
                                  max_num_batched_tokens=max(context, rows * PROMPT_TOKENS),
                                  cache_tokens=2 * context + rows * 4 * PROMPT_TOKENS, enable_prefix_caching=False)))
        executor = self.offline.ranks._first.executor
        self.forced = ForcedTokens(executor)
        gc.freeze()                            # as an instance does
        self.steps = Steps(self.offline)
        self.num_moe_layers = len(executor.model.moe_blocks)
        self.next_id = 0
        dtype = executor.cache.dtype
        self.about: dict[str, Any] = {
            "engine": "tripool", "version": __version__,
            "weights": KINDS.get(checkpoint.quantisation.method, checkpoint.dtype),
            "note": f"computes in {str(dtype).removeprefix('torch.')}, native level {native.chosen_level()}, "
                    f"head_dtype {head_dtype}",
            "cache_token_bytes": shape.num_layers * shape.entry_width * dtype.itemsize}

    def prefill(self, prompt: list[int]) -> float:
        self.steps.begin()
        begun = time.perf_counter()
        self._generate([self._request(prompt, 1)])
        return time.perf_counter() - begun

    def decode(self, prompts: list[list[int]], forced: list[list[int]]) -> list[float]:
        return self._decode(prompts, forced, counts_experts=False)

    def decode_and_count(self, prompts: list[list[int]], forced: list[list[int]]) -> tuple[list[float], float]:
        seconds = self._decode(prompts, forced, counts_experts=True)
        count_SLE = np.stack([np.frombuffer(result.expert_counts, np.int32).reshape(self.num_moe_layers, -1)
                              for result in self.steps.results[-len(seconds):]])
        return seconds, float((count_SLE > 0).sum(-1).mean())

    def _decode(self, prompts: list[list[int]], forced: list[list[int]], counts_experts: bool) -> list[float]:
        num_rows, num_steps = len(prompts), len(forced[0])
        self.forced.forced_BJ, self.forced.num_forced = np.array(forced, np.int64), 0
        self.steps.begin(counts_experts)
        first = self._request(prompts[0][:1], 1)             # while it is computed, all others arrive
        self._generate([first, *(self._request(prompt, num_steps + 1, row) for row, prompt in enumerate(prompts))])
        took = [(step.ranks[0].num_chunk_tokens, step.ranks[0].num_decode_tokens) for step in self.steps.results[1:]]
        if took != [(sum(map(len, prompts)), 0), *[(0, num_rows)] * num_steps]:
            raise RuntimeError(f"the rows did not stay together: chunk and decode tokens of the steps were {took}")
        if self.forced.num_forced != num_rows * num_steps:
            raise RuntimeError(f"{self.forced.num_forced} tokens were forced, not {num_rows * num_steps}")
        return np.diff(self.steps.ended)[1:].tolist()

    def _request(self, prompt: list[int], num_tokens: int, row: int = FREE) -> Request:
        self.next_id += 1
        return Request(self.next_id, pack_tokens(prompt), Sampling(temperature=0, seed=row), Limits(num_tokens))

    def _generate(self, requests: list[Request]) -> None:
        errors: list[str] = []

        def look(output: Output) -> None:
            if output.error:
                errors.append(output.error)

        self.offline.generate(requests, look)
        if errors:
            raise RuntimeError(errors[0])


def main() -> None:
    parser = protocol.flags()
    parser.add_argument("--head-dtype", default="auto", help="auto or int8, as of the server")
    args = parser.parse_args()
    protocol.run(lambda: Tripool(args.model, args.threads, args.rows, args.context, args.head_dtype))


if __name__ == "__main__":
    main()
