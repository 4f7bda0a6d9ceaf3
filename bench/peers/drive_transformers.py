"""Drives transformers: its own model class, eager, with a `DynamicCache`; the next token is the largest logit.

    python bench/peers/drive_transformers.py --model FOLDER --threads 2 --dtype float32
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import protocol


class Transformers:
    def __init__(self, folder: str, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.about = {"engine": "transformers", "version": transformers.__version__,
                      "weights": str(self.model.dtype).removeprefix("torch."), "note": f"torch {torch.__version__}"}

    def _step(self, ids: Tensor, cache: Any) -> Tensor:
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1)

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        begun = time.perf_counter()
        self._step(torch.tensor([prompt]), DynamicCache(config=self.model.config)).tolist()
        return time.perf_counter() - begun

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], forced: list[list[int]]) -> list[float]:
        if len({len(prompt) for prompt in prompts}) != 1:
            raise ValueError("prompts must be of one length: nothing is padded here")
        cache = DynamicCache(config=self.model.config)
        self._step(torch.tensor(prompts), cache)
        seconds = []
        for token_B in torch.tensor(forced).T:
            begun = time.perf_counter()
            self._step(token_B.unsqueeze(-1), cache).tolist()
            seconds.append(time.perf_counter() - begun)
        return seconds


def main() -> None:
    parser = protocol.flags()
    parser.add_argument("--dtype", choices=["auto", "float32"], default="auto")
    args = parser.parse_args()
    protocol.run(lambda: Transformers(args.model, args.threads, args.dtype))


if __name__ == "__main__":
    main()
