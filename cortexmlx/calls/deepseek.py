"""DeepSeek V3, R1 and V3.1: calls between special tokens."""

from __future__ import annotations

from cortexmlx.calls.format import CallFormat, Calls
from cortexmlx.calls.reader import AnswerReader, Reading
from cortexmlx.structured import lark
from cortexmlx.structured.lark import Specials
from cortexmlx.tools.tool import Tool

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


class DeepSeek(CallFormat):
    """A name, a separator and a JSON object (V3.1). V3 and R1 (`fenced`) write more around them: a type, and a fence of
    Markdown.
    """

    name = "DeepSeek"
    trigger = CALLS_BEGIN
    close = CALLS_END

    def __init__(self, fenced: bool) -> None:
        kind, self._open, self._end = ("function", "\n```json\n", "\n```") if fenced else ("", "", "")
        self._begin = f"{CALL_BEGIN}{kind}{SEPARATOR if fenced else ''}"
        self._after_name = self._open or SEPARATOR
        self.between = "\n" if fenced else ""

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """See `CallFormat.call`."""
        head = lark.tag(f"{self._begin}{tool.name}{self._after_name}", specials)
        return f"{head} @tool_{number} {lark.tag(f'{self._end}{CALL_END}', specials)}"

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while (yield from reader.text_up_to(CALLS_BEGIN)):
            tag = yield from _next(reader, CALL_BEGIN)
            while tag == CALL_BEGIN:
                yield from reader.exactly(self._begin.removeprefix(CALL_BEGIN))
                name = yield from reader.up_to(self._after_name)
                reader.begin_call(calls.tool(name.strip()).name)
                yield from reader.blanks()
                yield from reader.json_arguments()
                yield from reader.blanks()
                yield from reader.exactly(self._end.strip())
                yield from _next(reader, CALL_END)
                reader.end_call()
                tag = yield from _next(reader, CALL_BEGIN, CALLS_END)
            reader.end_calls()


def _next(reader: AnswerReader, *tags: str) -> Reading[str]:
    yield from reader.blanks()
    return (yield from reader.one_of(*tags))
