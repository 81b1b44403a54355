"""The tensors of a llama-family GGUF file: what they are called here, and which shapes the configuration gives them.

Checked before a model is built, so that contradictory metadata ends in one clear line and not in a huge allocation.
"""

from __future__ import annotations

import re
from typing import Any

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models.gguf.file import GGUFHeader

ROPE_FACTORS = "rope_freqs.weight"
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OPTIONAL = ("output", "attn_q_norm", "attn_k_norm")
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)")


def parameter_names(header: GGUFHeader, config: dict[str, Any]) -> dict[str, str]:
    """The model's parameter for each tensor: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Raises ModelUnsupported for a tensor that the architecture does not have here, ModelCorrupt for one that is
    missing or has another shape than the configuration says.
    """
    shapes = _weight_shapes(config)
    _check_complete(header, config, shapes)
    names: dict[str, str] = {}
    for tensor, info in header.tensors.items():
        if tensor == ROPE_FACTORS:
            continue
        stem, _, kind = tensor.rpartition(".")
        layer = _LAYER_TENSOR.fullmatch(stem)
        part = layer[2] if layer else stem
        known = _LAYER_NAMES if layer else _GLOBAL_NAMES
        if kind not in ("weight", "bias") or part not in known:
            raise ModelUnsupported(
                f"{header.path.name} has a tensor {tensor!r} that {config['model_type']} models do not have."
            )
        wanted = shapes[part] if kind == "weight" else shapes[part][:1]
        if info.shape != wanted:
            raise ModelCorrupt(f"{header.path.name}: tensor {tensor!r} has the shape {info.shape}, not {wanted}.")
        prefix = f"model.layers.{int(layer[1])}." if layer else ""
        names[tensor] = f"{prefix}{known[part]}.{kind}"
    return names


def _weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, feed_forward = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        "token_embd": (config["vocab_size"], hidden),
        "output": (config["vocab_size"], hidden),
        "output_norm": (hidden,),
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "attn_q_norm": (config["head_dim"],),
        "attn_k_norm": (config["head_dim"],),
        "ffn_gate": (feed_forward, hidden),
        "ffn_up": (feed_forward, hidden),
        "ffn_down": (hidden, feed_forward),
    }


def _check_complete(header: GGUFHeader, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    layers = config["num_hidden_layers"]
    stored = {int(found[1]) for name in header.tensors if (found := _LAYER_TENSOR.match(name))}
    if len(stored) != layers or max(stored) != layers - 1:
        raise ModelCorrupt(f"{header.path.name} says it has {layers} layers and holds tensors of {len(stored)}.")
    needed = [part for part in shapes if part not in _OPTIONAL]
    wanted = [part for part in needed if part in _GLOBAL_NAMES]
    wanted += [f"blk.{layer}.{part}" for layer in range(layers) for part in needed if part in _LAYER_NAMES]
    missing = [part for part in wanted if f"{part}.weight" not in header.tensors]
    if missing:
        raise ModelCorrupt(f"{header.path.name} lacks {len(missing)} tensors, for example {missing[0]!r}.")
