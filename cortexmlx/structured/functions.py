"""Python functions as tools: their schemas, made by pydantic, which is imported on first use, and their calls."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import Annotated, Any, NotRequired, get_origin, get_type_hints

from cortexmlx.errors import InvalidRequest

MAX_RESULT = 100_000
"""How many characters of a result the model gets."""

Function = Callable[..., object]

_UNSUPPORTED_KINDS: Mapping[object, str] = {
    inspect.Parameter.POSITIONAL_ONLY: "is positional only",
    inspect.Parameter.VAR_POSITIONAL: "takes any number of values",
    inspect.Parameter.VAR_KEYWORD: "takes any names",
}


def describe_function(function: Function) -> tuple[str, str, dict[str, Any]]:
    """Return a function's name and description as a tool, and the JSON schema of its arguments.

    Its type hints are the schema, and parameters with a default are optional. The first paragraph of its docstring is
    the description, and the `Args:` section (or `:param name:`) describes the parameters, as does a
    `Field(description=...)` of pydantic within `Annotated` or as the default. Raises InvalidRequest for a parameter
    without a type hint, or one that cannot be named in a call.
    """
    name = _function_name(function)
    docstring = inspect.cleandoc(inspect.getdoc(_unwrap_partial(function)) or "")
    schema = _arguments_adapter(function, _parameter_descriptions(docstring)).json_schema()
    for key, parameter in _parameters(function).items():
        if parameter.default is not parameter.empty and _is_json(parameter.default) and key in schema["properties"]:
            schema["properties"][key].setdefault("default", parameter.default)
    full_schema = {"type": "object", "properties": {}, **_remove_titles(schema)}
    return name, " ".join(docstring.partition("\n\n")[0].split()), full_schema


def call_function(function: Function, arguments: str) -> str:
    """Call a function with a tool call's JSON arguments. Return the result as the model gets it: a text as it is,
    other values as JSON. An awaitable result is awaited, in an event loop of its own.

    Wrong arguments, an Exception of the function, and its attempt to exit become a text that begins with "Error: ".
    """
    try:
        result = function(**_parse_arguments(function, arguments))
        return _result_text(_run_awaitable(result) if inspect.isawaitable(result) else result)
    except (Exception, SystemExit) as error:
        return _error_result(error)


async def call_function_async(function: Function, arguments: str) -> str:
    """Call a function as `call_function` does: a coroutine function in this event loop, any other one on a thread."""
    coroutine_function = function if inspect.iscoroutinefunction(function) else getattr(function, "__call__", None)  # noqa: B004
    if not inspect.iscoroutinefunction(coroutine_function):
        return await asyncio.to_thread(call_function, function, arguments)
    try:
        return _result_text(await coroutine_function(**_parse_arguments(function, arguments)))
    except (Exception, SystemExit) as error:
        return _error_result(error)


def _parse_arguments(function: Function, arguments: str) -> dict[str, Any]:
    """Parse and check a call's JSON arguments. Raises pydantic's ValidationError."""
    values: dict[str, Any] = _arguments_adapter(function, {}).validate_json(arguments)
    return values


def _run_awaitable(result: Any) -> object:
    """Wait for an awaitable in a new event loop; return its result. If this thread runs a loop, use another thread."""

    async def await_result() -> object:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(await_result())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, await_result()).result()


def _unwrap_partial(function: Function) -> Function:
    """Return the function within `functools.partial` objects."""
    while isinstance(function, partial):
        function = function.func
    return function


def _function_name(function: Function) -> str:
    """Return the name of a function, or that of its class."""
    unwrapped = _unwrap_partial(function)
    return str(getattr(unwrapped, "__name__", type(unwrapped).__name__))


def _parameters(function: Function) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters by name. Raises InvalidRequest for one that a call cannot name."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise _function_error(function, f"has no signature: {error}") from None
    for name, parameter in signature.parameters.items():
        if reason := _UNSUPPORTED_KINDS.get(parameter.kind):
            raise _function_error(function, f"cannot be a tool: its parameter {name!r} {reason}")
    return signature.parameters


def _arguments_adapter(function: Function, descriptions: Mapping[str, str]) -> Any:
    """Return pydantic's TypeAdapter for a function's arguments, as a mapping, with their `descriptions`."""
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter
    from pydantic.fields import FieldInfo
    from typing_extensions import TypedDict

    make_annotated: Any = Annotated
    unwrapped = _unwrap_partial(function)
    hint_source = unwrapped if inspect.isroutine(unwrapped) or inspect.isclass(unwrapped) else type(unwrapped).__call__
    if inspect.isclass(unwrapped):
        hint_source = unwrapped.__init__
    try:
        hints = get_type_hints(hint_source, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise _function_error(function, f"has a type hint that cannot be read: {error}") from None
    fields: dict[str, Any] = {}
    for name, parameter in _parameters(function).items():
        kind = hints.get(name, parameter.annotation)
        if kind is parameter.empty:
            raise _function_error(function, f"cannot be a tool: its parameter {name!r} has no type hint")
        is_required = parameter.default is parameter.empty
        if isinstance(parameter.default, FieldInfo):
            kind, is_required = make_annotated[kind, parameter.default], parameter.default.is_required()
        if name in descriptions:
            kind = _add_description(kind, descriptions[name])
        fields[name] = kind if is_required else NotRequired[kind]
    make: Any = TypedDict
    arguments = make(_function_name(function), fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        adapter = TypeAdapter(arguments)
        adapter.json_schema()
    except (PydanticUserError, TypeError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise _function_error(function, f"cannot be a tool: {first_line}") from None
    return adapter


def _add_description(kind: Any, text: str) -> Any:
    """Add a description to a type, unless it has one of its own."""
    from pydantic import Field

    base_type, *metadata = (kind.__origin__, *kind.__metadata__) if get_origin(kind) is Annotated else (kind,)
    make: Any = Annotated
    return make[(base_type, Field(description=text), *metadata)]  # of several descriptions, the last counts


_SECTION = re.compile(r"^(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\s*\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^([ \t]+)(\w+)(?:\s*\([^)]*\))?\s*:\s*(.*)$")
_PARAM = re.compile(r"^:param\s+(?:[\w\[\], .|]+\s+)?(\w+):\s*(.*)$", re.MULTILINE)


def _parameter_descriptions(docstring: str) -> dict[str, str]:
    """Return the description of each parameter in a docstring."""
    descriptions = {name: text.strip() for name, text in _PARAM.findall(docstring)}
    section = _SECTION.search(docstring)
    indent, name = "", ""
    for line in section.group(1).splitlines() if section else ():
        entry = _ENTRY.match(line)
        if entry and (not indent or entry.group(1) == indent):
            indent, name = entry.group(1), entry.group(2)
            descriptions[name] = entry.group(3).strip()
        elif name and line.strip():
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return {name: text for name, text in descriptions.items() if text}


_NAMED_SCHEMAS = ("properties", "$defs", "patternProperties")
"""Keywords of a schema whose keys are names of the caller's."""


