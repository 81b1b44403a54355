"""CallFormat: one way in which models write tool calls. AllowedCalls: which tools the answers of a request may call."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from cortexmlx.structured import lark
from cortexmlx.structured.calls.argument import Arguments, has_json_type, resolve_reference, to_json_text
from cortexmlx.structured.calls.reader import AnswerReader, NotACall, Reading
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.output import Thoughts
from cortexmlx.structured.schemas import allowed_escapes
from cortexmlx.structured.tools import CallDelta, Tool, ToolCall

JsonGrammar = Mapping[str, Any]
"""A grammar of llguidance with a name."""


@dataclass(frozen=True)
class AllowedCalls:
    """Which tools the answers of one request may call, and in which format."""

    format: CallFormat
    tools: tuple[Tool, ...]
    choice: str = "auto"
    """`tool_choice`: "auto", "none", "required", or the name of a tool."""
    parallel: bool = True
    """`parallel_tool_calls`."""

    @cached_property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.choice in ("auto", "required", tool.name))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Notes on parts of the tools' schemas that the format cannot enforce."""
        return tuple(note for tool in self.callable_tools for note in self.format.notes(tool))

    @property
    def allows_several(self) -> bool:
        """Whether an answer may have several calls. If the request names a tool, the answer may have one only."""
        return self.parallel and self.choice in ("auto", "required")

    @property
    def is_required(self) -> bool:
        """Whether an answer must have a call."""
        return self.choice not in ("auto", "none")

    @property
    def is_enforced(self) -> bool:
        """Whether a grammar makes the calls fit their schemas."""
        strict = self.is_required or not self.parallel or any(tool.strict for tool in self.callable_tools)
        return self.format.always_enforced or strict

    def tool(self, name: str) -> Tool:
        """Return the tool of this name. Raises NotACall if the answer may not call it."""
        for tool in self.callable_tools:
            if tool.name == name:
                return tool
        raise NotACall(f"there is no tool {name!r}")

    def arguments(self, name: str) -> Arguments:
        """Return the arguments, by name, of the tool called `name`."""
        if name not in self._arguments_by_tool:
            self._arguments_by_tool[name] = Arguments(self.tool(name))
        return self._arguments_by_tool[name]

    def misfit_note(self, name: str, values: Mapping[str, Any]) -> str:
        """Return a note that says why a call's arguments do not fit the schema of its tool; empty if they fit."""
        if name not in self._schemas_by_tool:
            self._schemas_by_tool[name] = close_arguments(self.tool(name).schema)
        reason = find_misfit(values, self._schemas_by_tool[name])
        return f"the call of {name!r} does not fit its schema: {reason}" if reason else ""

    @cached_property
    def _arguments_by_tool(self) -> dict[str, Arguments]:
        """The arguments of each tool that was used so far."""
        return {}

    @cached_property
    def _schemas_by_tool(self) -> dict[str, Mapping[str, Any]]:
        """The closed schema of each tool that was used so far."""
        return {}

    def make_parser(self, key: str, streaming: bool) -> CallParser | None:
        """Return a parser for one answer; None if it may call nothing. The ids of its calls are made of `key`, which
        differs for each answer. See `AnswerReader` for `streaming`.
        """
        return CallParser(self, key, streaming) if self.callable_tools else None


