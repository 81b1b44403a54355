"""Tiny models with random weights, written as folders in the layout of the model hub, so that tests go through the
real loader.

Their words mean nothing, but their greedy answers do not repeat themselves, so a wrong key or value shows at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 320
EOS = 257

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "eos_token_id": EOS,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": BASE | {"model_type": "llama"},
    "one layer": BASE | {"model_type": "llama", "num_hidden_layers": 1},
    "windowed llama": BASE
    | {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 11,
    },
    "qwen3": BASE | {"model_type": "qwen3", "tie_word_embeddings": False},
    "gemma3_text": BASE
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 8,
        "sliding_window": 9,
        "sliding_window_pattern": 3,
    },
    "gpt_oss": BASE
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": BASE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": BASE
    | {
        "model_type": "deepseek_v2",
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "mscale_all_dim": 1},
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
    },
    "deepseek_v3": BASE
    | {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 16,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "mscale_all_dim": 1},
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_ctx": 512,
        "n_positions": 512,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": 256,
        "eos_token_id": EOS,
    },
    "gemma2": BASE
    | {
        "model_type": "gemma2",
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 9.0,
    },
    "plamo": BASE | {"model_type": "plamo", "n_shared_head": 2},
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "vocab_size": VOCAB,
        "n_positions": 512,
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 2,
        "n_inner": 48,
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": EOS,
    },
    "dynamic rope": BASE | {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "nanbeige": BASE | {"model_type": "nanbeige", "num_loops": 2},
    "cohere2": BASE | {"model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 7, "layer_norm_eps": 1e-5},
    "llama4": {
        "model_type": "llama4",
        "eos_token_id": EOS,
        "text_config": BASE
        | {
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": 16,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "rope_scaling": None,
            "use_qk_norm": True,
            "floor_scale": 10,
            "attn_scale": 0.5,
        },
    },
    "gemma3n": {
        "model_type": "gemma3n",
        "eos_token_id": EOS,
        "text_config": BASE
        | {
            "model_type": "gemma3n",
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 9,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "rope_local_base_freq": 100.0,
            "final_logit_softcapping": 9.0,
            "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
            "altup_num_inputs": 2,
            "altup_coef_clip": 4.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        },
    },
    "afm7": {
        "model_type": "afm7",
        "vocab_size": VOCAB,
        "hidden_dim": 32,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim_scale_factor": 1.5,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "eos_token_id": EOS,
    },
}
"""One configuration per way of attending: full, windowed, both, with sinks, with values narrower than keys or lying in
them, with layers that run twice or attend to another's keys and values, in chunks, with a class of its own for
attention or positions. Those with recurrent layers are in `recurrent`.
"""


def write_tiny(folder: Path, name: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write the model `CONFIGS[name]` or `RECURRENT[name]` with random weights to `folder`; `changes` override its
    configuration.
    """
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    from support.models.recurrent import RECURRENT

    config = (CONFIGS | RECURRENT)[name] | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    rng = np.random.default_rng(seed)
    weights = {key: _weight(rng, key, value) for key, value in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_tokenizer(folder)
    return folder


def quantize_in_place(folder: Path, group: int = 32, bits: int = 4, mode: str = "affine") -> Path:
    """The model in a folder gets packed weights, as mlx-lm quantizes and saves them."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = quantize_model(*load_model(folder), group, bits, mode=mode)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


def _weight(rng: Any, name: str, initial: Any) -> Any:
    import mlx.core as mx

    if not mx.issubdtype(initial.dtype, mx.floating):
        return mx.array(rng.integers(0, 256, initial.shape)).astype(initial.dtype)
    values, shape = rng.standard_normal(initial.shape), initial.shape
    if "wte" in name:
        values *= 0.1
    elif name.endswith("norm.weight") or "layernorm" in name or "ln_" in name:
        values = 1 + 0.2 * values
    elif name.endswith(("conv_k", "conv_v")):  # larger ones make rounding a hundred times what it is elsewhere
        values *= shape[-1] ** -0.5
    elif len(shape) > 1 and ("embed" not in name or "embed_q" in name or "unembed_out" in name):
        values *= 2.5 / shape[-1] ** 0.5
    return mx.array(values.astype("float32"))


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: token i is byte i, then <s>, </s> and a few merges; with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab |= {"<s>": 256, "</s>": EOS}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("a", "n"), ("an", "d"), ("Ã", "©")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    while len(vocab) < VOCAB:
        vocab[f"<unused{len(vocab)}>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for m in messages %}{% if not m['role'] %}{{ raise_exception('no role') }}{% endif %}"
        "<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def tokens_of(count: int, seed: int = 0) -> list[int]:
    """`count` random token ids that are ordinary bytes."""
    import numpy as np

    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, count)]
