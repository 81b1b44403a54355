"""Tiny models whose heads are wide enough for groups of 32, and mlx-lm's answers with quantized keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from support.engine.judge import NOISE
from support.models.recurrent import RECURRENT
from support.models.tiny import CONFIGS, write_tiny

_WIDE: dict[str, Any] = {"head_dim": 32}
_TEXT = {name: {"text_config": CONFIGS[name]["text_config"] | _WIDE} for name in ("llama4", "gemma3n")}
_LATENT: dict[str, Any] = {"kv_lora_rank": 64, "qk_rope_head_dim": 32}
WIDER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(CONFIGS, _WIDE),
    **_TEXT,
    "deepseek_v2": {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32},
    "deepseek_v3": _LATENT,
    "gpt2": {"n_embd": 128},
    "gpt_bigcode": {"n_embd": 128},
    "plamo": {"hidden_size": 128},
    "mixtral": {"hidden_size": 128},
    "cohere2": {"hidden_size": 128, "head_dim": 32},
    "afm7": {"hidden_dim": 128},
    "qwen3": {"head_dim": 64},
    "qwen3_next": _WIDE,
    "falcon_h1": _WIDE,
}
"""What to change of a tiny configuration, by its name."""

_ROUNDING = 1e-6
"""How much rounding in float32 may have changed a number behind some layers, as a share of the largest beside it."""

SEEDS = 12

KINDS = tuple(name for name in WIDER if name in CONFIGS or name in RECURRENT)


def wide(root: Path, name: str) -> Path:
    """The folder of the model, under `root`."""
    path = root / name.replace(" ", "-")
    return path if path.exists() else write_tiny(path, name, **WIDER[name])


def rounding_caches(model: Any, bits: int, group: int, noise: int | None = None) -> list[Any]:
    """mlx-lm's own caches of a model, in which every key and value becomes what its codes stand for when it comes:
    windows, sinks and attention of a model's own are what they always are. With `noise`, a seed, the numbers are
    changed before by as much as float32's rounding changes them.
    """
    from mlx_lm.models.cache import make_prompt_cache

    from cortexmlx.attention.mlx_lm_hook import flatten_caches

    random = None if noise is None else np.random.default_rng(noise)

    def rounded(numbers: mx.array) -> mx.array:
        if random is not None:
            normal = mx.array(random.standard_normal(numbers.shape).astype(np.float32))
            numbers = numbers + _ROUNDING * mx.abs(numbers).max(axis=-1, keepdims=True) * normal
        return mx.dequantize(*mx.quantize(numbers, group, bits), group, bits)

    def rounding(plain: Any) -> Any:
        return lambda keys, values: plain(rounded(keys), rounded(values))

    made: list[Any] = make_prompt_cache(model)
    for leaf in flatten_caches(made):
        if hasattr(leaf, "update_and_fetch"):
            leaf.update_and_fetch = rounding(leaf.update_and_fetch)
    return made


def quantized_caches(model: Any, bits: int, group: int) -> list[Any]:
    """mlx-lm's QuantizedKVCache from the first token on, wherever a model has a cache of everything."""
    from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

    def quantizing(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(quantizing, cache.caches))
        return QuantizedKVCache(group, bits) if type(cache) is KVCache else cache

    return [quantizing(cache) for cache in make_prompt_cache(model)]


def greedy(model: Any, prompt: Sequence[int], max_tokens: int, caches: list[Any], ends: Sequence[int]) -> list[int]:
    """mlx-lm's greedy tokens on these caches, an end token included."""
    from mlx_lm.generate import generate_step

    found: list[int] = []
    for token, _ in generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens, prompt_cache=caches):
        found.append(int(token))
        if token in ends:
            break
    return found


def gap_of(
    model: Any, prompt: Sequence[int], mine: Sequence[int], theirs: Sequence[int], bits: int, group: int
) -> tuple[int, float] | None:
    """The first place where tokens differ, and how far mlx-lm's logit of the token in `mine` is from the best there
    beyond what rounding explains; None if the tokens are the same.

    A number on the border of two codes takes either, by its last bit, and a code more or less is a step and not a
    rounding error: behind some layers it has moved others over their borders. So mlx-lm is asked again with noise of
    rounding's size. What counts is how near the token comes to the best, less how far these answers lie apart.
    """
    for place, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            tokens = mx.array([[*prompt, *theirs[:place]]])
            gaps = []
            for noise in (None, *range(SEEDS)):
                logits = model(tokens, cache=rounding_caches(model, bits, group, noise))[0, -1].astype(mx.float32)
                gaps.append(float((logits.max() - logits[a]).item()))
            return place, max(0.0, min(gaps) - (max(gaps) - min(gaps)))
    return None if len(mine) == len(theirs) else (min(len(mine), len(theirs)), float("inf"))


def assert_rounded(model: Any, prompt: Sequence[int], mine: Sequence[int], count: int, bits: int, group: int) -> None:
    """mlx-lm's `count` tokens on rounding caches, or two that tie where they part."""
    theirs = greedy(model, prompt, count, rounding_caches(model, bits, group), ())
    gap = gap_of(model, prompt, mine, theirs, bits, group)
    assert gap is None or gap[1] < NOISE, f"prompt of {len(prompt)}: differs at {gap[0]} by {gap[1]}"


@cache
def loaded(path: Path) -> Any:
    """mlx-lm's own (model, tokenizer)."""
    import mlx_lm

    return mlx_lm.load(str(path))
