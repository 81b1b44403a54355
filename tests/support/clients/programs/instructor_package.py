"""More of instructor: the ways in which it asks for a form."""

from __future__ import annotations

from typing import Any

ADA: Any = [{"role": "user", "content": "Ada is 36 years old."}]


def modes(names: Any) -> Any:
    """By a call, by JSON, and by a schema."""
    instructor, openai, real = names["instructor"], names["openai"], names["client"].client
    made = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=real.base_url, api_key="none"), mode=mode)
        done = client.chat.completions.create(model="local", response_model=names["Person"], messages=ADA)
        made.append(done.model_dump())
    return made


def pieces(names: Any) -> Any:
    """A form that grows while it is written."""
    *_, last = names["client"].chat.completions.create_partial(
        model="local", response_model=names["Person"], messages=ADA
    )
    return last.model_dump()
