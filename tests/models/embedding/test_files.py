"""What sentence-transformers' files say, in older and newer spellings; and files that say something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.errors import EmbeddingRefused, ModelCorrupt
from cortexmlx.models.embedding import (
    Dense,
    EmbeddingSettings,
    LogitScore,
    Normalize,
    read_embedding_settings,
    read_logit_score,
    read_modules,
)
from support.embedding.models import INSTRUCTION, POOLING_FLAGS, write_embedding, write_json, write_modules


def read(folder: Path) -> EmbeddingSettings:
    return read_embedding_settings("a model", folder, json.loads((folder / "config.json").read_text()))


def test_the_files_of_qwen3_embedding_are_read(tmp_path: Path) -> None:
    files = read(write_embedding(tmp_path))
    assert (files.pooling, files.include_prompt, files.width) == ("lasttoken", True, 32)
    assert files.layers == (Normalize(),) and files.normalized and files.max_tokens is None
    assert files.prompts == {"query": INSTRUCTION, "document": ""} and files.default_prompt is None
    info = files.to_info(500)
    assert (info.dimensions, info.max_tokens, info.pooling, info.normalized) == (32, 500, "lasttoken", True)


@pytest.mark.parametrize("pooling", sorted(POOLING_FLAGS.keys() - {"max"}))
@pytest.mark.parametrize("newer", [True, False])
def test_every_pooling_is_read_in_both_spellings(tmp_path: Path, pooling: str, newer: bool) -> None:
    write_embedding(tmp_path, pooling=pooling)
    if newer:
        said = {"embedding_dimension": 32, "pooling_mode": pooling, "include_prompt": False}
        write_json(tmp_path / "1_Pooling" / "config.json", said)
        modules = json.loads((tmp_path / "modules.json").read_text())
        modules[0]["type"] = "sentence_transformers.base.modules.transformer.Transformer"
        modules[1]["type"] = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
        write_json(tmp_path / "modules.json", modules)
    files = read(tmp_path)
    assert files.pooling == pooling and files.include_prompt is not newer


def test_dense_layers_and_their_width(tmp_path: Path) -> None:
    files = read(write_embedding(tmp_path, dense=(48, 20), normalize=False))
    assert [type(layer) for layer in files.layers] == [Dense, Dense] and not files.normalized
    assert files.to_info(10).dimensions == 20 and files.to_info(10).max_tokens == 10


def test_the_length_that_is_stated_bounds_texts(tmp_path: Path) -> None:
    assert read(write_embedding(tmp_path / "a", max_seq_length=77)).to_info(500).max_tokens == 77
    assert read(write_embedding(tmp_path / "b", max_seq_length=777)).to_info(500).max_tokens == 500
    folder = write_embedding(tmp_path / "c")
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    for stated, read_as in ((60, 60), (1e30, None), (131072, 131072)):
        write_json(folder / "tokenizer_config.json", tokenizer | {"model_max_length": stated})
        assert read(folder).max_tokens == read_as


def test_a_window_that_the_model_class_leaves_out_bounds_texts(tmp_path: Path) -> None:
    """transformers' Mistral sees a window of a longer text, and mlx-lm's all of it: the vectors would differ."""
    mistral = {"model_type": "mistral", "architectures": ["MistralModel"], "sliding_window": 40}
    for own, longest in ((None, 40), (30, 30), (90, 40)):
        assert read(write_embedding(tmp_path / str(own), "llama", max_seq_length=own, **mistral)).max_tokens == longest
    assert read(write_embedding(tmp_path / "qwen", sliding_window=40)).max_tokens is None


def test_lower_case_and_default_prompt(tmp_path: Path) -> None:
    files = read(write_embedding(tmp_path, lowercase=True, default_prompt="query"))
    assert files.lowercase and files.default_prompt == "query"


def test_without_a_file_of_prompts_there_are_none(tmp_path: Path) -> None:
    write_embedding(tmp_path)
    (tmp_path / "config_sentence_transformers.json").unlink()
    assert read(tmp_path).prompts == {}


@pytest.mark.parametrize(
    ("file", "content", "error", "why"),
    [
        ("1_Pooling/config.json", {"word_embedding_dimension": 32}, EmbeddingRefused, "asks for no pooling"),
        (
            "1_Pooling/config.json",
            {"word_embedding_dimension": 32, "pooling_mode_max_tokens": True},
            EmbeddingRefused,
            "asks for max, and this version computes one of lasttoken",
        ),
        (
            "1_Pooling/config.json",
            {"embedding_dimension": 32, "pooling_mode": ["mean", "cls"]},
            EmbeddingRefused,
            "asks for mean and cls",
        ),
        ("1_Pooling/config.json", {"embedding_dimension": 32, "pooling_mode": 5}, EmbeddingRefused, "no pooling"),
        (
            "1_Pooling/config.json",
            {"embedding_dimension": 64, "pooling_mode": "mean"},
            ModelCorrupt,
            "for states of 64 numbers, and the model's have 32",
        ),
        ("1_Pooling/config.json", {"pooling_mode": "mean"}, ModelCorrupt, "for states of None"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, EmbeddingRefused, "is a SparseEncoder"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, ModelCorrupt, "are not texts by name"),
        ("config_sentence_transformers.json", {"prompts": {"a": 5}}, ModelCorrupt, "are not texts by name"),
        ("config_sentence_transformers.json", {"prompts": {"a": "\ud800"}}, ModelCorrupt, "are not texts by name"),
        ("config_sentence_transformers.json", {"default_prompt_name": "a"}, ModelCorrupt, "no prompt of that name"),
        ("config_sentence_transformers.json", {"default_prompt_name": ["a"]}, ModelCorrupt, "no prompt of that name"),
        ("modules.json", [], ModelCorrupt, "is an empty list"),
        ("modules.json", {"a": 5}, ModelCorrupt, "does not list a model's modules"),
        ("modules.json", [5], ModelCorrupt, "does not list a model's modules"),
        ("modules.json", [{"type": "a.Transformer", "path": "../.."}], ModelCorrupt, "leaves the model's folder"),
        ("modules.json", [{"type": "a.Transformer", "path": "/etc"}], ModelCorrupt, "leaves the model's folder"),
        ("modules.json", [{"type": "a.Transformer"}], EmbeddingRefused, "lists Transformer, and this version"),
    ],
)
def test_what_is_not_computed_or_damaged_is_named(
    tmp_path: Path, file: str, content: Any, error: type[Exception], why: str
) -> None:
    write_embedding(tmp_path)
    write_json(tmp_path / file, content)
    with pytest.raises(error, match=why) as raised:
        read(tmp_path)
    assert file in str(raised.value) or "a model" in str(raised.value)


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_unreadable_json_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    write_embedding(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelCorrupt, match=name.rpartition("/")[2]):
        read(tmp_path)


def test_modules_that_are_not_computed_are_refused_by_name(tmp_path: Path) -> None:
    write_embedding(tmp_path)
    write_modules(tmp_path, [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_LayerNorm", "LayerNorm")])
    with pytest.raises(EmbeddingRefused, match="lists LayerNorm"):
        read(tmp_path)
    write_modules(tmp_path, [("0_Transformer", "Transformer"), ("1_Pooling", "Pooling")])
    with pytest.raises(EmbeddingRefused, match="a Transformer in the model's folder"):
        read(tmp_path)
    write_modules(tmp_path, [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dropout", "Dropout")])
    assert read(tmp_path).layers == ()


def test_a_model_without_these_files_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EmbeddingRefused, match=r"has no modules\.json.*copy modules\.json.*Qwen3-Embedding"):
        read_embedding_settings("a model", tmp_path, {})
    with pytest.raises(EmbeddingRefused, match="a GGUF file, which does not say"):
        read_embedding_settings("a model", tmp_path / "model.gguf", {})


def test_the_tokens_of_a_logit_score(tmp_path: Path) -> None:
    assert read_logit_score(read_modules(tmp_path)) is None
    write_modules(tmp_path, [("", "Transformer"), ("1_LogitScore", "LogitScore")])
    write_json(tmp_path / "1_LogitScore" / "config.json", {"true_token_id": 7, "false_token_id": 3})
    assert read_logit_score(read_modules(tmp_path)) == LogitScore(7, 3)
    write_json(tmp_path / "1_LogitScore" / "config.json", {"true_token_id": 7, "false_token_id": None})
    with pytest.raises(EmbeddingRefused, match="names 7 and None, but two tokens are needed"):
        read_logit_score(read_modules(tmp_path))
