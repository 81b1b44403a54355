"""Tiny random models of mlx-lm's classes, and the GGUF files that a converter would make of them.

The other way round than the code under test: from mlx-lm's parameters to the names, the row orders and the metadata of
the format. A matrix is written in some type, and what that stands for, in float64, is what the model here gets.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from support.gguf.blocks import BLOCK_BYTES, decode_blocks, random_blocks
from support.gguf.models import MERGES, byte_vocabulary
from support.gguf.writer import Uint32, decode, encode, write_gguf

VOCABULARY = len(byte_vocabulary()[0])
EPS = 1e-5
SEQUENCE = [5, 250, 17, 17, 99, 3, 140, 261, 0, 42, 8, 200, 7, 7, 61, 90, 33, 12, 254, 31]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm": "ffn_norm",
}
NAMES |= {
    f"{experts}.{part}_proj": f"ffn_{part}_exps"
    for experts in ("mlp.switch_mlp", "mlp.experts", "block_sparse_moe.switch_mlp")
    for part in ("gate", "up", "down")
}
SECOND_NORM = {"gemma2": "post_attention_norm", "gemma3": "post_attention_norm", "gpt-oss": "post_attention_norm"}

Types = Callable[[str], str]


@dataclass(frozen=True)
class Tiny:
    """One architecture: its name in GGUF, mlx-lm's configuration, and the metadata that only it has."""

    architecture: str
    config: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()


