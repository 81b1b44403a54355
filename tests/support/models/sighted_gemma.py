"""Tiny models of Gemma 4 and Gemma 3 that see images, and the tensors of their towers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from support.models.towers import Floats, tower_tensor

PLACEHOLDER, VOCAB = 300, 320

VISION_4: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 256,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
VISION_3: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 32,
    "vision_use_head": False,
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,  # its root is a bfloat16, as mlx-lm rounds it
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
TEXT_4 = TEXT | {
    "model_type": "gemma4_text",
    "global_head_dim": 16,
    "num_hidden_layers": 5,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
    "sliding_window": 40,
    "final_logit_softcapping": 30.0,
    "use_double_wide_mlp": False,
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 100000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
TEXT_3 = TEXT | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 8,
    "sliding_window": 10,
    "sliding_window_pattern": 2,
    "rope_theta": 100000.0,
    "rope_local_base_freq": 10000.0,
}
_GEMMA_4 = {"model_type": "gemma4", "vocab_size": VOCAB, "image_token_id": PLACEHOLDER, "audio_config": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4 small": _GEMMA_4
    | {
        "text_config": TEXT_4
        | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
        "vision_config": VISION_4 | {"use_clipped_linears": True},
    },
    "gemma4 large": _GEMMA_4
    | {
        "text_config": TEXT_4
        | {
            "use_bidirectional_attention": "vision",
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        "vision_config": VISION_4 | {"standardize": True},
    },
    "gemma4 unified": _GEMMA_4
    | {
        "model_type": "gemma4_unified",
        "text_config": TEXT_4
        | {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0}
        | {"num_kv_shared_layers": 0, "model_type": "gemma4_unified_text"},
        "vision_config": {"patch_size": 4, "mm_embed_dim": 64, "output_proj_dims": 64, "mm_posemb_size": 80},
    },
    "gemma3": {
        "model_type": "gemma3",
        "vocab_size": VOCAB,
        "image_token_index": PLACEHOLDER,
        "mm_tokens_per_image": 16,
        "text_config": TEXT_3,
        "vision_config": VISION_3,
    },
}
"""The smaller ones of Gemma 4 have inputs of each layer and bounds in the tower, the larger ones see both ways within
windows, which are shorter than an image here.
"""

SETTINGS = {
    "gemma4": {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
    "gemma4_unified": {"image_processor_type": "Gemma4UnifiedImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}},
}
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def gemma_tensor(name: str, shape: Any) -> Floats:
    """Return a tensor of a tower under its maker's name: bounds that some numbers exceed, and others as usual."""
    name = name.removeprefix("model.")
    if name.endswith(("_min", "_max")):
        bound = 0.7 + abs(float(tower_tensor(name, (1,))[0]))
        return np.full(tuple(shape), bound if name.endswith("_max") else -bound, np.float32)
    if "position" in name or "pos_embedding" in name:
        return tower_tensor(f"pos_embed {name}", shape)
    if name.endswith("mm_soft_emb_norm.weight") or name.endswith("std_bias"):
        return tower_tensor(f"{name}.bias", shape)
    return tower_tensor(f"{name}.weight" if name.endswith("std_scale") else name, shape)


def write_sighted_gemma(folder: Path, name: str, **changes: Any) -> Path:
    """Write a tiny model with its tower. `changes` override its text part's configuration."""
    from support.models.tiny import write_tiny

    config = CONFIGS[name] | {"eos_token_id": 257}
    config |= {"text_config": config["text_config"] | changes}
    return add_gemma_tower(write_tiny(folder, "llama", **config), config)


def add_gemma_tower(folder: Path, config: dict[str, Any]) -> Path:
    """Add a tower to the model in a folder, as mlx-vlm converts them, and what says how images are prepared."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from cortexmlx.vision import gemma

    (folder / "config.json").write_text(json.dumps(config))
    tensors = mx.load(str(folder / "model.safetensors"))
    heads = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
    tensors[next(path for path in heads if path in tensors)][PLACEHOLDER] = 0  # no answer has it
    tower = gemma.TOWERS[config["model_type"]](config)
    own = "vision_embedder" if config["model_type"] == "gemma4_unified" else "vision_tower"
    for path, array in tree_flatten(tower.parameters()):
        whole = path if path.startswith(("embed_vision", "multi_modal")) else f"{own}.{path}"
        shape = array.shape if array.ndim < 4 else (array.shape[0], array.shape[3], *array.shape[1:3])
        value = mx.array(gemma_tensor(whole, shape))  # the channels of a convolution come last in MLX
        tensors[whole] = mx.contiguous(value.moveaxis(1, -1)) if array.ndim == 4 else value
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS[config["model_type"]]))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
