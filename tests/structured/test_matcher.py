"""Masks of several answers at once: each is the mask that its matcher has alone, drafts and first tokens included."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from cortexmlx.models import load_model
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.structured.compiler import GrammarCompiler
from cortexmlx.structured.matcher import MAX_ITEMS, Grammar, Matcher, fill_masks
from cortexmlx.structured.output import StructuredOutput

FORMS = (
    StructuredOutput.json({"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}),
    StructuredOutput.regex("[a-f]{2,9}-[0-9]+"),
    StructuredOutput.choice(["red", "green", "greenish"]),
)


@pytest.fixture(scope="module")
def grammars(tiny: Any) -> list[Grammar]:
    compiler = GrammarCompiler(SharedTokenizer(load_model(tiny("llama")).tokenizer), 300)
    return [compiler.compile(form) for form in FORMS]


def allowed(matcher: Matcher) -> np.ndarray:
    """What llguidance itself says of a matcher's next token."""
    words = np.frombuffer(matcher.ll_matcher.compute_bitmask(), np.uint32)
    assert len(words) == matcher.grammar.width
    return words


def ids(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_random_walks(seed: int, grammars: list[Grammar]) -> None:
    """Answers of several grammars in one call, begun at different times, some with drafts: right ones up to a random
    place, and a token that is refused after it.
    """
    chance = random.Random(seed)
    walks: list[Matcher] = []
    ended = 0
    while ended < 20:
        while len(walks) < 5:
            walks.append(chance.choice(grammars).make_matcher())
        asked: list[tuple[Matcher, list[int]]] = []
        expected: list[np.ndarray | None] = []
        for matcher in walks:
            copy = Matcher(matcher.grammar, matcher.ll_matcher.deep_copy())
            expected.append(allowed(copy).copy())
            drafts: list[int] = []
            for _ in range(chance.choice((0, 0, 3))):
                if chance.random() < 0.2:
                    drafts.append(299)  # an id without a token, which no grammar allows
                    expected.append(None)
                    break
                token = chance.choice(ids(allowed(copy)))
                if copy.accept(token):
                    break
                drafts.append(token)
                expected.append(allowed(copy).copy())
            asked.append((matcher, drafts))
        masks = fill_masks(asked)
        assert len(masks) == len(expected)
        for row, known in zip(masks, expected, strict=True):
            assert known is None or (row == known).all()
        row = 0
        for matcher, drafts in asked:
            assert not matcher.error
            if matcher.accept(chance.choice(ids(masks[row]))):
                assert not matcher.error
                walks.remove(matcher)
                ended += 1
            row += 1 + len(drafts)


def test_matchers_of_one_grammar_do_not_share_their_place(grammars: list[Grammar]) -> None:
    one, other = grammars[2].make_matcher(), grammars[2].make_matcher()
    red = ids(fill_masks([(one, [])])[0])
    assert not one.accept(red[0])
    assert ids(fill_masks([(other, [])])[0]) == red != ids(fill_masks([(one, [])])[0])
    assert other.is_fresh and not one.is_fresh


def test_a_refused_token_ends_the_answer_with_an_error(grammars: list[Grammar]) -> None:
    matcher = grammars[0].make_matcher()
    assert not matcher.error
    assert matcher.accept(0) and "\n" not in matcher.error and matcher.error


ENDLESS = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}, "a": {"$ref": "#/$defs/a"}},
    "required": ["n", "a"],
    "additionalProperties": False,
    "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
    "x-guidance": {"whitespace_flexible": False},
}
"""After `n` is chosen, the rest of the text is forced and has no end."""


@pytest.mark.parametrize("forced_tokens", [False, True])
def test_a_forced_text_without_end_is_cut_and_then_an_error(forced_tokens: bool, tiny: Any) -> None:
    compiler = GrammarCompiler(SharedTokenizer(load_model(tiny("llama")).tokenizer), 300)
    grammar = compiler.compile(StructuredOutput.json(ENDLESS))
    endless, other = grammar.make_matcher(forced_tokens), grammar.make_matcher(forced_tokens)
    for token in compiler._vocabulary.encode('{"n":1'):  # type: ignore[union-attr]
        assert not endless.accept(token) and not other.accept(token)
    text = b"".join(compiler._vocabulary.table.pieces[t] for t in endless.ll_matcher.compute_ff_tokens())  # type: ignore[union-attr]
    assert text.startswith(b',"a":{"a":{"a":{') and 1_000 < len(text) < 2 * MAX_ITEMS
    masks = fill_masks([(endless, [])])
    assert endless.accept(ids(masks[0])[0]) and f"limit {MAX_ITEMS}" in endless.error
    assert not other.error
