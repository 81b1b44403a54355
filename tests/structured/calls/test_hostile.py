"""Every format against hostile arguments: what was written by the model makers' documents comes back as it was, whole
and byte by byte; what is cut, broken or ambiguous is text; what does not fit its schema has a note.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from cortexmlx.core.text import StopConditions, TextStream
from cortexmlx.models.tokenizers.detokenize import ByteDetokenizer
from cortexmlx.structured.calls.find import find_format
from cortexmlx.structured.calls.format import AllowedCalls, CallFormat
from cortexmlx.structured.calls.json_formats import Harmony, Llama
from cortexmlx.structured.calls.reader import MAX_HEADER
from cortexmlx.structured.tools import Tool
from support import tool_calls as write
from support.tool_calls import Call, Write, mapping


class Written(NamedTuple):
    """A format, code that writes it, and the tag that no text can hold, as nothing escapes it."""

    format: CallFormat
    write: Write
    closes: str = ""
    quotes: bool = True
    """Whether texts have quotes, so that an argument may be a text or something else."""


def of(*marks: str, vocabulary: tuple[str, ...] = ()) -> CallFormat:
    """The format of a model whose chat template has some texts."""
    found = find_format(" ".join(marks), vocabulary)
    assert found is not None
    return found


JSON = {
    "Hermes": Written(of('<tool_call> "name'), write.hermes),
    "Mistral list": Written(of("[TOOL_CALLS]"), write.mistral_list),
    "Mistral": Written(of("[TOOL_CALLS] [ARGS]"), write.mistral_tags),
    "Llama": Written(of('"name": "parameters": <|eot_id|>'), write.llama),
    "DeepSeek V3": Written(of("<｜tool▁calls▁begin｜> ```json"), write.deepseek_v3),
    "DeepSeek V3.1": Written(of("<｜tool▁calls▁begin｜>"), write.deepseek_v31),
    "Kimi": Written(of("<|tool_calls_section_begin|>"), write.kimi),
    "harmony": Written(of(vocabulary=("<|channel|>", "<|call|>")), write.harmony),
}
TAGGED = {
    "Qwen3-Coder": Written(of("<tool_call>\n<function="), write.qwen_coder, "\n</parameter>", False),
    "GLM 4.6": Written(of("<arg_key>"), write.glm("", "\n"), "</arg_value>", False),
    "GLM 4.7": Written(of("<arg_key>"), write.glm("", ""), "</arg_value>", False),
    "LongCat": Written(of("<longcat_tool_call>"), write.glm("longcat_", "\n"), "</longcat_arg_value>", False),
    "MiniMax": Written(of("<minimax:tool_call>"), write.invoked("", "minimax:tool_call"), "</parameter>", False),
    "Muse": Written(
        of("<atem:function_calls>"), write.invoked("atem:", "atem:function_calls"), "</atem:parameter>", False
    ),
    "MiniCPM": Written(of('<function name="', '<param name="'), write.minicpm, "", False),
}
LITERAL = {
    "Gemma 4": Written(of("<|tool_call> <tool_call|>"), write.braces("<|tool_call>", "<tool_call|>", '<|"|>'), '<|"|>'),
    "FunctionGemma": Written(
        of("<start_function_call>"),
        write.braces("<start_function_call>", "<end_function_call>", "<escape>"),
        "<escape>",
    ),
    "LFM2": Written(of("<|tool_call_start|>"), write.pythonic(write.dumped)),
    "LFM2.5": Written(of("<|tool_call_start|>"), write.pythonic(repr)),
}
FORMATS = JSON | TAGGED | LITERAL

each_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)

EDIT = mapping(
    "edit",
    {
        "text": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "mixed": {"type": ["string", "integer"]},
        "pick": {"enum": ["1", "2", "null"]},
        "count": {"type": "integer", "minimum": 0},
        "ratio": {"type": "number"},
        "flag": {"type": ["boolean", "null"]},
        "data": {"type": "object"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "from": {"type": "string"},
        "file-path": {"type": "string"},
        "class": {"type": "integer"},
    },
    **{"$defs": {"item": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "array"}]}}},
)
NAMES = "srv.edit-file", "a/b:c", "_x9"
TOOLS = tuple(map(Tool.of, [EDIT, mapping("now", {}), *(mapping(n, {"text": {"type": "string"}}) for n in NAMES)]))

MARKS = sorted(
    {form.closes.strip() for form in FORMATS.values()}
    | {
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call_end|>", "<tool_call|>", "</invoke>"),
        *("</function>", "</minimax:tool_call>", "</param>", "<![CDATA[", "]]>", "<|message|>", "<｜tool▁call▁end｜>"),
        *("<|tool_call_argument_begin|>", "<end_function_call>", "call:edit{text:", "edit(text='", "```", "</arg_key>"),
    }
    - {""}
)

TEXTS = (
    *("", " ", "  two  blanks  ", "\ttab\n", "\n", "\n\n lines \n\n", "    if x:\n        return 1\n", "\r\n"),
    *("1.10", "007", "1e5", "-0", "null", "None", "true", "False", "NaN", "[1]", '{"a": 1}', '"quoted"', "'x'"),
    *("it's", "\\n \\u0041 \\' \\\" \\", "漢字 🙂 é \u2028", "a < b && c > d", "}", ")]", "a, b=c: {d", "&lt;"),
)

VALUES: tuple[dict[str, Any], ...] = (
    *({"count": 0}, {"count": 12345678901234567890}, {"ratio": -1.5}, {"ratio": 1e300}, {"ratio": 3}),
    *({"flag": True}, {"flag": False}, {"flag": None}, {"pick": "1"}, {"pick": "null"}, {"class": 7}),
    *({"data": {}}, {"data": {"a": {"b": [1, {"c": None}]}, "d": "x", "e": True}}, {"data": {"k-1": ["</x>", ""]}}),
    *({"list": []}, {"list": ["a", "b c", 1, ["d"]]}, {"note": "1.10"}, {"note": "null"}, {"mixed": "007"}),
    *({"from": "x", "file-path": "/a b/c.py"}, {"text": "a", "from": "b", "count": 1}, {"note": '{"a": 1}'}),
)

TYPED: tuple[dict[str, Any], ...] = ({"note": None}, {"mixed": 5}, {"mixed": "5"})
"""Values that only quotes can tell apart."""

MISFITS: tuple[dict[str, Any], ...] = ({"count": "three"}, {"count": 1.5}, {"count": -1}, {"pick": "3"}, {"data": [1]})
"""Arguments that are whole and do not fit the schema."""


BYTES = [bytes([byte]) for byte in range(256)]


def read(form: Written, answer: str, pieces: Sequence[str] | None = None) -> tuple[str, tuple[Call, ...], list[str]]:
    """The text, the calls and the notes of an answer in pieces, or byte by byte through the stream of answers."""
    parser = AllowedCalls(form.format, TOOLS).make_parser("key", streaming=False)
    assert parser is not None
    if pieces is not None:
        text = "".join([*(parser.feed(piece)[0] for piece in pieces), parser.finish()[0]])
    else:
        stream = TextStream(ByteDetokenizer(BYTES), StopConditions(), None, parser)
        text = "".join([*(stream.push(byte).text for byte in answer.encode()), stream.finish().text])
    return text, tuple((call.name, call.values) for call in parser.calls), parser.notes


def both(form: Written, answer: str) -> tuple[str, tuple[Call, ...], list[str]]:
    """What a whole answer is read as, which is what it is read as byte by byte."""
    whole = read(form, answer, [answer])
    assert read(form, answer) == whole, answer
    return whole


def good(form: Written) -> Iterator[tuple[Call, ...]]:
    """Calls that a format can write."""
    for text in (*TEXTS, *(f"a {mark} b" for mark in MARKS), *(f"\n{mark}\n" for mark in MARKS)):
        if not form.closes or form.closes not in f"{text}\n":
            yield (("edit", {"text": text}),)
    for values in (*VALUES, *(TYPED if form.quotes else ())):
        if not (form.closes and form.closes in json.dumps(values, ensure_ascii=False)):
            yield (("edit", values),)
    yield (("now", {}),)
    yield from ((((name, {"text": "x"}),)) for name in NAMES)
    if form.format.parallel:
        yield (("edit", {"text": " a "}), ("now", {}), ("edit", {"text": "b", "count": 1}))


@each_format
def test_what_was_written_is_read(form: Written) -> None:
    cases = list(good(form))
    assert len(cases) >= 80
    for calls in cases:
        answer = form.write(calls)
        text, found, notes = both(form, answer)
        assert (found, notes) == (calls, []), answer
        assert json.dumps(found) == json.dumps(calls) and not text.strip(), answer  # 1 is not True


@each_format
def test_a_text_that_holds_its_own_end_is_no_other_call(form: Written) -> None:
    for text in (f"a {form.closes} b", f"a{form.closes}\n{form.closes}b") if form.closes else ():
        answer = form.write([("edit", {"text": text, "from": "x"})])
        assert both(form, answer) == (answer, (), [])


@each_format
def test_what_does_not_fit_is_passed_on_with_a_note(form: Written) -> None:
    for values in MISFITS:
        calls = (("edit", values),)
        _, found, notes = both(form, form.write(calls))
        assert found == calls and len(notes) == 1 and "does not fit its schema" in notes[0]
    _, found, notes = both(form, form.write([("now", {"when": "soon"})]))
    assert found == (("now", {"when": "soon"}),) and "'when' is not a part" in notes[0]


@each_format
def test_a_text_without_quotes_is_the_text_that_was_written(form: Written) -> None:
    """Formats with quotes that are JSON keep the number, which does not fit."""
    if form in JSON.values():
        assert both(form, form.write([("edit", {"text": 7})]))[1:] == ((("edit", {"text": 7}),), [ANY_NOTE])
        return
    for value, text in ((7, "7"), (1.50, "1.5"), (True, None), ([1], "[1]"), ({}, "{}")):
        _, [(_, values)], notes = both(form, form.write([("edit", {"text": value})]))
        assert values["text"] in ((text,) if text else ("true", "True")) and not notes


class _AnyNote(str):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, str)

    __hash__ = str.__hash__


ANY_NOTE = _AnyNote()


@each_format
def test_what_is_no_call_is_text(form: Written) -> None:
    """Unknown functions, arguments that come twice, and calls that are cut at any place."""
    harmony = isinstance(form.format, Harmony)  # its tags are no text
    one = form.write([("edit", {"text": "x y", "count": 3})])
    for bad in (one.replace("edit", "nosuch"), one.replace("count", "text"), one.replace("edit", "nosuch edit")):
        text, found, _ = both(form, bad)
        assert found == () and (text == bad or harmony), bad
    for place in range(1, len(one)):
        text, found, _ = read(form, one, [one[:place]])
        assert found in ((), (("edit", {"text": "x y", "count": 3}),))
        assert found or text == one[:place] or harmony, one[:place]
    assert not both(form, one[: len(one) // 2])[1]


@each_format
def test_calls_and_texts_stand_beside_each_other(form: Written) -> None:
    edit, now = form.write([("edit", {"text": "x"})]), form.write([("now", {})])
    both_calls = (("edit", {"text": "x"}), ("now", {}))
    if isinstance(form.format, Llama | Harmony):
        return  # a call is the whole answer, or a message of its own
    assert both(form, f"Hello \n {edit}")[:2] == ("Hello", both_calls[:1])
    assert both(form, f"{edit} and {now}!")[:2] == (" and!", both_calls)
    assert both(form, f"Half {form.format.trigger} a tag. {edit}")[1] in (both_calls[:1], ())
    unknown = edit.replace("edit", "nosuch")
    text, found, _ = both(form, f"{unknown}{edit}{unknown}{now}")
    assert found == both_calls and text.count("nosuch") == 2
    several = form.write([("edit", {"text": "x"}), ("nosuch", {"text": "y"})])
    text, found, _ = both(form, several)
    assert found == both_calls[:1] and "nosuch" in text and "y" in text


BROKEN = {
    "GLM 4.6": (
        *(
            "<tool_call>edit\n<arg_key>text</arg_key>\n</tool_call>",
            "<tool_call>edit\n<arg_value>x</arg_value></tool_call>",
        ),
        *("<tool_call>\n</tool_call>", "<tool_call>edit<arg_key></arg_key><arg_value>x</arg_value></tool_call>"),
        *("<tool_call>edit\n<arg_key>text<arg_value>x</arg_value>\n</tool_call>", "<tool_call>edit now</tool_call>"),
    ),
    "MiniMax": (
        '<minimax:tool_call>\n<invoke name="edit"><parameter name="text">x</invoke></minimax:tool_call>',
        "<minimax:tool_call>edit</minimax:tool_call>",
        '<invoke name="edit"><parameter name="text">x</parameter></invoke>',
        '<minimax:tool_call><invoke name="edit"><parameter name="">x</parameter></invoke></minimax:tool_call>',
    ),
    "MiniCPM": (
        '<function name="edit"><param name="text">x</function>',
        '<function name="edit"><param name="text"><![CDATA[x</param></function>',
        '<function name="edit">x</function>',
    ),
    "Kimi": tuple(
        f"<|tool_calls_section_begin|><|tool_call_begin|>{call}<|tool_call_end|><|tool_calls_section_end|>"
        for call in (
            *("functions.edit:0", "functions.edit<|tool_call_argument_begin|>{}", "<|tool_call_argument_begin|>{}"),
            *("edit:x<|tool_call_argument_begin|>{}", "functions.edit:0<|tool_call_argument_begin|>[1]"),
            'functions.edit:0<|tool_call_argument_begin|>{"text": "a", "text": "b"}',
        )
    ),
    "Gemma 4": tuple(
        f"<|tool_call>{call}<tool_call|>"
        for call in (
            *("edit{}", "call:edit", "call:edit{text}", 'call:edit{text:<|"|>x}', "call:edit{:1}", "call:edit(text=1)"),
            *('call:edit{text:<|"|>x<|"|> y}', "call:edit{a:1}}", "call:edit{a:[}", 'call:edit{data:{a:<|"|>x}}'),
        )
    ),
    "LFM2": tuple(
        f"<|tool_call_start|>{call}<|tool_call_end|>"
        for call in (
            *("edit(text='x')", "[edit]", "[edit('x')]", "[edit(text='x)]", "[edit(text='x' + 'y')]", "[edit(**{})]"),
            *(
                "[edit(text='x']",
                "[edit(text=)]x",
                "[]",
                "[edit(text='x')",
                "[edit(text=f'x')]",
                "[edit(text='\\ud83d')]",
            ),
        )
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_calls_are_text(name: str) -> None:
    for answer in BROKEN[name]:
        assert both(FORMATS[name], answer)[:2] == (answer, ()), answer


def test_words_with_blanks_between_them_are_no_number() -> None:
    for name, answer in (
        ("Gemma 4", "<|tool_call>call:edit{count:1 2}<tool_call|>"),
        ("LFM2", "<|tool_call_start|>[edit(count=1 2)]<|tool_call_end|>"),
    ):
        _, found, notes = both(FORMATS[name], answer)
        assert found == (("edit", {"count": "1 2"}),) and notes == [ANY_NOTE], found
        _, [(_, values)], _ = both(FORMATS[name], answer.replace("count", "list").replace("1 2", "[1 2, - 3]"))
        assert values == {"list": "[1 2, - 3]"}


def test_what_templates_write_as_python_is_a_value_where_no_text_may_stand() -> None:
    """Those of MiniCPM and Qwen3-Coder write True, and MiniCPM's also what str() makes of lists and objects."""
    values = {"flag": True, "data": {"it's": [None, 'say "x"\n', -1.5], "": {}}, "list": ["a", 1], "pick": "null"}
    answer = write.tagged('<function name="NAME">', '<param name="KEY">', "VALUE</param>", "</function>", "")(
        [("edit", {key: str(value) for key, value in values.items()} | {"text": "None", "count": "{'a"})]
    )
    _, [(_, found)], notes = both(FORMATS["MiniCPM"], answer)
    assert found == values | {"text": "None", "count": "{'a"} and len(notes) == 1
    _, [(_, found)], notes = both(FORMATS["GLM 4.6"], FORMATS["GLM 4.6"].write([("edit", {"pick": " 1 "})]))
    assert found == {"pick": " 1 "} and notes == [ANY_NOTE], "a text that is none of those listed is no number"


