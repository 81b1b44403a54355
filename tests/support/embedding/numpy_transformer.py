"""Llama and Qwen3 written in NumPy with float64, and the pooling of sentence-transformers: a judge of embeddings that
shares nothing with MLX.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


class NumpyTransformer:
    """A model from a folder: the states behind its last norm, and its logits."""

    def __init__(self, folder: Path) -> None:
        from safetensors.numpy import load_file

        self.config = json.loads((folder / "config.json").read_text())
        tensors = load_file(str(folder / "model.safetensors"))
        self.weights = {key.removeprefix("model."): value.astype(np.float64) for key, value in tensors.items()}

    def states(self, tokens: Sequence[int]) -> Array:
        """Return the states `[tokens, hidden]` behind the last norm."""
        x = self.weights["embed_tokens.weight"][list(tokens)]
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self._attention(self._norm(x, f"layers.{layer}.input_layernorm"), f"layers.{layer}.self_attn")
            x = x + self._mlp(self._norm(x, f"layers.{layer}.post_attention_layernorm"), f"layers.{layer}.mlp")
        return self._norm(x, "norm")

    def logits(self, tokens: Sequence[int]) -> Array:
        """Return the logits `[vocab]` after the last token."""
        head = self.weights.get("lm_head.weight", self.weights["embed_tokens.weight"])
        last: Array = self.states(tokens)[-1] @ head.T
        return last

    def _norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        normed: Array = x / scale * self.weights[f"{name}.weight"]
        return normed

    def _mlp(self, x: Array, name: str) -> Array:
        gate, up = (x @ self.weights[f"{name}.{part}_proj.weight"].T for part in ("gate", "up"))
        down: Array = (gate / (1 + np.exp(-gate)) * up) @ self.weights[f"{name}.down_proj.weight"].T
        return down

    def _attention(self, x: Array, name: str) -> Array:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim, count = self.config["head_dim"], len(x)
        q = (x @ self.weights[f"{name}.q_proj.weight"].T).reshape(count, heads, dim)
        k = (x @ self.weights[f"{name}.k_proj.weight"].T).reshape(count, kv_heads, dim)
        v = (x @ self.weights[f"{name}.v_proj.weight"].T).reshape(count, kv_heads, dim)
        if f"{name}.q_norm.weight" in self.weights:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k = self._rotated(q), self._rotated(k)
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(count, heads * dim)
        out: Array = mixed @ self.weights[f"{name}.o_proj.weight"].T
        return out

    def _rotated(self, x: Array) -> Array:
        half = x.shape[-1] // 2
        rates = self.config["rope_theta"] ** (-np.arange(half) / half)
        angles = (np.arange(len(x))[:, None] * rates)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def pooled(states: Array, mode: str, first: int = 0) -> Array:
    """Return what sentence-transformers' Pooling makes of the states `[tokens, hidden]`, without the first ones."""
    kept = states[first:]
    weights = np.arange(first + 1, len(states) + 1)[:, None]
    vectors = {
        "lasttoken": kept[-1],
        "cls": kept[0],
        "mean": kept.sum(0) / len(kept),
        "mean_sqrt_len_tokens": kept.sum(0) / np.sqrt(len(kept)),
        "weightedmean": (kept * weights).sum(0) / weights.sum(),
    }
    return np.asarray(vectors[mode])


def dense(vector: Array, folder: Path) -> Array:
    """Return what a dense layer of sentence-transformers in `folder` makes of a vector."""
    from safetensors.numpy import load_file

    tensors = load_file(str(folder / "model.safetensors"))
    activation = json.loads((folder / "config.json").read_text())["activation_function"].rpartition(".")[2]
    out = tensors["linear.weight"].astype(np.float64) @ vector + tensors.get("linear.bias", np.zeros(1))
    return np.asarray({"Tanh": np.tanh, "Identity": lambda x: x, "ReLU": lambda x: np.maximum(x, 0)}[activation](out))


def unit(vector: Array) -> Array:
    """Return a vector divided by its length."""
    return np.asarray(vector / np.linalg.norm(vector))