def _remove_titles(schema: Any) -> Any:
    """Return a copy of a schema without its titles, which only repeat names."""
    if isinstance(schema, list):
        return [_remove_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _remove_titles(each) for name, each in value.items()}
        if key in _NAMED_SCHEMAS
        else _remove_titles(value)
        for key, value in schema.items()
        if key != "title"
    }


def _is_json(value: object) -> bool:
    """Return whether a default value can stand in a JSON schema."""
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and isfinite(value))


def _error_result(error: BaseException) -> str:
    """Return an error as the result that the model gets."""
    return _result_text(f"Error: {_describe_error(error)}")


def _result_text(result: object) -> str:
    """Return a result as text for the model: valid Unicode, no NUL, cut after MAX_RESULT characters, with a note."""
    text = result if isinstance(result, str) else _serialize(result)
    if len(text) > MAX_RESULT:
        text = f"{text[:MAX_RESULT]}\n[cut: the result has {len(text):,} characters]"
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")


def _serialize(result: object) -> str:
    """Serialize a result as JSON, or by `repr` if it is no JSON."""
    from pydantic_core import PydanticSerializationError, to_json

    try:
        return to_json(result, inf_nan_mode="strings").decode()
    except (PydanticSerializationError, ValueError, RecursionError):
        return repr(result)


def _describe_error(error: BaseException) -> str:
    """Describe an error for the model."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        return "; ".join(f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in problems)
    with suppress(Exception):
        if text := str(error):
            return f"{type(error).__name__}: {text}"
    return type(error).__name__


def _function_error(function: Function, reason: str) -> InvalidRequest:
    """Return the error for a function that cannot be a tool."""
    return InvalidRequest(f"the function {_function_name(function)} {reason}", field="tools")
