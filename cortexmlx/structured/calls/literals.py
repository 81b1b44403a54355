"""Formats in which arguments are literals, with or without quotes: Gemma 4, FunctionGemma and LFM2. They have no
grammar here.
"""

from __future__ import annotations

import re

from cortexmlx.structured.calls.argument import dumped
from cortexmlx.structured.calls.format import CallFormat, Calls, read_json_call
from cortexmlx.structured.calls.reader import AnswerReader, NotACall, Reading, json_value
from cortexmlx.structured.calls.tagged import TOOL_NAME

GEMMA, GEMMA_END = "<|tool_call>", "<tool_call|>"
FUNCTION_GEMMA = "<start_function_call>"
PYTHONIC, PYTHONIC_END = "<|tool_call_start|>", "<|tool_call_end|>"

_WORDS = {"True": "true", "False": "false", "None": "null"}


class _Literals(CallFormat):
    """A format whose values are literals: texts in quotes, and other values as in JSON or Python."""

    enforced = False
    _quotes: tuple[str, ...]
    _escapes = False
    _token: re.Pattern[str]
    """One part of a value: a text, a sign, blanks or a word."""

    def _read_arguments(self, reader: AnswerReader, calls: Calls, name: str, key_end: str, end: str) -> Reading[None]:
        """Read arguments up to the sign `end`, which is consumed."""
        known, said = calls.arguments(name), set[str]()
        reader.begin_call(name)
        yield from reader.blanks()
        sign = yield from reader.begins_with(end)
        yield from reader.exactly(sign)
        while sign != end:
            key = (yield from reader.up_to(key_end)).strip()
            if quote := next((q for q in self._quotes if len(q) > 1 and key.startswith(q)), ""):
                key = key.removeprefix(quote).removesuffix(quote)
            if key in said or not key or any(bracket in key for bracket in "{}[]()<>\n"):
                raise NotACall(f"{key!r:.80} comes twice, or is no name")
            written = (yield from reader.literal(self._quotes, f",{end}", self._escapes)).strip()
            value = known[key].json_of_literal(written, self._as_json(written))
            reader.add_arguments(f"{', ' if said else '{'}{dumped(key)}: {value}")
            said.add(key)
            sign = yield from reader.one_of(",", end)
            yield from reader.blanks()
            if sign == "," and (yield from reader.begins_with(end)):
                sign = yield from reader.one_of(end)
        reader.add_arguments("}" if said else "{}")

    def _as_json(self, written: str) -> str | None:
        """Return a literal as JSON; None if it is a plain word. Raises NotACall if it has quotes and is no literal."""
        tokens = self._token.findall(written)
        parts: list[str] = []
        for place, token in enumerate(tokens):
            quote = next((q for q in self._quotes if token.startswith(q) and len(token) > len(q)), "")
            if quote:
                parts.append(self._text(token[len(quote) : -len(quote)]))
            elif token[0] in "]}" and parts and parts[-1] == ",":
                parts[-1] = token
            elif token[0] in "[]{}:,":
                parts.append(token)
            elif tokens[place + 1 : place + 2] == [":"]:
                parts.append(dumped(token))
            else:
                parts.append(_WORDS.get(token, token))
        try:
            json_value(" ".join(parts))  # `1 2` is not 12
        except NotACall:
            if any(quote in written for quote in self._quotes):
                raise
            return None
        return "".join(parts)

    def _text(self, text: str) -> str:
        """Return a text that stood in quotes as JSON."""
        return dumped(text)


def _token(*texts: str, words: str) -> re.Pattern[str]:
    return re.compile("|".join([*texts, r"[\[\]{}:,]", words]), re.DOTALL)


class Braces(_Literals):
    """`call:NAME{KEY:VALUE,...}`, where texts stand between two of the same tags."""

    def __init__(self, name: str, begin: str, end: str, quote: str) -> None:
        self.name = name
        self.trigger = begin
        self._end = end
        self._quotes = (quote,)
        own = re.escape(quote)
        self._token = _token(f"{own}.*?{own}", words=rf"(?:(?!{own})[^\s\[\]{{}}:,])+")

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while (yield from reader.text_up_to(self.trigger)):
            tag = ""
            while tag != self._end:
                yield from reader.blanks()
                if not tag:
                    yield from reader.exactly("call:")
                name = yield from reader.run_of(TOOL_NAME)
                yield from reader.blanks()
                yield from reader.exactly("{")
                yield from self._read_arguments(reader, calls, name, ":", "}")
                yield from reader.blanks()
                tag = yield from reader.one_of("call:", self._end)
                reader.end_call()
            reader.end_calls()


class Pythonic(_Literals):
    """`[NAME(KEY=VALUE, ...), ...]`, with the literals of Python, or a list of calls as JSON."""

    name = "LFM2"
    trigger = PYTHONIC
    _quotes = "'", '"'
    _escapes = True
    _token = _token(r"'(?:[^'\\]|\\.)*'", r'"(?:[^"\\]|\\.)*"', words=r"[^\s\[\]{}:,'\"]+")

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while (yield from reader.text_up_to(self.trigger)):
            yield from reader.blanks()
            yield from reader.exactly("[")
            sign = ","
            while sign == ",":
                yield from reader.blanks()
                if (yield from reader.next_char()) == "{":
                    yield from read_json_call(reader, calls)
                else:
                    name = yield from reader.run_of(TOOL_NAME)
                    yield from reader.exactly("(")
                    yield from self._read_arguments(reader, calls, name, "=", ")")
                yield from reader.blanks()
                sign = yield from reader.one_of(",", "]")
                if sign == "]":
                    yield from reader.blanks()
                    yield from reader.exactly(PYTHONIC_END)
                reader.end_call()
            reader.end_calls()

    def _text(self, text: str) -> str:
        found = _ESCAPE.sub(_unescaped, text)
        try:  # the halves of a surrogate pair are one character
            return dumped(found.encode("utf-16-le", "surrogatepass").decode("utf-16-le"))
        except UnicodeDecodeError:
            raise NotACall("half of a surrogate pair is no text") from None


_ESCAPE = re.compile(
    r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})|(.))", re.DOTALL
)
_SIGNS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}


def _unescaped(found: re.Match[str]) -> str:
    octal, short, middle, long, sign = found.groups()
    if sign is not None:
        return _SIGNS.get(sign, sign if sign in "\\'\"" else f"\\{sign}")
    return chr(int(octal, 8) if octal else int(short or middle or long, 16))
