"""Tiny models of Gemma 4 with an assistant, and what it drafts for a text by float64 NumPy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from support.models.draft_heads import Tensors
from support.models.tiny import BASE, VOCAB, write_tiny

ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 100000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
WINDOW, HEAD_DIMS = 11, {"full_attention": 16, "sliding_attention": 8}
COMMON: dict[str, Any] = BASE | {
    "model_type": "gemma4_text",
    "global_head_dim": 16,
    "num_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "sliding_window": WINDOW,
    "rope_parameters": ROPE,
    "use_double_wide_mlp": False,
}
MODEL = COMMON | {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
}
LAYERS = [(1, "full_attention"), (2, "sliding_attention"), (1, "full_attention")]
"""The model's layer that each of the assistant's reads, and its kind."""
TEXT = COMMON | {
    "hidden_size": 24,
    "num_hidden_layers": len(LAYERS),
    "layer_types": [kind for _, kind in LAYERS],
    "vocab_size_per_layer_input": 0,
}
CLUSTERS, LIKELIEST = 32, 4


def write_pair(folder: Path, *, clusters: bool = False, **changes: Any) -> tuple[Path, Path, Tensors]:
    """Write a model and its assistant, with random weights. Return their folders, and the assistant's tensors."""
    model, assistant = write_tiny(folder / "model", "llama", **MODEL), folder / "assistant"
    config = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 32,
        "use_ordered_embeddings": clusters,
        "num_centroids": CLUSTERS,
        "centroid_intermediate_top_k": LIKELIEST,
        "text_config": TEXT,
    }
    rng, tensors = np.random.default_rng(5), Tensors()
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, 24),
        "model.norm.weight": (24,),
        "pre_projection.weight": (24, 64),
        "post_projection.weight": (32, 24),
    }
    for index, (_, kind) in enumerate(LAYERS):
        width = 4 * HEAD_DIMS[kind]
        parts = {"self_attn.q_proj": (width, 24), "self_attn.o_proj": (24, width), "self_attn.q_norm": (width // 4,)}
        parts |= {"mlp.gate_proj": (48, 24), "mlp.up_proj": (48, 24), "mlp.down_proj": (24, 48)}
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        parts |= {f"{norm}_layernorm": (24,) for norm in norms}
        shapes |= {f"model.layers.{index}.{part}.weight": shape for part, shape in parts.items()}
        shapes[f"model.layers.{index}.layer_scalar"] = (1,)
    if clusters:
        shapes["masked_embedding.centroids.weight"] = (CLUSTERS, 24)
    for path, shape in shapes.items():
        values = rng.standard_normal(shape)
        values = 1 + 0.2 * values if len(shape) == 1 else values * shape[-1] ** -0.5
        tensors[path] = mx.array(values.astype(np.float32))
    if clusters:
        tensors["masked_embedding.token_ordering"] = mx.array(rng.permutation(VOCAB))
    assistant.mkdir()
    (assistant / "config.json").write_text(json.dumps(config | changes))
    # What a layer without keys and values does not read is left out, as is a copy of the embedding.
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.k_norm.weight": mx.ones(16),
    }
    mx.save_safetensors(str(assistant / "model.safetensors"), tensors | extra, metadata={"format": "pt"})
    return model, assistant, tensors


@cache
def _judge(folder: Path) -> Any:
    """mlx-lm's own model."""
    return load_model(folder)[0]


def drafted_by_float64(model: Path, tensors: Tensors, text: Sequence[int], count: int) -> list[int]:
    """The tokens that the assistant drafts after a text, whose keys and values mlx-lm's own model has computed."""
    language, caches = _judge(model), [KVCache() for _ in range(3)]
    inner, last = language.model, len(text) - 2
    hidden = to_float64(inner(mx.array(list(text[:-1]))[None], cache=caches))[0, -1]
    kept = [[to_float64(array)[0, 0, : last + 1] for array in cache.state[:2]] for cache in caches]
    weights = {path: to_float64(value) for path, value in tensors.items()}

    def norm(values: np.ndarray, path: str) -> np.ndarray:
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5) * weights[f"{path}.weight"]

    def project(values: np.ndarray, path: str) -> np.ndarray:
        return weights[f"{path}.weight"] @ values

    tokens = [text[-1]]
    for _ in range(count):
        embedding = to_float64(inner.embed_tokens(mx.array(tokens[-1:])))[0] * 32**0.5
        x = project(np.concatenate([embedding, hidden]), "pre_projection")
        for index, (target, kind) in enumerate(LAYERS):
            at, dim = f"model.layers.{index}", HEAD_DIMS[kind]
            queries = project(norm(x, f"{at}.input_layernorm"), f"{at}.self_attn.q_proj").reshape(4, dim)
            queries = rotate(norm(queries, f"{at}.self_attn.q_norm"), last, kind)
            seen = slice(last + 1 - WINDOW if kind[0] == "s" and last >= WINDOW else 0, last + 1)
            keys, values = (array[seen] for array in kept[target])
            shares = np.exp(queries @ keys.T)
            attended = (shares / shares.sum(-1, keepdims=True) @ values).reshape(-1)
            x = x + norm(project(attended, f"{at}.self_attn.o_proj"), f"{at}.post_attention_layernorm")
            inside = norm(x, f"{at}.pre_feedforward_layernorm")
            gate = project(inside, f"{at}.mlp.gate_proj")
            gate = gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2
            inside = project(gate * project(inside, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
            x = (x + norm(inside, f"{at}.post_feedforward_layernorm")) * weights[f"{at}.layer_scalar"]
        x = norm(x, "model.norm")
        hidden, logits = project(x, "post_projection"), project(x, "model.embed_tokens")
        if "masked_embedding.centroids.weight" in weights:
            best = np.argsort(project(x, "masked_embedding.centroids"))[-LIKELIEST:]
            allowed = weights["masked_embedding.token_ordering"].astype(int).reshape(CLUSTERS, -1)[best]
            logits = np.where(np.isin(np.arange(VOCAB), allowed), logits, -np.inf)
        tokens.append(int(logits.argmax()))
    return tokens[1:]


def rotate(queries: np.ndarray, position: int, kind: str) -> np.ndarray:
    """Rotate the pairs of numbers that are half a head apart; in a full layer, the first quarter of them only."""
    half = queries.shape[1] // 2
    angles = position * ROPE[kind]["rope_theta"] ** (-np.arange(half) / half)  # type: ignore[operator]
    if kind == "full_attention":
        angles[half // 4 :] = 0
    first, second = queries[:, :half], queries[:, half:]
    turned = [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
    return np.concatenate(turned, axis=1)


def to_float64(array: mx.array) -> np.ndarray:
    return np.array(array).astype(np.float64)
