"""Formats that mlx-lm's parsers read: whole calls only, and whatever those parsers do, the answer goes on."""

from __future__ import annotations

import importlib

import pytest

from cortexmlx.calls.find import _FOREIGN
from cortexmlx.calls.foreign import MOST_CALL, Foreign
from cortexmlx.calls.format import Calls
from support.tool_calls import TOOLS, read

KIMI = Foreign("kimi_k2")
CALL = "functions.weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>"


def section(arguments: str) -> str:
    call = CALL.replace("{}", arguments)
    return f"<|tool_calls_section_begin|><|tool_call_begin|>{call}<|tool_calls_section_end|>"


@pytest.mark.parametrize("module", sorted({module for module, _ in _FOREIGN}))
def test_the_parsers_are_there(module: str) -> None:
    found = importlib.import_module(f"mlx_lm.tool_parsers.{module}")
    assert found.tool_call_start and found.tool_call_end and callable(found.parse_tool_call)


def test_a_call_is_told_when_it_is_complete() -> None:
    text = section('{"city": "Rome", "days": 2}')
    parser = Calls(KIMI, TOOLS).parser("key", streamed=False)
    assert parser is not None
    for char in text[:-1]:
        assert parser.feed(char) == ("", ())
    _, deltas = parser.feed(text[-1])
    assert [delta.name for delta in deltas] == ["weather", ""]
    assert parser.calls[0].values == {"city": "Rome", "days": 2}


@pytest.mark.parametrize("arguments", ["{", "[1]", "x", "", '{"city": NaN}'])
def test_what_the_parser_cannot_read_is_text(arguments: str) -> None:
    text = section(arguments)
    result = read(KIMI, [text], streamed=False)
    assert (result.calls, result.text) == ((), text)


def test_an_unknown_tool_is_text() -> None:
    text = section("{}").replace("weather", "rocket")
    assert read(KIMI, [text], streamed=False)[:2] == (text, ())


def test_an_endless_call_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortexmlx.calls.foreign.MOST_CALL", 1000)
    assert MOST_CALL > 1000
    text = "<|tool_calls_section_begin|>" + "x" * 2000
    assert read(KIMI, [text], streamed=False)[:2] == (text, ())


def test_there_is_no_grammar() -> None:
    assert not KIMI.enforced
    with pytest.raises(NotImplementedError):
        KIMI.grammar(Calls(KIMI, TOOLS), "", {})
    with pytest.raises(NotImplementedError):
        KIMI.call(0, TOOLS[0], {})
