"""What an opened model can do without an answer: by its files, its layers and its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortexmlx import EmbeddingRefused, Engine
from cortexmlx.core.embedding_support import EmbeddingSupport, no_support
from support.embedding.models import write_embedding


def support(model: Path, **options: Any) -> EmbeddingSupport:
    with Engine(model, **{"kv_memory": "1MB", "block_size": 8} | options) as engine:
        return engine.inspect(lambda core: core.model.embedding)


def test_a_text_may_use_half_of_the_kv_memory(tmp_path: Path) -> None:
    model = write_embedding(tmp_path, max_position_embeddings=1 << 20)
    for memory in ("256KB", "1MB"):
        with Engine(model, kv_memory=memory, block_size=8) as engine:
            known, blocks = engine.inspect(lambda core: (core.model.embedding, core.model.blocks))
            assert known.max_tokens == blocks[0] // 2 * 8 and known.spare_blocks == blocks[0] // 2
            assert engine.info.embedding is not None and engine.info.embedding.max_tokens == known.max_tokens
            assert engine.inspect(lambda core: core.cache.pools.spare) == (blocks[0] // 2,)
            got = engine.embed(["x" * (known.max_tokens - 1)])
            assert got.prompt_tokens == (known.max_tokens,)
            room = f"the KV memory has room for {known.max_tokens} .*raise kv_memory"
            with pytest.raises(EmbeddingRefused, match=f"{known.max_tokens + 1} tokens, and {room}"):
                engine.embed(["x" * known.max_tokens])


def test_a_model_for_short_texts_keeps_little_free(tmp_path: Path) -> None:
    known = support(write_embedding(tmp_path, max_seq_length=20))
    assert known.spare_blocks == 3 and known.info is not None and known.info.max_tokens == 20
    assert known.spare_blocks_per_group((100,)) == (3,) and known.spare_blocks_per_group((4,)) == (2,)


def test_max_request_tokens_bounds_texts(tmp_path: Path) -> None:
    assert support(write_embedding(tmp_path), max_request_tokens=50).max_tokens == 50


def test_other_models_keep_nothing_free(tmp_path: Path, tiny: Any) -> None:
    known = support(tiny("llama"))
    assert known.spare_blocks == 0 and known.info is None and known.files is None and known.reranker is None
    assert no_support("because").not_embedding == no_support("because").not_reranking == "because"


def test_damaged_files_refuse_embeddings_and_nothing_else(tmp_path: Path) -> None:
    model = write_embedding(tmp_path)
    (model / "1_Pooling" / "config.json").write_text("{")
    with Engine(model, kv_memory="1MB") as engine:
        assert engine.info.embedding is None
        assert "cannot be read as JSON" in engine.inspect(lambda core: core.model.embedding.not_embedding)
        engine.generate("the", max_tokens=1)


@pytest.mark.parametrize("name", ["talkie", "gpt_neox"])
def test_a_class_that_ends_in_another_way_is_refused_by_name(tmp_path: Path, name: str) -> None:
    from support.embedding.models import write_json, write_modules
    from tests.architectures.configurations import configuration
    from tests.architectures.weights import write_model

    model = write_model(tmp_path, name)
    width = configuration(name).get("hidden_size", 32)
    write_modules(model, [("", "Transformer"), ("1_Pooling", "Pooling")])
    write_json(model / "1_Pooling" / "config.json", {"embedding_dimension": width, "pooling_mode": "lasttoken"})
    assert f"mlx-lm's class for {name} does not end its body with a norm" in support(model).not_embedding


def test_quantized_keys_and_values_serve_too(tmp_path: Path) -> None:
    """Vectors are then a little different, as answers are."""
    model = write_embedding(tmp_path, head_dim=64)
    with Engine(model, kv_memory="4MB") as engine:
        right = engine.embed(["the cat", "a hat"]).vectors
    with Engine(model, kv_memory="4MB", kv_bits=8) as engine:
        assert ((engine.embed(["the cat", "a hat"]).vectors - right) ** 2).sum(axis=1).max() < 0.1
