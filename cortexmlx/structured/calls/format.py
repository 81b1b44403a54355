"""CallFormat: one way in which models write tool calls; and Calls: what the answers of one request may call."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from cortexmlx.structured import lark
from cortexmlx.structured.calls.argument import Arguments, dumped, fits, resolved
from cortexmlx.structured.calls.reader import AnswerReader, CutCall, NotACall, Reading
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.output import Thoughts
from cortexmlx.structured.schemas import allowed_escapes
from cortexmlx.structured.tools import CallDelta, Tool, ToolCall

JsonGrammar = Mapping[str, Any]
"""A grammar of llguidance with a name."""


@dataclass(frozen=True)
class Calls:
    """What the answers of one request may call, in the format of its model."""

    format: CallFormat
    tools: tuple[Tool, ...]
    choice: str = "auto"
    """`tool_choice`: "auto", "none", "required", or the name of a tool."""
    parallel: bool = True
    """`parallel_tool_calls`."""

    @cached_property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.choice in ("auto", "required", tool.name))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What of the tools' schemas the format cannot enforce."""
        return tuple(note for tool in self.callable for note in self.format.notes(tool))

    @property
    def several(self) -> bool:
        """Whether an answer may have several calls. One of a named tool is the only one."""
        return self.parallel and self.choice in ("auto", "required")

    @property
    def required(self) -> bool:
        """Whether an answer must have a call."""
        return self.choice not in ("auto", "none")

    @property
    def enforced(self) -> bool:
        """Whether a grammar holds the calls to their schemas."""
        strict = self.required or not self.parallel or any(tool.strict for tool in self.callable)
        return self.format.enforced and (self.format.always_enforced or strict)

    def tool(self, name: str) -> Tool:
        """Return the tool of this name. Raises NotACall if the answer may not call it."""
        for tool in self.callable:
            if tool.name == name:
                return tool
        raise NotACall(f"there is no tool {name!r}")

    def arguments(self, name: str) -> Arguments:
        """Return the arguments of the tool of this name."""
        if name not in self._known:
            self._known[name] = Arguments(self.tool(name))
        return self._known[name]

    def misfit(self, call: ToolCall) -> str:
        """Return a note if a call does not fit the schema of its tool; empty if it does."""
        if call.name not in self._schemas:
            self._schemas[call.name] = closed(self.tool(call.name).schema)
        why = misfit(call.values, self._schemas[call.name])
        return f"the call of {call.name!r} does not fit its schema: {why}" if why else ""

    @cached_property
    def _known(self) -> dict[str, Arguments]:
        return {}

    @cached_property
    def _schemas(self) -> dict[str, Mapping[str, Any]]:
        return {}

    def parser(self, key: str, streamed: bool) -> CallParser | None:
        """Return a parser for one answer, or None if it calls nothing. `key` is another one for each answer: the ids of
        its calls are made of it. See `AnswerReader` for `streamed`.
        """
        return CallParser(self, key, streamed) if self.callable else None


