"""Formats in which a call's arguments are a JSON object: Hermes, DeepSeek, Kimi, Llama, Mistral and harmony."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import blake2b

from cortexmlx.errors import InvalidRequest
from cortexmlx.structured import lark
from cortexmlx.structured.calls.format import AllowedCalls, CallFormat, JsonGrammar, json_call_rule, read_json_call
from cortexmlx.structured.calls.reader import AnswerReader, NotACall, Reading
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.output import Thoughts
from cortexmlx.structured.tools import Tool

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class Hermes(CallFormat):
    """The format of Hermes and Qwen: each call is a JSON object between two tags."""

    name = "Hermes"
    trigger = OPEN
    call_separator = f"\n{OPEN}"

    def call_rule(self, number: int, tool: Tool, specials: Specials) -> str:
        """Return the part of a grammar rule for one call in this format."""
        return f'"\\n" {json_call_rule(number, tool, "arguments", specials)} "\\n" {lark.tag_rule(CLOSE, specials)}'

    def parse(self, reader: AnswerReader, calls: AllowedCalls) -> Reading[None]:
        """Parse a whole answer in this format. See `CallFormat.parse`."""
        while (yield from reader.read_text_up_to(OPEN)):
            yield from read_json_call(reader, calls)
            yield from reader.skip_blanks()
            yield from reader.skip_text(CLOSE)
            reader.end_call()
            reader.end_calls()


# Formats with a name and a JSON object between tags: DeepSeek V3, R1 and V3.1, and Kimi K2.


DEEPSEEK = "<｜tool▁calls▁begin｜>"
KIMI = "<|tool_calls_section_begin|>"

_FUNCTIONS = "functions."
_NUMBER = re.compile(r":\d+")


class JsonSection(CallFormat):
    """The format of DeepSeek: all calls are between two tags, and each call is a name and JSON between two more."""

    def __init__(self, name: str, section: tuple[str, str], call: tuple[str, str], after_name: str) -> None:
        self.name = name
        self.trigger, self.close = section
        self._call_begin, self._call_end = call
        self._after_name = after_name

    def call_rule(self, number: int, tool: Tool, specials: Specials) -> str:
        """Return the part of a grammar rule for one call in this format."""
        return f"{self._head_rule(tool, specials)} @tool_{number} {lark.tag_rule(self._call_end, specials)}"

    def _head_rule(self, tool: Tool, specials: Specials) -> str:
        """Return the part of a rule for what precedes the arguments of a call."""
        return lark.tag_rule(f"{self._call_begin}{tool.name}{self._after_name}", specials)

    def parse(self, reader: AnswerReader, calls: AllowedCalls) -> Reading[None]:
        """Parse a whole answer in this format. See `CallFormat.parse`."""
        while (yield from reader.find_next_call(self.trigger, self._call_begin, self.close)):
            self._begin_call(reader, calls, (yield from reader.read_up_to(self._after_name)).strip())
            yield from reader.skip_blanks()
            yield from reader.read_json_arguments()
            yield from reader.skip_blanks()
            yield from reader.skip_text(self._call_end.lstrip())
            reader.end_call()

    def _begin_call(self, reader: AnswerReader, calls: AllowedCalls, name: str) -> None:
        """Begin the call whose tag has this name."""
        reader.begin_call(calls.tool(name).name)


class Kimi(JsonSection):
    """The format of Kimi K2: a tool's name is a part of the call's id, `functions.NAME:NUMBER`."""

    always_enforced = False

    def __init__(self) -> None:
        section = KIMI, "<|tool_calls_section_end|>"
        super().__init__(
            "Kimi K2", section, ("<|tool_call_begin|>", "<|tool_call_end|>"), "<|tool_call_argument_begin|>"
        )

    def _head_rule(self, tool: Tool, specials: Specials) -> str:
        """As for `JsonSection`, with the number of the call as a part of its id."""
        prefix_rule = lark.tag_rule(f"{self._call_begin}{_FUNCTIONS}{tool.name}:", specials)
        return f"{prefix_rule} /[0-9]{{1,5}}/ {lark.tag_rule(self._after_name, specials)}"

    def _begin_call(self, reader: AnswerReader, calls: AllowedCalls, name: str) -> None:
        """Begin the call whose tag has the id `name`. Raises NotACall if that is no id of a call."""
        path, sign, number = name.rpartition(":")
        if not _NUMBER.fullmatch(sign + number):
            raise NotACall(f"{name!r:.80} is no id of a call")
        reader.begin_call(calls.tool(path.removeprefix(_FUNCTIONS)).name)


def deepseek_format(fenced: bool) -> JsonSection:
    """Return the format of DeepSeek V3.1, or with `fenced` of V3 and R1, which write a type and a Markdown fence."""
    separator = "<｜tool▁sep｜>"
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    call_format = JsonSection(
        "DeepSeek",
        (DEEPSEEK, "<｜tool▁calls▁end｜>"),
        (f"{begin}function{separator}", f"\n```{end}") if fenced else (begin, end),
        "\n```json\n" if fenced else separator,
    )
    call_format.call_separator = "\n" if fenced else ""
    return call_format


# Llama 3.1 to 3.3: a JSON object that is the whole answer.


LLAMA_PYTHON = "<|python_tag|>"
LIKE_A_CALL = r'\{[ \n]*"(name|arguments|parameters)"'
"""How an answer begins that is a call: a regular expression."""


class Llama(CallFormat):
    """The format of Llama 3: `{"name": ..., "parameters": {...}}`, perhaps after a special token; a semicolon
    separates calls. An answer that begins like a call is one.
    """

    name = "Llama 3"
    call_separator = "; "

    def grammar(
        self, calls: AllowedCalls, text: str, specials: Specials, thoughts_tag: str = ""
    ) -> tuple[list[str], list[JsonGrammar]]:
        """Return the rules of an answer that may have calls, as `CallFormat.grammar` does. Raises InvalidRequest if an
        answer may be a form or calls, since both are JSON.
        """
        if text and calls.callable_tools:
            raise InvalidRequest(
                "this model writes calls as JSON without a tag, so calls of `tools` and an answer of a form cannot be "
                "told apart: ask for one of them",
                field="structured",
            )
        rules = [f"answer: {text or 'free_text'}"]
        if calls.callable_tools:
            tag = f"{lark.tag_rule(LLAMA_PYTHON, specials)}?" if LLAMA_PYTHON in specials else ""
            rules = [
                f"answer: {'' if calls.is_required else 'free_text | '}{tag} calls",
                *self._call_rules(calls, specials),
            ]
        if not text and not calls.is_required:
            begins = lark.exclude_beginning(thoughts_tag)
            rules += ["free_text: FREE_TEXT", f"FREE_TEXT: /{lark.ANY}/ & ~/{LIKE_A_CALL}{lark.ANY}/{begins}"]
        return rules, [
            each
            for number, tool in enumerate(calls.callable_tools)
            for each in self.argument_grammars(number, tool, specials)
        ]

    def call_rule(self, number: int, tool: Tool, specials: Specials) -> str:
        """Return the part of a grammar rule for one call in this format."""
        return json_call_rule(number, tool, "parameters", specials)

    def parse(self, reader: AnswerReader, calls: AllowedCalls) -> Reading[None]:
        """Parse a whole answer in this format. See `CallFormat.parse`."""
        if reader.is_untouched and (yield from reader.peek_one_of(LLAMA_PYTHON, "{")):
            reader.begin_calls()
            if (yield from reader.peek_one_of(LLAMA_PYTHON)):
                yield from reader.skip_text(LLAMA_PYTHON)
            sign = ";"
            while sign:
                yield from read_json_call(reader, calls)
                reader.end_call()
                yield from reader.skip_blanks()
                sign = yield from reader.peek_one_of(";")
                yield from reader.skip_text(sign)
            reader.end_calls()
        yield from reader.read_text_up_to()


# Mistral's two formats: a list of JSON objects, and since 2025 a name and its arguments after tags.


MISTRAL_CALLS = "[TOOL_CALLS]"
MISTRAL_ARGUMENTS = "[ARGS]"
MISTRAL_CALL_ID = "[CALL_ID]"


class _Mistral(CallFormat):
    """The common part of both formats of Mistral."""

    trigger = MISTRAL_CALLS

    def make_call_id(self, key: str) -> str:
        """Return an id of nine characters for a call, as the chat templates demand."""
        return blake2b(key.encode(), digest_size=5).hexdigest()[:9]


class MistralList(_Mistral):
    """The older format of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""

    name = "Mistral list"
    calls_opening = '" "? "["'
    call_separator = ", "
    close = "]"

    def call_rule(self, number: int, tool: Tool, specials: Specials) -> str:
        """Return the part of a grammar rule for one call in this format."""
        return json_call_rule(number, tool, "arguments", specials)

    def parse(self, reader: AnswerReader, calls: AllowedCalls) -> Reading[None]:
        """Parse a whole answer in this format. See `CallFormat.parse`."""
        while (yield from reader.read_text_up_to(MISTRAL_CALLS)):
            yield from reader.skip_blanks()
            yield from reader.skip_text("[")
            sign = ","
            while sign == ",":
                yield from read_json_call(reader, calls)
                reader.end_call()
                yield from reader.skip_blanks()
                sign = yield from reader.read_one_of(",", "]")
            reader.end_calls()


