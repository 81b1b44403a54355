"""The grammars that llguidance gets: the answer's own, and what may come before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cortexmlx.structured.calls.format import CallFormat, Calls
from cortexmlx.structured.calls.json_formats import Hermes, Llama
from cortexmlx.structured.compiler import source_of
from cortexmlx.structured.output import StructuredOutput, Thoughts
from support.tool_calls import TOOLS

SPECIALS = {"<end>": 256, "<|channel|>": 257, "<|message|>": 258, "<|start|>": 259, "<|done|>": 260}
FORM = StructuredOutput.json({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
HARMONY = Thoughts(
    "<|channel|>analysis<|message|>",
    "<|done|><|start|>assistant<|channel|>final<|message|>",
    skipped="<|channel|>final<|message|>",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The 256 bytes, and special tokens."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    class Bytes:
        eos_token_id = 256
        bos_token_id = None
        tokens = (*(bytes([i]) for i in range(256)), *(text.encode() for text in SPECIALS))
        special_token_ids = tuple(SPECIALS.values())

        def __call__(self, text: str) -> list[int]:
            if not isinstance(text, str):
                raise TypeError
            return list(text.encode())

    return LLTokenizer(TokenizerWrapper(Bytes()))


def ids(text: str) -> list[int]:
    """The tokens of a text, in which the special tokens are written out."""
    tokens: list[int] = []
    while text:
        special = next((s for s in SPECIALS if text.startswith(s)), None)
        tokens += [SPECIALS[special]] if special else list(text[0].encode())
        text = text[len(special or text[0]) :]
    return tokens


def follows(tokenizer: Any, source: str, text: str) -> bool | None:
    """Whether a text is whole; None if it is refused."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.is_accepting()) if matcher.consume_tokens(ids(text)) else None


@pytest.mark.parametrize(
    ("thoughts", "whole", "part", "wrong"),
    [
        (None, ['{"a":1}', '{ "a" : 1 }', '{\n  "a": 1}'], ['{"a'], ['x{"a":1}', '<think>b</think>{"a":1}']),
        (
            Thoughts("<think>", "</think>", begun=True),
            ['</think>{"a":1}', 'so </thin k> {"a":2} é </think>\n\n{"a":1}'],
            ["", "hm", '{"a":1}', "hm </think>", '</think>\n{"a"'],
            ["</think>x", "<end>"],
        ),
        (
            Thoughts("<think>", "</think>"),
            ['{"a":1}', '<think></think>{"a":1}', '\n<think>\nwell\n</think>\n\n{"a":1}'],
            ["<thi", "<think>so", "\n"],
            ["<thx", "so", "<think>a</think>b"],
        ),
        (
            HARMONY,
            [
                '<|channel|>analysis<|message|>hm {"a"} <|done|><|start|>assistant<|channel|>final<|message|>{"a":1}',
                '<|channel|>final<|message|>{"a":1}',
                '{"a":1}',
            ],
            ["<|channel|>analysis<|message|>hm", "<|channel|>analysis<|message|>hm<|done|><|start|>assis"],
            ["<|channel|>commentary", "<|channel|>analysis<|message|>hm<|start|>", "<|message|>"],
        ),
    ],
)
def test_thoughts_are_free_and_the_answer_is_not(
    thoughts: Thoughts | None, whole: list[str], part: list[str], wrong: list[str], tokenizer: Any
) -> None:
    source = source_of(FORM, thoughts, False, SPECIALS)
    assert [follows(tokenizer, source, text) for text in whole] == [True] * len(whole)
    assert [follows(tokenizer, source, text) for text in part] == [False] * len(part)
    assert [follows(tokenizer, source, text) for text in wrong] == [None] * len(wrong)