class CallFormat(ABC):
    """How a family of models writes tool calls: its grammar and its parser. Most formats have a `trigger`: the text
    with which the first call begins. It occurs in no other text.
    """

    name: str
    always_enforced: bool = True
    """Whether calls are held to their schemas also where the model may choose. Otherwise they are read as it writes
    them, unless a call is required, one at most is allowed, or a tool is strict.
    """
    trigger: str = ""
    opener: int | None = None
    """The token that is the trigger; None: it is written with several."""
    calls_opening: str = ""
    """What stands between the trigger and the first call, as a part of a rule."""
    call_separator: str = ""
    """What stands between two calls."""
    close: str = ""
    """What stands after all calls."""
    separators: tuple[str, str] = (", ", ": ")
    """What stands between the items of JSON, and between a key and its value, as the chat templates write it."""
    parallel: bool = True
    """Whether the format has answers with several calls."""

    def adapt_thoughts(self, thoughts: Thoughts | None) -> Thoughts | None:
        """Return the marks of thoughts in answers with calls: usually `thoughts` itself."""
        return thoughts

    def make_call_id(self, key: str) -> str:
        """Return the id of a call: a hash of `key`."""
        return f"call_{blake2b(key.encode(), digest_size=12).hexdigest()}"

    def grammar(
        self, calls: AllowedCalls, text: str, specials: Specials, thoughts_tag: str = ""
    ) -> tuple[list[str], list[JsonGrammar]]:
        """Return the rules of an answer that may have calls, and the named grammars that they use. `text` is the rule
        of an answer without calls; empty if that is free text. Free text must not begin with `thoughts_tag`: thoughts
        have rules of their own, in which a trigger begins no call.
        """
        trigger_rule = lark.tag_rule(self.trigger, specials)
        free = text or "free_text"
        rules = [f"answer: {free}"]
        if calls.callable_tools:
            rest = self._call_rules(calls, specials)
            if calls.is_required:
                rules = [f"answer: {trigger_rule} calls"]
            elif text:
                rules = [f"answer: {text} | {trigger_rule} calls"]
            else:
                rules = ["answer: free_text | lead calls", *self._lead_rules(specials, thoughts_tag)]
            rules += rest
        if not text and not calls.is_required:
            rules += ["free_text: FREE_TEXT", f"FREE_TEXT: {lark.text_without(self.trigger, thoughts_tag)}"]
        return rules, [
            each
            for number, tool in enumerate(calls.callable_tools)
            for each in self.argument_grammars(number, tool, specials)
        ]

    def _lead_rules(self, specials: Specials, thoughts_tag: str) -> list[str]:
        """Return the rules of the free text before the calls, which ends with the trigger."""
        if isinstance(lark.split_specials(self.trigger, specials)[0], int):
            return [f"lead: free_text? {lark.tag_rule(self.trigger, specials)}"]
        return lark.text_up_to_rules("lead", self.trigger, specials, thoughts_tag)

    def _call_rules(self, calls: AllowedCalls, specials: Specials) -> list[str]:
        """Return the grammar rules of what follows the trigger: the calls, and what separates and ends them."""
        more_calls = f"({self._separator_rule(specials)} call)*"
        several = self.parallel and calls.allows_several
        end = self._end_rule(specials)
        alternatives = [self.call_rule(number, tool, specials) for number, tool in enumerate(calls.callable_tools)]
        return [
            f"calls: {self.calls_opening} call {more_calls if several else ''} {end}",
            f"call: {' | '.join(f'call_{number}' for number in range(len(alternatives)))}",
            *(f"call_{number}: {alternative}" for number, alternative in enumerate(alternatives)),
        ]

    def _separator_rule(self, specials: Specials) -> str:
        """Return the rule part that matches what separates two calls."""
        return lark.tag_rule(self.call_separator, specials) if self.call_separator else ""

    def _end_rule(self, specials: Specials) -> str:
        """Return the rule part that matches what follows all calls."""
        return lark.tag_rule(self.close, specials) if self.close else ""

    @abstractmethod
    def call_rule(self, number: int, tool: Tool, specials: Specials) -> str:
        """Return the part of a grammar rule that matches one call of a tool."""

    def notes(self, tool: Tool) -> Iterator[str]:
        """Yield notes on parts of a tool's schema that this format, unlike others, cannot enforce."""
        yield from ()

    def argument_grammars(self, number: int, tool: Tool, specials: Specials) -> Iterator[JsonGrammar]:
        """Yield the named argument grammars for a call's rule. Raises InvalidRequest for an unwritable schema."""
        yield json_grammar(f"tool_{number}", close_arguments(tool.schema), tool.strict, self.separators)

    @abstractmethod
    def parse(self, reader: AnswerReader, calls: AllowedCalls) -> Reading[None]:
        """Parse an answer into the text and calls of `reader`. After NotACall, the caller parses the rest anew."""


class CallParser:
    """Splits one answer's text into text and tool calls as it arrives, no matter how it was cut into pieces."""

    def __init__(self, calls: AllowedCalls, key: str, streaming: bool) -> None:
        ids = _call_ids(key, calls.format.make_call_id)
        self._reader = AnswerReader(ids, streaming)
        self._start_parsing: Callable[[], Reading[None]] = lambda: calls.format.parse(self._reader, calls)
        self._parse = self._start_parsing()
        self._is_finished = False
        self._calls = calls
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
        return bool(reader.calls) and not (reader.said_after_calls or reader.is_in_call or reader.in_section)

    def feed(self, text: str) -> tuple[str, tuple[CallDelta, ...]]:
        """Add the next text of the answer. Return the text and the pieces of calls that are certain now."""
        reader = self._reader
        reader.add(text)
        while not self._is_finished:
            try:
                next(self._parse)
                if not reader.is_ended:
                    break
                reader.drop_call(is_truncated=True)
                self._is_finished = True
            except StopIteration:
                self._is_finished = True
            except NotACall:
                reader.drop_call()
                self._parse = self._start_parsing()
        if reader.new_values:
            self.notes += filter(None, [self._calls.misfit_note(*each) for each in reader.new_values])
            reader.new_values = []
        if not reader.text and not reader.deltas:
            return "", ()
        text, deltas = "".join(reader.text), tuple(reader.deltas)
        reader.text, reader.deltas = [], []
        return text, deltas

    def finish(self) -> tuple[str, tuple[CallDelta, ...]]:
        """End the answer. Return the text and the pieces of calls that were held back."""
        self._reader.is_ended = True
        return self.feed("")


