"""The supported GGUF architectures: mlx-lm's class for each, and the file's names for its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Head(Enum):
    """Where the output projection comes from: the embedding, a tensor of its own, or either of them, depending on the
    file.
    """

    TIED = "tied"
    OWN = "own"
    EITHER = "either"


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture."""

    model_type: str
    """The name of mlx-lm's class."""
    modules: Mapping[str, str]
    """The module within a layer for each tensor of a layer, `blk.N.KEY`."""
    keys: frozenset[str] = frozenset()
    """The metadata keys that other architectures do not have."""
    scalings: frozenset[str] = frozenset()
    """The rope scalings that mlx-lm's class applies."""
    head: Head = Head.EITHER
    interleaved: bool = False
    """Whether the rows of queries and keys are stored for a rotation of neighbouring pairs."""
    norm_offset: float = 0.0
    """What the file adds to the weight of every norm."""
    wide_range: bool = False
    """Whether activations exceed float16's largest number. Then bfloat16 replaces it."""

    @property
    def has_experts(self) -> bool:
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


def _experts(router: str, experts: str) -> dict[str, str]:
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
    "llama": Architecture("llama", _LLAMA, scalings=_PLAIN_SCALINGS, interleaved=True),
    "qwen2": Architecture("qwen2", _LLAMA, scalings=_PLAIN_SCALINGS),
    "qwen3": Architecture("qwen3", _LLAMA | _HEAD_NORMS, scalings=_PLAIN_SCALINGS),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _NORMS | _ATTENTION | _experts("mlp.gate", "mlp.switch_mlp") | _SHARED_EXPERT,
        keys=_EXPERT_KEYS | {"expert_shared_feed_forward_length"},
        head=Head.OWN,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _NORMS | _ATTENTION | _HEAD_NORMS | _experts("mlp.gate", "mlp.switch_mlp"),
        keys=_EXPERT_KEYS,
    ),
    "gemma2": Architecture(
        "gemma2",
        _GEMMA_NORMS | _ATTENTION | _FEED_FORWARD,
        keys=frozenset(("attn_logit_softcapping", "final_logit_softcapping")),
        head=Head.TIED,
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
        | _experts("mlp.router", "mlp.experts"),
        keys=_EXPERT_KEYS,
        scalings=frozenset(("yarn",)),
        head=Head.OWN,
        wide_range=True,
    ),
}
"""The architectures by their name in `general.architecture`. Mistral's models are named llama there."""

MIXTRAL = Architecture(
    "mixtral",
    _NORMS | _ATTENTION | _experts("block_sparse_moe.gate", "block_sparse_moe.switch_mlp"),
    keys=_EXPERT_KEYS,
    interleaved=True,
)
"""The architecture of a `llama` file with experts."""
