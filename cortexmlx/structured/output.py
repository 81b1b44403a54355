"""StructuredOutput: the form that an answer must have. Plain data, without the library that enforces it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cortexmlx.errors import InvalidRequest, StructuredOutputError
from cortexmlx.structured.schemas import check_multiples, close_where_safe, closed_type_schema, type_adapter

MAX_CHARACTERS = 1 << 18
"""How many characters a schema, a grammar or a list of choices may have. The schemas of 24 tools have about 20,000. A
Lark grammar of 200,000 takes 0.3 s to compile, one of a million 6 s and 1.3 GB.
"""

MAX_PATTERN_CHARACTERS = 1 << 16
"""How many characters a regular expression may have."""

MAX_CHOICES = 16_384
"""How many texts a choice may have."""


VLLM_OPTIONS = {"compact": "disable_any_whitespace", "closed": "disable_additional_properties"}
"""vLLM's names for options of `StructuredOutput.json`."""


class Form(StrEnum):
    """The kind of form that an answer must have. The values are the names of `StructuredOutput`'s constructors."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True)
class StructuredOutput:
    """The form that an answer must have, and how a complete answer is read.

    Make one with `json`, `regex`, `choice` or `grammar`. All of them raise InvalidRequest. Whether a schema, an
    expression or a grammar can be enforced is checked when a request is submitted.
    """

    form: Form
    definition: str
    """A JSON schema as JSON, a regular expression, a Lark grammar, or the choices as a JSON list."""
    lenient: bool = False
    """Whether parts of a schema that cannot be enforced are ignored, instead of refusing the request."""
    compact: bool = False
    """Whether JSON has no blanks between its parts."""
    result_type: Any = field(default=None, compare=False)
    """The Python type that an answer is read as; None: plain JSON values, or text."""

    @classmethod
    def json(
        cls, schema: object = None, *, lenient: bool = False, compact: bool = False, closed: bool = False
    ) -> StructuredOutput:
        """Return the form of JSON that fits a schema. `schema` is a JSON schema as a mapping, a bool or JSON text; or
        a type: a pydantic model, a dataclass, a TypedDict, or any other type that pydantic knows. None: any JSON
        object.

        `lenient` ignores what cannot be enforced, such as `uniqueItems`. `compact` allows no blanks between the parts
        of the JSON. `closed` allows only the properties that an object of the schema names, where the schema does not
        say itself whether there are others (`additionalProperties`). An object of a type is always closed.
        """
        for name, value in (("lenient", lenient), ("compact", compact), ("closed", closed)):
            if not isinstance(value, bool):
                raise _form_error(f"{name} is {value!r:.80}, but must be True or False")
        if schema is None:
            schema = {"type": "object"}
        elif isinstance(schema, str):
            schema = _parse_schema(schema)
        result_type = None
        if not isinstance(schema, Mapping | bool):
            result_type, schema = schema, _type_schema(schema)
        definition = _check_length(_schema_to_json(schema), "the schema")
        check_multiples(json.loads(definition))
        if closed:
            definition = _check_length(_close_definition(definition), "the closed schema")
        return cls(Form.JSON, definition, lenient, compact, result_type)

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        """Return the form of texts matching a whole regex of Rust's `regex` crate: no look-around or backreferences."""
        return cls(
            Form.REGEX, _check_length(_check_text(pattern, "the pattern"), "the pattern", MAX_PATTERN_CHARACTERS)
        )

    @classmethod
    def choice(cls, choices: Iterable[str]) -> StructuredOutput:
        """Return the form of answers that are one of several texts."""
        if isinstance(choices, str) or not isinstance(choices, Iterable):
            raise _form_error(f"choice is {choices!r:.80}, but must be a list of texts")
        choice_list = list(choices)
        if not 1 <= len(choice_list) <= MAX_CHOICES:
            raise _form_error(f"choice has {len(choice_list):,} texts, but must have 1 to {MAX_CHOICES:,}")
        texts = [_check_text(each, "each choice") for each in choice_list]
        return cls(Form.CHOICE, _check_length(json.dumps(texts, ensure_ascii=False), "choice"))

    @classmethod
    def grammar(cls, lark: str) -> StructuredOutput:
        """Return the form of texts of a Lark grammar in llguidance's dialect, whose first rule is `start`."""
        return cls(Form.GRAMMAR, _check_length(_check_text(lark, "the grammar"), "the grammar"))

    @classmethod
    def of(cls, value: object) -> StructuredOutput:
        """Convert the argument `structured`: a StructuredOutput, "json" for any object, or what `json()` takes."""
        if isinstance(value, StructuredOutput):
            return value
        if value == "json":
            return cls.json()
        if value is None or isinstance(value, str | bool | int | float | list | tuple):
            raise _form_error(
                f"structured is {value!r:.80}, but must be a JSON schema (a dict), a type, 'json', or "
                "StructuredOutput.regex(...), .choice(...) or .grammar(...)"
            )
        if isinstance(value, Mapping) and value.get("type") in ("json_schema", "json_object"):
            raise _form_error(
                "structured is an API's response_format: give the schema itself, or 'json' for any object"
            )
        return cls.json(value)

    @classmethod
    def named(cls, form: Mapping[str, Any]) -> StructuredOutput:
        """Return the form that a mapping names, as in vLLM's `structured_outputs`: `{"json": schema}`, `{"regex":
        ...}`, `{"choice": [...]}`, `{"grammar": ...}` or `{"json_object": true}`. A schema may come with `"lenient":
        true`, both kinds of JSON with `"disable_any_whitespace": true` (`compact`) and
        `"disable_additional_properties": true` (`closed`).
        """
        form_fields = {name: value for name, value in form.items() if value is not None and value is not False}
        lenient = form_fields.pop("lenient", False)
        options = {name: form_fields.pop(vllm_name, False) for name, vllm_name in VLLM_OPTIONS.items()}
        for name, enabled in options.items():
            if not isinstance(enabled, bool):
                raise _form_error(f"{VLLM_OPTIONS[name]} is {enabled!r:.80}, but must be true or false")
        if (
            len(form_fields) != 1
            or not form_fields.keys() <= {*Form, "json_object"}
            or (lenient and "json" not in form_fields)
        ):
            raise _form_error(
                f"a form is {dict(form)!r:.80}, but must have one of json, json_object, regex, choice and grammar"
            )
        ((name, value),) = form_fields.items()
        if name == Form.JSON:
            return cls.json(value, lenient=lenient, **options)
        if name == "json_object":
            return cls.json(**options)
        if any(options.values()):
            raise _form_error(f"a form is {dict(form)!r:.80}, but {' and '.join(VLLM_OPTIONS.values())} are for JSON")
        return {Form.REGEX: cls.regex, Form.CHOICE: cls.choice, Form.GRAMMAR: cls.grammar}[Form(name)](value)

    def as_mapping(self) -> dict[str, Any]:
        """Return the form as plain data for `named`, without `result_type`. A closed schema is written as such."""
        is_json = self.form in (Form.JSON, Form.CHOICE)
        value = json.loads(self.definition) if is_json else self.definition
        options = {"lenient": self.lenient, VLLM_OPTIONS["compact"]: self.compact}
        return {self.form.value: value, **{name: True for name, enabled in options.items() if enabled}}

    def parse(self, text: str) -> Any:
        """Read a whole answer: JSON as values, or as an object of `result_type`; other forms as the text.

        Raises StructuredOutputError if the text is not of this form, for example because it was cut.
        """
        if self.form is not Form.JSON:
            return text
        try:
            if self.result_type is None:
                return json.loads(text)
            return type_adapter(self.result_type).validate_json(text)
        except (ValueError, RecursionError) as error:
            excerpt = text if len(text) <= 80 else f"...{text[-77:]}"
            raise StructuredOutputError(f"the answer {excerpt!r} cannot be read: {error}") from error


