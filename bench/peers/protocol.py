"""What drivers of engines share. A driver is a process of its own, because engines bring their own libraries.

It is started with `--model FOLDER --threads N --rows R --context C` and speaks JSON, a line each way, on its standard
streams. It says what it is once the model is loaded, and then answers one request after the other, until its input
ends:

- `{"prefill": ids}` gives `{"seconds": s}`: from giving the prompt to having the logits after its last token.
- `{"decode": [ids of a prompt, ...], "forced": [[its next tokens], ...]}` gives `{"seconds": [...]}`: prompts are
  computed, not timed; then step j feeds each row its forced token j, all rows in one batch, and computes their logits.
  With `"count_experts": true` (ours only) also `distinct_experts`: of a MoE layer in a step, on average.
- What goes wrong gives `{"error": what}`, and the driver goes on.

Nothing is cached from one request to the next, and nothing runs between them: engines take turns on the same cores.
Files beside this one are called `drive_...` because scripts find their own folder first: `transformers.py` would hide
the library.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol


class Driver(Protocol):
    """An engine with its model loaded. `about` has `engine`, `version`, `weights` and, if there is more to say,
    `note`."""

    about: dict[str, Any]

    def prefill(self, prompt: list[int]) -> float: ...

    def decode(self, prompts: list[list[int]], forced: list[list[int]]) -> list[float]: ...


def flags() -> argparse.ArgumentParser:
    """A parser with the flags of every driver."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64, help="most rows of a batch")
    parser.add_argument("--context", type=int, default=4096, help="most tokens of a row")
    return parser


def run(load: Callable[[], Driver]) -> None:
    """Load and answer. What libraries print goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        driver = load()
    except Exception as error:
        traceback.print_exc()
        tell({"error": _said(error)})
        sys.exit(1)
    tell({"ready": True, **driver.about})
    for line in sys.stdin:
        try:
            tell(_answer(driver, json.loads(line)))
        except Exception as error:
            traceback.print_exc()
            tell({"error": _said(error)})


def _answer(driver: Driver, request: dict[str, Any]) -> dict[str, Any]:
    if "prefill" in request:
        return {"seconds": driver.prefill(request["prefill"])}
    prompts, forced = request["decode"], request["forced"]
    if len(prompts) != len(forced) or len({len(row) for row in forced}) != 1:
        raise ValueError("decode takes as many forced tokens for each prompt as for the others")
    if request.get("count_experts"):
        seconds, distinct = driver.decode_and_count(prompts, forced)       # type: ignore[attr-defined]
        return {"seconds": seconds, "distinct_experts": distinct}
    return {"seconds": driver.decode(prompts, forced)}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
