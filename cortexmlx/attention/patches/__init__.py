"""Methods for classes of mlx-lm's models that need another one with a paged cache. Each computes what the original
does, from a handle instead of from arrays. With any other cache the original runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn

from cortexmlx.attention.patches import (
    afm7,
    baichuan_m1,
    dynamic_rope,
    gemma2,
    gpt_bigcode,
    latent,
    llama4,
    olmo,
    plamo,
    plamo2,
)
from cortexmlx.mlx_lm.modules import replace_method

Method = Callable[..., Any]

_LATENT = (
    ("deepseek_v3", "DeepseekV3Attention"),
    ("glm4_moe_lite", "Glm4MoeLiteAttention"),
    ("mistral4", "Mistral4Attention"),
    ("longcat_flash", "LongcatFlashMLA"),
    ("kimi_linear", "KimiMLAAttention"),
    ("kimi_k3", "KimiK3MLAAttention"),
    ("bailing_hybrid", "MultiLatentAttention"),
    ("bailing_moe_v3", "BailingMLA"),
)
"""The classes that keep latents."""

_METHODS: dict[tuple[str, str], Callable[[Method], Method]] = {
    ("afm7", "AFMModel"): afm7.body,
    ("baichuan_m1", "Attention"): baichuan_m1.attention,
    ("deepseek_v32", "Indexer"): latent.indexer,
    ("gemma2", "Attention"): gemma2.attention,
    ("gpt_bigcode", "GPTBigCodeModel"): gpt_bigcode.body,
    ("llama4", "Attention"): llama4.attention,
    ("llama4", "LlamaModel"): llama4.body,
    ("olmo", "TransformerBlock"): olmo.block,
    ("plamo", "Attention"): plamo.attention,
    ("plamo2", "Attention"): plamo2.attention,
    **dict.fromkeys(_LATENT, latent.attention),
    ("rope_utils", "DynamicNTKScalingRoPE"): dynamic_rope.rotation,
}
"""What replaces `__call__`, by module and class."""


def install(model: nn.Module) -> None:
    """Replace the methods of the model's classes that need it. Safe to call again."""
    used = {(type(m).__module__.rpartition(".")[2], type(m).__name__): type(m) for m in model.modules()}
    for name in used.keys() & _METHODS.keys():
        replace_method(used[name], "__call__", _METHODS[name])
