"""Forms in bodies: OpenAI's and vLLM's, in every protocol; what is no form is refused with its path."""

from __future__ import annotations

from typing import Any

import pytest
from openai.lib._parsing._completions import type_to_response_format_param
from pydantic import BaseModel

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols import responses, simple
from cortexmlx.protocols.openai import chat_completions, completions
from cortexmlx.protocols.request import Defaults, Request
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.types.sampling_params import SamplingParams

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
FORM = StructuredOutput.json(SCHEMA)
LENIENT = StructuredOutput.json(SCHEMA, lenient=True)


def chat(defaults: SamplingParams | None = None, **body: Any) -> Request:
    asked = {"messages": [{"role": "user", "content": "hi"}], **body}
    return chat_completions.read(asked, Defaults(defaults or SamplingParams()))


def respond(**text: Any) -> Request:
    return responses.read({"input": "hi", "text": text}, Defaults(SamplingParams()))


def named(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **fields}}


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutput.json()),
        (named(), FORM),
        (named(strict=True, description="y"), FORM),
        (named(strict=None), FORM),
        (named(strict=False), LENIENT),
        ({"type": "json_object", "schema": SCHEMA}, FORM),
        ({"type": "json_schema", "schema": SCHEMA}, FORM),
    ],
)
def test_a_response_format(asked: dict[str, Any], form: StructuredOutput | None) -> None:
    assert chat(response_format=asked).params.form == form
    assert chat(SamplingParams(structured="json"), response_format=asked).params.form == form
    body = {"prompt": "hi", "response_format": asked}
    assert completions.read(body, Defaults(SamplingParams())).params.form == form
    assert simple.read(body, Defaults(SamplingParams())).params.form == form


def test_what_a_body_does_not_say_is_the_default() -> None:
    assert chat(SamplingParams(structured=SCHEMA)).params.form == FORM
    assert chat(SamplingParams(structured=SCHEMA), response_format=None).params.form == FORM
    assert chat().params.form is None


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"json": SCHEMA}, FORM),
        ({"json": '{"type": "object", "properties": {"b": {}, "a": {}}}'}, FORM),
        ({"json": SCHEMA, "lenient": True, "regex": None}, LENIENT),
        ({"json": SCHEMA, "disable_any_whitespace": True}, StructuredOutput.json(SCHEMA, compact=True)),
        ({"json": SCHEMA, "disable_additional_properties": True}, StructuredOutput.json(SCHEMA, closed=True)),
        ({"regex": "a+"}, StructuredOutput.regex("a+")),
        ({"choice": ["a", "b"]}, StructuredOutput.choice(["a", "b"])),
        ({"grammar": 'start: "a"'}, StructuredOutput.grammar('start: "a"')),
        ({"json_object": True}, StructuredOutput.json()),
    ],
)
def test_vllms_structured_outputs(asked: dict[str, Any], form: StructuredOutput) -> None:
    assert chat(structured_outputs=asked).params.form == form
    if len(asked) == 1 and asked.keys() < {"json", "regex", "choice", "grammar"}:
        assert chat(**{f"guided_{name}": value for name, value in asked.items()}).params.form == form
    body = {"prompt": "hi", "structured_outputs": asked}
    assert simple.read(body, Defaults(SamplingParams())).params.form == form


def test_a_responses_format() -> None:
    assert respond().params.form is None
    assert respond(format={"type": "text"}, verbosity="high").params.form is None
    assert respond(format={"type": "json_object"}).params.form == StructuredOutput.json()
    assert respond(format={"type": "json_schema", "name": "x", "schema": SCHEMA}).params.form == FORM
    lenient = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": False}
    assert respond(format=lenient).params.form == LENIENT


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ({"format": {"type": "json_schema"}}, "text.format.schema"),
        ({"format": {"type": "xml"}}, "text.format.type"),
        ({"format": 5}, "text.format"),
        ({"form": {}}, "text.form"),
        ({"verbosity": "loud"}, "text.verbosity"),
    ],
)
def test_what_is_no_text_of_a_response_is_refused_with_its_path(text: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        respond(**text)
    assert refused.value.field == field


def test_what_openais_library_sends_for_a_type_is_a_form() -> None:
    class City(BaseModel):
        name: str
        people: int

    asked: Any = type_to_response_format_param(City)
    form = chat(response_format=asked).params.form
    assert form is not None and form.as_mapping()["json"]["properties"].keys() == {"name", "people"}


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"response_format": 5}, "response_format", "must be an object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object or json_schema"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x", "unknown field"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
        ({"response_format": named(schema=5)}, "response_format.json_schema.schema", "must be a JSON schema"),
        ({"response_format": named(strict="yes")}, "response_format.json_schema.strict", "true or false"),
        ({"response_format": named(x=1)}, "response_format.json_schema.x", "unknown field"),
        ({"response_format": named(schema={"a": "x" * 2_000_000})}, "response_format.json_schema.schema", "at most"),
        ({"structured_outputs": []}, "structured_outputs", "must be an object"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "not empty"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "list of texts"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": "yes"}},
            "structured_outputs.disable_any_whitespace",
            "true or false",
        ),
        (
            {"structured_outputs": {"json": {}}, "response_format": {"type": "text"}},
            "structured_outputs",
            "give one of them",
        ),
        ({"structured": SCHEMA}, "structured", "unknown field"),
    ],
)
def test_what_is_no_form_is_refused_with_its_path(body: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        chat(**body)
    assert refused.value.field == field
