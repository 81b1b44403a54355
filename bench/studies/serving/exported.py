"""A model as a folder that mlx-lm reads: the same weights for another server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from cortexmlx.models import load_model


def export(model: str, folder: Path) -> Path:
    """Write a model of any form as config.json, model.safetensors and tokenizer.json into `folder`, and return it.
    Weights stay as they are, quantized or not. The tokenizer must be one of bytes (GPT-2's kind).
    """
    from tokenizers import Tokenizer, decoders

    loaded = load_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    config = {**loaded.config, **_quantization(loaded.model)}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(loaded.model.parameters())), metadata={"format": "mlx"}
    )
    core: Tokenizer = loaded.tokenizer._core
    core.decoder = decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": loaded.tokenizer.eos_token,
        "bos_token": loaded.tokenizer.bos_token,
        "chat_template": loaded.tokenizer.chat_template,
        "model_max_length": loaded.context_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def _quantization(model: Any) -> dict[str, Any]:
    """Return config.json's `quantization`, with each layer's own."""
    layers = {
        name: {"group_size": layer.group_size, "bits": layer.bits}
        for name, layer in model.named_modules()
        if hasattr(layer, "scales")
    }
    if not layers:
        return {}
    return {"quantization": {**next(iter(layers.values())), **layers}}
