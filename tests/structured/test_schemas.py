"""Schemas: what the grammar takes is what the schema means, objects are closed, and what costs too much is refused."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from cortexmlx.errors import InvalidRequest
from cortexmlx.models import load_model
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.structured.compiler import GrammarCompiler
from cortexmlx.structured.matcher import Grammar, fill_masks
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.structured.schemas import (
    SIMPLE_ESCAPES,
    allowed_escapes,
    check_multiples,
    close_objects,
    close_plain_objects,
    close_where_safe,
    closed_type_schema,
    resolve_pointer,
    type_adapter,
)
from support.schema_cases import CASES, TEXT, Case, judge_of

REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("not", {"not": {"type": "null"}}),
    ("not", {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {"const": 1}}}}}),
    ("uniqueItems", {"type": "array", "items": TEXT, "uniqueItems": True}),
    ("contains", {"type": "array", "contains": {"const": 1}}),
    ("minContains", {"type": "array", "minContains": 1}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
    ("if", {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}),
    ("phone", {"type": "string", "format": "phone"}),
    ("look-around", {"type": "string", "pattern": "^(?!x)"}),
    ("$dynamicRef", {"$dynamicRef": "#node"}),
    ("lookaround", {"type": "string", "pattern": r"\bcat\b"}),
    ("iri", {"type": "string", "format": "iri"}),
    ("not disjoint", {"type": "object", "patternProperties": {"^a": {}, "b$": TEXT}}),
    ("min/maxProperties", {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}),
    ("integer range", {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
    ("Unsatisfiable", {"type": "string", "format": "date", "maxLength": 5}),
)


WALKS = 8
LONGEST = 1_000
"""How many tokens a walk may take."""
LONG = 60
"""After how many tokens a walk chooses only what closes something, or what a valid document has, if it can."""

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class Model:
    """The tokens of a tiny model, and the grammars that it can follow."""

    def __init__(self, folder: Any) -> None:
        tokenizer = SharedTokenizer(load_model(folder).tokenizer)
        table = tokenizer.token_table(300)
        assert table is not None
        self.compiler = GrammarCompiler(tokenizer, 300)
        self.pieces, self.ends = table.pieces, table.end_ids
        self.tokens = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self.closing = {token for token, piece in enumerate(self.pieces) if piece[:1] in (b'"', b"]", b"}")}

    def grammar(self, schema: dict[str, Any]) -> Grammar:
        return self.compiler.compile(StructuredOutput.json(schema))


@pytest.fixture(scope="module")
def model(tiny: Any) -> Model:
    return Model(tiny("llama"))


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def taken(grammar: Grammar, tokens: list[int]) -> bool:
    """Whether every token of an answer may be chosen, and the answer may end after them."""
    matcher = grammar.make_matcher()
    for place, token in enumerate(tokens):
        if token not in allowed(fill_masks([(matcher, [])])[0]):
            return False
        ended = matcher.accept(token)
        assert not matcher.error
        if ended:
            return place == len(tokens) - 1
    return bool(matcher.ll_matcher.is_accepting())


def compact(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


@every_case
def test_a_grammar_takes_the_valid_documents_only(case: Case, model: Model) -> None:
    """jsonschema agrees which those are."""
    judge, grammar = judge_of(case.schema), model.grammar(case.schema)
    assert [document for document in case.valid if not judge.is_valid(document)] == []
    assert [document for document in case.invalid if judge.is_valid(document)] == []
    assert grammar.notes == ()
    for document in case.valid:
        assert taken(grammar, model.tokens(compact(document))), document
    spaced = json.dumps(case.valid[-1], ensure_ascii=False)
    assert taken(grammar, model.tokens(spaced)), spaced
    for document in case.invalid:
        assert not taken(grammar, model.tokens(compact(document))), document


def walk(case: Case, model: Model, chance: random.Random, forced_tokens: bool) -> str | None:
    """Follow a valid document to a random place, and then choose tokens at random until the answer is whole. Return its
    text; None if it becomes too long.
    """
    matcher = model.grammar(case.schema).make_matcher(forced_tokens)
    known = [model.tokens(compact(document)) for document in case.valid]
    usual = {token for tokens in known for token in tokens}
    begun = chance.choice(known)
    begun = begun[: chance.randrange(len(begun))]
    written: list[int] = []
    while len(written) < LONGEST:
        may = allowed(fill_masks([(matcher, [])])[0])
        assert may and not matcher.error
        if may <= model.ends or (may & model.ends and chance.random() < 0.5):
            break
        if len(written) < len(begun) and begun[len(written)] in may and written == begun[: len(written)]:
            token = begun[len(written)]
        else:
            may -= model.ends
            kind = chance.choice((may, may, model.closing, usual) if len(written) < LONG else (model.closing, usual))
            token = chance.choice(sorted(may & kind or may & usual or may))
        written.append(token)
        if matcher.accept(token):
            assert not matcher.error
            break
    else:
        return None
    return b"".join(model.pieces[token] for token in written).decode()


@every_case
def test_random_answers_are_valid(case: Case, model: Model) -> None:
    judge, chance = judge_of(case.schema), random.Random(case.name)
    texts = [walk(case, model, chance, forced_tokens=number % 2 == 1) for number in range(WALKS)]
    whole = [text for text in texts if text is not None]
    assert len(whole) > WALKS // 2
    for text in whole:
        assert not list(judge.iter_errors(json.loads(text))), text


@pytest.mark.parametrize(
    ("schema", "fits", "differs"),
    [
        ({"type": "object", "properties": {"a": {"type": "null"}}}, '{"a":null,"é":1}', '{"\\u0061":1}'),
        (
            {
                "type": "object",
                "patternProperties": {"^x": {"type": "null"}},
                "additionalProperties": {"type": "boolean"},
            },
            '{"x":null,"y":true}',
            '{"\\u0078":true}',
        ),
        (
            {"anyOf": [{"type": "array", "items": {"properties": {'"': {"type": "null"}}}}, {"type": "string"}]},
            '[{"\\"":null,"\\n":1},5]',
            '[{"\\u0022":1}]',
        ),
    ],
)
def test_a_property_has_one_spelling(schema: dict[str, Any], fits: str, differs: str, model: Model) -> None:
    judge, grammar = judge_of(schema), model.grammar(schema)
    assert judge.is_valid(json.loads(fits)) and taken(grammar, model.tokens(fits))
    assert not judge.is_valid(json.loads(differs)) and not taken(grammar, model.tokens(differs))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "format": "date"}, '"2023-02-29"'),
        ({"type": "string", "format": "hostname"}, f'"{"a." * 127}a"'),
        ({"type": "object", "additionalProperties": True, "minProperties": 2}, '{"a":1,"a":2}'),
    ],
)
def test_what_the_page_calls_loose(schema: dict[str, Any], text: str, model: Model) -> None:
    """llguidance takes what is not valid. If this fails, it has become stricter: the page must say so."""
    assert not judge_of(schema).is_valid(json.loads(text)) and taken(model.grammar(schema), model.tokens(text))


@pytest.mark.parametrize(("words", "schema"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_enforced_is_named(words: str, schema: dict[str, Any], model: Model) -> None:
    with pytest.raises(InvalidRequest, match=f"this schema cannot be enforced: .*{re.escape(words)}") as refused:
        model.grammar(schema)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600


# Closed schemas: every object that names its properties has no others, and what fits them fits the original.


A = {"properties": {"a": {}}}
B = {"properties": {"b": {}}}
TAGGED = [
    {"type": "object", "properties": {"tag": {"const": tag}, tag: {}}, "required": ["tag"]} for tag in ("one", "two")
]


def shut(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**schema, **more, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, shut(A)),
        ({"items": A, "$defs": {"x": B}}, {"items": shut(A), "$defs": {"x": shut(B)}}),
        ({"properties": {"properties": A}}, shut({"properties": {"properties": shut(A)}})),
        ({"patternProperties": {"^x": A}}, shut({"patternProperties": {"^x": shut(A)}})),
        ({"anyOf": [A, B, {"type": "null"}]}, {"anyOf": [shut(A), shut(B), {"type": "null"}]}),
        ({"allOf": [A], "title": "x"}, {"allOf": [shut(A)], "title": "x"}),
        ({**A, "anyOf": [{"required": ["a"]}]}, shut({**A, "anyOf": [{"required": ["a"]}]})),
        ({"$ref": "#/$defs/x", "$defs": {"x": A}}, {"$ref": "#/$defs/x", "$defs": {"x": shut(A)}}),
        ({"oneOf": TAGGED}, {"oneOf": [shut(each) for each in TAGGED]}),
        (
            {"oneOf": [{"type": "object", **A}, {"type": ["null", "string"]}]},
            {"oneOf": [shut({"type": "object"}, **A), {"type": ["null", "string"]}]},
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}], "$defs": dict(zip("01", TAGGED, strict=True))},
            {
                "oneOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}],
                "$defs": dict(zip("01", map(shut, TAGGED), strict=True)),
            },
        ),
    ],
)
def test_an_object_that_names_its_properties_is_closed(schema: dict[str, Any], closed: dict[str, Any]) -> None:
    assert close_where_safe(schema) == closed


def test_a_plain_object_says_nothing_but_its_properties() -> None:
    for more in ({"anyOf": [{"required": ["a"]}]}, {"patternProperties": {"^x": {}}}, {"not": {}}, {"if": {}}):
        assert close_plain_objects({"items": {**A, **more}}) == {"items": {**A, **more}}
    for said in ({"patternProperties": {"^x": A}}, {**A, "additionalProperties": True}, True):
        closed = {"patternProperties": {"^x": shut(A)}} if "patternProperties" in str(said) else said
        assert close_plain_objects(said) == closed
    assert close_plain_objects({"anyOf": [A, B]}) == {"anyOf": [shut(A), shut(B)]}
    assert close_plain_objects({"properties": {"patternProperties": A}}) == shut(
        {"properties": {"patternProperties": shut(A)}}
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"default": A, "const": A, "enum": [A], "examples": [A]},
        {"not": A},
        {"if": A, "then": B},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "unevaluatedProperties": False},
        {**A, "required": ["a", "b"]},
        {**A, "minProperties": 2},
        {"allOf": [A, B]},
        {"allOf": [{"properties": {}}, A]},
        {"allOf": [{"$ref": "#/$defs/x"}, B], "$defs": {"x": A}},
        {"allOf": [{"$ref": "#/$defs/x/allOf/0"}, B], "$defs": {"x": {"allOf": [A]}}},
        {**A, "anyOf": [B, {"required": ["a"]}]},
        {"required": ["a"], "anyOf": [A, B]},
        {"anyOf": [A, B], "oneOf": [B]},
        {**A, "$ref": "#/$defs/x", "$defs": {"x": B}},
        {**A, "allOf": [{"patternProperties": {"^x": {}}}]},
        {"oneOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}]},
        {"oneOf": [{"properties": {"a": A}}, {"properties": {"a": {"$ref": "#/$defs/x"}}}], "$defs": {"x": B}},
    ],
)
def test_what_would_forbid_a_named_property_stays_open(schema: dict[str, Any]) -> None:
    assert close_where_safe(schema) == schema


@pytest.mark.parametrize("schema", [True, False, {"$ref": "#/x"}, {"$ref": "http://x/y", "allOf": 5, "required": "a"}])
def test_what_is_no_object_or_wrong_is_left_to_the_compiler(schema: Any) -> None:
    assert close_where_safe(schema) == schema


def test_all_objects_of_a_type_are_closed() -> None:
    assert close_objects({"allOf": [A, B]}) == {"allOf": [shut(A), shut(B)]}


names = st.sampled_from("ab")
values = st.sampled_from([True, {"type": "string"}, {"const": "x"}, {"properties": {"a": {}}}, {"$ref": "#/$defs/d"}])
flat = st.fixed_dictionaries(
    {"properties": st.dictionaries(names, values, max_size=2)},
    optional={"type": st.just("object"), "required": st.lists(names, max_size=1), "minProperties": st.just(1)},
)
parts = flat | st.just({"$ref": "#/$defs/d"}) | st.just({"required": ["a"]}) | st.just({"type": "string"})
joined = st.tuples(st.sampled_from(["allOf", "anyOf", "oneOf"]), st.lists(parts, min_size=1, max_size=2)).map(
    lambda pair: dict([pair])
)
schemas = st.builds(
    lambda *some: {k: v for each in some for k, v in each.items()}, joined, joined | st.just({}), flat | st.just({})
)
documents = st.dictionaries(names, st.sampled_from([1, "x", {"a": 1}, {"b": 1}]), max_size=2)

targets = st.sampled_from([A, {**B, "required": ["b"]}, {"type": "string"}, {"allOf": [A, B]}, {"oneOf": [A, B]}])


@given(schema=schemas, target=targets, document=documents)
def test_what_fits_a_closed_schema_fits_the_original(schema: Any, target: Any, document: Any) -> None:
    """jsonschema is the judge."""
    whole = {**schema, "$defs": {"d": target}}
    if Draft202012Validator(close_where_safe(whole)).is_valid(document):
        Draft202012Validator(whole).validate(document)


# Schemas of types: closed, in the types' own order, and refused in one line.


@dataclass
class Inner:
    properties: dict[str, int]
    enum: str


@dataclass
class Outer:
    inner: list[Inner]
    default: Inner | None = None


def test_every_object_with_named_properties_is_closed() -> None:
    """Also where properties are called like keywords, whose values are no schemas."""
    schema = closed_type_schema(Outer)
    assert isinstance(schema, dict)
    inner = schema["$defs"]["Inner"]
    assert schema["additionalProperties"] is False and inner["additionalProperties"] is False
    assert list(schema["properties"]) == ["inner", "default"]
    assert inner["properties"]["properties"]["additionalProperties"] == {"type": "integer"}
    assert type_adapter(Outer).validate_json('{"inner": []}') == Outer([])


@pytest.mark.parametrize("kind", [print, object(), open, 5])
def test_what_has_no_schema_is_refused_in_one_line(kind: object) -> None:
    with pytest.raises(ValueError) as refused:
        closed_type_schema(kind)
    assert str(refused.value) and "\n" not in str(refused.value)


# Which escapes JSON may have: all of them, unless they would be another spelling of a property.


LETTER: dict[str, Any] = {"properties": {"a": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        LETTER,
        {**LETTER, "additionalProperties": True},
        {**LETTER, "additionalProperties": {"type": "null"}},
        {"patternProperties": {"^a": {}}},
        {"type": "array", "items": [{"anyOf": [{"type": "null"}, LETTER]}]},
        {"$defs": {"x": LETTER}, "$ref": "#/$defs/x"},
        {**LETTER, "additionalProperties": False, "allOf": [LETTER]},
        {**LETTER, "description": "Größe\n\t漢字"},
    ],
)
def test_beside_other_properties_each_has_its_plain_name(schema: dict[str, Any]) -> None:
    assert allowed_escapes(schema) == SIMPLE_ESCAPES


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string"},
        {"type": "object"},
        {"properties": {}},
        {"additionalProperties": LETTER["properties"]["a"]},
        {**LETTER, "additionalProperties": False},
        {**LETTER, "required": ["\x1b"]},
        {"properties": {"a": {"const": "\u007f"}}},
        {"properties": {"a": {"type": "string", "pattern": r"^[\u0001-\u001f]$"}}},
        {"properties": {"a": {"type": "string", "pattern": r"^\x1B"}}},
    ],
)
def test_otherwise_control_characters_can_be_written(schema: Any) -> None:
    assert allowed_escapes(schema) is None


# References within a schema: as RFC 6901 has them.


SCHEMA = {"$defs": {"a/b": {"type": "null"}, "c~d e": 7}, "anyOf": [{"x": 1}, True]}


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        ("#", SCHEMA),
        ("#/$defs/a~1b", {"type": "null"}),
        ("#/$defs/c~0d%20e", 7),
        ("#/anyOf/0/x", 1),
        ("#/anyOf/1", True),
        *((wrong, None) for wrong in ("#/anyOf/2", "#/anyOf/x", "#/$defs/none", "#/anyOf/1/x", "#name", "", 3, None)),
        *((elsewhere, None) for elsewhere in ("https://example.com/$defs", "other.json#/$defs/a~1b")),
    ],
)
def test_what_a_reference_leads_to(reference: object, target: object) -> None:
    assert resolve_pointer(reference, SCHEMA) == target


# `multipleOf` is bounded by what it costs to compile.


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {"multipleOf": 0.01},
        {"multipleOf": 10**30},
        {"multipleOf": "7"},
        {"multipleOf": True},
        {"multipleOf": 0},
        {"multipleOf": float("inf")},
        {"multipleOf": 99_991},
        {"properties": {f"p{i}": {"multipleOf": (0.01, 0.5, 5, 15, 60, 1000)[i % 6]} for i in range(60)}},
    ],
)
def test_what_is_cheap_is_let_through(schema: Any) -> None:
    check_multiples(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 999_983},
        {"multipleOf": 0.999983},
        {"multipleOf": -999_983},
        {"multipleOf": 2**4000 + 1},
        {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
        {"allOf": [{"$ref": "#/$defs/a"}, {"multipleOf": 991}], "$defs": {"a": {"multipleOf": 997}}},
        {"properties": {f"p{i}": {"multipleOf": 9973, "minimum": i} for i in range(20)}},
        {"$defs": {"a": {"multipleOf": 9973}}, "anyOf": [{"allOf": [{"$ref": "#/$defs/a"}]} for _ in range(20)]},
    ],
)
def test_what_takes_long_is_refused_with_its_numbers(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"least common multiple .* must be at most 100,000") as refused:
        StructuredOutput.json(schema)
    assert len(str(refused.value)) < 2000
