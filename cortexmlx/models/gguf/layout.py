"""The names of a GGUF file's tensors in the model, and the shapes that the configuration gives them.

They are checked before a model is built. So contradictory metadata ends in one clear line, not in a huge allocation.
"""

from __future__ import annotations

import re

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models.gguf.architectures import Architecture, Head
from cortexmlx.models.gguf.config import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, Description, Sizes
from cortexmlx.models.gguf.file import GGUFHeader

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)", re.ASCII)
_READ_ALREADY = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)


def parameter_names(header: GGUFHeader, description: Description) -> dict[str, str]:
    """Return the model's parameter for each tensor: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Raises ModelUnsupported for a tensor that the architecture does not have here. Raises ModelCorrupt for a missing
    tensor, or one whose shape differs from the configuration.
    """
    architecture = description.architecture
    shapes = _weight_shapes(description.sizes, architecture)
    global_names = dict(_GLOBAL_NAMES)
    if architecture.head is Head.TIED:
        del global_names["output"]
    _check_complete(header, description)
    names: dict[str, str] = {}
    for tensor, info in header.tensors.items():
        if tensor in _READ_ALREADY:
            continue
        stem, _, kind = tensor.rpartition(".")
        layer = _LAYER_TENSOR.fullmatch(stem)
        part = layer[2] if layer else stem
        known = architecture.modules if layer else global_names
        if kind not in ("weight", "bias") or part not in known:
            raise ModelUnsupported(
                f"{header.path.name} has a tensor {tensor!r} that {architecture.model_type} models do not have."
            )
        wanted = shapes[part] if kind == "weight" else shapes[part][:-1]
        if info.shape != wanted:
            raise ModelCorrupt(f"{header.path.name}: tensor {tensor!r} has the shape {info.shape}, not {wanted}.")
        prefix = f"model.layers.{int(layer[1])}." if layer else ""
        names[tensor] = prefix + _parameter(known[part], kind)
    return names


def _parameter(module: str, kind: str) -> str:
    """Return the name of a parameter. Attention sinks belong to the attention itself, all other parameters to a
    module.
    """
    return module if module.endswith(".sinks") else f"{module}.{kind}"


def _weight_shapes(sizes: Sizes, architecture: Architecture) -> dict[str, tuple[int, ...]]:
    hidden, feed_forward = sizes.hidden, sizes.feed_forward
    gate_and_up = feed_forward if "ffn_gate" in architecture.modules else 2 * feed_forward
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    experts, expert, shared = sizes.experts, sizes.expert_feed_forward, sizes.shared_feed_forward
    return {
        "token_embd": (sizes.vocabulary, hidden),
        "output": (sizes.vocabulary, hidden),
        "output_norm": (hidden,),
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
        "post_attention_norm": (hidden,),
        "post_ffw_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_qkv": (queries + 2 * keys, hidden),
        "attn_output": (hidden, queries),
        "attn_q_norm": (sizes.head_dim,),
        "attn_k_norm": (sizes.head_dim,),
        "attn_sinks": (sizes.heads,),
        "ffn_gate": (feed_forward, hidden),
        "ffn_up": (gate_and_up, hidden),
        "ffn_down": (hidden, feed_forward),
        "ffn_gate_inp": (experts, hidden),
        "ffn_gate_exps": (experts, expert, hidden),
        "ffn_up_exps": (experts, expert, hidden),
        "ffn_down_exps": (experts, hidden, expert),
        "ffn_gate_inp_shexp": (hidden,),
        "ffn_gate_shexp": (shared, hidden),
        "ffn_up_shexp": (shared, hidden),
        "ffn_down_shexp": (hidden, shared),
    }


def _check_complete(header: GGUFHeader, description: Description) -> None:
    architecture, layers = description.architecture, description.sizes.layers
    stored = {int(found[1]) for name in header.tensors if (found := _LAYER_TENSOR.match(name))}
    if len(stored) != layers or max(stored) != layers - 1:
        raise ModelCorrupt(f"{header.path.name} says it has {layers} layers and holds tensors of {len(stored)}.")
    wanted = _needed_globals(architecture)
    wanted += [f"blk.{layer}.{part}" for layer in range(layers) for part in architecture.modules]
    missing = [part for part in wanted if f"{part}.weight" not in header.tensors]
    if missing:
        raise ModelCorrupt(f"{header.path.name} lacks {len(missing)} tensors, for example {missing[0]!r}.")


def _needed_globals(architecture: Architecture) -> list[str]:
    return ["token_embd", "output_norm", *(["output"] if architecture.head is Head.OWN else [])]
