"""What the answers of a request may call, and the parser of one answer."""

from __future__ import annotations

import json

import pytest

from cortexmlx.structured.calls.format import AllowedCalls, close_arguments, json_grammar
from cortexmlx.structured.calls.json_formats import Hermes, Llama, MistralList, MistralTags
from cortexmlx.structured.calls.reader import NotACall
from support.tool_calls import TOOLS, hermes, llama

NOW = ("now", {})


def test_a_choice_says_what_may_be_called() -> None:
    names = [tool.name for tool in TOOLS]
    for choice, may, must in (
        ("auto", names, False),
        ("none", [], False),
        ("required", names, True),
        ("now", ["now"], True),
    ):
        calls = AllowedCalls(Hermes(), TOOLS, choice)
        assert ([tool.name for tool in calls.callable_tools], calls.is_required) == (may, must)
    assert AllowedCalls(Hermes(), TOOLS).tool("now").name == "now"
    with pytest.raises(NotACall):
        AllowedCalls(Hermes(), TOOLS, "now").tool("weather")
    assert AllowedCalls(Hermes(), TOOLS, "none").make_parser("key", streaming=True) is None


def test_ids_are_those_of_the_key_and_the_number() -> None:
    answers = []
    for key in ("1", "1", "2"):
        parser = AllowedCalls(Hermes(), TOOLS).make_parser(key, streaming=True)
        assert parser is not None
        parser.feed(hermes([NOW, NOW]))
        answers.append([call.id for call in parser.calls])
    assert answers[0] == answers[1]
    assert len({*answers[0], *answers[2]}) == 4


def test_mistrals_ids_have_nine_letters_and_digits() -> None:
    for number in range(50):
        id = MistralList().make_call_id(str(number))
        assert len(id) == 9 and id.isalnum()


@pytest.mark.parametrize("id", ["abc", "abcdefghij", "abcdefg-1", ""])
def test_an_id_of_another_form_is_no_call(id: str) -> None:
    parser = AllowedCalls(MistralTags(True), TOOLS).make_parser("key", streaming=False)
    assert parser is not None
    text = f"[TOOL_CALLS]now[CALL_ID]{id}[ARGS]{{}}"
    said = [parser.feed(text)[0], parser.finish()[0]]
    assert (parser.calls, "".join(said)) == ((), text)


@pytest.mark.parametrize(
    "call",
    [
        '{"arguments": {"city": "x"}, "name": "weather"}',
        '{"name":"weather","arguments":{"city":"x"}}',
        '{ "name" : "weather" , "parameters" : {"city": "x"} }',
        '\n{\n  "name": "weather",\n  "arguments": {\n    "city": "x"\n  }\n}\n',
        '{"name": "weather", "arguments": {"city": "x"}, "id": "abc"}',
    ],
)
def test_a_call_that_is_written_otherwise_is_read(call: str) -> None:
    """By models that no grammar holds."""
    for text in (f"<tool_call>{call}</tool_call>", f"<tool_call>\n{call}\n</tool_call>"):
        parser = AllowedCalls(Hermes(), TOOLS).make_parser("key", streaming=False)
        assert parser is not None
        deltas = [*parser.feed(text)[1], *parser.finish()[1]]
        assert [(each.name, each.values) for each in parser.calls] == [("weather", {"city": "x"})]
        assert "".join(delta.arguments for delta in deltas) == parser.calls[0].arguments


@pytest.mark.parametrize(
    "call",
    [
        "",
        "text",
        "{}",
        "[]",
        '{"name": "weather"}',
        '{"name": "weather", "arguments": "x"}',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather", "arguments": null}',
        '{"name": "weather", "arguments": {"city": NaN}}',
        '{"name": "weather", "arguments": {"city": }}',
        '{"name": "weather", "arguments": {}, "more": 1}',
        '{"name": "weather", "args": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "unknown", "arguments": {}}',
        '{"name": "wea\\ther", "arguments": {}}',
        '{"name": "weather" "arguments": {}}',
        "{'name': 'weather', 'arguments': {}}",
        '{"name": "weather", "arguments": {}}}',
        '{"name": "weather", "arguments": {}} {}',
        '{"function": {"name": "weather", "arguments": {}}}',
        '{"arguments": {}, "tool": "weather"}',
        '{"arguments": [1], "name": "weather"}',
        '{"arguments": {}}',
    ],
)
def test_what_is_no_call_is_text_and_a_call_after_it_is_read(call: str) -> None:
    bad, good = f"<tool_call>{call}</tool_call>", hermes([NOW])
    for pieces in ([bad + good], list(bad + good)):
        parser = AllowedCalls(Hermes(), TOOLS).make_parser("key", streaming=False)
        assert parser is not None
        text = "".join([*(parser.feed(piece)[0] for piece in pieces), parser.finish()[0]])
        assert [each.name for each in parser.calls] == ["now"]
        assert text == bad


def test_llamas_json_that_is_no_call_is_text() -> None:
    for text in ('{"x": 1}', '{"name": "Bob", "age": 3}', "{", '{"', "{}", 'Text {"name": "now", "parameters": {}}'):
        parser = AllowedCalls(Llama(), TOOLS).make_parser("key", streaming=False)
        assert parser is not None
        said = parser.feed(text)[0] + parser.finish()[0]
        assert parser.calls == () and (said == text or text in ("{", '{"'))
    parser = AllowedCalls(Llama(), TOOLS).make_parser("key", streaming=False)
    assert parser is not None
    parser.feed("<|python_tag|>" + llama([NOW]))
    parser.finish()
    assert [each.name for each in parser.calls] == ["now"]


def test_arguments_have_no_other_names_unless_the_schema_says_so() -> None:
    assert close_arguments({"type": "object"}) == {"type": "object", "properties": {}, "additionalProperties": False}
    for more in ({"additionalProperties": True}, {"anyOf": [{}]}, {"$ref": "#/$defs/a"}, {"patternProperties": {}}):
        assert close_arguments({"type": "object", **more}) == {"type": "object", **more}


def test_the_grammar_of_json_keeps_the_options_of_its_schema() -> None:
    made = json_grammar("a", {"x-guidance": {"coerce_one_of": True}}, True, (",", ":"))
    options = made["json_schema"]["x-guidance"]
    assert options["coerce_one_of"] and options["item_separator"] == "," and "lenient" not in options
    assert json.dumps(made)
