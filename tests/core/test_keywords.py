"""Sampling parameters by their names are those of `SamplingParams`, in every call that takes them."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import closing
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.core.arguments import SamplingKeywords, with_keywords
from cortexmlx.errors import InvalidRequest


def test_the_keywords_are_the_fields_with_their_types() -> None:
    assert SamplingKeywords.__annotations__.keys() == SamplingParams.__annotations__.keys()
    for name, kind in SamplingParams.__annotations__.items():
        assert SamplingKeywords.__annotations__[name].__forward_arg__ == kind


def test_keywords_go_over_the_parameters() -> None:
    base = SamplingParams(max_tokens=5, seed=1)
    assert with_keywords(None) == SamplingParams() and with_keywords(base) is base
    assert with_keywords(base, seed=2) == SamplingParams(max_tokens=5, seed=2)


def test_every_call_takes_them(engine: Engine) -> None:
    wanted = {"max_tokens": 5, "ignore_eos": True}
    expected = engine.generate([1, 2, 3], SamplingParams(**wanted)).token_ids  # type: ignore[arg-type]
    assert len(expected) == 5

    async def asynchronous() -> tuple[Any, Any]:
        whole = await engine.agenerate([1, 2, 3], max_tokens=5, ignore_eos=True)
        async with engine.astream([1, 2, 3], max_tokens=5, ignore_eos=True) as events:
            return whole, [event async for event in events][-1].completion

    answers = [
        engine.generate([1, 2, 3], max_tokens=5, ignore_eos=True),
        engine.generate([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True), max_tokens=5),
        engine.submit([1, 2, 3], max_tokens=5, ignore_eos=True).result(),
        list(engine.stream([1, 2, 3], max_tokens=5, ignore_eos=True))[-1].completion,
        *engine.generate_batch([[1, 2, 3]], max_tokens=5, ignore_eos=True),
        *engine.generate_batch([[1, 2, 3]], [SamplingParams(max_tokens=9)], max_tokens=5, ignore_eos=True),
        *(result for _, result in engine.as_completed([[1, 2, 3]], max_tokens=5, ignore_eos=True)),
        *asyncio.run(asynchronous()),
    ]
    assert [answer.token_ids for answer in answers] == [expected] * 9
    talk, names = engine.conversation(params=SamplingParams(max_tokens=9)), {"max_tokens": 5, "ignore_eos": True}
    turns = [talk.ask("one", **names), talk.regenerate(**names), talk.stream("two", **names).result()]
    turns += [asyncio.run(talk.aask("three", **names))]
    assert [turn.usage.completion_tokens for turn in turns] == [5] * 4


def test_a_name_that_is_no_parameter_is_refused_with_what_it_may_mean(engine: Engine) -> None:
    with pytest.raises(TypeError, match=r"no parameter 'max_new_tokens' \(did you mean 'max_tokens'\?\)"):
        engine.generate("hi", max_new_tokens=5)
    with pytest.raises(TypeError, match="no parameter 'client': it is an argument of submit and conversation here"):
        engine.generate("hi", client="me")
    with pytest.raises(InvalidRequest, match="an API's response_format: give the schema itself, or 'json'"):
        engine.generate("hi", structured={"type": "json_object"})
    with pytest.raises(TypeError, match="no parameter 'strem': see SamplingParams"):
        engine.submit("hi", strem=True)
    with pytest.raises(InvalidRequest, match="temperature is -1"):
        engine.generate("hi", temperature=-1)
    with pytest.raises(InvalidRequest, match="params is 'x'"):
        engine.generate("hi", "x", max_tokens=5)  # type: ignore[arg-type]


def test_parameters_without_an_end_are_read_one_by_one(engine: Engine) -> None:
    prompts, params = itertools.repeat([1, 2, 3]), itertools.islice(itertools.repeat(SamplingParams(seed=1)), 10_000)
    with closing(engine.as_completed(prompts, params, max_tokens=2, ignore_eos=True)) as completed:
        assert len(next(completed)[1].token_ids) == 2  # type: ignore[union-attr]
    assert len(list(params)) > 9_000, "they were all read for the first answer"
    with pytest.raises(TypeError, match="no parameter 'strem'"):
        engine.as_completed(prompts, params, strem=True)
