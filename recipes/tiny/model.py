"""DeepSeek-V3 for training: the whole architecture in one screen of torch, small enough for one CPU core.

Written for training speed on a CPU, not for serving, and independent of the serving engine, so that the two check each
other. Experts are looped over after sorting tokens by expert; nothing is sliced inside that loop, because the backward
of a slice fills a tensor of the full size with zeros.

B rows · S positions · T tokens (B*S) · D model width · H heads · E experts · K picks
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the model; names follow the published config."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 6
    num_dense: int = 1
    num_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    intermediate_size: int = 768
    moe_intermediate_size: int = 64
    num_experts: int = 16
    num_picks: int = 4
    num_groups: int = 4
    num_picked_groups: int = 2
    routed_scaling_factor: float = 2.5
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    yarn_factor: float = 4.0
    yarn_original: int = 1024
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0


def rope_frequencies(shape: Shape, use_yarn: bool) -> Tensor:
    """The angle per position of each rotary pair; YaRN slows the pairs that turn less than once in the old context."""
    dim, base = shape.qk_rope_head_dim, shape.rope_theta
    frequency = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not use_yarn:
        return frequency

    def pair_of(num_turns: float) -> float:
        return dim * math.log(shape.yarn_original / (num_turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(shape.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_of(shape.yarn_beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequency / shape.yarn_factor * ramp + frequency * (1 - ramp)


def softmax_scale(shape: Shape, use_yarn: bool) -> float:
    """One over the root of the head width, times the square of YaRN's attention factor (mscale_all_dim = 1)."""
    scale = (shape.qk_nope_head_dim + shape.qk_rope_head_dim) ** -0.5
    return scale * (0.1 * math.log(shape.yarn_factor) + 1.0) ** 2 if use_yarn else scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs (0, 1), (2, 3), ... of the last dimension."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Multi-head latent attention in its expanded form."""

    def __init__(self, shape: Shape):
        super().__init__()
        s, self.shape = shape, shape
        width = s.qk_nope_head_dim + s.qk_rope_head_dim
        self.q_a_proj = nn.Linear(s.hidden_size, s.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(s.q_lora_rank, s.norm_eps)
        self.q_b_proj = nn.Linear(s.q_lora_rank, s.num_heads * width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(s.hidden_size, s.kv_lora_rank + s.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(s.kv_lora_rank, s.norm_eps)
        self.kv_b_proj = nn.Linear(s.kv_lora_rank, s.num_heads * (s.qk_nope_head_dim + s.v_head_dim), bias=False)
        self.o_proj = nn.Linear(s.num_heads * s.v_head_dim, s.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor], scale: float) -> Tensor:
        s, (rows, length, _) = self.shape, x_BSD.shape
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD))).view(rows, length, s.num_heads, -1)
        q_nope, q_rope = query.transpose(1, 2).split([s.qk_nope_head_dim, s.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x_BSD).split([s.kv_lora_rank, s.qk_rope_head_dim], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(rows, length, s.num_heads, -1).transpose(1, 2)
        k_nope, value = expanded.split([s.qk_nope_head_dim, s.v_head_dim], -1)
        k_rope = rotate(k_rope.unsqueeze(1), *rope).expand(-1, s.num_heads, -1, -1)
        query = torch.cat((q_nope, rotate(q_rope, *rope)), -1)
        key = torch.cat((k_nope, k_rope), -1)
        # The fused kernel wants one width for keys and values.
        value = F.pad(value, (0, query.shape[-1] - s.v_head_dim))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        mixed = mixed.narrow(-1, 0, s.v_head_dim).transpose(1, 2).reshape(rows, length, -1)
        return self.o_proj(mixed)


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Sigmoid routing with a bias that chooses and never weighs ("noaux_tc"), and one shared expert."""

    def __init__(self, shape: Shape):
        super().__init__()
        s, self.shape = shape, shape
        self.gate = nn.Parameter(torch.empty(s.num_experts, s.hidden_size))
        self.gate_up = nn.Parameter(torch.empty(s.num_experts, 2, s.moe_intermediate_size, s.hidden_size))
        self.down = nn.Parameter(torch.empty(s.num_experts, s.hidden_size, s.moe_intermediate_size))
        self.shared_experts = MLP(s.hidden_size, s.moe_intermediate_size)
        self.register_buffer("bias", torch.zeros(s.num_experts))
        self.register_buffer("load", torch.zeros(s.num_experts), persistent=False)

    def choose(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        s = self.shape
        score_TE = torch.sigmoid(x_TD @ self.gate.T)
        with torch.no_grad():
            biased = (score_TE + self.bias).unflatten(-1, (s.num_groups, -1))
            picked = biased.topk(2, dim=-1).values.sum(-1).topk(s.num_picked_groups, dim=-1).indices
            allowed = torch.zeros_like(biased[..., 0], dtype=torch.bool).scatter_(-1, picked, True)
            masked = biased.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
            expert_TK = masked.topk(s.num_picks, dim=-1).indices
        weight_TK = score_TE.gather(-1, expert_TK)
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20) * s.routed_scaling_factor
        return expert_TK, weight_TK

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.flatten(0, 1)
        expert_TK, weight_TK = self.choose(x_TD)
        expert, order = expert_TK.flatten().sort(stable=True)
        counts = torch.bincount(expert, minlength=self.shape.num_experts)
        self.load += counts
        token = order // self.shape.num_picks
        arrived = x_TD[token].split(counts.tolist())
        gates, ups = (w.unbind(0) for w in self.gate_up.unbind(1))
        outputs = [
            (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
            for x, gate, up, down in zip(arrived, gates, ups, self.down.unbind(0), strict=True)
        ]
        weighted = torch.cat(outputs) * weight_TK.flatten()[order].unsqueeze(-1)
        routed = torch.zeros_like(x_TD).index_add(0, token, weighted)
        return routed.view_as(x_BSD) + self.shared_experts(x_BSD)


class Layer(nn.Module):
    def __init__(self, shape: Shape, is_dense: bool):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size) if is_dense else MoE(shape)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], scale: float) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, scale)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyDeepseek(nn.Module):
    """The model and its one MTP layer, which shares the embedding and the head."""

    def __init__(self, shape: Shape):
        super().__init__()
        s, self.shape = shape, shape
        self.use_yarn = False
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s, i < s.num_dense) for i in range(s.num_layers))
        self.norm = nn.RMSNorm(s.hidden_size, s.norm_eps)
        self.lm_head = nn.Linear(s.hidden_size, s.vocab_size, bias=False)
        self.mtp = Layer(s, is_dense=False)
        self.enorm = nn.RMSNorm(s.hidden_size, s.norm_eps)
        self.hnorm = nn.RMSNorm(s.hidden_size, s.norm_eps)
        self.eh_proj = nn.Linear(2 * s.hidden_size, s.hidden_size, bias=False)
        self.mtp_norm = nn.RMSNorm(s.hidden_size, s.norm_eps)

    def initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
                continue
            std = 0.02 if name.startswith(("embed", "lm_head")) else 0.5 * parameter.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "down")):
                std *= 0.3      # blocks start near the identity
            nn.init.normal_(parameter, std=std, generator=generator)

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        angle = torch.outer(torch.arange(length, dtype=torch.float32), rope_frequencies(self.shape, self.use_yarn))
        return angle.cos(), angle.sin()

    def hidden(self, token_BS: Tensor) -> Tensor:
        """The last hidden state, after the final norm: what the head reads and what drafting starts from."""
        rope, scale = self.rope(token_BS.shape[1]), softmax_scale(self.shape, self.use_yarn)
        x = self.embed_tokens(token_BS)
        for layer in self.layers:
            x = layer(x, rope, scale)
        return self.norm(x)

    def draft_hidden(self, hidden_BSD: Tensor, token_BS: Tensor) -> Tensor:
        """What the head reads to guess the next token from each token and the hidden state of the one before it.

        Position zero has no hidden state before it and reads zeros. A draft of one token is the guess at the position
        of the token just sampled; nothing here depends on later tokens.
        """
        previous_BSD = F.pad(hidden_BSD[:, :-1], (0, 0, 1, 0))
        joined = torch.cat((self.enorm(self.embed_tokens(token_BS)), self.hnorm(previous_BSD)), dim=-1)
        scale = softmax_scale(self.shape, self.use_yarn)
        return self.mtp_norm(self.mtp(self.eh_proj(joined), self.rope(token_BS.shape[1]), scale))

    def moes(self) -> list[MoE]:
        return [layer.mlp for layer in [*self.layers, self.mtp] if isinstance(layer.mlp, MoE)]


def published_tensors(model: TinyDeepseek) -> dict[str, Tensor]:
    """The weights under the names of published checkpoints: bf16, routing bias in fp32."""
    state, last = model.state_dict(), model.shape.num_layers
    renamed = {
        "enorm.weight": f"model.layers.{last}.enorm.weight",
        "hnorm.weight": f"model.layers.{last}.hnorm.weight",
        "eh_proj.weight": f"model.layers.{last}.eh_proj.weight",
        "mtp_norm.weight": f"model.layers.{last}.shared_head.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    tensors = {}
    for name, tensor in state.items():
        name = renamed.get(name) or "model." + name.replace("mtp.", f"layers.{last}.", 1)
        stem, leaf = name.rsplit(".", 1)
        if leaf == "bias":
            tensors[stem + ".gate.e_score_correction_bias"] = tensor.float()
        elif leaf == "gate":
            tensors[stem + ".gate.weight"] = tensor.bfloat16()
        elif leaf == "gate_up":
            for i, (gate, up) in enumerate(tensor.unbind(0)):
                tensors[f"{stem}.experts.{i}.gate_proj.weight"] = gate.bfloat16()
                tensors[f"{stem}.experts.{i}.up_proj.weight"] = up.bfloat16()
        elif leaf == "down":
            for i, down in enumerate(tensor.unbind(0)):
                tensors[f"{stem}.experts.{i}.down_proj.weight"] = down.bfloat16()
        else:
            tensors[name] = tensor.bfloat16()
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def load_published(tensors: dict[str, Tensor], shape: Shape) -> TinyDeepseek:
    """The inverse of `published_tensors`, in fp32, with YaRN on."""
    model = TinyDeepseek(shape)
    inside = {"enorm", "hnorm", "eh_proj"}
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[str, list]] = {}
    for name, tensor in tensors.items():
        name, tensor = name.removeprefix("model."), tensor.float()
        prefix = f"layers.{shape.num_layers}."
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            name = rest if rest.split(".")[0] in inside else "mtp." + rest
            name = name.replace("mtp.shared_head.norm", "mtp_norm")
        if ".experts." in name:
            stem, _, rest = name.partition(".experts.")
            number, part, _ = rest.split(".")
            experts.setdefault(stem, {}).setdefault(part, [None] * shape.num_experts)[int(number)] = tensor
        elif name.endswith("e_score_correction_bias"):
            state[name.replace(".gate.e_score_correction_bias", ".bias")] = tensor
        else:
            state[name.replace(".mlp.gate.weight", ".mlp.gate")] = tensor
    for stem, parts in experts.items():
        gate_up = torch.stack((torch.stack(parts["gate_proj"]), torch.stack(parts["up_proj"])), dim=1)
        state[stem + ".gate_up"], state[stem + ".down"] = gate_up, torch.stack(parts["down_proj"])
    model.load_state_dict(state)
    model.use_yarn = True
    return model.eval()
