"""Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes, Qwen 2.5, Qwen 3 and many others."""

from __future__ import annotations

from cortexmlx.structured import lark
from cortexmlx.structured.calls.format import CallFormat, Calls, json_call, read_json_call
from cortexmlx.structured.calls.reader import AnswerReader, Reading
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.tool import Tool

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class Hermes(CallFormat):
    """A JSON object between two tags for each call."""

    name = "Hermes"
    trigger = OPEN
    between = f"\n{OPEN}"

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """See `CallFormat.call`."""
        return f'"\\n" {json_call(number, tool, "arguments", specials)} "\\n" {lark.tag(CLOSE, specials)}'

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while (yield from reader.text_up_to(OPEN)):
            yield from read_json_call(reader, calls)
            yield from reader.blanks()
            yield from reader.exactly(CLOSE)
            reader.end_call()
            reader.end_calls()
