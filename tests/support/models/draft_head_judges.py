"""What a draft head computes, by float64 NumPy and by the layer of mlx-lm's own model."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from cortexmlx.models import load_model
from support.models.draft_heads import Tensors

TOKENS = 6
INPUTS = [np.random.default_rng(seed).standard_normal((TOKENS, 32)).astype(np.float32) for seed in (1, 2)]
"""Hidden states and embeddings of next tokens, `[TOKENS, 32]` each."""


def judge(head: Tensors) -> np.ndarray:
    """The states of a dense head for `INPUTS`, all positions at once, in float64."""
    weights = {path: np.array(value.astype(mx.float32)).astype(np.float64) for path, value in head.items()}
    hidden, embeddings = (values.astype(np.float64) for values in INPUTS)

    def norm(values: np.ndarray, path: str) -> np.ndarray:
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5) * weights[f"{path}.weight"]

    def project(values: np.ndarray, path: str) -> np.ndarray:
        return values @ weights[f"{path}.weight"].T

    def rotate(values: np.ndarray) -> np.ndarray:  # a quarter of 8 numbers: one pair, whose wavelength is 2 pi
        angles = np.arange(TOKENS)[:, None]
        first, second = values[..., 0], values[..., 1]
        turned = [first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)]
        return np.concatenate([np.stack(turned, -1), values[..., 2:]], -1)

    both = [norm(embeddings, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")]
    x = project(np.concatenate(both, -1), "fc")
    inside, attention = norm(x, "layers.0.input_layernorm"), "layers.0.self_attn"
    queries, gates = np.split(project(inside, f"{attention}.q_proj").reshape(TOKENS, 4, 16), 2, -1)
    keys, values = (project(inside, f"{attention}.{kind}_proj").reshape(TOKENS, 2, 8) for kind in "kv")
    queries, keys = rotate(norm(queries, f"{attention}.q_norm")), rotate(norm(keys, f"{attention}.k_norm"))
    scores = np.einsum("qhd,khd->hqk", queries, keys.repeat(2, 1)) * 8**-0.5
    shares = np.exp(scores) * np.tri(TOKENS)
    seen = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), values.repeat(2, 1))
    x = x + project((seen / (1 + np.exp(-gates))).reshape(TOKENS, 32), f"{attention}.o_proj")
    inside, mlp = norm(x, "layers.0.post_attention_layernorm"), "layers.0.mlp"
    gate = project(inside, f"{mlp}.gate_proj")
    x = x + project(gate / (1 + np.exp(-gate)) * project(inside, f"{mlp}.up_proj"), f"{mlp}.down_proj")
    return norm(x, "norm")


def layer_judge(head: Tensors, folder: Path) -> np.ndarray:
    """The states of a head whose layer is mlx-lm's, the second of the model with these weights."""
    model = load_model(folder).model
    layer = model.layers[1]
    layer.load_weights([(p.removeprefix("layers.0."), value) for p, value in head.items() if p.startswith("layers.0.")])
    hidden, embeddings = (mx.array(values[None]) for values in INPUTS)
    before = [(embeddings, "pre_fc_norm_embedding.weight"), (hidden, "pre_fc_norm_hidden.weight")]
    joined = mx.concatenate([mx.fast.rms_norm(values, head[path], 1e-5) for values, path in before], -1)
    out = layer(joined @ head["fc.weight"].T, "causal", None)
    return np.array(mx.fast.rms_norm(out, head["norm.weight"], 1e-5))[0]
