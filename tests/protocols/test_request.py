"""What a body asks, as the engine and the chat templates read it."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.batch import PROTOCOLS, LineStyle
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.types.sampling_params import SamplingParams

USER = {"role": "user", "content": "hi"}


def prompts_of(said: dict[str, Any], style: LineStyle) -> Any:
    return PROTOCOLS[style].read(said, RequestDefaults(SamplingParams())).prompts


def thoughts(**others: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}], **others}


@pytest.mark.parametrize(
    ("said", "style", "says"),
    [
        ({"prompt": []}, LineStyle.COMPLETIONS, "`prompt` must be one text or a list of token ids, not list"),
        ({"prompt": ["a", ""]}, LineStyle.COMPLETIONS, "the prompt is empty"),
        ({"prompt": ["a", 1]}, LineStyle.COMPLETIONS, "each of the list in `prompt` must be one text or a list of"),
        ({"prompt": ["a"] * 2049}, LineStyle.COMPLETIONS, "a list of 2049, but must have 2048 at most"),
        ({"prompt": ["a", "b"]}, LineStyle.SIMPLE, "must be one text or a list of token ids, not list"),
        ({"prompt": "a", "messages": [USER]}, LineStyle.SIMPLE, "there are both `prompt` and `messages`"),
        ({}, LineStyle.RESPONSES, "`input` must be a text or a list of messages"),
        ({"input": ""}, LineStyle.RESPONSES, "the prompt is empty"),
        ({"input": [{"type": "computer_call"}]}, LineStyle.RESPONSES, "`input` has no message"),
        ({"input": [thoughts()]}, LineStyle.RESPONSES, "`input` has no message"),
        ({"input": "a", "instructions": [USER]}, LineStyle.RESPONSES, "`instructions` must be a text, not list"),
        ({"input": [USER, {"role": "user", "text": "a"}]}, LineStyle.RESPONSES, "type 'message': 'text'"),
    ],
)
def test_what_is_no_prompt_is_refused(said: dict[str, Any], style: LineStyle, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prompts_of(said, style)
    assert says in str(refused.value)
