"""Writes small random checkpoints in the layout of the published ones, for tests.

Every tensor name and configuration key is the one that a real DeepSeek checkpoint of the family has; the weights are
random, so the text is noise. One seed gives the same tensors in whatever element type or number of shards.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

INT8_MAX = 127
FP8_BLOCK = 128
FP8_MAX = 448.0            # largest E4M3 number
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_layer_freq": 1, "first_k_dense_replace": 1,
    "ep_size": 1, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0,
    "rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 512, "initializer_range": 0.02,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 320, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2, "torch_dtype": "bfloat16",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 0,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
    "v2": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy", "scoring_func": "softmax", "norm_topk_prob": False,
        "routed_scaling_factor": 16.0, "n_shared_experts": 2,
    },
    "v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": "greedy",
        "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "q_lora_rank": None,
        "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
    },
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0}


def tiny_config(family: str = "v3", *, mtp: int = 0, yarn: bool = False, **changes: Any) -> dict[str, Any]:
    """A `config.json` of a family: v3, v2 or v2-lite; with `mtp` layers for drafting, with context extension."""
    config = TINY | FAMILIES[family]
    if mtp:
        config["num_nextn_predict_layers"] = mtp
    if yarn:
        config["rope_scaling"] = YARN
    return config | changes


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, layer by layer; layers past the last main one are MTP layers."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)):
        shapes |= _layer_shapes(config, layer)
    return shapes


def random_tensors(config: dict[str, Any], *, seed: int = 0, std: float = 0.1) -> dict[str, Tensor]:
    """The weights in float32, with values that bfloat16 holds exactly; the MTP layer repeats embedding and head."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.randn(shape, generator=generator) * 0.1
            continue
        value = torch.randn(shape, generator=generator)
        value = 1 + 0.2 * value if len(shape) == 1 and not name.endswith(".bias") else std * value
        tensors[name] = value.bfloat16().float()
    for name in tensors:
        if "layers" in name and name.endswith(".embed_tokens.weight"):
            tensors[name] = tensors["model.embed_tokens.weight"].clone()
        if name.endswith(".shared_head.head.weight"):
            tensors[name] = tensors["lm_head.weight"].clone()
    return tensors