class MistralTags(_Mistral):
    """The newer format of Mistral: `[TOOL_CALLS]name[ARGS]{...}` for each call; some write an id after `[CALL_ID]`."""

    name = "Mistral"
    call_separator = MISTRAL_CALLS

    def __init__(self, with_id: bool) -> None:
        self._with_id = with_id

    def call_rule(self, number: int, tool: Tool, specials: Specials) -> str:
        """Return the part of a grammar rule for one call in this format."""
        id_rule = f"{lark.tag_rule(MISTRAL_CALL_ID, specials)} /[a-zA-Z0-9]{{9}}/ " if self._with_id else ""
        return f"{lark.quote(tool.name)} {id_rule}{lark.tag_rule(MISTRAL_ARGUMENTS, specials)} @tool_{number}"

    def parse(self, reader: AnswerReader, calls: AllowedCalls) -> Reading[None]:
        """Parse a whole answer in this format. See `CallFormat.parse`."""
        while (yield from reader.read_text_up_to(MISTRAL_CALLS)):
            name, id_tag, call_id = (yield from reader.read_up_to(MISTRAL_ARGUMENTS)).partition(MISTRAL_CALL_ID)
            if id_tag and not (len(call_id) == 9 and call_id.isalnum() and call_id.isascii()):
                raise NotACall("the id of a call has nine letters and digits")
            reader.begin_call(calls.tool(name.strip()).name, call_id)
            yield from reader.skip_blanks()
            yield from reader.read_json_arguments()
            reader.end_call()
            reader.end_calls()


