"""More of pydantic-ai: streams, tools that run, and forms."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput


class Person(BaseModel):
    """A form."""

    name: str
    age: int


def stream(names: Any) -> Any:
    """A streamed answer."""
    return "".join(Agent(names["model"]).run_stream_sync("Say hello.").stream_text(delta=True))


def calls(names: Any) -> Any:
    """A tool that runs, and the answer."""
    agent = Agent(names["model"])

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    return agent.run_sync("What is the weather in Oslo?").output


def form_of_a_call(names: Any) -> Any:
    """An answer of a type, as the arguments of a call."""
    return Agent(names["model"], output_type=Person).run_sync("Ada is 36 years old.").output.model_dump()


def form(names: Any) -> Any:
    """An answer of a type."""
    agent = Agent(names["model"], output_type=NativeOutput(Person))
    return agent.run_sync("Ada is 36 years old.").output.model_dump()
