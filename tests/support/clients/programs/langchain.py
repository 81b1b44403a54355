"""More of LangChain: streams, calls and forms."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Person(BaseModel):
    """A form."""

    name: str
    age: int


def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


weather.__module__ = "a tool"  # no function of these tests


def stream(names: Any) -> Any:
    """A streamed answer."""
    return "".join(piece.content for piece in names["model"].stream("Say hello."))


def calls(names: Any) -> Any:
    """A call, its result, and the answer."""
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = names["model"].bind_tools([weather])
    asked = HumanMessage("What is the weather in Oslo?")
    said = bound.invoke([asked])
    [made] = said.tool_calls
    return bound.invoke([asked, said, ToolMessage(weather(**made["args"]), tool_call_id=made["id"])]).content


def form(names: Any) -> Any:
    """An answer of a type."""
    return names["model"].with_structured_output(Person).invoke("Ada is 36 years old.").model_dump()


def form_of_a_call(names: Any) -> Any:
    """An answer of a type, as the arguments of a call."""
    made = names["model"].with_structured_output(Person, method="function_calling")
    return made.invoke("Ada is 36 years old.").model_dump()


def responses(names: Any) -> Any:
    """By the other protocol."""
    from langchain_openai import ChatOpenAI

    shown = names["model"]
    return (
        ChatOpenAI(model="local", base_url=shown.openai_api_base, api_key=shown.openai_api_key, use_responses_api=True)
        .invoke("Say hello.")
        .content[0]["text"]
    )
