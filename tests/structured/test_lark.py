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
    assert lark.split_specials("x<ab>y<a>", specials) == ["x", 8, "y", 7]
    assert lark.split_specials("plain", specials) == ["plain"]
    assert lark.tag_rule('x"<ab>\n', specials) == '"x\\"" <[8]> "\\n"'


@pytest.mark.parametrize("text", ["plain", 'a"b\\', r"\.+*?()|[]{}^$/#&-~ _", "漢字\n\t é", "[TOOL_CALLS]", "</x>"])
def test_a_text_is_matched_as_it_is(tokenizer: Any, text: str) -> None:
    for source in (f"start: {lark.quote(text)}", f"start: /{lark.escape_regex(text)}/"):
        assert takes(tokenizer, source, text)
        assert not takes(tokenizer, source, text[:-1])
        assert not takes(tokenizer, source, text + "x")


@pytest.mark.parametrize("close", ["</t>", "]", "\nend", "-->"])
def test_free_text_ends_with_its_tag_and_holds_none(tokenizer: Any, close: str) -> None:
    source = "\n".join(["start: free", *lark.text_up_to_rules("free", close, {})])
    for text in ("", "text", "a\nb </", close[:-1], "half " + close[: len(close) // 2] + "."):
        assert takes(tokenizer, source, text + close)
        assert not takes(tokenizer, source, text)
        assert not takes(tokenizer, source, f"{text}{close}{close}")
        assert takes(tokenizer, f"start: TEXT\nTEXT: {lark.text_without(close)}", text)
        assert not takes(tokenizer, f"start: TEXT\nTEXT: {lark.text_without(close)}", f"{text}{close}")


def test_free_text_ends_at_a_special_token() -> None:
    free = lark.text_up_to_rules("free", "<a>b", {"<a>": 7, "<ab>": 8})
    assert free == ['free: FREE_TEXT <[7]> "b"', rf"FREE_TEXT: {lark.text_without('<a>')}"]
    rules = ["free: free_text <[7]>", "free_text[lazy]: FREE_TEXT", r"FREE_TEXT: /(.|\n)*b/"]
    assert lark.text_up_to_rules("free", "b<a>", {"<a>": 7}) == rules


def test_free_text_may_be_forbidden_to_begin_with_a_tag(tokenizer: Any) -> None:
    for source in (
        "\n".join(["start: free", *lark.text_up_to_rules("free", "]", {}, "<t>")]),
        f'start: TEXT "]"\nTEXT: {lark.text_without("]", "<t>")}',
    ):
        for text in ("a", "<t", " <t", "a<t>", " a <t>", " " * 65 + "<t>"):
            assert takes(tokenizer, source, f"{text}]")
        for text in ("<t>", "<t>a", " <t>", "\n\t<t>a", "\u3000<t>", "\x1c<t>", " " * 64 + "<t>"):
            assert not takes(tokenizer, source, f"{text}]")


def test_one_of_very_many_texts(tokenizer: Any) -> None:
    texts = ["", "a", "ab", 'a "b"\n', "é漢🙂", *(f"text {number}" for number in range(16_000))]
    source = "\n".join(lark.choice_rules("start", texts))
    for text in (*texts[:8], texts[-1]):
        assert takes(tokenizer, source, text)
    assert not takes(tokenizer, source, "text") and not takes(tokenizer, source, "text 16000")


def test_a_tag_after_blanks_is_told_from_free_text(tokenizer: Any) -> None:
    """Also where a free text could have begun with the same blanks."""
    assert lark.tag_after_blanks("<ab>", {"b>": 7}) == r"/[ \n\t\r]{0,64}<a/ <[7]>"
    assert lark.tag_after_blanks("<a>b", {"<a>": 7}) == r'/[ \n\t\r]{1,64}/? <[7]> "b"'
    rules = [
        "start: " + lark.tag_after_blanks("<t>", {}) + ' "in" | FREE "."',
        f"FREE: {lark.text_without('.', '<t>')}",
    ]
    for text in ("<t>in", " <t>in", "\n\n<t>in", "x.", " \n."):
        assert takes(tokenizer, "\n".join(rules), text)
    for text in ("<t>.", "\n<t>."):
        assert not takes(tokenizer, "\n".join(rules), text)