def tiny(hidden: int = 64) -> dict[str, Tiny]:
    """Tiny models by name, whose rows have `hidden` values or a multiple."""
    base = {
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "intermediate_size": hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "rms_norm_eps": EPS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    untied = {"tie_word_embeddings": False}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    moe_keys = {"expert_count": Uint32(4), "expert_used_count": Uint32(2)}
    gemma = {"head_dim": hidden // 2, "query_pre_attn_scalar": hidden // 2}
    rotated = hidden // 4 * 3 // 4
    factors = {"long_factor": list(np.linspace(1, 9, rotated // 2)), "short_factor": [1.0] * (rotated // 2)}
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16}
    return {
        "llama": Tiny("llama", base | {"model_type": "llama"}),
        "mixtral": Tiny(
            "llama",
            base | untied | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
            moe_keys,
        ),
        "qwen2": Tiny("qwen2", base | {"model_type": "qwen2"}),
        "qwen3": Tiny("qwen3", base | untied | {"model_type": "qwen3", "head_dim": hidden // 2}),
        "qwen2moe": Tiny(
            "qwen2moe",
            base | untied | moe | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": hidden * 2},
            moe_keys | {"expert_feed_forward_length": Uint32(hidden)},
        ),
        "qwen3moe": Tiny(
            "qwen3moe",
            base
            | moe
            | {
                "model_type": "qwen3_moe",
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "norm_topk_prob": True,
            },
            moe_keys | {"expert_feed_forward_length": Uint32(hidden)},
        ),
        "gemma2": Tiny(
            "gemma2",
            base | gemma | {"model_type": "gemma2", "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
            {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "attention.sliding_window": Uint32(4096)},
        ),
        "gemma3": Tiny(
            "gemma3",
            base
            | gemma
            | {
                "model_type": "gemma3_text",
                "num_hidden_layers": 3,
                "sliding_window": 8,
                "sliding_window_pattern": 3,
                "rope_theta": 1e6,
                "rope_local_base_freq": 500.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            {
                "attention.sliding_window": Uint32(8),
                "attention.sliding_window_pattern": Uint32(3),
                "rope.freq_base_swa": 500.0,
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 8.0,
            },
        ),
        "phi3": Tiny(
            "phi3",
            base
            | untied
            | {
                "model_type": "phi3",
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "longrope", **factors},
            },
            {
                "rope.dimension_count": Uint32(rotated),
                "rope.scaling.original_context_length": Uint32(64),
                "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(8) / np.log(64))),
            },
        ),
        "gpt-oss": Tiny(
            "gpt-oss",
            base
            | untied
            | {
                "model_type": "gpt_oss",
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": 8,
                "rope_scaling": yarn,
            },
            moe_keys
            | {
                "expert_feed_forward_length": Uint32(hidden),
                "attention.sliding_window": Uint32(8),
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 32.0,
                "rope.scaling.original_context_length": Uint32(16),
            },
        ),
    }


def metadata(model: Tiny) -> dict[str, Any]:
    """The file's metadata, with a byte-level vocabulary."""
    config, name = model.config, model.architecture
    tokens, types = byte_vocabulary()
    found: dict[str, Any] = {
        "block_count": Uint32(config["num_hidden_layers"]),
        "embedding_length": Uint32(config["hidden_size"]),
        "feed_forward_length": Uint32(config["intermediate_size"]),
        "attention.head_count": Uint32(config["num_attention_heads"]),
        "attention.head_count_kv": Uint32(config["num_key_value_heads"]),
        "attention.key_length": Uint32(config["head_dim"]),
        "attention.value_length": Uint32(config["head_dim"]),
        "attention.layer_norm_rms_epsilon": EPS,
        "context_length": Uint32(config["max_position_embeddings"]),
        "rope.freq_base": config["rope_theta"],
    } | model.metadata
    return {
        "general.architecture": name,
        **{f"{name}.{key}": value for key, value in found.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": Uint32(len(tokens) - 1),
    }


def build(config: dict[str, Any]) -> Any:
    """mlx-lm's model, as its own loader builds it for a folder that has no head of its own."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    if config["model_type"] == "gemma3_text":
        model.sanitize({})
    return model


def export(path: Path, model: Tiny, types: str | Types = "F32", seed: int = 0) -> Any:
    """Write the GGUF file of a random model to `path`; returns mlx-lm's model with those weights, in float32.

    `types`: in which type the matrix of this (GGUF) name is written; vectors and routers are float32, as always.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    rng = np.random.default_rng(seed)
    reference = build(model.config)
    stored: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    weights = []
    for parameter, array in tree_flatten(reference.parameters()):
        name = tensor_name(parameter, model.architecture)
        plain = len(array.shape) == 1 or "ffn_gate_inp" in name or not name.endswith(".weight")
        type_name = "F32" if plain else types if isinstance(types, str) else types(name)
        values, entry = _random(rng, name, array.shape, type_name, model)
        stored[name] = entry
        weights.append((parameter, mx.array(values.astype(np.float32)).reshape(array.shape)))
    _rope_factors(stored, model.config)
    reference.load_weights(weights, strict=True)
    write_gguf(path, metadata(model), stored)
    return reference


def tensor_name(parameter: str, architecture: str) -> str:
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", parameter)
    if found is None:
        stem, _, kind = parameter.rpartition(".")
        return f"{NAMES[stem]}.{kind}"
    if found[2] == "self_attn.sinks":
        return f"blk.{found[1]}.attn_sinks.weight"
    stem, _, kind = found[2].rpartition(".")
    second = SECOND_NORM.get(architecture, "ffn_norm")
    return f"blk.{found[1]}.{second if stem == 'post_attention_layernorm' else NAMES[stem]}.{kind}"


def _random(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], type_name: str, model: Tiny
) -> tuple[np.ndarray, tuple[str, tuple[int, ...], bytes]]:
    """The values for mlx-lm, and what the file has of them: type, shape, data."""
    matrix = len(shape) > 1 and name.endswith(".weight")
    size = shape[-1] ** -0.5 if matrix else 0.2
    if type_name in BLOCK_BYTES:
        data = random_blocks(rng, type_name, int(np.prod(shape)), size)
        values = decode_blocks(data, type_name).reshape(shape)
        return values, (type_name, shape, _stored_rows(data, name, shape[0], model))
    values = size * rng.normal(size=shape)
    gemma = model.architecture.startswith("gemma")
    if name.endswith("norm.weight") and not gemma:
        values += 1
    values = decode(encode(values, type_name), type_name, shape)
    written = values + 1 if name.endswith("norm.weight") and gemma else values
    if gemma and name.endswith("norm.weight"):
        values = written.astype(np.float32).astype(np.float64) - 1
    kept = shape[1:] if name.endswith("ffn_gate_inp_shexp.weight") else shape
    return values, (type_name, kept, _stored_rows(encode(written, type_name), name, shape[0], model))


def _stored_rows(data: bytes, name: str, rows: int, model: Tiny) -> bytes:
    """llama's query and key rows: of each head first the first of both halves, then the second of both, and so on."""
    kind = name.split(".")[-2]
    if model.architecture != "llama" or kind not in ("attn_q", "attn_k"):
        return data
    heads = model.config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
    raw = np.frombuffer(data, np.uint8).reshape(heads, 2, rows // heads // 2, -1)
    return raw.swapaxes(1, 2).tobytes()


def _rope_factors(stored: dict[str, tuple[str, tuple[int, ...], bytes]], config: dict[str, Any]) -> None:
    scaling = config.get("rope_scaling") or {}
    for key in ("long", "short"):
        if f"{key}_factor" in scaling:
            values = np.array(scaling[f"{key}_factor"], "<f4")
            stored[f"rope_factors_{key}.weight"] = ("F32", values.shape, values.tobytes())


def logits_of(model: Any) -> np.ndarray:
    """Logits `[tokens, vocabulary]` of the sequence, in one piece and without a cache."""
    import mlx.core as mx

    return np.array(model(mx.array([SEQUENCE])).astype(mx.float32))[0]
