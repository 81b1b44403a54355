"""The model configuration that a GGUF file's metadata describes, with the names of config.json.

Only what is known to give the same logits is accepted. An unknown architecture, setting, rope or head layout is refused
by name. Nothing runs approximately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models.gguf.file import GGUFHeader, GGUFMetadata
from cortexmlx.models.gguf.tensors import read_float32_tensor

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

_SERVED_KEYS = frozenset(
    (
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.scale",
        "attention.sliding_window",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "expert_used_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "tensor_data_layout",
        "vocab_size",
    )
)
"""The metadata of an architecture that is read here, or that has no effect on what the model computes."""

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attn_logit_softcapping": (0.0,),
    "expert_count": (0,),
    "expert_gating_func": (0, 1, 4),  # not stated, softmax, softmax of the chosen
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.attn_factor": (1.0,),
}
"""Values that change nothing, by key."""

_ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
"""Matrices that every file stores in float32, whatever the model's type."""

_27_BILLION = {"gemma2": 46, "gemma3": 62}
"""The number of layers of Gemma's 27B size, by architecture. Only this size scales its scores by hidden size / heads
instead of the head dimension. The files do not state the scale.
"""


@dataclass(frozen=True)
class ModelDimensions:
    """The numbers that determine the shapes of a model's tensors: layers, heads, widths, experts."""

    hidden: int
    layers: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int
    expert_feed_forward: int
    shared_feed_forward: int


@dataclass(frozen=True)
class ModelDescription:
    """What a GGUF header says of its model: architecture, dimensions, the equivalent of config.json, and notes."""

    architecture: Architecture
    sizes: ModelDimensions
    config: dict[str, Any]
    """The equivalent of config.json."""
    notes: tuple[str, ...]
    """Lines for the user."""


def describe_model(header: GGUFHeader) -> ModelDescription:
    """Return the description from which mlx-lm's model of a GGUF file is built.

    Raises ModelUnsupported for architectures and variants that are not served, and ModelCorrupt for missing metadata.
    """
    meta = GGUFMetadata(header)
    architecture = _find_architecture(meta)
    _check_metadata_keys(meta, architecture)
    sizes = _read_dimensions(meta, architecture)
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.feed_forward,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": meta.arch_number("attention.layer_norm_rms_epsilon"),
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": meta.arch_integer("context_length"),
        "rope_theta": meta.arch_number("rope.freq_base", 10000.0),
        "tie_word_embeddings": architecture.head is OutputHead.TIED or "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }
    scaling = _read_rope_scaling(meta, architecture)
    if scaling is not None:
        config["rope_scaling"] = scaling
    config |= _architecture_settings(meta, architecture, sizes)
    _check_attention_scale(meta, config)
    return ModelDescription(architecture, sizes, config, _limit_to_window(meta, architecture, config))


def activation_type(header: GGUFHeader, description: ModelDescription) -> str:
    """Return the name of the MLX type for activations and for all numbers that are not packed, such as "bfloat16".

    It is the type of the matrices, or float32 where that would lose bits. For packed matrices it is float16, or
    bfloat16 if activations exceed float16's largest number.
    """
    matrices = (
        info
        for name, info in header.tensors.items()
        if len(info.shape) > 1 and name.endswith(".weight") and not name.endswith(_ROUTERS)
    )
    kinds = {info.type_name for info in matrices}
    wide_range = description.architecture.wide_range
    if "F32" in kinds or ("F16" in kinds and ("BF16" in kinds or wide_range)):
        return "float32"
    return "bfloat16" if "BF16" in kinds or wide_range else "float16"


def _find_architecture(meta: GGUFMetadata) -> Architecture:
    """Return the architecture that the metadata names. Raises ModelUnsupported if it is not served."""
    name = meta.architecture
    if name not in ARCHITECTURES:
        known_names = ", ".join(ARCHITECTURES)
        raise ModelUnsupported(
            f"{meta.file} has the architecture {name!r}; GGUF files of {known_names} are served. "
            "Use the model's original folder or hub id instead."
        )
    experts = meta.integer(f"{name}.expert_count", 0)
    architecture = MIXTRAL if name == "llama" and experts else ARCHITECTURES[name]
    if experts and not architecture.has_experts:
        raise ModelUnsupported(f"{meta.file} is a mixture of experts, which {name} models are not here.")
    return architecture


