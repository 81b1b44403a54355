"""More of openai: streams, calls and forms of both protocols."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HELLO: Any = [{"role": "user", "content": "Say hello."}]
ASK: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
ADA: Any = [{"role": "user", "content": "Ada is 36 years old."}]


class Person(BaseModel):
    """A form."""

    name: str
    age: int


def stream(names: Any) -> Any:
    """A streamed answer, with its usage."""
    options = {"include_usage": True}
    chunks = list(
        names["client"].chat.completions.create(model="local", messages=HELLO, stream=True, stream_options=options)
    )
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    return [text, chunks[-1].usage.completion_tokens > 1]


def calls(names: Any) -> Any:
    """A call, its result, and the answer."""
    create = names["client"].chat.completions.create
    tools = [{"type": "function", "function": WEATHER}]
    said = create(model="local", messages=ASK, tools=tools).choices[0].message
    [made] = said.tool_calls
    result = {"role": "tool", "tool_call_id": made.id, "content": f"rain: {made.function.arguments}"}
    return create(model="local", messages=[*ASK, said, result], tools=tools).choices[0].message.content


def form(names: Any) -> Any:
    """An answer of a type."""
    done = names["client"].chat.completions.parse(model="local", messages=ADA, response_format=Person)
    return done.choices[0].message.parsed.model_dump()


def responses(names: Any) -> Any:
    """Whole and streamed, a call, and an answer of a type."""
    made = names["client"].responses
    whole = made.create(model="local", input="Say hello.").output_text
    with made.stream(model="local", input="Say hello.") as events:
        streamed = events.get_final_response().output_text if list(events) else None
    tools = [{"type": "function", **WEATHER}]
    [called] = made.create(model="local", input=ASK, tools=tools).output
    result = {"type": "function_call_output", "call_id": called.call_id, "output": f"rain: {called.arguments}"}
    after = made.create(model="local", input=[*ASK, called.model_dump(exclude_none=True), result], tools=tools)
    parsed = made.parse(model="local", input=ADA, text_format=Person).output_parsed
    return [whole, streamed, after.output_text, parsed.model_dump()]
