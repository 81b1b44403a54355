"""Prompts that can never fit are refused before they are tokenized; those that fit are not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cortexmlx import Engine, PromptTooLong, SamplingParams
from support.patience import PATIENCE

HUGE = "The quick brown fox jumps over the lazy dog.\n" * 500_000
"""22 MB."""


@pytest.fixture(scope="module")
def engine(tiny: Any) -> Iterator[Engine]:
    with Engine(tiny("llama"), kv_memory="512KB", block_size=16, max_rows=2) as engine:
        yield engine


@pytest.mark.parametrize("prompt", [HUGE, [{"role": "user", "content": HUGE}]], ids=["text", "messages"])
def test_a_prompt_that_can_never_fit_is_refused_without_tokenizing_it(
    engine: Engine, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(text: str, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("the text was tokenized")

    monkeypatch.setattr(engine._tokenizer, "encode", never)
    with pytest.raises(PromptTooLong, match=r"at least \d{6,} tokens and the model's context is 512: shorten"):
        engine.submit(prompt)


def test_tokenizing_has_no_limit(engine: Engine) -> None:
    text = HUGE[:100_000]
    assert len(engine.encode(text)) > 90_000
    with pytest.raises(PromptTooLong):
        engine.generate(text)


def test_token_ids_do_not_wait_for_a_text(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    began, end = threading.Event(), threading.Event()

    def endless(text: str, add_special_tokens: bool = True) -> list[int]:
        began.set()
        end.wait(PATIENCE)
        return [1]

    monkeypatch.setattr(engine._tokenizer, "encode", endless)
    waiting = threading.Thread(target=engine.encode, args=("a text",))
    waiting.start()
    assert began.wait(PATIENCE)
    answers: list[int] = []
    asking = threading.Thread(
        target=lambda: answers.append(len(engine.generate([1, 2, 3], SamplingParams(max_tokens=2)).token_ids))
    )
    asking.start()
    asking.join(PATIENCE)
    assert answers == [2]
    end.set()
    waiting.join()
