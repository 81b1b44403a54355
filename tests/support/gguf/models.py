"""Tiny random models as GGUF files, and a float64 forward pass of the llama family to judge by.

The forward pass follows the GGUF convention: query and key rows of the llama architecture are stored for a rotation of
neighbouring pairs, and are used as they are stored. The code under test reorders them instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from support.gguf.writer import Uint32, decode, encode, write_gguf

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 2, 4, 2, 16, 96
HIDDEN = HEADS * HEAD_DIM
EPS, BASE = 1e-5, 10000.0


def byte_vocabulary(extra: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> tuple[list[str], list[int]]:
    """The 256 byte-level tokens, a few merged ones, then control tokens; and their types."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    tokens = [chr(b) for b in printable] + [chr(0x100 + i) for i in range(len(others))]
    tokens += ["he", "ll", "hell", "hello", "\u0120w"]
    return tokens + list(extra), [1] * len(tokens) + [3] * len(extra)


MERGES = ["h e", "l l", "he ll", "hell o", "\u0120 w"]


def metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """A complete header for the tiny model; `changes` replace or (with None) drop keys, dots written as `__`."""
    tokens, types = byte_vocabulary()
    found: dict[str, Any] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": Uint32(LAYERS),
        f"{architecture}.embedding_length": Uint32(HIDDEN),
        f"{architecture}.feed_forward_length": Uint32(FEED_FORWARD),
        f"{architecture}.attention.head_count": Uint32(HEADS),
        f"{architecture}.attention.head_count_kv": Uint32(KV_HEADS),
        f"{architecture}.attention.layer_norm_rms_epsilon": EPS,
        f"{architecture}.context_length": Uint32(512),
        f"{architecture}.rope.freq_base": BASE,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": Uint32(len(tokens) - 2),
        "tokenizer.ggml.eos_token_id": Uint32(len(tokens) - 1),
    }
    for key, value in changes.items():
        full = key.replace("__", ".")
        if value is None:
            del found[full]
        else:
            found[full] = value
    return found


def tensors(
    type_name: str = "F32",
    architecture: str = "llama",
    tied: bool = True,
    bias: bool = False,
    seed: int = 0,
    layers: int = LAYERS,
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Random tensors of the tiny model, matrices stored as `type_name`, vectors as F32."""
    rng = np.random.default_rng(seed)
    vocabulary = len(byte_vocabulary()[0])
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        values = rng.normal(size=(rows, columns)) * columns**-0.5
        found[f"{name}.weight"] = (type_name, (rows, columns), encode(values, type_name))

    def vector(name: str, size: int, centre: float = 0.0) -> None:
        found[name] = ("F32", (size,), encode(centre + 0.2 * rng.normal(size=size), "F32"))

    matrix("token_embd", vocabulary, HIDDEN)
    vector("output_norm.weight", HIDDEN, 1.0)
    if not tied:
        matrix("output", vocabulary, HIDDEN)
    biased = ("attn_q", "attn_k", "attn_v") + (("attn_output",) if architecture == "llama" else ())
    for i in range(layers):
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", FEED_FORWARD, HIDDEN),
            ("ffn_up", FEED_FORWARD, HIDDEN),
            ("ffn_down", HIDDEN, FEED_FORWARD),
        ):
            matrix(f"blk.{i}.{name}", rows, columns)
            if bias and name in biased:
                vector(f"blk.{i}.{name}.bias", rows)
        vector(f"blk.{i}.attn_norm.weight", HIDDEN, 1.0)
        vector(f"blk.{i}.ffn_norm.weight", HIDDEN, 1.0)
        if architecture == "qwen3":
            vector(f"blk.{i}.attn_q_norm.weight", HEAD_DIM, 1.0)
            vector(f"blk.{i}.attn_k_norm.weight", HEAD_DIM, 1.0)
    return found


def write_model(path: Path, architecture: str = "llama", header: dict[str, Any] | None = None, **kwargs: Any) -> Path:
    return write_gguf(path, header or metadata(architecture), tensors(architecture=architecture, **kwargs))


def refused(tmp_path: Path, error: type[Exception], *words: str, **kwargs: Any) -> None:
    """Loading the tiny model so written ends in `error`, one line with the file's name and `words` in it."""
    import pytest

    from cortexmlx.models import load_model

    path = write_model(tmp_path / "tiny.gguf", **kwargs)
    with pytest.raises(error) as caught:
        load_model(path)
    for word in ("tiny.gguf", *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def values(stored: dict[str, tuple[str, tuple[int, ...], bytes]]) -> dict[str, np.ndarray]:
    return {name: decode(data, kind, shape) for name, (kind, shape, data) in stored.items()}


def logits(
    weights: dict[str, np.ndarray],
    tokens: list[int],
    *,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    base: float = BASE,
    pairs: bool = True,
    stretch: np.ndarray | float = 1.0,
    amplitude: float = 1.0,
) -> np.ndarray:
    """Logits `[tokens, vocabulary]` in float64.

    `pairs`: rotate neighbours (llama files), else halves. The rotation's wavelengths are multiplied by `stretch`, what
    it yields by `amplitude`.
    """
    w = weights
    x = w["token_embd.weight"][tokens]
    hidden = x.shape[1]
    head_dim = w["blk.0.attn_q.weight"].shape[0] // heads
    count = len(tokens)
    angle = np.arange(count)[:, None] / (base ** (np.arange(0, head_dim, 2) / head_dim) * stretch)
    cos, sin = amplitude * np.cos(angle)[:, None], amplitude * np.sin(angle)[:, None]
    layer = 0

    def norm(v: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return v / np.sqrt((v * v).mean(-1, keepdims=True) + EPS) * weight

    def rotate(v: np.ndarray) -> np.ndarray:
        half = head_dim // 2
        a, b = (v[..., 0::2], v[..., 1::2]) if pairs else (v[..., :half], v[..., half:])
        turned = (a * cos - b * sin, a * sin + b * cos)
        return np.stack(turned, -1).reshape(v.shape) if pairs else np.concatenate(turned, -1)

    def project(name: str, v: np.ndarray) -> np.ndarray:
        out = v @ w[f"blk.{layer}.{name}.weight"].T
        return out + w.get(f"blk.{layer}.{name}.bias", 0.0)

    while f"blk.{layer}.attn_q.weight" in w:
        y = norm(x, w[f"blk.{layer}.attn_norm.weight"])
        q = project("attn_q", y).reshape(count, heads, head_dim)
        k = project("attn_k", y).reshape(count, kv_heads, head_dim)
        v = project("attn_v", y).reshape(count, kv_heads, head_dim)
        if f"blk.{layer}.attn_q_norm.weight" in w:
            q = norm(q, w[f"blk.{layer}.attn_q_norm.weight"])
            k = norm(k, w[f"blk.{layer}.attn_k_norm.weight"])
        q, k = rotate(q), rotate(k).repeat(heads // kv_heads, axis=1)
        v = v.repeat(heads // kv_heads, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        x = x + project("attn_output", np.einsum("hqk,khd->qhd", weight, v).reshape(count, heads * head_dim))
        y = norm(x, w[f"blk.{layer}.ffn_norm.weight"])
        gate = project("ffn_gate", y)
        x = x + project("ffn_down", gate / (1 + np.exp(-gate)) * project("ffn_up", y))
        layer += 1
    assert x.shape[1] == hidden
    return norm(x, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T
