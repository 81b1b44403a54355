"""LangChain by Anthropic's protocol."""

from __future__ import annotations

from typing import Any


def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


weather.__module__ = "a tool"  # no function of these tests


def _model(names: Any) -> Any:
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model="local", base_url=str(names["client"].base_url), api_key="none", max_tokens=200)


_model.__module__ = "a helper"


def stream(names: Any) -> Any:
    """A streamed answer."""
    return "".join(piece.text for piece in _model(names).stream("Say hello."))


def calls(names: Any) -> Any:
    """A call, its result, and the answer."""
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = _model(names).bind_tools([weather])
    asked = HumanMessage("What is the weather in Oslo?")
    said = bound.invoke([asked])
    [made] = said.tool_calls
    return bound.invoke([asked, said, ToolMessage(weather(**made["args"]), tool_call_id=made["id"])]).content
