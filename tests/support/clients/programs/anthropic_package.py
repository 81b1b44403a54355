"""More of anthropic: streams, calls, thoughts and counts."""

from __future__ import annotations

from typing import Any

HELLO: Any = [{"role": "user", "content": "Say hello."}]
ASK: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOLS: Any = [
    {
        "name": "weather",
        "description": "The weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


def stream(names: Any) -> Any:
    """A streamed answer, with its usage."""
    with names["client"].messages.stream(model="local", max_tokens=100, messages=HELLO) as events:
        text = "".join(events.text_stream)
        return [text, events.get_final_message().usage.output_tokens > 1]


def calls(names: Any) -> Any:
    """A call, its result, and the answer."""
    create = names["client"].messages.create
    said = create(model="local", max_tokens=100, messages=ASK, tools=TOOLS)
    [made] = [block for block in said.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": made.id, "content": f"rain in {made.input['city']}"}
    then = [*ASK, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
    return [said.stop_reason, create(model="local", max_tokens=100, messages=then, tools=TOOLS).content[0].text]


def streamed_call(names: Any) -> Any:
    """The arguments of a call in a stream."""
    with names["client"].messages.stream(model="local", max_tokens=100, messages=ASK, tools=TOOLS) as events:
        return events.get_final_message().content[-1].input


def counted(names: Any) -> Any:
    """The tokens of a prompt, counted alone, are those that its answer says."""
    counted = names["client"].messages.count_tokens(model="local", messages=HELLO).input_tokens
    usage = names["client"].messages.create(model="local", max_tokens=100, messages=HELLO).usage
    return counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
