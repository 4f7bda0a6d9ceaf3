"""vLLM's engine and scheduler in one process, one step at a time. Started by drive_vllm.py.

Forced tokens come in through a logits processor: it makes the forced token's logit the largest, and the greedy sampler
chooses as ever. What came out is compared with what was asked for. A step lasts from before to after
`LLMEngine.step()`: scheduling, model, sampler and outputs, without turning tokens into text.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

import protocol

PROMPT_TOKENS = 64                 # of a decode request, as the bench asks; decides how many tokens a step may take


class Forced(LogitsProcessor):
    """Rows of the batch with the tokens that they must produce, and those that they have produced so far."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.rows, batch_update,
                             lambda params, prompt, output: ((params.extra_args or {}).get("forced", []), output))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        due = [(row, forced[len(output)]) for row, (forced, output) in self.rows.items() if len(output) < len(forced)]
        if due:
            rows, tokens = zip(*due, strict=True)
            logits[list(rows), list(tokens)] = float("inf")
        return logits


class Vllm:
    def __init__(self, folder: str, rows: int, context: int, dtype: str, eager: bool) -> None:
        self.llm = LLM(model=folder, dtype=dtype, enforce_eager=eager, max_model_len=context, max_num_seqs=rows,
                       max_num_batched_tokens=max(context, rows * PROMPT_TOKENS), enable_prefix_caching=False,
                       skip_tokenizer_init=True, generation_config="vllm", logits_processors=[Forced])
        self.engine = self.llm.llm_engine
        self.next_id = 0
        config = self.engine.vllm_config.model_config
        computes = str(config.dtype).removeprefix("torch.")
        self.about = {"engine": "vllm", "version": vllm.__version__,
                      "weights": config.quantization or computes,
                      "note": f"torch {torch.__version__}, computes in {computes}, {'eager' if eager else 'compiled'}"}

    def prefill(self, prompt: list[int]) -> float:
        begun = time.perf_counter()
        self._add(prompt, 1)
        self.engine.step()
        seconds = time.perf_counter() - begun
        if self.engine.has_unfinished_requests():
            self._drain()
            raise RuntimeError("the prompt took more than one step")
        return seconds

    def decode(self, prompts: list[list[int]], forced: list[list[int]]) -> list[float]:
        ids = [self._add(prompt, len(row) + 1, row) for prompt, row in zip(prompts, forced, strict=True)]
        seconds, came, sizes = self._drain()
        if sizes != [len(prompts)] * (len(forced[0]) + 1):
            raise RuntimeError(f"the rows did not stay together: steps had {sizes}")
        if [came[each][:-1] for each in ids] != forced:
            raise RuntimeError("the forced tokens were not taken")
        return seconds[1:]

    def _drain(self) -> tuple[list[float], dict[str, list[int]], list[int]]:
        """Step until all have ended: seconds of each step, tokens of each request, rows of each step."""
        seconds: list[float] = []
        came: dict[str, list[int]] = {}
        sizes: list[int] = []
        while self.engine.has_unfinished_requests():
            begun = time.perf_counter()
            outputs = self.engine.step()
            seconds.append(time.perf_counter() - begun)
            sizes.append(len(outputs))
            for each in outputs:
                came.setdefault(each.request_id, []).extend(each.outputs[0].token_ids)
        return seconds, came, sizes

    def _add(self, prompt: list[int], num_tokens: int, forced: list[int] | None = None) -> str:
        self.next_id += 1
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False,
                                output_kind=RequestOutputKind.DELTA, extra_args={"forced": forced or []})
        self.engine.add_request(str(self.next_id), {"prompt_token_ids": prompt}, params)
        return str(self.next_id)


def main() -> None:
    parser = protocol.flags()
    parser.add_argument("--dtype", default="auto", help="element type to compute in; auto is the checkpoint's own")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    args = parser.parse_args()
    protocol.run(lambda: Vllm(args.model, args.rows, args.context, args.dtype, args.eager))


if __name__ == "__main__":
    main()
