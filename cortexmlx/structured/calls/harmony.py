"""Harmony, the format of gpt-oss: every message says its channel, and a call is a message to a function."""

from __future__ import annotations

from dataclasses import replace

from cortexmlx.structured import lark
from cortexmlx.structured.calls.format import CallFormat, Calls, JsonGrammar
from cortexmlx.structured.calls.reader import AnswerReader, NotACall, Reading
from cortexmlx.structured.lark import Specials
from cortexmlx.structured.thoughts import Thoughts
from cortexmlx.structured.tool import Tool

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
START, END, CALL = "<|start|>assistant", "<|end|>", "<|call|>"
FUNCTION = " to=functions."


class Harmony(CallFormat):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}`, once in an answer. A text for the
    user may come before it.
    """

    name = "harmony"
    trigger = CHANNEL
    separators = (",", ":")
    parallel = False

    def thoughts(self, thoughts: Thoughts | None) -> Thoughts | None:
        """See `CallFormat.thoughts`. Thoughts end with their message, and any message may follow."""
        return None if thoughts is None else replace(thoughts, close=f"{END}{START}", skipped="")

    def grammar(
        self, calls: Calls, text: str, specials: Specials, opens: str = ""
    ) -> tuple[list[str], list[JsonGrammar]]:
        """See `CallFormat.grammar`."""
        final = f"{lark.tag(f'{CHANNEL}final{MESSAGE}', specials)} {text or 'free_text'}"
        preamble = lark.tag(f"{CHANNEL}commentary{MESSAGE}", specials)
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
        first = lark.tag(f"{CHANNEL}commentary{to} {rest}", specials)
        second = lark.tag(f"{to}{CHANNEL}commentary {rest}", specials)
        return f"({first} | {second}) @tool_{number}"

    def parse(self, reader: AnswerReader, calls: Calls) -> Reading[None]:
        """See `CallFormat.parse`."""
        while tag := (yield from reader.begins_with(CHANNEL, FUNCTION, START)):
            reader.begin_calls()
            yield from reader.exactly(tag)  # it is text if this is no message: else it would be read again for ever
            header = tag + (yield from reader.up_to(MESSAGE))
            if FUNCTION in header:
                words = header.partition(FUNCTION)[2].replace(CHANNEL, " ").replace(CONSTRAIN, " ").split()
                reader.begin_call(calls.tool(words[0] if words else "").name)
                yield from reader.blanks()
                yield from reader.json_arguments()
                reader.end_call()
                if (yield from reader.begins_with(CALL, END)):
                    yield from reader.one_of(CALL, END)
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
    tags = "|".join(lark.escaped(each) for each in (CHANNEL, MESSAGE, START, END, CALL))
    return f"/{lark.ANY}/ & ~/{lark.ANY}({tags}){lark.ANY}/"