def test_variants_that_models_write_are_read() -> None:
    said = (("edit", {"text": "x", "count": 3}),)
    for name, answer in (
        ("GLM 4.6", '<tool_call>{"name": "edit", "arguments": {"text": "x", "count": 3}}</tool_call>'),
        (
            "LongCat",
            '<longcat_tool_call>\n{"name": "edit", "arguments": {"text": "x", "count": 3}}\n</longcat_tool_call>',
        ),
        ("Kimi", write.kimi(said).replace("functions.", "").replace(":0", ":117")),
        ("Gemma 4", '<|tool_call>call:edit{ text: <|"|>x<|"|>, <|"|>count<|"|>: 3 }<tool_call|>'),
        ("LFM2", '<|tool_call_start|>[edit(text="x", count=3,)]<|tool_call_end|>'),
        ("LFM2", '<|tool_call_start|>[{"name": "edit", "arguments": {"text": "x", "count": 3}}]<|tool_call_end|>'),
        ("MiniCPM", '<function name="edit">\n<param name="text">x</param>\n<param name="count">3</param>\n</function>'),
    ):
        assert both(FORMATS[name], answer) == ("", said, []), answer
    parser = AllowedCalls(FORMATS["Kimi"].format, TOOLS).make_parser("key", streaming=False)
    assert parser is not None
    parser.feed(write.kimi([("now", {}), ("now", {})]))
    assert [call.name for call in parser.calls] == ["now", "now"] and len({call.id for call in parser.calls}) == 2