def _check_metadata_keys(meta: GGUFMetadata, architecture: Architecture) -> None:
    """Raise ModelUnsupported for a metadata key that may change the model's result and is not served."""
    known_keys = _SERVED_KEYS | architecture.keys
    for full_key, value in meta.header.metadata.items():
        key = full_key.removeprefix(f"{meta.architecture}.")
        if key == full_key or key in known_keys or value in _WITHOUT_EFFECT.get(key, ()):
            continue
        value_text = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
        raise ModelUnsupported(f"{meta.file} sets {full_key!r} to {value_text}, which is not served here.")
    for key in architecture.keys & {"expert_gating_func", "expert_weights_scale"}:
        value = meta.header.metadata.get(f"{meta.architecture}.{key}")
        if value is not None and value not in _WITHOUT_EFFECT[key]:
            raise ModelUnsupported(f"{meta.file} sets {key!r} to {value!r}, which is not served here.")


def _read_dimensions(meta: GGUFMetadata, architecture: Architecture) -> ModelDimensions:
    """Read the model's dimensions from the metadata and the shapes of tensors, and check that they fit together."""
    heads = meta.arch_integer("attention.head_count")
    kv_heads = meta.arch_integer("attention.head_count_kv", heads)
    hidden = meta.arch_integer("embedding_length")
    if heads > hidden:
        raise ModelCorrupt(f"{meta.file} claims {heads} heads for {hidden} values.")
    head_dim = meta.arch_integer("attention.key_length", hidden // heads)
    if meta.arch_integer("attention.value_length", head_dim) != head_dim:
        raise ModelUnsupported(f"{meta.file} has values of another size than its keys, which is not served here.")
    if head_dim % 2 or heads % kv_heads:
        raise ModelCorrupt(f"{meta.file} claims {heads} heads of {head_dim} values for {kv_heads} key heads.")
    rotated_dims = meta.arch_integer("rope.dimension_count", head_dim)
    if rotated_dims != head_dim and not (
        architecture.model_type == "phi3" and rotated_dims < head_dim and rotated_dims % 2 == 0
    ):
        raise ModelUnsupported(f"{meta.file} rotates a part of each head only, which is not served here.")
    if architecture.model_type in ("qwen2", "qwen2_moe", "mixtral", "phi3") and head_dim * heads != hidden:
        raise ModelUnsupported(
            f"{meta.file}: {meta.architecture} with {heads} heads of {head_dim} values on {hidden} is not served here."
        )
    feed_forward = meta.arch_integer("feed_forward_length", None if not architecture.has_experts else 1)
    return ModelDimensions(
        hidden=hidden,
        layers=meta.arch_integer("block_count"),
        feed_forward=feed_forward,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=_count_rows(meta, "token_embd.weight", 2),
        experts=meta.arch_integer("expert_count") if architecture.has_experts else 0,
        expert_feed_forward=_count_rows(meta, "blk.0.ffn_gate_exps.weight", 3) if architecture.has_experts else 0,
        shared_feed_forward=_count_rows(meta, "blk.0.ffn_gate_shexp.weight", 2)
        if "ffn_gate_shexp" in architecture.modules
        else 0,
    )


def _count_rows(meta: GGUFMetadata, tensor: str, dims: int) -> int:
    """Return a tensor's number of rows. Raises ModelCorrupt unless it has `dims` dimensions."""
    info = meta.header.tensors.get(tensor)
    if info is None or len(info.shape) != dims:
        raise ModelCorrupt(f"{meta.file} has no tensor {tensor!r} of {dims} dimensions. Download the file again.")
    return info.shape[-2]


def _architecture_settings(meta: GGUFMetadata, architecture: Architecture, sizes: ModelDimensions) -> dict[str, Any]:
    """Return the settings of config.json that only this architecture has."""
    kind = architecture.model_type
    settings: dict[str, Any] = {}
    if architecture.has_experts:
        used_experts = meta.arch_integer("expert_used_count")
        if used_experts > sizes.experts:
            raise ModelCorrupt(f"{meta.file} uses {used_experts} of {sizes.experts} experts.")
        experts = "num_local_experts" if kind in ("mixtral", "gpt_oss") else "num_experts"
        settings |= {experts: sizes.experts, "num_experts_per_tok": used_experts}
        moe = "intermediate_size" if kind in ("mixtral", "gpt_oss") else "moe_intermediate_size"
        settings[moe] = sizes.expert_feed_forward
    if kind == "qwen2_moe":
        settings["shared_expert_intermediate_size"] = sizes.shared_feed_forward
    if kind == "qwen3_moe":
        settings |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    if kind in ("gemma2", "gemma3_text"):
        by_width = sizes.layers == _27_BILLION[meta.architecture]
        settings["query_pre_attn_scalar"] = sizes.hidden // sizes.heads if by_width else sizes.head_dim
    if kind == "gemma2":
        for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            settings[key] = meta.arch_number(key, default)
    if kind == "gemma3_text":
        pattern = meta.arch_integer("attention.sliding_window_pattern", 6)
        if pattern > sizes.layers:
            raise ModelUnsupported(f"{meta.file} has {sizes.layers} layers, none of which sees the whole text.")
        settings |= {
            "sliding_window": meta.arch_integer("attention.sliding_window"),
            "sliding_window_pattern": pattern,
            "rope_local_base_freq": meta.arch_number("rope.freq_base_swa", 10000.0),
        }
    if kind == "gpt_oss":
        if sizes.layers % 2:
            raise ModelUnsupported(f"{meta.file} has {sizes.layers} layers, of which every second one has a window.")
        settings["sliding_window"] = meta.arch_integer("attention.sliding_window")
    if kind == "phi3":
        settings["partial_rotary_factor"] = meta.arch_integer("rope.dimension_count", sizes.head_dim) / sizes.head_dim
        original = meta.arch_integer("rope.scaling.original_context_length", meta.arch_integer("context_length"))
        settings["original_max_position_embeddings"] = original
    return settings


def _limit_to_window(meta: GGUFMetadata, architecture: Architecture, config: dict[str, Any]) -> tuple[str, ...]:
    """If mlx-lm's class lacks the sliding window, limit the context in `config` to the window, and return a note."""
    window = meta.integer(
        f"{meta.architecture}.attention.sliding_window", 4096 if config["model_type"] == "gemma2" else 0
    )
    context = config["max_position_embeddings"]
    if "sliding_window" in config or not window or window >= context:
        return ()
    if config["model_type"] not in ("gemma2", "phi3") or "rope_scaling" in config:
        raise ModelUnsupported(f"{meta.file} has a sliding window of {window} tokens, which is not served here.")
    config["max_position_embeddings"] = window
    return (f"mlx-lm's class has no sliding window: contexts end at {window} tokens, where it would begin",)


def _check_attention_scale(meta: GGUFMetadata, config: dict[str, Any]) -> None:
    """Raise ModelUnsupported if the file's attention scale is not the one that mlx-lm's class uses."""
    expected_scale = config.get("query_pre_attn_scalar", config["head_dim"]) ** -0.5
    stated_scale = meta.arch_number("attention.scale", expected_scale)
    if not math.isclose(stated_scale, expected_scale, rel_tol=1e-5):
        raise ModelUnsupported(
            f"{meta.file} scales its scores by {stated_scale:g} and not {expected_scale:g}, which is not served here."
        )


def _read_rope_scaling(meta: GGUFMetadata, architecture: Architecture) -> dict[str, Any] | None:
    """Return the `rope_scaling` of config.json; None if the file has none."""
    prefix = f"{meta.architecture}.rope.scaling."
    tensors = meta.header.tensors
    kind = meta.text(f"{prefix}type", "linear" if meta.arch_has("rope.scaling.factor") else "none")
    if LONG_FACTORS in tensors or SHORT_FACTORS in tensors:
        kind = "longrope"
    if kind == "none":
        return None
    if kind not in architecture.scalings:
        raise ModelUnsupported(f"{meta.file} uses the rope scaling {kind!r}, which is not served here.")
    if ROPE_FACTORS in tensors:
        raise ModelUnsupported(f"{meta.file} has both a rope scaling and {ROPE_FACTORS!r}, which is not served here.")
    if kind == "longrope":
        return _read_long_rope(meta)
    factor = meta.arch_number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = meta.arch_integer("rope.scaling.original_context_length")
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key in ("beta_fast", "beta_slow"):
        if meta.arch_has(f"rope.scaling.yarn_{key}"):
            scaling[key] = meta.arch_number(f"rope.scaling.yarn_{key}")
    return scaling


def _read_long_rope(meta: GGUFMetadata) -> dict[str, Any]:
    """Return the "longrope" scaling, with two tensors' factors. mlx-lm's class uses the long ones at every length."""
    factors = {}
    dims = meta.arch_integer("rope.dimension_count")
    for name, tensor in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
        info = meta.header.tensors.get(tensor)
        if info is None or info.shape != (dims // 2,) or info.type_name != "F32":
            raise ModelCorrupt(f"{meta.file} has no tensor {tensor!r} of {dims // 2} factors. Download the file again.")
        factors[name] = read_float32_tensor(info)
    context, original = (meta.arch_integer(k) for k in ("context_length", "rope.scaling.original_context_length"))
    if original == 1:
        raise ModelCorrupt(f"{meta.file} says that it was trained on texts of one token. Download the file again.")
    expected_factor = math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0
    stated_factor = meta.arch_number("rope.scaling.attn_factor", 1.0)
    if not math.isclose(stated_factor, expected_factor, rel_tol=1e-4):
        raise ModelUnsupported(
            f"{meta.file} scales rotated vectors by {stated_factor:g} and not {expected_factor:g}, not served here."
        )
    return {"type": "longrope", **factors}


# The supported GGUF architectures: mlx-lm's class for each, and the file's names for its parts.


class OutputHead(Enum):
    """Where the output projection is: in the embedding, in its own tensor, or in either, depending on the file."""

    TIED = "tied"
    OWN = "own"
    EITHER = "either"


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture that is served: mlx-lm's model type, its tensors, and the metadata that it may have."""

    model_type: str
    """The name of mlx-lm's class."""
    modules: Mapping[str, str]
    """The module within a layer for each tensor of a layer, `blk.N.KEY`."""
    keys: frozenset[str] = frozenset()
    """The metadata keys that other architectures do not have."""
    scalings: frozenset[str] = frozenset()
    """The rope scalings that mlx-lm's class applies."""
    head: OutputHead = OutputHead.EITHER
    is_interleaved: bool = False
    """Whether the rows of queries and keys are stored for a rotation of neighbouring pairs."""
    norm_offset: float = 0.0
    """What the file adds to the weight of every norm."""
    wide_range: bool = False
    """Whether activations exceed float16's largest number. Then bfloat16 replaces it."""

    @property
    def has_experts(self) -> bool:
        """Whether its layers are mixtures of experts."""
        return "ffn_gate_inp" in self.modules


_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def _expert_modules(router: str, experts: str) -> dict[str, str]:
    """Return the modules of a mixture of experts by GGUF's tensor names."""
    return {
        "ffn_gate_inp": router,
        "ffn_gate_exps": f"{experts}.gate_proj",
        "ffn_up_exps": f"{experts}.up_proj",
        "ffn_down_exps": f"{experts}.down_proj",
    }


_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_LLAMA = _NORMS | _ATTENTION | _FEED_FORWARD
_EXPERT_KEYS = frozenset(("expert_feed_forward_length", "expert_gating_func", "expert_weights_scale"))
_PLAIN_SCALINGS = frozenset(("linear", "yarn"))

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _LLAMA, scalings=_PLAIN_SCALINGS, is_interleaved=True),
    "qwen2": Architecture("qwen2", _LLAMA, scalings=_PLAIN_SCALINGS),
    "qwen3": Architecture("qwen3", _LLAMA | _HEAD_NORMS, scalings=_PLAIN_SCALINGS),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _NORMS | _ATTENTION | _expert_modules("mlp.gate", "mlp.switch_mlp") | _SHARED_EXPERT,
        keys=_EXPERT_KEYS | {"expert_shared_feed_forward_length"},
        head=OutputHead.OWN,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _NORMS | _ATTENTION | _HEAD_NORMS | _expert_modules("mlp.gate", "mlp.switch_mlp"),
        keys=_EXPERT_KEYS,
    ),
    "gemma2": Architecture(
        "gemma2",
        _GEMMA_NORMS | _ATTENTION | _FEED_FORWARD,
        keys=frozenset(("attn_logit_softcapping", "final_logit_softcapping")),
        head=OutputHead.TIED,
        norm_offset=1.0,
        wide_range=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _GEMMA_NORMS | _ATTENTION | _HEAD_NORMS | _FEED_FORWARD,
        keys=frozenset(("attention.sliding_window_pattern", "rope.freq_base_swa")),
        scalings=frozenset(("linear",)),
        norm_offset=1.0,
        wide_range=True,
    ),
    "phi3": Architecture(
        "phi3",
        _NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        keys=frozenset(("rope.scaling.attn_factor",)),
        scalings=frozenset(("longrope",)),
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
        }
        | _ATTENTION
        | _expert_modules("mlp.router", "mlp.experts"),
        keys=_EXPERT_KEYS,
        scalings=frozenset(("yarn",)),
        head=OutputHead.OWN,
        wide_range=True,
    ),
}
"""The architectures by their name in `general.architecture`. Mistral's models are named llama there."""

MIXTRAL = Architecture(
    "mixtral",
    _NORMS | _ATTENTION | _expert_modules("block_sparse_moe.gate", "block_sparse_moe.switch_mlp"),
    keys=_EXPERT_KEYS,
    is_interleaved=True,
)
"""The architecture of a `llama` file with experts."""
