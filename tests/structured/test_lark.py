"""Pieces of grammars, judged by llguidance."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from cortexmlx.structured import lark


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return LLTokenizer("byte")


def takes(tokenizer: Any, source: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, source, log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def test_a_tag_is_made_of_texts_and_special_tokens() -> None:
    specials = {"<a>": 7, "<ab>": 8}
    assert lark.parts("x<ab>y<a>", specials) == ["x", 8, "y", 7]
    assert lark.parts("plain", specials) == ["plain"]
    assert lark.tag('x"<ab>\n', specials) == '"x\\"" <[8]> "\\n"'


@pytest.mark.parametrize("text", ["plain", 'a"b\\', r"\.+*?()|[]{}^$/#&-~ _", "漢字\n\t é", "[TOOL_CALLS]", "</x>"])
def test_a_text_is_matched_as_it_is(tokenizer: Any, text: str) -> None:
    for source in (f"start: {lark.quoted(text)}", f"start: /{lark.escaped(text)}/"):
        assert takes(tokenizer, source, text)
        assert not takes(tokenizer, source, text[:-1])
        assert not takes(tokenizer, source, text + "x")


@pytest.mark.parametrize("close", ["</t>", "]", "\nend", "-->"])
def test_free_text_ends_with_its_tag_and_holds_none(tokenizer: Any, close: str) -> None:
    source = "\n".join(["start: free", *lark.up_to("free", close, {})])
    for text in ("", "text", "a\nb </", close[:-1], "half " + close[: len(close) // 2] + "."):
        assert takes(tokenizer, source, text + close)
        assert not takes(tokenizer, source, text)
        assert not takes(tokenizer, source, f"{text}{close}{close}")
        assert takes(tokenizer, f"start: TEXT\nTEXT: {lark.without(close)}", text)
        assert not takes(tokenizer, f"start: TEXT\nTEXT: {lark.without(close)}", f"{text}{close}")


def test_free_text_ends_at_a_special_token() -> None:
    assert lark.up_to("free", "<a>b", {"<a>": 7}) == ['free: FREE_TEXT <[7]> "b"', r"FREE_TEXT: /(.|\n)*/"]
    rules = ["free: free_text <[7]>", "free_text[lazy]: FREE_TEXT", r"FREE_TEXT: /(.|\n)*b/"]
    assert lark.up_to("free", "b<a>", {"<a>": 7}) == rules


def test_free_text_may_be_forbidden_to_begin_with_a_tag(tokenizer: Any) -> None:
    for source in (
        "\n".join(["start: free", *lark.up_to("free", "]", {}, "<t>")]),
        f'start: TEXT "]"\nTEXT: {lark.without("]", "<t>")}',
    ):
        for text in ("a", "<t", " <t>", "a<t>"):
            assert takes(tokenizer, source, f"{text}]")
        for text in ("<t>", "<t>a"):
            assert not takes(tokenizer, source, f"{text}]")
