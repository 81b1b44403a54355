"""Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes, Qwen 2.5, Qwen 3 and many others."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import blake2b

from cortexmlx.errors import InvalidRequest
from cortexmlx.structured import lark
from cortexmlx.structured.calls.format import CallFormat, Calls, JsonGrammar, json_call, read_json_call
from cortexmlx.structured.calls.reader import AnswerReader, NotACall, Reading
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.output import Thoughts
from cortexmlx.structured.tools import Tool

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class Hermes(CallFormat):
    """A JSON object between two tags for each call."""

    name = "Hermes"
    trigger = OPEN
    between = f"\n{OPEN}"

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """See `CallFormat.call`."""
        return f'"\\n" {json_call(number, tool, "arguments", specials)} "\\n" {lark.tag(CLOSE, specials)}'

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while (yield from reader.text_up_to(OPEN)):
            yield from read_json_call(reader, calls)
            yield from reader.blanks()
            yield from reader.exactly(CLOSE)
            reader.end_call()
            reader.end_calls()


# Formats with a name and a JSON object between tags: DeepSeek V3, R1 and V3.1, and Kimi K2.


DEEPSEEK = "<｜tool▁calls▁begin｜>"
KIMI = "<|tool_calls_section_begin|>"

_FUNCTIONS = "functions."
_NUMBER = re.compile(r":\d+")


class JsonSection(CallFormat):
    """All calls stand between two tags, and each call between two more."""

    def __init__(self, name: str, section: tuple[str, str], call: tuple[str, str], after_name: str) -> None:
        self.name = name
        self.trigger, self.close = section
        self._begin, self._end = call
        self._after_name = after_name

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """See `CallFormat.call`."""
        return f"{self._head(tool, specials)} @tool_{number} {lark.tag(self._end, specials)}"

    def _head(self, tool: Tool, specials: Specials) -> str:
        return lark.tag(f"{self._begin}{tool.name}{self._after_name}", specials)

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while (yield from reader.next_in_section(self.trigger, self._begin, self.close)):
            self._begin_call(reader, calls, (yield from reader.up_to(self._after_name)).strip())
            yield from reader.blanks()
            yield from reader.json_arguments()
            yield from reader.blanks()
            yield from reader.exactly(self._end.lstrip())
            reader.end_call()

    def _begin_call(self, reader: AnswerReader, calls: Calls, name: str) -> None:
        reader.begin_call(calls.tool(name).name)


class Kimi(JsonSection):
    """A name is a part of the call's id: `functions.NAME:NUMBER`."""

    always_enforced = False

    def __init__(self) -> None:
        section = KIMI, "<|tool_calls_section_end|>"
        super().__init__(
            "Kimi K2", section, ("<|tool_call_begin|>", "<|tool_call_end|>"), "<|tool_call_argument_begin|>"
        )

    def _head(self, tool: Tool, specials: Specials) -> str:
        begin = lark.tag(f"{self._begin}{_FUNCTIONS}{tool.name}:", specials)
        return f"{begin} /[0-9]{{1,5}}/ {lark.tag(self._after_name, specials)}"

    def _begin_call(self, reader: AnswerReader, calls: Calls, name: str) -> None:
        path, sign, number = name.rpartition(":")
        if not _NUMBER.fullmatch(sign + number):
            raise NotACall(f"{name!r:.80} is no id of a call")
        reader.begin_call(calls.tool(path.removeprefix(_FUNCTIONS)).name)


def deepseek(fenced: bool) -> JsonSection:
    """Return the format of V3.1, or that of V3 and R1 (`fenced`), which write a type, and a fence of Markdown."""
    separator = "<｜tool▁sep｜>"
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    found = JsonSection(
        "DeepSeek",
        (DEEPSEEK, "<｜tool▁calls▁end｜>"),
        (f"{begin}function{separator}", f"\n```{end}") if fenced else (begin, end),
        "\n```json\n" if fenced else separator,
    )
    found.between = "\n" if fenced else ""
    return found


# Llama 3.1 to 3.3: a JSON object that is the whole answer.


