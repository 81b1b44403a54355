"""Formats in which arguments are literals, with or without quotes: Gemma 4, FunctionGemma and LFM2."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from cortexmlx.structured import lark
from cortexmlx.structured.calls.argument import Argument, Arguments, required_arguments, to_json_text
from cortexmlx.structured.calls.format import AllowedCalls, JsonGrammar, read_json_call
from cortexmlx.structured.calls.reader import AnswerReader, NotACall, Reading, parse_strict_json
from cortexmlx.structured.calls.separate import TOOL_NAME, SeparateArguments
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.tools import Tool, load_json

GEMMA, GEMMA_END = "<|tool_call>", "<tool_call|>"
FUNCTION_GEMMA = "<start_function_call>"
PYTHONIC, PYTHONIC_END = "<|tool_call_start|>", "<|tool_call_end|>"

_PYTHON_QUOTES = {"'": True, '"': True}
_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


class _LiteralFormat(SeparateArguments):
    """A format whose arguments are literals: strings in quotes, and other values as in JSON or Python.

    The grammar writes other values as JSON, which the reader takes as well.
    """

    always_enforced = False
    _quotes: Mapping[str, bool]
    """What strings stand between, and whether a backslash within escapes the next character."""
    _token: re.Pattern[str]
    """One part of a value: a text, a sign, blanks or a word."""
    _key_end: str
    """Separates an argument's name from its value."""
    _end: str
    """Closes the arguments."""

    # -- the grammar --------------------------------------------------------------------------------------------------

    def can_write_key(self, key: str) -> bool:
        """Return whether this format can write an argument of this name."""
        return bool(key) and key == key.strip() and not any(sign in key for sign in (*"{}[]()<>\n", self._key_end))

    def argument_grammars(self, number: int, tool: Tool, specials: Specials) -> Iterator[JsonGrammar]:
        """Yield a named grammar for each argument of a call, and one for the list of arguments."""
        keys, required = list(Arguments(tool)), required_arguments(tool)
        separator = lark.quote(self.separators[0])
        rules = ["start: first_0", f'first_{len(keys)}: ""', f'rest_{len(keys)}: ""']
        for index, key in enumerate(keys):
            part = f"{lark.quote(key + self._key_end)} @tool_{number}_{index} rest_{index + 1}"
            for name, head in ("first", ""), ("rest", separator):
                absent = "" if key in required else f" | {name}_{index + 1}"
                rules.append(f"{name}_{index}: {head} {part}{absent}")
        yield {"name": f"tool_{number}", "lark_grammar": "\n".join(rules)}
        yield from super().argument_grammars(number, tool, specials)

    # -- the reader ---------------------------------------------------------------------------------------------------

    def _read_arguments(self, reader: AnswerReader, calls: AllowedCalls, name: str) -> Reading[None]:
        """Parse the arguments of a call up to the sign that closes them, which is consumed."""
        arguments, seen_keys, end = calls.arguments(name), set[str](), self._end
        reader.begin_call(name)
        yield from reader.skip_blanks()
        sign = yield from reader.peek_one_of(end)
        yield from reader.skip_text(sign)
        while sign != end:
            key = (yield from reader.read_up_to(self._key_end)).strip()
            if quote := next((q for q in self._quotes if len(q) > 1 and key.startswith(q)), ""):
                key = key.removeprefix(quote).removesuffix(quote)
            if key in seen_keys or not self.can_write_key(key):
                raise NotACall(f"{key!r:.80} comes twice, or is no name")
            raw_text = (yield from reader.read_literal(self._quotes, f",{end}")).strip()
            value = arguments[key].literal_to_json(raw_text, self._literal_to_json(raw_text))
            reader.add_arguments(f"{', ' if seen_keys else '{'}{to_json_text(key)}: {value}")
            seen_keys.add(key)
            sign = yield from reader.read_one_of(",", end)
            yield from reader.skip_blanks()
            if sign == "," and (yield from reader.peek_one_of(end)):
                sign = yield from reader.read_one_of(end)
        reader.add_arguments("}" if seen_keys else "{}")

    def _literal_to_json(self, raw_text: str) -> str | None:
        """Convert a literal to JSON; None if it is a plain word. Raises NotACall if it has quotes and is no literal."""
        tokens = self._token.findall(raw_text)
        parts: list[str] = []
        for index, token in enumerate(tokens):
            quote = next((q for q in self._quotes if token.startswith(q) and len(token) > len(q)), "")
            if quote:
                parts.append(self._quoted_to_json(quote, token))
            elif token[0] in "]}" and parts and parts[-1] == ",":
                parts[-1] = token
            elif token[0] in "[]{}:,":
                parts.append(token)
            elif tokens[index + 1 : index + 2] == [":"]:
                parts.append(to_json_text(token))
            else:
                parts.append(_PYTHON_CONSTANTS.get(token, token))
        try:
            parse_strict_json(" ".join(parts))  # `1 2` is not 12
        except NotACall:
            if any(quote in raw_text for quote in self._quotes):
                raise
            return None
        return "".join(parts)

    @abstractmethod
    def _quoted_to_json(self, quote: str, token: str) -> str:
        """Convert a quoted string of the format to a JSON string."""


