"""A small model with random weights, for machines without a model: the figures show the engine's own cost. The default
is a llama.
"""

from __future__ import annotations

import json
from pathlib import Path

NAME = "random-llama-8M"

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 4_096,
    "max_position_embeddings": 32_768,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}


def write_random_model(folder: Path, config: dict[str, object] | None = None) -> Path:
    """Write a model folder (float32, byte-level tokenizer), return its path. `config` replaces entries of `CONFIG`."""
    from cortexmlx.cpu import blas

    blas.preload()
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    settings = {**CONFIG, **(config or {})}
    path = folder / NAME
    path.mkdir(parents=True)
    mx.random.seed(0)
    model_class, args_class = _get_classes(settings)
    model = model_class(args_class.from_dict(settings))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps(settings))
    _write_tokenizer(path)
    return path


def _write_tokenizer(path: Path) -> None:
    """Write a byte-level tokenizer.json."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({symbol: i for i, symbol in enumerate([*alphabet, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=template)
    fast.save_pretrained(path)
