"""Formats that mlx-lm's own parsers read. They have no grammar here, so calls are read when they are complete."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cortexmlx.calls.format import CallFormat, Calls, JsonGrammar
from cortexmlx.calls.reader import AnswerReader, NotACall, Reading
from cortexmlx.structured.lark import Specials
from cortexmlx.tools.tool import Tool

MOST_CALL = 1 << 17
"""How many characters a call may have. Those parsers run on the engine's thread."""


class Foreign(CallFormat):
    """A format that a module of `mlx_lm.tool_parsers` reads."""

    enforced = False

    def __init__(self, module: str) -> None:
        self.name = module
        self._module = module

    def grammar(
        self, calls: Calls, text: str, specials: Specials, opens: str = ""
    ) -> tuple[list[str], list[JsonGrammar]]:
        """There is none."""
        raise NotImplementedError

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """There is none."""
        raise NotImplementedError

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        module = importlib.import_module(f"mlx_lm.tool_parsers.{self._module}")
        begin, end, parse = module.tool_call_start, module.tool_call_end, module.parse_tool_call
        while (yield from reader.text_up_to(begin)):
            text = yield from reader.up_to(end, MOST_CALL)
            for name, arguments in _calls_in(parse, text, [tool.as_mapping() for tool in calls.callable]):
                reader.begin_call(calls.tool(name).name)
                reader.add_arguments(arguments)
                reader.end_call()
            reader.end_calls()


def _calls_in(parse: Callable[..., Any], text: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the names and the arguments of the calls in a text. Raises NotACall if it holds none."""
    try:
        parsed = parse(text, tools)
        listed = parsed if isinstance(parsed, list) else [parsed]
        return [(str(call["name"]), _as_json(call["arguments"])) for call in listed]
    except Exception as error:  # it is other people's code on a model's text
        raise NotACall(f"{type(error).__name__}: {error}") from None


def _as_json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
