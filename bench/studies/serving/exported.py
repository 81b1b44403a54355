"""Exports a model as a folder that mlx-lm reads, so that two servers have the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from cortexmlx.models import load_model


def export_model(model: str, folder: Path) -> Path:
    """Write a model of any form as config.json, model.safetensors and tokenizer.json into `folder`, and return it.
    Weights become float32: on CPUs, MLX multiplies quantized ones so slowly that nothing else would be measured.
    The tokenizer must be one of bytes (GPT-2's kind).
    """
    from tokenizers import Tokenizer, decoders

    loaded = load_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in loaded.config.items() if not name.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"), _dequantized_weights(loaded.model), metadata={"format": "mlx"}
    )
    core: Tokenizer = loaded.tokenizer._core
    core.decoder = decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": loaded.tokenizer.eos_token,
        "bos_token": loaded.tokenizer.bos_token,
        "chat_template": loaded.tokenizer.chat_template,
        "model_max_length": loaded.context_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def _dequantized_weights(model: Any) -> dict[str, mx.array]:
    """Return the weights as float32, those of quantized layers dequantized."""
    weights = dict(tree_flatten(model.parameters()))
    for name, layer in model.named_modules():
        if hasattr(layer, "scales"):
            codes, scales, biases = (weights.pop(f"{name}.{part}", None) for part in ("weight", "scales", "biases"))
            dequantized = mx.dequantize(codes, scales, biases, group_size=layer.group_size, bits=layer.bits)
            weights[f"{name}.weight"] = dequantized
    return {name: weight.astype(mx.float32) for name, weight in weights.items()}
