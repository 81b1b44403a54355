"""Answers as the engine tells them, in pieces that hypothesis draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from cortexmlx.structured.tools import CallDelta
from cortexmlx.types.request import Completion, TokenEvent


def pieces(draw: Any, text: str) -> list[str]:
    """The text in pieces."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def events(draw: Any, answer: Completion) -> Iterator[TokenEvent]:
    """Thoughts, text, calls; or all with the end."""
    if draw(st.booleans()):
        for piece in pieces(draw, answer.thinking):
            yield TokenEvent("", thinking=piece)
        for piece in pieces(draw, answer.text):
            yield TokenEvent(piece)
        for number, call in enumerate(answer.tool_calls[: draw(st.integers(0, len(answer.tool_calls)))]):
            first, *others = pieces(draw, call.arguments)
            yield TokenEvent("", tool_calls=(CallDelta(number, call.id, call.name, first),))
            for piece in others:
                yield TokenEvent("", tool_calls=(CallDelta(number, arguments=piece),))
    yield TokenEvent("", finish_reason=answer.finish_reason, completion=answer)
