"""transformers' models of the family: what ours are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.checkpoints import write_checkpoint

logging.set_verbosity_error()        # it lists the tensors of the MTP layer, which it does not load
logging.disable_progress_bar()


def build_reference(config: Mapping[str, Any], folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """transformers' model of the family in float32, and its tensors."""
    tensors = write_checkpoint(folder, dict(config), dtype="float32", num_shards=1)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return reference.eval(), tensors


def reference_logits(reference: Any, tokens: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
