"""Tokens of texts: as many as an answer's usage says, and the text that they came from."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx import Engine, InvalidRequest, SamplingParams
from support.engine.asked import PROMPT
from support.models.tiny import EOS, VOCAB

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve 日本 \U0001f600?"}]


@pytest.mark.parametrize("prompt", ["the cat", MESSAGES, PROMPT], ids=["text", "messages", "tokens"])
def test_a_prompt_has_as_many_tokens_as_its_answer_says(engine: Engine, prompt: Any) -> None:
    usage = engine.generate(prompt, SamplingParams(max_tokens=1)).usage
    assert engine.count_tokens(prompt) == len(engine.encode(prompt)) == usage.prompt_tokens


def test_text_comes_back_from_its_tokens(engine: Engine, judged: Any) -> None:
    for text in ("", " the  cat\n", "naïve 日本 \U0001f600"):
        tokens = engine.encode(text)
        assert engine.decode(tokens) == text == judged("llama")[1].decode(tokens, skip_special_tokens=True)


def test_the_text_of_an_answer_is_that_of_its_tokens(engine: Engine) -> None:
    answer = engine.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    assert engine.decode(answer.token_ids, special_tokens=True) == answer.text


def test_special_tokens_are_shown_to_who_asks_for_them(engine: Engine) -> None:
    tokens = engine.encode(MESSAGES)
    shown, hidden = engine.decode(tokens, special_tokens=True), engine.decode(tokens)
    assert shown.count("<s>") == 3 and "<s>" not in hidden and shown.replace("<s>", "") == hidden
    assert engine.decode([EOS]) == ""


@pytest.mark.parametrize("bad", [-1, VOCAB, "a", 1.5, None])
def test_what_is_no_token_is_refused_by_its_name(engine: Engine, bad: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{bad!r} is outside the vocabulary of {VOCAB}"):
        engine.decode([1, bad])


def test_a_closed_engine_still_reads_and_writes_text(engine: Engine) -> None:
    engine.close()
    assert engine.decode(engine.encode("after the end")) == "after the end"
    assert engine.count_tokens("") == 0
