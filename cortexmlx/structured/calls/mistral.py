"""Mistral's two formats: a list of JSON objects, and since 2025 a name and its arguments after tags."""

from __future__ import annotations

from hashlib import blake2b

from cortexmlx.structured import lark
from cortexmlx.structured.calls.format import CallFormat, Calls, json_call, read_json_call
from cortexmlx.structured.calls.reader import AnswerReader, NotACall, Reading
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.tool import Tool

TRIGGER = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"


class _Mistral(CallFormat):
    trigger = TRIGGER

    def call_id(self, key: str) -> str:
        """Return the id of a call, which has nine characters, as the chat templates demand."""
        return blake2b(key.encode(), digest_size=5).hexdigest()[:9]


class MistralList(_Mistral):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""

    name = "Mistral list"
    opening = '" "? "["'
    between = ", "
    close = "]"

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """See `CallFormat.call`."""
        return json_call(number, tool, "arguments", specials)

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while (yield from reader.text_up_to(TRIGGER)):
            yield from reader.blanks()
            yield from reader.exactly("[")
            sign = ","
            while sign == ",":
                yield from read_json_call(reader, calls)
                reader.end_call()
                yield from reader.blanks()
                sign = yield from reader.one_of(",", "]")
            reader.end_calls()


class MistralTags(_Mistral):
    """`[TOOL_CALLS]name[ARGS]{...}`, again for each call; some write an id after `[CALL_ID]`."""

    name = "Mistral"
    between = TRIGGER

    def __init__(self, with_id: bool) -> None:
        self._with_id = with_id

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """See `CallFormat.call`."""
        known = f"{lark.tag(CALL_ID, specials)} /[a-zA-Z0-9]{{9}}/ " if self._with_id else ""
        return f"{lark.quoted(tool.name)} {known}{lark.tag(ARGUMENTS, specials)} @tool_{number}"

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while (yield from reader.text_up_to(TRIGGER)):
            name, by_tag, known = (yield from reader.up_to(ARGUMENTS)).partition(CALL_ID)
            if by_tag and not (len(known) == 9 and known.isalnum() and known.isascii()):
                raise NotACall("the id of a call has nine letters and digits")
            reader.begin_call(calls.tool(name.strip()).name, known)
            yield from reader.blanks()
            yield from reader.json_arguments()
            reader.end_call()
            reader.end_calls()
