"""LangChain's own class for Ollama: streams, calls and forms."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Person(BaseModel):
    """A form."""

    name: str
    age: int


def model(names: Any, **options: Any) -> Any:
    """Its class, for the server of the page's client."""
    from langchain_ollama import ChatOllama

    url = str(names["client"]._client.base_url)
    return ChatOllama(model="local", base_url=url, validate_model_on_init=True, **options)


model.__module__ = "no result"


def stream(names: Any) -> Any:
    """A streamed answer."""
    return "".join(piece.content for piece in model(names, num_ctx=8192).stream("Say hello."))


def calls(names: Any) -> Any:
    """A call, its result, and the answer."""
    from langchain_core.messages import HumanMessage, ToolMessage

    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    bound = model(names).bind_tools([{"type": "function", "function": {"name": "weather", "parameters": schema}}])
    asked = HumanMessage("What is the weather in Oslo?")
    said = bound.invoke([asked])
    [made] = said.tool_calls
    result = ToolMessage(f"rain in {made['args']['city']}", tool_call_id=made["id"])
    return bound.invoke([asked, said, result]).content


def form(names: Any) -> Any:
    """An answer of a type."""
    return model(names).with_structured_output(Person).invoke("Ada is 36 years old.").model_dump()