LLAMA_PYTHON = "<|python_tag|>"
LIKE_A_CALL = r'\{[ \n]*"(name|arguments|parameters)"'
"""How an answer begins that is a call: a regular expression."""


class Llama(CallFormat):
    """`{"name": ..., "parameters": {...}}`, after a special token or not. Several calls have a semicolon between them.
    An answer that begins with the head of a call is one.
    """

    name = "Llama 3"
    between = "; "

    def grammar(
        self, calls: Calls, text: str, specials: Specials, opens: str = ""
    ) -> tuple[list[str], list[JsonGrammar]]:
        """See `CallFormat.grammar`. Raises InvalidRequest for an answer that is to have a form or calls: both are
        JSON.
        """
        if text and calls.callable:
            raise InvalidRequest(
                "this model writes calls as JSON without a tag, so `structured` and `tools` cannot be told apart: ask "
                "for one of them",
                field="structured",
            )
        rules = [f"answer: {text or 'free_text'}"]
        if calls.callable:
            tag = f"{lark.tag(LLAMA_PYTHON, specials)}?" if LLAMA_PYTHON in specials else ""
            rules = [f"answer: {'' if calls.required else 'free_text | '}{tag} calls", *self._calls(calls, specials)]
        if not text and not calls.required:
            begins = lark.but_not(opens)
            rules += ["free_text: FREE_TEXT", f"FREE_TEXT: /{lark.ANY}/ & ~/{LIKE_A_CALL}{lark.ANY}/{begins}"]
        return rules, [
            each for number, tool in enumerate(calls.callable) for each in self.schemas(number, tool, specials)
        ]

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """See `CallFormat.call`."""
        return json_call(number, tool, "parameters", specials)

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        if reader.untouched and (yield from reader.begins_with(LLAMA_PYTHON, "{")):
            reader.begin_calls()
            if (yield from reader.begins_with(LLAMA_PYTHON)):
                yield from reader.exactly(LLAMA_PYTHON)
            sign = ";"
            while sign:
                yield from read_json_call(reader, calls)
                reader.end_call()
                yield from reader.blanks()
                sign = yield from reader.begins_with(";")
                yield from reader.exactly(sign)
            reader.end_calls()
        yield from reader.text_up_to()


# Mistral's two formats: a list of JSON objects, and since 2025 a name and its arguments after tags.


MISTRAL_CALLS = "[TOOL_CALLS]"
MISTRAL_ARGUMENTS = "[ARGS]"
MISTRAL_CALL_ID = "[CALL_ID]"


class _Mistral(CallFormat):
    trigger = MISTRAL_CALLS

    def call_id(self, key: str) -> str:
        """Return the id of a call, which has nine characters, as the chat templates demand."""
        return blake2b(key.encode(), digest_size=5).hexdigest()[:9]


class MistralList(_Mistral):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""

    name = "Mistral list"
    opening = '" "? "["'
    between = ", "
    close = "]"

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """See `CallFormat.call`."""
        return json_call(number, tool, "arguments", specials)

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while (yield from reader.text_up_to(MISTRAL_CALLS)):
            yield from reader.blanks()
            yield from reader.exactly("[")
            sign = ","
            while sign == ",":
                yield from read_json_call(reader, calls)
                reader.end_call()
                yield from reader.blanks()
                sign = yield from reader.one_of(",", "]")
            reader.end_calls()


class MistralTags(_Mistral):
    """`[TOOL_CALLS]name[ARGS]{...}`, again for each call; some write an id after `[CALL_ID]`."""

    name = "Mistral"
    between = MISTRAL_CALLS

    def __init__(self, with_id: bool) -> None:
        self._with_id = with_id

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """See `CallFormat.call`."""
        known = f"{lark.tag(MISTRAL_CALL_ID, specials)} /[a-zA-Z0-9]{{9}}/ " if self._with_id else ""
        return f"{lark.quoted(tool.name)} {known}{lark.tag(MISTRAL_ARGUMENTS, specials)} @tool_{number}"

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while (yield from reader.text_up_to(MISTRAL_CALLS)):
            name, by_tag, known = (yield from reader.up_to(MISTRAL_ARGUMENTS)).partition(MISTRAL_CALL_ID)
            if by_tag and not (len(known) == 9 and known.isalnum() and known.isascii()):
                raise NotACall("the id of a call has nine letters and digits")
            reader.begin_call(calls.tool(name.strip()).name, known)
            yield from reader.blanks()
            yield from reader.json_arguments()
            reader.end_call()
            reader.end_calls()


