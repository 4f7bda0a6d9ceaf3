"""How much faster does drafting with the MTP layer make decoding, and how often is a draft right?

One engine for each number of drafts, without a server, on the same checkpoint; they continue the same prompts greedily
and take turns. The rate is B * (n - 1) / (time for n tokens - time for 1 token); ratios are of the same round. Prompts
are beginnings of texts such as the embedded model was trained on, so that it writes its own text and not a loop
of random tokens. Acceptance is of all drafts at a position that were verified.

    python bench/mtp.py --json out/mtp.json --drafts 1 2 --batches 1 8
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

from common import Report, flags, in_turn, median
from tripool.api.tokenizer import load_tokenizer
from tripool.core.deployment import Deployment, InstanceConfig, ModelConfig
from tripool.core.request import Limits, Request, Sampling, pack_tokens
from tripool.serve.models import EMBEDDED
from tripool.serve.offline import Offline

BEGINNINGS = ("Once upon a time", "One day, a girl named", "Once there was a boy who", "The cat and the dog went",
              "A little bird sat in", "In the morning the old man", "There was a big tree near", "Tom and his friend")


class Engine:
    """This project's engine and scheduler, with so many drafts."""

    def __init__(self, folder: Path, threads: int, num_drafts: int, most_rows: int) -> None:
        self.offline = Offline(Deployment(
            model=ModelConfig(path=str(folder)),
            hybrid=InstanceConfig(count=1, threads=threads, max_num_seqs=most_rows, max_num_batched_tokens=2048,
                                  enable_prefix_caching=False, num_speculative_tokens=num_drafts)))
        self.next_id = 0

    def generate(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, int]:
        """How long that took, and how many tokens came."""
        came = 0

        def count(output) -> None:
            nonlocal came
            came += len(output.tokens) // 4

        requests = [Request(self.next_id + i, pack_tokens(prompt), Sampling(temperature=0), Limits(num_tokens))
                    for i, prompt in enumerate(prompts)]
        self.next_id += len(prompts)
        begun = time.perf_counter()
        self.offline.generate(requests, count)
        return time.perf_counter() - begun, came

    def acceptance(self, position: int) -> float:
        """Of all drafts at a position so far."""
        stats, label = self.offline.scheduler.stats, f"position={position}"
        return stats.accepted_tokens.get(label, 0) / max(1, stats.drafted_tokens.get(label, 0))


def main() -> None:
    parser = flags(__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    rounds, num_tokens = (3, 48) if args.quick else (7, 128)
    torch.set_num_threads(args.threads)
    engines = {str(drafts): Engine(args.model, args.threads, drafts, max(args.batches)) for drafts in (0, *args.drafts)}
    report = Report(__doc__.splitlines()[0], {
        "model": args.model.name, "threads": args.threads, "rounds": rounds, "output_tokens": num_tokens,
        "temperature": 0})
    tokenizer, rng = load_tokenizer(args.model), random.Random(0)
    for batch in args.batches:
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds + 1):                    # the first warms up
            texts = [rng.choice(BEGINNINGS) for _ in range(batch)]
            prompts = [[0, *tokenizer.encode(text, add_special_tokens=False)] for text in texts]
            for _, name in in_turn(list(engines), 1):
                short_s, _ = engines[name].generate(prompts, 1)
                long_s, came = engines[name].generate(prompts, num_tokens)
                if number:
                    rates[name].append((came - batch) / (long_s - short_s))
        for name, readings in rates.items():
            report.figure(f"mtp.tokens_per_s_k{name}_b{batch}", median(readings), "tokens/s", samples=readings)
            if name != "0":
                ratios = [ours / plain for ours, plain in zip(readings, rates["0"], strict=True)]
                report.figure(f"mtp.speedup_k{name}_b{batch}", median(ratios), "x", "derived", samples=ratios)
    for drafts in args.drafts:
        for position in range(1, drafts + 1):
            report.figure(f"mtp.acceptance_k{drafts}_position{position}", engines[str(drafts)].acceptance(position),
                          "share")
    best = max(args.drafts, key=lambda drafts: median(report.samples[f"mtp.speedup_k{drafts}_b{args.batches[0]}"]))
    report.figure("mtp.acceptance", engines[str(best)].acceptance(1), "share", drafts=best)
    if 1 in args.batches:
        samples = report.samples[f"mtp.speedup_k{best}_b1"]
        report.figure("mtp.speedup_b1", median(samples), "x", "derived", samples=samples, drafts=best, bar=">= 1.25")
    report.write(args.json)


if __name__ == "__main__":
    main()
