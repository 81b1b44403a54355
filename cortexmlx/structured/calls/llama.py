"""Llama 3.1 to 3.3: a JSON object that is the whole answer."""

from __future__ import annotations

from cortexmlx.errors import InvalidRequest
from cortexmlx.structured import lark
from cortexmlx.structured.calls.format import CallFormat, Calls, JsonGrammar, json_call, read_json_call
from cortexmlx.structured.calls.reader import AnswerReader, Reading
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.tool import Tool

PYTHON = "<|python_tag|>"
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
            tag = f"{lark.tag(PYTHON, specials)}?" if PYTHON in specials else ""
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
        if reader.untouched and (yield from reader.begins_with(PYTHON, "{")):
            reader.begin_calls()
            if (yield from reader.begins_with(PYTHON)):
                yield from reader.exactly(PYTHON)
            sign = ";"
            while sign:
                yield from read_json_call(reader, calls)
                reader.end_call()
                yield from reader.blanks()
                sign = yield from reader.begins_with(";")
                yield from reader.exactly(sign)
            reader.end_calls()
        yield from reader.text_up_to()
