"""Embeddings end to end: the vectors of `Engine.embed` against NumPy, and what becomes of them beside others."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx import EmbeddingRefused, Embeddings, Engine, EngineClosed, FinishReason, SamplingParams
from cortexmlx.cli.start import run
from cortexmlx.core.core import EngineCore
from cortexmlx.errors import InvalidRequest
from support.embedding.models import INSTRUCTION, write_embedding, write_json
from support.embedding.numpy_transformer import NumpyTransformer, dense, pooled, unit
from support.patience import PATIENCE

END = 257
TEXTS = ["the cat sat and the hat", "x", "a longer text, " * 9, "the cat sat on", "", "  blanks around  ", "äöü 漢字"]


def engine_of(model: Path, **options: Any) -> Engine:
    return Engine(model, **{"kv_memory": "1MB", "block_size": 8, "prefill_budget": 64} | options)


def tokens_of(engine: Engine, text: str, prompt: str = "") -> list[int]:
    """What sentence-transformers gives the model: the whole text without blanks around it, and the end token."""
    return [*engine.encode((prompt + text).strip())]


def distance(vectors: np.ndarray, right: Sequence[np.ndarray]) -> float:
    """The largest distance of two vectors, both made one long."""
    pairs = zip(vectors.astype(np.float64), right, strict=True)
    return max(float(np.linalg.norm(unit(mine) - unit(judge))) for mine, judge in pairs)


@pytest.mark.parametrize(
    ("name", "pooling"),
    zip(("qwen3", "llama") * 3, ("lasttoken", "mean", "cls", "weightedmean", "mean_sqrt_len_tokens"), strict=False),
)
def test_vectors_are_those_of_numpy(tmp_path: Path, name: str, pooling: str) -> None:
    model = write_embedding(tmp_path, name, pooling=pooling, normalize=False)
    judge = NumpyTransformer(model)
    with engine_of(model) as engine:
        for prompt, before in ((None, ""), ("query", INSTRUCTION)):
            got = engine.embed(TEXTS, prompt=prompt)
            tokens = [tokens_of(engine, text, before) for text in TEXTS]
            right = [pooled(judge.states(ids), pooling) for ids in tokens]
            assert got.vectors.dtype == np.float32 and got.vectors.shape == (len(TEXTS), 32)
            assert distance(got.vectors, right) <= 1e-5
            np.testing.assert_allclose(got.vectors, right, rtol=1e-4, atol=1e-4)  # not normalized
            assert got.prompt_tokens == tuple(map(len, tokens)) and not any(got.truncated)
            assert all(ids[-1] == END for ids in tokens)
        engine.check_invariants()


@pytest.mark.parametrize("activation", ["Tanh", "Identity", "ReLU"])
def test_dense_layers_follow_pooling(tmp_path: Path, activation: str) -> None:
    model = write_embedding(tmp_path, "llama", pooling="mean", dense=(48, 20), activation=activation)
    judge = NumpyTransformer(model)
    with engine_of(model) as engine:
        assert engine.info.embedding is not None and engine.info.embedding.dimensions == 20
        got = engine.embed(TEXTS)
        right = []
        for text in TEXTS:
            vector = pooled(judge.states(tokens_of(engine, text)), "mean")
            right.append(unit(dense(dense(vector, model / "2_Dense"), model / "3_Dense")))
        assert np.abs(got.vectors - right).max() <= 1e-5 and distance(got.vectors, right) <= 1e-5


def test_a_chat_with_a_model_that_embeds_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_embedding(tmp_path / "vectors")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    write_json(model / "tokenizer_config.json", settings | {"chat_template": "{{ messages[0]['content'] }}"})
    with (
        engine_of(model) as engine,
        pytest.raises(InvalidRequest, match="is an embedding model: it turns texts") as told,
    ):
        engine.generate([{"role": "user", "content": "Hello?"}], max_tokens=1)
    assert str(tmp_path) not in str(told.value)  # the clients of a server read it
    (tmp_path / "in").write_text("Hello?")
    with (tmp_path / "in").open() as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        assert run(["chat", str(model), "--no-save"]) == 1
    assert "is an embedding model" in capsys.readouterr().err


def test_fewer_dimensions_are_the_first_ones_normalized_again(tmp_path: Path) -> None:
    with engine_of(write_embedding(tmp_path / "one")) as engine:
        whole, short = engine.embed(TEXTS).vectors, engine.embed(TEXTS, dimensions=7).vectors
        assert np.allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-6)
        assert short.shape == (len(TEXTS), 7)
        np.testing.assert_allclose(short, [unit(v[:7].astype(np.float64)) for v in whole], atol=1e-6)
    with engine_of(write_embedding(tmp_path / "other", normalize=False)) as engine:
        whole, short = engine.embed(TEXTS).vectors, engine.embed(TEXTS, dimensions=7).vectors
        np.testing.assert_allclose(short, whole[:, :7], atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "weightedmean", "cls"])
def test_a_prompt_that_is_not_pooled_is_left_out(tmp_path: Path, pooling: str) -> None:
    model = write_embedding(tmp_path, pooling=pooling, include_prompt=False)
    judge = NumpyTransformer(model)
    with engine_of(model) as engine:
        before = len(engine.encode(INSTRUCTION)) - 1  # without the end token
        texts = [text for text in TEXTS if text]
        for _ in range(2):
            got = engine.embed(texts, prompt="query")
            right = [pooled(judge.states(tokens_of(engine, text, INSTRUCTION)), pooling, before) for text in texts]
            assert distance(got.vectors, right) <= 1e-5
        assert got.cached_tokens == (before,) * len(texts)  # what is not pooled need not be computed again


def test_an_instruction_is_computed_once(tmp_path: Path) -> None:
    with engine_of(write_embedding(tmp_path)) as engine:
        first = engine.embed(TEXTS, prompt="query")
        again = engine.embed(TEXTS, prompt="query")
        length = len(engine.encode(INSTRUCTION)) - 1  # without the end token
        assert again.cached_tokens == (length,) * len(TEXTS)
        assert sum(first.cached_tokens) > 0
        assert engine.embed(TEXTS).cached_tokens == (0,) * len(TEXTS)  # nothing else is kept
        assert distance(again.vectors, list(first.vectors)) <= 1e-5
        assert engine.inspect(kept_tokens) == length
        engine.check_invariants()


def kept_tokens(core: EngineCore) -> int:
    return sum(len(entry.tokens) for entry in core.cache.prefix.entries)


def test_mean_pooling_computes_the_instruction_again(tmp_path: Path) -> None:
    with engine_of(write_embedding(tmp_path, pooling="mean")) as engine:
        vectors = [engine.embed(TEXTS, prompt="query") for _ in range(2)]
        assert vectors[1].cached_tokens == (0,) * len(TEXTS)
        assert distance(vectors[1].vectors, list(vectors[0].vectors)) <= 1e-5


def test_a_default_prompt_is_used_and_can_be_replaced(tmp_path: Path) -> None:
    model = write_embedding(tmp_path, default_prompt="query")
    with engine_of(model) as engine:
        plain, query = engine.embed(["hat"], prompt="document"), engine.embed(["hat"], prompt="query")
        assert engine.embed(["hat"]).prompt_tokens == query.prompt_tokens != plain.prompt_tokens


def test_texts_of_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    with engine_of(write_embedding(tmp_path)) as engine:
        ids = engine.encode("the cat")
        mixed = engine.embed(["the cat", ids, np.array(ids)])
        assert mixed.prompt_tokens == (len(ids),) * 3
        assert distance(mixed.vectors[1:], [mixed.vectors[0]] * 2) <= 1e-6
        with pytest.raises(EmbeddingRefused, match="text 0 is token ids"):
            engine.embed([ids], prompt="query")


def test_a_text_that_is_too_long_is_refused_or_cut(tmp_path: Path) -> None:
    model = write_embedding(tmp_path, max_seq_length=24)
    judge = NumpyTransformer(model)
    with engine_of(model) as engine:
        text = "a text of many words that does not fit"
        with pytest.raises(EmbeddingRefused, match=r"text 1 has \d+ tokens, and the model takes 24: .*truncate"):
            engine.embed(["x", text])
        with pytest.raises(EmbeddingRefused, match="text 0 has at least"):
            engine.embed(["word " * 100_000])
        got = engine.embed(["x", text, "word " * 20_000], truncate=True)
        assert got.truncated == (False, True, True) and got.prompt_tokens == (2, 24, 24)
        ids = engine.encode(text)
        assert distance(got.vectors[1:2], [judge.states([*ids[:23], END])[-1]]) <= 1e-5


def test_the_longest_text_is_as_long_as_the_context(tmp_path: Path) -> None:
    with engine_of(write_embedding(tmp_path, max_position_embeddings=64)) as engine:
        assert engine.info.embedding is not None and engine.info.embedding.max_tokens == 64
        assert engine.embed(["x" * 63]).prompt_tokens == (64,)


def test_no_texts_have_no_vectors(tmp_path: Path) -> None:
    with engine_of(write_embedding(tmp_path, dense=(12,))) as engine:
        none = engine.embed([])
        assert none.vectors.shape == (0, 12) and none.prompt_tokens == none.truncated == ()
        assert engine.embed([], dimensions=5).vectors.shape == (0, 5)


@pytest.mark.parametrize(
    ("texts", "options", "why"),
    [
        ("one text", {}, "texts are a list of texts"),
        (5, {}, "texts are a list of texts"),
        ([5], {}, "text 0 is no text"),
        (["a", [1, 2**40]], {}, "text 1 is no text, and no list of token ids below 320"),
        ([[]], {}, "text 0 is empty"),
        ([b"bytes"], {}, "text 0 is no text"),
        ([{"a": 1}], {}, "text 0 is no text"),
        (["a"], {"prompt": "passage"}, "no prompt 'passage': its files name 'document', 'query'"),
        (["a"], {"dimensions": 0}, r"dimensions is 0, but must be in 1\.\.32"),
        (["a"], {"dimensions": 33}, r"dimensions is 33"),
        (["a"], {"dimensions": True}, r"dimensions is True"),
        (["a"], {"dimensions": 2.0}, r"dimensions is 2.0"),
    ],
)
def test_wrong_arguments_are_refused_by_name(tmp_path: Path, texts: Any, options: Any, why: str) -> None:
    with engine_of(write_embedding(tmp_path)) as engine:
        with pytest.raises(EmbeddingRefused, match=why):
            engine.embed(texts, **options)
        assert engine.stats().rows_running == engine.stats().rows_waiting == 0


def test_models_that_cannot_embed_say_why(tmp_path: Path, tiny: Any) -> None:
    with Engine(tiny("llama"), kv_memory="1MB") as engine:
        assert engine.info.embedding is None
        with pytest.raises(EmbeddingRefused, match=r"has no modules\.json, so nothing says how its vectors are made"):
            engine.embed(["a"])
        with pytest.raises(EmbeddingRefused, match="cannot judge documents"):
            engine.rerank("a", ["b"])


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            "its tokens see later ones .use_bidirectional_attention",
        ),
        ("qwen3", {"is_causal": False}, "is_causal is false"),
        ("qwen3", {"auto_map": {"AutoModel": "modeling_qwen.Qwen3Model"}}, "code of its own .modeling_qwen"),
        ("llama", {"architectures": ["LlamaBidirectionalModel"]}, "LlamaBidirectionalModel"),
        ("gemma3_text", {}, "it has layers that see a window of the text"),
        ("windowed llama", {}, "it has layers that see a window"),
        ("mamba", {}, "it has recurrent layers"),
    ],
)
def test_models_whose_vectors_would_be_wrong_are_refused_by_name(
    tmp_path: Path, name: str, changes: Any, why: str
) -> None:
    model = write_embedding(tmp_path, name, flat=False, **changes)
    with Engine(model, kv_memory="1MB", block_size=8) as engine:
        assert engine.info.embedding is None
        with pytest.raises(EmbeddingRefused, match=why):
            engine.embed(["a"])
        assert engine.generate("the cat", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2


def test_files_that_do_not_fit_the_model_are_noticed(tmp_path: Path) -> None:
    model = write_embedding(tmp_path, "gpt2", flat=False)  # its config.json calls the width otherwise
    write_json(model / "1_Pooling" / "config.json", {"embedding_dimension": 40, "pooling_mode": "lasttoken"})
    with engine_of(model) as engine, pytest.raises(EmbeddingRefused, match=r"states have 32 numbers.*made for 40"):
        engine.embed(["a"])


def test_embeddings_are_computed_beside_answers_and_do_not_change_them(tmp_path: Path) -> None:
    model = write_embedding(tmp_path, max_position_embeddings=2048)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with engine_of(model, kv_memory="4MB", max_rows=2) as engine:
        alone = engine.generate("the cat", params)
        right = engine.embed(TEXTS, prompt="query")
        answers = [engine.submit("the cat", params) for _ in range(4)]  # more than there are rows
        beside = engine.embed(TEXTS * 4, prompt="query")
        assert distance(beside.vectors, list(right.vectors) * 4) <= 1e-5
        assert {answer.result().token_ids for answer in answers} == {alone.token_ids}
        engine.check_invariants()


def test_texts_take_no_rows(tmp_path: Path) -> None:
    with engine_of(write_embedding(tmp_path), max_rows=1, prefill_budget=512) as engine:
        before = engine.stats().steps
        engine.embed(["the cat"] * 60)
        assert engine.stats().steps - before <= 4


def test_a_client_has_its_own_instruction(tmp_path: Path) -> None:
    with engine_of(write_embedding(tmp_path)) as engine:
        engine.embed(TEXTS, prompt="query", client="one")
        assert engine.embed(["x"], prompt="query", client="two").cached_tokens == (0,)
        assert engine.embed(["x"], prompt="query", client="one").cached_tokens[0] > 0


def test_asyncio(tmp_path: Path) -> None:
    with engine_of(write_embedding(tmp_path)) as engine:
        right = engine.embed(TEXTS)

        async def both() -> list[Embeddings]:
            return list(await asyncio.gather(engine.aembed(TEXTS), engine.aembed(TEXTS)))

        for got in asyncio.run(both()):
            assert distance(got.vectors, list(right.vectors)) <= 1e-5


def test_a_cancelled_task_cancels_its_texts(tmp_path: Path) -> None:
    model = write_embedding(tmp_path, max_position_embeddings=4096)
    with engine_of(model, kv_memory="16MB", prefill_budget=16) as engine:

        async def cancel() -> None:
            task = asyncio.create_task(engine.aembed(["some words " * 150] * 64))
            while not engine.stats().rows_running:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        over = threading.Event()
        for _ in range(int(PATIENCE * 20)):
            if engine.stats().rows_running == engine.stats().rows_waiting == 0:
                break
            over.wait(0.05)
        assert engine.stats().rows_running == engine.stats().rows_waiting == 0
        engine.check_invariants()


def test_closing_the_engine_ends_them(tmp_path: Path) -> None:
    model = write_embedding(tmp_path, max_position_embeddings=4096)
    engine = engine_of(model, kv_memory="16MB", prefill_budget=16)
    raised: list[BaseException] = []

    def embed() -> None:
        try:
            engine.embed(["some words " * 150] * 64)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=embed)
    thread.start()
    while not engine.stats().rows_running:
        pass
    engine.close()
    thread.join(PATIENCE)
    assert [type(error) for error in raised] == [EngineClosed]
    with pytest.raises(EngineClosed):
        engine.embed(["a"])


def test_a_step_that_fails_fails_them_and_the_engine_continues(tmp_path: Path) -> None:
    with engine_of(write_embedding(tmp_path)) as engine:
        right = engine.embed(TEXTS)

        def break_once(core: EngineCore) -> None:
            runner: Any = core.runner
            forward = runner._forward

            def broken(plan: Any) -> Any:
                runner._forward = forward
                raise ValueError("a bug")

            runner._forward = broken

        engine.inspect(break_once)
        with pytest.raises(Exception, match="a bug"):
            engine.embed(TEXTS)
        assert distance(engine.embed(TEXTS).vectors, list(right.vectors)) <= 1e-5


def test_refused_memory_restarts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(write_embedding(tmp_path, pooling="mean"), prefill_budget=16) as engine:
        right = engine.embed(TEXTS)

        def refuse(core: EngineCore) -> None:
            runner: Any = core.runner
            forward, calls = runner._forward, [0]

            def refusing(plan: Any) -> Any:
                calls[0] += 1
                if calls[0] in (2, 5):
                    raise RuntimeError(
                        "[metal::malloc] Attempting to allocate 1 bytes which is greater than the maximum"
                    )
                return forward(plan)

            runner._forward = refusing

        engine.inspect(refuse)
        got = engine.embed(TEXTS)
        assert engine.stats().restarts > 0
        assert distance(got.vectors, list(right.vectors)) <= 1e-5
        engine.check_invariants()


def test_hosts_are_refused_by_name() -> None:
    from cortexmlx.distributed.hosted_model import HostedModel

    assert "with hosts" in HostedModel.embedding.not_embedding
    assert HostedModel.embedding.info is None


def test_a_whole_answer_is_not_an_embedding(tmp_path: Path) -> None:
    """A model with these files still answers: an embedding model is a language model."""
    with engine_of(write_embedding(tmp_path)) as engine:
        assert engine.generate("the", max_tokens=3, ignore_eos=True).finish_reason is FinishReason.LENGTH
