"""This project's engine and scheduler, without a server, as benchmarks drive them."""

from __future__ import annotations

import gc
from pathlib import Path

from tripool.core.deployment import Deployment, InstanceConfig, ModelConfig
from tripool.core.request import Limits, Request, Sampling, pack_tokens
from tripool.serve.offline import Offline


class Tripool:
    """Continues prompts greedily. No prompt finds a cached prefix."""

    def __init__(self, folder: Path, threads: int, *, most_rows: int = 64, num_drafts: int = 0,
                 head_dtype: str = "auto") -> None:
        self.offline = Offline(Deployment(
            model=ModelConfig(path=str(folder), head_dtype=head_dtype),
            hybrid=InstanceConfig(count=1, threads=threads, max_num_seqs=most_rows, max_num_batched_tokens=2048,
                                  enable_prefix_caching=False, num_speculative_tokens=num_drafts)))
        gc.freeze()                    # as an instance does
        self.next_id = 0

    def generate(self, prompts: list[list[int]], num_tokens: int) -> int:
        """Continue all prompts together by `num_tokens` each; returns how many tokens came."""
        came = 0

        def count(output) -> None:
            nonlocal came
            came += len(output.tokens) // 4

        requests = [Request(self.next_id + i, pack_tokens(prompt), Sampling(temperature=0), Limits(num_tokens))
                    for i, prompt in enumerate(prompts)]
        self.next_id += len(prompts)
        self.offline.generate(requests, count)
        return came
