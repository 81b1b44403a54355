"""`Engine.rerank` against NumPy, and its arguments. `Engine.embed` is tested in tests/engine/test_embedding.py."""

from __future__ import annotations

import asyncio
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import EmbeddingRefused, Engine, InvalidRequest, Reranking
from cortexmlx.core.embedding import LONG, EmbeddingInput, EmbeddingTokenizer
from cortexmlx.models.embedding import DEFAULT_INSTRUCTION
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from support.embedding.models import write_embedding, write_reranker
from support.embedding.numpy_transformer import NumpyTransformer
from tests.models.embedding.test_reranker import CARD

DOCUMENTS = ["a hat", "the cat sat on the hat", "", "x" * 90, "äöü"]
QUERY = "what did the cat sit on?"


def model_in(folder: Path, **changes: Any) -> Path:
    return write_reranker(folder / "Qwen3-Reranker-tiny", max_position_embeddings=2048, **changes)


def engine_of(model: Path, **options: Any) -> Engine:
    return Engine(model, **{"kv_memory": "4MB", "block_size": 8} | options)


def right(model: Path, engine: Engine, query: str, documents: list[str], instruction: str) -> list[float]:
    """What the model card computes, in NumPy."""
    judge = NumpyTransformer(model)
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    scores = []
    for document in documents:
        logits = judge.logits(engine.encode(CARD.format(instruction=instruction, query=query, document=document)))
        yes, no = math.exp(logits[vocab["yes"]]), math.exp(logits[vocab["no"]])
        scores.append(yes / (yes + no))
    return scores


@pytest.mark.parametrize("logit_score", [False, True])
def test_scores_are_those_of_numpy(tmp_path: Path, logit_score: bool) -> None:
    model = model_in(tmp_path, logit_score=logit_score)
    with engine_of(model) as engine:
        for instruction in (None, "Find hats."):
            got = engine.rerank(QUERY, DOCUMENTS, instruction=instruction)
            wanted = right(model, engine, QUERY, DOCUMENTS, instruction or DEFAULT_INSTRUCTION)
            assert got.scores == pytest.approx(wanted, abs=1e-5)
            assert len(set(got.scores)) == len(DOCUMENTS)
        engine.check_invariants()


def test_scores_of_a_head_of_its_own_are_those_of_numpy(tmp_path: Path) -> None:
    model = model_in(tmp_path, tie_word_embeddings=False)
    with engine_of(model) as engine:
        got = engine.rerank(QUERY, DOCUMENTS)
        assert got.scores == pytest.approx(right(model, engine, QUERY, DOCUMENTS, DEFAULT_INSTRUCTION), abs=1e-5)


def test_instruction_and_query_are_computed_once(tmp_path: Path) -> None:
    with engine_of(model_in(tmp_path)) as engine:
        count = 24
        got = engine.rerank(QUERY, [f"{n} hats" for n in range(count)])
        head = len(engine.encode(CARD.partition("{document}")[0].format(instruction=DEFAULT_INSTRUCTION, query=QUERY)))
        whole_blocks = (head - 1) // 8 * 8
        assert got.cached_tokens >= (count - 1) * whole_blocks
        assert got.prompt_tokens > count * head
        computed = got.prompt_tokens - got.cached_tokens
        assert computed < head + count * 60


def test_the_query_is_not_kept_for_ever(tmp_path: Path) -> None:
    """Many queries do not fill the cache beyond what texts may use."""
    with engine_of(model_in(tmp_path), kv_memory="1MB") as engine:
        chat = engine.encode("a chat that was here before " * 4)
        engine.generate(chat, max_tokens=2)
        for number in range(30):
            engine.rerank(f"{number}: {QUERY}", DOCUMENTS[:2])
        assert engine.generate(chat, max_tokens=2).usage.cached_tokens >= len(chat) - 8
        engine.check_invariants()


def test_a_document_that_is_too_long_is_refused_or_cut(tmp_path: Path) -> None:
    with engine_of(write_reranker(tmp_path / "qwen3-reranker", max_position_embeddings=420)) as engine:
        with pytest.raises(EmbeddingRefused, match=r"document 1 has \d+ tokens with the query.*takes 420.*truncate"):
            engine.rerank("q", ["a", "b" * 300])
        got = engine.rerank("q", ["a", "b" * 300, "b" * 400], truncate=True)
        assert got.scores[1] == pytest.approx(got.scores[2], abs=1e-5)
        with pytest.raises(EmbeddingRefused, match=r"instruction and query have \d+ tokens.*takes 420"):
            engine.rerank("q" * 300, ["a"], truncate=True)


