"""Writes the synthetic checkpoint that engines are compared on, in all the forms that they take.

Weights are random, so its text is noise, but every shape, tensor name and configuration key is one that a published
DeepSeek-V3 checkpoint has. `mid` has 1.28 B parameters, 243 M of them active per token; `small` is for trying things.
The INT8 form is made by `tripool quantize` (rounded to nearest: there is no accuracy to lose). A form that is there
already is left alone.

    python bench/checkpoint.py --preset mid --out out/checkpoints      makes mid and mid-w8a8 in it
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from common import ROOT

# kv_lora_rank + qk_rope_head_dim is 576 in both: other engines have kernels for that width only.
PRESETS: dict[str, dict[str, int]] = {
    "small": dict(hidden_size=256, num_hidden_layers=4, first_k_dense_replace=1, num_attention_heads=8, q_lora_rank=96,
                  kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, intermediate_size=1024,
                  n_routed_experts=32, num_experts_per_tok=4, n_shared_experts=1, moe_intermediate_size=192, n_group=4,
                  topk_group=2, vocab_size=4096),
    "mid": dict(hidden_size=1024, num_hidden_layers=12, first_k_dense_replace=1, num_attention_heads=16,
                q_lora_rank=384, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
                intermediate_size=4096, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=1,
                moe_intermediate_size=512, n_group=8, topk_group=4, vocab_size=32000),
}
BOS, EOS, PAD = "<|begin_of_sentence|>", "<|end_of_sentence|>", "<|pad|>"
STD, BIAS_STD, SEED = 0.02, 0.01, 0

Shapes = dict[str, tuple[int, ...]]


def configuration(preset: str) -> dict[str, Any]:
    """The `config.json` of a preset."""
    sizes = PRESETS[preset]
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **sizes,
        "num_key_value_heads": sizes["num_attention_heads"], "num_nextn_predict_layers": 0,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "moe_layer_freq": 1, "ep_size": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "attention_dropout": 0.0, "rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 8192,
        "initializer_range": STD, "tie_word_embeddings": False, "use_cache": True, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 2, "torch_dtype": "bfloat16",
    }


def layer_shapes(config: dict[str, Any], layer: int) -> Shapes:
    """The tensors of one layer."""
    prefix, hidden = f"model.layers.{layer}.", config["hidden_size"]
    heads, rotary, nope, value = (config[key] for key in (
        "num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    attention = prefix + "self_attn."
    shapes: Shapes = {
        prefix + "input_layernorm.weight": (hidden,), prefix + "post_attention_layernorm.weight": (hidden,),
        attention + "q_a_proj.weight": (query, hidden), attention + "q_a_layernorm.weight": (query,),
        attention + "q_b_proj.weight": (heads * (nope + rotary), query),
        attention + "kv_a_proj_with_mqa.weight": (latent + rotary, hidden),
        attention + "kv_a_layernorm.weight": (latent,),
        attention + "kv_b_proj.weight": (heads * (nope + value), latent),
        attention + "o_proj.weight": (hidden, heads * value),
    }

    def gated(name: str, width: int) -> Shapes:
        return {f"{name}gate_proj.weight": (width, hidden), f"{name}up_proj.weight": (width, hidden),
                f"{name}down_proj.weight": (hidden, width)}

    if layer < config["first_k_dense_replace"]:
        return shapes | gated(prefix + "mlp.", config["intermediate_size"])
    experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    shapes |= {prefix + "mlp.gate.weight": (experts, hidden), prefix + "mlp.gate.e_score_correction_bias": (experts,)}
    shapes |= gated(prefix + "mlp.shared_experts.", width * config["n_shared_experts"])
    for expert in range(experts):
        shapes |= gated(f"{prefix}mlp.experts.{expert}.", width)
    return shapes


def shards(config: dict[str, Any]) -> Iterator[Shapes]:
    """The tensors of each file: what is outside the layers, then a layer each."""
    outside = (config["vocab_size"], config["hidden_size"])
    yield {"model.embed_tokens.weight": outside, "model.norm.weight": outside[1:], "lm_head.weight": outside}
    for layer in range(config["num_hidden_layers"]):
        yield layer_shapes(config, layer)


def write_weights(config: dict[str, Any], folder: Path) -> None:
    chance = torch.Generator().manual_seed(SEED)
    weight_map, size = {}, 0
    count = config["num_hidden_layers"] + 1
    for number, shapes in enumerate(shards(config), start=1):
        name, tensors = f"model-{number:05d}-of-{count:05d}.safetensors", {}
        for key, shape in shapes.items():
            if key.endswith("e_score_correction_bias"):
                tensors[key] = torch.randn(shape, generator=chance) * BIAS_STD
            elif len(shape) == 1:
                tensors[key] = torch.ones(shape, dtype=torch.bfloat16)
            else:
                tensors[key] = (torch.randn(shape, generator=chance) * STD).to(torch.bfloat16)
            weight_map[key] = name
            size += tensors[key].nbytes
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE trained on the text of Python's standard library, filled up with names for nothing."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in (BOS, EOS, PAD)]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [*sorted(library.glob("*.py")), *sorted(library.glob("email/*.py"))]
    tokenizer.train_from_iterator((path.read_text(errors="replace") for path in texts), trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<|unused_{number}|>", special=False) for number in range(missing)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
        "clean_up_tokenization_spaces": False, "model_max_length": 8192}, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}))


def write_checkpoint(preset: str, folder: Path) -> None:
    """The BF16 form. The configuration comes last: a folder without one is not a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    config = configuration(preset)
    write_tokenizer(folder, config["vocab_size"])
    write_weights(config, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def quantise(source: Path, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "tripool.cli.main", "quantize", str(source), str(folder), "--plain",
                    "--calibration", "none", "--evaluation", "none", "--memory", "2GiB"], check=True, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=list(PRESETS), default="mid")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "checkpoints")
    args = parser.parse_args()
    source: Path = args.out.resolve() / args.preset
    int8 = source.with_name(f"{args.preset}-w8a8")
    if not (source / "config.json").exists():
        write_checkpoint(args.preset, source)
    if not int8.exists():
        quantise(source, int8)
    for path in sorted(source.parent.glob(f"{args.preset}*")):
        print(path)


if __name__ == "__main__":
    main()
