"""Qwen3-Coder: a tag for the function and one for each argument. Texts stand between the tags as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cortexmlx.calls.format import CallFormat, Calls, JsonGrammar, json_grammar
from cortexmlx.calls.hermes import CLOSE, OPEN
from cortexmlx.calls.reader import AnswerReader, NotACall, Reading, json_value
from cortexmlx.errors import InvalidRequest
from cortexmlx.structured import lark
from cortexmlx.structured.lark import Specials
from cortexmlx.tools.tool import Tool

VALUE_END = "\n</parameter>"
FUNCTION_END = "</function>"

_Schema = Mapping[str, Any]

_KEY = re.compile(r"[^\s<>](?:[^<>\n]*[^\s<>])?")
"""The names of arguments that can stand in a tag."""

_OF_TEXTS = ("pattern", "format", "minLength", "maxLength")
"""Keywords about texts."""


class QwenCoder(CallFormat):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`, with line breaks between
    them. The schema of an argument says whether its value is a text or JSON.
    """

    name = "Qwen3-Coder"
    trigger = OPEN
    between = f"\n{OPEN}"

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """See `CallFormat.call`."""
        required = tool.schema.get("required", [])
        parts = []
        for place, (key, schema) in enumerate(_arguments(tool).items()):
            begin, value = lark.quoted(f"<parameter={key}>\n"), f"@tool_{number}_{place}"
            end = lark.quoted("\n" if _is_free(schema) else f"{VALUE_END}\n")
            part = f"{begin} {value} {end}"
            parts.append(part if key in required else f"({part})?")
        head = lark.quoted(f"\n<function={tool.name}>\n")
        return f'{head} {" ".join(parts)} {lark.quoted(f"{FUNCTION_END}")} "\\n" {lark.tag(CLOSE, specials)}'

    def notes(self, tool: Tool) -> Iterator[str]:
        """See `CallFormat.notes`. A raw text has no other form."""
        for key, schema in _arguments(tool).items():
            for keyword in _OF_TEXTS:
                if _is_free(schema) and keyword in schema:
                    yield f"{keyword} of {key!r} of the tool {tool.name!r} is not enforced: it is written as raw text"

    def schemas(self, number: int, tool: Tool) -> Iterator[JsonGrammar]:
        """See `CallFormat.schemas`. Each argument has a grammar."""
        bad = next((key for key in _arguments(tool) if not _KEY.fullmatch(key)), None)
        if bad is not None:
            raise _wrong(tool, f"{bad!r:.80} is no name that can stand in a tag")
        if tool.strict and (note := next(self.notes(tool), None)):
            raise _wrong(tool, note)
        shared = {name: part for name, part in tool.schema.items() if name in ("$defs", "definitions")}
        for place, schema in enumerate(_arguments(tool).values()):
            name = f"tool_{number}_{place}"
            if texts := _texts(schema):
                yield {"name": name, "lark_grammar": "\n".join(lark.one_of("start", texts))}
            elif _is_free(schema):
                yield {"name": name, "lark_grammar": "\n".join(lark.up_to("start", VALUE_END, {}))}
            else:
                yield json_grammar(name, {**schema, **shared}, tool.strict, self.separators)

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while (yield from reader.text_up_to(OPEN)):
            yield from reader.blanks()
            yield from reader.exactly("<function=")
            tool = calls.tool((yield from reader.up_to(">")).strip())
            reader.begin_call(tool.name)
            known, said = _arguments(tool), set[str]()
            yield from reader.blanks()
            while (yield from reader.one_of("<parameter=", FUNCTION_END)) != FUNCTION_END:
                key = (yield from reader.up_to(">")).strip()
                if key in said:
                    raise NotACall(f"{key!r} comes twice")
                reader.add_arguments(f"{', ' if said else '{'}{json.dumps(key, ensure_ascii=False)}: ")
                yield from _value(reader, known.get(key, {}))
                yield from reader.blanks()
                said.add(key)
            reader.add_arguments("}" if said else "{}")
            yield from reader.blanks()
            yield from reader.exactly(CLOSE)
            reader.end_call()
            reader.end_calls()


def _wrong(tool: Tool, why: str) -> InvalidRequest:
    return InvalidRequest(f"the parameters of the tool {tool.name!r} cannot be enforced: {why}", field="tools")


def _value(reader: AnswerReader, schema: _Schema) -> Reading[None]:
    """Read a value up to its closing tag, and add it to the arguments as JSON."""
    if (yield from reader.next_char()) == "\n":
        yield from reader.exactly("\n")
    if _types(schema) == {"string"}:
        reader.add_arguments('"')
        yield from reader.pieces_up_to(VALUE_END, lambda piece: json.dumps(piece, ensure_ascii=False)[1:-1])
        reader.add_arguments('"')
        return
    text = yield from reader.up_to(VALUE_END, most=1 << 24)
    reader.add_arguments(_as_json(text, schema))


def _as_json(text: str, schema: _Schema) -> str:
    """Return a value as JSON. Of an argument that may be a text, it is one, unless it is JSON of another type that the
    argument may have.
    """
    types = _types(schema)
    try:
        value = json_value(text)
    except NotACall:
        if "string" in types:
            return json.dumps(text, ensure_ascii=False)
        raise
    if "string" in types and not any(_fits(value, kind) for kind in types - {"string"}):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


_KINDS: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}

_UNTYPED = frozenset({"string", "array", "object"})
"""What a value may be if its schema does not say: a text, unless it is JSON of several parts."""


def _fits(value: object, kind: str) -> bool:
    if kind == "string":
        return isinstance(value, str)
    return isinstance(value, _KINDS.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))


def _arguments(tool: Tool) -> Mapping[str, _Schema]:
    """Return the schemas of a tool's arguments by their names. References are followed."""
    whole = tool.schema
    properties, required = whole.get("properties", {}), whole.get("required", ())
    named = {**properties, **{key: {} for key in required if key not in properties}}
    return {key: _resolved(schema, whole) for key, schema in named.items()}


def _resolved(schema: object, whole: _Schema, depth: int = 0) -> _Schema:
    """Return a schema without a reference at its top."""
    if not isinstance(schema, Mapping):
        return {}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#/") and depth < MOST_REFERENCES:
        found: Any = whole
        for name in target[2:].split("/"):
            found = found.get(name) if isinstance(found, Mapping) else None
        return (
            _resolved({**found, **{k: v for k, v in schema.items() if k != "$ref"}}, whole, depth + 1) if found else {}
        )
    ways = {name: [_resolved(each, whole, depth + 1) for each in schema[name]] for name in _WAYS if name in schema}
    return {**schema, **ways} if depth < MOST_REFERENCES else schema


_WAYS = ("anyOf", "oneOf", "allOf")

MOST_REFERENCES = 8
"""How many references of references are followed."""


def _types(schema: _Schema) -> frozenset[str]:
    """Return the types that values of a schema may have."""
    own = schema.get("type")
    types = {own} if isinstance(own, str) else set(own) if isinstance(own, list) else set[str]()
    types |= {kind for each in _listed(schema) for kind in (*_KINDS, "string") if _fits(each, kind)}
    for way in _WAYS:
        for each in schema.get(way, ()):
            types |= _types(each)
    return frozenset(types) or _UNTYPED


def _is_free(schema: _Schema) -> bool:
    """Whether a value may be any text, which stands as it is."""
    return "string" in _types(schema) and not _texts(schema)


def _texts(schema: _Schema) -> list[str]:
    """Return the values of a schema that lists them, as they are written."""
    return [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in _listed(schema)]


def _listed(schema: _Schema) -> list[Any]:
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed if isinstance(listed, list) else []