def test_only_the_beginning_of_long_texts_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, encode = [], SharedTokenizer.encode

    def noted(self: SharedTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(SharedTokenizer, "encode", noted)
    text = "ab c" * 500_000
    with engine_of(write_reranker(tmp_path / "qwen3-reranker", max_position_embeddings=420)) as engine:
        with pytest.raises(EmbeddingRefused, match=r"document 1 has at least \d+ tokens with the query.*truncate"):
            engine.rerank("q", ["a", text])
        for query, instruction in (text, None), ("q", text):
            with pytest.raises(EmbeddingRefused, match=r"instruction and query have at least \d+ tokens.*takes 420"):
                engine.rerank(query, ["a"], instruction=instruction, truncate=True)
        got = engine.rerank("q", [text, "ab c" * 200], truncate=True)
        assert got.scores[0] == pytest.approx(got.scores[1], abs=1e-5)
    assert max(lengths) <= LONG


@pytest.mark.parametrize(
    ("query", "documents", "options", "why"),
    [
        (5, ["a"], {}, "query is 5, but must be a text"),
        ("q", "text", {}, "documents are a list of texts"),
        ("q", None, {}, "documents are a list of texts"),
        ("q", ["a", 5], {}, "document 1 is 5"),
        ("q", [None], {}, "document 0 is None"),
        ("q", ["a"], {"instruction": 5}, "instruction is 5"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, query: Any, documents: Any, options: Any, why: str) -> None:
    with engine_of(model_in(tmp_path)) as engine:
        with pytest.raises(EmbeddingRefused, match=why):
            engine.rerank(query, documents, **options)
        with pytest.raises(InvalidRequest, match="client"):
            engine.rerank("q", ["a"], client=5)  # type: ignore[arg-type]


def test_no_documents_have_no_scores(tmp_path: Path) -> None:
    with engine_of(model_in(tmp_path)) as engine:
        assert engine.rerank("q", []) == Reranking((), 0, 0)


def test_half_a_character_is_read_as_a_question_mark(tmp_path: Path) -> None:
    with engine_of(model_in(tmp_path)) as engine:
        assert engine.rerank("\ud800", ["\udfff"]).scores == pytest.approx(engine.rerank("?", ["?"]).scores, abs=1e-5)
    with engine_of(write_embedding(tmp_path / "embedding")) as engine:
        assert engine.embed(["\ud800"]).vectors == pytest.approx(engine.embed(["?"]).vectors, abs=1e-5)


def test_an_embedding_model_judges_nothing_and_a_reranker_embeds_nothing(tmp_path: Path) -> None:
    with (
        engine_of(write_embedding(tmp_path / "embedding")) as engine,
        pytest.raises(EmbeddingRefused, match="LogitScore"),
    ):
        engine.rerank("q", ["a"])
    with engine_of(model_in(tmp_path)) as engine:
        assert engine.info.embedding is None
        with pytest.raises(EmbeddingRefused, match=r"no modules\.json"):
            engine.embed(["a"])


def test_asyncio(tmp_path: Path) -> None:
    with engine_of(model_in(tmp_path)) as engine:
        alone = engine.rerank(QUERY, DOCUMENTS)
        assert asyncio.run(engine.arerank(QUERY, DOCUMENTS)).scores == pytest.approx(alone.scores, abs=1e-5)


def test_tokens_of_texts_that_are_done_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = EmbeddingTokenizer.tokenize
    seen = weakref.WeakSet[EmbeddingInput]()
    alive = []

    def noted(*call: Any) -> EmbeddingInput:
        one = read(*call)
        seen.add(one)
        alive.append(len(seen))
        return one

    monkeypatch.setattr(EmbeddingTokenizer, "tokenize", noted)
    with engine_of(write_embedding(tmp_path), prefill_budget=8) as engine:
        made = engine.embed([f"text {number}" for number in range(30)], truncate=True)
    assert len(alive) == 30 and max(alive) < 10
    assert made.vectors.shape == (30, 32) and len(made.prompt_tokens) == len(made.truncated) == 30
