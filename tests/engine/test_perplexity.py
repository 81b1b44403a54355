"""The perplexity of a text: mlx-lm's on the same windows, each token scored once, and what is known on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from cortexmlx import CortexError, Engine, Perplexity
from cortexmlx.errors import EngineClosed, InvalidRequest
from cortexmlx.perplexity import TextWindow, cut_windows
from support.engine.core_driver import finally_nothing_lost
from support.models.tiny import tokens_of, write_tiny

TEXT = "the cat and the hat, and then a tale of the sea. " * 9


@given(st.integers(2, 80), st.integers(2, 30), st.data())
def test_each_token_is_scored_once_behind_as_many_as_there_is_room_for(tokens: int, room: int, data: Any) -> None:
    stride = data.draw(st.integers(1, room - 1))
    first = data.draw(st.integers(0, 1))
    cuts = list(cut_windows(tokens, room, stride, first))
    assert [place for cut in cuts for place in range(cut.score_start, cut.end)] == list(range(first, tokens))
    for cut in cuts:
        assert 0 <= cut.start <= cut.score_start and cut.end - cut.start <= room
        assert cut.start == 0 or cut.end - cut.start == room, "the last one, too, has all that there is room for"
    assert all(cut.score_start - cut.start >= room - stride for cut in cuts[1:])
    assert cuts[0] == TextWindow(0, first, min(room, tokens))


def judge(model: Any, tokens: Sequence[int], context: int, stride: int, begin: Sequence[int] = ()) -> float:
    """The sum of negative log-probabilities by mlx-lm's model, which computes each window alone."""
    total, scored, room = 0.0, 0 if begin else 1, context - len(begin)
    end = min(room, len(tokens))
    while True:
        ids = [*begin, *tokens[max(0, end - room) : end]]
        logits = np.array(model(mx.array([ids]))[0].astype(mx.float32), np.float64)[:-1]
        own = logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(axis=-1))
        total -= own[-(end - scored) :].sum()
        if end == len(tokens):
            return total
        scored, end = end, min(end + stride, len(tokens))


