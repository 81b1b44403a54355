"""Record what transformers' own torch classes say of tiny vision towers, image positions and rotations.

It is no test. Run it in an environment of its own, with torch and transformers 5.24 and nothing of cortexmlx:

    python -m venv judge && judge/bin/pip install torch transformers==5.24.0
    judge/bin/python tests/vision/record.py

It writes the files of `tests/vision/recorded/`. Weights and pixels come from `support.models.towers`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, Mistral3Config, Mistral3ForConditionalGeneration
from transformers.models.qwen3_5 import configuration_qwen3_5 as config_35
from transformers.models.qwen3_5 import modeling_qwen3_5 as model_35
from transformers.models.qwen3_vl import configuration_qwen3_vl as config_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl as model_vl

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.models.towers import tower_tensor, uniform

FOLDER = Path(__file__).parent / "recorded"

TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 24,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
    },
    "qwen3_5": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "patch_size": 8,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    },
}
SIZES = {
    "in_channels": 3,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "hidden_act": "gelu_pytorch_tanh",
}
GRIDS = ((1, 2, 2), (1, 2, 10), (1, 12, 2), (1, 4, 6), (1, 10, 8), (2, 4, 6))
"""Frames, rows and columns of patches: one merged patch, one merged row, one column, and more than the positions."""

PIXTRALS: dict[str, dict[str, Any]] = {
    "mistral3": {
        "vision_config": {
            "model_type": "pixtral",
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "patch_size": 4,
            "hidden_act": "silu",
            "head_dim": 16,
            "rope_theta": 10000.0,
        },
        "spatial_merge_size": 2,
        "multimodal_projector_bias": False,
        "text_config": {"model_type": "mistral", "hidden_size": 24, "rms_norm_eps": 1e-3},
    },
    "llava": {
        "vision_config": {
            "model_type": "pixtral",
            "num_hidden_layers": 3,
            "hidden_size": 48,
            "intermediate_size": 32,
            "num_attention_heads": 4,
            "patch_size": 8,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "text_config": {"model_type": "mistral", "hidden_size": 32, "rms_norm_eps": 1e-5},
    },
}
PIXTRAL_GRIDS = ((1, 2, 2), (1, 2, 10), (1, 12, 2), (1, 4, 6), (1, 10, 8))

TEXT = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 8}
ROPES = {
    "qwen3_vl": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    "qwen3_5": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
"""The makers' own, but their theta is 5e6 and 1e7: then the slowest pairs, where sections end, turn by nothing."""

PROMPTS: dict[str, list[tuple[int, int, int] | int]] = {
    "text": [9],
    "one": [4, (1, 6, 8), 5],
    "first": [(1, 8, 4), 3],
    "last": [2, (1, 4, 4)],
    "two": [3, (1, 4, 10), 2, (1, 12, 6), 7],
    "three": [1, (1, 2, 2), 1, (1, 2, 20), 1, (1, 20, 2), 4],
    "four": [5, (1, 6, 6), 2, (1, 2, 8), 2, (1, 14, 4), 30, (1, 4, 4), 1],
}
"""Lengths of text, and grids of images in patches, in order. Two by two patches are one token."""


def whole_model(name: str) -> Any:
    """Return the tiny model with its head, as checkpoints name its parts, and the random tensors in its tower."""
    head_dim = 128 if name == "qwen3_vl" else 256
    text = TEXT | {"head_dim": head_dim, "rope_parameters": ROPES[name], "intermediate_size": 32}
    vision = TOWERS[name] | SIZES
    torch.manual_seed(0)
    if name == "qwen3_vl":
        config: Any = config_vl.Qwen3VLConfig(text_config=text, vision_config=vision)
        model: Any = model_vl.Qwen3VLForConditionalGeneration(config)
    else:
        config = config_35.Qwen3_5Config(text_config=text | {"layer_types": ["full_attention"]}, vision_config=vision)
        model = model_35.Qwen3_5ForConditionalGeneration(config)
    tower = model.model.visual
    tensors = {each: tower_tensor(each, value.shape) for each, value in tower.state_dict().items()}
    tower.load_state_dict({each: torch.from_numpy(value) for each, value in tensors.items()})
    return model.eval()


