"""Forms as data: what a caller may give, what is refused by name, and what a finished answer means."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from cortexmlx import InvalidRequest, SamplingParams, StructuredOutput, StructuredOutputError
from cortexmlx.structured.output import MAX_CHARACTERS, MAX_CHOICES, Form


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Shape(BaseModel):
    name: str = Field(max_length=20)
    colour: Colour
    kind: Literal["a", "b"] = "a"
    points: list[Point]
    parent: Shape | None = None


class Named(TypedDict):
    default: Point
    note: str


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Point, '{"x": 1, "y": 2}', Point(1, 2)),
        (
            Shape,
            '{"name":"n","colour":"red","points":[{"x":3}]}',
            Shape(name="n", colour=Colour.RED, points=[Point(3)]),
        ),
        (Named, '{"default":{"x":1},"note":"é"}', {"default": Point(1), "note": "é"}),
        (list[int], "[1, 2]", [1, 2]),
        (dict[str, bool], '{"a": true}', {"a": True}),
        (int | None, "null", None),
        (Colour, '"blue"', Colour.BLUE),
    ],
)
def test_an_answer_is_read_as_the_type_that_was_asked_for(kind: Any, text: str, value: object) -> None:
    form = StructuredOutput.of(kind)
    assert form.form is Form.JSON and form.parse(text) == value
    assert SamplingParams(structured=kind).form == form


def test_an_object_of_a_type_has_its_fields_only() -> None:
    """Also inside, and in a property that is called like a keyword. A mapping of any names stays open."""
    schema = json.loads(StructuredOutput.json(Named).definition)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Point"]["additionalProperties"] is False
    assert json.loads(StructuredOutput.json(dict[str, int]).definition)["additionalProperties"] == {"type": "integer"}
    own = {"type": "object", "properties": {"a": {}}}
    assert json.loads(StructuredOutput.of(own).definition) == own


def test_forms_have_names_as_plain_data() -> None:
    for form in (
        StructuredOutput.json({"type": "object", "properties": {"b": {}, "a": {}}}),
        StructuredOutput.json({}, lenient=True),
        StructuredOutput.json({}, compact=True),
        StructuredOutput.json({"properties": {"a": {}}}, closed=True, lenient=True, compact=True),
        StructuredOutput.json(True),
        StructuredOutput.regex("a+"),
        StructuredOutput.choice(["é", "b"]),
        StructuredOutput.grammar('start: "a"'),
    ):
        assert StructuredOutput.named(json.loads(json.dumps(form.as_mapping()))) == form
        assert pickle.loads(pickle.dumps(form)) == form and StructuredOutput.of(form) is form
    assert StructuredOutput.named({"json_object": True}) == StructuredOutput.json() == StructuredOutput.of("json")
    assert list(StructuredOutput.json({"properties": {"b": {}, "a": {}}}).as_mapping()["json"]["properties"]) == [
        "b",
        "a",
    ]


def test_an_object_of_a_closed_form_has_the_named_properties_only() -> None:
    schema = {"type": "object", "properties": {"b": {"properties": {"c": {}}}, "a": {}}}
    closed = json.loads(StructuredOutput.json(schema, closed=True).definition)
    assert closed["additionalProperties"] is closed["properties"]["b"]["additionalProperties"] is False
    assert list(closed["properties"]) == ["b", "a"] and "additionalProperties" not in schema
    assert StructuredOutput.json(json.dumps(schema), closed=True) == StructuredOutput.json(schema, closed=True)
    assert StructuredOutput.json(Named, closed=True) == StructuredOutput.json(Named)


def test_vllms_names_for_a_closed_and_a_compact_form() -> None:
    schema = {"properties": {"a": {}}}
    asked = {"disable_any_whitespace": True, "disable_additional_properties": True}
    both = StructuredOutput.json(schema, compact=True, closed=True)
    assert StructuredOutput.named({"json": schema, **asked}) == both
    assert StructuredOutput.named({"json": schema, **dict.fromkeys(asked, False)}) == StructuredOutput.json(schema)
    assert StructuredOutput.named({"json_object": True, **asked}) == StructuredOutput.json(compact=True)


def _circle() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    return schema


def _deep() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StructuredOutput.of(5), "must be a JSON schema"),
        (lambda: StructuredOutput.of(None), "must be a JSON schema"),
        (lambda: StructuredOutput.of("yaml"), "must be a JSON schema"),
        (lambda: StructuredOutput.of([{"type": "object"}]), "must be a JSON schema"),
        (lambda: StructuredOutput.of(print), "pydantic makes no JSON schema"),
        (lambda: StructuredOutput.of(object()), "pydantic makes no JSON schema"),
        (lambda: StructuredOutput.json("{"), "no JSON"),
        (lambda: StructuredOutput.json("[1]"), "must be a JSON object"),
        (lambda: StructuredOutput.json({"a": float("nan")}), "cannot be written as JSON"),
        (lambda: StructuredOutput.json({"a": {1, 2}}), "cannot be written as JSON"),
        (lambda: StructuredOutput.json(_circle()), "cannot be written as JSON"),
        (lambda: StructuredOutput.json(_deep()), "cannot be written as JSON"),
        (lambda: StructuredOutput.json("[" * 100_000), "no JSON"),
        (lambda: StructuredOutput.json({"a": "x" * MAX_CHARACTERS}), "at most 262,144"),
        (lambda: StructuredOutput.json({}, lenient=1), "lenient"),  # type: ignore[arg-type]
        (lambda: StructuredOutput.json({}, compact=1), "compact"),  # type: ignore[arg-type]
        (lambda: StructuredOutput.json({}, closed="no"), "closed"),  # type: ignore[arg-type]
        (lambda: StructuredOutput.regex(""), "not empty"),
        (lambda: StructuredOutput.regex(5), "not empty"),  # type: ignore[arg-type]
        (lambda: StructuredOutput.regex("a" * 70_000), "at most 65,536"),
        (lambda: StructuredOutput.regex("\ud800"), "not empty"),
        (lambda: StructuredOutput.choice("abc"), "list of texts"),
        (lambda: StructuredOutput.choice([]), "1 to 16,384"),
        (lambda: StructuredOutput.choice(["a", ""]), "not empty"),
        (lambda: StructuredOutput.choice(["a"] * (MAX_CHOICES + 1)), "1 to 16,384"),
        (lambda: StructuredOutput.grammar(""), "not empty"),
        (lambda: StructuredOutput.named({}), "must have one of"),
        (lambda: StructuredOutput.named({"json": {}, "regex": "a"}), "must have one of"),
        (lambda: StructuredOutput.named({"xml": "a"}), "must have one of"),
        (lambda: StructuredOutput.named({"regex": "a", "lenient": True}), "must have one of"),
        (lambda: StructuredOutput.named({"regex": "a", "disable_any_whitespace": True}), "are for JSON"),
        (lambda: StructuredOutput.named({"json": {}, "disable_any_whitespace": 1}), "disable_any_whitespace"),
        (lambda: StructuredOutput.named({"disable_any_whitespace": True}), "must have one of"),
    ],
)
def test_what_is_no_form_is_refused_by_name(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        make()
    assert refused.value.field == "structured" and len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (StructuredOutput.json(), '{"a": '),
        (StructuredOutput.json(Point), '{"x": "one"}'),
        (StructuredOutput.json(), "[" * 100_000),
    ],
)
def test_an_answer_that_cannot_be_read_says_so(form: StructuredOutput, text: str) -> None:
    with pytest.raises(StructuredOutputError, match="cannot be read"):
        form.parse(text)


def test_other_forms_mean_their_text() -> None:
    assert StructuredOutput.regex("a+").parse("aa") == "aa"
    assert StructuredOutput.choice(["1"]).parse("1") == "1"
