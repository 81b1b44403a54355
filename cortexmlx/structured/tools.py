"""Tool: a function that a model may call. Plain data, without the library that enforces its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cortexmlx.errors import InvalidRequest
from cortexmlx.structured.schemas import check_multiples, is_text

MAX_TOOLS = 512
"""How many tools a request may have."""

MAX_CHARACTERS = 1 << 20
"""How many characters the schemas and descriptions of all tools may have. Those of 24 tools of an agent have about
80,000.
"""

CHOICES = ("auto", "none", "required")
"""What `tool_choice` may be, besides the name of a tool."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}")

_PARTS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True)
class Tool:
    """A function that a model may call, with the schema of its arguments. Make one with `of`."""

    name: str
    description: str = ""
    parameters: str = '{"type":"object","properties":{}}'
    """The JSON schema of the arguments, as JSON text. It describes an object."""
    strict: bool = False
    """Whether a request is refused if a part of the schema cannot be enforced. Otherwise that part is ignored, and the
    answer's `notes` name it.
    """
    function: Callable[..., object] | None = field(default=None, compare=False)
    """What a call runs; None: the caller runs it."""

    @classmethod
    def of(cls, value: object) -> Tool:
        """Convert a Tool, an OpenAI mapping (`{"type": "function", "function": {...}}`) or a Python function to a
        tool. A function needs type hints, and its docstring describes it. Raises InvalidRequest.
        """
        if isinstance(value, Tool):
            return value
        if isinstance(value, Mapping):
            return cls._from_mapping(value)
        if callable(value):
            from cortexmlx.structured.functions import describe_function

            name, description, parameters = describe_function(value)
            return replace(cls.named(name, description, parameters), function=value)
        raise _tools_error(f"a tool is {value!r:.80}, but must be a function, or a mapping as in the OpenAI API")

    @classmethod
    def _from_mapping(cls, value: Mapping[str, Any]) -> Tool:
        """Make a tool of a mapping as in the OpenAI API. Raises InvalidRequest."""
        kind = value.get("type", "function")
        if kind != "function":
            raise _tools_error(f"a tool has the type {kind!r:.80}, but only functions are served")
        if extra := value.keys() - {"type", "function"}:
            raise _tools_error(f"a tool has {_quoted_names(extra)}, but only `type` and `function` are known")
        function_mapping = value.get("function")
        if not isinstance(function_mapping, Mapping):
            raise _tools_error("a tool has no `function`: it must be an object with a `name`")
        if extra := function_mapping.keys() - set(_PARTS):
            raise _tools_error(f"a tool's function has {_quoted_names(extra)}, but only {', '.join(_PARTS)} are known")
        parts = {name: part for name, part in function_mapping.items() if part is not None}
        return cls.named(**{"name": None, **parts})

    @classmethod
    def named(cls, name: object, description: object = "", parameters: object = None, strict: object = False) -> Tool:
        """Make a tool of these parts, and check them. Raises InvalidRequest."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _tools_error(
                f"a tool's name is {name!r:.80}, but must be 1 to 128 letters, digits and any of _ . : / -, and begin "
                "with a letter, a digit or _"
            )
        if name in CHOICES:
            raise _tools_error(f"a tool is called {name!r}, which is a `tool_choice`: give it another name")
        if not isinstance(description, str) or not is_text(description):
            raise _tools_error(f"the description of the tool {name!r} is {description!r:.80}, but must be a text")
        if not isinstance(strict, bool):
            raise _tools_error(f"`strict` of the tool {name!r} is {strict!r:.80}, but must be true or false")
        return cls(name, description, _normalize_parameters(name, {} if parameters is None else parameters), strict)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        schema: dict[str, Any] = json.loads(self.parameters)
        return schema

    def as_mapping(self) -> dict[str, Any]:
        """Return the tool as in the OpenAI API, for chat templates and bodies."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": {**function, **({"strict": True} if self.strict else {})}}


def read_tools(value: object) -> tuple[Tool, ...]:
    """Convert the `tools` of a request, and check them together. Raises InvalidRequest."""
    if isinstance(value, tuple) and not value:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _tools_error(
            f"tools is {value!r:.80}, but must be a list of functions or of mappings as in the OpenAI API"
        )
    if len(value) > MAX_TOOLS:
        raise _tools_error(f"tools has {len(value):,} tools, but must have at most {MAX_TOOLS}")
    tools = tuple(map(Tool.of, value))
    names = [tool.name for tool in tools]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise _tools_error(f"two tools are called {duplicate!r}")
    characters = sum(len(tool.parameters) + len(tool.description) for tool in tools)
    if characters > MAX_CHARACTERS:
        raise _tools_error(f"the tools have {characters:,} characters, but must have at most {MAX_CHARACTERS:,}")
    return tools


def check_tool_choice(choice: object, tools: Sequence[Tool]) -> None:
    """Raise InvalidRequest unless `choice` is a `tool_choice` that fits these tools."""
    names = [tool.name for tool in tools]
    if not isinstance(choice, str) or choice not in (*CHOICES, *names):
        allowed_text = f"auto, none, required{' or the name of a tool' if tools else ''}"
        raise InvalidRequest(f"tool_choice is {choice!r:.80}, but must be {allowed_text}", field="tool_choice")
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice is 'required', but there are no `tools`", field="tool_choice")


