"""The configuration in a GGUF file's metadata: refused by name where not served, corrupt if it contradicts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models import load_model
from cortexmlx.models.gguf.config import describe
from cortexmlx.models.gguf.file import read_header
from support.gguf_models import metadata, refused, write_model
from support.gguf_writer import Uint32


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    refused(tmp_path, ModelUnsupported, "'mamba'", header=metadata("mamba"))


def test_experts_of_an_architecture_that_has_none_are_refused(tmp_path: Path) -> None:
    header = metadata("qwen2", qwen2__expert_count=Uint32(8))
    refused(tmp_path, ModelUnsupported, "experts", "qwen2", architecture="qwen2", header=header)


def test_unknown_rope_scaling_is_refused_by_name(tmp_path: Path) -> None:
    refused(
        tmp_path,
        ModelUnsupported,
        "'longrope'",
        header=metadata(llama__rope__scaling__type="longrope", llama__rope__scaling__factor=2.0),
    )


def test_an_unknown_setting_of_rope_scaling_is_refused_by_name(tmp_path: Path) -> None:
    header = metadata(llama__rope__scaling__type="yarn", llama__rope__scaling__yarn_log_multiplier=0.1)
    refused(tmp_path, ModelUnsupported, "yarn_log_multiplier", header=header)


def test_partial_rotation_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, ModelUnsupported, "part of each head", header=metadata(llama__rope__dimension_count=Uint32(8)))


@pytest.mark.parametrize("key", ["llama.block_count", "llama.context_length", "tokenizer.ggml.tokens"])
def test_missing_metadata_is_named(tmp_path: Path, key: str) -> None:
    refused(tmp_path, ModelCorrupt, header={k: v for k, v in metadata().items() if k != key})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.head_count", Uint32(0)),
        ("llama.attention.head_count", "four"),
        ("llama.attention.head_count_kv", Uint32(1)),
        ("llama.embedding_length", Uint32(128)),
        ("llama.feed_forward_length", Uint32(97)),
        ("llama.block_count", Uint32(3)),
        ("llama.block_count", Uint32(1)),
        ("llama.rope.freq_base", -1.0),
        ("tokenizer.ggml.eos_token_id", Uint32(100_000)),
        ("tokenizer.ggml.token_type", [1, 1]),
        ("tokenizer.ggml.merges", ["x y z", "no such"]),
        ("tokenizer.ggml.tokens", [1, 2]),
    ],
)
def test_metadata_that_contradicts_itself_is_corrupt(tmp_path: Path, key: str, value: Any) -> None:
    path = write_model(tmp_path / "tiny.gguf", header=metadata() | {key: value})
    with pytest.raises(ModelCorrupt) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_the_configuration_is_that_of_the_metadata_in_the_words_of_config_json(tmp_path: Path) -> None:
    header = metadata("qwen3", qwen3__rope__scaling__type="yarn", qwen3__rope__scaling__factor=4.0)
    header["qwen3.rope.scaling.original_context_length"] = Uint32(128)
    path = write_model(tmp_path / "tiny.gguf", "qwen3", header=header, tied=False)
    assert describe(read_header(path)).config == {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": pytest.approx(1e-5),
        "vocab_size": 263,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    }