class CallFormat(ABC):
    """One way to write calls. Most formats have a `trigger`: the text with which the first call begins. It occurs in no
    other text.
    """

    name: str
    enforced: bool = True
    """Whether there is a grammar, so that calls can be held to their schemas."""
    always_enforced: bool = True
    """Whether calls are held to their schemas also where the model may choose. Otherwise they are read as it writes
    them, unless a call is required, one at most is allowed, or a tool is strict.
    """
    trigger: str = ""
    opener: int | None = None
    """The token that is the trigger; None: it is written with several."""
    opening: str = ""
    """What stands between the trigger and the first call, as a part of a rule."""
    between: str = ""
    """What stands between two calls."""
    close: str = ""
    """What stands after all calls."""
    separators: tuple[str, str] = (", ", ": ")
    """What stands between the items of JSON, and between a key and its value, as the chat templates write it."""
    parallel: bool = True
    """Whether the format has answers with several calls."""

    def thoughts(self, thoughts: Thoughts | None) -> Thoughts | None:
        """Return how thoughts are told apart from an answer that may have calls."""
        return thoughts

    def call_id(self, key: str) -> str:
        """Return the id of a call."""
        return f"call_{blake2b(key.encode(), digest_size=12).hexdigest()}"

    def grammar(
        self, calls: Calls, text: str, specials: Specials, opens: str = ""
    ) -> tuple[list[str], list[JsonGrammar]]:
        """Return the rules of `answer`, and the grammars that they use. `text` is the rule of an answer without calls,
        if it must have a form; empty: it is free. A free answer does not begin with the tag `opens`: after it are
        thoughts, in which a trigger begins no call.
        """
        begin = lark.tag(self.trigger, specials)
        free = text or "free_text"
        rules = [f"answer: {free}"]
        if calls.callable:
            rest = self._calls(calls, specials)
            if calls.required:
                rules = [f"answer: {begin} calls"]
            elif text:
                rules = [f"answer: {text} | {begin} calls"]
            else:
                rules = ["answer: free_text | lead calls", *self._lead(specials, opens)]
            rules += rest
        if not text and not calls.required:
            rules += ["free_text: FREE_TEXT", f"FREE_TEXT: {lark.without(self.trigger, opens)}"]
        return rules, [
            each for number, tool in enumerate(calls.callable) for each in self.schemas(number, tool, specials)
        ]

    def _lead(self, specials: Specials, opens: str) -> list[str]:
        """Return the rules of free text up to the trigger, with the trigger."""
        if isinstance(lark.parts(self.trigger, specials)[0], int):
            return [f"lead: free_text? {lark.tag(self.trigger, specials)}"]
        return lark.up_to("lead", self.trigger, specials, opens)

    def _calls(self, calls: Calls, specials: Specials) -> list[str]:
        """Return the rules of all calls after the trigger."""
        more = f"({self._between(specials)} call)*"
        several = self.parallel and calls.several
        end = self._closing(specials)
        ways = [self.call(number, tool, specials) for number, tool in enumerate(calls.callable)]
        return [f"calls: {self.opening} call {more if several else ''} {end}", *_choice("call", ways)]

    def _between(self, specials: Specials) -> str:
        """Return what stands between two calls, as a part of a rule."""
        return lark.tag(self.between, specials) if self.between else ""

    def _closing(self, specials: Specials) -> str:
        """Return what stands after all calls, as a part of a rule."""
        return lark.tag(self.close, specials) if self.close else ""

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """Return one call of a tool, as a part of a rule. A format that is not `enforced` has none."""
        raise NotImplementedError

    def notes(self, tool: Tool) -> Iterator[str]:
        """Yield what of a tool's schema this format cannot enforce, besides what no grammar can."""
        yield from ()

    def schemas(self, number: int, tool: Tool, specials: Specials) -> Iterator[JsonGrammar]:
        """Yield the grammars that `call` uses. Raises InvalidRequest for a schema that this format cannot write."""
        yield json_grammar(f"tool_{number}", closed(tool.schema), tool.strict, self.separators)

    @abstractmethod
    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """Read a whole answer. It may be left at NotACall, and is then begun again with the text that follows."""


class CallParser:
    """Parts the text of one answer into text and calls, piece by piece. The parts do not depend on how the text was
    cut.
    """

    def __init__(self, calls: Calls, key: str, streamed: bool) -> None:
        ids = _numbered(key, calls.format.call_id)
        self._reader = AnswerReader(ids, streamed)
        self._begin: Callable[[], Reading[None]] = lambda: calls.format.parse(self._reader, calls)
        self._parse = self._begin()
        self._over = False
        self._calls = calls
        self._checked = 0
        self.notes: list[str] = []
        """What of the complete calls does not fit the schemas of their tools."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The complete calls so far."""
        return tuple(self._reader.calls)

    @property
    def ends_with_calls(self) -> bool:
        """Whether the answer so far ends with a complete call, or with blanks after one."""
        reader = self._reader
        return bool(reader.calls) and not (reader.said_after_calls or reader.reads_call or reader.in_section)

    def feed(self, text: str) -> tuple[str, tuple[CallDelta, ...]]:
        """Take the next text of the answer. Return the text and the pieces of calls that are certain now."""
        self._reader.add(text)
        return self._read()

    def rest(self) -> tuple[str, tuple[CallDelta, ...]]:
        """Return what was held back: no more text comes."""
        self._reader.ended = True
        return self._read()

    def _read(self) -> tuple[str, tuple[CallDelta, ...]]:
        reader = self._reader
        while not self._over:
            try:
                next(self._parse)
                break
            except StopIteration:
                self._over = True
            except CutCall:
                reader.drop_call(cut=True)
                self._over = True
            except NotACall:
                reader.drop_call()
                self._parse = self._begin()
        while self._checked < len(reader.calls):
            if note := self._calls.misfit(reader.calls[self._checked]):
                self.notes.append(note)
            self._checked += 1
        if not reader.text and not reader.deltas:
            return "", ()
        text, deltas = "".join(reader.text), tuple(reader.deltas)
        reader.text, reader.deltas = [], []
        return text, deltas