@pytest.mark.parametrize(("context", "stride"), [(64, 32), (100, 99), (512, None)])
def test_it_is_mlx_lms_on_the_same_windows(context: int, stride: int | None, engine: Engine, judged: Any) -> None:
    told: list[Perplexity] = []
    found = engine.perplexity(TEXT, context=context, stride=stride, on_window=told.append)
    tokens = engine.encode(TEXT)
    nll = judge(judged("one layer")[0], tokens, context, stride or context // 2)
    assert found.tokens == len(tokens) - 1 == found.text_tokens - 1
    assert abs(found.nll - nll) / found.tokens < 1e-5
    assert math.isclose(found.perplexity, math.exp(nll / found.tokens), rel_tol=1e-4)
    assert math.isclose(found.bits_per_token, math.log2(found.perplexity), rel_tol=1e-9)
    assert math.isclose(found.bits_per_byte or 0, found.bits_per_token * len(tokens) / len(TEXT), rel_tol=1e-9)
    assert [each.windows for each in told] == list(range(1, found.all_windows + 1)) and told[-1] == found
    assert found.tokens_per_second > 0
    again = engine.perplexity(tokens, context=context, stride=stride)
    assert math.isclose(again.nll, found.nll, rel_tol=1e-5) and again.bits_per_byte is None
    finally_nothing_lost(engine)


def test_every_window_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    """A model that was trained with a token before every text is lost without it."""
    folder = write_tiny(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.save(str(folder / "tokenizer.json"))
    model = mlx_lm.load(str(folder))[0]
    with Engine(folder, kv_memory="256KB", block_size=8, max_rows=2) as engine:
        tokens = engine.encode(TEXT)
        found = engine.perplexity(TEXT, context=40, stride=11)
        begin = tokens[:1]
        assert begin == [256]
        assert found.tokens == found.text_tokens == len(tokens) - 1
        nll = judge(model, tokens[1:], 40, 11, begin)
        assert abs(found.nll - nll) / found.tokens < 1e-5
        for same in ("<s>" + TEXT, tokens):
            assert math.isclose(engine.perplexity(same, context=40, stride=11).nll, found.nll, rel_tol=1e-5)
        assert abs(engine.perplexity(tokens[1:], context=40, stride=11).nll - judge(model, tokens[1:], 40, 11)) < 1e-2


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "the text has 0 tokens: there is nothing to score"),
        ("a", {}, "the text has 1 token: there is nothing to score"),
        (TEXT, {"context": 513}, "context is 513, but must be in 2..512"),
        (TEXT, {"context": 1}, "context is 1, but must be in 2..512"),
        (TEXT, {"context": 8, "stride": 8}, "stride is 8, but must be in 1..7, less than the context of 8"),
        (TEXT, {"stride": 0}, "stride is 0"),
        ([1, "a"], {}, "a text or a list of token ids"),
        ([1, 999], {}, "token id 999 is outside the vocabulary of 320 tokens"),
        *((text, {}, "text") for text in (None, 5, b"abc", [True, False], [1, 2.0])),
        *(("a text", {"context": wrong}, "context is") for wrong in ("16", 16.5, True)),
        *(("a text", {"context": 16, "stride": wrong}, "stride is") for wrong in ("1", 2.5, True)),
    ],
)
def test_what_cannot_be_scored_is_refused(text: Any, options: dict[str, Any], message: str, engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.perplexity(text, **options)
    finally_nothing_lost(engine)


def test_numpys_tokens_are_tokens_and_what_utf8_lacks_is_a_question_mark(engine: Engine) -> None:
    assert engine.perplexity(np.array([65, 66, 67])).nll == engine.perplexity([65, 66, 67]).nll  # type: ignore[arg-type]
    assert engine.perplexity("a\ud800b c").nll == engine.perplexity("a?b c").nll


def test_a_window_is_no_longer_than_the_memory_holds(tiny: Any) -> None:
    with Engine(tiny("llama"), kv_memory="32KB", block_size=8, max_rows=4) as engine:
        found = engine.perplexity(TEXT)
        most = engine.inspect(lambda core: core.cache.tables.capacity_tokens) + 1
        assert found.context == most < 512 and found.stride == most // 2
        with pytest.raises(InvalidRequest, match=rf"context is {most + 1}, but must be in 2..{most}: "):
            engine.perplexity(TEXT, context=most + 1)


def test_a_window_is_no_longer_than_what_a_row_keeps_and_leaves_nothing_in_the_cache(tiny: Any, judged: Any) -> None:
    with Engine(tiny("one layer"), kv_memory="128KB", block_size=8, keep_first=8, keep_last=24) as engine:
        found = engine.perplexity(TEXT)
        assert found.context == 8 + 2 * 24 + 1
        nll = judge(judged("one layer")[0], engine.encode(TEXT), found.context, found.stride)
        assert abs(found.nll - nll) / found.tokens < 1e-5
        assert engine.stats().cached_blocks == 0


def test_what_ends_it_early_cancels_the_rest(engine: Engine) -> None:
    def interrupted(known: Perplexity) -> None:
        if known.windows == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.perplexity(tokens_of(400), context=16, stride=4, on_window=interrupted)
    finally_nothing_lost(engine)
    engine.close()
    with pytest.raises(EngineClosed):
        engine.perplexity(TEXT)


def test_a_window_that_fails_is_the_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no scores today")

    monkeypatch.setattr("cortexmlx.execution.prompt_scores.score_tokens", broken)
    with pytest.raises(CortexError, match="no scores today"):
        engine.perplexity(TEXT, context=16)


def test_a_hopeless_text_is_infinitely_hard() -> None:
    known = Perplexity(1e6, 10, 1, 1, 16, 8, 10, 0.0, 11, 40)
    assert known.perplexity == math.inf and known.tokens_per_second == 0.0