# Harmony, the format of gpt-oss: every message says its channel, and a call is a message to a function.


HARMONY_CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
START, END, HARMONY_CALL = "<|start|>assistant", "<|end|>", "<|call|>"
FUNCTION = " to=functions."


class Harmony(CallFormat):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}`, once in an answer. A text for the
    user may come before it.
    """

    name = "harmony"
    trigger = HARMONY_CHANNEL
    separators = (",", ":")
    parallel = False

    def thoughts(self, thoughts: Thoughts | None) -> Thoughts | None:
        """See `CallFormat.thoughts`. Thoughts end with their message, and any message may follow."""
        return None if thoughts is None else replace(thoughts, close=f"{END}{START}", skipped="")

    def grammar(
        self, calls: Calls, text: str, specials: Specials, opens: str = ""
    ) -> tuple[list[str], list[JsonGrammar]]:
        """See `CallFormat.grammar`."""
        final = f"{lark.tag(f'{HARMONY_CHANNEL}final{MESSAGE}', specials)} {text or 'free_text'}"
        preamble = lark.tag(f"{HARMONY_CHANNEL}commentary{MESSAGE}", specials)
        ways = [] if calls.required else [final]
        rules = []
        if calls.callable:
            ways.append(f"({preamble} preamble)? calls")
            rules = [*self._calls(calls, specials), *lark.up_to("preamble", f"{END}{START}", specials)]
        rules += ["free_text: FREE_TEXT", f"FREE_TEXT: {_without_tags()}"]
        schemas = [each for number, tool in enumerate(calls.callable) for each in self.schemas(number, tool, specials)]
        return [f"answer: {' | '.join(ways)}", *rules], schemas

    def call(self, number: int, tool: Tool, specials: Specials) -> str:
        """See `CallFormat.call`. The function is named before or after the channel."""
        to = f"{FUNCTION}{tool.name}"
        rest = f"{CONSTRAIN}json{MESSAGE}"
        first = lark.tag(f"{HARMONY_CHANNEL}commentary{to} {rest}", specials)
        second = lark.tag(f"{to}{HARMONY_CHANNEL}commentary {rest}", specials)
        return f"({first} | {second}) @tool_{number}"

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while tag := (yield from reader.begins_with(HARMONY_CHANNEL, FUNCTION, START)):
            reader.begin_calls()
            yield from reader.exactly(tag)  # it is text if this is no message: else it would be read again for ever
            header = tag + (yield from reader.up_to(MESSAGE))
            if FUNCTION in header:
                words = header.partition(FUNCTION)[2].replace(HARMONY_CHANNEL, " ").replace(CONSTRAIN, " ").split()
                reader.begin_call(calls.tool(words[0] if words else "").name)
                yield from reader.blanks()
                yield from reader.json_arguments()
                reader.end_call()
                if (yield from reader.begins_with(HARMONY_CALL, END)):
                    yield from reader.one_of(HARMONY_CALL, END)
            elif "analysis" in header:
                yield from reader.value_up_to(END)
            elif "final" in header or "commentary" in header:
                reader.begin_paragraph()
                if not (yield from reader.text_up_to(END)):
                    return
            else:
                raise NotACall(f"{header!r} is no channel")
            reader.end_calls()
        yield from reader.text_up_to()


def _without_tags() -> str:
    """Return a terminal of free text without the tags that part messages."""
    tags = "|".join(lark.escaped(each) for each in (HARMONY_CHANNEL, MESSAGE, START, END, HARMONY_CALL))
    return f"/{lark.ANY}/ & ~/{lark.ANY}({tags}){lark.ANY}/"
