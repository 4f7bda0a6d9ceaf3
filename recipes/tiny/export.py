"""Write a training checkpoint as a Hugging Face folder, with the names and the config of published checkpoints.

The schedule of the run that made it (see `train`) is written beside the recipe.

    python -m recipes.tiny.export --out tripool/models/tiny
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from recipes.tiny import chat
from recipes.tiny.model import Shape, TinyDeepseek, published_tensors
from recipes.tiny.train import OUT

MAX_POSITION = 4096


def config(s: Shape) -> dict:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "moe_intermediate_size": s.moe_intermediate_size,
        "num_hidden_layers": s.num_layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_heads,
        "n_shared_experts": 1,
        "n_routed_experts": s.num_experts,
        "num_experts_per_tok": s.num_picks,
        "n_group": s.num_groups,
        "topk_group": s.num_picked_groups,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": s.routed_scaling_factor,
        "first_k_dense_replace": s.num_dense,
        "moe_layer_freq": 1,
        "ep_size": 1,
        "q_lora_rank": s.q_lora_rank,
        "kv_lora_rank": s.kv_lora_rank,
        "qk_nope_head_dim": s.qk_nope_head_dim,
        "qk_rope_head_dim": s.qk_rope_head_dim,
        "v_head_dim": s.v_head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": s.norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_theta": s.rope_theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": s.yarn_factor,
            "original_max_position_embeddings": s.yarn_original,
            "beta_fast": s.yarn_beta_fast,
            "beta_slow": s.yarn_beta_slow,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": MAX_POSITION,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }


TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": chat.BOS,
    "eos_token": chat.EOS,
    "pad_token": chat.PAD,
    "add_bos_token": True,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": MAX_POSITION,
    "chat_template": chat.TEMPLATE,
}
GENERATION_CONFIG = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
}


def export(model: TinyDeepseek, tokenizer: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file(published_tensors(model), out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    files = {
        "config.json": config(model.shape),
        "tokenizer_config.json": TOKENIZER_CONFIG,
        "generation_config.json": GENERATION_CONFIG,
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if tokenizer.resolve() != (out / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer, out / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=OUT / "checkpoint.pt")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schedule", type=Path, default=Path(__file__).parent / "schedule.json", help="written too")
    arguments = parser.parse_args()
    state = torch.load(arguments.checkpoint, weights_only=False)
    model = TinyDeepseek(Shape())
    model.load_state_dict(state["model"])
    export(model, OUT / "tokenizer.json", arguments.out)
    summary = {"step": state["step"], "num_tokens": state["num_tokens"], "spent_s": round(state["spent_s"])}
    arguments.schedule.write_text(json.dumps(summary | {"began": state["began"]}) + "\n")
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"{state['num_tokens']} tokens trained, {size / 1e6:.1f} MB written")


if __name__ == "__main__":
    main()
