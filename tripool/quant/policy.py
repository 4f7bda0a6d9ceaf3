"""Which tensors become INT8 and which stay as they are: one table, and what other engines are told of it.

Large matrix products take nearly all bytes and all time; what is small, or decides something, keeps its precision (the
paper's mixed precision, 4.5). The table knows tensor names alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to tensors whose name fits."""

    name: str
    pattern: re.Pattern[str]
    precision: Literal["int8", "kept"]
    reason: str


def _rule(name: str, pattern: str, precision: Literal["int8", "kept"], reason: str) -> Rule:
    return Rule(name, re.compile(pattern), precision, reason)


RULES = (        # the first that fits
    _rule("norms and biases", r".*(norm\.weight|\.bias|e_score_correction_bias)", "kept",
          "a row each, and every number of a token passes through them"),
    _rule("embeddings", r".*embed_tokens\.weight", "kept", "looked up, not multiplied"),
    _rule("router", r".*\.mlp\.gate\.weight", "kept", "scores a thousandth apart decide who is chosen"),
    _rule("head", r"lm_head\.weight|.*\.shared_head\.head\.weight", "kept", "its error is the error of the answer"),
    _rule("MTP join", r".*\.eh_proj\.weight", "kept", "one matrix, and published FP8 checkpoints keep it too"),
    _rule("latent expansion", r".*\.kv_b_proj\.weight", "int8",
          "read for every token; here queries and latents stay floats, other engines may quantise these"),
    _rule("attention", r".*\.self_attn\..*\.weight", "int8", "large products with every token"),
    _rule("experts", r".*\.mlp\.experts\..*\.weight", "int8", "nearly all of the bytes"),
    _rule("shared expert", r".*\.mlp\.shared_experts\..*\.weight", "int8", "large products with every token"),
    _rule("dense feed-forward", r".*\.mlp\..*\.weight", "int8", "large products with every token"),
    _rule("others", r".*", "kept", "unknown"),
)
ALWAYS_KEPT = ("norms and biases", "embeddings", "others")      # not a product of matrices, whatever the policy


def rule_of(tensor: str) -> Rule:
    """The rule of a tensor."""
    return next(rule for rule in RULES if rule.pattern.fullmatch(tensor))


def becomes_int8(tensor: str, *, mixed_precision: bool = True) -> bool:
    """Whether a tensor is quantised; without mixed precision every matrix product is."""
    rule = rule_of(tensor)
    return rule.precision == "int8" or (not mixed_precision and rule.name not in ALWAYS_KEPT)


def quantization_config(kept: Iterable[str]) -> dict[str, Any]:
    """What `config.json` tells every engine that reads compressed-tensors; `kept` are names of weights."""
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "block_structure": None,
              "actorder": None, "observer_kwargs": {}}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": "channel", "dynamic": False, "observer": "minmax"},
        "input_activations": {**scheme, "strategy": "token", "dynamic": True, "observer": None},
        "output_activations": None,
    }
    modules = sorted({name.removesuffix(".weight") for name in kept
                      if name.endswith(".weight") and rule_of(name).name not in ALWAYS_KEPT})
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
            "kv_cache_scheme": None, "config_groups": {"group_0": group}, "ignore": modules}
