"""The cases that Open Responses asks of a server, and the agents' way to answer: with what was said before."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall

from support.open_responses import RESPONSE, event_faults, faults

SHORT: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["Hello there.", "Ahoy."]}}}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "What the weather is at a place.",
    "parameters": {"type": "object", "properties": {"place": {"enum": ["Oslo"]}}, "required": ["place"]},
}
CALLED: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}


def message(role: str, text: Any) -> Any:
    return {"type": "message", "role": role, "content": text}


TEXTS: dict[str, Any] = {
    "a text": [message("user", "Greet me.")],
    "a system prompt": [message("system", "You are a sailor."), message("user", "Greet me.")],
    "a developer's prompt": [message("developer", "You are a sailor."), message("user", "Greet me.")],
    "several turns": [message("user", "I am Ann."), message("assistant", "Hi Ann."), message("user", "Who am I?")],
}


def streamed(http: httpx.Client, body: Any) -> list[Any]:
    text = http.post("/v1/responses", json={**body, "stream": True}).text
    return [json.loads(block.partition("data: ")[2]) for block in text.strip().split("\n\n")]


@pytest.mark.parametrize("case", TEXTS)
def test_a_text_is_answered(http: httpx.Client, case: str) -> None:
    body = {"model": "tiny", "input": TEXTS[case], "text": SHORT}
    whole = http.post("/v1/responses", json={**body, "stream": False}).json()
    assert not faults(whole, RESPONSE)
    assert whole["status"] == "completed" and whole["completed_at"] >= whole["created_at"]
    [item] = whole["output"]
    assert json.loads(item["content"][0]["text"]) in ("Hello there.", "Ahoy.")
    events = streamed(http, body)
    assert not list(event_faults(events))
    assert events[-1]["type"] == "response.completed"


def test_a_tool_is_called(http: httpx.Client) -> None:
    body = {"model": "tiny", "input": [message("user", "How is the weather in Oslo?")], **CALLED}
    whole = http.post("/v1/responses", json=body).json()
    assert not faults(whole, RESPONSE)
    assert [item["type"] for item in whole["output"]] == ["function_call"]
    events = streamed(http, body)
    assert not list(event_faults(events))
    kinds = [event["type"] for event in events]
    for kind in ("function_call_arguments.delta", "function_call_arguments.done"):
        assert f"response.{kind}" in kinds
    items = [event["item"] for event in events if event["type"].startswith("response.output_item.")]
    assert [item["type"] for item in items] == ["function_call"] * 2
    assert json.loads(items[1]["arguments"]) == {"place": "Oslo"}


def test_an_image_is_a_line_and_a_note_also_when_it_is_continued(http: httpx.Client) -> None:
    parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": "data:,"}]
    body = {"model": "tiny", "input": [message("user", parts)], "max_output_tokens": 2}
    reply = http.post("/v1/responses", json=body).json()
    assert reply["notes"] == ["an image in the conversation is not read: a line says that it was there"]
    kept = http.get(f"/v1/responses/{reply['id']}/input_items").json()["data"][0]["content"]
    assert [part["text"] for part in kept] == ["What is it?\n[An image was here, but only text can be read.]"]
    body = {**body, "input": "Well?", "previous_response_id": reply["id"]}
    assert http.post("/v1/responses", json=body).status_code == 200


@pytest.mark.parametrize("stored", [False, True])
def test_an_agent_goes_on_with_what_the_package_gave_it(client: openai.OpenAI, stored: bool) -> None:
    asked: Any = {"model": "tiny", "temperature": 0, "include": ["reasoning.encrypted_content"], "store": stored}
    group: Any = {"type": "namespace", "name": "weather", "description": "d", "tools": [WEATHER]}
    tools: Any = {"tools": [group, {"type": "web_search"}], "parallel_tool_calls": False}
    history: Any = [message("user", "How is the weather in Oslo?")]
    cached = 0
    for _ in range(3):
        made = client.responses.create(**asked, **tools, input=history, tool_choice="required")
        [call] = made.output
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.name, call.namespace, json.loads(call.arguments)) == ("get_weather", "weather", {"place": "Oslo"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
        if stored:
            asked["previous_response_id"], history = made.id, [result]
        else:
            history = [*history, *made.output, result]
        assert made.usage is not None and made.usage.input_tokens_details.cached_tokens >= cached
        cached = made.usage.input_tokens // 2
    final = client.responses.create(**asked, **tools, input=history, tool_choice="none", text=SHORT)
    assert json.loads(final.output_text) in ("Hello there.", "Ahoy.")
