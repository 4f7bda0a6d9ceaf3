"""The shape of a DeepSeek-class model: from `config.json` to bytes and FLOPs.

Standard library only, so that the planner and the simulator can reckon with models they never load.
Names follow the published configuration files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tripool.core.errors import ConfigError

BLOCK_LAYOUT_VERSION = 1
"""Raise when the meaning of a block's bytes changes: old pool entries then miss instead of being misread."""


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Context extension. `mscale / mscale_all_dim` scales cos and sin; `mscale_all_dim` squared scales the logits."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a model but its weights."""

    family: Literal["deepseek_v2", "deepseek_v3"]
    vocab_size: int
    hidden_size: int
    num_layers: int                    # main layers, without MTP
    num_mtp_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int             # of dense layers
    moe_intermediate_size: int
    num_routed_experts: int            # 0: a dense model
    num_shared_experts: int
    num_experts_per_token: int
    num_groups: int
    num_chosen_groups: int
    first_dense_layers: int
    moe_layer_freq: int
    scoring: Literal["softmax", "sigmoid"]
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    rope_interleaved: bool
    yarn: YarnScaling | None
    max_position: int
    tie_embeddings: bool
    attention_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def is_moe(self, layer: int) -> bool:
        """Whether a layer (MTP layers follow the main ones) has experts."""
        return (self.num_routed_experts > 0 and layer >= self.first_dense_layers
                and layer % self.moe_layer_freq == 0)

    @property
    def entry_width(self) -> int:
        """Elements of one token's cache entry in one layer: latent and rotary part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def num_cached_layers(self) -> int:
        return self.num_layers + self.num_mtp_layers

    def block_elements(self, block_tokens: int) -> int:
        """Elements of a block: `[layers + MTP][tokens][latent + rotary]`, then, with MTP, the last hidden state."""
        hidden = self.hidden_size if self.num_mtp_layers else 0
        return self.num_cached_layers * block_tokens * self.entry_width + hidden

    def attention_params(self) -> int:
        """Weights of one attention layer."""
        query_width = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank:
            query = self.q_lora_rank * (self.hidden_size + 1 + query_width)
        else:
            query = self.hidden_size * query_width
        key_value = (self.hidden_size * self.entry_width + self.kv_lora_rank
                     + self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim))
        return query + key_value + self.num_heads * self.v_head_dim * self.hidden_size

    def expert_params(self) -> int:
        """Weights of one routed expert."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    def layer_params(self, layer: int, *, active: bool = False) -> int:
        """Weights of a layer; with `active`, only those that one token uses."""
        total = self.attention_params() + 2 * self.hidden_size
        if not self.is_moe(layer):
            return total + 3 * self.hidden_size * self.intermediate_size
        experts = self.num_experts_per_token if active else self.num_routed_experts
        bias = self.num_routed_experts if self.topk_method == "noaux_tc" else 0
        gate = self.hidden_size * self.num_routed_experts + bias
        return total + gate + (experts + self.num_shared_experts) * self.expert_params()

    def params(self, *, active: bool = False, mtp: bool = False) -> int:
        """Weights of the model; `active`: per token, without the embedding table; `mtp`: with the MTP layers."""
        num_layers = self.num_cached_layers if mtp else self.num_layers
        total = sum(self.layer_params(layer, active=active) for layer in range(num_layers)) + self.hidden_size
        if mtp:
            total += self.num_mtp_layers * (2 * self.hidden_size * self.hidden_size + 3 * self.hidden_size)
        tables = 1 if active or self.tie_embeddings else 2
        return total + tables * self.vocab_size * self.hidden_size


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a published `config.json`.

    Raises:
        ConfigError: the architecture is not of the family, or a field is missing or impossible.
    """
    family = config.get("model_type")
    if family not in ("deepseek_v2", "deepseek_v3"):
        raise ConfigError(f"model_type is {family!r}; Tripool serves deepseek_v2 and deepseek_v3 (V2, V2-Lite, V3, R1)")

    def need(name: str) -> Any:
        if config.get(name) is None:
            raise ConfigError(f"config.json lacks {name!r}, which a {family} model needs")
        return config[name]

    v3 = family == "deepseek_v3"
    rope_parameters = config.get("rope_parameters") or {}
    rope_scaling = config.get("rope_scaling") or (rope_parameters if rope_parameters.get("factor") else None)
    eos = config.get("eos_token_id")
    eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
    num_routed = config.get("n_routed_experts") or 0
    shape = ModelShape(
        family=family,
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        num_layers=need("num_hidden_layers"),
        num_mtp_layers=(config.get("num_nextn_predict_layers") or 0) if v3 else 0,
        num_heads=need("num_attention_heads"),
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=need("kv_lora_rank"),
        qk_nope_head_dim=need("qk_nope_head_dim"),
        qk_rope_head_dim=need("qk_rope_head_dim"),
        v_head_dim=need("v_head_dim"),
        intermediate_size=need("intermediate_size"),
        moe_intermediate_size=need("moe_intermediate_size") if num_routed else 0,
        num_routed_experts=num_routed,
        num_shared_experts=config.get("n_shared_experts") or 0,
        num_experts_per_token=need("num_experts_per_tok") if num_routed else 0,
        num_groups=config.get("n_group") or 1,
        num_chosen_groups=config.get("topk_group") or 1,
        first_dense_layers=config.get("first_k_dense_replace") or 0,
        moe_layer_freq=config.get("moe_layer_freq") or 1,
        scoring=config.get("scoring_func") or ("sigmoid" if v3 else "softmax"),
        topk_method=config.get("topk_method") or ("noaux_tc" if v3 else "greedy"),
        norm_topk_prob=bool(config.get("norm_topk_prob", v3)),
        routed_scaling_factor=float(config.get("routed_scaling_factor") or 1.0),
        rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        rope_theta=float(config.get("rope_theta") or rope_parameters.get("rope_theta") or 10000.0),
        rope_interleaved=bool(config.get("rope_interleave", True)),
        yarn=_yarn(rope_scaling) if rope_scaling else None,
        max_position=need("max_position_embeddings"),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=eos_token_ids,
    )
    _check(shape)
    return shape


def _yarn(scaling: Mapping[str, Any]) -> YarnScaling:
    kind = scaling.get("type") or scaling.get("rope_type")
    if kind != "yarn":
        raise ConfigError(f"rope_scaling.type is {kind!r}; this family is served with 'yarn' or none")
    original = scaling.get("original_max_position_embeddings")
    if not original:
        raise ConfigError("rope_scaling lacks original_max_position_embeddings")
    return YarnScaling(
        factor=float(scaling["factor"]), original_max_position=int(original),
        beta_fast=float(scaling.get("beta_fast") or 32), beta_slow=float(scaling.get("beta_slow") or 1),
        mscale=float(scaling["mscale"]) if scaling.get("mscale") is not None else 1.0,
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
    )


def _check(shape: ModelShape) -> None:
    if shape.scoring not in ("softmax", "sigmoid"):
        raise ConfigError(f"scoring_func is {shape.scoring!r}; known are softmax and sigmoid")
    if shape.topk_method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ConfigError(f"topk_method is {shape.topk_method!r}; known are greedy, group_limited_greedy and noaux_tc")
    if shape.num_routed_experts:
        if shape.num_routed_experts % shape.num_groups:
            raise ConfigError(f"n_group is {shape.num_groups}, which does not divide n_routed_experts "
                              f"{shape.num_routed_experts}")
        if shape.num_chosen_groups > shape.num_groups:
            raise ConfigError(f"topk_group is {shape.num_chosen_groups}, more than n_group {shape.num_groups}")
        most = shape.num_chosen_groups * (shape.num_routed_experts // shape.num_groups)
        if shape.num_experts_per_token > most:
            raise ConfigError(f"num_experts_per_tok is {shape.num_experts_per_token}, more than the {most} experts "
                              "of the chosen groups")
    if shape.qk_rope_head_dim % 2:
        raise ConfigError(f"qk_rope_head_dim is {shape.qk_rope_head_dim}; it must be even")