def _form_error(message: str) -> InvalidRequest:
    """Return the error for a form that a request may not have."""
    return InvalidRequest(message, field="structured")


def _check_text(value: object, label: str) -> str:
    """Return a text if it is not empty. Raises InvalidRequest, where `label` names it."""
    if not isinstance(value, str) or not value or any("\ud800" <= char <= "\udfff" for char in value):
        raise _form_error(f"{label} is {value!r:.80}, but must be a text that is not empty")
    return value


def _check_length(text: str, label: str, max_length: int = MAX_CHARACTERS) -> str:
    """Return a text if it has at most `max_length` characters. Raises InvalidRequest."""
    if len(text) > max_length:
        raise _form_error(f"{label} has {len(text):,} characters, but must have at most {max_length:,}")
    return text


def _parse_schema(text: str) -> object:
    """Parse a JSON schema. Raises InvalidRequest."""
    _check_length(text, "the schema")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _form_error(f"the schema {text!r:.80} is no JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise _form_error(f"the schema is {text!r:.80}, but must be a JSON object")
    return schema


def _schema_to_json(schema: object) -> str:
    """Write a schema as JSON. The order of its properties is the order in an answer, so it stays."""
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_mapping_to_dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise _form_error(f"the schema cannot be written as JSON: {error or type(error).__name__}") from None


def _close_definition(definition: str) -> str:
    """Close the objects of a schema, given as JSON, where that is safe."""
    try:
        return _schema_to_json(close_where_safe(json.loads(definition)))
    except RecursionError:
        raise _form_error("the schema is nested too deep to be closed") from None


def _mapping_to_dict(value: object) -> object:
    """Convert a mapping to a dict, for the JSON encoder. Raises TypeError for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it contains a {type(value).__name__}")


def _type_schema(kind: Any) -> object:
    """Return the closed JSON schema of a Python type. Raises InvalidRequest if it has none."""
    try:
        return closed_type_schema(kind)
    except ValueError as error:
        raise _form_error(f"structured is {kind!r:.80}, of which pydantic makes no JSON schema: {error}") from None


# Thoughts: how a model marks what it thinks before its answer. Plain data.


@dataclass(frozen=True)
class Thoughts:
    """How a model marks its thoughts: they are between the texts `open` and `close`, before its answer."""

    open: str
    close: str
    opened_by_prompt: bool = False
    """Whether the prompt has opened them."""
    skip_text: str = ""
    """A text that may come before an answer without thoughts."""
