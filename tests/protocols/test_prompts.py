"""What a body asks, as the engine and the chat templates read it."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.prompts import prompts_of
from cortexmlx.protocols.request import Style

USER = {"role": "user", "content": "hi"}


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
def test_a_completions_prompt_may_be_a_list_of_prompts(prompt: Any, prompts: Any) -> None:
    assert prompts_of({"prompt": prompt}, Style.COMPLETIONS) == prompts


@pytest.mark.parametrize("input_", ["hi", [USER], [{"type": "message", **USER, "id": "m", "status": "completed"}]])
def test_the_input_of_a_response_is_a_text_or_messages(input_: Any) -> None:
    assert prompts_of({"input": input_}, Style.RESPONSES) == ([USER],)
    system = {"role": "system", "content": "Be brief."}
    assert prompts_of({"input": input_, "instructions": "Be brief."}, Style.RESPONSES) == ([system, USER],)


def thoughts(**others: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}], **others}


def test_what_a_response_wrote_is_the_beginning_of_the_next_input() -> None:
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}
    (read,) = prompts_of({"input": [USER, thoughts(id="rs_1", status="completed"), answer, USER]}, Style.RESPONSES)
    assert read == [USER, {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm."}, USER]


@pytest.mark.parametrize(
    ("said", "style", "says"),
    [
        ({"prompt": []}, Style.COMPLETIONS, "`prompt` must be one text or a list of token ids, not list"),
        ({"prompt": ["a", ""]}, Style.COMPLETIONS, "the prompt is empty"),
        ({"prompt": ["a", 1]}, Style.COMPLETIONS, "each of the list in `prompt` must be one text or a list of"),
        ({"prompt": ["a"] * 2049}, Style.COMPLETIONS, "a list of 2049, but must have 2048 at most"),
        ({"prompt": ["a", "b"]}, Style.SIMPLE, "must be one text or a list of token ids, not list"),
        ({"prompt": "a", "messages": [USER]}, Style.SIMPLE, "there are both `prompt` and `messages`"),
        ({"messages": [{**USER, "audio": {"id": "a"}}]}, Style.CHAT, "message 1: unknown field of a message: 'audio'"),
        ({}, Style.RESPONSES, "`input` must be a text or a list of messages"),
        ({"input": ""}, Style.RESPONSES, "the prompt is empty"),
        ({"input": [{"type": "function_call_output"}]}, Style.RESPONSES, "type 'function_call_output' is not served"),
        ({"input": [thoughts(), USER]}, Style.RESPONSES, "'reasoning' is served only before an assistant's message"),
        ({"input": [USER, thoughts()]}, Style.RESPONSES, "'reasoning' is served only before an assistant's message"),
        ({"input": [thoughts(content=None)]}, Style.RESPONSES, "'reasoning' is served only with its text"),
        ({"input": [thoughts(summary=["a"])]}, Style.RESPONSES, "'reasoning' is served only with its text"),
        ({"input": "a", "instructions": [USER]}, Style.RESPONSES, "`instructions` must be a text, not list"),
        ({"input": [USER, {"role": "user"}], "instructions": "a"}, Style.RESPONSES, "message 2: `content` is None"),
    ],
)
def test_what_is_no_prompt_is_refused(said: dict[str, Any], style: Style, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prompts_of(said, style)
    assert says in str(refused.value)
