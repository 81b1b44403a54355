"""Replacement methods for mlx-lm model classes that do not work with a paged cache as they are. Each computes what the
original does, from a handle instead of from arrays. With any other cache the original runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from cortexmlx.attention import latent
from cortexmlx.attention.mlx_lm_hook import LayerCache, attend
from cortexmlx.attention.paged import AttentionParams
from cortexmlx.mlx_lm.modules import replace_method

Method = Callable[..., Any]


def install_model_patches(model: nn.Module) -> None:
    """Replace those methods of a model's classes that do not work with a paged cache. Safe to call again."""
    classes = {(type(m).__module__.rpartition(".")[2], type(m).__name__): type(m) for m in model.modules()}
    for name in classes.keys() & _PATCHES.keys():
        replace_method(classes[name], "__call__", _PATCHES[name])


def _patch_afm7_body(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a replacement for `AFMModel.__call__` that uses the position of each token.

    AFM 7's last layers have only queries, which attend to the keys and values of the layer before them. The original
    takes their position from the length of those.
    """

    def patched_call(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        if not cache or not isinstance(cache[-1], LayerCache):
            return original(self, inputs, cache)
        hidden: mx.array = self.embedding(inputs)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, None, cache=layer_cache)
        for layer in self.kv_reuse_layers:
            hidden = hidden + _attend_reused_kv(layer.self_attn, layer.input_layernorm(hidden), cache[-1])
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed: mx.array = self.output_norm(hidden)
        return normed

    return patched_call


def _attend_reused_kv(module: Any, x: mx.array, cache: LayerCache) -> mx.array:
    """Return the output of AFM 7's `KVReuseAttention`, over the keys and values in `cache`."""
    queries = module.q_proj(x).reshape(x.shape[0], module.n_heads, 1, module.head_dim)
    queries = module.q_norm(module.rope(queries, offset=cache.offset))
    handle, _ = cache.keys_and_values()
    out = attend(queries, handle, AttentionParams(module.scale))
    projected: mx.array = module.out_proj(out.reshape(x.shape[0], 1, -1))
    return projected


def _patch_baichuan_m1_attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a replacement for Baichuan-M1's `Attention.__call__` with the paged cache.

    Baichuan M1 mixes each key and value with the one before it, and keeps the last ones as a state beside its cache.
    Its attention needs a whole step, so only the mixing is done by rows (`RecurrentCache.shift_by_token`).
    """

    def patched_call(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if cache is None or not isinstance(cache[1], LayerCache):
            return original(self, x, mask, cache)
        state, paged = cache
        tokens, dim = x.shape[0], self.head_dim
        split_points = (self.hidden_size, self.hidden_size + self.num_kv_heads * dim)
        queries, *new = (part.reshape(tokens, -1, 1, dim) for part in mx.split(self.W_pack(x), split_points, -1))
        keys, values = (
            state.shift_by_token(slot, each) * weights[0, 0, :, :, :1] + each * weights[0, 0, :, :, 1:]
            for slot, (each, weights) in enumerate(zip(new, (self.conv_k, self.conv_v), strict=True))
        )
        queries, keys = (self.rope(heads, offset=paged.offset) for heads in (queries, keys))
        handle, _ = paged.update_and_fetch(keys, values)
        out = attend(queries, handle, AttentionParams(self.scale))
        projected: mx.array = self.o_proj(out.reshape(tokens, 1, -1))
        return projected

    return patched_call


def _patch_gemma2_attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a replacement for Gemma 2's `Attention.__call__` with the paged cache.

    Gemma 2 computes soft-capped scores itself. Paged attention has the soft cap, so the layer calls that.
    """

    def patched_call(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, LayerCache):
            return original(self, x, mask, cache)
        tokens, dim = x.shape[0], self.head_dim
        queries = self.q_proj(x).reshape(tokens, self.n_heads, 1, dim)
        keys = self.k_proj(x).reshape(tokens, self.n_kv_heads, 1, dim)
        values = self.v_proj(x).reshape(tokens, self.n_kv_heads, 1, dim)
        queries, keys = (self.rope(heads, offset=cache.offset) for heads in (queries, keys))
        handle, _ = cache.update_and_fetch(keys, values)
        out = attend(queries, handle, AttentionParams(self.scale, softcap=self.attn_logit_softcapping))
        projected: mx.array = self.o_proj(out.reshape(tokens, 1, -1))
        return projected

    return patched_call


def _patch_gpt_bigcode_body(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a replacement for `GPTBigCodeModel.__call__` with the paged cache.

    GPTBigCode has one position for the whole batch. In a step, each row has its own.
    """

    def patched_call(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        if not cache or not isinstance(cache[0], LayerCache):
            return original(self, inputs, cache)
        hidden: mx.array = self.wte(inputs) + self.wpe(cache[0].offset)[:, None]
        for layer, layer_cache in zip(self.h, cache, strict=True):
            hidden = layer(hidden, None, cache=layer_cache)
        normed: mx.array = self.ln_f(hidden)
        return normed

    return patched_call


def _patch_llama4_body(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a replacement for Llama 4's `LlamaModel.__call__` without masks: the handles know which tokens a query
    sees.

    Llama 4 masks its chunks itself, from what mlx-lm's chunked cache still has. Where it does not rotate its
    queries, it scales them by their position, with one number for the whole batch.
    """

    def patched_call(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        if not cache or not isinstance(cache[0], LayerCache):
            return original(self, inputs, cache)
        hidden: mx.array = self.embed_tokens(inputs)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, None, cache=layer_cache)
        normed: mx.array = self.norm(hidden)
        return normed

    return patched_call


def _patch_llama4_attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a new Llama 4 `Attention.__call__`: a layer without rotation scales each query by its own position."""

    def patched_call(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, LayerCache) or self.use_rope or not self.attn_temperature_tuning:
            return original(self, x, mask, cache)
        tokens, dim = x.shape[0], self.head_dim
        queries = self.q_proj(x).reshape(tokens, self.n_heads, 1, dim)
        keys = self.k_proj(x).reshape(tokens, self.n_kv_heads, 1, dim)
        values = self.v_proj(x).reshape(tokens, self.n_kv_heads, 1, dim)
        scales = mx.log(mx.floor((cache.offset + 1) / self.floor_scale) + 1.0) * self.attn_scale + 1.0
        queries = (queries * scales[:, None, None, None]).astype(queries.dtype)
        handle, _ = cache.update_and_fetch(keys, values)
        out = attend(queries, handle, AttentionParams(self.scale))
        projected: mx.array = self.o_proj(out.reshape(tokens, 1, -1))
        return projected

    return patched_call


def _patch_olmo_block(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a replacement for OLMo's `TransformerBlock.__call__` with the paged cache.

    mlx-lm's OLMo adds the name of a mask to its scores and cannot compute a prompt. Here it calls paged attention.
    """

    def patched_call(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, LayerCache):
            return original(self, x, mask, cache)
        tokens = x.shape[0]
        parts = mx.split(self.att_proj(self.att_norm(x)), 3, axis=-1)
        queries, keys, values = (part.reshape(tokens, self.n_heads, 1, -1) for part in parts)
        queries, keys = (self.rope(heads, offset=cache.offset) for heads in (queries, keys))
        handle, _ = cache.update_and_fetch(keys, values)
        out = attend(queries, handle, AttentionParams(self.scale))
        hidden = x + self.attn_out(out.reshape(tokens, 1, -1))
        up, gate = mx.split(self.ff_proj(self.ff_norm(hidden)), 2, axis=-1)
        output: mx.array = hidden + self.ff_out(nn.silu(gate) * up)
        return output

    return patched_call


def _patch_plamo_attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a replacement for PLaMo's `Attention.__call__` that groups the query heads of each key head, instead of
    repeating keys.

    PLaMo repeats its key heads all in a row before it attends: query head h uses key head `h % key heads`.
    """

    def patched_call(
        self: Any, hidden_states: mx.array, attention_mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        if not isinstance(cache, LayerCache):
            return original(self, hidden_states, attention_mask, cache)
        tokens, shared, heads = hidden_states.shape[0], self.config.n_shared_head, self.k_num_heads
        queries = self.q_proj(hidden_states).reshape(tokens, shared * heads, 1, self.qk_dim)
        keys = self.k_proj(hidden_states).reshape(tokens, heads, 1, self.qk_dim)
        values = self.v_proj(hidden_states).reshape(tokens, heads, 1, self.v_dim)
        queries, keys = (self.rotary_emb(each, offset=cache.offset) for each in (queries, keys))
        handle, _ = cache.update_and_fetch(keys, values)
        grouped_queries = queries.reshape(tokens, shared, heads, -1).swapaxes(1, 2).reshape(queries.shape)
        out = attend(grouped_queries, handle, AttentionParams(self.scale))
        projected: mx.array = self.o_proj(out.reshape(tokens, heads, shared, -1).swapaxes(1, 2).reshape(tokens, 1, -1))
        return projected

    return patched_call


def _patch_plamo2_attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a replacement for PLaMo 2's `Attention.__call__` with the paged cache.

    PLaMo 2 calls MLX's attention directly, not mlx-lm's function for it.
    """

    def patched_call(self: Any, hidden_states: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, LayerCache):
            return original(self, hidden_states, mask, cache)
        tokens = hidden_states.shape[0]
        split_points = (self.q_proj_dim, self.q_proj_dim + self.k_proj_dim)
        heads = [
            part.reshape(tokens, -1, 1, self.qk_dim)
            for part in mx.split(self.qkv_proj(hidden_states), split_points, -1)
        ]
        weights = (self.q_weight, self.k_weight)
        queries, keys = (
            self.rope(mx.fast.rms_norm(part, None, 1e-6) * weight[:, None], offset=cache.offset)
            for part, weight in zip(heads[:2], weights, strict=True)
        )
        handle, _ = cache.update_and_fetch(keys, heads[2])
        out = attend(queries, handle, AttentionParams(self.scale))
        projected: mx.array = self.o_proj(out.reshape(tokens, 1, -1))
        return projected

    return patched_call


def _patch_dynamic_rope(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a replacement for `DynamicNTKScalingRoPE.__call__` with a position for each token.

    Dynamic NTK scaling (bloc97, 2023) raises the rotary base when a sequence is longer than the model's positions.
    The engine's context ends there (`models/folder_config.py`), so the base is always the plain one, and each row
    has its own offset.
    """

    def patched_call(self: Any, x: mx.array, offset: mx.array | int = 0) -> mx.array:
        if isinstance(offset, int):
            return original(self, x, offset)
        rotated: mx.array = mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=self.base, scale=1.0, offset=offset
        )
        return rotated

    return patched_call


_LATENT_CLASSES = (
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

_PATCHES: dict[tuple[str, str], Callable[[Method], Method]] = {
    ("afm7", "AFMModel"): _patch_afm7_body,
    ("baichuan_m1", "Attention"): _patch_baichuan_m1_attention,
    ("deepseek_v32", "Indexer"): latent.reject_indexer,
    ("gemma2", "Attention"): _patch_gemma2_attention,
    ("gpt_bigcode", "GPTBigCodeModel"): _patch_gpt_bigcode_body,
    ("llama4", "Attention"): _patch_llama4_attention,
    ("llama4", "LlamaModel"): _patch_llama4_body,
    ("olmo", "TransformerBlock"): _patch_olmo_block,
    ("plamo", "Attention"): _patch_plamo_attention,
    ("plamo2", "Attention"): _patch_plamo2_attention,
    **dict.fromkeys(_LATENT_CLASSES, latent.patch_latent_attention),
    ("rope_utils", "DynamicNTKScalingRoPE"): _patch_dynamic_rope,
}
"""What replaces `__call__`, by module and class."""