# Harmony, the format of gpt-oss: every message says its channel, and a call is a message to a function.


HARMONY_CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
START, END, HARMONY_CALL = "<|start|>assistant", "<|end|>", "<|call|>"
FUNCTION = " to=functions."


class Harmony(CallFormat):
    """gpt-oss: perhaps a text, then one `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}`."""

    name = "harmony"
    trigger = HARMONY_CHANNEL
    separators = (",", ":")
    parallel = False

    def adapt_thoughts(self, thoughts: Thoughts | None) -> Thoughts | None:
        """Return marks by which thoughts end with their message, since any message may follow."""
        return None if thoughts is None else replace(thoughts, close=f"{END}{START}", skip_text="")

    def grammar(
        self, calls: AllowedCalls, text: str, specials: Specials, thoughts_tag: str = ""
    ) -> tuple[list[str], list[JsonGrammar]]:
        """Return the rules of an answer in this format. See `CallFormat.grammar`."""
        final = f"{lark.tag_rule(f'{HARMONY_CHANNEL}final{MESSAGE}', specials)} {text or 'free_text'}"
        preamble = lark.tag_rule(f"{HARMONY_CHANNEL}commentary{MESSAGE}", specials)
        alternatives = [] if calls.is_required else [final]
        rules = []
        if calls.callable_tools:
            alternatives.append(f"({preamble} preamble)? calls")
            rules = [*self._call_rules(calls, specials), *lark.text_up_to_rules("preamble", f"{END}{START}", specials)]
        tags = "|".join(lark.escape_regex(each) for each in (HARMONY_CHANNEL, MESSAGE, START, END, HARMONY_CALL))
        rules += ["free_text: FREE_TEXT", f"FREE_TEXT: /{lark.ANY}/ & ~/{lark.ANY}({tags}){lark.ANY}/"]
        schemas = [
            each
            for number, tool in enumerate(calls.callable_tools)
            for each in self.argument_grammars(number, tool, specials)
        ]
        return [f"answer: {' | '.join(alternatives)}", *rules], schemas

    def call_rule(self, number: int, tool: Tool, specials: Specials) -> str:
        """Return the part of a grammar rule for one call. The function is named before or after the channel."""
        to = f"{FUNCTION}{tool.name}"
        rest = f"{CONSTRAIN}json{MESSAGE}"
        first = lark.tag_rule(f"{HARMONY_CHANNEL}commentary{to} {rest}", specials)
        second = lark.tag_rule(f"{to}{HARMONY_CHANNEL}commentary {rest}", specials)
        return f"({first} | {second}) @tool_{number}"

    def parse(self, reader: AnswerReader, calls: AllowedCalls) -> Reading[None]:
        """Parse a whole answer in this format. See `CallFormat.parse`."""
        while tag := (yield from reader.peek_one_of(HARMONY_CHANNEL, FUNCTION, START)):
            reader.begin_calls()
            yield from reader.skip_text(tag)  # it is text if this is no message: else it would be read again for ever
            header = tag + (yield from reader.read_up_to(MESSAGE))
            if FUNCTION in header:
                words = header.partition(FUNCTION)[2].replace(HARMONY_CHANNEL, " ").replace(CONSTRAIN, " ").split()
                reader.begin_call(calls.tool(words[0] if words else "").name)
                yield from reader.skip_blanks()
                yield from reader.read_json_arguments()
                reader.end_call()
                if (yield from reader.peek_one_of(HARMONY_CALL, END)):
                    yield from reader.read_one_of(HARMONY_CALL, END)
            elif "analysis" in header:
                yield from reader.read_value_up_to(END)
            elif "final" in header or "commentary" in header:
                reader.begin_paragraph()
                if not (yield from reader.read_text_up_to(END)):
                    return
            else:
                raise NotACall(f"{header!r} is no channel")
            reader.end_calls()
        yield from reader.read_text_up_to()
