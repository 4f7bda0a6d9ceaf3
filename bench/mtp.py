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
from ours import Tripool
from tripool.api.tokenizer import load_tokenizer
from tripool.serve.models import EMBEDDED

BEGINNINGS = ("Once upon a time", "One day, a girl named", "Once there was a boy who", "The cat and the dog went",
              "A little bird sat in", "In the morning the old man", "There was a big tree near", "Tom and his friend")


def timed(engine: Tripool, prompts: list[list[int]], num_tokens: int) -> tuple[float, int]:
    """How long it took to continue prompts, and how many tokens came."""
    begun = time.perf_counter()
    came = engine.generate(prompts, num_tokens)
    return time.perf_counter() - begun, came


def acceptance(engine: Tripool, position: int) -> float:
    """Of all drafts at a position so far."""
    stats, label = engine.offline.scheduler.stats, f"position={position}"
    return stats.accepted_tokens.get(label, 0) / max(1, stats.drafted_tokens.get(label, 0))


def main() -> None:
    parser = flags(__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    rounds, num_tokens = (3, 48) if args.quick else (21, 128)        # short readings, on a machine that others use
    torch.set_num_threads(args.threads)
    engines = {str(drafts): Tripool(args.model, args.threads, most_rows=max(args.batches), num_drafts=drafts)
               for drafts in (0, *args.drafts)}
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
                short_s, _ = timed(engines[name], prompts, 1)
                long_s, came = timed(engines[name], prompts, num_tokens)
                if number:
                    rates[name].append((came - batch) / (long_s - short_s))
        for name, readings in rates.items():
            report.figure(f"mtp.tokens_per_s_k{name}_b{batch}", median(readings), "tokens/s", samples=readings)
            if name != "0":
                ratios = [ours / plain for ours, plain in zip(readings, rates["0"], strict=True)]
                report.figure(f"mtp.speedup_k{name}_b{batch}", median(ratios), "x", "derived", samples=ratios)
    for drafts in args.drafts:
        for position in range(1, drafts + 1):
            share = acceptance(engines[str(drafts)], position)
            report.figure(f"mtp.acceptance_k{drafts}_position{position}", share, "share", samples=[share])
    best = max(args.drafts, key=lambda drafts: median(report.samples[f"mtp.speedup_k{drafts}_b{args.batches[0]}"]))
    share = acceptance(engines[str(best)], 1)
    report.figure("mtp.acceptance", share, "share", samples=[share], drafts=best)
    if 1 in args.batches:
        samples = report.samples[f"mtp.speedup_k{best}_b1"]
        report.figure("mtp.speedup_b1", median(samples), "x", "derived", samples=samples, drafts=best, bar=">= 1.25")
    report.write(args.json)


if __name__ == "__main__":
    main()
