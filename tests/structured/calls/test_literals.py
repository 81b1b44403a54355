"""Every answer that the grammar of a literal format allows is read as others read the same text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from cortexmlx.structured.calls.find import find_format
from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.structured.calls.literals import Pythonic
from cortexmlx.structured.compiler import grammar_source
from cortexmlx.structured.tools import Tool
from support.tool_calls import mapping

ITEM = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "array", "items": {"$ref": "#/$defs/item"}}]}
DATA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/item"}}}
EDIT = mapping(
    "edit",
    {
        "text": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "pick": {"enum": ["a b", "null", 2, None]},
        "name": {"type": "string", "maxLength": 5},
        "count": {"type": "integer", "minimum": 0},
        "flag": {"type": "boolean"},
        "data": {**DATA, "additionalProperties": False},
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}},
    },
    ["note"],
    **{"$defs": {"item": ITEM}},
)
TOOLS = Tool.of(EDIT), Tool.of(mapping("now", {}))


def braces(begin: str, end: str, quote: str) -> Callable[[str], Any]:
    """A reader of Gemma's calls: what is not JSON in them is written as JSON."""
    b, e, q = map(re.escape, (begin, end, quote))
    parts = re.compile(rf'{q}(.*?){q}|("(?:[^"\\]|\\.)*")|{b}call:(\w+)|({e})|([a-z]+)(?=:)', re.DOTALL)

    def to_json(match: re.Match[str]) -> str:
        text, string, tool, _, key = match.groups()
        if text is not None:
            return json.dumps(text)
        return string or (f'["{tool}",' if tool else f'"{key}"' if key else "],")

    return lambda answer: json.loads(f"[{parts.sub(to_json, answer)[:-1]}]")


def python(answer: str) -> Any:
    """Python itself, as the reader of LFM2's calls."""
    calls = answer.removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>")
    names = {each.name: lambda _name=each.name, **values: [_name, values] for each in TOOLS}
    return eval(calls, {**names, "true": True, "false": False, "null": None})


FORMATS = {
    "Gemma 4": (find_format("<|tool_call> <tool_call|>", ()), braces("<|tool_call>", "<tool_call|>", '<|"|>')),
    "FunctionGemma": (
        find_format("<start_function_call>", ()),
        braces("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "LFM2": (Pythonic(), python),
}


BYTES = LLTokenizer("byte")


@cache
def matcher_of(name: str) -> LLMatcher:
    source = grammar_source(None, None, False, {}, AllowedCalls(FORMATS[name][0], TOOLS, "required"))
    return LLMatcher(BYTES, source, log_level=0)


def walk(name: str, dice: random.Random) -> str:
    """A random answer that the grammar allows. It ends soon: what closes something is tried first, at last always."""
    matcher, tokens = matcher_of(name).deep_copy(), list[int]()
    closing = [BYTES.tokenize_str(each) for each in (FORMATS[name][0].text_end, *'"}])<', "null", "0") if each]
    while not matcher.is_stopped() and not (matcher.is_accepting() and dice.random() < 0.5):
        for tag in dice.sample(closing, len(closing)) if dice.random() < len(tokens) / 300 else ():
            if count := matcher.try_consume_tokens(tag):
                tokens += tag[:count]
                break
        else:
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            tokens.append(int(dice.choice(np.flatnonzero(mask))))
            assert matcher.consume_token(tokens[-1]), matcher.get_error()
    return bytes(token for token in tokens if token < 256).decode()


@pytest.mark.parametrize("name", FORMATS)
@given(dice=st.randoms(use_true_random=False))
def test_what_the_grammar_allows_is_read_as_it_was_meant(name: str, dice: random.Random) -> None:
    form, judge = FORMATS[name]
    answer = walk(name, dice)
    parser = AllowedCalls(form, TOOLS).make_parser("key", streaming=True)
    assert parser is not None
    text = parser.feed(answer)[0] + parser.finish()[0]
    assert (text, parser.notes) == ("", []), answer
    assert json.dumps([[call.name, call.values] for call in parser.calls]) == json.dumps(judge(answer)), answer