def write_checkpoint(folder: Path, config: dict[str, Any], *, dtype: str = "bfloat16", num_shards: int = 2,
                     seed: int = 0, std: float = 0.1, change: Callable[[str, Tensor], Tensor] | None = None,
                     ignore: tuple[str, ...] = ("lm_head",)) -> dict[str, Tensor]:
    """Write a folder that loads like a published checkpoint, and return its tensors in float32, as `change` left them.

    `dtype` is float32, bfloat16, float16, float8 (projections are E4M3 with a scale for each 128 by 128 block, kept in
    another shard than their weights) or int8 (projections in the compressed-tensors format, but modules in `ignore`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config, seed=seed, std=std)
    if change is not None:
        tensors = {name: change(name, value) for name, value in tensors.items()}
    stored: dict[str, Tensor] = {}
    if dtype == "float8":
        config = config | {"quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}}
    if dtype == "int8":
        config = config | {"quantization_config": compressed_tensors(ignore=ignore)}
    for name, value in tensors.items():
        if name.endswith("e_score_correction_bias"):
            stored[name] = value
        elif dtype == "int8" and _is_projection(name) and name.removesuffix(".weight") not in ignore:
            scale = (value.abs().amax(-1, keepdim=True) / INT8_MAX).clamp(min=1e-12)
            stored[name], stored[f"{name}_scale"] = (value / scale).round().to(torch.int8), scale
            tensors[name] = stored[name].float() * scale
        elif dtype == "float8" and _is_projection(name):
            stored[name], scale = to_float8(value)
            stored[f"{name}_scale_inv"] = scale
            tensors[name] = from_float8(stored[name], scale)
        else:
            stored[name] = value.to(DTYPES.get(dtype, torch.bfloat16))
    write_shards(folder, stored, num_shards)
    config = config | {"torch_dtype": "bfloat16" if dtype in ("float8", "int8") else dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({
        "bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}))
    return tensors


def compressed_tensors(*, ignore: tuple[str, ...] = ("lm_head",), **changes: Any) -> dict[str, Any]:
    """What the compressed-tensors library writes for INT8 weights per channel and activations per token."""
    scheme = {"actorder": None, "block_structure": None, "group_size": None, "num_bits": 8, "observer_kwargs": {},
              "symmetric": True, "type": "int"}
    return {
        "config_groups": {"group_0": {
            "input_activations": {**scheme, "dynamic": True, "observer": None, "strategy": "token"},
            "output_activations": None, "targets": ["Linear"],
            "weights": {**scheme, "dynamic": False, "observer": "minmax", "strategy": "channel"}}},
        "format": "int-quantized", "global_compression_ratio": 1.5, "ignore": list(ignore), "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed"} | changes


def write_shards(folder: Path, stored: dict[str, Tensor], num_shards: int) -> None:
    """Deal tensors out to safetensors files by turns, with an index when there are several."""
    shards = [dict(list(stored.items())[start::num_shards]) for start in range(num_shards)]
    names = [f"model-{i:05d}-of-{num_shards:05d}.safetensors" for i in range(1, num_shards + 1)]
    if num_shards == 1:
        names = ["model.safetensors"]
    for name, tensors in zip(names, shards, strict=True):
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name,
                  metadata={"format": "pt"})
    if num_shards > 1:
        index = {"metadata": {"total_size": sum(value.nbytes for value in stored.values())},
                 "weight_map": {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def to_float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 numbers and the scale by which each block of them is multiplied."""
    rows, columns = weight.shape
    tiles = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    scale = torch.empty(tiles)
    quantised = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(tiles[0]):
        for j in range(tiles[1]):
            at = slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK), slice(j * FP8_BLOCK, (j + 1) * FP8_BLOCK)
            scale[i, j] = weight[at].abs().max().clamp(min=1e-12) / FP8_MAX
            quantised[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return quantised, scale


def from_float8(quantised: Tensor, scale: Tensor) -> Tensor:
    """The numbers that E4M3 blocks and their scales stand for, in float32."""
    rows, columns = quantised.shape
    full = scale.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return quantised.float() * full


def _is_projection(name: str) -> bool:
    return (name.endswith("_proj.weight") and "eh_proj" not in name) or name.endswith("kv_a_proj_with_mqa.weight")


def _layer_shapes(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    start, hidden = f"model.layers.{layer}.", config["hidden_size"]
    heads, rope, nope, value = (config[key] for key in (
        "num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    query_rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
    attention: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (latent + rope, hidden), "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * (nope + value), latent), "o_proj.weight": (hidden, heads * value),
    }
    if query_rank:
        attention |= {"q_a_proj.weight": (query_rank, hidden), "q_a_layernorm.weight": (query_rank,),
                      "q_b_proj.weight": (heads * (nope + rope), query_rank)}
    else:
        attention["q_proj.weight"] = (heads * (nope + rope), hidden)
    if config["attention_bias"]:
        biased = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if query_rank else ("kv_a_proj_with_mqa", "o_proj")
        attention |= {f"{name}.bias": attention[f"{name}.weight"][:1] for name in biased}
    shapes: dict[str, tuple[int, ...]] = {
        start + "input_layernorm.weight": (hidden,), start + "post_attention_layernorm.weight": (hidden,)}
    shapes |= {f"{start}self_attn.{name}": shape for name, shape in attention.items()}
    if layer < config["first_k_dense_replace"]:
        shapes |= _gated_shapes(start + "mlp.", hidden, config["intermediate_size"])
    else:
        shapes |= _expert_shapes(config, start + "mlp.")
    if layer >= config["num_hidden_layers"]:
        vocab = config["vocab_size"]
        shapes |= {start + "eh_proj.weight": (hidden, 2 * hidden), start + "enorm.weight": (hidden,),
                   start + "hnorm.weight": (hidden,), start + "embed_tokens.weight": (vocab, hidden),
                   start + "shared_head.norm.weight": (hidden,), start + "shared_head.head.weight": (vocab, hidden)}
    return shapes


def _expert_shapes(config: dict[str, Any], start: str) -> dict[str, tuple[int, ...]]:
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    shapes: dict[str, tuple[int, ...]] = {start + "gate.weight": (experts, hidden)}
    if config["topk_method"] == "noaux_tc":
        shapes[start + "gate.e_score_correction_bias"] = (experts,)
    shapes |= _gated_shapes(start + "shared_experts.", hidden, width * config["n_shared_experts"])
    for expert in range(experts):
        shapes |= _gated_shapes(f"{start}experts.{expert}.", hidden, width)
    return shapes


def _gated_shapes(start: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {start + "gate_proj.weight": (width, hidden), start + "up_proj.weight": (width, hidden),
            start + "down_proj.weight": (hidden, width)}
