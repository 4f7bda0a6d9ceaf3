"""What a greedy answer must be: one plain forward pass of transformers' DeepseekV3 in float32, no cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

TIE = 1e-3       # logits closer than this may fall either way between two float32 implementations


class Oracle:
    """A checkpoint as transformers reads it."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def check(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Assert that each token of the answer is the best one after all before it."""
        ids = torch.tensor([[*prompt, *answer]])
        logits = self.model(ids, use_cache=False).logits[0, len(prompt) - 1:-1]
        best = logits.max(-1).values
        chosen = logits.gather(-1, torch.tensor(answer).unsqueeze(-1)).squeeze(-1)
        worst = int((best - chosen).argmax())
        assert best[worst] - chosen[worst] <= TIE, (
            f"token {worst} of the answer is {answer[worst]}, but {int(logits[worst].argmax())} is better by "
            f"{float(best[worst] - chosen[worst]):.4f}")

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """A greedy answer, the slow way."""
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[len(prompt):]
