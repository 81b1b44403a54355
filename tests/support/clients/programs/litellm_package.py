"""More of litellm: streams, calls and forms."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class Person(BaseModel):
    """A form."""

    name: str
    age: int


def stream(names: Any) -> Any:
    """A streamed answer."""
    chunks = names["litellm"].completion(**names["local"], messages=names["question"], stream=True)
    return "".join(each.choices[0].delta.content or "" for each in chunks)


def calls(names: Any) -> Any:
    """A call, its result, and the answer."""
    tools = [{"type": "function", "function": WEATHER}]
    asked = [{"role": "user", "content": "What is the weather in Oslo?"}]
    said = names["litellm"].completion(**names["local"], messages=asked, tools=tools).choices[0].message
    [made] = said.tool_calls
    result = {"role": "tool", "tool_call_id": made.id, "content": f"rain: {made.function.arguments}"}
    done = names["litellm"].completion(**names["local"], messages=[*asked, said, result], tools=tools)
    return done.choices[0].message.content


def form(names: Any) -> Any:
    """An answer of a type."""
    asked = [{"role": "user", "content": "Ada is 36 years old."}]
    done = names["litellm"].completion(**names["local"], messages=asked, response_format=Person)
    return Person.model_validate_json(done.choices[0].message.content).model_dump()
