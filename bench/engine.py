"""How fast is the engine beside others on the same checkpoint?

Prefill: one prompt of N random tokens and one output token. Decode: B prompts, greedy, no end of sequence; the rate
is B * (n - 1) / (time for n tokens - time for 1 token). Every prompt is fresh, so that no cached prefix helps.
All engines run in this process with the same number of threads and take turns; ratios are of the same round.
Each engine computes in the element type it takes by itself for the checkpoint (transformers: the checkpoint's own;
Tripool: float32 where a CPU has no bfloat16 products); `transformers-float32` is the same comparison in one type.

    python bench/engine.py --json out/engine.json --model ckpt/mid --batches 1 8
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from common import Report, flags, in_turn, median
from ours import Tripool
from tripool.serve.models import EMBEDDED


class Engine(Protocol):
    """Something that continues prompts."""

    def generate(self, prompts: list[list[int]], num_tokens: int) -> int:
        """Continue all prompts together by `num_tokens` each; returns how many tokens came."""


class Transformers:
    """`generate` of transformers on a rectangular batch."""

    def __init__(self, folder: Path, threads: int, dtype: str = "auto") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def generate(self, prompts: list[list[int]], num_tokens: int) -> int:
        settings = GenerationConfig(max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
                                    eos_token_id=1, pad_token_id=2)
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return (out.shape[1] - ids.shape[1]) * len(prompts)


ENGINES: dict[str, Callable[[Path, int], Engine]] = {
    "tripool": Tripool,
    "transformers": Transformers,
    "transformers-float32": lambda folder, threads: Transformers(folder, threads, "float32"),
}


def timed(engine: Engine, prompts: list[list[int]], num_tokens: int) -> float:
    begun = time.perf_counter()
    came = engine.generate(prompts, num_tokens)
    elapsed = time.perf_counter() - begun
    assert came == len(prompts) * num_tokens, f"{came} tokens came, not {len(prompts) * num_tokens}"
    return elapsed


def main() -> None:
    parser = flags(__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    args = parser.parse_args()
    rounds, num_tokens = (2, 12) if args.quick else (5, 32)
    torch.set_num_threads(args.threads)
    engines = {name: ENGINES[name](args.model, args.threads) for name in args.engines}
    report = Report(__doc__.splitlines()[0], {
        "model": args.model.name, "threads": args.threads, "rounds": rounds,
        "output_tokens": num_tokens, "prompt_tokens": 64})
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(16, 4000) for _ in range(length)] for _ in range(count)]

    def measure(label: str, reading: Callable[[Engine], float], bar: str | None) -> None:
        found: dict[str, list[float]] = {name: [] for name in engines}
        for number, name in in_turn(list(engines), rounds + 1):
            value = reading(engines[name])
            if number:                      # the first round warms all up
                found[name].append(value)
        for name, values in found.items():
            report.figure(f"engine.{label}_{name}", median(values), "tokens/s", samples=values)
        for other in [name for name in found if name != "tripool"]:
            ratios = ratio(found["tripool"], found[other])
            suffix = other.removeprefix("transformers").replace("-", "_")
            report.figure(f"engine.{label.replace('_', '_ratio_', 1)}{suffix}", median(ratios), "ratio",
                          samples=ratios, **({"bar": bar} if bar and not suffix else {}))

    for length in args.prefill:
        measure(f"prefill_{length}", lambda engine, n=length: n / timed(engine, prompts(1, n), 1), None)
    for batch in args.batches:
        def decode(engine: Engine, count: int = batch) -> float:
            one = timed(engine, prompts(count, 64), 1)
            return count * (num_tokens - 1) / (timed(engine, prompts(count, 64), num_tokens) - one)
        measure(f"decode_b{batch}", decode, ">= 1.5" if batch == 1 else ">= 3")
    report.write(args.json)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


if __name__ == "__main__":
    main()
