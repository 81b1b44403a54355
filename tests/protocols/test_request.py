"""What a body asks, as the engine and the chat templates read it."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols import images
from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.batch import PROTOCOLS, LineStyle
from cortexmlx.protocols.ollama import chat, generate
from cortexmlx.protocols.openai import chat_completions
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.protocols.responses import reader
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


def test_an_image_too_many_is_named_by_its_place_in_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_IMAGES", 1)
    defaults = RequestDefaults(SamplingParams(), check_image=lambda data: None)
    url, source = "data:image/png;base64,AAEC", {"type": "base64", "media_type": "image/png", "data": "AAEC"}
    shown, block = {"type": "input_image", "image_url": url}, {"type": "image", "source": source}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {
        "type": "function_call_output",
        "call_id": "1",
        "output": [{"type": "input_text", "text": "a"}, shown, shown],
    }
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [block, block]}]}
    part = {"type": "image_url", "image_url": {"url": url}}
    for read, body, place in (
        (
            chat_completions.read,
            {"messages": [USER, {"role": "user", "content": [part, part]}]},
            "messages[1].content[1]",
        ),
        (reader.read, {"input": [USER, call, output]}, "input[2].output[2]"),
        (messages.read, {"messages": [USER, use, result], "max_tokens": 9}, "messages[2].content[0].content[1]"),
        (chat.read, {"messages": [USER, {**USER, "images": ["AAEC", "AAEC"]}]}, "messages[1].images[1]"),
        (generate.read, {"prompt": "a", "images": ["AAEC", "AAEC"]}, "images[1]"),
    ):
        with pytest.raises(InvalidRequest, match="more than 1 images") as error:
            read(body, defaults)
        assert error.value.field == place
