"""Schemas of every keyword, with documents that fit and that do not: the grammar takes those that jsonschema takes.

Answers are also made by random walks through each grammar, and jsonschema judges them.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.models import load_model
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.structured.compiler import GrammarCompiler
from cortexmlx.structured.matcher import Grammar, fill_masks
from cortexmlx.structured.output import StructuredOutput
from support.schemas.case import Case
from support.schemas.composed import COMPOSED
from support.schemas.formats import FORMATS
from support.schemas.judge import judge_of
from support.schemas.objects import OBJECTS
from support.schemas.refused import REFUSED
from support.schemas.values import VALUES

CASES = (*VALUES, *FORMATS, *OBJECTS, *COMPOSED)
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
        self.pieces, self.ends = table.pieces, table.ends
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
    matcher = grammar.matcher()
    for place, token in enumerate(tokens):
        if token not in allowed(fill_masks([(matcher, [])])[0]):
            return False
        ended = matcher.take(token)
        assert not matcher.error
        if ended:
            return place == len(tokens) - 1
    return bool(matcher.inner.is_accepting())


def compact(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def test_the_cases_are_many_and_of_every_kind() -> None:
    assert len(CASES) >= 60 and len(REFUSED) >= 15
    assert not [name for name, count in Counter(case.name for case in CASES).items() if count > 1]
    assert not [case.name for case in CASES if len(case.valid) < 3 or len(case.invalid) < 3]


@every_case
def test_the_judge_takes_the_valid_documents_only(case: Case) -> None:
    judge = judge_of(case.schema)
    assert [document for document in case.valid if not judge.is_valid(document)] == []
    assert [document for document in case.invalid if judge.is_valid(document)] == []


@every_case
def test_a_grammar_takes_the_valid_documents_only(case: Case, model: Model) -> None:
    grammar = model.grammar(case.schema)
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
    matcher = model.grammar(case.schema).matcher(forced_tokens)
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
        if matcher.take(token):
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
