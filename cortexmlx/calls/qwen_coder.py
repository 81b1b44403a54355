"""Qwen3-Coder: a tag for the function and one for each argument. Texts stand between the tags as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from cortexmlx.calls.argument import Argument, arguments, fits, ignored_of_whole, required_of, unresolved
from cortexmlx.calls.format import CallFormat, Calls, JsonGrammar, json_grammar
from cortexmlx.calls.hermes import CLOSE, OPEN
from cortexmlx.calls.reader import AnswerReader, NotACall, Reading, json_value
from cortexmlx.errors import InvalidRequest
from cortexmlx.structured import lark
from cortexmlx.structured.lark import Specials
from cortexmlx.tools.tool import Tool

VALUE_END = "\n</parameter>"
FUNCTION_END = "</function>"

_KEY = re.compile(r"[^\s<>](?:[^<>\n]*[^\s<>])?")
"""The names of arguments that can stand in a tag."""


class QwenCoder(CallFormat):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`, with line breaks between
    them. The schema of an argument says whether its value is a text or JSON.
    """

    name = "Qwen3-Coder"
    trigger = OPEN
    between = f"\n{OPEN}"

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """See `CallFormat.call`."""
        required = required_of(tool)
        parts = []
        for place, (key, argument) in enumerate(arguments(tool).items()):
            begin, value = lark.quoted(f"<parameter={key}>\n"), f"@tool_{number}_{place}"
            end = lark.quoted("\n" if argument.is_free else f"{VALUE_END}\n")
            part = f"{begin} {value} {end}"
            parts.append(part if key in required else f"({part})?")
        head = lark.quoted(f"\n<function={tool.name}>\n")
        return f'{head} {" ".join(parts)} {lark.quoted(f"{FUNCTION_END}")} "\\n" {lark.tag(CLOSE, specials)}'

    def notes(self, tool: Tool) -> Iterator[str]:
        """See `CallFormat.notes`. A raw text has no other form, and each argument is written by itself."""
        for key, argument in arguments(tool).items():
            for keyword in argument.ignored:
                yield f"{keyword} of {key!r} of the tool {tool.name!r} is not enforced: it is written as raw text"
        for keyword in ignored_of_whole(tool):
            yield f"{keyword} of the tool {tool.name!r} is not enforced: each argument is written by itself"

    def schemas(self, number: int, tool: Tool) -> Iterator[JsonGrammar]:
        """See `CallFormat.schemas`. Each argument has a grammar."""
        known = arguments(tool)
        bad = next((key for key in known if not _KEY.fullmatch(key)), None)
        if bad is not None:
            raise _wrong(tool, f"{bad!r:.80} is no name that can stand in a tag")
        if (nowhere := unresolved(tool)) is not None:
            raise _wrong(tool, f"the reference {nowhere!r:.80} leads nowhere in them")
        if tool.strict and (note := next(self.notes(tool), None)):
            raise _wrong(tool, note)
        shared = {name: part for name, part in tool.schema.items() if name in ("$defs", "definitions")}
        for place, argument in enumerate(known.values()):
            name = f"tool_{number}_{place}"
            if any(VALUE_END in text for text in argument.texts):
                raise _wrong(tool, f"a value holds the tag {VALUE_END.strip()}")
            if argument.texts:
                yield {"name": name, "lark_grammar": "\n".join(lark.one_of("start", argument.texts))}
            elif argument.is_free:
                yield {"name": name, "lark_grammar": "\n".join(lark.up_to("start", VALUE_END, {}))}
            else:
                yield json_grammar(name, {**argument.schema, **shared}, tool.strict, self.separators)

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while (yield from reader.text_up_to(OPEN)):
            yield from reader.blanks()
            yield from reader.exactly("<function=")
            tool = calls.tool((yield from reader.up_to(">")).strip())
            reader.begin_call(tool.name)
            known, said = arguments(tool), set[str]()
            yield from reader.blanks()
            while (yield from reader.one_of("<parameter=", FUNCTION_END)) != FUNCTION_END:
                key = (yield from reader.up_to(">")).strip()
                if key in said:
                    raise NotACall(f"{key!r} comes twice")
                reader.add_arguments(f"{', ' if said else '{'}{json.dumps(key, ensure_ascii=False)}: ")
                yield from _value(reader, known.get(key) or Argument({}, {}))
                yield from reader.blanks()
                said.add(key)
            reader.add_arguments("}" if said else "{}")
            yield from reader.blanks()
            yield from reader.exactly(CLOSE)
            reader.end_call()
            reader.end_calls()


def _wrong(tool: Tool, why: str) -> InvalidRequest:
    return InvalidRequest(f"the parameters of the tool {tool.name!r} cannot be enforced: {why}", field="tools")


def _value(reader: AnswerReader, argument: Argument) -> Reading[None]:
    """Read a value up to its closing tag, and add it to the arguments as JSON."""
    if (yield from reader.next_char()) == "\n":
        yield from reader.exactly("\n")
    if argument.types == {"string"}:
        reader.add_arguments('"')
        yield from reader.pieces_up_to(VALUE_END, lambda piece: json.dumps(piece, ensure_ascii=False)[1:-1])
        reader.add_arguments('"')
        return
    text = yield from reader.up_to(VALUE_END, most=1 << 24)
    reader.add_arguments(_as_json(text, argument.types))


def _as_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON. Of an argument that may be a text, it is one, unless it is JSON of another type that the
    argument may have.
    """
    try:
        value = json_value(text)
    except NotACall:
        if "string" in types:
            return json.dumps(text, ensure_ascii=False)
        raise
    if "string" in types and not any(fits(value, kind) for kind in types - {"string"}):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()
