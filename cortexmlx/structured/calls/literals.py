"""Formats in which arguments are literals, with or without quotes: Gemma 4, FunctionGemma and LFM2. They have no
grammar here.
"""

from __future__ import annotations

import re

from cortexmlx.structured.calls.argument import to_json_text
from cortexmlx.structured.calls.format import AllowedCalls, CallFormat, read_json_call
from cortexmlx.structured.calls.reader import AnswerReader, NotACall, Reading, parse_strict_json
from cortexmlx.structured.calls.tagged import TOOL_NAME

GEMMA, GEMMA_END = "<|tool_call>", "<tool_call|>"
FUNCTION_GEMMA = "<start_function_call>"
PYTHONIC, PYTHONIC_END = "<|tool_call_start|>", "<|tool_call_end|>"

_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


class _LiteralFormat(CallFormat):
    """A format whose arguments are literals: strings in quotes, and other values as in JSON or Python."""

    has_grammar = False
    _quotes: tuple[str, ...]
    _escapes = False
    _token: re.Pattern[str]
    """One part of a value: a text, a sign, blanks or a word."""

    def _read_arguments(
        self, reader: AnswerReader, calls: AllowedCalls, name: str, key_end: str, end: str
    ) -> Reading[None]:
        """Parse the arguments of a call up to the sign `end`, which is consumed."""
        arguments, seen_keys = calls.arguments(name), set[str]()
        reader.begin_call(name)
        yield from reader.skip_blanks()
        sign = yield from reader.peek_one_of(end)
        yield from reader.skip_text(sign)
        while sign != end:
            key = (yield from reader.read_up_to(key_end)).strip()
            if quote := next((q for q in self._quotes if len(q) > 1 and key.startswith(q)), ""):
                key = key.removeprefix(quote).removesuffix(quote)
            if key in seen_keys or not key or any(bracket in key for bracket in "{}[]()<>\n"):
                raise NotACall(f"{key!r:.80} comes twice, or is no name")
            raw_text = (yield from reader.read_literal(self._quotes, f",{end}", self._escapes)).strip()
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
                parts.append(self._quoted_to_json(token[len(quote) : -len(quote)]))
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

    def _quoted_to_json(self, text: str) -> str:
        """Convert a string that was written in quotes to JSON."""
        return to_json_text(text)


def _token_pattern(*texts: str, word_pattern: str) -> re.Pattern[str]:
    """Return the expression of one token of a literal: a string, a sign or a word."""
    return re.compile("|".join([*texts, r"[\[\]{}:,]", word_pattern]), re.DOTALL)


class Braces(_LiteralFormat):
    """The format of Gemma: `call:NAME{KEY:VALUE,...}`, with strings between two of the same tags."""

    def __init__(self, name: str, begin: str, end: str, quote: str) -> None:
        self.name = name
        self.trigger = begin
        self._end = end
        self._quotes = (quote,)
        quote_pattern = re.escape(quote)
        self._token = _token_pattern(
            f"{quote_pattern}.*?{quote_pattern}", word_pattern=rf"(?:(?!{quote_pattern})[^\s\[\]{{}}:,])+"
        )

    def parse(self, reader: AnswerReader, calls: AllowedCalls) -> Reading[None]:
        """Parse a whole answer in this format. See `CallFormat.parse`."""
        while (yield from reader.read_text_up_to(self.trigger)):
            tag = ""
            while tag != self._end:
                yield from reader.skip_blanks()
                if not tag:
                    yield from reader.skip_text("call:")
                name = yield from reader.read_run(TOOL_NAME)
                yield from reader.skip_blanks()
                yield from reader.skip_text("{")
                yield from self._read_arguments(reader, calls, name, ":", "}")
                yield from reader.skip_blanks()
                tag = yield from reader.read_one_of("call:", self._end)
                reader.end_call()
            reader.end_calls()


class Pythonic(_LiteralFormat):
    """The format of LFM2: `[NAME(KEY=VALUE, ...), ...]` with Python literals, or a list of calls as JSON."""

    name = "LFM2"
    trigger = PYTHONIC
    _quotes = "'", '"'
    _escapes = True
    _token = _token_pattern(r"'(?:[^'\\]|\\.)*'", r'"(?:[^"\\]|\\.)*"', word_pattern=r"[^\s\[\]{}:,'\"]+")

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
                    yield from self._read_arguments(reader, calls, name, "=", ")")
                yield from reader.skip_blanks()
                sign = yield from reader.read_one_of(",", "]")
                if sign == "]":
                    yield from reader.skip_blanks()
                    yield from reader.skip_text(PYTHONIC_END)
                reader.end_call()
            reader.end_calls()

    def _quoted_to_json(self, text: str) -> str:
        """Convert the inside of a Python string literal to JSON, with its escapes resolved."""
        unescaped = _ESCAPE.sub(_unescape, text)
        try:  # the halves of a surrogate pair are one character
            return to_json_text(unescaped.encode("utf-16-le", "surrogatepass").decode("utf-16-le"))
        except UnicodeDecodeError:
            raise NotACall("half of a surrogate pair is no text") from None


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