def _token_pattern(*texts: str, word_pattern: str) -> re.Pattern[str]:
    """Return the expression of one token of a literal: a string, a sign or a word."""
    return re.compile("|".join([*texts, r"[\[\]{}:,]", word_pattern]), re.DOTALL)


JSON_STRING = r'"(?:[^"\\]|\\.)*"'


class Braces(_LiteralFormat):
    """The format of Gemma: `call:NAME{KEY:VALUE,...}`, with strings between two of the same tags, or as in JSON."""

    separators = ",", ":"
    _key_end = ":"
    _end = "}"

    def __init__(self, name: str, begin: str, end: str, quote: str) -> None:
        self.name = name
        self.trigger = self.call_separator = begin
        self.text_end = quote
        self._call_end = end
        self._quotes = {quote: False, '"': True}
        quote_pattern = re.escape(quote)
        self._token = _token_pattern(
            f"{quote_pattern}.*?{quote_pattern}",
            JSON_STRING,
            word_pattern=rf"(?:(?!{quote_pattern})[^\s\[\]{{}}:,\"])+",
        )

    def call_rule(self, number: int, tool: Tool, specials: Specials) -> str:
        """Return the part of a grammar rule for one call in this format."""
        head, end = lark.quote(f"call:{tool.name}{{"), lark.tag_rule(f"{self._end}{self._call_end}", specials)
        return f"{head} @tool_{number} {end}"

    def value_grammars(self, argument: Argument, json: JsonGrammar, specials: Specials) -> Iterator[JsonGrammar]:
        """Yield the grammar of an argument. Texts are between the format's quotes; but texts within lists and objects,
        and texts with limits, are JSON strings, since only JSON has a grammar for them.
        """
        strings = sorted(argument.listed_strings)
        if argument.unenforced_keywords or not (strings or argument.is_free_text):
            yield json
            return
        quote = lark.tag_rule(self.text_end, specials)
        rules = [f"start: {quote} text {quote if strings else ''}"]
        rules += (
            lark.choice_rules("text", strings) if strings else lark.text_up_to_rules("text", self.text_end, specials)
        )
        if len(strings) != len(argument.listed_values) or not (strings or argument.types == {"string"}):
            rules[0] += f" | @{json['name']}_json"
            yield {**json, "name": f"{json['name']}_json"}
        yield {"name": json["name"], "lark_grammar": "\n".join(rules)}

    def parse(self, reader: AnswerReader, calls: AllowedCalls) -> Reading[None]:
        """Parse a whole answer in this format. See `CallFormat.parse`."""
        while (yield from reader.read_text_up_to(self.trigger)):
            tag = ""
            while tag != self._call_end:
                yield from reader.skip_blanks()
                if not tag:
                    yield from reader.skip_text("call:")
                name = yield from reader.read_run(TOOL_NAME)
                yield from reader.skip_blanks()
                yield from reader.skip_text("{")
                yield from self._read_arguments(reader, calls, name)
                yield from reader.skip_blanks()
                tag = yield from reader.read_one_of("call:", self._call_end)
                reader.end_call()
            reader.end_calls()

    def _quoted_to_json(self, quote: str, token: str) -> str:
        """Convert a string of Gemma's to a JSON string, as `_LiteralFormat._quoted_to_json` asks."""
        return token if quote == '"' else to_json_text(token[len(quote) : -len(quote)])