MAX_CALLS = 38
"""Calls of functions, Python's own included, that a byte of an answer may cost on its whole way."""

HUGE = "x{[<\"'\\\n é" * 1000


def huge(form: Written, size: int) -> Iterator[str]:
    """Answers that are good, broken and endless, of about this many characters."""
    text = (HUGE * (size // len(HUGE) + 1))[:size]
    call = form.write([("edit", {"text": text.replace(form.closes or "\0", ""), "data": {"a": [1] * (size // 50)}})])
    small = form.write([("now", {})])
    yield from (
        call,
        call[:-9],
        small * (size // len(small)),
        form.format.trigger * (size // 12),
        small[:-4] * (size // 60),
    )
    begin, _, _ = call.partition("text")
    yield from (begin * (size // len(begin)), begin + "a:{" * (size // 3), begin + "{" * size, begin + "a" * size)


@each_format
def test_what_waits_to_be_read_is_short(form: Written) -> None:
    """So each character that comes costs the same, however long the answer is."""
    for answer in huge(form, 2000):
        parser = AllowedCalls(form.format, TOOLS).make_parser("key", streaming=False)
        assert parser is not None
        for char in answer:
            parser.feed(char)
            assert len(parser._reader._buffer) - parser._reader._position <= MAX_HEADER + 100


@each_format
def test_a_character_costs_few_calls(form: Written) -> None:
    """A search for each tag, or one that begins again, took 0.25 s for 100,000 characters that came one by one."""
    trigger = form.format.trigger or "{"
    texts = [trigger[0] * 700, trigger[:-1] * (700 // len(trigger) + 1), " " * 700, "some words. " * 60]
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for text in (*texts, *(answer[:700] for answer in huge(form, 700))):
        parser = AllowedCalls(form.format, TOOLS).make_parser("key", streaming=True)
        stream, data, calls = TextStream(ByteDetokenizer(BYTES), StopConditions(), None, parser), text.encode(), 0
        sys.setprofile(count)
        try:
            for byte in data:
                stream.push(byte)
        finally:
            sys.setprofile(None)
        assert calls < MAX_CALLS * len(data) + 250, (calls / max(1, len(data)), text[:80])
