"""The exported folder, read by transformers, computes what the training module computes.

    python -m recipes.tiny.parity tripool/models/tiny
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV3ForCausalLM

from recipes.tiny.model import Shape, load_published

MTP_PREFIX = "model.layers.6."


def compare(folder: Path, token_BS: Tensor) -> dict[str, float]:
    """The largest difference of fp32 logits, the share of equal argmaxes, and the keys only one side knows."""
    peer, info = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    ours = load_published(load_file(folder / "model.safetensors"), Shape())
    with torch.inference_mode():
        expected = peer.eval()(token_BS).logits
        actual = ours.lm_head(ours.hidden(token_BS))
    return {
        "missing_keys": len(info["missing_keys"]),
        "unexpected_outside_mtp": sum(not key.startswith(MTP_PREFIX) for key in info["unexpected_keys"]),
        "logits_max_abs_difference": (actual - expected).abs().max().item(),
        "argmax_agreement": (actual.argmax(-1) == expected.argmax(-1)).float().mean().item(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    tokens = torch.randint(16, 4096, (1, 600), generator=torch.Generator().manual_seed(0))
    print(json.dumps(compare(Path(sys.argv[1]), tokens), indent=2))