class Pythonic(_LiteralFormat):
    """The format of LFM2: `[NAME(KEY=VALUE, ...), ...]` with Python literals, or a list of calls as JSON."""

    name = "LFM2"
    trigger = PYTHONIC
    calls_opening = '"["'
    call_separator = ", "
    close = f"]{PYTHONIC_END}"
    _quotes = _PYTHON_QUOTES
    _token = _token_pattern(r"'(?:[^'\\]|\\.)*'", JSON_STRING, word_pattern=r"[^\s\[\]{}:,'\"]+")
    _key_end = "="
    _end = ")"

    def call_rule(self, number: int, tool: Tool, specials: Specials) -> str:
        """Return the part of a grammar rule for one call in this format."""
        return f'{lark.quote(f"{tool.name}(")} @tool_{number} ")"'

    def value_grammars(self, argument: Argument, json: JsonGrammar, specials: Specials) -> Iterator[JsonGrammar]:
        """Yield the grammar of an argument: that of JSON, since JSON strings are valid in Python."""
        yield json

    def parse(self, reader: AnswerReader, calls: AllowedCalls) -> Reading[None]:
        """Parse a whole answer in this format. See `CallFormat.parse`."""
        while (yield from reader.read_text_up_to(self.trigger)):
            yield from reader.skip_blanks()
            yield from reader.skip_text("[")
            sign = ","
            while sign == ",":
                yield from reader.skip_blanks()
                if (yield from reader.peek_char()) == "{":
                    yield from read_json_call(reader, calls)
                else:
                    name = yield from reader.read_run(TOOL_NAME)
                    yield from reader.skip_text("(")
                    yield from self._read_arguments(reader, calls, name)
                yield from reader.skip_blanks()
                sign = yield from reader.read_one_of(",", "]")
                if sign == "]":
                    yield from reader.skip_blanks()
                    yield from reader.skip_text(PYTHONIC_END)
                reader.end_call()
            reader.end_calls()

    def _quoted_to_json(self, quote: str, token: str) -> str:
        """Convert a Python string literal to JSON, with its escapes resolved."""
        unescaped = _ESCAPE.sub(_unescape, token[1:-1])
        try:  # the halves of a surrogate pair are one character
            return to_json_text(unescaped.encode("utf-16-le", "surrogatepass").decode("utf-16-le"))
        except UnicodeDecodeError:
            raise NotACall("half of a surrogate pair is no text") from None


def write_pythonic(name: str, arguments: Mapping[str, Any] | str) -> str:
    """Return a call as LFM2 writes it."""
    values = load_json(arguments) if isinstance(arguments, str) else arguments
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def value_to_json(text: str) -> str | None:
    """Convert a value in JSON, or else in Python, to JSON; None if it is neither. Templates write both."""
    with suppress(NotACall):
        parse_strict_json(text)
        return text.strip()
    with suppress(NotACall):
        return Pythonic()._literal_to_json(text)
    return None


_ESCAPE = re.compile(
    r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})|(.))", re.DOTALL
)
_SIGNS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}


def _unescape(match: re.Match[str]) -> str:
    """Return the character of an escape in a Python string literal."""
    octal, hex2, hex4, hex8, char = match.groups()
    if char is not None:
        return _SIGNS.get(char, char if char in "\\'\"" else f"\\{char}")
    return chr(int(octal, 8) if octal else int(hex2 or hex4 or hex8, 16))