@pytest.mark.parametrize("thoughts", [Thoughts("<think>", "<|done|>", begun=True), replace(HARMONY, begun=True)])
def test_a_special_token_that_is_spelled_out_closes_no_thoughts(thoughts: Thoughts, tokenizer: Any) -> None:
    """Who reads the text would take it for one, and everything after it for the answer."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, source_of(FORM, thoughts, False, SPECIALS), log_level=0)
    begun = list(b"hm <|done|")
    assert matcher.try_consume_tokens([*begun, *b">"]) == len(begun)
    assert matcher.consume_tokens(ids(thoughts.close + '{"a":1}')) and matcher.is_accepting()


def test_a_tokenizer_that_drops_a_space_may_write_one(tokenizer: Any) -> None:
    """The first token of an answer often begins with it, and its text has none."""
    for thoughts in (None, Thoughts("<think>", "</think>")):
        source = source_of(FORM, thoughts, True, SPECIALS)
        assert follows(tokenizer, source, ' {"a":1}') and follows(tokenizer, source, '{"a":1}')
    assert follows(tokenizer, source_of(FORM, None, False, SPECIALS), ' {"a":1}') is None


@pytest.mark.parametrize(
    ("form", "whole", "wrong"),
    [
        (StructuredOutput.regex(r"a/b\n[é✓]+"), ["a/b\né✓"], ["a\\/b\né"]),
        (StructuredOutput.choice(["yes", "yes please", 'a "b"\n\\', "é✓😀", "/"]), ['a "b"\n\\', "é✓😀", "/"], ["no"]),
        (StructuredOutput.grammar('start: "a" b+\nb: "b" | "c"'), ["ab", "acb"], ["b"]),
        (StructuredOutput.json(True), ["1", '"x"', '[{"a":null}]'], ["x"]),
        (StructuredOutput.json(), ['{"x": [1, 2]}', "{}"], ["1", "[]"]),
        (StructuredOutput.json({"enum": [1, "é"]}), ["1", '"é"'], ["2"]),
        (StructuredOutput.json({"x-guidance": {"whitespace_flexible": False}, "type": "array"}), ["[1,2]"], ["[1, 2]"]),
        (StructuredOutput.json({"type": "array"}, compact=True), ["[1,2]"], ["[1, 2]"]),
        (StructuredOutput.json(True, compact=True), ['{"a":1}'], ['{"a": 1}']),
        (StructuredOutput.json({"x-guidance": {"whitespace_pattern": " "}}, compact=True), ['{"a":1}'], ['{"a": 1}']),
        (
            StructuredOutput.json({"type": "object", "properties": {"a": {}}}, closed=True),
            ["{}", '{"a": {"b": 1}}'],
            ['{"b": 1}', '{"a": 1, "b": 1}'],
        ),
    ],
)
def test_forms(form: StructuredOutput, whole: list[str], wrong: list[str], tokenizer: Any) -> None:
    for thoughts in (None, Thoughts("<think>", "</think>")):
        source = source_of(form, thoughts, False, SPECIALS)
        assert [follows(tokenizer, source, text) for text in whole] == [True] * len(whole)
        assert [follows(tokenizer, source, text) for text in wrong] == [None] * len(wrong)


def test_blanks_between_the_parts_of_json_are_bounded(tokenizer: Any) -> None:
    source = source_of(FORM, None, False, SPECIALS)
    assert follows(tokenizer, source, '{"a": ' + "1}") and follows(tokenizer, source, '{"a":\n' + " " * 40 + "1}")
    for blanks in ("  ", "\n\n", " \n", "\n" + " " * 41, "\t"):
        assert follows(tokenizer, source, '{"a":' + blanks + "1}") is None


TAGGED = Thoughts("<think>", "</think>")


def hermes_call(days: int) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "Oslo", "days": {days}}}}}\n</tool_call>'


def llama_call(days: int) -> str:
    return f'{{"name": "weather", "parameters": {{"city": "Oslo", "days": {days}}}}}'


@pytest.mark.parametrize(
    ("format", "call", "after_thoughts"),
    [(Hermes(), hermes_call, "\n\nwell "), (Llama(), llama_call, "\n\n")],
    ids=["hermes", "llama"],
)
def test_calls_come_after_thoughts_and_after_a_dropped_space(
    format: CallFormat, call: Callable[[int], str], after_thoughts: str, tokenizer: Any
) -> None:
    """What looks like a call in the thoughts is none, and need not fit a schema."""
    calls = Calls(format, TOOLS)
    for drops_space in (False, True):
        source = source_of(None, TAGGED, drops_space, SPECIALS, calls)
        begun = source_of(None, Thoughts("<think>", "</think>", begun=True), drops_space, SPECIALS, calls)
        whole = [call(1), f"<think>{call(-1)}</think>{call(1)}", f"<think>so</think>{after_thoughts}", "plain text"]
        assert [follows(tokenizer, source, text) for text in whole] == [True] * len(whole)
        assert follows(tokenizer, begun, f"{call(-1)}</think>{call(2)}") is True
        wrong = [call(-1), f"<think>so</think>{call(-1)}"]
        assert [follows(tokenizer, source, text) for text in wrong] == [None] * len(wrong)
        for open_, own in (("<think>", source), ("", begun)):
            assert follows(tokenizer, own, f"{open_}hm, {call(-1)}") is True, "an answer may end within its thoughts"
        required = source_of(None, TAGGED, drops_space, SPECIALS, Calls(format, TOOLS, "required"))
        assert not follows(tokenizer, required, f"<think>{call(1)}"), "unless a call is required"
        assert follows(tokenizer, source, " " + call(1)) is True or not drops_space


def test_a_form_or_calls_come_after_thoughts(tokenizer: Any) -> None:
    source = source_of(FORM, TAGGED, False, SPECIALS, Calls(Hermes(), TOOLS))
    for text in ('<think>hm</think>{"a":1}', f"<think>hm</think>{hermes_call(1)}", '{"a": 1}'):
        assert follows(tokenizer, source, text) is True
    assert not follows(tokenizer, source, "<think>hm"), "a form is asked for"
    for text in ("<think>hm</think>b", f'{{"a":1}}{hermes_call(1)}'):
        assert follows(tokenizer, source, text) is None