def json_grammar(name: str, schema: Mapping[str, Any], strict: bool, separators: Sequence[str]) -> JsonGrammar:
    """Return the grammar of JSON of a schema."""
    own = schema.get("x-guidance")
    options: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    options |= {"whitespace_flexible": False, "item_separator": separators[0], "key_separator": separators[1]}
    if not strict:
        options |= {"lenient": True, "coerce_one_of": True}
    elif (escapes := allowed_escapes(schema)) is not None:
        options.setdefault("json_allowed_escapes", escapes)
    return {"name": name, "json_schema": {**schema, "x-guidance": options}}


_ARGUMENTS = ("arguments", "parameters")

_COMPOSED = ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments without other properties than those it names, unless it says more about
    them. Models would invent some.
    """
    if schema.keys().isdisjoint(_COMPOSED):
        return {**schema, "properties": schema.get("properties", {}), "additionalProperties": False}
    return schema


def json_call(number: int, tool: Tool, key: str, specials: Specials) -> str:
    """Return a call as a JSON object with the tool's name and its arguments, as a part of a rule."""
    head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
    return f'{lark.quoted(head)} @tool_{number} "}}"'


def read_json_call(reader: AnswerReader, calls: Calls) -> Reading[None]:
    """Read a call as a JSON object, with a name and arguments in any order. The caller ends it."""
    yield from reader.blanks()
    yield from reader.exactly("{")
    yield from reader.blanks()
    first = yield from reader.json_string()
    yield from _after(reader, ":")
    if first in _ARGUMENTS:
        arguments = yield from reader.json_text()
        yield from _key(reader, ("name",))
        reader.begin_call(calls.tool((yield from reader.json_string())).name)
        reader.add_arguments(arguments)
    elif first == "name":
        reader.begin_call(calls.tool((yield from reader.json_string())).name)
        yield from _key(reader, _ARGUMENTS)
        yield from reader.json_arguments()
    else:
        raise NotACall(f"{first!r} is no part of a call")
    yield from reader.blanks()
    if (yield from reader.one_of("}", ",")) == ",":  # some templates show ids, so a model may write one
        yield from reader.blanks()
        if (yield from reader.json_string()) != "id":
            raise NotACall("a call has a name and arguments")
        yield from _after(reader, ":")
        yield from reader.json_string()
        yield from reader.blanks()
        yield from reader.exactly("}")


def _key(reader: AnswerReader, names: Sequence[str]) -> Reading[None]:
    """Skip the next key of a JSON object, with the signs around it. Raises NotACall if it has another name."""
    yield from _after(reader, ",")
    if (yield from reader.json_string()) not in names:
        raise NotACall(f"{names[0]!r} is missing")
    yield from _after(reader, ":")


def _after(reader: AnswerReader, sign: str) -> Reading[None]:
    yield from reader.blanks()
    yield from reader.exactly(sign)
    yield from reader.blanks()


def _choice(name: str, ways: Sequence[str]) -> list[str]:
    """Return the rules of one of several ways, each with a rule of its own."""
    numbered = [f"{name}_{number}: {way}" for number, way in enumerate(ways)]
    return [f"{name}: {' | '.join(f'{name}_{number}' for number in range(len(ways)))}", *numbered]


def _numbered(key: str, make: Callable[[str], str]) -> Iterator[str]:
    """Yield the ids of the calls of an answer."""
    number = 0
    while True:
        yield make(f"{key}/{number}")
        number += 1


# Checks a call's arguments against the schema of its tool, with an upper bound of the work.


Schema = Mapping[str, Any]

MOST_STEPS = 20_000
"""How many pairs of a value and a schema are compared: some 20 ms on the engine's thread. The rest is not checked."""

