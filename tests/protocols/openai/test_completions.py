"""The body of a completion: one prompt or many, and chunks with the prompt before the answer."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.openai.completions import CompletionChunks, read
from cortexmlx.protocols.request import ReplyInfo, RequestDefaults
from cortexmlx.types.request import TokenEvent
from cortexmlx.types.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ([1, 2], ([1, 2],)),
        (["a", "b"], ("a", "b")),
        ([[1, 2], [3]], ([1, 2], [3])),
        (["a", [3]], ("a", [3])),
    ],
)
def test_a_prompt_may_be_a_list_of_prompts(prompt: Any, prompts: Any) -> None:
    request = read({"prompt": prompt}, RequestDefaults(SamplingParams(), {"a": 1}))
    assert (request.prompts, request.raw, request.template_vars) == (prompts, True, {})


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": ["a", [1], ""]}, "prompt[2]"),
        ({"prompt": "a", "echo": 1}, "echo"),
        ({"prompt": "a", "reasoning_effort": ""}, "reasoning_effort"),
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"prompt": "a", "stream": True, "echo": True, "logprobs": 0}, "stream"),
    ],
)
def test_an_error_names_the_field_with_its_path(body: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(body, RequestDefaults(SamplingParams()))
    assert refused.value.field == path


def test_the_prompt_is_the_first_chunk_of_an_echo() -> None:
    request = read({"prompt": ["x", [0, 1]], "echo": True, "n": 2, "stream": True}, RequestDefaults(SamplingParams()))
    writer = CompletionChunks(request, ReplyInfo("7", "m", 0, [b"y", b"z"].__getitem__))
    chunks = writer.convert(TokenEvent("a", 0, index=1), prompt=1)
    said = [(choice["index"], choice["text"]) for chunk in chunks for choice in chunk["choices"]]
    assert said == [(0, "x"), (1, "x"), (2, "yz"), (3, "yz"), (3, "a")]
    assert writer.convert(TokenEvent("", 0, index=1), prompt=1) == []