def record_tower(name: str, model: Any) -> None:
    """Write the names and shapes of a tower's tensors, and its features of an image of each size."""
    shapes = {n: list(v.shape) for n, v in model.state_dict().items() if ".visual." in n}
    config = {"model_type": name, "vision_config": TOWERS[name] | SIZES, "shapes": shapes}
    recorded: dict[str, Any] = {"config": json.dumps(config), "grids": np.array(GRIDS)}
    for number, grid in enumerate(GRIDS):
        pixels = uniform(f"pixels {number}", (int(np.prod(grid)), 3 * 2 * TOWERS[name]["patch_size"] ** 2))
        with torch.no_grad():
            told = model.model.visual(torch.from_numpy(pixels), torch.tensor([grid]))
        recorded[f"features {number}"] = told.pooler_output.numpy()
        for level, features in enumerate(getattr(told, "deepstack_features", None) or []):
            recorded[f"deepstack {number} {level}"] = features.numpy()
    np.savez_compressed(FOLDER / f"tower_{name}.npz", **recorded)


def record_pixtral(name: str) -> None:
    """Write what `record_tower` does for the tower and the projector of a Pixtral, given all images at once."""
    config = PIXTRALS[name] | {"model_type": name, "image_token_index": 7, "tie_word_embeddings": False}
    text = config["text_config"] | TEXT | {"hidden_size": config["text_config"]["hidden_size"], "head_dim": 16}
    kind, make = (Mistral3Config, Mistral3ForConditionalGeneration)
    if name == "llava":
        kind, make = (LlavaConfig, LlavaForConditionalGeneration)
    model = make(kind(**(config | {"text_config": text | {"intermediate_size": 32}}))).eval()
    parts = {n: v for n, v in model.state_dict().items() if "language_model" not in n and "lm_head" not in n}
    model.load_state_dict({n: torch.from_numpy(tower_tensor(n, v.shape)) for n, v in parts.items()}, strict=False)
    patch = config["vision_config"]["patch_size"]
    sizes = [(rows * patch, columns * patch) for _, rows, columns in PIXTRAL_GRIDS]
    pixels = torch.zeros(len(sizes), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    for number, (height, width) in enumerate(sizes):
        pixels[number, :, :height, :width] = torch.from_numpy(uniform(f"pixels {number}", (3, height, width)))
    with torch.no_grad():
        told = model.model.get_image_features(pixel_values=pixels, image_sizes=torch.tensor(sizes)).pooler_output
    shapes = {n: list(v.shape) for n, v in parts.items()}
    recorded = {f"features {number}": features.numpy() for number, features in enumerate(told)}
    recorded |= {"config": json.dumps(config | {"shapes": shapes}), "grids": np.array(PIXTRAL_GRIDS)}
    np.savez_compressed(FOLDER / f"tower_{name}.npz", **recorded)


def record_positions(model: Any) -> None:
    """Write the positions and the delta of each prompt."""
    recorded: dict[str, Any] = {"prompts": json.dumps(PROMPTS)}
    for name, parts in PROMPTS.items():
        kinds = [
            np.zeros(part, int) if isinstance(part, int) else np.ones(part[1] * part[2] // 4, int) for part in parts
        ]
        types = torch.from_numpy(np.concatenate(kinds))[None]
        grids = [part for part in parts if not isinstance(part, int)]
        images = torch.tensor(grids) if grids else None
        positions, delta = model.model.get_rope_index(torch.zeros_like(types), types, images)
        recorded[name], recorded[f"{name} delta"] = positions[:, 0].numpy(), delta.numpy()
    np.savez_compressed(FOLDER / "positions.npz", **recorded)


def record_rotations(models: dict[str, Any]) -> None:
    """Write queries rotated as the text layers rotate them, at the positions of the prompt with four images."""
    positions = torch.from_numpy(np.load(FOLDER / "positions.npz")["four"][:, ::3] + 100)[:, None]
    recorded: dict[str, Any] = {"positions": positions[:, 0].numpy(), "ropes": json.dumps(ROPES)}
    for name, model in models.items():
        module, dim = (model_vl, 128) if name == "qwen3_vl" else (model_35, 256)
        x = uniform(f"queries {name}", (positions.shape[-1], 2, 1, dim))
        queries = torch.from_numpy(x[:, :, 0]).transpose(0, 1)[None]
        cosine, sine = model.model.language_model.rotary_emb(queries, positions)
        rotated, _ = module.apply_rotary_pos_emb(queries, queries, cosine, sine)
        recorded[name] = rotated[0].transpose(0, 1)[:, :, None].numpy()
    np.savez_compressed(FOLDER / "rotations.npz", **recorded)


if __name__ == "__main__":
    models = {name: whole_model(name) for name in TOWERS}
    for name, model in models.items():
        record_tower(name, model)
    for name in PIXTRALS:
        record_pixtral(name)
    record_positions(models["qwen3_vl"])
    record_rotations(models)
