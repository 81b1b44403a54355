"""Model folders in the hub's layout with a tiny random llama and a byte-level tokenizer."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from cortexmlx.errors import CortexError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": 7,
}


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<end>"])
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"})
    )


def write_zeros(file: Path, size: int) -> None:
    """A file in the format of safetensors of `size` bytes, header and all, that holds a tensor of zeros."""
    zeros = size - 8 - 100
    header = json.dumps({"zeros": {"dtype": "U8", "shape": [zeros], "data_offsets": [0, zeros]}}).ljust(100)
    file.write_bytes(struct.pack("<Q", 100) + header.encode() + bytes(zeros))


def write_folder(folder: Path, quantize: bool = False, dtype: str = "float32", **changes: Any) -> Path:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama

    config = CONFIG | changes
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    model.set_dtype(getattr(mx, dtype))
    if quantize:
        config["quantization"] = {"group_size": 32, "bits": 4}
        nn.quantize(model, group_size=32, bits=4)
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def fails(folder: Path, error: type[CortexError], *words: str) -> None:
    """Loading `folder` ends in `error`, one line with `words` in it."""
    import pytest

    from cortexmlx.models import load_model

    with pytest.raises(error) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def cached_model(cache: Path, repo: str, complete: bool = True) -> Path:
    """The snapshot of `repo` in the hub library's layout below `cache`; without weights if not `complete`."""
    import mlx.core as mx

    base = cache / f"models--{repo.replace('/', '--')}"
    commit = "0" * 40
    snapshot = base / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    if complete:
        mx.save_safetensors(str(snapshot / "model.safetensors"), {"w": mx.zeros((2, 2))})
    return snapshot


def logits(model: Any) -> np.ndarray:
    """A model's logits of some tokens, in float32."""
    import mlx.core as mx

    return np.array(model(mx.array([[5, 250, 17, 99, 3, 140]])).astype(mx.float32))[0]
