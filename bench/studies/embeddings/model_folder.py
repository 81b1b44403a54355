"""The starter model as a folder with the files of an embedding model, for measuring. Its vectors mean little."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from cortexmlx.models import load_model
from cortexmlx.models.gguf.file import Metadata, read_header

POOLING = {"word_embedding_dimension": 0, "pooling_mode_lasttoken": True, "include_prompt": True}
MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]


def write_model(folder: Path, prompts: dict[str, str]) -> Path:
    """Write the starter model in float32, with last-token pooling and these prompts, and return its folder."""
    loaded = load_model("smollm2", dequantize=True)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", loaded.config)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(loaded.model.parameters())))
    _write_tokenizer(folder, Metadata(read_header(loaded.path)))
    modules = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{k}"} for i, (path, k) in enumerate(MODULES)
    ]
    _write(folder / "modules.json", modules)
    _write(folder / "1_Pooling" / "config.json", POOLING | {"word_embedding_dimension": loaded.config["hidden_size"]})
    _write(folder / "config_sentence_transformers.json", {"prompts": prompts})
    return folder


def _write_tokenizer(folder: Path, meta: Metadata) -> None:
    """Write a byte-level tokenizer with the vocabulary of a GGUF file, and an end token after each text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens: list[str] = meta.items("tokenizer.ggml.tokens", str)
    merges = [tuple(merge.split(" ")) for merge in meta.items("tokenizer.ggml.merges", str)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = tokens[0]
    tokenizer.add_special_tokens([AddedToken(end, special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end})


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
