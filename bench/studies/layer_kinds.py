"""Configurations of small models of each kind of layer: attention with windows, experts, recurrent, and so on.

Hidden size 512 and 8 layers: a step is neither all overhead nor all matrix products.
"""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 4_096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1_024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
_MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "num_heads": 16,
    "state_size": 64,
    "conv_kernel": 4,
    "n_groups": 1,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.0, 100.0],
    "time_step_rank": 32,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}

KINDS: dict[str, dict[str, Any]] = {
    "full": {"model_type": "llama"},
    "windows": {"model_type": "gemma3_text", "query_pre_attn_scalar": 64, "sliding_window": 64},
    "experts and sinks": {
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "latent": {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 256,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        **_EXPERTS,
    },
    "hybrid": {
        "model_type": "qwen3_next",
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 256,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        **_EXPERTS,
    },
    "hybrid of convolutions": {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 512,
        "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [2, 5, 7],
    },
    "recurrent": {**_MAMBA2},
}
"""The entries of a configuration that make it a model of each kind. Chunks (Llama 4) are missing: mlx-lm's batch
generator does not accept its own caches for them.
"""
