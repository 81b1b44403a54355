"""The form that a body asks for: OpenAI's `response_format` and `text.format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import FORMS, check_fields, checked, inside
from cortexmlx.structured.output import VLLM_OPTIONS, StructuredOutput

FIELDS = frozenset({"response_format", "structured_outputs", *FORMS})
"""The fields of a body that ask for a form."""

_SCHEMA = ("name", "description", "schema", "strict")


def form_values(said: Mapping[str, Any]) -> dict[str, StructuredOutput | None]:
    """Return `structured` as a body sets it, or nothing if the body does not set it. Raises InvalidRequest."""
    asked = [name for name in sorted(FIELDS) if name in said]
    if len(asked) > 1:
        raise InvalidRequest(f"there are both {asked[0]!r} and {asked[1]!r}: give one of them", field=asked[1])
    if not asked:
        return {}
    (name,) = asked
    if name in FORMS:
        return {"structured": _located(StructuredOutput.named, {FORMS[name]: said[name]}, name)}
    value = checked(name, said[name], dict, "an object")
    with inside(name):
        return {"structured": _named(value) if name == "structured_outputs" else response_format(value)}


def response_format(value: Mapping[str, Any]) -> StructuredOutput | None:
    """Return the form in a `response_format`, or None if it asks for plain text. Raises InvalidRequest."""
    kind = value.get("type")
    if kind in ("json_object", "json_schema") and value.get("schema") is not None:  # as llama.cpp has it
        check_fields(value, ("type", "schema"), "`response_format`")
        return json_schema({"schema": value["schema"]})
    if kind in ("text", "json_object"):
        check_fields(value, ("type",), "`response_format`")
        return None if kind == "text" else StructuredOutput.json()
    if kind != "json_schema":
        raise InvalidRequest(f"type is {kind!r:.80}, but must be text, json_object or json_schema", field="type")
    check_fields(value, ("type", "json_schema"), "`response_format`")
    named = checked("json_schema", value.get("json_schema"), dict, "an object with a `schema`")
    with inside("json_schema"):
        return json_schema(named)


def text_format(value: Mapping[str, Any]) -> StructuredOutput | None:
    """Return the form in the `format` of responses. There the fields of a schema are beside its type, not in an
    object.
    """
    if value.get("type") != "json_schema":
        return response_format(value)
    return json_schema({name: part for name, part in value.items() if name != "type"})


def json_schema(value: Mapping[str, Any]) -> StructuredOutput:
    """Return the form of a schema with its `name`. Keywords that cannot be enforced are ignored only if `strict` is
    false. A missing `strict` counts as true, and such a schema is refused.
    """
    check_fields(value, _SCHEMA, "`json_schema`")
    strict = checked("strict", True if value.get("strict") is None else value["strict"], bool, "true or false")
    if not isinstance(value.get("schema"), Mapping | bool):
        raise InvalidRequest("`schema` must be a JSON schema: an object", field="schema")
    return _located(lambda schema: StructuredOutput.json(schema, lenient=not strict), value["schema"], "schema")


def _named(value: Mapping[str, Any]) -> StructuredOutput:
    options = ("lenient", *VLLM_OPTIONS.values())
    for name in options:
        checked(name, False if value.get(name) is None else value[name], bool, "true or false")
    names = [name for name, part in value.items() if name not in options and part is not None]
    return _located(StructuredOutput.named, value, names[0] if len(names) == 1 else None)


def _located(make: Callable[[Any], StructuredOutput], value: Any, name: str | None) -> StructuredOutput:
    """Return `make(value)`. An InvalidRequest gets the name that the body has for the field."""
    try:
        return make(value)
    except InvalidRequest as error:
        error.field = name
        raise