def _normalize_parameters(name: str, parameters: object) -> str:
    """Return the schema of tool `name`'s parameters as JSON, checked, always of an object. Raises InvalidRequest."""
    try:
        schema = normalize_schema(parameters)
        if isinstance(schema, Mapping) and isinstance(kind := schema.get("type"), list) and "object" in kind:
            schema = {**schema, "type": "object"}
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            message = f"the parameters of the tool {name!r} are {parameters!r:.80}, but must be the schema of an object"
            raise _tools_error(message)
        required = schema.get("required", [])
        if not isinstance(schema.get("properties", {}), Mapping):
            raise _tools_error(f"the `properties` of the tool {name!r} must be an object of schemas by their names")
        if not isinstance(required, list | tuple) or not all(isinstance(each, str) for each in required):
            raise _tools_error(f"`required` of the tool {name!r} is {required!r:.80}, but must be a list of texts")
        text = json.dumps({"type": "object", **schema}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise _tools_error(f"the parameters of the tool {name!r} cannot be written as JSON: {error}") from None
    check_multiples(schema)
    if not is_text(text):
        raise _tools_error(f"the parameters of the tool {name!r} hold a NUL or half of a surrogate pair")
    return text


_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_ONE = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames")
_OF_MANY = ("anyOf", "allOf", "oneOf", "prefixItems")


def normalize_schema(schema: object) -> Any:
    """Normalize a tool's schema to standard JSON Schema where its writer means the same: PHP's `[]` for an empty
    object, `{}`, true or false in `required`, Gemini's types in capitals, and null for a keyword that is not there.
    """
    if isinstance(schema, list | tuple) and not schema:
        return {}
    if not isinstance(schema, Mapping):
        return schema
    normalized: dict[str, Any] = {}
    for name, part in schema.items():
        empty = isinstance(part, list | tuple | Mapping) and not part
        if name in _BY_NAME and (empty or isinstance(part, Mapping)):
            part = {} if empty else {each: normalize_schema(value) for each, value in part.items()}
        elif name in _OF_ONE:
            part = (
                [normalize_schema(each) for each in part] if isinstance(part, list) and part else normalize_schema(part)
            )
        elif name in _OF_MANY and isinstance(part, list | tuple):
            part = [normalize_schema(each) for each in part]
        elif name == "type":
            part = [_normalize_type(each) for each in part] if isinstance(part, list | tuple) else _normalize_type(part)
        if not _is_absent(name, part):
            normalized[name] = part
    return normalized


def _normalize_type(name: object) -> object:
    """Return the name of a JSON type in lower case; anything else unchanged."""
    return name.lower() if isinstance(name, str) and name.lower() in _TYPES else name


def _is_absent(name: str, part: object) -> bool:
    """Return whether a keyword's value means that it is absent. Null is a real value of `const`, `default` etc."""
    if name == "required":
        return part is None or isinstance(part, bool) or part == {}
    return part is None and name in ("type", "description", *_BY_NAME, *_OF_ONE, *_OF_MANY)


def _quoted_names(names: object) -> str:
    """Return names in quotes, in order, for a message."""
    return ", ".join(sorted(map(repr, names)))[:80]  # type: ignore[call-overload]


def _tools_error(message: str) -> InvalidRequest:
    """Return the error for tools that a request may not have."""
    return InvalidRequest(message, field="tools")


# ToolCall: what a model asks a tool to do. Plain data.


@dataclass(frozen=True)
class ToolCall:
    """A complete call of one tool."""

    id: str
    """Names the call in the message with its result."""
    name: str
    arguments: str
    """A JSON object as JSON text, as the model wrote it."""

    @property
    def values(self) -> dict[str, Any]:
        """The parsed arguments by name. A number that is too large for Python is infinite."""
        values: dict[str, Any] = load_json(self.arguments)
        return values

    def as_mapping(self) -> dict[str, Any]:
        """Return the call for chat templates: as in the OpenAI API, but with the arguments as an object."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.values}}


class CallDelta(NamedTuple):  # One is made per token: a frozen dataclass takes twice as long.
    """A piece of a tool call while the model writes it. The first piece of a call has its `id` and `name`, the others
    have only `arguments`. The pieces of a call that is never completed, because the answer was cut, make no
    ToolCall.
    """

    index: int  # type: ignore[assignment]  # it hides tuple.index
    """The number of the call in its answer."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """The next characters of the arguments."""


def load_json(text: str) -> Any:
    """Parse JSON with whole numbers of any length, which Python would refuse. Raises ValueError and RecursionError."""
    return _DECODER.decode(text)


def parse_integer(digits: str) -> int | float:
    """Parse an integer of any length; one that Python refuses becomes a float."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


_DECODER = json.JSONDecoder(parse_int=parse_integer)

MAX_DIGITS = 400
"""Digits of an integer that a client sends, at most. Python takes long for longer ones, and lets no thread run then."""


def load_client_json(text: str) -> Any:
    """Parse JSON from a client. Numbers are read by Python functions, so that other threads can run meanwhile.
    Raises ValueError, also for an integer of more than MAX_DIGITS digits, and RecursionError.
    """
    return _SENT_DECODER.decode(text)


def _parse_client_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
    return int(digits)


_SENT_DECODER = json.JSONDecoder(parse_int=_parse_client_integer, parse_float=lambda digits: float(digits))


def result_message(call: ToolCall, text: str) -> Mapping[str, object]:
    """Return the chat message that tells the model a call's result."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
