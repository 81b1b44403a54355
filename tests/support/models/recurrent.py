"""Tiny configurations of every one of mlx-lm's architectures with recurrent layers, for `write_tiny`."""

from __future__ import annotations

from typing import Any

from support.models.tiny import BASE, EOS, VOCAB
from tests.architectures.configurations import configuration

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
    "rwkv7": configuration("rwkv7"),
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
    **{
        name: configuration(name)
        for name in (
            "nemotron_h",
            "granitemoehybrid",
            "jamba",
            "recurrent_gemma",
            "olmo_hybrid",
            "bailing_moe_linear",
            "baichuan_m1",
            "plamo2",
            "kimi_linear",
            "bailing_hybrid",
            "longcat_flash_ngram",
        )
    },
}
