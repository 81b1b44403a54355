"""Formats with a name and a JSON object between tags: DeepSeek V3, R1 and V3.1, and Kimi K2."""

from __future__ import annotations

import re

from cortexmlx.structured import lark
from cortexmlx.structured.calls.format import CallFormat, Calls
from cortexmlx.structured.calls.reader import AnswerReader, NotACall, Reading
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.tool import Tool

DEEPSEEK = "<｜tool▁calls▁begin｜>"
KIMI = "<|tool_calls_section_begin|>"

_FUNCTIONS = "functions."
_NUMBER = re.compile(r":\d+")


class JsonSection(CallFormat):
    """All calls stand between two tags, and each call between two more."""

    def __init__(self, name: str, section: tuple[str, str], call: tuple[str, str], after_name: str) -> None:
        self.name = name
        self.trigger, self.close = section
        self._begin, self._end = call
        self._after_name = after_name

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """See `CallFormat.call`."""
        return f"{self._head(tool, specials)} @tool_{number} {lark.tag(self._end, specials)}"

    def _head(self, tool: Tool, specials: Specials) -> str:
        return lark.tag(f"{self._begin}{tool.name}{self._after_name}", specials)

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while (yield from reader.next_in_section(self.trigger, self._begin, self.close)):
            self._begin_call(reader, calls, (yield from reader.up_to(self._after_name)).strip())
            yield from reader.blanks()
            yield from reader.json_arguments()
            yield from reader.blanks()
            yield from reader.exactly(self._end.lstrip())
            reader.end_call()

    def _begin_call(self, reader: AnswerReader, calls: Calls, name: str) -> None:
        reader.begin_call(calls.tool(name).name)


class Kimi(JsonSection):
    """A name is a part of the call's id: `functions.NAME:NUMBER`."""

    always_enforced = False

    def __init__(self) -> None:
        section = KIMI, "<|tool_calls_section_end|>"
        super().__init__(
            "Kimi K2", section, ("<|tool_call_begin|>", "<|tool_call_end|>"), "<|tool_call_argument_begin|>"
        )

    def _head(self, tool: Tool, specials: Specials) -> str:
        begin = lark.tag(f"{self._begin}{_FUNCTIONS}{tool.name}:", specials)
        return f"{begin} /[0-9]{{1,5}}/ {lark.tag(self._after_name, specials)}"

    def _begin_call(self, reader: AnswerReader, calls: Calls, name: str) -> None:
        path, sign, number = name.rpartition(":")
        if not _NUMBER.fullmatch(sign + number):
            raise NotACall(f"{name!r:.80} is no id of a call")
        reader.begin_call(calls.tool(path.removeprefix(_FUNCTIONS)).name)


def deepseek(fenced: bool) -> JsonSection:
    """Return the format of V3.1, or that of V3 and R1 (`fenced`), which write a type, and a fence of Markdown."""
    separator = "<｜tool▁sep｜>"
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    found = JsonSection(
        "DeepSeek",
        (DEEPSEEK, "<｜tool▁calls▁end｜>"),
        (f"{begin}function{separator}", f"\n```{end}") if fenced else (begin, end),
        "\n```json\n" if fenced else separator,
    )
    found.between = "\n" if fenced else ""
    return found