def json_grammar(name: str, schema: Mapping[str, Any], strict: bool, separators: Sequence[str]) -> JsonGrammar:
    """Return the named grammar of JSON that fits a schema."""
    schema_options = schema.get("x-guidance")
    options: dict[str, Any] = dict(schema_options) if isinstance(schema_options, dict) else {}
    options |= {"whitespace_flexible": False, "item_separator": separators[0], "key_separator": separators[1]}
    if not strict:
        options |= {"lenient": True, "coerce_one_of": True}
    elif (escapes := allowed_escapes(schema)) is not None:
        options.setdefault("json_allowed_escapes", escapes)
    return {"name": name, "json_schema": {**schema, "x-guidance": options}}


_ARGUMENTS = ("arguments", "parameters")

_COMPOSED = ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")


def close_arguments(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool's schema closed to unnamed arguments, which models would invent, unless it has rules on them."""
    if schema.keys().isdisjoint(_COMPOSED):
        return {**schema, "properties": schema.get("properties", {}), "additionalProperties": False}
    return schema


def json_call_rule(number: int, tool: Tool, key: str, specials: Specials) -> str:
    """Return the part of a grammar rule for a call as a JSON object with the tool's name and its arguments."""
    head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
    return f'{lark.quote(head)} @tool_{number} "}}"'


def read_json_call(reader: AnswerReader, calls: AllowedCalls) -> Reading[None]:
    """Parse a call that is a JSON object with a name and arguments, in any order. The caller calls `end_call`."""
    yield from reader.skip_blanks()
    yield from reader.skip_text("{")
    yield from reader.skip_blanks()
    first = yield from reader.read_json_string()
    yield from _skip_sign(reader, ":")
    if first in _ARGUMENTS:
        arguments = yield from reader.read_json()
        yield from _skip_key(reader, ("name",))
        reader.begin_call(calls.tool((yield from reader.read_json_string())).name)
        reader.add_arguments(arguments)
    elif first == "name":
        reader.begin_call(calls.tool((yield from reader.read_json_string())).name)
        yield from _skip_key(reader, _ARGUMENTS)
        yield from reader.read_json_arguments()
    else:
        raise NotACall(f"{first!r} is no part of a call")
    yield from reader.skip_blanks()
    if (yield from reader.read_one_of("}", ",")) == ",":  # some templates show ids, so a model may write one
        yield from reader.skip_blanks()
        if (yield from reader.read_json_string()) != "id":
            raise NotACall("a call has a name and arguments")
        yield from _skip_sign(reader, ":")
        yield from reader.read_json_string()
        yield from reader.skip_blanks()
        yield from reader.skip_text("}")


def _skip_key(reader: AnswerReader, names: Sequence[str]) -> Reading[None]:
    """Skip the next key of a JSON object, with the signs around it. Raises NotACall if it has another name."""
    yield from _skip_sign(reader, ",")
    if (yield from reader.read_json_string()) not in names:
        raise NotACall(f"{names[0]!r} is missing")
    yield from _skip_sign(reader, ":")


def _skip_sign(reader: AnswerReader, sign: str) -> Reading[None]:
    """Skip a sign, with the blanks around it."""
    yield from reader.skip_blanks()
    yield from reader.skip_text(sign)
    yield from reader.skip_blanks()


def _call_ids(key: str, make: Callable[[str], str]) -> Iterator[str]:
    """Yield an id for each call of an answer, made of `key` and the call's number."""
    number = 0
    while True:
        yield make(f"{key}/{number}")
        number += 1


# Checks a call's arguments against the schema of its tool, with an upper bound of the work.


Schema = Mapping[str, Any]

MAX_STEPS = 20_000
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


def find_misfit(value: object, schema: Schema) -> str:
    """Return why a value does not fit a JSON schema; empty if it fits. `pattern` is not checked, since
    a caller's regular expression could run for ever; nor are `format`, `multipleOf` and `not`.
    """
    try:
        return _SchemaCheck(schema).find_misfit(value, schema, "the arguments")
    except RecursionError:
        return ""


class _SchemaCheck:
    """The check of one value against a schema, in which references are looked up, in a bounded number of steps."""

    def __init__(self, root_schema: Schema) -> None:
        self._root_schema = root_schema
        self._steps = 0

    def find_misfit(self, value: object, schema: object, location: str) -> str:
        """Return why a value at `location` does not fit a part of the schema; empty if it fits."""
        self._steps += 1
        if self._steps > MAX_STEPS or schema is True:
            return ""
        if schema is False:
            return f"{location} must not be there"
        resolved_schema = resolve_reference(schema, self._root_schema)
        if not resolved_schema:
            return ""
        return (
            self._type_misfit(value, resolved_schema, location)
            or self._limit_misfit(value, resolved_schema, location)
            or self._parts_misfit(value, resolved_schema, location)
            or self._combined_misfit(value, resolved_schema, location)
        )

    def _type_misfit(self, value: object, schema: Schema, location: str) -> str:
        """Return why a value does not fit `type`, `const` or `enum`; empty if it fits."""
        declared = schema.get("type")
        kinds = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
        if kinds and not any(isinstance(kind, str) and _has_type(value, kind) for kind in kinds):
            return f"{location} is {_short_text(value)}, but must be of the type {' or '.join(map(str, kinds))}"
        allowed_values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(allowed_values, list):
            self._steps += len(allowed_values)
            # As JSON, where true is not 1.
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed_values):
                return f"{location} is {_short_text(value)}, which is none of the values that are listed"
        return ""

    def _limit_misfit(self, value: object, schema: Schema, location: str) -> str:
        """Return why a value is beyond a limit, such as `minimum` or `maxLength`; empty if it is not."""
        for keyword, is_within, kinds in _LIMITS:
            if keyword not in schema or not isinstance(value, kinds) or isinstance(value, bool):
                continue
            limit = schema[keyword]
            if _has_type(limit, "number") and not is_within(value, limit):
                return f"{location} is {_short_text(value)}, against {keyword} {limit}"
        return ""

    def _parts_misfit(self, value: object, schema: Schema, location: str) -> str:
        """Return why an item of an array, or a property of an object, does not fit; empty if all fit."""
        if isinstance(value, dict):
            return self._object_misfit(value, schema, location)
        items = schema.get("items", True)
        prefix_items = schema.get("prefixItems")
        prefix_items = prefix_items if isinstance(prefix_items, list) else []
        for number, item in enumerate(value if isinstance(value, list) else ()):
            part = prefix_items[number] if number < len(prefix_items) else items
            if self._steps > MAX_STEPS or (part is True and number >= len(prefix_items)):
                break
            if reason := self.find_misfit(item, part, f"{location}[{number}]"):
                return reason
        return ""

    def _object_misfit(self, value: dict[str, Any], schema: Schema, location: str) -> str:
        """Return why an object does not fit `required`, `properties` or `additionalProperties`; empty if it fits."""
        required = schema.get("required")
        for name in required if isinstance(required, list) else ():
            if isinstance(name, str) and name not in value:
                return f"{name!r:.80} of {location} is missing"
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        additional = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        for name, item in value.items():
            part = properties.get(name, additional)
            if part is False and name not in properties:
                return f"{name!r:.80} is not a part of {location}"
            if reason := self.find_misfit(item, part, f"{name!r:.80}"):
                return reason
        return ""

    def _combined_misfit(self, value: object, schema: Schema, location: str) -> str:
        """Return why a value does not fit `allOf`, `anyOf` or `oneOf`; empty if it fits."""
        parts = schema.get("allOf")
        for part in parts if isinstance(parts, list) else ():
            if reason := self.find_misfit(value, part, location):
                return reason
        for keyword in ("anyOf", "oneOf"):
            alternatives = schema.get(keyword)
            if (
                isinstance(alternatives, list)
                and alternatives
                and all(self.find_misfit(value, alternative, location) for alternative in alternatives)
            ):
                return f"{location} is {_short_text(value)}, which is none of what {keyword} allows"
        return ""


def _has_type(value: object, kind: str) -> bool:
    """Return whether a value has a type of JSON Schema. A float without fraction is an integer, too."""
    return has_json_type(value, kind) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _short_text(value: object) -> str:
    """Return a value for a message: its JSON, cut after 80 characters; of a list or object, its Python type's name."""
    text = to_json_text(value) if not isinstance(value, dict | list) else repr(type(value).__name__)
    return text if len(text) <= 80 else f"{text[:80]}..."
