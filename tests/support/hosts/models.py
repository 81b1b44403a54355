"""Tiny models that two and four ranks can divide: eight heads, four of them with keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.models.tiny import write_tiny

_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 64}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
CUT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _HEADS),
    "qwen2": ("qwen3", _HEADS | {"model_type": "qwen2", "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", _HEADS),
    "qwen3_moe": ("qwen3", _HEADS | _EXPERTS | {"model_type": "qwen3_moe"}),
    "gpt_oss": ("gpt_oss", _HEADS),
    "deepseek_v3": ("deepseek_v3", _HEADS),
    "qwen3_5": ("qwen3_5", {}),
}


def write(folder: Path, name: str, **changes: Any) -> Path:
    """Write a model of this type to `folder`."""
    base, own = CUT[name]
    return write_tiny(folder, base, **own | changes)
