"""Every format: the grammar and the parser agree with calls written by other code, whole and cut at every place."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest

from cortexmlx.structured.calls.format import CallFormat
from cortexmlx.structured.calls.json_formats import (
    Harmony,
    Hermes,
    Kimi,
    Llama,
    MistralList,
    MistralTags,
    deepseek_format,
)
from cortexmlx.structured.calls.literals import Braces, Pythonic
from cortexmlx.structured.calls.reader import MAX_TAG_BLANKS
from cortexmlx.structured.calls.tagged import GLM, LONGCAT, MINICPM, MINIMAX, MUSE, QWEN_CODER, Tagged
from support import tool_calls
from support.tool_calls import GOOD, PLAIN, SEVERAL, WRONG, Case, Write, every_cut, grammar_takes, read, said


class Written(NamedTuple):
    """A format, and code that writes it."""

    format: CallFormat
    write: Write

    def answer(self, case: Case) -> str:
        """The whole answer of a case."""
        if isinstance(self.format, Harmony) and case.text:
            preamble = f"<|channel|>commentary<|message|>{case.text}<|end|><|start|>assistant"
            return preamble + self.write(case.calls)
        return case.text + self.write(case.calls)


FORMATS = {
    "hermes": Written(Hermes(), tool_calls.hermes),
    "mistral list": Written(MistralList(), tool_calls.mistral_list),
    "mistral tags": Written(MistralTags(False), tool_calls.mistral_tags),
    "mistral ids": Written(MistralTags(True), tool_calls.mistral_ids),
    "llama": Written(Llama(), tool_calls.llama),
    "deepseek v3": Written(deepseek_format(True), tool_calls.deepseek_v3),
    "deepseek v3.1": Written(deepseek_format(False), tool_calls.deepseek_v31),
    "harmony": Written(Harmony(), tool_calls.harmony),
    "kimi": Written(Kimi(), tool_calls.kimi),
    "glm 4.6": Written(Tagged(GLM), tool_calls.glm("", "\n")),
    "glm 4.7": Written(Tagged(GLM), tool_calls.glm("", "")),
    "longcat": Written(Tagged(LONGCAT), tool_calls.glm("longcat_", "\n")),
    "minimax": Written(Tagged(MINIMAX), tool_calls.invoked("", "minimax:tool_call")),
    "muse": Written(Tagged(MUSE), tool_calls.invoked("atem:", "atem:function_calls")),
    "minicpm": Written(Tagged(MINICPM), tool_calls.minicpm),
    "qwen coder": Written(Tagged(QWEN_CODER), tool_calls.qwen_coder),
    "gemma 4": Written(
        Braces("", "<|tool_call>", "<tool_call|>", '<|"|>'),
        tool_calls.braces("<|tool_call>", "<tool_call|>", '<|"|>', enforced=True),
    ),
    "lfm2": Written(Pythonic(), tool_calls.pythonic(tool_calls.dumped)),
}

each_format = pytest.mark.parametrize("written", FORMATS.values(), ids=FORMATS)


def cases(written: Written) -> list[Case]:
    """The good cases that a format can write."""
    several = SEVERAL if written.format.parallel else ()
    whole = [case for case in (*GOOD, *several) if not (case.text and isinstance(written.format, Llama))]
    if not isinstance(written.format, Tagged) or written.format.tags is MINICPM:
        return whole[:25] + whole[26:]  # of a list in CDATA MiniCPM's grammar knows nothing
    # A raw text ends with its closing tag, so it cannot hold one, nor begin with one that has a line of its own.
    return [case for case in whole if written.format.tags.value_end.strip() not in str(case)]


@each_format
def test_good_answers_are_taken_by_the_grammar_and_read_by_the_parser(written: Written) -> None:
    good = cases(written)
    assert len(good) >= 28
    for case in good:
        answer = written.answer(case)
        assert grammar_takes(written.format, answer), answer
        result = read(written.format, [answer])
        assert result.calls == case.calls, answer
        assert result.text == said(case), answer


@each_format
def test_the_parts_do_not_depend_on_how_an_answer_is_cut(written: Written) -> None:
    for case in cases(written)[1::9]:
        answer = written.answer(case)
        whole = read(written.format, [answer])
        assert "".join(whole.pieces)
        for pieces in every_cut(answer):
            assert read(written.format, pieces) == whole, pieces


@each_format
@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_that_is_cut_has_the_complete_calls_only(written: Written, streamed: bool) -> None:
    for case in (cases(written)[1], cases(written)[-1]):
        answer = written.answer(case)
        for place in range(len(answer)):
            result = read(written.format, [answer[:place]], streamed)
            assert result.calls == case.calls[: len(result.calls)]
            assert len(result.calls) < len(case.calls) or ends_its_calls(written, answer[:place])
            if streamed:  # its pieces are told, so it is not told again as a text
                assert result.text == half(written, case, answer[:place], result.text) or said(case).startswith(
                    result.text
                )
            elif not isinstance(written.format, Harmony):
                rest = result.text.removeprefix(said(case))
                assert answer[:place].endswith(rest) and (result.calls or len(result.text) >= place - MAX_TAG_BLANKS)


def half(written: Written, case: Case, answer: str, text: str) -> str:
    """The text with half a tag."""
    return answer if "<|message|>" not in answer else f"{said(case)}{text[len(said(case)) :]}"


def ends_its_calls(written: Written, text: str) -> bool:
    """Whether only what stands after all calls of an answer is missing."""
    end = written.format.close
    return any(grammar_takes(written.format, text + end[cut:]) for cut in range(len(end) + 1))


@each_format
def test_calls_that_no_schema_allows_are_refused_by_the_grammar(written: Written) -> None:
    wrong = [case for case in WRONG if len(case.calls) == 1 or written.format.parallel]
    for case in wrong:
        if case.text and isinstance(written.format, Llama):
            continue  # it is text
        assert not grammar_takes(written.format, written.answer(case)), case


BREAKS = (
    lambda text: text[:-1],
    lambda text: text[:-3],
    lambda text: text.replace("weather", "weathers"),
    lambda text: text.replace("weather", "weather "),
    lambda text: text.replace("Paris", 'Paris"'),
    lambda text: text.replace("Paris", '"Paris'),
    lambda text: text.replace("city", "town"),
    lambda text: text.replace("days", "Days"),
    lambda text: text.replace("3", "three"),
    lambda text: text.replace("3", "3.5"),
    lambda text: text.replace("3", "NaN"),
    lambda text: text.replace("3", "0x3"),
    lambda text: text.replace("3", "3,"),
    lambda text: text.replace("3", ""),
    lambda text: text.replace("3", "03"),
    lambda text: text + " and more",
    lambda text: text + text[: len(text) // 2],
    lambda text: text + "\x00",
)
"""Ways to break a good call of the weather in Paris for 3 days."""


@each_format
def test_broken_calls_are_refused_by_the_grammar(written: Written) -> None:
    call = tool_calls.Case("", (("weather", {"city": "Paris", "days": 3}),))
    answer = written.answer(call)
    refused = 0
    for number, broken in enumerate(BREAKS):
        text = broken(answer)
        assert text != answer, number
        if isinstance(written.format, Tagged | Braces) and ('Paris"' in text or '"Paris' in text):
            assert grammar_takes(written.format, text)  # a raw text may hold quotes
            continue
        assert not grammar_takes(written.format, text), text
        refused += 1
    assert refused >= 14


@each_format
def test_text_without_calls_is_text(written: Written) -> None:
    for text in PLAIN:
        answer = f"<|channel|>final<|message|>{text}" if isinstance(written.format, Harmony) else text
        assert grammar_takes(written.format, answer), answer
        assert grammar_takes(written.format, answer, "none"), answer
        assert not grammar_takes(written.format, answer, "required"), answer
        for pieces in every_cut(answer):
            assert read(written.format, pieces)[:2] == (text, ())


@each_format
def test_a_choice_of_tools_is_enforced(written: Written) -> None:
    weather, now = (written.write([call]) for call in (("weather", {"city": "x"}), ("now", {})))
    assert grammar_takes(written.format, weather, "weather")
    assert not grammar_takes(written.format, now, "weather")
    assert grammar_takes(written.format, now, "required")
    assert not grammar_takes(written.format, now, "none")
    if written.format.parallel:
        both = written.write([("now", {}), ("now", {})])
        assert grammar_takes(written.format, both)
        assert not grammar_takes(written.format, both, parallel=False)
        assert grammar_takes(written.format, both, "required")
        assert not grammar_takes(written.format, both, "now")


@each_format
def test_a_number_of_thousands_of_digits_is_a_part_of_a_call(written: Written) -> None:
    """The grammar takes it, and Python's own reader of JSON does not."""
    answer = written.write([("weather", {"city": "Paris", "days": 7})])
    long = "7" * 5000
    before, _, after = answer.rpartition("7")
    text = f"{before}{long}{after}"
    assert grammar_takes(written.format, text)
    told = read(written.format, [text])
    assert (told.text, told.calls) == ("", (("weather", {"city": "Paris", "days": math.inf}),))
    assert long in told.pieces[0]
