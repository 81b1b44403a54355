"""Tiny configurations of every one of mlx-lm's architectures with recurrent layers, for `write_tiny`."""

from __future__ import annotations

from typing import Any

from support.models.tiny import BASE, EOS, VOCAB

_BASE = BASE | {"num_hidden_layers": 4, "attention_bias": False}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_BAILING = _BASE | {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "layer_group_size": 2,
    "group_norm_size": 1,
    "n_group": 2,
    "topk_group": 1,
}
_LFM2 = _BASE | {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}
_LFM2_DENSE = _LFM2 | {
    "model_type": "lfm2",
    "block_dim": 32,
    "block_ff_dim": 48,
    "block_multiple_of": 4,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}

RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": _BASE | _DELTA | _EXPERTS | {"model_type": "qwen3_next", "full_attention_interval": 2},
    "qwen3_5": _BASE | _DELTA | {"model_type": "qwen3_5", "full_attention_interval": 2},
    "qwen3_5_moe": _BASE | _DELTA | _EXPERTS | {"model_type": "qwen3_5_moe", "full_attention_interval": 2},
    "nemotron_h": _BASE
    | {
        "model_type": "nemotron_h",
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "time_step_limit": [0.001, 100.0],
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "residual_in_fp32": False,
        "hybrid_override_pattern": ["M", "*", "-", "M"],
    },
    "granitemoehybrid": _BASE
    | {
        "model_type": "granitemoehybrid",
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.35,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "jamba": _BASE
    | {
        "model_type": "jamba",
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2": _LFM2_DENSE,
    "lfm2_moe": _LFM2 | _EXPERTS | {"model_type": "lfm2_moe", "use_expert_bias": True, "num_dense_layers": 1},
    "lfm2-vl": {"model_type": "lfm2-vl", "text_config": _LFM2_DENSE, "eos_token_id": EOS, "vocab_size": VOCAB},
    "mamba": {
        "model_type": "mamba",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "max_position_embeddings": 512,
        "eos_token_id": EOS,
    },
    "mamba2": _BASE
    | {
        "model_type": "mamba2",
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    },
    "rwkv7": _BASE
    | {
        "model_type": "rwkv7",
        "num_hidden_layers": 2,
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "recurrent_gemma": _BASE
    | {
        "model_type": "recurrent_gemma",
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 9,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "olmo_hybrid": _BASE
    | _DELTA
    | {
        "model_type": "olmo_hybrid",
        "linear_allow_neg_eigval": True,
        "tie_word_embeddings": False,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    },
    "bailing_moe_linear": _BAILING | {"model_type": "bailing_moe_linear", "norm_topk_prob": True},
    "baichuan_m1": _BASE
    | {
        "model_type": "baichuan_m1",
        "sliding_window": 9,
        "sliding_window_layers": [0, 2],
        "conv_window": 2,
    },
    "falcon_h1": _BASE
    | {
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "mamba_d_ssm": 32,
        "mamba_d_head": 8,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
    },
    "plamo2": _BASE
    | {
        "model_type": "plamo2",
        "hidden_size_per_head": 8,
        "mamba_d_state": 8,
        "mamba_num_heads": 4,
        "mamba_step": 2,
    },
    "kimi_linear": _BASE
    | _LATENT
    | {
        "model_type": "kimi_linear",
        "linear_attn_config": {"num_heads": 4, "head_dim": 8, "kda_layers": [1, 3], "short_conv_kernel_size": 4},
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 16,
        "model_max_length": 512,
    },
    "bailing_hybrid": _BAILING | _LATENT | {"model_type": "bailing_hybrid", "routed_scaling_factor": 1.0},
    "longcat_flash_ngram": _BASE
    | _LATENT
    | {
        "model_type": "longcat_flash_ngram",
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 48,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 2,
        "zero_expert_num": 2,
        "num_layers": 2,
        "num_hidden_layers": 2,
        "q_lora_rank": 16,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "emb_neighbor_num": 4,
        "emb_split_num": 2,
        "ngram_vocab_size_ratio": 2,
    },
}