_LIMITS: tuple[tuple[str, Callable[[Any, Any], bool], tuple[type, ...]], ...] = (
    ("minimum", lambda value, limit: value >= limit, (int, float)),
    ("maximum", lambda value, limit: value <= limit, (int, float)),
    ("exclusiveMinimum", lambda value, limit: value > limit, (int, float)),
    ("exclusiveMaximum", lambda value, limit: value < limit, (int, float)),
    ("minLength", lambda value, limit: len(value) >= limit, (str,)),
    ("maxLength", lambda value, limit: len(value) <= limit, (str,)),
    ("minItems", lambda value, limit: len(value) >= limit, (list,)),
    ("maxItems", lambda value, limit: len(value) <= limit, (list,)),
)
"""Keywords with a limit, what it means, and the types that it is for."""


def misfit(value: object, schema: Schema) -> str:
    """Return why a value does not fit a schema; empty if it does. `pattern`, `format`, `multipleOf` and `not` are not
    checked: an expression of a stranger may take any time.
    """
    try:
        return _Check(schema).misfit(value, schema, "the arguments")
    except RecursionError:
        return ""


class _Check:
    """One check against a whole schema, in which references are looked up."""

    def __init__(self, whole: Schema) -> None:
        self._whole = whole
        self._steps = 0

    def misfit(self, value: object, schema: object, place: str) -> str:
        self._steps += 1
        if self._steps > MOST_STEPS or schema is True:
            return ""
        if schema is False:
            return f"{place} must not be there"
        own = resolved(schema, self._whole)
        if not own:
            return ""
        return (
            self._other_type(value, own, place)
            or self._beyond(value, own, place)
            or self._of_parts(value, own, place)
            or self._of_ways(value, own, place)
        )

    def _other_type(self, value: object, schema: Schema, place: str) -> str:
        said = schema.get("type")
        kinds = [said] if isinstance(said, str) else said if isinstance(said, list) else []
        if kinds and not any(isinstance(kind, str) and _is(value, kind) for kind in kinds):
            return f"{place} is {_shown(value)}, but must be of the type {' or '.join(map(str, kinds))}"
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list):
            self._steps += len(listed)
            if not any(_same(value, each) for each in listed):
                return f"{place} is {_shown(value)}, which is none of the values that are listed"
        return ""

    def _beyond(self, value: object, schema: Schema, place: str) -> str:
        for keyword, holds, kinds in _LIMITS:
            limit = schema.get(keyword)
            limited = _is(limit, "number") and isinstance(value, kinds) and not isinstance(value, bool)
            if limited and not holds(value, limit):
                return f"{place} is {_shown(value)}, against {keyword} {limit}"
        return ""

    def _of_parts(self, value: object, schema: Schema, place: str) -> str:
        if isinstance(value, dict):
            return self._of_object(value, schema, place)
        items = schema.get("items", True)
        before = schema.get("prefixItems")
        before = before if isinstance(before, list) else []
        for number, item in enumerate(value if isinstance(value, list) else ()):
            part = before[number] if number < len(before) else items
            if self._steps > MOST_STEPS or (part is True and number >= len(before)):
                break
            if why := self.misfit(item, part, f"{place}[{number}]"):
                return why
        return ""

    def _of_object(self, value: dict[str, Any], schema: Schema, place: str) -> str:
        required = schema.get("required")
        for name in required if isinstance(required, list) else ():
            if isinstance(name, str) and name not in value:
                return f"{name!r:.80} of {place} is missing"
        known = schema.get("properties")
        known = known if isinstance(known, Mapping) else {}
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        for name, inner in value.items():
            part = known.get(name, others)
            if part is False and name not in known:
                return f"{name!r:.80} is not a part of {place}"
            if why := self.misfit(inner, part, f"{name!r:.80}"):
                return why
        return ""

    def _of_ways(self, value: object, schema: Schema, place: str) -> str:
        parts = schema.get("allOf")
        for part in parts if isinstance(parts, list) else ():
            if why := self.misfit(value, part, place):
                return why
        for keyword in ("anyOf", "oneOf"):
            ways = schema.get(keyword)
            if isinstance(ways, list) and ways and all(self.misfit(value, way, place) for way in ways):
                return f"{place} is {_shown(value)}, which is none of what {keyword} allows"
        return ""


def _is(value: object, kind: str) -> bool:
    return fits(value, kind) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _shown(value: object) -> str:
    text = dumped(value) if not isinstance(value, dict | list) else repr(type(value).__name__)
    return text if len(text) <= 80 else f"{text[:80]}..."
